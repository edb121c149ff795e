"""The start of a training process by part, and huge pages against small ones; docs/results/scaling.md has a table.

    python benchmarks/start.py --model gpt2-124M --size 4x64 --rounds 3

Each start is a process of its own. Those with huge and with small pages take turns, in an order that reverses each
round. The kernels must be in the cache, and judged: one start goes before, and is not counted. Weights are drawn while
kernels load, so these two parts overlap. CPU seconds say more than seconds where other processes run.
"""

from __future__ import annotations

import argparse
import json
import mmap
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from flags import size

PAGES = ("huge", "small")


def serve(model: str, B: int, T: int, pages: str) -> None:
    """Start, train a few steps, and print the seconds of each part."""
    parts: dict[str, float] = {}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def within(*args: Any, **given: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **given)
            finally:
                parts[name] = parts.get(name, 0.0) + time.perf_counter() - began

        return within

    def load() -> None:
        start_numba(None)
        from cpuopt.report import console, html  # noqa: F401  (as `cpuopt train` does)
        from cpuopt.train import job, trainer  # noqa: F401

    if pages == "small" and hasattr(mmap, "MADV_HUGEPAGE"):
        del mmap.MADV_HUGEPAGE
    start = time.perf_counter()
    from cpuopt.cli.common import start_numba

    timed("imports", load)()
    from cpuopt import engine
    from cpuopt.kernels.compile import jit
    from cpuopt.train import job

    engine.build = timed("program", engine.build)
    engine.Built.plan = timed("memory plan", engine.Built.plan)  # type: ignore[method-assign]
    jit.compile_kernels = timed("kernels", jit.compile_kernels)
    engine.initialize = timed("weights", engine.initialize)
    job.require_right = timed("judgements", job.require_right)  # type: ignore[attr-defined]
    prepared = job.prepare(job.Settings(model=model, B=B, T=T))
    timed("first step", prepared.take_step)()
    parts["to the end of the first step"] = time.perf_counter() - start
    parts["CPU to there"] = time.process_time()
    steps = [prepared.take_step().seconds for _ in range(3)]
    print(json.dumps({**parts, "a later step": median(steps)}))


def main() -> None:
    """Measure and print a table."""
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("--model", default="gpt2-124M", help="preset or JSON (gpt2-124M)")
    p.add_argument("--size", type=size, default="4x64", metavar="BxT")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--serve", choices=PAGES, help=argparse.SUPPRESS)
    args = p.parse_args()
    B, T = map(int, args.size.split("x"))
    if args.serve:
        serve(args.model, B, T, args.serve)
        return

    def once(pages: str) -> dict[str, float]:
        command = [sys.executable, __file__, "--model", args.model, "--size", args.size, "--serve", pages]
        said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        return dict(json.loads(said.splitlines()[-1]))

    once("huge")
    found: dict[str, list[dict[str, float]]] = {pages: [] for pages in PAGES}
    for number in range(args.rounds):
        for pages in PAGES if number % 2 == 0 else PAGES[::-1]:
            found[pages].append(once(pages))
    print(f"| {args.model} {args.size}, seconds, median of {args.rounds} | huge pages | small pages |")
    print("| --- | ---: | ---: |")
    for part in found["huge"][0]:
        print(f"| {part} | {' | '.join(f'{median(f[part] for f in found[pages]):.2f}' for pages in PAGES)} |")


if __name__ == "__main__":
    main()

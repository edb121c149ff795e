"""What bfloat16 gains: whole training steps that store in it what products and attention read, beside float32.

::

    python benchmarks/precision.py [--model gpt2-124M] [--sizes 1x16,1x64,4x64] [--rounds 8] [--threads N]

A third engine stores the moments in bfloat16 too. All are built in one process. Their kernels are checked at the sizes
of the run, and steps are compared in pairs on the same batch, each engine with that of float32. The losses of the first
steps must agree within what bfloat16 explains. Times are medians; memory is what the arena holds, planned.
"""

from __future__ import annotations

import argparse

import numpy as np
from sizes import sizes

from cpuopt import models
from cpuopt.check.gate import require_right, sized_of
from cpuopt.engine import Engine
from cpuopt.kernels.registry import Choice
from cpuopt.measure.comparison import compare, timer
from cpuopt.program.fuse import usual

FIRST, APART = 4, 1e-2
"""The steps whose losses are compared, and how far apart they may be: bfloat16 has 8 bits of precision."""


def row(model: str, B: int, T: int, rounds: int, threads: int | None) -> str:
    """Measure one size."""
    config = models.parse(model)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (B, T + 1))
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}

    def engine(**types: str) -> Engine:
        how = {"choice": Choice("optimized"), "fuse": usual("optimized", False), "threads": threads, **types}
        made = Engine(config.module(), config.specs(B, T), **how)
        require_right(made.kernels, sized_of([b.call for b in made.calls], made.kernels), threads=made.threads)
        return made

    engines = [engine(), engine(dtype="bfloat16"), engine(dtype="bfloat16", moments="bfloat16")]
    losses = np.array([[e.step(**batch).loss for _ in range(FIRST)] for e in engines])
    if not np.allclose(losses, losses[0], rtol=APART):
        raise SystemExit(f"{B}x{T}: losses {losses.tolist()}; expected those of all types to agree to {APART:g}")
    a, *others = engines
    cells = [f"{a.plan.total_bytes / 1e6:,.0f}"]
    for i, b in enumerate(others):
        found = compare(
            timer(lambda: a.step(**batch)), timer(lambda b=b: b.step(**batch)), analyses=[rounds], control=False
        )
        ms = [np.median(found.figures(letter)) / 1e6 for letter in "AB"]
        gains = 1 / np.array([found.verdict().ratio[name] for name in ("median", "high", "low")])
        cells += [f"{ms[0]:,.1f}"] * (not i)
        cells += [f"{b.plan.total_bytes / 1e6:,.0f}", f"{ms[1]:,.1f}", "{:.2f} [{:.2f}, {:.2f}]".format(*gains)]
    return f"| {model} {B}x{T} | {' | '.join(cells)} |"


def main() -> None:
    """Measure and print a table."""
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--model", default="gpt2-124M")
    p.add_argument("--sizes", type=sizes, default="1x16,1x64,4x64")
    p.add_argument("--rounds", type=int, default=8)
    p.add_argument("--threads", type=int)
    a = p.parse_args()
    head = ["", "float32, MB", "ms"]
    for name in ("bf16", "bf16 moments too"):
        head += [f"{name}, MB", "ms", "float32's time over it"]
    print(f"| {' | '.join(head)} |\n| --- |{' ---: |' * (len(head) - 1)}")
    for size in a.sizes:
        B, T = map(int, size.split("x"))
        print(row(a.model, B, T, a.rounds, a.threads), flush=True)


if __name__ == "__main__":
    main()

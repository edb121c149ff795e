"""What each rewrite gains: whole training steps without it, relative to steps with all of them.

::

    python benchmarks/rewrites.py [--sizes "nano 12x64"] [--rewrites recompute] [--rounds 24]

Both engines live in one process and take turns on the same batch; the losses of their first steps must agree. A trial
is as many steps as fill a twentieth of a second. A ratio above 1 is what a step costs without the rewrite: it gains
where the whole interval lies above 1.005, and loses where it lies below 0.995. A rewrite that changes nothing has no
row. Memory is what the arena needs without the rewrite, beyond what it needs with all of them.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from flags import some_of

from cpuopt import Engine, models
from cpuopt.machine import describe
from cpuopt.measure.comparison import CHECKED_STEPS, compare, disagreement, timer
from cpuopt.program.fuse import FUSIONS
from cpuopt.wording import spread

SIZES = {
    "nano 12x64": ("gpt2-nano", 12, 64),
    "baby 8x256": ("gpt2-baby", 8, 256),
    "stories 4x256": ("stories15M", 4, 256),
    "124M 1x64": ("gpt2-124M", 1, 64),
    "124M 4x64": ("gpt2-124M", 4, 64),
    "124M 1x1024": ("gpt2-124M", 1, 1024),
}
Clock = Callable[[], int]
TRIAL_S = 0.05
HEAD = """\
| model and size | without | step | control | the rewrite | memory, MB |
| --- | --- | --- | --- | --- | ---: |"""
WORDS = {"slower": "gains", "faster": "loses"}
"""The verdict on a rewrite, by that on the step without it."""


def rows(label: str, names: list[str], rounds: int, threads: int | None, clock: Clock) -> Iterator[str]:
    """Measure one model and size."""
    model, B, T = SIZES[label]
    config = models.parse(model)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (B, T + 1))
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}
    every = tuple(FUSIONS)

    def engine(*fuse: str) -> Engine:
        return Engine(*config.sized(B, T), fuse=fuse, threads=threads)

    a = engine(*every)
    known = [a.step(**batch).loss for _ in range(CHECKED_STEPS)]
    start = time.perf_counter()
    a.step(**batch)
    times = max(1, round(TRIAL_S / (time.perf_counter() - start)))
    for name in names:
        b = engine(*(n for n in every if n != name))
        if b.program.lines() == a.program.lines():
            continue
        if refused := disagreement(("with", "without"), known, [b.step(**batch).loss for _ in known]):
            raise SystemExit(refused)
        v = compare(*(timer(steps(e, batch, times), clock) for e in (a, b)), analyses=[rounds]).verdict()
        word = WORDS.get(v.word, v.word)
        more = (b.plan.total_bytes - a.plan.total_bytes) / 1e6
        yield f"| {label} | {name} | {spread(v.ratio)} | {spread(v.control)} | {word} | {more:+,.1f} |"


def steps(engine: Engine, batch: Mapping[str, Any], times: int) -> Callable[[], None]:
    """Return a function that runs some steps."""

    def run() -> None:
        for _ in range(times):
            engine.step(**batch)

    return run


def main() -> None:
    """Measure, and print the rows."""
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--sizes", type=some_of(SIZES), default=",".join(SIZES), help="of %(default)s")
    p.add_argument("--rewrites", type=some_of(FUSIONS), default=",".join(FUSIONS), help="of %(default)s")
    p.add_argument("--rounds", type=int, default=24, help="rounds of a comparison (%(default)s)")
    p.add_argument("--threads", type=int, default=None, help="number of threads; all cores by default")
    p.add_argument("--cpu", action="store_true", help="CPU time of one thread, where other processes use the cores")
    args = p.parse_args()
    threads, clock = (1, time.process_time_ns) if args.cpu else (args.threads, time.perf_counter_ns)
    print(HEAD)
    for label in args.sizes:
        for row in rows(label, args.rewrites, args.rounds, threads, clock):
            print(row, flush=True)
    how = "CPU time of one thread" if args.cpu else f"wall time of {args.threads or 'all'} threads"
    cpu, load = describe()["cpu"], os.getloadavg()[1]
    note = f"By `python benchmarks/rewrites.py` on {cpu}: {how}, {args.rounds} rounds, load average {load:.1f}."
    print(f"\n{note}")


if __name__ == "__main__":
    main()

"""What bfloat16 gains: whole training steps that store in it what products and attention read, beside float32.

::

    python benchmarks/precision.py [--model gpt2-124M] [--sizes 1x16,1x64,4x64] [--rounds 8] [--threads N]

Both engines are built in one process. Their kernels are checked at the sizes of the run, and steps are compared in
pairs on the same batch. The losses of the first steps must agree within what bfloat16 explains. Times are medians;
memory is what the arena holds, planned.
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
from cpuopt.wording import spread

FIRST, APART = 4, 1e-2
"""The steps whose losses are compared, and how far apart they may be: bfloat16 has 8 bits of precision."""


def row(model: str, B: int, T: int, rounds: int, threads: int | None) -> str:
    """Measure one size."""
    config = models.parse(model)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (B, T + 1))
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}

    def engine(dtype: str) -> Engine:
        how = {"choice": Choice("optimized"), "fuse": usual("optimized", False), "threads": threads, "dtype": dtype}
        made = Engine(config.module(), config.specs(B, T), **how)
        require_right(made.kernels, sized_of([b.call for b in made.calls], made.kernels), threads=made.threads)
        return made

    a, b = engine("float32"), engine("bfloat16")
    losses = np.array([[e.step(**batch).loss for _ in range(FIRST)] for e in (a, b)])
    if not np.allclose(*losses, rtol=APART):
        raise SystemExit(f"{B}x{T}: losses {losses.tolist()}; expected those of both types to agree to {APART:g}")
    found = compare(timer(lambda: a.step(**batch)), timer(lambda: b.step(**batch)), analyses=[rounds], control=False)
    ms = [f"{np.median(found.figures(letter)) / 1e6:,.1f}" for letter in "AB"]
    mb = [f"{e.plan.total_bytes / 1e6:,.0f}" for e in (a, b)]
    v = found.verdict()
    return f"| {B}x{T} | {' | '.join([*mb, *ms])} | {spread(v.ratio)} ({v.level:g} % interval) |"


def main() -> None:
    """Measure and print a table."""
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--model", default="gpt2-124M")
    p.add_argument("--sizes", type=sizes, default="1x16,1x64,4x64")
    p.add_argument("--rounds", type=int, default=8)
    p.add_argument("--threads", type=int)
    a = p.parse_args()
    print("| B x T | arena float32, MB | bfloat16, MB | step float32, ms | bfloat16, ms | bfloat16 / float32 |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for size in a.sizes:
        B, T = map(int, size.split("x"))
        print(row(a.model, B, T, a.rounds, a.threads), flush=True)


if __name__ == "__main__":
    main()

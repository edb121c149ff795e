"""The cost of the rewrite `recompute` in time and what it saves in memory: whole training steps, with and without it.

::

    python benchmarks/recompute.py [--model gpt2-124M] [--sizes 4x64,1x1024] [--rounds 8]

Both engines are built in one process and compared in pairs on the same batch; the losses of their first steps must
agree. Times are medians; memory is what the arena holds, planned.
"""

from __future__ import annotations

import argparse

import numpy as np
from sizes import sizes

from cpuopt.engine import Engine
from cpuopt.measure.comparison import CHECKED_STEPS, compare, disagreement, timer
from cpuopt.train.job import Settings, prepare
from cpuopt.wording import spread

WITHOUT = "gate,residual,layernorm,gelu,classifier,update"


def row(model: str, B: int, T: int, rounds: int) -> str:
    """Measure one size."""
    ids = np.random.default_rng(0).integers(0, 256, (B, T + 1))
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}

    def engine(fuse: str) -> Engine:
        return prepare(Settings(model=model, B=B, T=T, fuse=fuse), lambda done, total, name: None).engine

    a, b = engine(WITHOUT), engine("all")
    losses = ([e.step(**batch).loss for _ in range(CHECKED_STEPS)] for e in (a, b))
    if refused := disagreement(("without", "with"), *losses):
        raise SystemExit(refused)
    found = compare(timer(lambda: a.step(**batch)), timer(lambda: b.step(**batch)), analyses=[rounds], control=False)
    ms = [f"{np.median(found.figures(letter)) / 1e6:,.0f}" for letter in "AB"]
    mb = [f"{e.plan.total_bytes / 1e6:,.0f}" for e in (a, b)]
    v = found.verdict()
    return f"| {B}x{T} | {' | '.join([*mb, *ms])} | {spread(v.ratio)} ({v.level:g} % interval) |"


def main() -> None:
    """Measure and print a table."""
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--model", default="gpt2-124M")
    p.add_argument("--sizes", type=sizes, default="4x64,1x1024")
    p.add_argument("--rounds", type=int, default=8)
    a = p.parse_args()
    print("| B x T | arena without, MB | with, MB | step without, ms | with, ms | with / without |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for size in a.sizes:
        B, T = map(int, size.split("x"))
        print(row(a.model, B, T, a.rounds), flush=True)


if __name__ == "__main__":
    main()

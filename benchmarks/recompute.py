"""What the rewrite `recompute` costs in time and saves in memory: whole training steps, with and without it.

::

    python benchmarks/recompute.py [--model gpt2-124M] [--sizes 4x64,1x1024] [--rounds 4]

Both engines are built in one process and take turns, A B B A, on the same batch; their losses must be equal to float32
rounding. Times are medians, the ratio is the median of the rounds' ratios; memory is what the arena holds, planned.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import numpy as np

from cpuopt.train.job import Settings, prepare


def row(model: str, B: int, T: int, rounds: int) -> str:
    """Measure one size."""
    ids = np.random.default_rng(0).integers(0, 256, (B, T + 1))
    without, with_it = "residual,layernorm,gelu,classifier,update", "all"
    engines = [
        prepare(Settings(model=model, B=B, T=T, fuse=f), lambda done, total, name: None).engine
        for f in (without, with_it)
    ]
    times: list[list[float]] = [[], []]
    losses: list[list[float]] = [[], []]
    for number in range(rounds + 1):  # the first does not count
        for which in (0, 1, 1, 0):
            start = time.perf_counter()
            losses[which].append(engines[which].step(tokens=ids[:, :-1], targets=ids[:, 1:]).loss)
            if number:
                times[which].append(time.perf_counter() - start)
    assert np.allclose(*losses, rtol=1e-5), losses
    ratios = [sum(times[1][i : i + 2]) / sum(times[0][i : i + 2]) for i in range(0, 2 * rounds, 2)]
    sizes = [e.plan.total_bytes / 1e6 for e in engines]
    before, after = (median(t) * 1e3 for t in times)
    spread = f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
    return f"| {B}x{T} | {sizes[0]:,.0f} | {sizes[1]:,.0f} | {before:,.0f} | {after:,.0f} | {spread} |"


def main() -> None:
    """Measure and print a table."""
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--model", default="gpt2-124M")
    p.add_argument("--sizes", default="4x64,1x1024")
    p.add_argument("--rounds", type=int, default=4)
    a = p.parse_args()
    print("| B x T | arena without, MB | with, MB | step without, ms | with, ms | with / without |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for size in a.sizes.split(","):
        B, T = map(int, size.split("x"))
        print(row(a.model, B, T, a.rounds), flush=True)


if __name__ == "__main__":
    main()

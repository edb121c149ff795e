"""Share of the machine's multiply-add peak that whole training steps reach, measured beside them.

    python benchmarks/share.py --sizes 4x64 16x64 --rounds 9

The peak is timed before and after each step, as in ``matmul_steps``: on a shared machine it moves from one second to
the next. The step's FLOPs are 6·N·tokens, N = all parameters; the products' are those declared.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable
from statistics import median

import numpy as np
from matmul_steps import Steps
from sizes import size

from cpuopt.building import Bound
from cpuopt.kernels.toolkit import threads
from cpuopt.train.job import Settings, prepare


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=size, nargs="+", default=["4x64"], metavar="BxT")
    parser.add_argument("--model", default="gpt2-124M")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    cores = threads.set_threads(len(os.sched_getaffinity(0)))
    probe = Steps(16, 16, 16, cores)
    print("| B x T | step, ms | peak, GFLOP/s | whole step | its products |\n| --- | ---: | ---: | ---: | ---: |")
    for label in args.sizes:
        B, T = map(int, label.split("x"))
        engine = prepare(Settings(model=args.model, B=B, T=T), lambda done, total, name: None).engine
        weights = sum(p.nbytes // 4 for p in engine.program.parameters)
        ids = np.random.default_rng(0).integers(0, 256, (B, T + 1))
        spent = {"s": 0.0, "flops": 0}

        def timed(calls: Iterable[Bound], spent: dict[str, float] = spent) -> None:
            for bound in calls:
                start = time.perf_counter()
                bound.kernel.function(*bound.args)
                if bound.call.op.name.startswith(("matmul", "classifier")):
                    spent["s"] += time.perf_counter() - start
                    spent["flops"] += bound.call.flops

        engine.runner = timed
        engine.step(tokens=ids[:, :-1], targets=ids[:, 1:])
        found = []
        for _ in range(args.rounds):
            spent.update(s=0.0, flops=0)
            before, start = probe.peak(cores), time.perf_counter()
            engine.step(tokens=ids[:, :-1], targets=ids[:, 1:])
            took = time.perf_counter() - start
            peak = (before + probe.peak(cores)) / 2
            rates = 6 * weights * B * T / took / 1e9, spent["flops"] / spent["s"] / 1e9
            found.append((took, peak, *(100 * r / peak for r in rates)))
        took, peak, whole, products = (median(x) for x in zip(*found, strict=True))
        print(f"| {label} | {took * 1e3:,.0f} | {peak:.0f} | {whole:.0f} % | {products:.0f} % |")


if __name__ == "__main__":
    main()

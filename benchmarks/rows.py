"""The ops of a step but its matrix products: `vanilla` beside `optimized`, and their distance from the roof.

::

    python benchmarks/rows.py [--model gpt2-124M] [--sizes 4x64,1x1024] [--ops 'attention*'] [--threads N]

Each op is compared at each of its shapes, as by `cpuopt ab`: in pairs on the same arrays, on which both are judged. The
arrays stay where the call before left them: in a cache, where they fit. The roof is that of `cpuopt profile`: the FMA
peak, or the bandwidth of the smallest level that holds the arrays, each counted once. The last column is the share of
the same roof in a training step, where other calls have used the caches in between.
"""

from __future__ import annotations

import argparse
from fnmatch import fnmatchcase
from statistics import median

import numpy as np
from sizes import sizes

from cpuopt.cli.common import start_numba


def rows(model: str, B: int, T: int, ops: str, threads: int | None) -> None:
    """Measure each op of a model's step, and print a row for each of its shapes."""
    from cpuopt import kernels  # noqa: F401  (importing kernels registers them)
    from cpuopt.errors import UserError
    from cpuopt.kernels.registry import KERNELS
    from cpuopt.lab.ab import Shape, alone, cost, shapes_of
    from cpuopt.measure.rates import roofs
    from cpuopt.profiler import Profiler
    from cpuopt.train import job
    from cpuopt.wording import spread

    made = job.prepare(job.Settings(model=model, B=B, T=T, threads=threads))
    profiler = Profiler(made.engine)
    for _ in range(6):
        made.step(profiler.step)
    profiler.remove()
    within: dict[tuple[str, str], list[float]] = {}
    for bounds, marks in (run for step in list(profiler.steps)[1:] for run in step.runs):
        for bound, ns in zip(bounds, np.diff(marks), strict=True):
            within.setdefault((bound.call.op.name, bound.call.layer), []).append(float(ns))
    roof = roofs(made.engine.threads)
    for op in dict.fromkeys(c.op for c in made.engine.program.calls):
        if op.name.startswith(("matmul", "classifier")) or not fnmatchcase(op.name, ops):
            continue
        for shape in shapes_of([c for c in made.engine.program.calls if c.op is op]):
            one = Shape(shape.case, shape.adds, shape.layers[:1])
            pair = KERNELS[op.name, "optimized"], KERNELS[op.name, "vanilla"]
            calls = f"{op.name} | {shape.case} | {len(shape.layers)}"
            try:
                found = alone(pair, [one], analyses=(12, 24))
            except UserError as e:
                print(f"| {calls} | {e} | | | | | |", flush=True)
                continue
            least, name = roof.bound(*cost(op, shape).values())
            here = median(t for layer in shape.layers for t in within[op.name, layer])
            print(
                f"| {calls} | {1e3 * found['b_ms']:.1f} | {1e3 * found['a_ms']:.1f} | {spread(found['ratio'], 2)} "
                f"| {name} | {least / found['a_ms'] / 1e4:.0f} % | {100 * least / here:.0f} % |",
                flush=True,
            )


def main() -> None:
    """Print a table for each size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="gpt2-124M")
    parser.add_argument("--sizes", type=sizes, default="4x64,1x1024")
    parser.add_argument("--ops", default="*")
    parser.add_argument("--threads", type=int)
    asked = parser.parse_args()
    start_numba(asked.threads)
    for B, T in (map(int, size.split("x")) for size in asked.sizes):
        print(f"\n{asked.model} {B}x{T}\n")
        print("| op | shape | calls | vanilla, µs | optimized, µs | ratio | roof | alone | in a step |")
        print("|---|---|---:|---:|---:|---:|---|---:|---:|")
        rows(asked.model, B, T, asked.ops, asked.threads)


if __name__ == "__main__":
    main()

"""Generated backward kernels beside the hand-written vanilla ones: each op alone, and whole training steps.

Run: python benchmarks/generated.py [--steps] [--ops NAME ...]. It prints Markdown tables; docs/ad.md has them.
Each kernel is checked against its float64 reference before it is timed. Times are medians of rounds that run
vanilla, generated, generated, vanilla, so that a slow spell of the machine meets both.
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("NUMBA_NUM_THREADS", "2")

import numpy as np

import cpuopt.kernels  # noqa: F401
from cpuopt import Choice, Engine, ops
from cpuopt.check.cases import arguments, case
from cpuopt.check.check import check_all
from cpuopt.kernels import registry
from cpuopt.models import gpt2, specs

SIZES = {"B": 4, "T": 64, "C": 768, "NH": 12, "OC": 3072, "V": 50257, "maxT": 1024}


def prepared(kernel, op, given, sizes):
    """The arguments of a kernel, gradients overwritten."""
    args = []
    for a in op.args:
        x = given[a.name]
        args.append(np.empty((0,) * len(a.shape), a.dtype) if x is None else x)
        args += [False] if a.role == "acc" else []
    args += [np.empty(s.elements(sizes), np.float32) for s in kernel.scratch]
    return args


def compare(op, rounds):
    """Median seconds of vanilla and of generated."""
    kernels = [registry.KERNELS[op.name, v] for v in ("vanilla", "generated")]
    for result in check_all(kernels, quick=True):
        if result.verdict != "PASS":
            raise SystemExit(f"{result}")
    chosen = case(op, SIZES)
    given = arguments(op, chosen, np.random.default_rng(0))
    args = [prepared(k, op, {n: np.copy(x) if isinstance(x, np.ndarray) else x for n, x in given.items()}, chosen.sizes)
            for k in kernels]  # fmt: skip
    times = [[], []]
    for _ in range(rounds):
        for which in (0, 1, 1, 0):
            start = time.perf_counter()
            kernels[which].function(*args[which])
            times[which].append(time.perf_counter() - start)
    return [statistics.median(t[2:]) for t in times]


def steps(count):
    """Median seconds of a step of GPT-2 124M for each choice of kernels, the choices in turns."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50257, (4, 65))
    engines = {}
    for name, choice in {
        "vanilla": Choice("vanilla"),
        "vanilla, backward generated": Choice("vanilla", ["*_backward*=generated"]),
        "optimized": Choice("optimized"),
    }.items():
        model = gpt2.GPT2(gpt2.PRESETS["gpt2-124M"])
        engines[name] = Engine(model, specs(4, 64), choice=choice)
    times = {name: [] for name in engines}
    losses = {name: [] for name in engines}
    for _ in range(count):
        for name in [*engines, *reversed(engines)]:
            start = time.perf_counter()
            loss = engines[name].step(tokens=tokens[:, :-1], targets=tokens[:, 1:]).loss
            times[name].append(time.perf_counter() - start)
            losses[name].append(loss)
    return times, losses


def main():
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=0, help="also time whole steps, this many rounds")
    parser.add_argument("--ops", nargs="*")
    args = parser.parse_args()
    print("| op | vanilla, ms | generated, ms | ratio |\n| --- | ---: | ---: | ---: |")
    for name, op in ops.ALL.items():
        if (name, "generated") in registry.KERNELS and (not args.ops or name in args.ops):
            a, b = compare(op, args.rounds)
            print(f"| {name} | {1e3 * a:.2f} | {1e3 * b:.2f} | {b / a:.2f} |", flush=True)
    if args.steps:
        times, losses = steps(args.steps)
        print("\n| kernels | step, ms | loss after the last step |\n| --- | ---: | ---: |")
        for name, t in times.items():
            print(f"| {name} | {1e3 * statistics.median(t[1:]):.0f} | {losses[name][-1]:.6f} |")


if __name__ == "__main__":
    main()

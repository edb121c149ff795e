"""Generated backward kernels beside the hand-written vanilla ones: each op alone, and whole training steps.

Run: python benchmarks/generated.py [--steps ROUNDS] [--ops NAME ...]. It prints Markdown tables; docs/ad.md has them.
Each kernel is judged on the arrays that are timed. Times are medians of rounds in pairs.
"""

import argparse
import os

os.environ.setdefault("NUMBA_NUM_THREADS", "2")

import numpy as np

import cpuopt.kernels  # noqa: F401
from cpuopt import Choice, ops
from cpuopt.check.cases import case
from cpuopt.engine import Engine
from cpuopt.kernels import registry
from cpuopt.lab.ab import Shape, alone
from cpuopt.measure.comparison import compare, timer
from cpuopt.models import gpt2, specs
from cpuopt.wording import spread

SIZES = {"B": 4, "T": 64, "C": 768, "NH": 12, "OC": 3072, "V": 50257, "maxT": 1024}
CHOICES = {
    "vanilla": Choice("vanilla"),
    "vanilla, backward generated": Choice("vanilla", ["*_backward*=generated"]),
    "optimized": Choice("optimized"),
}


def row(op, rounds):
    """Compare both kernels of an op, gradients overwritten."""
    pair = registry.KERNELS[op.name, "vanilla"], registry.KERNELS[op.name, "generated"]
    shape = Shape(case(op, SIZES), {a.name: False for a in op.args if a.role == "acc"}, (op.name,))
    found = alone(pair, [shape], analyses=[rounds])
    return f"| {op.name} | {found['a_ms']:.2f} | {found['b_ms']:.2f} | {spread(found['ratio'], 2)} |"


def steps(rounds):
    """Compare steps of GPT-2 124M with each choice of kernels with those of vanilla; yield rows of a table."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50257, (4, 65))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}

    def timed(choice):
        engine = Engine(gpt2.GPT2(gpt2.PRESETS["gpt2-124M"]), specs(4, 64), choice=choice)
        return engine.step(**batch).loss, timer(lambda: engine.step(**batch))

    _, vanilla = timed(CHOICES["vanilla"])
    for name, choice in CHOICES.items():
        loss, trial = timed(choice)
        found = compare(vanilla, trial, analyses=[rounds], control=False)
        ms, ratio = np.median(found.figures("B")) / 1e6, spread(found.verdict().ratio, 2)
        yield f"| {name} | {ms:.0f} | {ratio} | {loss:.6f} |"


def main():
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=0, help="rounds of whole steps, timed too (%(default)s)")
    parser.add_argument("--ops", nargs="*")
    args = parser.parse_args()
    print("| op | vanilla, ms | generated, ms | ratio |\n| --- | ---: | ---: | ---: |")
    for name, op in ops.ALL.items():
        if (name, "generated") in registry.KERNELS and (not args.ops or name in args.ops):
            print(row(op, args.rounds), flush=True)
    if args.steps:
        print("\n| kernels | step, ms | ratio to vanilla | loss of the first step |\n| --- | ---: | ---: | ---: |")
        for line in steps(args.steps):
            print(line, flush=True)


if __name__ == "__main__":
    main()

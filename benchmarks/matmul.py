"""GFLOP/s of the three matrix products of a linear layer, variants side by side in one run.

    python benchmarks/matmul.py
    python benchmarks/matmul.py --tokens 16 64 --shapes 768x50257 --variants vanilla blas optimized --rounds 9

Each product is checked against float64 before its speed is shown. The first variant is compared with each other one in
pairs. A trial begins with a pause and an untimed call: the threads of OpenMP and of OpenBLAS go on spinning for a
while, and slow the other down. Several weights alternate, so that they come from memory, as in training.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from cpuopt import kernels, ops  # noqa: F401  (importing kernels registers them)
from cpuopt.kernels.registry import KERNELS
from cpuopt.kernels.toolkit import threads
from cpuopt.measure.comparison import Comparison, compare, timer
from cpuopt.program.arena import ALIGN, Arena
from cpuopt.program.program import Value

Array = np.ndarray[Any, Any]
PRODUCTS = {
    "forward": ops.matmul_forward,
    "dinp": ops.matmul_backward_input,
    "dweight": ops.matmul_backward_weight,
}
GPT2 = ["768x2304", "768x768", "768x3072", "3072x768", "768x50257"]
"""The layers of GPT-2 124M: features in x features out."""
PAUSE = 0.15
"""Seconds: OpenBLAS's threads have stopped spinning by then."""
COLD = 48 << 20
"""Bytes of the alternating weights: more than a core's share of any cache."""
SAMPLE = 64
"""Rows or columns of a product that are checked against float64; all of it must be finite."""


class Memory:
    """Arrays as the engine has them: on cache lines, in huge pages."""

    def __init__(self, floats: int) -> None:
        self.arena, self.end = Arena(4 * floats), 0

    def array(self, *shape: int) -> Array:
        """Allocate, and write everything once, so that no page is touched for the first time later."""
        found = self.arena.view(Value("", shape), self.end, shape)
        self.end += -(-4 * prod(shape) // ALIGN) * ALIGN
        found.fill(0)
        return found


class Layer:
    """The arrays of one linear layer, with several weights."""

    def __init__(self, M: int, C: int, OC: int, variants: list[str]) -> None:
        self.sizes = {"BT": M, "C": C, "OC": OC}
        self.scratch = {
            (op.name, v): [s.elements(self.sizes) for s in KERNELS[op.name, v].scratch]
            for op in PRODUCTS.values()
            for v in variants
        }
        many = -(-COLD // (4 * C * OC))
        floats = many * C * OC + 2 * M * (C + OC) + sum(map(sum, self.scratch.values())) + 64 * (many + 64)
        self.memory, rng = Memory(floats), np.random.default_rng(0)
        self.inp, self.dout = self.memory.array(M, C), self.memory.array(M, OC)
        self.out, self.dinp = self.memory.array(M, OC), self.memory.array(M, C)
        self.weights = [self.memory.array(OC, C) for _ in range(many)]
        for x in (self.inp, self.dout, *self.weights):
            rng.standard_normal(out=x, dtype=np.float32)

    def calls(self, product: str, variant: str) -> list[Callable[[], None]]:
        """Bind a kernel to each weight; `dweight` overwrites the weights."""
        kernel = KERNELS[PRODUCTS[product].name, variant]
        scratch = [self.memory.array(n) for n in self.scratch[kernel.op.name, variant]]
        none = np.empty(0, np.float32)
        arguments: dict[str, Callable[[Array], tuple[Any, ...]]] = {
            "forward": lambda w: (self.out, self.inp, w, none),
            "dinp": lambda w: (self.dinp, False, self.dout, w),
            "dweight": lambda w: (w, False, none, False, self.dout, self.inp),
        }
        bound = [(*arguments[product](w), *scratch) for w in self.weights]
        return [lambda args=args: kernel.function(*args) for args in bound]

    def error(self, product: str) -> float:
        """Largest error of some rows or columns, relative to the largest element."""
        inp, dout, weight = (x.astype(np.float64) for x in (self.inp, self.dout, self.weights[0]))
        got: Array = {"forward": self.out, "dinp": self.dinp, "dweight": self.weights[0].T}[product]
        some = np.random.default_rng(1).choice(got.shape[1], min(SAMPLE, got.shape[1]), replace=False)
        if product == "forward":
            want = inp @ weight[some].T
        elif product == "dinp":
            want = dout @ weight[:, some]
        else:
            want = inp.T @ dout[:, some]
        if not np.isfinite(got).all():
            return float("inf")
        return float(np.abs(got[:, some] - want).max() / np.abs(want).max())


def trial(calls: list[Callable[[], None]]) -> float:
    """Wait, warm up, and return the median ns of a call."""
    time.sleep(PAUSE)
    calls[-1]()
    return float(np.median([timer(call)() for call in calls]))


def measure(layer: Layer, product: str, variants: list[str], rounds: int) -> list[Comparison]:
    """Check all variants, then compare the first with each other one, or with itself where it is alone."""
    calls = {v: layer.calls(product, v) for v in variants}
    for v in variants:
        layer.out.fill(np.nan)
        layer.dinp.fill(np.nan)
        calls[v][0]()
        if not (error := layer.error(product)) < 1e-5:
            raise SystemExit(f"{product}, {layer.sizes}: {v} is wrong by {error:.1e} of the largest element")
    first, *others = (partial(trial, calls[v]) for v in variants)
    more = {"analyses": [rounds], "control": False, "warm_up": False}
    return [compare(first, other, **more) for other in others or [first]]


def main() -> None:
    """Print a row for each product, shape and number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--shapes", nargs="+", default=GPT2, metavar="CxOC")
    parser.add_argument("--products", nargs="+", choices=PRODUCTS, default=list(PRODUCTS))
    parser.add_argument("--variants", nargs="+", default=["blas", "optimized"])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    count = threads.set_threads(args.threads)
    threadpool_limits(count, user_api="blas")
    first, *others = args.variants
    print(f"{count} threads, load {os.getloadavg()[0]:.1f} before the run; GFLOP/s, median of {args.rounds} rounds")
    print(f"{'tokens':>6} {'C':>5} {'OC':>6}  {'product':8}" + "".join(f"{v:>11}" for v in args.variants), end="")
    print("".join(f"   {v}'s time over {first}'s" for v in others))
    for M in args.tokens:
        for shape in args.shapes:
            C, OC = map(int, shape.split("x"))
            layer = Layer(M, C, OC, args.variants)
            for product in args.products:
                found = measure(layer, product, args.variants, args.rounds)
                times = [found[0].figures("A"), *(c.figures("B") for c in found)][: len(args.variants)]
                print(f"{M:6} {C:5} {OC:6}  {product:8}", end="")
                print("".join(f"{2 * M * C * OC / np.median(t):11.1f}" for t in times), end="")
                print("".join(f"   {found[i].verdict()}" for i in range(len(others))), flush=True)


if __name__ == "__main__":
    main()

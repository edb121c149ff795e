"""From the naive matrix product to the optimized kernel, one step at a time, in one run.

    python benchmarks/matmul_steps.py [--tokens 256] [--shape 768x3072] [--rounds 9] [--into docs/kernels/matmul.md]

Every step computes out = inp @ weight^T and is checked against float64 before it is timed. The trials of the steps
alternate, forth and back; each also times the multiply-adds of one tile that stays in the first-level cache, on one
thread and on all: the peak that a step is compared with, since a shared machine's clock varies. With --into, the table
replaces the text between ``<!-- steps -->`` and ``<!-- /steps -->`` in a file.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numba import prange

from cpuopt import kernels as _registered  # noqa: F401
from cpuopt.kernels.compile.jit import helper
from cpuopt.kernels.optimized._forward import WIDE, pack_tokens_by
from cpuopt.kernels.registry import KERNELS
from cpuopt.kernels.toolkit import threads
from cpuopt.kernels.toolkit.micro.generic import FLOATS
from cpuopt.kernels.toolkit.simd import LANES, MR, NR, at, product
from cpuopt.program.arena import Arena
from cpuopt.program.program import Value

Array = np.ndarray[Any, Any]
DEPTH = 256  # of the tile that measures the peak: both operands fill 22 KB
SAMPLE = 16


@helper(fastmath=False)
def in_order(out, inp, weight):
    """One dot product an element, its sum in the order that is written."""
    for bt in range(out.shape[0]):
        for o in range(out.shape[1]):
            val = np.float32(0)
            for i in range(inp.shape[1]):
                val += inp[bt, i] * weight[o, i]
            out[bt, o] = val


@helper()
def reassociated(out, inp, weight):
    """The same text; the compiler may sum in another order, so eight lanes at a time."""
    for bt in range(out.shape[0]):
        for o in range(out.shape[1]):
            val = np.float32(0)
            for i in range(inp.shape[1]):
                val += inp[bt, i] * weight[o, i]
            out[bt, o] = val


@helper()
def weight_outside(out, inp, weight):
    """A row of weight, which comes from memory, is used for all tokens before the next one."""
    for o in range(out.shape[1]):
        for bt in range(out.shape[0]):
            val = np.float32(0)
            for i in range(inp.shape[1]):
                val += inp[bt, i] * weight[o, i]
            out[bt, o] = val


pack_tokens = pack_tokens_by(FLOATS)


@helper()
def tiled(out, inp, weight, panels, tile, rows, whole):
    """Pack the tokens in panels of NR; `rows` rows of weight times a panel are a tile of sums in registers.

    Loops: rows of weight outside, panels inside; with `whole`, panels outside.
    """
    M, K = inp.shape
    N = weight.shape[0]
    for m in range(0, M, NR):
        pack_tokens(panels, inp, m, 0, K)
    if whole:
        for m in range(0, M, NR):
            for n in range(0, N, rows):
                one_tile(out, weight, panels, tile, m, n, min(rows, N - n))
    else:
        for n in range(0, N, rows):
            for m in range(0, M, NR):
                one_tile(out, weight, panels, tile, m, n, min(rows, N - n))


@helper()
def one_tile(out, weight, panels, tile, m, n, rows):
    """Compute `rows` columns of `out` for a panel of tokens."""
    K = weight.shape[1]
    product(rows, at(weight, n * K), K, 1, at(panels, m * K), NR, at(tile, 0), NR, K, False, at(panels, 0), 0, 0)
    for j in range(min(NR, out.shape[0] - m)):
        for i in range(rows):
            out[m + j, n + i] = tile[i * NR + j]


@helper(parallel=True)
def peak(a, b, c, n):
    """Multiply one tile again and again, on every thread."""
    for t in prange(c.shape[0]):
        for _ in range(n):
            product(MR, at(a, 0), DEPTH, 1, at(b, 0), NR, at(c[t], 0), NR, DEPTH, False, at(b, 0), 0, 0)


class Steps:
    """The arrays, and the functions that are timed on them."""

    def __init__(self, tokens: int, features: int, outputs: int, cores: int) -> None:
        self.cores, self.flops = cores, 2 * tokens * features * outputs
        rng = np.random.default_rng(0)
        self.inp, self.weight = self.array(tokens, features, rng=rng), self.array(outputs, features, rng=rng)
        self.out, self.tile = self.array(tokens, outputs), self.array(MR * NR)
        self.panels = self.array(-(-tokens // NR) * NR * features + NR)
        kernel = KERNELS["matmul_forward", "optimized"]
        kernel.compile()
        sizes = {"BT": tokens, "C": features, "OC": outputs}
        scratch = [self.array(s.elements(sizes)) for s in kernel.scratch]
        none = np.empty(0, np.float32)
        self.tiles = self.array(MR * DEPTH, rng=rng), self.array(NR * DEPTH, rng=rng), self.array(cores, 1024)
        self.steps: dict[str, tuple[int, Callable[[], None]]] = {
            "as the formula is written": (1, lambda: in_order(self.out, self.inp, self.weight)),
            "sums in any order: vectors": (1, lambda: reassociated(self.out, self.inp, self.weight)),
            "weight outside, tokens inside": (1, lambda: weight_outside(self.out, self.inp, self.weight)),
            **{f"tile of {n} x {NR} sums": (1, lambda n=n: self.tiled(n, whole=True)) for n in sorted({1, 2, 4, MR})},
            "rows of weight outside": (1, lambda: self.tiled(MR, whole=False)),
            "blocks, with prefetching": (1, lambda: self.optimized(kernel, none, scratch, 1)),
            f"{cores} threads": (cores, lambda: self.optimized(kernel, none, scratch, cores)),
        }

    @staticmethod
    def array(*shape: int, rng: np.random.Generator | None = None) -> Array:
        """Allocate as the engine does, on cache lines and huge pages."""
        n = int(np.prod(shape))
        x = Arena(4 * n).view(Value("", (n,)), 0, shape)
        x[...] = rng.standard_normal(shape, np.float32) if rng else 0
        return x

    def tiled(self, rows: int, whole: bool) -> None:
        """Run the tile without blocks."""
        tiled(self.out, self.inp, self.weight, self.panels, self.tile, rows, whole)

    def optimized(self, kernel: Any, none: Array, scratch: list[Array], n: int) -> None:
        """Run the kernel."""
        threads.set_threads(n)
        kernel.function(self.out, self.inp, self.weight, none, *scratch)

    def check(self) -> None:
        """Refuse a step that is wrong.

        Raises
        ------
        SystemExit
            Naming it.
        """
        rows = slice(None, None, max(1, len(self.inp) // SAMPLE))
        want = self.inp[rows].astype(np.float64) @ self.weight.T.astype(np.float64)
        for name, (_, step) in self.steps.items():
            self.out.fill(np.nan)
            step()
            if not np.abs(self.out[rows] - want).max() < 1e-3 * np.abs(want).max() or np.isnan(self.out).any():
                raise SystemExit(f"matmul_steps: {name!r} is wrong")

    def peak(self, cores: int) -> float:
        """GFLOP/s of multiply-adds alone."""
        a, b, c = self.tiles
        rounds = 20_000
        threads.set_threads(cores)
        start = time.perf_counter()
        peak(a, b, c[:cores], rounds)
        return 2 * MR * NR * DEPTH * rounds * cores / (time.perf_counter() - start) / 1e9

    def measure(self, rounds: int) -> list[str]:
        """Time all steps in alternating trials; return the rows of a table."""
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in self.steps}
        self.peak(self.cores)
        for r in range(rounds):
            for name, (cores, step) in list(self.steps.items())[:: -1 if r % 2 else 1]:
                before = self.peak(cores)
                start = time.perf_counter()
                step()
                rate = self.flops / (time.perf_counter() - start) / 1e9
                found[name].append((rate, rate / ((before + self.peak(cores)) / 2)))
        rows, last = (
            ["| step | GFLOP/s | times the one before | share of the peak |", "| --- | ---: | ---: | ---: |"],
            0.0,
        )
        for name, pairs in found.items():
            rate, share = (median(x) for x in zip(*pairs, strict=True))
            gain = f"{rate / last:.2f}" if last else ""
            rows.append(f"| {name} | {rate:.1f} | {gain} | {100 * share:.0f} % |")
            last = rate
        return rows


def main() -> None:
    """Measure, print, and put the table into a page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=WIDE)
    parser.add_argument("--shape", default="768x3072", help="features x outputs")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--into", type=Path)
    args = parser.parse_args()
    features, outputs = map(int, args.shape.split("x"))
    cores = threads.set_threads(len(os.sched_getaffinity(0)))
    steps = Steps(args.tokens, features, outputs, cores)
    steps.check()
    note = f"{args.tokens} tokens, {features} to {outputs} features, float32, {LANES} lanes."
    table = "\n".join([*steps.measure(args.rounds), "", f"{note} Medians of {args.rounds} rounds."])
    print(table)
    if args.into:
        text = args.into.read_text()
        args.into.write_text(
            re.sub(r"(<!-- steps -->\n).*?(<!-- /steps -->)", rf"\1\n{table}\n\n\2", text, flags=re.DOTALL)
        )


if __name__ == "__main__":
    main()

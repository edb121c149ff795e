"""Every op but the matrix product at the sizes of GPT-2 124M: `vanilla` beside `optimized`.

::

    python benchmarks/rows.py [--threads N] [--sizes 4x64,1x1024] [--ops 'attention*']

A kernel is timed only after it has passed its check, in this run; at the sizes timed, where the float64 reference
would take gigabytes, the two variants must agree. They take turns, A B B A, on the same arrays, which lie in the caches
as far as they fit. The times are medians, the ratio is the median of the rounds' ratios. GB/s counts each array once
(twice where it is read and written), so it says how far from memory's speed an op is, not what it really moves.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from fnmatch import fnmatchcase
from statistics import median
from typing import Any

import numpy as np

from cpuopt import kernels, ops  # noqa: F401  (importing kernels registers them)
from cpuopt.check.cases import Case, arguments
from cpuopt.check.check import check_all
from cpuopt.kernels.registry import KERNELS, Kernel
from cpuopt.kernels.toolkit.threads import set_threads
from cpuopt.ops.declaration import Op

MODEL = {"C": 768, "NH": 12, "V": 50257, "maxT": 1024}
VARIANTS = ("vanilla", "optimized")
ADDS = {("embedding_backward", "dwte")}
"""Gradients that are added to: the head has written that of the tied weight already. The others are overwritten."""
ROUNDS, SECONDS = 25, 2.0
"""Rounds of one row: so many, or as many as fit into the time; one at least."""
AGREE = 1e-3
"""Largest difference between the variants, in units of the result's root mean square, that rounding explains."""


def sizes(op: Op, b: int, t: int) -> dict[str, int]:
    """Give an op the sizes that it has in GPT-2: GELU on 4C channels, AdamW and the norm on the largest weight."""
    tokens = b * t
    n = {"gelu": tokens * 4 * 768, "residual": tokens * 768}.get(op.name.split("_")[0], 50257 * 768)
    rows = min(tokens, 256) if "V" in op.symbols else tokens  # logits of more would take gigabytes to check
    known = {**MODEL, "B": b, "T": t, "BT": rows, "N": n}
    return {s: known[s] for s in op.symbols}


def aligned(x: Any) -> Any:
    """Copy an array to where a cache line begins, as the engine's arena has it."""
    if not isinstance(x, np.ndarray):
        return x
    room = np.empty(x.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    y = room[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    y[...] = x
    return y


def bind(kernel: Kernel, given: Mapping[str, Any], on: Mapping[str, int]) -> list[Any]:
    """Order a kernel's arguments."""
    args: list[Any] = []
    for a in kernel.op.args:
        args += [given[a.name], (kernel.op.name, a.name) in ADDS] if a.role == "acc" else [given[a.name]]
    return args + [aligned(np.zeros(s.elements(on), np.float32)) for s in kernel.scratch]


def difference(op: Op, given: Mapping[str, Any], calls: list[tuple[Any, list[Any]]]) -> float:
    """Call each variant from the same start; give the largest difference, in units of the root mean square."""
    start = {a.name: given[a.name].copy() for a in op.written}
    results = []
    for function, args in calls:
        for name, x in start.items():
            given[name][...] = x if np.isfinite(x).all() else 0
        function(*args)
        results.append({name: given[name].copy() for name in start})
    one, other = results
    apart = [np.abs(one[n] - other[n]).max() / (np.sqrt(np.mean(one[n] ** 2, dtype=np.float64)) + 1e-30) for n in start]
    return float(max(apart))


def timed(function: Any, args: list[Any]) -> float:
    """Time one call."""
    start = time.perf_counter()
    function(*args)
    return time.perf_counter() - start


def row(op: Op, b: int, t: int) -> str:
    """Measure an op at one size."""
    on = sizes(op, b, t)
    given = {n: aligned(x) for n, x in arguments(op, Case(on), np.random.default_rng(0)).items()}
    both = [KERNELS[op.name, v] for v in VARIANTS]
    calls = [(k.function, bind(k, given, on)) for k in both]
    apart = difference(op, given, calls)
    if not apart < AGREE:
        return f"| {op.name} | {b}x{t} | the variants differ by {apart:.2g} | | | |"
    times: list[list[float]] = [[], []]
    end = time.perf_counter() + SECONDS
    while not times[0] or (len(times[0]) < 2 * ROUNDS and time.perf_counter() < end):
        for which in (0, 1, 1, 0):
            times[which].append(timed(*calls[which]))
    ratio = median(sum(times[0][i : i + 2]) / sum(times[1][i : i + 2]) for i in range(0, len(times[0]), 2))
    slow, fast = (median(x) for x in times)
    moved = op.bytes(on, {n: True for o, n in ADDS if o == op.name})
    return f"| {op.name} | {b}x{t} | {slow * 1e3:.3f} | {fast * 1e3:.3f} | {ratio:.2f} | {moved / fast / 1e9:.1f} |"


def main() -> None:
    """Check, then measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--sizes", default="4x64,1x1024")
    parser.add_argument("--ops", default="*")
    asked = parser.parse_args()
    threads = set_threads(asked.threads)
    print(f"{threads} threads\n\n| op | B x T | vanilla, ms | optimized, ms | ratio | GB/s |")
    print("|---|---|---:|---:|---:|---:|")
    done = set()
    for size in asked.sizes.split(","):
        b, t = map(int, size.split("x"))
        for op in ops.ALL.values():
            if op.name.startswith("matmul") or not fnmatchcase(op.name, asked.ops):
                continue
            key = op.name, *sizes(op, b, t).items()
            if key in done:
                continue
            done.add(key)
            results = check_all([KERNELS[op.name, v] for v in VARIANTS], quick=True, threads=(threads,))
            wrong = [str(r) for r in results if r.verdict == "FAIL"]
            print("\n".join(wrong) if wrong else row(op, b, t), flush=True)


if __name__ == "__main__":
    main()

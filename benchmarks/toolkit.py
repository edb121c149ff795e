"""The error and the speed of the toolkit's functions: the table of docs/kernels/toolkit.md.

The error is the largest over one in `STEP` of all float32, in units of the last place of the exact value, from 1e-35
on. The time is the lower quartile of calls on 4,096 numbers in the first-level cache, on one thread.
"""

import time

import numpy as np

from cpuopt.kernels.compile.jit import helper
from cpuopt.kernels.toolkit import fastmath, lanes
from cpuopt.kernels.toolkit.elementwise import SET, loop_of
from cpuopt.machine import describe
from cpuopt.measure.quartile import lower_quartile

STEP, N, CALLS, SAMPLES = 2003, 4096, 20, 300
NAMES = "exp", "exp2", "tanh"


def scalar(function):
    """Make a loop over numbers."""

    @helper()
    def loop(out, x):
        for i in range(x.shape[0]):
            out[i] = function(x[i])

    return loop


def vectors(function):
    """Make a loop over vectors."""

    @helper(forceinline=True)
    def formula(x):
        return (function(x),)

    loop = loop_of(formula)

    @helper()
    def whole(out, x):
        loop((out,), SET, (x,), 0, x.shape[0])

    return whole


def errors(name, *loops):
    """Return the largest error of each loop, in units of the last place."""
    with np.errstate(all="ignore"):
        x = np.arange(0, 2**32, STEP, dtype=np.uint64).astype(np.uint32).view(np.float32)
        x = np.concatenate([x[np.isfinite(x)], np.linspace(-110, 95, 500_001, dtype=np.float32)])
        want = getattr(np, name)(x.astype(np.float64))
        normal = (np.abs(want) >= 1e-35) & (np.abs(want) < 2.0**126)
        x, want = x[normal], want[normal]
        unit = 2.0 ** (np.floor(np.log2(np.abs(want))) - 23)
    found = []
    for loop in loops:
        out = np.empty_like(x)
        loop(out, x)
        found.append(float((np.abs(out - want) / unit).max()))
    return found


def times(x, *loops):
    """Return the ns of an element in each loop; the loops take turns."""
    out, taken = np.empty_like(x), [[] for _ in loops]
    for _ in range(SAMPLES):
        for loop, ns in zip(loops, taken, strict=True):
            start = time.perf_counter_ns()
            for _ in range(CALLS):
                loop(out, x)
            ns.append((time.perf_counter_ns() - start) / CALLS / N)
    return [lower_quartile(ns) for ns in taken]


def main():
    """Print the table."""
    x = np.random.default_rng(0).standard_normal(N).astype(np.float32)
    print(f"{describe()['cpu']}, {lanes.LANES} lanes\n")
    print("| function | error, ulp | ns in a loop over numbers | ns over vectors | ns of numba's `np` | ns of NumPy |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name in NAMES:
        library = getattr(np, name)
        own = scalar(getattr(fastmath, name)), vectors(getattr(lanes, name))
        others = scalar(library), lambda out, x, library=library: library(x, out=out)
        ulp = ", ".join(f"{e:.1f}" for e in dict.fromkeys(errors(name, *own)))
        print(f"| `{name}` | {ulp} | {' | '.join(f'{ns:.2f}' for ns in times(x, *own, *others))} |")


if __name__ == "__main__":
    main()

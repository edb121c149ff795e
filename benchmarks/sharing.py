"""What it costs to write weights that another core has just read; docs/results/scaling.md has the figures.

    python benchmarks/sharing.py --model gpt2-124M --size 1x64 --rounds 20

A step's gradient of the input reads a weight, and the update that follows writes it. What another thread has read must
first leave its cache. Each round times all updates of a step three times: within the
step, alone, and each right after the call that last read its weight. Cores that share a cache show no difference. The
host of a virtual machine may move its cores between rounds, so every round is printed, with the time of a message from
one thread to another and back; the medians are those of rounds with fast and with slow messages.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from statistics import median
from typing import Any

import numpy as np
from flags import size

from cpuopt.cli.common import start_numba

UPDATE = "matmul_update"
TEXT = "{:8.1f} {:8.1f} {:8.1f}   step {:8.1f}   message {:6.0f}"
MESSAGES = 3_000
SLOW = 200
"""ns from which a message counts as slow: two Zen 4 cores took 60 to 130 with a common cache, 350 to 630 without."""


def main() -> None:
    """Measure and print a line a round, and the medians."""
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--model", default="gpt2-124M", help="preset or JSON (%(default)s)")
    p.add_argument("--size", type=size, default="1x64", metavar="BxT")
    p.add_argument("--threads", type=int, default=None)
    p.add_argument("--rounds", type=int, default=20)
    a = p.parse_args()
    B, T = map(int, a.size.split("x"))
    start_numba(a.threads)
    from numba import config, prange

    from cpuopt.building import Bound, run_calls
    from cpuopt.kernels.compile.jit import helper
    from cpuopt.kernels.toolkit.simd import LINE
    from cpuopt.kernels.toolkit.threads import start, threading_layer
    from cpuopt.kernels.toolkit.tiles import tell, wait_for
    from cpuopt.train import job

    calls: list[Bound] = []
    seconds: list[float] = []

    if config.NUMBA_NUM_THREADS < 2:
        p.error("one thread shares nothing: --threads 2 or more")
    start(config.NUMBA_NUM_THREADS)
    if threading_layer() == "tbb":
        p.error("TBB may let one thread do both sides of a message: NUMBA_THREADING_LAYER=omp")

    @helper(parallel=True)
    def messages(steps: Any, n: int) -> None:
        for t in prange(2):
            for i in range(1, n + 1):
                if t == 0:
                    tell(steps, 0, i)
                    wait_for(steps, LINE, i)
                else:
                    wait_for(steps, 0, i)
                    tell(steps, LINE, i)

    def message() -> float:
        """Return the time of a message there and back, in ns."""
        times = []
        for _ in range(4):
            steps = np.zeros(2 * LINE, np.int32)
            began = time.perf_counter()
            messages(steps, MESSAGES)
            times.append(time.perf_counter() - began)
        return 1e9 * min(times) / MESSAGES

    def timed(call: Bound) -> float:
        began = time.perf_counter()
        run_calls([call])
        return time.perf_counter() - began

    def run(given: Iterable[Bound]) -> None:
        for call in given:
            calls.append(call)
            seconds.append(timed(call))

    prepared = job.prepare(job.Settings(model=a.model, B=B, T=T, threads=a.threads))
    prepared.take_step()
    prepared.engine.runner = run
    rows = []
    print(f"{UPDATE} of {a.model} at {a.size}, ms a step: in the step, alone, after the weight was read; message, ns")
    for _ in range(a.rounds):
        calls.clear(), seconds.clear()
        before = message()
        whole = prepared.take_step().seconds
        reader = {}  # by update: the last call before it that reads its weight
        for i, call in enumerate(calls):
            if call.call.op.name.startswith(UPDATE):
                weight = call.call.args["weight"]
                reader[i] = next(c for c in reversed(calls[:i]) if weight in c.call.reads)
        within = sum(seconds[i] for i in reader)
        alone = sum(timed(calls[i]) for i in reader)
        after = 0.0
        for i, last in reader.items():
            timed(last)
            after += timed(calls[i])
        rows.append([*(1e3 * x for x in (within, alone, after, whole)), max(before, message())])
        print(TEXT.format(*rows[-1]), flush=True)
    for name, kept in ("fast", [r for r in rows if r[-1] < SLOW]), ("slow", [r for r in rows if r[-1] >= SLOW]):
        if kept:
            print(TEXT.format(*map(median, zip(*kept, strict=True))), f"  medians of {len(kept)} with {name} messages")


if __name__ == "__main__":
    main()

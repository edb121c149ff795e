"""What it costs to write weights that another core has just read; docs/scaling.md has the figures.

    python benchmarks/sharing.py --model gpt2-124M --size 1x64 --rounds 20

A step's gradient of the input reads a weight by columns, and the update that follows writes it by rows, so half of the
lines are in the cache of the other thread. Each round times all updates of a step three times: within the step, alone,
and each right after the call that last read its weight. Cores that share a cache show no difference. The host of a
virtual machine may move its cores between rounds, so every round is printed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from statistics import median

from cpuopt.cli.common import start_numba

UPDATE = "matmul_update"


def main() -> None:
    """Measure and print a line a round, and the medians."""
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--model", default="gpt2-124M", help="preset or JSON (%(default)s)")
    p.add_argument("--size", default="1x64", metavar="BxT")
    p.add_argument("--threads", type=int, default=None)
    p.add_argument("--rounds", type=int, default=20)
    a = p.parse_args()
    B, T = map(int, a.size.split("x"))
    start_numba(a.threads)
    from cpuopt.engine import Bound, run_calls
    from cpuopt.train import job

    calls: list[Bound] = []
    seconds: list[float] = []

    def timed(call: Bound) -> float:
        began = time.perf_counter()
        run_calls([call])
        return time.perf_counter() - began

    def run(given: Iterable[Bound]) -> None:
        for call in given:
            calls.append(call)
            seconds.append(timed(call))

    prepared = job.prepare(job.Settings(model=a.model, B=B, T=T, threads=a.threads))
    prepared.step()
    prepared.engine.runner = run
    rows = []
    print(f"{UPDATE} of {a.model} at {a.size}, ms a step: in the step, alone, after the weight was read")
    for _ in range(a.rounds):
        calls.clear(), seconds.clear()
        whole = prepared.step().seconds
        reader = {}  # by update: the last call before it that reads its weight
        for i, call in enumerate(calls):
            if call.call.op.name.startswith(UPDATE):
                weight = call.call.args["weight"]
                reader[i] = next(c for c in reversed(calls[:i]) if weight in c.call.reads)
        within = sum(seconds[i] for i in reader)
        alone = sum(timed(calls[i]) for i in reader)
        after = 0.0
        for i, before in reader.items():
            timed(before)
            after += timed(calls[i])
        rows.append([1e3 * x for x in (within, alone, after, whole)])
        print("{:8.1f} {:8.1f} {:8.1f}   step {:8.1f}".format(*rows[-1]), flush=True)
    print("{:8.1f} {:8.1f} {:8.1f}   step {:8.1f}   medians".format(*map(median, zip(*rows, strict=True))))


if __name__ == "__main__":
    main()

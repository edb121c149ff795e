"""The cost of `cpuopt profile`, and whether its rows add up: profiled and plain training steps, in pairs.

Two processes train the same model on the same batches: one as `cpuopt train` does without a profiler, the other as
`cpuopt profile` does, with every kernel's threads watched; with --lines, as `cpuopt profile --lines` does, with samples
of the threads. The wall time of a profiled step is taken outside of the profiler.

    python benchmarks/overhead.py --sizes 4x64 1x64 --rounds 24
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from statistics import median
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
from flags import size

from cpuopt.isolate.process import Side, Worker
from cpuopt.isolate.serve import serve
from cpuopt.measure import rates as machine
from cpuopt.measure.comparison import compare

ROW = "| {} | {:,.2f} | {:,.2f} | {:+.2f} % [{:+.2f}, {:+.2f}] | {:+.2f} % | {:.3f} | {:.4f} % | {:.2f} % |"
HEAD = (
    "| B x T | plain, ms | profiled, ms | difference, 99.5 % interval | control | empty loop, ms | rows: all | "
    "rows: kernels |\n| --- | ---: | ---: | --- | --- | ---: | ---: | ---: |"
)


class Steps:
    """A job's steps, profiled or not."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        from cpuopt.kernels.compile.sampling import ThreadSampler
        from cpuopt.kernels.toolkit import regions
        from cpuopt.profiler import Profiler
        from cpuopt.train.job import Settings, prepare

        watched = regions.watch() if request["profiled"] else None
        self.job = prepare(Settings(model=request["model"], B=request["B"], T=request["T"], threads=request["threads"]))
        self.sampler = ThreadSampler().__enter__() if request["profiled"] and request["lines"] else None
        more = {"keep": 1, "regions": watched, "sampler": self.sampler}
        self.profiler = Profiler(self.job.engine, **more) if request["profiled"] else None

    def step(self) -> dict[str, Any]:
        """Take a step; return its ms, and the sums of a profile's rows."""
        ms = self.job.take_step(self.profiler.time_step if self.profiler else nullcontext).seconds * 1e3
        if self.profiler is None:
            return {"ms": ms}
        if self.sampler:
            self.sampler.follow()
        p = self.profiler.profile(model="", B=1, T=1, choice=self.job.engine.options.choice)
        rows = [r.ms for r in p.ops]
        return {"ms": ms, "rows": sum(rows), "kernels": sum(rows[:-1]), "loop": p.profiler_overhead_ms}


def answer() -> None:
    """Be one of the two processes."""
    here: list[Steps] = []

    def init(request: Mapping[str, Any], say: Any) -> Mapping[str, Any]:
        here[:] = [Steps(request)]
        return {}

    serve({"init": init, "step": lambda request, say: here[0].step()})


def main() -> None:
    """Measure and print a table."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--sizes", type=size, nargs="+", default=["4x64"], metavar="BxT")
    p.add_argument("--model", default="gpt2-124M")
    p.add_argument("--rounds", type=int, default=24, help="rounds of three steps (%(default)s)")
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="number of threads (%(default)s)")
    p.add_argument("--lines", action="store_true", help="sample the threads, too")
    p.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.serve:
        answer()
        return
    print(HEAD, flush=True)
    for label in args.sizes:
        B, T = map(int, label.split("x"))
        side = Side("steps", (sys.executable, __file__, "--serve"), {}, {"NUMBA_NUM_THREADS": str(args.threads)})
        with Worker(side) as plain, Worker(side) as profiled:
            asked = {"model": args.model, "B": B, "T": T, "threads": args.threads, "lines": args.lines}
            plain.ask("init", **asked, profiled=False)
            profiled.ask("init", **asked, profiled=True)
            sums: list[dict[str, float]] = []

            def profiled_step(worker: Worker = profiled, sums: list[dict[str, float]] = sums) -> float:
                sums.append(worker.ask("step"))
                print(f"\r{len(sums)}/{args.rounds + 1}", end="", file=sys.stderr, flush=True)
                return sums[-1]["ms"]

            others = machine.Others([plain, profiled])
            found = compare(lambda worker=plain: worker.ask("step")["ms"], profiled_step, analyses=[args.rounds])
        v = found.verdict()
        moved = [100 * (v.ratio[k] - 1) for k in ("median", "low", "high")]
        whole, kernels = (100 * median(s[k] / s["ms"] for s in sums) for k in ("rows", "kernels"))
        times = median(found.figures("A")), median(found.figures("B"))
        loop = median(s["loop"] for s in sums)
        print(ROW.format(label, *times, *moved, 100 * (v.control["median"] - 1), loop, whole, kernels), flush=True)
        print(f"other processes used {others.cores():.2f} cores", file=sys.stderr)


if __name__ == "__main__":
    main()

"""What `cpuopt profile` costs, and whether its rows add up: profiled and plain training steps, in turns.

Two processes train the same model on the same batches: one as `cpuopt train` does without a profiler, the other as
`cpuopt profile` does, with every kernel's threads watched. Their steps take turns, A B C in random order and then
backwards, where C is A once more. The wall time of a profiled step is taken outside of the profiler.

    python benchmarks/overhead.py --sizes 4x64 1x64 --rounds 24
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
from cpuopt.measure.verdict import Contest

from cpuopt.isolate.process import Side, Worker
from cpuopt.isolate.serve import serve
from cpuopt.measure import rates as machine

ROW = "| {} | {:,.2f} | {:,.2f} | {:+.2f} % [{:+.2f}, {:+.2f}] | {:+.2f} % | {:.3f} | {:.4f} % | {:.2f} % |"
HEAD = (
    "| B x T | plain, ms | profiled, ms | difference, 99.5 % interval | control | empty loop, ms | rows: all | "
    "rows: kernels |\n| --- | ---: | ---: | --- | --- | ---: | ---: | ---: |"
)


class Steps:
    """A job's steps, profiled or not."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        from cpuopt.kernels.toolkit import regions
        from cpuopt.profiler import Profiler
        from cpuopt.train.job import Settings, prepare

        watched = regions.watch() if request["profiled"] else None
        self.job = prepare(Settings(model=request["model"], B=request["B"], T=request["T"], threads=request["threads"]))
        self.batches = self.job.corpus.batches("train", request["B"], request["T"], seed=0)
        self.profiler = Profiler(self.job.engine, keep=1, regions=watched) if request["profiled"] else None
        self.done = 0

    def step(self) -> dict[str, Any]:
        """Take one; give its ms, and of a profiled one the sums of its rows."""
        tokens, targets = self.batches.at(self.done)
        self.done += 1
        start = time.perf_counter_ns()
        if self.profiler:
            with self.profiler.step():
                self.job.engine.step(tokens=tokens, targets=targets)
        else:
            self.job.engine.step(tokens=tokens, targets=targets)
        ms = (time.perf_counter_ns() - start) / 1e6
        if self.profiler is None:
            return {"ms": ms}
        p = self.profiler.profile(model="", B=1, T=1, choice=self.job.choice)
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
    p.add_argument("--sizes", nargs="+", default=["4x64"], metavar="BxT")
    p.add_argument("--model", default="gpt2-124M")
    p.add_argument("--rounds", type=int, default=24, help="of three steps (%(default)s)")
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="(%(default)s)")
    p.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.serve:
        answer()
        return
    print(HEAD, flush=True)
    for size in args.sizes:
        B, T = map(int, size.split("x"))
        side = Side("steps", (sys.executable, __file__, "--serve"), {}, {"NUMBA_NUM_THREADS": str(args.threads)})
        with Worker(side) as plain, Worker(side) as profiled:
            told = {"model": args.model, "B": B, "T": T, "threads": args.threads}
            plain.ask("init", **told, profiled=False)
            profiled.ask("init", **told, profiled=True)
            sums: list[dict[str, float]] = []

            def turn(
                letter: str, both: tuple[Worker, Worker] = (plain, profiled), sums: list[Any] = sums
            ) -> list[float]:
                found = both["AB".index(letter)].ask("step")
                sums.extend([found] * (letter == "B"))
                print(f"\r{len(sums)}/{args.rounds + 1}", end="", file=sys.stderr, flush=True)
                return [found["ms"]]

            others = machine.Others()
            contest = Contest(turn, looks=[args.rounds])
            v = contest.run()
        moved = [100 * (v.ratio[k] - 1) for k in ("median", "low", "high")]
        whole, kernels = (100 * median(s[k] / s["ms"] for s in sums) for k in ("rows", "kernels"))
        times = median(contest.figures("A")), median(contest.figures("B"))
        loop = median(s["loop"] for s in sums)
        print(ROW.format(size, *times, *moved, 100 * (v.control["median"] - 1), loop, whole, kernels), flush=True)
        print(f"other processes used {others.cores():.2f} cores", file=sys.stderr)


if __name__ == "__main__":
    main()

"""A rank of cpuopt for the benchmarks of ranks, driven through `jobs`; mpiexec starts it, or nothing does."""

from __future__ import annotations

import os
import zlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jobs import serve

from cpuopt.comm import Comm
from cpuopt.comm.places import part, promised

if TYPE_CHECKING:
    from cpuopt.building import Bound


class Session:
    """A job that steps through its batches, each step timed call by call.

    Parameters
    ----------
    request : ``settings`` of the job; where they are given, the paths of ``batches`` (n, 2, B, T) and of initial
        weights, ``params``, which the first rank writes where ``write`` is set.
    """

    def __init__(self, request: dict[str, Any], comm: Comm) -> None:
        from cpuopt.data.given import Given
        from cpuopt.files.reading import from_json  # numba is imported when this process has its cores
        from cpuopt.lab.peers.worker import save
        from cpuopt.machine import forget_peak
        from cpuopt.profiler import Profiler
        from cpuopt.train.job import Settings, prepare

        self.comm, self.late = comm, False
        self.job = prepare(from_json(Settings, request["settings"]), comm=comm)
        self.engine = self.job.engine
        if "batches" in request:
            batches = np.load(request["batches"])
            self.job.batches = Given(lambda n: batches[n % len(batches)], "")
        if request.get("write") and not comm.rank:
            save(Path(request["params"]), self.engine.parameters())
        self.profiler = Profiler(self.engine, keep=1)
        self.engine.runner = self.run
        forget_peak()  # of checks and compilation

    def run(self, calls: Iterable[Bound]) -> None:
        """Run calls; where asked to, begin with the reduction only when the whole backward is done."""
        self.profiler.run_calls(sorted(calls, key=lambda b: b.call.phase == "reduce") if self.late else calls)

    def steps(self, request: dict[str, Any]) -> dict[str, Any]:
        """Train for n steps.

        Returns
        -------
        The ms and the loss of each; ``window_ms``, from the first exchange of gradients to the end of the backward;
        ``rows``, the ms of each phase and label in all steps.
        """
        self.late = request.get("late", False)
        step_ms, losses, window_ms = [], [], []
        rows: dict[str, float] = defaultdict(float)
        for _ in range(request["n"]):
            losses.append(self.job.take_step(self.profiler.time_step).loss)
            (step,) = self.profiler.steps
            step_ms.append((step.end - step.start) / 1e6)
            window_ms.append(0.0)
            for calls, marks in step.runs:
                last = max((i for i, b in enumerate(calls) if b.call.phase == "backward"), default=0)
                first = next((i for i, b in enumerate(calls[:last]) if b.call.op.name == "exchange"), last + 1)
                window_ms[-1] += (marks[last + 1] - marks[first]) / 1e6
                for bound, ns in zip(calls, np.diff(marks).tolist(), strict=True):
                    rows[f"{bound.call.phase}/{bound.call.op.label}"] += ns / 1e6
        return {"step_ms": step_ms, "losses": losses, "window_ms": window_ms, "rows": rows}

    def facts(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return what is known without a clock."""
        crc = 0
        self.engine.collect()
        for p in self.engine.parameters().values():
            crc = zlib.crc32(p.tobytes(), crc)
        sent: dict[str, int] = defaultdict(int)
        last = 0
        for call in self.engine.program.step_calls:
            if call.op.name == "exchange":
                sent[call.phase] += call.args["mine"].nbytes
                last += call.args["mine"].nbytes * (call.phase == "reduce")
            elif call.phase == "backward":
                last = 0
        return {
            "crc": f"{crc:08x}",
            "sent": sent,
            "last": last,  # of gradients, when the backward is done
            "shared": self.comm.shared,
            "library": self.comm.name,
            "parameters": sum(p.size for p in self.engine.parameters().values()),
            "planned": self.engine.plan.total_bytes + self.engine.plan.window_bytes,
            "peak": own_peak_bytes(),
            "base": self.engine.base_bytes,
            "threads": self.engine.threads,
        }


def own_peak_bytes() -> int:
    """Return the most memory that this process has held, with its part alone of what it shares with other ranks."""
    fields: dict[str, int] = {}
    for name in ("status", "smaps_rollup"):
        for line in Path(f"/proc/self/{name}").read_text().splitlines():
            key, _, value = line.partition(":")
            if value.endswith(" kB"):
                fields.setdefault(key, int(value.split()[0]) * 1024)
    return fields["VmHWM"] - fields["RssShmem"] + fields["Pss_Shmem"]


def main() -> None:
    """Take a part of the cores, and answer requests."""
    comm = Comm()
    promise = promised()
    if promise and promise.size > 1:
        from cpuopt.comm.mpi import Mpi

        comm = Mpi(promise)
    os.sched_setaffinity(0, part(sorted(os.sched_getaffinity(0)), comm.rank, comm.size))
    sessions: list[Session] = []

    def init(request: dict[str, Any]) -> dict[str, Any]:
        sessions.append(Session(request, comm))
        return sessions[0].facts(request)

    serve(
        comm.rank,
        {"init": init, "steps": lambda r: sessions[0].steps(r), "facts": lambda r: sessions[0].facts(r)},
    )


if __name__ == "__main__":
    main()

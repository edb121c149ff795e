"""The cpuopt side of `cpuopt bench`: ``python -m cpuopt.lab.peers.worker``, driven by requests in JSON lines.

``check`` validates the settings, ``init`` compiles and sets the initial weights, ``loss`` evaluates the first batch in
float32,
``steps`` trains and returns the time of each step, ``peak`` returns the peak memory since ``init``, the peak of the
step's FLOPs, and the time of a step at its roofs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import UserError
from ...files.reading import from_json
from ...isolate.serve import Say, serve
from ...measure.roofline import FMA, PEAKS
from ...ops.dequantize import numbers
from ...ops.storage import WIDE
from ...program.program import PARTS

if TYPE_CHECKING:
    from ...building import Bound
    from ...engine import Engine
    from ...train.job import Job, Settings


class Session:
    """A job that steps through its batches.

    Parameters
    ----------
    request : ``init``: some of `Settings`, B and T, and the paths of batches (n, 2, B, T) and weights.
    say : called with the name of each kernel that is compiled.
    """

    def __init__(self, request: Mapping[str, Any], say: Callable[[str], None]) -> None:
        from ...machine import forget_peak  # numba is imported late: an idle worker is small

        self.request, self.say = request, say
        self.job = self._job(settings_of(request))
        self.engine = self.job.engine
        if request["write_params"]:
            save(Path(request["params"]), self.engine.parameters())
        else:
            load(Path(request["params"]), self.engine.parameters())
        self._ns = dict.fromkeys(PARTS.values(), 0)
        self._run = self.engine.runner
        self.engine.runner = self._run_timed
        forget_peak()  # judging kernels takes more memory than a small model

    def _job(self, settings: Settings) -> Job:
        from ...data.given import Given
        from ...train.job import prepare

        job = prepare(settings, lambda done, total, name: self.say(f"compiling {done}/{total} {name}"))
        if self.request["batches"]:
            batches = np.load(self.request["batches"])
            job.batches = Given(lambda n: batches[n % len(batches)], "")
        return job

    def steps(self, n: int, way: str | None = None) -> dict[str, Any]:
        """Train for n steps, with threads that wait in a way from now on."""
        from ...kernels.toolkit.waiting import tell
        from ...machine import waiting

        if way:
            tell(way)
        step_ms, losses = [], []
        phases_ms: dict[str, list[float]] = {c: [] for c in PARTS.values()}
        for _ in range(n):
            self._ns = dict.fromkeys(phases_ms, 0)
            taken = self.job.take_step()
            step_ms.append(taken.seconds * 1e3)
            losses.append(taken.loss)
            for column, ns in self._ns.items():
                phases_ms[column].append(ns / 1e6)
        chosen = waiting(self.engine.threads)
        now = {"waiting": chosen.get("now", chosen["how"])}
        return {"step_ms": step_ms, "losses": losses, "phases_ms": phases_ms, **now}

    def losses(self, scales: Sequence[float]) -> dict[str, Any]:
        """Return the loss of the first batch with all weights of two axes times each number, a power of two.

        It is that of float32, whatever the job trains in: rounding would hide what another model computes.
        """
        from ...machine import forget_peak

        settings = settings_of(self.request)
        if settings.dtype == WIDE:
            return {"losses": losses_of(self.job, scales)}
        job = self._job(replace(settings, dtype=WIDE, weights=WIDE))
        load(Path(self.request["params"]), job.engine.parameters())
        found = losses_of(job, scales)
        del job
        forget_peak()  # of an engine that training does not have
        return {"losses": found}

    def _run_timed(self, calls: Iterable[Bound]) -> None:
        calls = list(calls)
        start = time.perf_counter_ns()
        self._run(calls)
        if calls:
            self._ns[PARTS[calls[0].call.phase]] += time.perf_counter_ns() - start


def losses_of(job: Job, scales: Sequence[float]) -> list[float]:
    """Return the loss of a job's first batch with all weights of two axes times each number, a power of two."""
    (first, *_) = job.micro_batches(1)
    matrices = [p for p in job.engine.parameters().values() if p.ndim == 2]
    found = []
    for scale in scales:
        for p in matrices:
            p *= scale
        found.append(job.engine.forward(**first))
        for p in matrices:
            p /= scale
    return found


def settings_of(request: Mapping[str, Any]) -> Settings:
    """Read the settings of a job from a request."""
    from ...train.job import Settings

    settings: Settings = from_json(Settings, {"B": request["B"], "T": request["T"], **request["settings"]})
    return settings


def check(request: Mapping[str, Any], say: Say) -> Mapping[str, Any]:
    """Trace the model and choose its kernels, to find errors in the settings."""
    from ...train.job import build_only

    build_only(settings_of(request))
    return {}


def save(path: Path, params: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Write parameters by name, in float32."""
    with path.open("wb") as f:
        np.savez(f, **{n: numbers(x) for n, x in params.items()})  # type: ignore[arg-type]  # a name is no option


def load(path: Path, params: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Fill parameters from a file that has the same names."""
    with np.load(path, allow_pickle=False) as stored:
        if set(stored) != set(params):
            raise UserError(f"initial weights differ in {', '.join(sorted(set(stored) ^ set(params)))}")
        for name, array in params.items():
            array[...] = stored[name]


def main() -> None:
    """Answer requests until stdin closes."""
    sessions: list[Session] = []

    def init(request: Mapping[str, Any], say: Say) -> Mapping[str, Any]:
        sessions[:] = [Session(request, say)]
        return {"threads": sessions[0].engine.threads, "versions": {}}

    serve({
        "check": check,
        "init": init,
        "loss": lambda request, say: sessions[0].losses(request["scales"]),
        "steps": lambda request, say: sessions[0].steps(request["n"], request.get("waiting")),
        "peak": lambda request, say: _peak(sessions[0].engine),
    })  # fmt: skip


def _peak(engine: Engine) -> dict[str, Any]:
    from ...kernels.toolkit.threads import threading_layer
    from ...machine import peak_rss_bytes
    from ...measure import rates

    used = peak_rss_bytes() / 1e6  # before the roofs, which take memory
    roofs = rates.roofs(engine.threads)
    program, now = engine.program, rates.Measurement()
    peaks = {FMA} | {roofs.peak(operands)[1] for operands in program.work}
    again: dict[str, Any] = {PEAKS[name]: now.peak(name, engine.threads) for name in peaks}
    roofs = rates.better(roofs, replace(roofs, **again))  # now, and at its best
    flops = program.flops
    return {
        "peak_rss_mb": used,
        "versions": {"threading_layer": threading_layer()},
        "gflop": flops / 1e9,
        "peak_gflops": flops / roofs.compute_ns(program.work),
        "roof_ms": sum(roofs.bound(c.flops, c.bytes, c.operands)[0] for c in program.step_calls) / 1e6,
    }


if __name__ == "__main__":
    main()

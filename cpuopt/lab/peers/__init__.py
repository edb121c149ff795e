"""The comparison of whole training steps with a peer: PyTorch, or another variant of cpuopt's kernels.

Both sides train the same model from the same weights on the same batches, each in a process of its own, because two
OpenMP runtimes must not share one. Whichever is not asked is stopped, so that it takes nothing from the other. They
are compared in pairs (`measure.comparison`), without a control. No ratio is given if the two do not compute the same:
if the losses of the first steps differ, or those of one batch from the same weights. That batch counts with larger
weights too, since small ones hide a wrong attention, and in float32 even if a side trains in bfloat16.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ... import machine, models
from ...data.corpus import load_corpus
from ...errors import UserError
from ...files import write_whole
from ...files.reading import to_json
from ...isolate.process import LIMIT_S, Side, Steps, Worker, ended_by_sigterm
from ...kernels.toolkit.waiting import BUSY
from ...measure.comparison import (
    BF16_TOLERANCE,
    CHECKED_STEPS,
    LEVEL,
    TOLERANCE,
    compare,
    disagreement,
    geometric_mean,
    other_model,
)
from ...measure.quartile import lower_quartile
from ...measure.roofline import fits
from ...ops.storage import WIDE
from .plan import (
    BEST,
    OPTIMIZER,
    PEERS,
    START_ROUNDS,
    Plan,
    default_sizes,
    own_side,
    own_sizes,
    parse_sizes,
    peer_sides,
    round_cost,
)

__all__ = ["Bench", "Plan", "View", "default_sizes", "own_sizes", "parse_sizes"]

BATCHES = 8
"""The number of batches that both sides repeat."""
TRIAL_MS = 200.0
"""A trial is a step that does not count and as many as fill this time, at most `MOST_STEPS`; their lower quartile
counts."""
MOST_STEPS = 50
SCALES = (1.0, 4.0)
"""Numbers that all weights are multiplied by before the two sides' losses are compared."""
PAUSE_S = 0.25
"""Between trials, while both sides are stopped: what other processes use is measured then."""


def way(workers: Iterable[Worker], threads: int, pause_s: float = PAUSE_S) -> str | None:
    """Choose how cpuopt's threads wait in the next trial, from what others use in a pause in which no side runs.

    Returns
    -------
    ``spin`` or ``sleep``; None if a variable of the environment says how.
    """
    others = machine.Others(workers)
    time.sleep(pause_s)
    if any(name in os.environ for name in (machine.WAITING, *machine.THEIRS)):
        return None
    beyond = others.cores() - ((os.cpu_count() or 1) - threads) if pause_s else 0.0
    return "sleep" if beyond > BUSY else "spin"


@dataclass
class PeerResult:
    """The result of one size against one peer; fields of both sides have the keys ``cpuopt`` and ``peer``.

    Attributes
    ----------
    refused : why there is no ratio.
    order : the side of each trial, from first to last: A is cpuopt, B the peer.
    steps_per_trial : those that count.
    waiting : the number of trials in which cpuopt's threads waited in each way, as by `way`.
    ratios : the peer's time over cpuopt's in each round; a round compares two trials.
    step_ms : ``quiet``, the lower quartile of all steps, ``median``, ``min``, ``max`` and ``values``.
    ratio : their median, and its interval, which is one of `level` percent.
    verdict : on the peer.
    dtype, peer_dtype : what products read on cpuopt's side, and the class of the peer: float32 or bf16.
    of_peak : the FLOPs of the step over its time, in percent of the peak. No ratio can exceed 100 over the peer's.
    gflop, peak_gflops : those FLOPs, in 10^9, and their rate at the peaks of the types that cpuopt multiplies, in 10^9
        a second, as measured after the last trial or before.
    library : the peer's version and vector code, ``products_by``, what ran one product alone, and ``linear_gflops``.
    roof_ms : the time of a step of cpuopt whose calls all reach their roofs.
    doubts : warnings about the figures.
    model : the preset's name, where results of several models are together.
    """

    peer: str
    B: int
    T: int
    threads: int
    refused: str | None = None
    order: str = ""
    steps_per_trial: int = 0
    waiting: dict[str, int] = field(default_factory=dict)
    ratio: dict[str, float] | None = None
    level: float = LEVEL
    verdict: str = ""
    ratios: list[float] = field(default_factory=list)
    step_ms: dict[str, dict[str, Any]] = field(default_factory=dict)
    phases_ms: dict[str, dict[str, float]] = field(default_factory=dict)
    peak_rss_mb: dict[str, float] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    of_peak: dict[str, float] = field(default_factory=dict)
    gflop: float | None = None
    peak_gflops: float | None = None
    roof_ms: float | None = None
    doubts: list[str] = field(default_factory=list)
    model: str = ""
    dtype: str = WIDE
    peer_dtype: str = WIDE
    library: dict[str, Any] = field(default_factory=dict)


def summed(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the ratios to the fastest peers, their means by class, and the mean of each peer over several sizes."""
    fastest, classes, peers = faster(results), dict[str, list[Any]](), dict[str, list[Any]]()
    for best in fastest:
        classes.setdefault(f"{best['dtype']}, peers {best['peer_dtype']}", []).append(best["ratio"])
    for r in results:
        peers.setdefault(r["peer"], []).extend([r["ratio"]] if r["ratio"] else [])
    mean, of_peer = (
        {name: geometric_mean(ratios) for name, ratios in of.items() if len(ratios) > 1} for of in (classes, peers)
    )
    return {"faster": fastest, "faster_mean": mean, "geometric_mean": of_peer}


def faster(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each size and class in which several programs other than cpuopt ran, the ratio to the fastest.

    The class is the type of what products read, on both sides.
    """
    found, groups = [], dict[tuple[Any, ...], list[Mapping[str, Any]]]()
    names = "model", "B", "T", "dtype", "peer_dtype"
    for r in results:
        groups.setdefault(tuple(r[name] for name in names), []).append(r)
    for key, of in groups.items():
        ran = {r["peer"]: r["ratio"] for r in of if r["ratio"] and r["peer"] in PEERS}
        if len(ran) > 1:
            peer = min(ran, key=lambda name: ran[name]["median"])
            one = {name: x for name, x in zip(names, key, strict=True) if x != ""}  # a bench has one model
            found.append({**one, "peer": peer, "of": [*ran], "ratio": ran[peer]})
    return found


def writer(out: Path | None) -> Callable[[Mapping[str, Any]], None]:
    """Return a function that writes a record to a file, if there is one.

    Raises
    ------
    UserError
        If its folder does not exist.
    """
    if out and not out.absolute().parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {str(out.absolute().parent)!r}; make it first")

    def write(record: Mapping[str, Any]) -> None:
        if out:
            write_whole(out, [json.dumps(record, indent=1).encode() + b"\n"])

    return write


class View:
    """Observer of progress; this one does nothing."""

    def stage(self, text: str) -> None:
        """A part of the work begins."""

    def at(self, cost: float) -> None:
        """Some of `Plan.cost` is done."""

    def result(self, result: PeerResult) -> None:
        """One size against one peer is measured."""

    def left_out(self, peer: str, why: str) -> None:
        """A peer cannot run on this machine."""


class Bench:
    """Measures a plan.

    Parameters
    ----------
    view : observer of progress.
    ours, theirs : the sides, in place of those of the plan; `ours` against every peer.
    pause_s : seconds between trials.
    limit_s : seconds that a worker may take for one answer.
    model, done : the name in the results of a part of a suite, and the cost of the parts before it.

    Raises
    ------
    UserError
        For a plan that cannot be measured.
    """

    def __init__(
        self,
        plan: Plan,
        view: View | None = None,
        *,
        ours: Side | None = None,
        theirs: Sequence[Side] | None = None,
        pause_s: float = PAUSE_S,
        limit_s: float = LIMIT_S,
        model: str = "",
        done: float = 0.0,
    ) -> None:
        plan.check()
        self.plan, self.view, self.pause_s, self.limit_s = plan, view or View(), pause_s, limit_s
        self.theirs = list(theirs) if theirs is not None else peer_sides(plan)
        self.ours = {s.name: ours or own_side(plan, s.name) for s in self.theirs}
        self.left_out: dict[str, str] = {}
        self.config, self.model = models.parse(plan.model), model
        self.results: list[PeerResult] = []
        self._machine = machine.describe()  # its load, before any of this
        self._cost = done

    def run(self, out: Path | None = None) -> dict[str, Any]:
        """Measure all sizes against all peers, and return the record.

        A failure is recorded as the reason for a missing ratio, and the other sizes are measured.

        Parameters
        ----------
        out : a file that gets the record, rewritten after each result.

        Raises
        ------
        UserError
            If nothing could be measured before the failure, or `out` cannot be written.
        """
        write = writer(out)
        with ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="cpuopt-bench-") as folder:
            self._check()
            for B, T in self.plan.sizes:
                for side in [*self.theirs]:
                    try:
                        result = self._pair(side, B, T, Path(folder))
                    except UserError as e:
                        if self.plan.every.get(side.name):
                            self._leave_out(side, e)
                            continue
                        if not self.results:
                            raise
                        result = self._result(side.name, B, T, refused=f"no ratio, because of {e}")
                    self.results.append(result)
                    self._cost += (START_ROUNDS + self.plan.rounds) * round_cost(B, T)
                    self.view.at(self._cost)
                    write(self.record())
                    self.view.result(result)
        return self.record()

    def _stage(self, text: str) -> None:
        self.view.stage(f"{self.model} {text}".lstrip())

    def refuse(self, why: str) -> None:
        """Record a reason in place of each result that is missing."""
        known = {(r.peer, r.B, r.T) for r in self.results}
        missing = [(s.name, B, T) for B, T in self.plan.sizes for s in self.theirs if (s.name, B, T) not in known]
        for which in missing:
            self.results.append(self._result(*which, refused=why))
            self.view.result(self.results[-1])

    def _result(self, peer: str, B: int, T: int, **more: Any) -> PeerResult:
        """Begin a result."""
        own = self.plan.own_dtype(peer)
        theirs = PEERS[peer].dtype if peer in PEERS else own
        return PeerResult(peer, B, T, self.plan.threads, dtype=own, peer_dtype=theirs, model=self.model, **more)

    def record(self) -> dict[str, Any]:
        """Return the record so far, for JSON."""
        plan = {k: v for k, v in asdict(self.plan).items() if k not in ("model", "peer_python", "processes")}
        results = to_json(self.results)
        return {
            "kind": "cpuopt-bench",
            "format": 1,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "model": {"name": models.name_of(self.config), **asdict(self.config), "parameters": self.config.n_params},
            "optimizer": {"name": "AdamW", **OPTIMIZER},
            **plan,
            "machine": self._machine,
            "results": results,
            **summed(results),
            "left_out": self.left_out,
        }

    def _check(self) -> None:
        """Make each side check its requirements, before the first of them compiles; leave out what may be."""
        B, T = self.plan.sizes[0]
        ours = {json.dumps(dict(s.settings)): s for s in self.ours.values()}
        for side in (*ours.values(), *self.theirs):
            self._stage(f"{side.name}: check")
            try:
                with Worker(side, self._stage, self.limit_s) as worker:
                    worker.ask("check", **side.settings, B=B, T=T)
            except UserError as e:
                if not self.plan.every.get(side.name):
                    raise
                self._leave_out(side, e)

    def _leave_out(self, side: Side, why: UserError) -> None:
        """Go on without a peer, unless it is the last one and nothing is measured."""
        self.left_out[side.name] = str(why).removeprefix(f"{side.name}: ")
        self.theirs = [s for s in self.theirs if s.name != side.name]
        self.view.left_out(side.name, self.left_out[side.name])
        if not (self.theirs or self.results):
            raise UserError(f"--peer {BEST}: this machine has none: {'; '.join(dict.fromkeys(self.left_out.values()))}")

    def _pair(self, side: Side, B: int, T: int, folder: Path) -> PeerResult:
        """Measure one size against one peer."""
        result = self._result(side.name, B, T)
        with ExitStack() as stack:
            workers = {}
            for key, s in ("cpuopt", self.ours[side.name]), ("peer", side):
                self._stage(f"{B}x{T} {s.name}: start")
                workers[key] = stack.enter_context(Worker(s, self._stage, self.limit_s, rests=True))
                result.versions[key] = self._init(workers[key], B, T, folder)
            self._stage(f"{B}x{T} {side.name}: first steps")
            names = "cpuopt", side.name
            result.refused = other_model(names, SCALES, *(w.losses(SCALES) for w in workers.values())) or None
            if result.refused:
                return result
            first = {key: w.steps(CHECKED_STEPS) for key, w in workers.items()}
            result.losses = {key: steps.losses for key, steps in first.items()}
            types = result.dtype, result.peer_dtype, self.plan.moments
            tolerance = BF16_TOLERANCE if {"bf16", "int8"} & {*types} else TOLERANCE
            stored = side.name in PEERS and PEERS[side.name].bf16 == "all"
            losses = first["cpuopt"].losses, first["peer"].losses
            result.refused = disagreement(names, *losses, tolerance, updates_rounded=stored) or None
            if result.refused:
                return result
            slower_ms = max(min(steps.step_ms) for steps in first.values())
            result.steps_per_trial = max(1, min(MOST_STEPS, math.ceil(TRIAL_MS / slower_ms)))
            self._stage(f"{B}x{T} {side.name}")
            self._compare(workers, result)
            for key, worker in workers.items():
                last = worker.peak()
                result.peak_rss_mb[key] = float(last["peak_rss_mb"])
                result.versions[key] |= last.get("versions", {})
                result.library |= last.get("library", {})
                if key == "cpuopt":
                    result.gflop, result.peak_gflops = last.get("gflop"), last.get("peak_gflops")
                    result.roof_ms = last.get("roof_ms")
            if result.gflop and result.peak_gflops:
                least_ms = 1e3 * result.gflop / result.peak_gflops
                shares = {key: 100 * least_ms / ms["quiet"] for key, ms in result.step_ms.items()}
                result.of_peak = shares if all(map(fits, shares.values())) else {}
            if result.roof_ms and result.roof_ms > result.step_ms["cpuopt"]["quiet"]:
                result.roof_ms = None
                result.doubts.append("a step of cpuopt is faster than the roofs allow: no ratio at the roofs")
        return result

    def _init(self, worker: Worker, B: int, T: int, folder: Path) -> dict[str, str]:
        """Pass batches and weights to a worker; the first of all workers makes the weights."""
        batches, params = folder / f"batches-{B}x{T}.npy", folder / "params.npz"
        brings = self.config.inputs(B, T) is not None
        if not brings and not batches.exists():
            corpus = load_corpus("builtin", vocab_size=self.config.vocab_size, T=T, B=B)
            train = corpus.batches("train", B, T, seed=self.plan.seed)
            np.save(batches, np.stack([np.stack(train.at(i)) for i in range(BATCHES)]))
        answer = worker.ask(
            "init",
            **worker.side.settings,
            B=B,
            T=T,
            batches="" if brings else str(batches),  # (BATCHES, 2, B, T)
            params=str(params),
            write_params=not params.exists(),
        )
        if answer.get("threads") != self.plan.threads:
            raise UserError(
                f"{worker.side.name}: runs on {answer.get('threads')} threads; expected {self.plan.threads}, because "
                "both sides must have as many; give --threads"
            )
        return dict(answer.get("versions", {}))

    def _compare(self, workers: Mapping[str, Worker], result: PeerResult) -> None:
        """Train with both sides in alternating trials, and compute the figures."""
        times = {key: Steps() for key in workers}
        trials = 0

        def train(key: str) -> float:
            nonlocal trials
            how = way(workers.values(), self.plan.threads, self.pause_s)
            steps = workers[key].steps(1 + result.steps_per_trial, waiting=how).later()
            times[key].add(steps)
            if key == "cpuopt":
                result.waiting[steps.waiting] = result.waiting.get(steps.waiting, 0) + 1
            trials += 1
            self.view.at(self._cost + (START_ROUNDS + trials / 2) * round_cost(result.B, result.T))
            return lower_quartile(steps.step_ms)

        others = machine.Others(workers.values())
        sides = partial(train, "cpuopt"), partial(train, "peer")
        found = compare(*sides, seed=self.plan.seed, analyses=[self.plan.rounds], control=False, warm_up=False)
        verdict = found.verdict()
        result.order, result.ratios = found.order, found.ratios().tolist()
        result.ratio, result.level, result.verdict = verdict.ratio, verdict.level, verdict.word
        for key, steps in times.items():
            ms = steps.step_ms
            ends = {"quiet": lower_quartile(ms), "median": float(np.median(ms)), "min": min(ms), "max": max(ms)}
            result.step_ms[key] = {**ends, "values": ms}
            result.phases_ms[key] = {p: lower_quartile(v) for p, v in steps.phases_ms.items()}
            result.losses[key] += steps.losses
        result.doubts = others.warnings()
        if verdict.level < LEVEL:
            result.doubts.append(f"{found.rounds} rounds are few: the interval is one of {verdict.level:g} %")
        if not all(math.isfinite(loss) for losses in result.losses.values() for loss in losses):
            result.doubts.append("a loss is not finite")
        if verdict.why:
            result.doubts.append(f"{verdict.word}: {verdict.why}")

"""Whole training steps, side by side with a peer: PyTorch, or another variant of cpuopt's kernels.

Both sides train the same model from the same weights on the same batches, each in a process of its own, because two
OpenMP runtimes must not share one. They take turns, A B B A or B A A B, so that what drifts meets both alike; each
round gives one ratio, and the bootstrap over rounds gives its interval. No ratio is given where the losses of the
first steps differ, because then the two do not compute the same.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil

from . import record
from .bench_process import LIMIT_S, Side, Steps, Worker, ended_by_sigterm
from .data import load_corpus
from .errors import UserError
from .models.gpt2 import parse_config

Array = np.ndarray[Any, Any]

PEERS = {"torch-eager": "eager", "torch-compile": "compile"}
SIZES = "1x16,1x32,2x16,1x64,4x64,16x64,1x1024"
OPTIMIZER = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
BATCHES = 8
"""Batches that both sides go through again and again."""
CHECKED_STEPS = 3
"""Steps whose losses must agree; they are the warm-up too."""
TOLERANCE = 1e-3
"""How far the losses of one step may differ, relative to the peer's."""
TURN_MS = 300.0
"""A turn is as many steps as fill this time, at most `MOST_STEPS`; its median counts."""
MOST_STEPS = 50
PAUSE_S = 0.25
"""Between turns: the OpenMP threads of the side that had its turn may spin for 0.2 s."""
RESAMPLES = 10_000


class View(Protocol):
    """Who hears of the progress."""

    def stage(self, text: str) -> None:
        """Something begins."""

    def advance(self, cost: float) -> None:
        """So much of `Plan.cost` is done."""

    def done(self, result: Result) -> None:
        """One size against one peer is measured."""


class Silence:
    """Nobody hears."""

    def stage(self, text: str) -> None:
        """Say nothing."""

    def advance(self, cost: float) -> None:
        """Say nothing."""

    def done(self, result: Result) -> None:
        """Say nothing."""


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes
    ----------
    model : preset or sizes, as for `train`.
    sizes : (B, T) each.
    peers : of `PEERS`.
    against : variants of cpuopt; they run without the swaps.
    variant, swap, kernels : of cpuopt's own side.
    threads : of every side.
    rounds : turns of each side.
    seed : of the order of turns and of the initial weights.
    peer_python : that has torch.
    processes : how many compile.
    """

    model: str = "gpt2-124M"
    sizes: tuple[tuple[int, int], ...] = ((4, 64),)
    peers: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    variant: str = "vanilla"
    swap: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    threads: int = 1
    rounds: int = 10
    seed: int = 0
    peer_python: str = sys.executable
    processes: int = 1

    def check(self) -> None:
        """Refuse what cannot be measured, before anything starts.

        Raises
        ------
        UserError
            Naming the flag.
        """
        name, config = parse_config(self.model)
        for B, T in self.sizes:
            if config.block_size < T:
                raise UserError(f"--sizes {B}x{T}: {name} has a context of {config.block_size} tokens; take T up to it")
        for flag, n, least in ("--rounds", self.rounds, 2), ("--threads", self.threads, 1), ("--seed", self.seed, 0):
            if n < least:
                raise UserError(f"{flag} {n}: expected {least} or more")
        for peer in self.peers:
            if peer not in PEERS:
                raise UserError(f"--peer {peer}: expected one of {', '.join(PEERS)}; variants of cpuopt: --against")
        if not self.peers and not self.against:
            raise UserError("nothing to compare with: give --peer or --against")

    @property
    def cost(self) -> float:
        """The length of the work, in the unit of `View.advance`."""
        return sum(pair_cost(B, T, self.rounds) for B, T in self.sizes) * (len(self.peers) + len(self.against))


def round_cost(B: int, T: int) -> float:
    """Estimate how long a round takes, in tokens: what does not depend on the batch costs as much as about 64."""
    return 64.0 + B * T


def pair_cost(B: int, T: int, rounds: int) -> float:
    """Estimate how long one size against one peer takes: start and warm-up cost as much as 5 rounds."""
    return (rounds + 5) * round_cost(B, T)


def parse_sizes(text: str) -> tuple[tuple[int, int], ...]:
    """Read ``4x64,16x64``: rows by tokens.

    Raises
    ------
    UserError
        For anything else.
    """
    sizes = []
    for item in text.split(","):
        B, x, T = item.strip().partition("x")
        if not (x and B.isdecimal() and T.isdecimal() and int(B) and int(T)):
            raise UserError(f"--sizes {text!r}: {item!r} is no size; expected BxT, as in 4x64,16x64")
        sizes.append((int(B), int(T)))
    return tuple(dict.fromkeys(sizes))


@dataclass
class Result:
    """One size against one peer; what has two sides is keyed ``cpuopt`` and ``peer``, and is in the order of measuring.

    Attributes
    ----------
    refused : why there is no ratio.
    order : who had its turn, from first to last: A is cpuopt.
    ratio : median over rounds of the peer's time over cpuopt's, and the 95 % interval; a round compares medians of turns.
    doubts : what speaks against the figures.
    """

    peer: str
    B: int
    T: int
    threads: int
    refused: str | None = None
    order: str = ""
    steps_per_turn: int = 0
    ratio: dict[str, float] | None = None
    ratios: list[float] = field(default_factory=list)
    step_ms: dict[str, dict[str, Any]] = field(default_factory=dict)
    phases_ms: dict[str, dict[str, float]] = field(default_factory=dict)
    peak_rss_mb: dict[str, float] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)


def schedule(rounds: int, seed: int) -> str:
    """Give the order of turns: blocks of two rounds, each A B B A or B A A B."""
    rng = np.random.default_rng(seed)
    return "".join(("ABBA", "BAAB")[i] for i in rng.integers(0, 2, (rounds + 1) // 2))[: 2 * rounds]


def resample(ratios: Sequence[float], seed: int = 0) -> Array:
    """Bootstrap the median: (RESAMPLES,) medians of as many ratios, drawn with replacement."""
    picks = np.random.default_rng(seed).integers(0, len(ratios), (RESAMPLES, len(ratios)))
    return np.asarray(np.median(np.asarray(ratios)[picks], axis=1))


def interval(middle: float, resampled: Array) -> dict[str, float]:
    """Put a figure between the 2.5 % and 97.5 % percentiles of its resampled values."""
    low, high = np.percentile(resampled, [2.5, 97.5])
    return {"median": float(middle), "low": float(low), "high": float(high)}


def geometric_mean(ratios_by_size: Sequence[Sequence[float]]) -> dict[str, float]:
    """Average the median ratios of several sizes, with an interval from resampling each."""
    medians = np.log([np.median(r) for r in ratios_by_size])
    resampled = np.mean([np.log(resample(r, seed)) for seed, r in enumerate(ratios_by_size)], axis=0)
    return interval(math.exp(medians.mean()), np.exp(resampled))


def disagreement(name: str, ours: Sequence[float], theirs: Sequence[float]) -> str | None:
    """Say how the losses of the first steps differ, where they differ by too much or are not finite."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True), start=1):
        if not (math.isfinite(a) and math.isfinite(b) and abs(a - b) <= TOLERANCE * abs(b)):
            return (
                f"no ratio, because the losses of step {i} differ: cpuopt {a:.6g}, {name} {b:.6g}; expected the same "
                f"within {TOLERANCE:g} of it, from the same weights and batches"
            )
    return None


class Bench:
    """Measures a plan.

    Parameters
    ----------
    view : hears of the progress.
    ours, theirs : the sides, in place of those that the plan comes to.
    pause_s : between turns.
    limit_s : how long a worker may take for one answer.
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
    ) -> None:
        plan.check()
        self.plan, self.view, self.pause_s, self.limit_s = plan, view or Silence(), pause_s, limit_s
        self.ours = ours or cpuopt_side(plan, "cpuopt", plan.variant, plan.swap)
        self.theirs = list(theirs) if theirs is not None else peer_sides(plan)
        self.name, self.config = parse_config(plan.model)

    def run(self, out: Path | None = None) -> dict[str, Any]:
        """Measure all sizes against all peers, and return the record.

        A failure is recorded as the reason why there is no ratio, except that of the very first pair.

        Parameters
        ----------
        out : a file that gets the record, anew after each result.

        Raises
        ------
        UserError
            For a plan that cannot be measured: the first pair failed.
        """
        if out and not out.absolute().parent.is_dir():
            raise UserError(f"--out {out}: no folder {str(out.absolute().parent)!r}; make it first")
        results: list[Result] = []
        report = self._report(results)
        with ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="cpuopt-bench-") as folder:
            for B, T in self.plan.sizes:
                for side in self.theirs:
                    try:
                        result = self.pair(side, B, T, Path(folder))
                    except UserError as e:
                        if not results:
                            raise
                        result = Result(side.name, B, T, self.plan.threads, refused=f"no ratio, because {e}")
                    results.append(result)
                    report = self._report(results, report["machine"])
                    if out:
                        part = out.with_name(f".{out.name}.part")
                        part.write_text(json.dumps(report, indent=1) + "\n")
                        part.replace(out)
                    self.view.done(result)
        return report

    def pair(self, side: Side, B: int, T: int, folder: Path) -> Result:
        """Measure one size against one peer."""
        plan, result = self.plan, Result(side.name, B, T, self.plan.threads)
        with ExitStack() as stack:
            workers = {}
            for key, s in ("cpuopt", self.ours), ("peer", side):
                self.view.stage(f"{B}x{T}: {s.name} starts")
                workers[key] = worker = stack.enter_context(Worker(s, self.view.stage, self.limit_s))
                result.versions[key] = self._init(worker, B, T, folder)
            self.view.stage(f"{B}x{T}: {side.name}, first steps")
            first = {key: w.steps(CHECKED_STEPS) for key, w in workers.items()}
            result.losses = {key: steps.losses for key, steps in first.items()}
            self.view.advance(5 * round_cost(B, T))
            result.refused = disagreement(side.name, first["cpuopt"].losses, first["peer"].losses)
            if result.refused:
                self.view.advance(plan.rounds * round_cost(B, T))
                return result
            slower_ms = max(min(steps.step_ms) for steps in first.values())
            result.steps_per_turn = max(1, min(MOST_STEPS, math.ceil(TURN_MS / slower_ms)))
            self.view.stage(f"{B}x{T}: {side.name}")
            self._turns(workers, result)
            for key, worker in workers.items():
                last = worker.peak()
                result.peak_rss_mb[key] = float(last["peak_rss_mb"])
                result.versions[key] |= last.get("versions", {})
        return result

    def _init(self, worker: Worker, B: int, T: int, folder: Path) -> dict[str, str]:
        """Give a worker its batches and weights. The first of all workers makes the weights."""
        batches, params = folder / f"batches-{B}x{T}.npy", folder / "params.npz"
        if not batches.exists():
            corpus = load_corpus("builtin", vocab_size=self.config.vocab_size, T=T, B=B)
            train = corpus.batches("train", B, T, seed=self.plan.seed)
            np.save(batches, np.stack([np.stack(train.at(i)) for i in range(BATCHES)]))
        made = folder / "params.made"
        s = worker.side.settings
        more = {"settings": {**s["settings"], "B": B, "T": T}} if "settings" in s else {}
        answer = worker.ask(
            "init", **{**s, **more}, batches=str(batches), params=str(params), write_params=not made.exists()
        )
        made.touch()
        if answer.get("threads") != self.plan.threads:
            raise UserError(
                f"{worker.side.name}: runs on {answer.get('threads')} threads; expected {self.plan.threads}, because "
                "both sides must have as many; give --threads"
            )
        return {str(k): str(v) for k, v in answer.get("versions", {}).items()}

    def _turns(self, workers: dict[str, Worker], result: Result) -> None:
        """Let both take their turns, and work out the figures."""
        k, order = result.steps_per_turn, schedule(self.plan.rounds, self.plan.seed)
        times = {key: Steps() for key in workers}
        turns: dict[str, list[float]] = {key: [] for key in workers}
        others = Others(workers)
        for i, letter in enumerate(order):
            key = "cpuopt" if letter == "A" else "peer"
            time.sleep(self.pause_s)
            steps = workers[key].steps(k)
            times[key].add(steps)
            turns[key].append(float(np.median(steps.step_ms)))
            if i % 2:
                self.view.advance(round_cost(result.B, result.T))
        result.order = order
        result.ratios = [b / a for a, b in zip(turns["cpuopt"], turns["peer"], strict=True)]
        result.ratio = interval(float(np.median(result.ratios)), resample(result.ratios))
        for key, steps in times.items():
            ms = steps.step_ms
            result.step_ms[key] = {"median": float(np.median(ms)), "min": min(ms), "max": max(ms), "values": ms}
            result.phases_ms[key] = {p: float(np.median(v)) for p, v in steps.phases_ms.items()}
            result.losses[key] = result.losses[key] + steps.losses
        result.doubts = self._doubts(result, others.cores())

    def _doubts(self, result: Result, others: float) -> list[str]:
        doubts = []
        if others > 0.1:
            doubts.append(f"other processes used {others:.2f} cores meanwhile")
        if self.plan.rounds < 6:
            doubts.append(f"{self.plan.rounds} rounds are too few for a 95 % interval")
        if not all(math.isfinite(loss) for losses in result.losses.values() for loss in losses):
            doubts.append("a loss is not finite")
        if result.ratio and result.ratio["low"] <= 1 <= result.ratio["high"]:
            doubts.append("no difference shown")
        return doubts

    def _report(self, results: Sequence[Result], machine: dict[str, Any] | None = None) -> dict[str, Any]:
        plan = asdict(self.plan)
        del plan["peer_python"], plan["processes"]
        means = {}
        for side in self.theirs:
            ratios = [r.ratios for r in results if r.peer == side.name and r.ratio]
            if len(ratios) > 1:
                means[side.name] = geometric_mean(ratios)
        return {
            "kind": "cpuopt-bench",
            "format": 1,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "plan": plan,
            "model": {"name": self.name, **asdict(self.config), "parameters": self.config.n_params},
            "dtype": "float32",
            "optimizer": {"name": "AdamW", **OPTIMIZER},
            "machine": machine or record.machine(),
            "results": [asdict(r) for r in results],
            "geometric_mean": means,
        }


class Others:
    """What processes other than the workers use of the processors, from now on."""

    def __init__(self, workers: dict[str, Worker]) -> None:
        self.workers = workers
        self._start = self._now()

    def cores(self) -> float:
        """Give their use since then, in cores; time that a hypervisor took away is in it."""
        wall, busy = (b - a for a, b in zip(self._start, self._now(), strict=True))
        return max(0.0, busy / wall)

    def _now(self) -> tuple[float, float]:
        t = psutil.cpu_times()
        busy = sum(getattr(t, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))
        return time.monotonic(), busy - sum(w.cpu_s() for w in self.workers.values())


def cpuopt_side(plan: Plan, name: str, variant: str, swap: tuple[str, ...]) -> Side:
    """Describe cpuopt with some kernels."""
    settings = {
        "model": plan.model,
        "variant": variant,
        "swap": swap,
        "kernels": plan.kernels,
        "threads": plan.threads,
        "seed": plan.seed,
        "processes": plan.processes,
        **OPTIMIZER,
    }
    path = str(Path(__file__).resolve().parents[1])
    environment = {"NUMBA_NUM_THREADS": str(plan.threads), "PYTHONPATH": path}
    return Side(name, (sys.executable, "-P", "-m", "cpuopt.bench_worker"), {"settings": settings}, environment)


def peer_sides(plan: Plan) -> list[Side]:
    """Describe the peers of a plan.

    Raises
    ------
    UserError
        Where PyTorch's side is not there.
    """
    script = Path(__file__).resolve().parents[1] / "benchmarks" / "peer_worker.py"
    if plan.peers and not script.is_file():
        raise UserError(
            f"--peer {plan.peers[0]}: {str(script)!r} is not there, because it does not come with an installed "
            "package; run from a checkout (pip install -e '.[peers]'), or compare variants: --against vanilla"
        )
    n = str(plan.threads)
    environment = {"OMP_NUM_THREADS": n, "MKL_NUM_THREADS": n}
    sizes = asdict(parse_config(plan.model)[1])
    common = {"sizes": sizes, "threads": plan.threads, "optimizer": OPTIMIZER}
    peers = [
        Side(peer, (plan.peer_python, str(script)), {"mode": PEERS[peer], **common}, environment) for peer in plan.peers
    ]
    return peers + [cpuopt_side(plan, variant, variant, ()) for variant in plan.against]

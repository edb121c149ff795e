"""The analysis of the times of some steps: sums by kind of op and by layer, and the object in ``profile.json``.

There is one statistic, the lower quartile over the steps (`measure.quartile`): of the time of each call, and of what
is left of a step between calls. The time of a step is their sum, so the rows add up to it. Other processes that
disturb most steps, each at another call, then move no row. Steps with other calls have quartiles of their own, and
count by their number. All raw values are kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from shlex import quote
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..ops import ALL, DECLARED
from ..ops.storage import TYPES
from ..wording import count, four
from .lines import OpLines
from .quartile import lower_quartile
from .roofline import BF16, FMA, INT8, UNFIT, Roofs, TimedCall, fits

if TYPE_CHECKING:
    from ..building import Bound
    from ..program.program import Call

Array = np.ndarray[Any, Any]
UNACCOUNTED = "(unaccounted)"
"""The row for the time of a step that no kernel accounts for."""


@dataclass(frozen=True)
class StepTimes:
    """The raw times of one step, all in ns of the profiler's clock.

    Attributes
    ----------
    number : counted from 0, with the steps that are dropped later.
    runs : for each phase that ran, its n calls and the n + 1 readings of the clock before, between and after them.
    regions : for each run, (n + 1, 3) readings of the counters of ``toolkit.regions.watch``; none if it is off.
    work : for each run, (n,) shares of the FLOPs of each call that its data asked for; none if all did.
    """

    number: int
    start: int
    end: int
    runs: list[tuple[Sequence[Bound], Array]]
    regions: list[Array] = field(default_factory=list)
    work: list[Array] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The quiet time and the rates of some calls of a step.

    Attributes
    ----------
    share : the share of the step, in percent.
    gflops, gbs : rates; 0 if there is nothing to count.
    flops, bytes : those of a step that the mathematics needs, whatever the kernel does.
    intensity : FLOPs a byte.
    of_roof : percent of the roof that binds, whose name is `roof`; None if no roofs are known.
    imbalance : time of the slowest thread over the mean of all; None if it was not measured.
    types : the storage types of the arrays of floating-point numbers that the calls read and write.
    of_work : where FLOPs depend on the data: those that the data asked for, which `flops` counts, in percent of the
        most that they can be.
    """

    op: str
    calls: int
    ms: float
    share: float
    gflops: float
    gbs: float
    flops: int
    bytes: int
    intensity: float
    of_roof: float | None
    roof: str
    imbalance: float | None
    types: list[str] = field(default_factory=list)
    of_work: float | None = None


@dataclass(frozen=True, kw_only=True)
class OpRow(Figures):
    """One kind of op, and the kernels that ran, as ``matmul_forward[vanilla]``; `label` is its name in llm.c's words.

    `op` holds the names of the ops, as flags take them; in records of earlier versions the label.
    """

    kernels: list[str]
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class LayerRow(Figures):
    """One op in one layer by one variant; `phase` is ``recompute`` if it computes again what the forward did."""

    layer: str
    variant: str
    phase: str


@dataclass
class Profile:
    """The profile of a run.

    Attributes
    ----------
    steps : the number of steps measured; `warmup` more came before and were dropped.
    step_ms : ``median``, ``min``, ``max`` and ``mean`` of `step_ms_values`; and ``quiet``, to which the rows of `ops`
        add up. Records of earlier versions lack it: their rows add up to ``mean``, of the middle half.
    tokens_per_s : the rate by ``quiet``.
    peak_rss_mb, planned_peak_mb : the peak memory of the process, measured and predicted, in 10^6 bytes.
    ops : in the order of a step; `UNACCOUNTED` comes last and the shares add to 100.
    profiler_overhead_ms : the measured cost of profiling a step.
    checked : one entry a check of this run, with at least ``kernel`` and ``status``; without figures if one
        failed.
    roofs : the machine's roofs on this number of threads, if they are known.
    mfu : the time that the step's FLOPs take at the peaks of the types that they multiply, in percent of the step's.
    doubts : warnings about the figures.
    hashes : the hash of the sources of each kernel.
    commits : the commit of each kernel in a file outside the package, of that file's repository; None without one.
    origin : ``cpu``, ``time``, ``commit`` and ``command``, as far as they are known.
    ranks : the processes that share the step; rows and rates are those of the first one, tokens those of all.
    codes : the hash of the machine code of each kernel; empty for a plain Python function.
    lines : the lines of ops, of ``--lines``.
    int8 : ``layer``, ``error`` and ``zeroed`` of each product in int8, as `quantization.ProductError` has them.
    raw : the times of every step; not part of the JSON.
    """

    JSON: ClassVar[tuple[str, ...]]
    model: str
    B: int
    T: int
    threads: int
    threading_layer: str
    variant: str
    swaps: list[str]
    steps: int
    warmup: int
    step_ms: dict[str, float]
    tokens_per_s: float
    peak_rss_mb: float
    planned_peak_mb: float
    ops: list[OpRow]
    layers: list[LayerRow]
    unaccounted_ms: float
    profiler_overhead_ms: float
    step_ms_values: list[float]
    checked: list[dict[str, Any]]
    versions: dict[str, str]
    raw: list[StepTimes] = field(default_factory=list, repr=False)
    roofs: Roofs | None = None
    mfu: float | None = None
    doubts: list[str] = field(default_factory=list)
    hashes: dict[str, str] = field(default_factory=dict)
    commits: dict[str, str | None] = field(default_factory=dict)
    codes: dict[str, str] = field(default_factory=dict)
    ranks: int = 1
    origin: dict[str, str] = field(default_factory=dict)
    lines: list[OpLines] = field(default_factory=list)
    int8: list[dict[str, Any]] = field(default_factory=list)

    @property
    def words(self) -> str:
        """A summary in words of where the time goes."""
        return words(self)

    @property
    def quiet_ms(self) -> float:
        """The time of a step that is shown."""
        return quiet_ms(self.step_ms)

    @property
    def op_ms_values(self) -> dict[str, list[float]]:
        """Return the ms of each kind of op in each step."""
        found: dict[str, list[float]] = {r.op: [0.0] * len(self.raw) for r in self.ops if r.kernels}
        names = {r.label: r.op for r in self.ops}
        for i, step in enumerate(self.raw):
            for calls, marks in step.runs:
                for bound, ns in zip(calls, np.diff(marks).tolist(), strict=True):
                    # a step whose update was skipped has fewer kinds than the one that is shown, or more
                    label = bound.call.op.label
                    found.setdefault(names.get(label, label), [0.0] * len(self.raw))[i] += ns / 1e6
        return found


Profile.JSON = (*(f.name for f in fields(Profile) if f.name != "raw"), "words", "op_ms_values")


def quiet_ms(step_ms: Mapping[str, float]) -> float:
    """Return the time of a step that is shown, of a `Profile.step_ms` of any version."""
    return step_ms.get("quiet", step_ms["mean"])


def op_ids(label: str, kernels: Iterable[str]) -> str:
    """Return the ids of the ops of a row, which flags take; a row without kernels keeps its label."""
    return ", ".join(dict.fromkeys(k.partition("[")[0] for k in kernels)) or label


class Sums:
    """The quiet times of a step, per call: the lower quartile over some steps.

    Attributes
    ----------
    ns, calls, work : of each bound call: its time, how often it runs, and the share of its declared FLOPs that its
        data ask for, times how often it runs.
    step_ns : the sum of all calls, and of what is between them.
    """

    def __init__(self, steps: Sequence[StepTimes], roofs: Roofs | None = None) -> None:
        self.roofs = roofs
        kinds: dict[tuple[str, ...], list[StepTimes]] = {}
        for s in steps:
            kinds.setdefault(tuple(calls[0].call.phase for calls, _ in s.runs if calls), []).append(s)
        self.bounds = list({id(b): b for s in steps for calls, _ in s.runs for b in calls}.values())
        at = {id(b): i for i, b in enumerate(self.bounds)}
        self.ns, self.calls, self.work, self.between_ns = np.zeros(len(at)), np.zeros(len(at)), np.zeros(len(at)), 0.0
        self.threads_ns = np.zeros((len(at), 2))
        """For the regions of each call: threads times the slowest one's time, and the sum of all threads' times."""
        for kind in kinds.values():
            weight, ns = len(kind) / len(steps), np.zeros((len(kind), len(at)))
            for row, s in zip(ns, kind, strict=True):
                for calls, marks in s.runs:
                    np.add.at(row, [at[id(b)] for b in calls], np.diff(marks))
            picked = np.array([lower_quartile(range(len(kind)), column.tolist().__getitem__) for column in ns.T])
            for number, s in enumerate(kind):
                for n, (calls, _) in enumerate(s.runs):
                    where = np.array([at[id(b)] for b in calls], int)
                    mine = weight * (picked[where] == number)
                    np.add.at(self.calls, where, mine)
                    np.add.at(self.work, where, mine * (s.work[n] if s.work else 1))
                    if s.regions:
                        np.add.at(self.threads_ns, where, mine[:, None] * np.diff(s.regions[n], axis=0)[:, :2])
            self.ns += weight * ns[picked, range(len(at))]
            between = [s.end - s.start - row.sum() for s, row in zip(kind, ns, strict=True)]
            self.between_ns += weight * float(lower_quartile(between))
        self.step_ns = float(self.ns.sum() + self.between_ns)

    def op_rows(self) -> list[OpRow]:
        """Return one row a label, in the order of their first call in a step, and the remaining time."""
        rows = []
        for (label,), at in self._groups(lambda b: (b.call.op.label,)).items():
            used = list(dict.fromkeys(self.bounds[i].kernel.name for i in at))
            rows.append(OpRow(op=op_ids(label, used), **self._figures(at), kernels=used, label=label))
        rest = self._figures([]) | {"ms": self.between_ns / 1e6, "share": 100 * self.between_ns / self.step_ns}
        return [*rows, OpRow(op=UNACCOUNTED, **rest, kernels=[], label=UNACCOUNTED)]

    def layer_rows(self) -> list[LayerRow]:
        """Return one row a layer, op and variant, layer by layer."""
        groups = self._groups(lambda b: (b.call.layer, b.call.op.name, b.kernel.variant, b.call.shown_phase))
        layers = list(dict.fromkeys(layer for layer, *_ in groups))
        return [
            LayerRow(op=op, layer=layer, variant=variant, phase=phase, **self._figures(at))
            for (layer, op, variant, phase), at in sorted(groups.items(), key=lambda g: layers.index(g[0][0]))
        ]

    def measured(self, i: int) -> TimedCall:
        """Return the mean over the runs of a bound call in a step."""
        call, n = self.bounds[i].call, float(self.calls[i])
        return TimedCall(
            call.op.name, float(self.ns[i]) / n, call.flops * float(self.work[i]) / n, call.bytes, call.operands
        )

    def declared(self) -> Iterator[TimedCall]:
        """Yield the calls of the package's ops: those of a user's file may declare wrong FLOPs."""
        for i, bound in enumerate(self.bounds):
            if self.calls[i] and bound.call.op.name in DECLARED:
                yield self.measured(i)

    @property
    def least_ns(self) -> float:
        """The time that the step's FLOPs take at the peaks of the types that they multiply; what is repeated is not."""
        assert self.roofs
        found: dict[str, float] = {}
        for b, n in zip(self.bounds, self.work.tolist(), strict=True):
            if not b.call.repeats:
                found[b.call.operands] = found.get(b.call.operands, 0.0) + b.call.flops * n
        return self.roofs.compute_ns(found)

    def _groups(self, key: Callable[[Bound], tuple[str, ...]]) -> dict[tuple[str, ...], list[int]]:
        groups: dict[tuple[str, ...], list[int]] = {}
        for i, bound in enumerate(self.bounds):
            groups.setdefault(key(bound), []).append(i)
        return groups

    def _figures(self, at: Sequence[int]) -> dict[str, Any]:
        ns = float(self.ns[at].sum())
        flops = sum(self.bounds[i].call.flops * self.work[i] for i in at)
        most = sum(self.bounds[i].call.flops * self.calls[i] for i in at)
        by_data = any(self.bounds[i].call.op.asked for i in at)
        nbytes = sum(self.bounds[i].call.bytes * self.calls[i] for i in at)
        slowest, mean = self.threads_ns[at].sum(axis=0)
        return {
            "calls": round(self.calls[at].sum()),
            "ms": ns / 1e6,
            "share": 100 * ns / self.step_ns,
            "gflops": float(flops / ns) if ns else 0.0,
            "gbs": float(nbytes / ns) if ns else 0.0,
            "flops": round(flops),
            "bytes": round(nbytes),
            "intensity": float(flops / nbytes) if nbytes else 0.0,
            **self._roof(at, ns),
            "imbalance": float(slowest / mean) if mean else None,
            "types": sorted({t for i in at for t in float_types(self.bounds[i].call)}),
            "of_work": float(100 * flops / most) if by_data and most else None,
        }

    def _roof(self, at: Sequence[int], ns: float) -> dict[str, Any]:
        """Return the share of the roof that binds; if calls have several, the one that bounds most of the time."""
        if not self.roofs or not ns:
            return {"of_roof": None, "roof": ""}
        least: dict[str, float] = {}
        for i in at:
            if self.calls[i]:
                m = self.measured(i)
                time, name = self.roofs.bound(m.flops, m.nbytes, m.operands)
                least[name] = least.get(name, 0.0) + time * float(self.calls[i])
        return {"of_roof": 100 * sum(least.values()) / ns, "roof": max(least, key=lambda name: least[name])}


def float_types(call: Call) -> set[str]:
    """Return the storage types of a call's arrays of floating-point numbers."""
    there = (call.types.get(a.name, a.dtype) for a in call.op.arrays if call.args[a.name] is not None)
    return {name for name in there if TYPES[name].is_float}


def passed(rows: Iterable[OpRow]) -> list[str]:
    """List a warning if ops exceed their roof, and no call could raise it."""
    over = sorted((r for r in rows if r.of_roof is not None and not fits(r.of_roof)), key=lambda r: -(r.of_roof or 0))
    if not over:
        return []
    most, others = over[0], len(over) - 1
    more = f" and {count(others, 'more op')} too" if others else ""
    return [
        f"{op_ids(most.op, most.kernels)} is at {most.of_roof:.1f} % of the {most.roof} roof, which is impossible{more}"
        ": its arrays stay in a nearer cache, or it declares more FLOPs or bytes than it needs. Such shares are shown "
        f"as {UNFIT}"
    ]


def refuted(rows: Iterable[Figures]) -> set[str]:
    """Return the roofs that some rows pass."""
    return {r.roof for r in rows if r.of_roof is not None and not fits(r.of_roof)}


def peaks(rows: Iterable[Figures]) -> str:
    """Name the peaks that the FLOPs of a step are held against."""
    rows = [*rows]
    found = [INT8] * any(r.op in DECLARED and ALL[r.op].operands({}) == "int8" for r in rows)
    found += [BF16] * any("bfloat16" in r.types for r in rows)
    return f"{', '.join(found)} and {FMA} peaks" if found else f"{FMA} peak"


def words(p: Profile) -> str:
    """Describe where the time of a step goes, and where most of it could be saved."""
    step = quiet_ms(p.step_ms)
    text = f"A step takes {four(step)} ms"
    if fits(p.mfu):
        text += f", {p.mfu:.0f} % of the {peaks(p.ops)} of {count(p.threads, 'thread')} (MFU)"
    rows, then = [r for r in p.ops if r.kernels], ""
    families: dict[str, list[OpRow]] = {}
    for r in rows:
        families.setdefault(op_ids(r.op, r.kernels).partition("_")[0], []).append(r)
    name, most = max(families.items(), key=lambda f: sum(r.ms for r in f[1]))
    ms = sum(r.ms for r in most)
    text += f". {name} is {100 * ms / step:.0f} % of it"
    if all(r.of_roof is not None for r in rows):
        least = sum(r.ms * (r.of_roof or 0) / 100 for r in most)
        text += f", at {100 * least / ms:.0f} % of its roof" if all(fits(r.of_roof) for r in most) else ""
        where, excess, at, roof = most_above_roof(p.layers)
        text += f". Furthest above its bound is {where}: {excess:,.{1 if excess >= 1 else 3}f} ms above the {roof} roof"
        text += f" ({at:.0f} % of it)"
        then = f" Next: {next_commands(where.partition(' ')[0], p.model, p.B, p.T)}"
        uneven = max(rows, key=lambda r: ((r.imbalance or 1) - 1) * r.ms)
        if (uneven.imbalance or 1) > 1.1:
            op = uneven.kernels[0].partition("[")[0]
            text += f". Threads wait most in {op}: the slowest takes {uneven.imbalance:.2f} times the mean"
    return f"{text}.{then}"


def next_commands(op: str, model: str, B: int, T: int) -> str:
    """Return the commands that write a kernel of an op to start from, and measure it at the sizes of a step."""
    return f"cpuopt new-kernel {op}; cpuopt lab {op}.py --model {quote(model)} -B {B} -T {T}"


def most_above_roof(layers: Sequence[LayerRow]) -> tuple[str, float, float, str]:
    """Find the op with the most ms above its roof, where most of these are; return name, ms, percent and roof."""
    of_op = headroom(layers, lambda r: (r.op, ""))[0][1]
    (op, layer), rows = headroom(of_op, lambda r: (r.op, re.sub(r"\.\d+(?=\.|$)", ".*", r.layer)))[0]
    ms, excess = sum(r.ms for r in rows), above_roof(rows)
    return f"{op} in {layer}", excess, 100 * (1 - excess / ms), max(rows, key=lambda r: r.ms).roof


def headroom(
    layers: Sequence[LayerRow], key: Callable[[LayerRow], tuple[str, str]] = lambda r: (r.op, r.variant)
) -> list[tuple[tuple[str, str], list[LayerRow]]]:
    """Group rows, by op and variant; the group with the most ms above its roof comes first."""
    groups: dict[tuple[str, str], list[LayerRow]] = {}
    for r in layers:
        groups.setdefault(key(r), []).append(r)
    return sorted(groups.items(), key=lambda g: -above_roof(g[1]))


def above_roof(rows: Sequence[LayerRow]) -> float:
    """Return the ms of a step that rows take beyond the bounds of their roofs."""
    return sum(r.ms * (1 - (r.of_roof or 0) / 100) for r in rows if fits(r.of_roof))

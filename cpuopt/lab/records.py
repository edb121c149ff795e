"""The records of earlier measurements in ``runs/``, listed, compared, and followed over time.

A record may be of any origin. A profile is read as its type. Of other records each field is checked by what uses it:
`readable` turns the errors of that into one line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import log
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from ..errors import UserError
from ..files.reading import from_json, misfit, parse_json, read_file, read_json
from ..measure.comparison import judge
from ..measure.profile import Profile, above_roof, op_ids, quiet_ms
from ..measure.profile import headroom as headroom_of
from ..measure.rates import machine_id
from ..measure.roofline import fits
from ..train import record
from ..wording import call_count, count, four, nearest, size_of

NOISE = 0.05
"""The assumed difference between two runs of the same kernels, where too few ops are shared to measure it."""
LEAST = 0.015
"""The smallest noise that is assumed between two runs."""
WIDE = 0.1
"""Half the width of an interval beyond which the verdict is inconclusive, unless the noise is larger."""
QUANTILE = 90.0
"""The percentile of the unchanged ops' differences that counts as noise."""
NAMED = re.compile(r"^\d{8}-\d{6}-")
"""The time at which a folder's name begins."""
UNREADABLE = ArithmeticError, AttributeError, LookupError, TypeError, ValueError
"""What use of a record raises whose fields are missing, of other types, or contradict each other."""


class Origin(TypedDict, total=False):
    """What a record says of where it was made."""

    machine_id: str | None
    commit: str | None


class Measured(TypedDict):
    """A time of an op in a record, with its kernel's hash."""

    time: str
    kind: str
    commit: str | None
    run: str
    size: str
    variant: str
    ms: float
    hash: str | None
    gflops: float | None


class Metrics(TypedDict):
    """The metrics of a training step that are drawn."""

    step: int
    loss: float | None


Point = tuple[int, float | None]
"""A step and its loss; None is not finite."""


@dataclass(frozen=True)
class Entry:
    """One folder in ``runs/``.

    Attributes
    ----------
    kind : ``ab``, ``bench``, ``lab``, ``profile``, ``sweep``, ``tune`` or ``train``.
    content : the record; for a training run its summary and, as ``profile``, its profile.
    what : a summary of the measurement, in a few words.
    trouble : the reason why it cannot be read; kind, time and content are then empty.
    """

    path: Path
    kind: str = ""
    time: str = ""
    content: Mapping[str, Any] = field(default_factory=dict)
    what: str = ""
    trouble: str = ""

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.path.name


def unreadable(path: Path, why: str) -> Entry:
    """Return the entry of a broken record."""
    return Entry(path, what=f"cannot be read: {why}", trouble=why)


def summary(kind: str, c: Mapping[str, Any]) -> str:
    """Sum up a record in a few words."""
    if kind == "ab":
        return f"{c['op']}: {c['b']} against {c['a']}{' in the step' if c['in_step'] else ''}: {c['verdict']}"
    if kind == "lab":
        ends = [f"failed in {k['bad']}" if k["bad"] else k["alone"]["verdict"] for k in c["kernels"]]
        names = [f"{k['op']}[{k['variant']}]" for k in c["kernels"]]
        return f"{c['file']}: {', '.join(map(' '.join, zip(names, ends, strict=True)))}"
    if kind == "judge":
        r = c["ruling"]
        return f"{c['op']}: {r['candidate']}, {r['verdict']}, score {r['timed']['score']:.3f}"
    if kind == "verdicts":
        return f"{c['runs']} comparisons of a kernel with itself, {c['false']:.1f} % false alarms"
    if kind == "sweep":
        over = " ".join(f"{symbol}={min(n)}..{max(n)}" for symbol, n in c["over"].items())
        return f"{c['op']}: {', '.join(c['variants'])} over {over}, {count(c['threads'], 'thread')}"
    if kind == "tune":
        step = f"steps {c['step']['verdict']}, {c['step']['ratio']['median']:.3f}" if c["step"] else c["why"]
        changed = len({rule.partition("@")[0] for rule in c["rules"]})
        job = f"{c['model']} {c['B']}x{c['T']}, {count(c['threads'], 'thread')}"
        return f"{job}: {count(changed, 'op')} changed; {step}"
    if p := c.get("profile"):
        if not from_json(Profile, p).step_ms_values:
            raise ValueError("step_ms_values is empty")
        end = c.get("summary") or {}  # of a run, what it said at its end
        whole = end.get("step_ms_quiet") or end.get("step_ms_median") or quiet_ms(p["step_ms"])
        swaps = "".join(f" + {s}" for s in p["swaps"])
        return f"{four(whole)} ms a step, {p['model']} {p['B']}x{p['T']}, {p['variant']}{swaps}{_course(c)}"
    model = c.get("model", "")
    return f"{model.get('name', '') if isinstance(model, dict) else model}{_course(c)}".removeprefix("; ")


def _course(c: Mapping[str, Any]) -> str:
    """Sum up the losses of a run, if it is one."""
    run = c.get("summary") or {}
    if run.get("loss_last") is None:
        return ""
    best = run.get("best_step")
    lowest = "" if best is None else f", lowest validation {run['val_loss'][str(best)]:.4f} after step {best}"
    return f"; loss {run['loss_last']:.4f} after {count(run['steps'], 'step')}{lowest}"


def keep(root: Path, kind: str, name: str, content: Mapping[str, Any]) -> Path:
    """Keep a record, with the machine that it was measured on."""
    return record.keep(root, kind, name, {"machine_id": machine_id(), **content})


def entries(root: Path) -> list[Entry]:
    """List all records, oldest first. Other folders are left out; a broken record has `Entry.trouble`."""
    try:
        folders = sorted(root.iterdir()) if root.is_dir() else []
    except OSError as e:
        raise UserError(f"--runs {root}: cannot be read ({e.strerror or e})") from e
    return [e for e in map(entry, folders) if e]


def entry(path: Path) -> Entry | None:
    """Read one folder; None if it holds no record."""
    try:
        if (path / "record.json").exists():
            content = read_json(path / "record.json")
            kind, when = content.get("kind"), content.get("time")
        elif (path / "summary.json").exists():
            content = {"summary": read_json(path / "summary.json")}
            if (path / "config.json").exists():
                content["settings"] = read_json(path / "config.json")
            if (path / "profile.json").exists():
                content["profile"] = read_json(path / "profile.json")
            if (path / "machine.json").exists():
                here = read_json(path / "machine.json")
                content |= {k: here.get(k) for k in ("machine_id", "commit")}
            t = path.name
            kind, when = "train", f"{t[:4]}-{t[4:6]}-{t[6:8]}T{t[9:11]}:{t[11:13]}:{t[13:15]}"
        else:
            return None
        if not isinstance(kind, str) or not isinstance(when, str):
            return unreadable(path, "kind and time are missing")
        from_json(Origin, content)
        return Entry(path, kind, when, content, summary(kind, content))
    except OSError as e:
        return unreadable(path, e.strerror or str(e))
    except UNREADABLE as e:
        return unreadable(path, f"it is not as cpuopt writes it: {misfit_of(e)}")


def misfit_of(e: Exception) -> str:
    """Word one of `UNREADABLE`."""
    if isinstance(e, KeyError):
        return f"it lacks {e}"
    return str(e) if isinstance(e, ValueError) else f"{type(e).__name__}: {e}"


def find(root: Path, name: str) -> Entry:
    """Find the record that a folder's name, its name without the time, a part that only it has, or a path names.

    Raises
    ------
    UserError
        If there is none, or more than one.
    """
    every = entries(root)
    exact = [e for e in every if e.path.name == name or e.path.resolve() == Path(name).resolve()]
    exact = exact or [e for e in every if NAMED.sub("", e.path.name) == name]
    found = exact or [e for e in every if name in e.path.name]
    if not found:
        names = [e.path.name for e in every]
        there = nearest(name, names[-10:]) if names else f"there is none in {root}"
        raise UserError(f"runs {name!r}: no such record; {there}")
    if len(found) > 1:
        raise UserError(
            f"runs {name!r}: {len(found)} records have that in their name: {', '.join(e.path.name for e in found[:5])}"
        )
    if found[0].trouble:
        raise UserError(f"runs {found[0].path.name!r} {found[0].what}")
    return found[0]


@contextmanager
def readable(*entries: Entry) -> Iterator[None]:
    """Turn the error of a block that reads records, if their fields are missing or of other types, into one line.

    Raises
    ------
    UserError
        For such an error.
    """
    try:
        yield
    except (UserError, BrokenPipeError):
        raise
    except Exception as e:  # those of UNREADABLE, and of a display that is given an object for a text
        names = " or ".join(repr(e.path.name) for e in entries)
        raise UserError(f"runs {names}: it is not as cpuopt writes it: {misfit_of(e)}") from e


def profile_of(e: Entry) -> Mapping[str, Any] | None:
    """Return the profile in a record, or None if it has none."""
    return e.content.get("profile") or None


def profile_in(e: Entry) -> Profile:
    """Return the profile in a record.

    Raises
    ------
    UserError
        If there is none.
    """
    found = profile_of(e)
    if found is None:
        raise UserError(f"runs {e.path.name!r}: a record of kind '{e.kind}' has no profile to show")
    profile: Profile = from_json(Profile, found)
    return profile


def losses(run: Path) -> dict[str, list[Point]]:
    """Read the losses in a run's folder; a record of another kind has none."""
    training: list[Point] = []
    validation: list[Point] = []
    with suppress(OSError, ValueError):
        for line in read_file(run / "metrics.jsonl").splitlines():
            with suppress(ValueError):  # a line that a crash has cut short
                metrics = parse_json(line)
                if not misfit(metrics, Metrics):
                    training.append((metrics["step"], metrics["loss"]))
    with suppress(OSError, ValueError):
        found = read_json(run / "summary.json").get("val_loss")
        if not misfit(found, dict[str, float | None]):
            validation = sorted((int(step), loss) for step, loss in (found or {}).items())
    return {n: line for n, line in (("training loss", training), ("validation loss", validation)) if line}


def settings_apart(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the settings in which two runs differ, each with both values; their names are left out."""
    names = [name for name in {**a, **b} if name not in ("run", "processes")]
    return {name: [a.get(name), b.get(name)] for name in names if a.get(name) != b.get(name)}


def compare(a: Entry, b: Entry) -> dict[str, Any]:
    """Compare two records: the settings and losses of two training runs, and two profiles op by op.

    Ops are compared in pairs of steps of the same number. The margin of the verdicts is the noise, the difference
    between ops with unchanged kernels, since the two did not alternate.

    Raises
    ------
    UserError
        If one has no profile, and they are not both training runs.
    """
    runs = [{"losses": losses(e.path), "summary": e.content["summary"]} for e in (a, b) if e.kind == "train"]
    both: dict[str, Any] = {"a": a.path.name, "b": b.path.name}
    if len(runs) == 2:
        apart = settings_apart(*(e.content.get("settings", {}) for e in (a, b)))
        both |= {"settings": apart, "training": {"a": runs[0], "b": runs[1]}}
    profiles = [p for e in (a, b) if (p := profile_of(e)) is not None]
    if len(profiles) == 2:
        return {**both, **_by_op(a, b, *profiles)}
    if len(runs) == 2:
        return {**both, "noise": None, "doubts": [], "only_a": [], "only_b": [], "rows": []}
    e = next(e for e in (a, b) if profile_of(e) is None)
    raise UserError(f"runs compare: {e.path.name} is of kind '{e.kind}' and has no profile; take two that have")


def _by_op(a: Entry, b: Entry, pa: Mapping[str, Any], pb: Mapping[str, Any]) -> dict[str, Any]:
    """Compare two profiles."""
    different = [k for k in ("model", "B", "T", "threads") if pa[k] != pb[k]]
    warnings = [f"{k} differs: {pa[k]} and {pb[k]}" for k in different]
    if a.content.get("machine_id") != b.content.get("machine_id"):
        warnings.append("the machines differ")
    rows_a, rows_b = ({r.get("label") or r["op"]: r for r in p["ops"]} for p in (pa, pb))
    values_a, values_b = (p.get("op_ms_values", {}) for p in (pa, pb))
    step = {"op": "step", "a": pa["step_ms_values"], "b": pb["step_ms_values"], "same": False}
    rows = [step] + [
        {
            "op": op,
            "a": values_a.get(rows_a[op]["op"]) or [rows_a[op]["ms"]],
            "b": values_b.get(rows_b[op]["op"]) or [rows_b[op]["ms"]],
            "same": bool(rows_a[op]["kernels"]) and _kernels(pa, rows_a[op]) == _kernels(pb, rows_b[op]),
        }
        for op in rows_a
        if op in rows_b
    ]
    unchanged = [
        abs(log(np.median(r["b"]) / np.median(r["a"])))
        for r in rows[1:]
        if r["same"] and np.median(r["a"]) > 0.01 * np.median(step["a"])
    ]
    noise = max(LEAST, float(np.percentile(unchanged, QUANTILE))) if len(unchanged) >= 3 else NOISE
    names = {op: op_ids(op, r["kernels"]) for op, r in (rows_b | rows_a).items()} | {"step": "step"}
    only = {
        "only_a": [names[op] for op in rows_a if op not in rows_b],
        "only_b": [names[op] for op in rows_b if op not in rows_a],
    }
    return {
        "noise": noise,
        "doubts": warnings,
        **only,
        "rows": [_judged(r | {"op": names[r["op"]]}, noise) for r in rows],
    }


def _kernels(p: Mapping[str, Any], row: Mapping[str, Any]) -> list[Any]:
    return [(k, p.get("hashes", {}).get(k)) for k in row["kernels"]]


def _judged(r: Mapping[str, Any], noise: float) -> dict[str, Any]:
    """Add ratio, interval and verdict to a row."""
    pairs = [(a, b) for a, b in zip(r["a"], r["b"], strict=False) if a > 0 and b > 0]
    found = {
        "op": r["op"],
        "a_ms": float(np.median(r["a"])),
        "b_ms": float(np.median(r["b"])),
        "same_kernels": r["same"],
    }
    if len(pairs) < 3:
        ratio = found["b_ms"] / found["a_ms"] if found["a_ms"] > 0 and found["b_ms"] > 0 else 1.0
        return {**found, "ratio": ratio, "low": ratio, "high": ratio, "level": 0.0, "verdict": "inconclusive"}
    v = judge([[b / a for a, b in pairs]], margin=noise, wide=max(noise, WIDE))
    ends = {"low": v.ratio["low"], "high": v.ratio["high"]}
    return {**found, "ratio": v.ratio["median"], **ends, "level": v.level, "verdict": v.word}


def history(found: Sequence[Entry], op: str, here: str) -> list[Measured]:
    """List what was measured of an op on one machine, oldest first. Unreadable records are left out.

    Parameters
    ----------
    here : the machine, as `machine_id` names it.
    """
    rows: list[Measured] = []
    for e in found:
        if e.content.get("machine_id") == here:
            with suppress(*UNREADABLE):
                rows += [from_json(Measured, row) for row in [*_compared(e, op), *_profiled(e, op)]]
    return rows


def headroom(found: Sequence[Entry], here: str) -> dict[str, Any]:
    """Rank the ops of the newest profile of a machine by ms above their roofs in a step.

    Each has the gain over ``vanilla``, as time by time, if that was profiled at the same size; else None.

    Raises
    ------
    UserError
        If no record has a profile with roofs.
    """
    profiled = [e for e in found if e.kind == "profile" and e.content.get("machine_id") == here]
    e = next((e for e in reversed(profiled) if profile_in(e).roofs), None)
    if e is None:
        raise UserError("kernels --headroom: no record has a profile of this machine; run: cpuopt profile")
    rows = []
    for (op, variant), layers in headroom_of(profile_in(e).layers):
        own, *_ = (m for m in _profiled(e, op) if m["variant"] == variant)
        naive = [m["ms"] for m in history(profiled, op, here) if (m["variant"], m["size"]) == ("vanilla", own["size"])]
        ms, above = own["ms"], above_roof(layers)
        of_roof = 100 * (1 - above / ms) if all(fits(r.of_roof) for r in layers) else None
        gain = naive[-1] / ms if naive and ms and variant != "vanilla" else None
        rows.append({"op": op, "variant": variant, "ms": ms, "above_ms": above, "of_roof": of_roof, "gain": gain})
    sizes = {name: getattr(profile_in(e), name) for name in ("model", "B", "T")}
    return {"run": e.path.name, "what": e.what, **sizes, "headroom": rows}


def comparisons(e: Entry) -> list[dict[str, Any]]:
    """Return the comparisons in a record, each as `cpuopt ab` keeps it: its own, or those of a round of ``lab``."""
    c = e.content
    if e.kind != "lab":
        return [{**c}] if e.kind == "ab" else []
    found = []
    for k in c["kernels"]:
        head = {"op": k["op"], "a": k["against"], "b": k["variant"], "model": "" if c["sizes"] else c["model"]}
        found += [{**head, "in_step": how == "step", "results": [k[how]]} for how in ("alone", "step") if how in k]
    return found


def compared_ops(found: Iterable[Entry]) -> Iterator[str]:
    """Yield the ops of all comparisons. Unreadable records are left out."""
    for e in found:
        with suppress(*UNREADABLE):
            yield from [str(c["op"]) for c in comparisons(e)]


def _compared(e: Entry, op: str) -> Iterator[dict[str, Any]]:
    for c, r in ((made, r) for made in comparisons(e) if made["op"] == op for r in made["results"]):
        of = f"{c['model']} {size_of(r)}".lstrip()  # sizes by symbol have no model
        calls = call_count(r)
        size = f"{of}, {count(r['threads'], 'thread')}{', in the step' if c['in_step'] else ''}{calls and ', ' + calls}"
        for variant, ms in (c["a"], r["a_ms"]), (c["b"], r["b_ms"]):
            kernel = {"variant": variant, "ms": ms, "hash": r["hashes"].get(variant), "gflops": None}
            yield _head(e, r.get("commits", {}), variant) | {"size": size, **kernel}


def _profiled(e: Entry, op: str) -> Iterator[dict[str, Any]]:
    p = profile_of(e) or {"layers": []}
    for variant in dict.fromkeys(r["variant"] for r in p["layers"] if r["op"] == op):
        mine = [r for r in p["layers"] if (r["op"], r["variant"]) == (op, variant)]
        ms = sum(r["ms"] for r in mine)
        n = sum(r["calls"] for r in mine)
        size = (
            f"{p['model']} {p['B']}x{p['T']}, {count(p['threads'], 'thread')}{', ' + count(n, 'call') if n > 1 else ''}"
        )
        rate = sum(r["flops"] for r in mine) / ms / 1e6 if ms else None
        kernel = {"variant": variant, "ms": ms, "hash": p.get("hashes", {}).get(f"{op}[{variant}]"), "gflops": rate}
        yield _head(e, p.get("commits", {}), f"{op}[{variant}]") | {"size": size, **kernel}


def _head(e: Entry, commits: Mapping[str, str | None], kernel: str) -> dict[str, Any]:
    """Return what a record says of a kernel: its commit is that of its own file's repository."""
    commit = commits.get(kernel, e.content.get("commit"))
    return {"time": e.time, "kind": e.kind, "commit": commit, "run": e.path.name}

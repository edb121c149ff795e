"""The plans of `cpuopt tune`, kept beside the machine's roofs; `--variant auto` uses them.

A plan is for one machine, one model, one size, one number of threads and one set of rewrites: its key. It also names
the machine code that its verdicts are about, by hash. If the key or a hash differs, the plan is stale: a note says
so, and ``optimized`` runs.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..files import read_entry, write_entry
from ..kernels import registry
from ..kernels.compile import cache
from ..measure import rates as machine
from ..models import argument_of
from ..ops.storage import WIDE
from ..program.fuse import FUSIONS
from ..wording import count

FORMAT = 1


def key(
    model: Mapping[str, Any], B: int, T: int, threads: int, rewrites: Sequence[str], dtype: str = WIDE
) -> dict[str, Any]:
    """Make the key of a plan; `model` is the result of `Config.to_json`."""
    size = {"model": dict(model), "B": B, "T": T, "threads": threads, "rewrites": list(rewrites)}
    typed = {} if dtype == WIDE else {"dtype": dtype}  # plans of earlier versions name no type
    return {"machine": machine.machine_id(), **size, **typed}


def path(key: Mapping[str, Any]) -> Path:
    """Return the file of a plan."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
    return machine.folder() / f"plan-{key['B']}x{key['T']}-{key['threads']}-{digest}.plan"


def unfinished(key: Mapping[str, Any]) -> Path:
    """Return the file of the measurements for an unfinished plan."""
    return path(key).with_suffix(".begun")


def read(path: Path, key: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read a plan or the measurements for one; None if there is no whole one for the key."""
    return next((content for content in _stored(path) if content["format"] == FORMAT and content["key"] == key), None)


def _stored(*paths: Path) -> Iterator[dict[str, Any]]:
    """Yield the content of the files that are whole."""
    yield from (json.loads(entry) for path in paths if (entry := read_entry(path)))


def elsewhere(key: Mapping[str, Any], flush: bool) -> list[dict[str, Any]]:
    """Return the measurements for other models and sizes, with as many threads and the same state of the caches."""
    found = _stored(*sorted(machine.folder().glob("plan-*")))
    alike = [c for c in found if c.get("format") == FORMAT and c["key"] != key and c.get("flush") == flush]
    return [c for c in alike if all(c["key"][name] == key[name] for name in ("machine", "threads"))]


def write(path: Path, content: Mapping[str, Any]) -> bool:
    """Keep a plan, whole or not at all; return whether that was possible."""
    return write_entry(path, json.dumps({"format": FORMAT, **content}, indent=1).encode())


def command(key: Mapping[str, Any], files: Sequence[str] = ()) -> str:
    """Return the command that makes a plan."""
    words = ["cpuopt", "tune", "--model", argument_of(key["model"])]
    words += ["-B", str(key["B"]), "-T", str(key["T"]), "--threads", str(key["threads"])]
    if set(key["rewrites"]) != set(FUSIONS):
        words += ["--fuse", ",".join(key["rewrites"]) or "none"]
    if "dtype" in key:
        words += ["--dtype", key["dtype"]]
    return shlex.join([*words, *(w for f in files for w in ("--kernels", f))])


def hash_of(name: str) -> str | None:
    """Hash the sources of a kernel such as ``gelu_forward[mine]``; None if no such kernel is registered."""
    op, _, variant = name.removesuffix("]").partition("[")
    found = registry.KERNELS.get((op, variant))
    return cache.digest(found.function) if found else None


def rules(key: Mapping[str, Any], files: Sequence[str] = ()) -> tuple[tuple[str, ...], str]:
    """Return the rules of the plan for a key, ``OP@LAYER=VARIANT`` each, and a line about them.

    Parameters
    ----------
    files : the users' files of kernels that are loaded.

    Returns
    -------
    No rules if there is no such plan, or it is stale; the line then gives the reason and the command that makes one.
    """
    content = read(path(key), key)
    if content is None:
        return (), _instead(nearest(key), key, files)
    now = {name: hash_of(name) for name in content["hashes"]}
    missing = [name for name, h in now.items() if h is None]
    changed = [name for name, h in now.items() if h != content["hashes"][name]]
    if missing:
        had = " ".join(f"--kernels {shlex.quote(f)}" for f in content["kernels"] if f not in files)
        return (), _instead(f"{missing[0]}, which the plan uses, is not there{had and f' (add {had})'}", key, files)
    if changed:
        return (), _instead(f"{changed[0]} is not what it was when the plan was made", key, files)
    return tuple(content["rules"]), f"--variant auto: {summary(content)}"


def summary(content: Mapping[str, Any]) -> str:
    """Describe in a few words what a plan changes."""
    when = f"the plan of {content['time'][:16].replace('T', ' ')}"
    if not content["rules"]:
        return f"by {when}, all ops stay with {registry.DEFAULT}: {content['why']}"
    counts: dict[str, int] = {}
    for rule in map(registry.parse_swap, content["rules"]):
        counts[f"{rule.op}={rule.variant}"] = counts.get(f"{rule.op}={rule.variant}", 0) + 1
    step = content["step"]["ratio"]["median"]
    return f"by {when}, {', '.join(f'{k} ({n}x)' for k, n in counts.items())}; a step took {step:.3f} of the time"


def _instead(why: str, key: Mapping[str, Any], files: Sequence[str]) -> str:
    return f"--variant auto: {why}, so {registry.DEFAULT} runs; to make a plan: {command(key, files)}"


def nearest(key: Mapping[str, Any]) -> str:
    """Describe the missing plan, and the nearest one that exists."""
    size = f"{key['B']}x{key['T']} on {count(key['threads'], 'thread')}"
    none = f"there is no plan for {size}"
    known: list[list[str]] = []
    for other in (content["key"] for content in _stored(*sorted(machine.folder().glob("plan-*.plan")))):
        differs = [name for name in key | other if other.get(name) != key.get(name)] or ["format"]
        known.append([_differs(name, other.get(name)) for name in differs])
    closest = min(known, key=lambda words: len(words), default=None)
    return f"{none}; the nearest is for {', '.join(closest)}" if closest else none


def _differs(name: str, value: Any) -> str:
    words = {"machine": "another machine", "format": "another version", "rewrites": "other rewrites"}
    if name == "model":
        return f"the model {argument_of(value)}"
    return words.get(name) or f"{name} {value or WIDE}"

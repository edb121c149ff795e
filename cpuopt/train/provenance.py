"""The provenance of a run's numbers besides its settings and its text: kernels, versions, the processor.

A checkpoint keeps it, and a run that goes on compares it. With other kernels it would be another training under the old
name, so they are refused unless the user accepts them. Other versions, processors and threads are said: what they make
of the same source may round otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from ..engine import Engine
from ..kernels.compile import cache, jit
from ..kernels.compile.numba_internals import target
from ..machine import describe
from ..wording import count

BY_RANKS = ("accumulate[", "copy[")
"""The kernels that some ranks run and others do not; a run may go on with another number of ranks."""
UNKNOWN = "unknown"
"""The result of `cache.digest` for a kernel that it cannot analyse."""


def made_by(engine: Engine, files: Sequence[str], models: Sequence[str] = ()) -> dict[str, dict[str, str]]:
    """Describe the code of a run: the digest of each kernel's source and object code, and of each file of a user's.

    Parameters
    ----------
    files, models : files of kernels, and of the model.
    """
    here, (cpu, features) = describe(), target()
    kernels = dict.fromkeys(engine.kernels)
    return {
        "kernels": {k.name: cache.digest(k.function) for k in kernels},
        "code": {k.name: jit.code_digest(k) for k in kernels},
        "files": _digests(map(Path, files)),
        "models": _digests(map(Path, models)),
        "versions": here["versions"],
        "machine": {"cpu": here["cpu"], "target": cpu, "features": sha256(features.encode()).hexdigest()[:16]},
        "run": {"threads": str(engine.threads)},
    }


def _digests(files: Iterable[Path]) -> dict[str, str]:
    """Return the digest of each file by its name without folders; files of the same name share one digest."""
    found: dict[str, str] = {}
    for file in files:
        content = b""
        with suppress(OSError):  # the file was removed after its import
            content = file.read_bytes()
        found[file.name] = sha256(found.get(file.name, "").encode() + content).hexdigest()[:16]
    return found


def compare(then: Any, now: Mapping[str, Mapping[str, str]], rewritten: str = "") -> tuple[list[str], list[str]]:
    """Return the changes since a checkpoint: those that the user must accept, and those that are only noted.

    Parameters
    ----------
    then : the provenance in a checkpoint; None in those of earlier versions.
    rewritten : the reason why other kernels run than then, which stands in place of their names.
    """
    if not isinstance(then, Mapping):
        return [], ["the checkpoint does not say which kernels made it, so they may be others now"]
    parts = {part: there if isinstance(there := then.get(part), Mapping) else {} for part in now}
    other = {
        part: [name for name in {**parts[part], **now[part]} if parts[part].get(name) != now[part].get(name)]
        for part in now
    }
    refused = [rewritten] if rewritten and parts["kernels"].keys() != now["kernels"].keys() else []
    for part in ("kernels", "code"):
        alone = parts[part].keys() ^ now[part].keys()
        other[part] = [n for n in other[part] if n not in alone or not (rewritten or n.startswith(BY_RANKS))]
    unseen = [name for name, digest in now["kernels"].items() if digest == UNKNOWN] if other["files"] else []
    refused += [f"kernel {name!r} is not what it was" for name in dict.fromkeys([*other["kernels"], *unseen])]
    refused += [f"the model's file {name!r} is not what it was" for name in other.get("models", ())]
    notes = [f"{name!r} has changed, but none of its kernels that run" for name in other["files"] if not refused]
    for part in ("versions", "machine", "run"):
        notes += [f"{name!r} is {now[part].get(name)!r}, and was {parts[part].get(name)!r}" for name in other[part]]
    if code := [name for name in other["code"] if name not in other["kernels"]]:
        notes.append(f"the machine code of {count(len(code), 'kernel')} is other than it was, {code[0]!r} first")
    return refused, notes

"""The process that checks users' kernels: ``python -m cpuopt.check.worker``, which a `Child` starts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CHEATING, RefusedError
from ..files.reading import from_json, to_json
from ..isolate.serve import Say, serve

if TYPE_CHECKING:
    from ..kernels.watch import Watch


def load(request: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Load users' kernel files; list the kernels that came with them, and the files that lie beside them."""
    from .. import kernels
    from ..kernels import doubles, registry
    from ..kernels.compile.cache import fingerprint
    from ..kernels.watch import Watch
    from . import check, fences  # noqa: F401  (the judges are there before the file is)

    global _watch
    _watch = _watch or Watch()
    before = set(registry.KERNELS)
    kernels.load_all(request["kernels"])
    added = [k for key, k in registry.KERNELS.items() if key not in before]
    about = [{"op": k.op.name, "variant": k.variant, "where": k.where, "file": k.file} for k in added]
    about = [a | {"text": fingerprint(k.function), "note": doubles.note(k)} for a, k in zip(about, added, strict=True)]
    return {"added": about, "files": [str(f) for f in kernels.files_beside([Path(f) for f in request["kernels"]])]}


_watch: Watch | None = None
"""The process before the first file was loaded."""


def unchanged() -> None:
    """Require of the files, before each answer, that they left the process and the judge as they were.

    Raises
    ------
    RefusedError
        Naming what they changed.
    """
    if _watch and (changes := _watch.changes()):
        raise RefusedError(f"a file of kernels was loaded, and then: {'; '.join(changes)}", CHEATING)


def check(request: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Judge one kernel on one case, and with inaccessible pages around its arrays.

    The result is None for a case with types that the kernel does not take.
    """
    from ..kernels.registry import find
    from .cases import Case
    from .check import check
    from .fences import check_fenced

    case: Case = from_json(Case, request["case"])
    kernel = find(request["op"], request["variant"])
    if not kernel.takes_all(case.types):
        return {"result": None}
    if judge := getattr(kernel.op.reference, "judge", None):
        judge()  # an op of a user: its gradient, once
    more = {"threads": request["threads"], "seed": request["seed"]}
    return {"result": to_json(check(kernel, case, **more, fences=partial(check_fenced, say=say)).to_json())}


HANDLERS = {"load": load, "check": check}

if __name__ == "__main__":
    serve(HANDLERS, unchanged)

"""The process that checks and times users' kernels: ``python -m cpuopt.lab.worker``."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

from ..check import worker as judging
from ..errors import UserError
from ..files.reading import from_json, to_json
from ..isolate.serve import Say, serve


def cases(request: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """List the cases of some ops: the usual ones, those of jobs, and those at sizes by symbol."""
    from .. import ops
    from ..check.gate import Planned
    from ..train.job import build_only
    from .ab import shape_at

    calls = [c for job in request["jobs"] for c in build_only(settings_of({"settings": job})).program.calls]
    sizes, chosen = request["sizes"], [ops.ALL[name] for name in request["ops"]]
    fit = [op for op in chosen if all(set(op.symbols) <= s.keys() for s in sizes)]
    at = {op: [shape_at(op, s).case for s in sizes] for op in fit or chosen[:1]}
    planned = {op.name: Planned.of(op, calls, at.get(op, ()), request["quick"]).to_json() for op in chosen}
    return {"planned": planned}


def ab(request: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Compare two kernels on one size and number of threads; both are checked before and after."""
    from ..building import set_threads
    from ..check.gate import require_quick
    from ..kernels.compile import cache, jit
    from ..kernels.registry import find
    from ..machine import commits_of
    from ..measure import rates as machine
    from . import ab

    settings, op = settings_of(request), op_named(request["op"])
    pair = find(op.name, request["variants"][0]), find(op.name, request["variants"][1])
    at = {"B": settings.B, "T": settings.T}
    n = set_threads(settings.threads, pair)
    say("checking")
    more: dict[str, Any] = {"seed": request["seed"], "say": say, "analyses": request["analyses"]}
    sizes, given = request.get("sizes"), [ab.Shape.read(s) for s in request.get("shapes", ())]
    if sizes:
        at = {"sizes": sizes}
    shapes = [ab.shape_at(op, sizes)] if sizes else given or ab.shapes_of(ab.calls_of(op, settings, request["layer"]))
    typed = [k.typed(shapes[0].types) for k in pair]
    checks = require_quick(typed, n)
    if request["in_step"]:
        found = ab.in_step(settings, op, request["variants"], layer=request["layer"], **more)
    else:
        more |= {"stop_above": request.get("stop_above", inf), "other": request.get("other", False)}
        found = ab.alone(pair, shapes, flush=request["flush"], **more)
    say("checking again")
    checks += found["checks"] + require_quick(typed, n)
    roofs = machine.stored().get(n)
    warnings = found["doubts"] + ab.beyond_roofs(request["variants"], found.get("cases", ()), roofs)
    hashes = {k.variant: cache.digest(k.function) for k in typed}
    codes = {k.variant: jit.code_digest(k) for k in typed}
    answer: dict[str, Any] = to_json(
        {
            **at,
            "threads": n,
            **found,
            "checks": checks,
            "doubts": warnings,
            "hashes": hashes,
            "codes": codes,
            "commits": commits_of({k.variant: k.file for k in typed}),
        }
    )
    return answer


def plan(request: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """List the sizes of a sweep."""
    from .sweep import plan

    op, settings = op_named(request["op"]), settings_of(request)
    found: dict[str, Any] = to_json(plan(op, request["over"], request["sizes"], settings, request["layer"]))
    return found


def sweep(request: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Judge and time some variants of an op at one size."""
    from ..building import set_threads
    from ..check.gate import require_quick
    from ..kernels.compile import cache
    from ..kernels.registry import find
    from . import ab
    from .sweep import measure

    op, shape = op_named(request["op"]), ab.Shape.read(request["shape"])
    typed = [find(op.name, v).typed(shape.types) for v in request["variants"]]
    n = set_threads(request["threads"], typed)
    if new := [k for k in typed if (k.name, n, str(shape.types)) not in _quick]:
        say("checking")
        require_quick(new, n)
        _quick.update((k.name, n, str(shape.types)) for k in new)
    found = measure(typed, shape, seed=request["seed"], rounds=request["rounds"])
    for kernel, one in zip(typed, found, strict=True):
        one["hash"] = cache.digest(kernel.function)
    answer: dict[str, Any] = to_json({"found": found})
    return answer


_quick: set[tuple[str, int, str]] = set()
"""The kernels that have passed the quick cases in this process, by name, threads and types."""


def steps(request: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Compare training steps with the kernels of a plan and with those that they replace."""
    from ..kernels.registry import find
    from . import ab

    changes = [
        ab.Change((find(c["op"], c["variants"][0]), find(c["op"], c["variants"][1])), tuple(c["layers"]))
        for c in request["changes"]
    ]
    pair = ab.InStep(settings_of(request), changes, say)
    found, each = ab.compare_steps(pair, request["names"], request["seed"], request["analyses"], say)
    answer: dict[str, Any] = to_json({**found, "each": each})
    return answer


def op_named(name: str) -> Any:
    """Return the op of a name; raise a `UserError` if there is none."""
    from .. import ops
    from ..wording import nearest

    if name not in ops.ALL:
        raise UserError(f"{name!r}: no such op; {nearest(name, ops.ALL)}")
    return ops.ALL[name]


def settings_of(request: Mapping[str, Any]) -> Any:
    """Read the settings of a job from a request."""
    from ..train.job import Settings, sized

    return sized(from_json(Settings, request["settings"]))


HANDLERS = {**judging.HANDLERS, "cases": cases, "ab": ab, "plan": plan, "sweep": sweep, "steps": steps}
"""What a request may ask for."""

if __name__ == "__main__":
    serve(HANDLERS, judging.unchanged)

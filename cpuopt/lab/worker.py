"""The process that checks and times users' kernels: ``python -m cpuopt.lab.worker``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

from ..building import set_threads
from ..check import worker as judging
from ..check.cases import Case, calls_alike
from ..check.gate import require_quick
from ..errors import UserError
from ..files.reading import from_json, to_json
from ..isolate.child import Child
from ..isolate.serve import Say, serve
from ..kernels.compile import cache, jit
from ..kernels.registry import Kernel, find
from ..kernels.toolkit.threads import planned_for
from ..machine import commits_of, cores
from ..measure import rates
from . import ab as comparing
from . import checked
from . import sweep as sweeping
from .ab import op_named, settings_of


def started(files: Sequence[str], threads: int, limit_s: float) -> Child:
    """Return a process that checks and times users' kernels on `threads`, and may check them on all cores."""
    return Child(__name__, files, max(threads, cores()), limit_s)


def ab(request: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Compare two kernels on one size and number of threads; both are checked before and after."""
    a, b = request["variants"]
    return compared(request, (find(request["op"], a), find(request["op"], b)), say)


def compared(
    request: Mapping[str, Any],
    pair: tuple[Kernel, Kernel],
    say: Say,
    require: Callable[[Sequence[Kernel], int], list[dict[str, Any]]] = require_quick,
    make: Callable[..., comparing.Alone] = comparing.Alone,
    in_step: Callable[..., dict[str, Any]] = comparing.in_step,
) -> dict[str, Any]:
    """Compare two kernels as a request asks, wherever they run.

    Parameters
    ----------
    request : with ``elsewhere``, an op that the model does not call is compared at GPT-2's widths.
    require : the check before and after, for a number of threads.
    make : as `comparing.alone` takes it.
    in_step : what compares them in a step, from the arguments of `comparing.in_step`.
    """
    settings, op = settings_of(request), op_named(request["op"])
    sizes, shapes = request.get("sizes") or {}, [from_json(Case, s) for s in request.get("shapes", ())]
    try:
        shapes = shapes or ([] if sizes else calls_alike(comparing.calls_of(op, settings, request["layer"])))
    except UserError:
        if not request.get("elsewhere"):
            raise
        sizes = dict(comparing.usual_sizes(op, settings.B, settings.T))
    at = {"sizes": sizes} if sizes else {"B": settings.B, "T": settings.T}
    shapes = shapes or [comparing.case_at(op, sizes)]
    n = set_threads(settings.threads, pair)
    say("checking")
    more: dict[str, Any] = {"seed": request["seed"], "say": say, "analyses": request["analyses"]}
    typed = [k.typed(shapes[0].types) for k in pair]
    checks = require(typed, n)
    with planned_for(n):  # since checks may take more threads, and kernels cut their work for all that there are
        if request["in_step"]:
            found = in_step(settings, op, request["variants"], layer=request["layer"], **more)
        else:
            more |= {"stop_above": request.get("stop_above", inf), "other": request.get("other", False), "make": make}
            found = comparing.alone(pair, shapes, flush=request["flush"], **more)
    say("checking again")
    checks += found["checks"] + require(typed, n)
    for k in typed:  # in another process, a check may have left it with fewer types
        k.compile()
    roofs = rates.stored().get(n)
    content = {
        **at,
        "threads": n,
        **found,
        "checks": checks,
        "doubts": found["doubts"] + comparing.beyond_roofs(request["variants"], found.get("cases", ()), roofs),
        "hashes": {k.variant: getattr(k.function, "source", "") or cache.digest(k.function) for k in typed},
        "codes": {k.variant: getattr(k.function, "code", "") or jit.code_digest(k) for k in typed},
        "commits": commits_of({k.variant: k.file for k in typed}),
    }
    return dict(to_json(content))


def plan(request: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """List the sizes of a sweep."""
    op, settings = op_named(request["op"]), settings_of(request)
    return dict(to_json(sweeping.plan(op, request["over"], request["sizes"], settings, request["layer"])))


def sweep(request: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Judge and time some variants of an op at one size."""
    op, shape = op_named(request["op"]), from_json(Case, request["shape"])
    typed = [find(op.name, v).typed(shape.types) for v in request["variants"]]
    n = set_threads(request["threads"], typed)
    if new := [k for k in typed if (k.name, n, str(shape.types)) not in _quick]:
        say("checking")
        require_quick(new, n)
        _quick.update((k.name, n, str(shape.types)) for k in new)
    with planned_for(n):
        found = sweeping.measure(typed, shape, seed=request["seed"], rounds=request["rounds"])
    for kernel, one in zip(typed, found, strict=True):
        one["hash"] = cache.digest(kernel.function)
    return dict(to_json({"found": found}))


_quick: set[tuple[str, int, str]] = set()
"""The kernels that have passed the quick cases in this process, by name, threads and types."""


def steps(request: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Compare training steps with the kernels of a plan and with those that they replace."""
    changes = [
        comparing.Change((find(c["op"], c["variants"][0]), find(c["op"], c["variants"][1])), tuple(c["layers"]))
        for c in request["changes"]
    ]
    pair = comparing.InStep(settings_of(request), changes, say)
    found, each = comparing.compare_steps(pair, request["names"], request["seed"], request["analyses"], say)
    return dict(to_json({**found, "each": each}))


HANDLERS = {**judging.HANDLERS, "cases": checked.cases, "ab": ab, "plan": plan, "sweep": sweep, "steps": steps}
"""What a request may ask for."""

if __name__ == "__main__":
    serve(HANDLERS, judging.unchanged)

"""The process that checks and times users' kernels: ``python -m cpuopt.lab.worker``."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

from ..check.worker import HANDLERS
from ..files.reading import from_json, to_json
from ..isolate.serve import Say, serve


def ab(request: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Compare two kernels on one size and number of threads; both are checked before and after."""
    from .. import ops
    from ..check.gate import require_quick
    from ..engine import set_threads
    from ..kernels.compile import cache, jit
    from ..kernels.registry import find
    from ..measure import rates as machine
    from . import ab

    settings, op = settings_of(request), ops.ALL[request["op"]]
    pair = find(op.name, request["variants"][0]), find(op.name, request["variants"][1])
    n = set_threads(settings.threads, pair)
    say("checking")
    more: dict[str, Any] = {"seed": request["seed"], "say": say, "analyses": request["analyses"]}
    checks = require_quick(pair, n)
    if request["in_step"]:
        found = ab.in_step(settings, op, request["variants"], layer=request["layer"], **more)
    else:
        given_shapes = [ab.Shape.read(s) for s in request.get("shapes", ())]
        shapes = given_shapes or ab.shapes_of(ab.calls_of(op, settings, request["layer"]))
        stop_above = request.get("stop_above", inf)
        found = ab.alone(pair, shapes, flush=request["flush"], stop_above=stop_above, **more)
    say("checking again")
    checks += found["checks"] + require_quick(pair, n)
    roofs = machine.stored().get(n)
    warnings = found["doubts"] + ab.beyond_roofs(op, request["variants"], found.get("cases", ()), roofs)
    hashes = {k.variant: cache.digest(k.function) for k in pair}
    codes = {k.variant: jit.code_digest(k) for k in pair}
    answer: dict[str, Any] = to_json(
        {
            "B": settings.B,
            "T": settings.T,
            "threads": n,
            **found,
            "checks": checks,
            "doubts": warnings,
            "hashes": hashes,
            "codes": codes,
        }
    )
    return answer


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


def settings_of(request: Mapping[str, Any]) -> Any:
    """Read the settings of a job from a request."""
    from ..train.job import Settings, sized

    return sized(from_json(Settings, request["settings"]))


if __name__ == "__main__":
    serve({**HANDLERS, "ab": ab, "steps": steps})

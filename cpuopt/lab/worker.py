"""The process that runs users' kernels, ``python -m cpuopt.lab.worker``: `isolate.child` starts it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

from ..errors import UserError
from ..files.reading import from_json, to_json
from ..isolate.serve import Say, serve
from ..wording import nearest


def load(request: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Load users' kernel files, and list what they registered: op, variant and place of each."""
    from .. import kernels
    from ..check import check, fences, sized  # noqa: F401  (the judges are there before the file is)
    from ..kernels import registry

    before = set(registry.KERNELS)
    kernels.load_all(request["kernels"])
    added = [k for key, k in registry.KERNELS.items() if key not in before]
    return {"added": [{"op": k.op.name, "variant": k.variant, "where": k.where} for k in added]}


def check(request: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Check one kernel on one case, and with inaccessible pages around its arrays; or, with ``adds``, at its size."""
    from ..check.cases import Case
    from ..check.check import check
    from ..check.fences import check_fenced
    from ..check.sized import Sized, check_sized

    asked, kernel = request["case"], find(request["op"], request["variant"])
    case = from_json(Case, asked)
    if "adds" in asked:
        result = check_sized(Sized(kernel, case, asked["adds"]), max(request["threads"]), request["seed"])
    else:
        result = check(kernel, case, threads=request["threads"], seed=request["seed"])
        if result.verdict != "FAIL":
            wrong = check_fenced(kernel, case, request["threads"], request["seed"], say)
            result = replace(result, ratio=inf, reason=wrong) if wrong else result
    return {"result": to_json(result.to_json())}


def ab(request: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Compare two kernels on one size and number of threads; both are checked before and after."""
    from .. import ops
    from ..engine import set_threads
    from ..kernels.compile import cache, jit
    from ..measure import rates as machine
    from . import ab

    settings, op = settings_of(request), ops.ALL[request["op"]]
    pair = find(op.name, request["variants"][0]), find(op.name, request["variants"][1])
    n = set_threads(settings.threads, pair)
    say("checking")
    checks = ab.require_right(pair, n)
    more: dict[str, Any] = {"seed": request["seed"], "say": say, "looks": request["looks"]}
    if request["in_step"]:
        found = ab.in_step(settings, op, request["variants"], layer=request["layer"], **more)
    else:
        given_shapes = [ab.Shape.read(s) for s in request.get("shapes", ())]
        shapes = given_shapes or ab.shapes_of(ab.calls_of(op, settings, request["layer"]))
        hopeless = request.get("hopeless", inf)
        found = ab.alone(pair, shapes, flush=request["flush"], hopeless=hopeless, **more)
    say("checking again")
    checks += found["checks"] + ab.require_right(pair, n)
    doubts = found["doubts"] + ab.beyond_roofs(op, request["variants"], found.get("cases", ()), machine.stored().get(n))
    hashes = {k.variant: cache.digest(k.function) for k in pair}
    codes = {k.variant: jit.code_digest(k) for k in pair}
    told: dict[str, Any] = to_json(
        {
            "B": settings.B,
            "T": settings.T,
            "threads": n,
            **found,
            "checks": checks,
            "doubts": doubts,
            "hashes": hashes,
            "codes": codes,
        }
    )
    return told


def steps(request: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Train in turns with the kernels of a plan and with those that they replace."""
    from . import ab

    changes = [
        ab.Change((find(c["op"], c["variants"][0]), find(c["op"], c["variants"][1])), tuple(c["layers"]))
        for c in request["changes"]
    ]
    pair = ab.InStep(settings_of(request), changes, say)
    found, each = ab.steps_in_turns(pair, request["names"], request["seed"], request["looks"], say)
    told: dict[str, Any] = to_json({**found, "each": each})
    return told


def settings_of(request: Mapping[str, Any]) -> Any:
    """Read the settings of a job from a request."""
    from ..train.job import Settings

    return from_json(Settings, request["settings"])


def find(op: str, variant: str) -> Any:
    """Find a kernel."""
    from .. import kernels
    from ..kernels import registry

    kernels.load_all([], [variant])
    if (op, variant) not in registry.KERNELS:
        there = registry.variants(op)
        raise UserError(f"{op} has no variant {variant!r}; {nearest(variant, there)}")
    return registry.KERNELS[op, variant]


def main() -> None:
    """Answer requests until stdin closes."""
    serve({"load": load, "check": check, "ab": ab, "steps": steps})


if __name__ == "__main__":
    main()

"""What may crash or hang runs here: ``python -m cpuopt.lab.worker``, a process that `lab.child` starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UserError
from ..record import finite
from ..serve import Say, serve


def load(request: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Load users' kernel files, and list what they registered: op, variant and place of each."""
    from .. import kernels, registry

    before = set(registry.KERNELS)
    kernels.load_all(request["kernels"])
    added = [k for key, k in registry.KERNELS.items() if key not in before]
    return {"added": [{"op": k.op.name, "variant": k.variant, "where": k.where} for k in added]}


def check(request: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Check one kernel on one case."""
    from .cases import Case
    from .check import check

    case = Case(request["case"]["sizes"], request["case"]["kind"], frozenset(request["case"]["absent"]))
    result = check(find(request["op"], request["variant"]), case, threads=request["threads"], seed=request["seed"])
    return {"result": finite(result.to_json())}


def find(op: str, variant: str) -> Any:
    """Find a kernel."""
    from .. import registry

    if (op, variant) not in registry.KERNELS:
        there = registry.variants(op)
        raise UserError(f"{op} has no variant {variant!r}; {registry.nearest(variant, there)}")
    return registry.KERNELS[op, variant]


def main() -> None:
    """Answer requests until stdin closes."""
    serve({"load": load, "check": check})


if __name__ == "__main__":
    main()

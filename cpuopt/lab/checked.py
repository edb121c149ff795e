"""The check that `cpuopt check`, `ab` and `lab` share, so that none of them accepts what another refuses.

All cases of an op, and those at the sizes of a model as `train` has them, apart and fused; on one thread and on all.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..check.gate import GateVerdict, Planned, conform, refuse
from ..isolate.child import Asked, Child
from ..kernels.toolkit.threads import cores
from ..ops.storage import WIDE
from . import worker


def jobs_at(model: str, B: int, T: int, kernels: Sequence[str], dtype: str = WIDE) -> list[dict[str, Any]]:
    """Return the jobs whose calls give the sizes: with what a rewrite fuses, apart and together."""
    job = {"model": model, "B": B, "T": T, "kernels": list(kernels), "dtype": dtype}
    return [{**job, "fuse": fuse} for fuse in ("none", "all")]


def planned(
    child: Asked,
    ops: Collection[str],
    jobs: Sequence[Mapping[str, Any]],
    sizes: Sequence[Mapping[str, int]],
    quick: bool,
) -> dict[str, Planned]:
    """Plan the cases of some ops, by name."""
    asked = {"ops": list(dict.fromkeys(ops)), "jobs": list(jobs), "sizes": list(sizes), "quick": quick}
    return {op: Planned.from_json(plan) for op, plan in child.ask("cases", **asked)["planned"].items()}


def check(
    child: Child,
    threads: int,
    wanted: Sequence[tuple[str, str]],
    jobs: Sequence[Mapping[str, Any]],
    sizes: Sequence[Mapping[str, int]] = (),
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> list[GateVerdict]:
    """Check kernels up to the first that fails, on one thread, on `threads` and on all cores.

    Parameters
    ----------
    child : the process that has their files loaded, with `threads`; if there are more cores, another one is started.
    tick : called before each case, with its number and their count.
    """
    most = max(threads, cores())

    def done(by: Asked) -> list[GateVerdict]:
        plans = planned(by, [op for op, _ in wanted], jobs, sizes, quick=False)
        total, number = sum(len(plans[op].cases) + len(plans[op].sized) for op, _ in wanted), 0

        def next_one(text: str) -> None:
            nonlocal number
            number += 1
            tick(number, total)

        counts, seed = sorted({1, threads, most}), secrets.randbelow(10**6)
        found = conform(by, wanted, plans, threads=counts, seed=seed, stop_at_failure=True, tick=next_one)
        for verdict in found:  # inputs that a kernel could know would be those of a constant seed
            verdict.results = [replace(r, reason=f"{r.reason}, --seed {seed}") if r.refused else r
                               for r in verdict.results]  # fmt: skip
        return found

    if most <= threads:
        return done(child)
    with Child(worker.__name__, child.given, most, child.limit_s) as other:
        child.beside = other
        if child.ended:  # perhaps in between
            other.end()
        try:
            other.start()
            return done(other)
        finally:
            child.beside = None


def require(
    child: Child,
    threads: int,
    op: str,
    variants: Sequence[str],
    jobs: Sequence[Mapping[str, Any]],
    sizes: Sequence[Mapping[str, int]],
    tick: Callable[[int, int], None],
) -> None:
    """Check those of an op's variants that came with the files of a process, as `check` does.

    Raises
    ------
    UserError
        For one that is wrong.
    """
    mine = [(op, v) for v in dict.fromkeys(variants) if any((k["op"], k["variant"]) == (op, v) for k in child.start())]
    for verdict in check(child, threads, mine, jobs, sizes, tick) if mine else ():
        refuse(verdict.worst, "it is not timed")

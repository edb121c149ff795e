"""The check that `cpuopt check`, `ab` and `lab` share, so that none of them accepts what another refuses.

All cases of an op, and those at the sizes of a model as `train` has them, apart and fused; on one thread and on all.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .. import ops as declared
from ..check import gate
from ..check.cases import Case
from ..check.result import Result, refuse, whole
from ..files.reading import from_json, to_json
from ..isolate.child import Child
from ..isolate.serve import Say
from ..kernels.toolkit.threads import cores
from ..ops.storage import WIDE
from ..train.job import build_only
from .ab import case_at, settings_of


def jobs_at(model: str, B: int, T: int, kernels: Sequence[str], dtype: str = WIDE) -> list[dict[str, Any]]:
    """Return the jobs whose calls give the sizes: with what a rewrite fuses, apart and together."""
    job = {"model": model, "B": B, "T": T, "kernels": list(kernels), "dtype": dtype}
    return [{**job, "fuse": fuse} for fuse in ("none", "all")]


Plans = dict[str, tuple[list[Case], int]]
"""The cases of some ops, by name, and the number of those that are left out."""


def planned(
    child: Child,
    ops: Collection[str],
    jobs: Sequence[Mapping[str, Any]],
    sizes: Sequence[Mapping[str, int]],
    quick: bool,
) -> Plans:
    """Plan the cases of some ops."""
    asked = {"ops": list(dict.fromkeys(ops)), "jobs": list(jobs), "sizes": list(sizes), "quick": quick}
    found = child.ask("cases", **asked)["planned"]
    return {op: ([from_json(Case, c) for c in plan["cases"]], plan["left_out"]) for op, plan in found.items()}


def cases(request: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """List the cases of some ops: the usual ones, those of jobs, and those at sizes by symbol."""
    calls = [c for job in request["jobs"] for c in build_only(settings_of({"settings": job})).program.calls]
    sizes, chosen = request["sizes"], [declared.ALL[name] for name in request["ops"]]
    fit = [op for op in chosen if all(set(op.symbols) <= s.keys() for s in sizes)]
    at = {op: [case_at(op, s).plain() for s in sizes] for op in fit or chosen[:1]}
    every = {op.name: gate.planned(op, calls, at.get(op, ()), request["quick"]) for op in chosen}
    return {"planned": {op: {"cases": to_json(found), "left_out": n} for op, (found, n) in every.items()}}


def judge(
    child: Child,
    wanted: Sequence[tuple[str, str]],
    plans: Plans,
    threads: Sequence[int],
    seed: int,
    tick: Callable[[Case], None],
    until_refused: bool = False,
) -> list[Result]:
    """Judge kernels, by op and variant, on the plans of their ops; one that is refused does not keep the others."""
    found = []
    for op, variant in wanted:
        plan, left_out = plans[op]
        asking = gate.in_child(child, (op, variant), threads, seed)
        found.append(whole(gate.run(plan, asking, tick=tick, until_refused=until_refused), left_out))
    return found


def check(
    child: Child,
    threads: int,
    wanted: Sequence[tuple[str, str]],
    jobs: Sequence[Mapping[str, Any]],
    sizes: Sequence[Mapping[str, int]] = (),
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> list[Result]:
    """Check kernels up to the first case that refuses one, on one thread, on `threads` and on all cores.

    Parameters
    ----------
    child : the process that has their files loaded.
    tick : called before each case, with its number and their count.
    """
    plans, number = planned(child, [op for op, _ in wanted], jobs, sizes, quick=False), itertools.count(1)
    total = sum(len(plans[op][0]) for op, _ in wanted)
    counts, seed = sorted({1, threads, cores()}), secrets.randbelow(10**6)
    found = judge(child, wanted, plans, counts, seed, lambda case: tick(next(number), total), until_refused=True)
    # inputs that a kernel could know would be those of a constant seed
    return [replace(r, reason=f"{r.reason}, --seed {seed}") if r.refused else r for r in found]


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
    RefusedError
        For one that is wrong.
    """
    mine = [(op, v) for v in dict.fromkeys(variants) if any((k["op"], k["variant"]) == (op, v) for k in child.start())]
    for result in check(child, threads, mine, jobs, sizes, tick) if mine else ():
        refuse(result, "it is not timed")

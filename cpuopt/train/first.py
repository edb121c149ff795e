"""The check of users' kernels on the arrays of a first step: what no drawn numbers have.

A step is taken with the weights, the batch and the numbers of the run. Each distinct call of a kernel from a file is
judged in it, on copies of its arrays; then all that the step changed is put back. A step on another batch comes before
it, so that outputs and scratch hold what they hold in training: what used that memory of the arena before.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Protocol

import numpy as np

from .. import ops
from ..building import Bound
from ..check.cases import Case, elements
from ..check.check import check
from ..check.gate import declared, key_of, recall, remember
from ..check.judge import ours
from ..check.result import Result, refuse
from ..check.sized import MOST
from ..errors import CHEATING, RefusedError, blamed
from ..kernels.compile import cache
from ..kernels.watch import Watch
from ..profiler import Trainable

if TYPE_CHECKING:
    from .guard import Guard


class Guarded(Trainable, Protocol):
    """The part of a job that is used here."""

    guard: Guard


def judge_first_step(job: Guarded) -> list[Result]:
    """Judge each distinct call of users' kernels on the arrays of the next step, unless that is remembered.

    Ops of one's own, whose reference is plain Python, are left out, and so are steps that ranks share.

    Raises
    ------
    UserError
        Naming the kernel, the element that is wrong, and both values; or what a kernel did to this process.
    """
    engine = job.engine
    if engine.comm.size > 1:
        return []
    wanted: dict[str, str] = {}
    for bound in engine.calls:
        op, case = bound.call.op, Case.of(bound.call)
        name = f"{bound.kernel.name} {case}"
        if (
            isinstance(op, ops.Collective)
            or ours(bound.kernel)
            or declared(op)
            or elements(op, case) > MOST
            or name in wanted
        ):
            continue
        key = key_of(bound.kernel, cache.digest(bound.kernel.function), case, engine.threads, "first step")
        if recall(key, case) is None:
            wanted[name] = key
    if not wanted:
        return []
    found, watch = list[tuple[Result, str]](), Watch()

    def run(calls: Iterable[Bound]) -> None:
        for bound in calls:
            name = f"{bound.kernel.name} {Case.of(bound.call)}"
            if job.done == done and (key := wanted.pop(name, None)) is not None:
                found.append((judged(bound, engine.threads), key))
                refuse(found[-1][0], "nothing is run with it, on the arrays of a first step")
            states = [bound.args[bound.call.op.params.index(a.name)] for a in bound.call.op.args if a.kind == "state"]
            kept = [x.copy() for x in states]
            try:
                bound.kernel.function(*bound.args)
            except BaseException as e:
                raise blamed(e, bound.kernel.name, bound.call.layer) from e
            for x, before in zip(states, kept, strict=True):
                np.copyto(x, before)

    usual, done, number, guard = engine.runner, job.done, engine.step_number, job.guard.state()
    engine.runner = run
    try:
        for job.done in (done + 1, done):
            engine.step_number = number
            job.take_step(nullcontext)
    finally:
        engine.runner, job.done, engine.step_number = usual, done, number
        job.guard.restore(guard)
        engine.weights_put_back()
    if changes := watch.changes():
        raise RefusedError(f"in a first step a kernel changed its process: {'; '.join(changes)}", CHEATING)
    for result, key in found:
        remember(key, result)
    return [result for result, _ in found]


def judged(bound: Bound, threads: int) -> Result:
    """Judge a kernel on copies of the arrays of a call."""
    op, case = bound.call.op, Case.of(bound.call)
    scratch = [s.name for s in bound.kernel.scratch]
    given = dict(zip([*op.params, *scratch], bound.args, strict=True))
    there = {n: None if n in case.absent else given[n] for n in (*(a.name for a in op.args), *scratch)}
    return check(bound.kernel, case, threads=(threads,), given=there)

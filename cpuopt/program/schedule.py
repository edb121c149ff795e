"""The schedule of a step: the calls behind the forward of each micro-batch, in order, and what differs in each.

A step runs ``forward`` and then these calls for each micro-batch, ``norm``, and ``update``.
"""

from __future__ import annotations

from .program import Placed, Program


def schedule(program: Program, micro_batches: int, adding: bool) -> None:
    """Set `Program.backwards`.

    Parameters
    ----------
    adding : whether the kernels add the gradients of a micro-batch to those before it. Otherwise `distribute` has noted
        where each puts them, and the sums that follow.
    """
    backward = list(program.phase("backward"))
    last = [Placed(c, add=adding) for c in program.phase("backward", "reduce")]
    if adding:
        first, middle = ([Placed(c, add=add) for c in backward] for add in (False, True))
        program.backwards = [first, *[middle] * (micro_batches - 2), last]
        return
    program.backwards = [
        [*(Placed(c, instead=micro.targets) for c in backward), *(Placed(c, instead=at) for c, at in micro.sums)]
        for micro in program.micro_batches[:-1]
    ] + [last]

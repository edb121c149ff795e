"""The schedule of a step: the calls behind the forward of each micro-batch, in order, and what differs in each.

A step runs ``forward`` and then these calls for each micro-batch, ``norm``, and ``update``.
"""

from __future__ import annotations

from .program import Placed, Program


def schedule(program: Program, micro_batches: int, adding: bool) -> None:
    """Complete `Program.backwards`, in which `distribute` has listed all but the last of micro-batches that it sums.

    Parameters
    ----------
    adding : whether the kernels add the gradients of a micro-batch to those before it.
    """
    if adding:
        first, other = ([Placed(c, add=add) for c in program.phase("backward")] for add in (False, True))
        program.backwards = [first, *[other] * (micro_batches - 2)]
    program.backwards.append([Placed(c, add=adding) for c in program.phase("backward", "reduce")])

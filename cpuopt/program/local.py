"""The steps that ranks take together if each trains alone in between: what DiLoCo adds to a rank's own program.

Before the first of H steps, ``start`` keeps the weights, which are the same on all ranks. After the last, ``outer``
takes the start less the weights that the rank has come to, as the gradient of its own, and goes on as a step of several
ranks does: they are added in the fixed tree, an optimizer with Nesterov momentum is applied to the start, each rank on
its slice, and all receive the other slices. It uses the buckets of the rank's gradients, which are free by then.

Source: Douillard et al. 2023 (DiLoCo, arXiv 2311.08105), algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import ops
from ..comm import Comm
from ..ops.optimizer import DRAWN
from .distribute import Bucket, Distribution
from .program import Call, Place, Program, Scalar, Value


def add_outer(program: Program, comm: Comm, buckets: Sequence[Bucket]) -> None:
    """Append the phases ``start`` and ``outer`` to the program of a rank that trains alone.

    Parameters
    ----------
    buckets : those of the program, which `distribute` has made for one rank.
    """
    _Outer(program, comm, list(buckets)).run()


class _Outer(Distribution):
    def run(self) -> None:
        """Append the calls."""
        program = self.program
        starts: list[Call] = []
        begun: list[Call] = []
        ended: list[Call] = []
        updates: list[Call] = []
        for b in self.buckets:
            b.divide(self.size)
            if self.shared:
                program.window.append(b.gradients)
            start = program.value(f"{b.name}.start", (b.size,), "parameter")
            program.kept.append(start)
            starts.append(self.call(ops.copy, b, "start", out=start, inp=b.weights))
            delta = self.view(b.gradients, (0, b.size), "delta")
            begun.append(self.call(ops.subtract, b, "outer", out=delta, inp1=start, inp2=b.weights))
            sent, received = self.reduce(b, "outer")
            own = b.of(self.rank)
            back = {"out": self.view(b.weights, own, "own"), "inp": self.view(start, own, "own")}
            begun += sent
            ended += [*received, *([self.call(ops.copy, b, "outer", **back)] if own[0] < own[1] else [])]
            updates += [self.apply(p, b) for p in b.starts]
        program.calls += [*starts, *begun, *ended, *self.update(updates, "outer")]
        program.verify()

    def apply(self, p: Value, b: Bucket) -> Call:
        """Apply the outer optimizer to a parameter, under a name of its own: another optimizer trains it too."""
        program, optimizer = self.program, ops.OUTER
        same = program.value(f"{p}.outer", p.shape, "parameter")
        program.within[same] = Place(b.weights, b.starts[p])
        program.optimizers[same] = optimizer
        program.states[same] = {
            s.name: program.value(f"{same}.{s.name}", p.shape, "moment", dtype=s.dtype) for s in optimizer.states
        }
        numbers: dict[str, Any] = {a.name: Scalar(a.name, optimizer.name) for a in optimizer.args if a.kind == "scalar"}
        numbers |= {a.name: 0 for a in DRAWN}
        args = {"param": same, "grad": program.adjoint[p], "copy": None, **program.states[same], **numbers}
        return Call(optimizer, b.name, args, "outer")

"""The guard against steps that would spoil a run: a loss or a gradient norm that is not finite, or an outlier.

Finite or not is decided first. Other values never enter the window, so they neither switch the guard off, as in a
running sum, nor make it refuse later steps. The z-score is that of the accepted values of the last steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from math import fsum, isfinite, isinf, sqrt
from typing import Any

import numpy as np

from .. import ops
from ..building import Array
from ..engine import Engine, Step
from ..program.program import Phase
from ..weights.tensors import all_below

WINDOW, LEAST = 128, 32
"""The window of a z-score in steps, as in llm.c and OLMo, and the least number of steps that it needs."""
TRIES, PATIENCE = 20, 10
"""A run stops when this many of the last steps, out of this window, were skipped."""


class Guard:
    """Judges steps by those that it accepted.

    Parameters
    ----------
    z : the largest allowed z-score; 0 checks only that values are finite.

    Attributes
    ----------
    skipped : the number of refused steps.
    """

    def __init__(self, z: float = 0.0) -> None:
        self.z = z
        self.skipped = 0
        self.windows: dict[str, deque[float]] = {n: deque(maxlen=WINDOW) for n in ("loss", "grad_norm")}
        self.recent: deque[bool] = deque(maxlen=TRIES)

    def judge(self, step: Step) -> str:
        """Return the reason to skip a step, or ``""``; an accepted step enters the windows.

        A step in which nothing counted has changed nothing, so it is neither refused nor remembered.
        """
        if not step.counted:
            return ""
        values = {"loss": step.loss, "grad_norm": step.grad_norm}
        reason = next((f"{n} is {x}" for n, x in values.items() if not isfinite(x)), "")
        for name, x in values.items():
            reason = reason or self._far(name, x)
        self.recent.append(bool(reason))
        if reason:
            self.skipped += 1
        else:
            for name, x in values.items():
                self.windows[name].append(x)
        return reason

    def _far(self, name: str, x: float) -> str:
        window = self.windows[name]
        if not self.z or len(window) < LEAST:
            return ""
        mean = fsum(window) / len(window)
        deviation = sqrt(fsum((w - mean) ** 2 for w in window) / len(window))
        z = (x - mean) / max(deviation, 1e-6 * abs(mean), 1e-30)  # where all values are equal, rounding is no outlier
        return f"{name} {x:.6g} is {z:.1f} standard deviations above {mean:.6g}" if z > self.z else ""

    @property
    def exhausted(self) -> bool:
        """Return whether too many of the last steps were skipped for the run to go on."""
        return sum(self.recent) >= PATIENCE

    def state(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, for JSON."""
        windows = {name: list(w) for name, w in self.windows.items()}
        return {"skipped": self.skipped, "recent": list(self.recent), "windows": windows}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, which replaces what was seen so far."""
        self.skipped = state["skipped"]
        self.recent = deque(state["recent"], maxlen=TRIES)
        self.windows = {name: deque(state["windows"][name], maxlen=WINDOW) for name in self.windows}


NOTHING_FOUND = "computed again all is finite: suspect the memory or the processor, or a kernel that races"
OVERFLOW = (
    "the gradients are finite, but float32 cannot hold the sum of their squares: take a lower --lr, or a lower alpha "
    "of --lora"
)


def find_first(engine: Engine, batches: Iterable[Mapping[str, Array]]) -> str:
    """Repeat a step without its update, and name the first value that is not finite, its op and its layer.

    If updates are fused, the backward is not repeated: it would change the weights.
    """
    for name, array in engine.parameters().items():
        if not all_below(array):
            return f"parameter {name} holds {_example(array)}"
    if not engine.two_pass and _overflown_states(engine):
        return OVERFLOW
    phases: tuple[Phase, ...] = ("forward", "backward") if engine.two_pass else ("forward", "evaluate")
    for number, batch in enumerate(batches):
        if not engine.counted(batch):
            continue
        engine.load(**batch)
        for bound in (b for p in phases for b in engine.calls if b.call.phase == p):
            engine.runner([bound])
            for v in bound.call.writes:
                if not all_below(engine.array(v)):
                    where = f"{bound.kernel.name} in layer {bound.call.layer!r}"
                    return f"{where} gave {_example(engine.array(v))} in {v}, micro-batch {number}"
    gradients = [engine.array(c.args["inp"]) for c in engine.program.phase("norm") if c.op is ops.sumsq]
    with np.errstate(over="ignore"):
        return OVERFLOW if engine.two_pass and any(isinf(np.vdot(g, g)) for g in gradients) else NOTHING_FOUND


def _overflown_states(engine: Engine) -> bool:
    """Return whether a norm is infinite, and the first moments, averages of gradients, are finite.

    Where updates are fused, they are what is left of the gradients.
    """
    norms = [engine.array(v) for v in engine.program.norm_terms]
    moments = [engine.array(next(iter(states.values()))) for states in engine.program.states.values() if states]
    return any(np.isinf(x).any() for x in norms) and all(map(all_below, moments))


def _example(array: Array) -> str:
    at = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
    return f"{array[at]} at {list(at)}"

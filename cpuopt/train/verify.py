"""llm.c's own test of a GPT-2, as ``test_gpt2.c`` has it: logits, loss, 16 gradients, and ten steps of AdamW.

What is compared with was computed by PyTorch and lies in a debug state. Like the reference it takes the plain program,
without rewrites, since gradients that no rewrite leaves out are to be seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..building import BuildOptions
from ..engine import Engine
from ..errors import UserError
from ..kernels.registry import Choice
from ..weights import Weights, copy_into, llmc
from .job import Cycle, Progress, Settings, TrainingSteps, require_correct

FAR = {"logits": 1e-2, "loss": 1e-2, "gradient": 2e-2, "step": 1e-2}
"""The tolerance of each kind of value, from ``test_gpt2.c``."""
HYPER: dict[str, Any] = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
LOSSES_124M = (
    *(5.270007133, 4.059706688, 3.375123024, 2.800782681, 2.315382242),
    *(1.849028587, 1.394656420, 0.999146521, 0.624080420, 0.376510978),
)
"""The losses of ``gpt2_124M_debug_state.bin``, which is recognised by the first of them."""


@dataclass(frozen=True)
class VerifyRow:
    """One comparison.

    Attributes
    ----------
    what : ``logits``, ``loss``, a tensor's name or ``loss of step 3``.
    deviation : the largest absolute difference; NaN if one of the two is.
    allowed : the largest deviation that passes; None if there is nothing to compare with.
    value : cpuopt's value, for a single number.
    """

    JSON: ClassVar = ("what", "deviation", "allowed", "value", "passed")
    what: str
    deviation: float | None
    allowed: float | None
    value: float | None = None

    @property
    def passed(self) -> bool:
        """Return whether the deviation is within the tolerance."""
        return self.allowed is None or (self.deviation is not None and self.deviation <= self.allowed)


def model_beside(state: Path) -> Path:
    """Find the model of a debug state by llm.c's naming: ``X_debug_state.bin`` has ``X.bin``.

    Raises
    ------
    UserError
        If there is no such file.
    """
    if not state.is_file():
        raise UserError(f"there is no file {str(state)!r}; expected a debug state, as llm.c writes it")
    path = state.with_name(state.name.replace("_debug_state", ""))
    if path == state or not path.is_file():
        raise UserError(f"{str(state)!r} has no model file beside it; name it with --init MODEL.bin")
    return path


def verify(
    state: llmc.DebugState,
    model: Weights,
    settings: Settings,
    losses: Sequence[float] = (),
    progress: Progress = lambda done, total, name: None,
) -> Iterator[VerifyRow]:
    """Compare the computation with a debug state, a row at a time.

    Parameters
    ----------
    losses : the expected losses of ten steps; those of llm.c's own state are known.
    settings : the source of variant, swaps, kernels and threads.
    """
    B, T = state.tokens.shape
    how = BuildOptions(
        choice=Choice(settings.variant, settings.swap),
        threads=settings.threads,
        processes=settings.processes,
        kernel_files=settings.kernels,
    )
    engine = Engine(*model.config.sized(B, T), how, seed=None, progress=progress)
    require_correct(engine, settings.kernels)
    copy_into(engine.parameters(), model)
    targets = np.where(state.targets == -1, -100, state.targets)
    loss = engine.forward(tokens=state.tokens, targets=targets)
    yield VerifyRow("logits", _far(engine.array(engine.program.outputs[1]), state.logits), FAR["logits"])
    yield VerifyRow("loss", _far(loss, state.loss), FAR["loss"], loss)
    engine.run("backward")
    gradients = engine.gradients()
    for group in llmc.ORDER:
        names = [n for n in state.places if n == group or (n.startswith("h.") and _star(n) == group)]
        far = [_far(gradients[n], state.gradient(n)) for n in names]
        yield VerifyRow(f"gradient of {group}", float(np.max(far)), FAR["gradient"])
    steps = TrainingSteps(replace(settings, **HYPER), engine, Cycle([(state.tokens, targets)]))
    known = not losses and model.config.n_params == 124439808 and abs(state.loss - LOSSES_124M[0]) < FAR["loss"]
    expected = LOSSES_124M if known else tuple(losses)
    for step in range(10):
        loss = steps.take_step().loss
        there = step < len(expected)
        yield VerifyRow(
            f"loss of step {step}", _far(loss, expected[step]) if there else None, FAR["step"] if there else None, loss
        )


def _star(name: str) -> str:
    """Put a star in the place of a layer's number."""
    return ".".join("*" if i == 1 else part for i, part in enumerate(name.split(".")))


def _far(got: Any, want: Any) -> float:
    return float(np.max(np.abs(np.asarray(got, np.float64) - np.asarray(want, np.float64))))

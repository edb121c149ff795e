"""The record of values whose number is not known before the loops that push them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..compile.jit import helper


@helper()
def push(tape: Any, top: int, value: Any) -> Any:
    """Write a value behind the `top` values of a record; return the record, made larger if it is full, and `top`."""
    if top == tape.size:
        tape = np.concatenate((tape, tape))
    tape[top] = value
    return tape, top + 1

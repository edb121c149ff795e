"""The rows of constant tables that a program needs: those of its positions, not of the longest context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ..ops.declaration import maxT
from .program import Program


def first_rows(make: Callable[[], Any], rows: int) -> Any:
    """Make the first rows of an array."""
    return make()[:rows]


def cut_tables(program: Program) -> None:
    """Keep the first T rows of a constant of maxT rows where its readers need no others; before the backward."""
    for table, make in program.constants.items():
        readers = [(c, a) for c in program.calls for a in c.op.arrays if c.args[a.name] is table]
        in_order = all(a.shape[0] == maxT and "position" not in c.args for c, a in readers)
        rows = max((c.sizes["T"] for c, _ in readers), default=0) if in_order else 0
        if 0 < rows < table.shape[0]:
            table.shape = (rows, *table.shape[1:])
            program.constants[table] = partial(first_rows, make, rows)
    if program.constants:
        program.calls = [replace(c) for c in program.calls]  # their sizes changed

"""Naive kernels of the Llama family with one thing wrong, as people write it: the check refuses each.

A mutant is the source of the vanilla kernel with some text replaced, run as plain Python.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from bad import mutants

from cpuopt import kernels, ops  # noqa: F401  (importing kernels registers them)
from cpuopt.check.cases import KINDS, SMALL, Case, case, quick_cases
from cpuopt.check.check import check
from cpuopt.kernels.registry import KERNELS, Kernel
from cpuopt.ops.declaration import Op

MUTANTS = mutants()


def kernel_of(op: Op, changes: dict[str, str] | None = None) -> Kernel:
    """The vanilla kernel as plain Python, with some text replaced."""
    original = KERNELS[op.name, "vanilla"]
    function: Callable[..., Any] = inspect.unwrap(getattr(original.function, "py_func", original.function))
    source = inspect.getsource(function)
    source = source[source.index("def ") :]
    for old, new in (changes or {}).items():
        assert old in source, old
        source = source.replace(old, new)
    module = ModuleType("mutant")
    vars(module).update(function.__globals__, prange=range)
    exec(source, vars(module))
    return Kernel(op, "mutant", vars(module)[op.name], original.scratch)


def tried(op: Op) -> list[Case]:
    """The small ones of the cases that come before a time is reported, and one of each kind."""
    small = [on for on in quick_cases(op) if on.sizes.get("T", 0) < 20]
    return [*small, *(case(op, SMALL, kind) for kind in KINDS if kind not in op.unfit)]


@pytest.mark.filterwarnings("ignore")  # plain Python warns of what numba does not
@pytest.mark.parametrize(("wrong", "op", "changes"), MUTANTS, ids=[f"{op.name}: {wrong}" for wrong, op, _ in MUTANTS])
def test_a_mutant_is_refused(wrong: str, op: Op, changes: dict[str, str]) -> None:
    mutant = kernel_of(op, changes)
    failed = next((r for r in (check(mutant, on, threads=(1,)) for on in tried(op)) if r.verdict == "wrong"), None)
    assert failed, wrong
    assert "expected" in failed.reason, str(failed)  # for its numbers, not since it raised


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", dict.fromkeys(op for _, op, _ in MUTANTS), ids=str)
def test_the_kernel_that_is_changed_is_right(op: Op) -> None:
    assert check(kernel_of(op), case(op, SMALL), threads=(1,)).verdict == "right"

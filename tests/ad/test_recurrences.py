"""First ops of a researcher: none is called wrong where it grows, and each compiles."""

import natural
import pytest
from natural import recurrences

from cpuopt import differentiable
from cpuopt.check.cases import case
from cpuopt.check.check import check
from cpuopt.kernels import registry

KERNELS = {n: k for n, k in natural.ALL.items() if k.home == recurrences.__name__}
LONG = {"B": 2, "T": 60, "C": 5, "D": 4, "K": 4, "L": 3, "M": 3, "NH": 1}


def test_there_are_some_of_each_kind():
    assert len(KERNELS) >= 9
    assert all(k.inputs is None for k in KERNELS.values())


@pytest.mark.parametrize("name", KERNELS)
def test_a_recurrence_as_first_written_compiles_and_is_right(monkeypatch, name):
    kernel = KERNELS[name]
    monkeypatch.setattr(kernel.function, "__name__", f"natural_{name}")
    op = differentiable(*kernel.args)(kernel.function)
    op.judge()
    for part in (op.forward, op.backward):
        result = check(registry.KERNELS[part.name, "vanilla"], case(part, LONG), threads=(1,))
        assert result.verdict != "wrong", result.reason

"""The judge on kernels as people write them: it calls no right gradient wrong."""

import natural
import pytest

from cpuopt import differentiable
from cpuopt.ops.declaration import N, inp, out


@pytest.mark.parametrize("name", natural.ALL)
def test_the_gradient_of_a_kernel_is_judged_right(registered, monkeypatch, name):
    kernel = natural.ALL[name]
    monkeypatch.setattr(kernel.function, "__name__", f"natural_{name}")
    op = differentiable(*kernel.args, inputs=kernel.inputs)(kernel.function)
    op.judge()
    assert op.judged


def test_there_are_a_hundred():
    assert len(natural.ALL) >= 100


def fourth_power(out, inp):
    for i in range(inp.shape[0]):
        out[i] = inp[i] * inp[i]
    for i in range(inp.shape[0]):
        out[i] *= out[i]


def test_an_output_that_is_written_twice_is_computed_again_by_the_compiled_backward(registered):
    op = differentiable(out("out", N), inp("inp", N))(fourth_power)
    assert "out" not in op.backward.by_name
    assert {r.verdict for r in op.check()} == {"PASS"}

"""The generated backward of every op, in float64: interpreted, planned and with everything recorded.

Compiled in float32, on one thread and on several, each is compared with its reference in kernels/test_conformance.py.
"""

import hashlib
from math import prod

import numpy as np
import pytest

import cpuopt.kernels  # noqa: F401  (registers)
from cpuopt import check_gradient, ops
from cpuopt.ad import differentiate, emit
from cpuopt.check.cases import SMALL, arguments, case, reference
from cpuopt.cli import main
from cpuopt.kernels import registry
from cpuopt.kernels.compile import jit
from cpuopt.kernels.generated import REFUSED
from cpuopt.kernels.generated.load import backward
from cpuopt.kernels.toolkit import threads as numba_threads

GENERATED = [op for op in ops.ALL.values() if (op.name, "generated") in registry.KERNELS]
EVERY = pytest.mark.parametrize("op", GENERATED, ids=[op.name for op in GENERATED])


def wide(made):
    """A generated backward whose constants are float64 too, as plain Python."""
    text = made.text.replace("np.float32(", "np.float64(")
    key = hashlib.sha256(text.encode()).hexdigest()[:32]
    return getattr(emit.load(f"{made.name}_wide", key, lambda: text), made.name)


def vanilla(op):
    return registry.KERNELS[op.inverts.name, "vanilla"]


def sizes_of(op):
    """How many elements each array of the forward has, and its scratch."""
    sizes = case(op.inverts, SMALL).sizes
    found = {a.name: prod(d(sizes) for d in a.shape) for a in op.inverts.arrays}
    return found | {s.name: s.elements(sizes) for s in vanilla(op).scratch}


def pullback(op, made, function):
    """A generated backward as what `check_gradient` calls: gradients overwritten, scratch poisoned."""

    def call(given):
        got = {a.name: given[a.name].copy() for a in op.args if a.kind == "acc"}
        args = []
        for a in op.args:
            args += [got[a.name], False] if a.kind == "acc" else [given[a.name]]
        args += [np.full(factor * sizes_of(op)[like], np.nan) for factor, like in made.scratch.values()]
        with np.errstate(over="ignore"):  # of the integers in random numbers
            function(*args)
        return got

    return call


@EVERY
def test_interpreted_it_agrees_with_differences(op):
    made = backward(op, vanilla(op))
    results = check_gradient(op, pullback=pullback(op, made, wide(made)))
    assert max(r.error for r in results) < 1e-8, results


@pytest.mark.parametrize("op", [ops.gelu_backward, ops.layernorm_backward], ids=str)
def test_compiled_it_agrees_with_differences_and_gives_the_same_bits_on_1_to_4_threads(op):
    made = backward(op, vanilla(op))
    compiled = jit.helper(parallel="prange" in made.text)(wide(made))
    call, found = pullback(op, made, compiled), []

    def on_each_number(given):
        for n in (1, 2, 3, 4):
            numba_threads.set_threads(n)
            found.append(call(given))
        return found[0]

    before = numba_threads.get_threads()
    try:
        results = check_gradient(op, pullback=on_each_number)
    finally:
        numba_threads.set_threads(before)
    assert max(r.error for r in results) < 1e-8, results
    assert len(found) == 4
    assert all(np.array_equal(x, found[0][n]) for other in found[1:] for n, x in other.items())


@EVERY
def test_it_agrees_with_a_plan_that_records_everything(op):
    forward, first, rng = vanilla(op), op.inverts, np.random.default_rng(0)
    before = {n: x.astype(float) if getattr(x, "dtype", None) == np.float32 else x
              for n, x in arguments(first, case(first, SMALL), rng).items()}  # fmt: skip
    after = {**before, **reference(first, before)}
    wrt = [a.name[1:] for a in op.args if a.kind == "acc"]
    outs = [a.name[1:] for a in op.arrays if a.kind != "acc" and a.name not in first.by_name]
    adjoints = {f"d{n}": rng.standard_normal(after[n].shape) for n in outs}
    planned, everything = backward(op, forward), differentiate(forward.function, wrt, outs, record_all=True)
    got = pullback(op, planned, wide(planned))({**after, **adjoints, **{f"d{n}": after[n] * np.nan for n in wrt}})
    want = {f"d{n}": np.zeros_like(after[n]) for n in wrt}
    scratch = {s.name: np.full(sizes_of(op)[s.name], np.nan) for s in forward.scratch}
    with np.errstate(over="ignore"):
        wide(everything)(*({**before, **scratch, **adjoints, **want}[n] for n in everything.params))
    for n in want:
        assert np.abs(got[n] - want[n]).max() <= 1e-12 * (1 + np.abs(want[n]).max()), n


def test_every_op_with_a_derivative_has_a_generated_one_or_a_reason(capsys):
    assert {op.name for op in GENERATED} == {op.name for op in ops.ALL.values() if op.inverts}
    without = {op.name for op in ops.ALL.values() if not op.backwards} - {op.name for op in GENERATED}
    assert set(REFUSED) == without
    assert "matmul_backward_input and gelu_backward" in REFUSED["matmul_gelu_backward"]
    assert "no declared backward" in REFUSED["attention_decode"]
    assert main(["new-kernel", "matmul_gelu_backward", "--backward"]) == 2
    assert "matmul_gelu_backward: it fuses" in capsys.readouterr().err

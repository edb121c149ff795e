"""The checks know arguments by their declaration, and none by its name."""

import inspect
from dataclasses import replace

import numpy as np
import pytest

from cpuopt import ops
from cpuopt.check.cases import SMALL, Case, arguments, case
from cpuopt.check.check import check
from cpuopt.check.scalars import START
from cpuopt.kernels.registry import Kernel
from cpuopt.ops.declaration import Op


def renamed(op, **changed):
    """An op whose arguments have other names, and all else alike; `changed` alters the one that is called weight."""

    def other(name):
        return f"other_{name}" if name in op.by_name else name

    def reference(**given):
        return {other(n): x for n, x in op.reference(**{n: given[other(n)] for n in known}).items()}

    known = inspect.signature(op.reference).parameters
    parameters = [inspect.Parameter(other(n), inspect.Parameter.KEYWORD_ONLY) for n in known]
    reference.__signature__ = inspect.Signature(parameters)
    args = [replace(a, **changed) if a.name == "weight" else a for a in op.args]
    args = [replace(a, name=other(a.name), ignored=other(a.ignored)) for a in args]
    return Op(op.name, *args, label=op.label, flops=op.flops, reference=reference, source=op.source)


@pytest.mark.parametrize("op", [op for op in ops.ALL.values() if not op.inverts and not op.inputs], ids=str)
@pytest.mark.parametrize("kind", ["normal", START])
def test_arguments_of_other_names_are_drawn_alike(op, kind):
    twin = renamed(op)
    ours, theirs = (arguments(o, case(o, SMALL, kind), np.random.default_rng(0)) for o in (op, twin))
    for a, b in zip(op.args, twin.args, strict=True):
        np.testing.assert_array_equal(ours[a.name], theirs[b.name])


def test_what_the_start_of_a_run_holds_is_declared():
    found = {(op.name, a.name): a.start for op in ops.ALL.values() for a in op.args if a.start is not None}
    assert {n for (_, n), start in found.items() if start == 1} == {"weight"}
    assert found["layernorm_forward", "bias"] == found["matmul_update", "weight_m"] == found["sgd", "velocity"] == 0
    with_start = renamed(ops.layernorm_forward, start=3.0)
    assert set(arguments(with_start, case(with_start, SMALL, START), np.random.default_rng(0))["other_weight"]) == {3}


SIZES = {"BT": 64, "C": 400, "OC": 32, "V": 32}


def sized(op):
    """How a kernel of the op is judged at a run's size, and the deviation of its weight there."""
    seen = []

    def function(*args):
        given = dict(zip(op.params, args, strict=True))
        (weight,) = (given[a.name] for a in op.args if a.name in ("weight", "other_weight"))
        seen.append(float(weight.std()))
        known = inspect.signature(op.reference).parameters
        found = op.reference(**{n: x if getattr(x, "size", 1) else None for n, x in given.items() if n in known})
        for a in op.written:
            given[a.name][...] = found[a.name]

    on = Case({s: SIZES[s] for s in op.symbols}, adds={}, sized=True)
    result = check(Kernel(op, "vanilla", function), on, threads=(1,))
    return result.verdict, result.ratio, seen[0]


@pytest.mark.parametrize("op", [ops.matmul_forward, ops.classifier_forward], ids=str)
def test_a_weight_of_another_name_is_as_large_as_in_a_model(op):
    verdict, ratio, deviation = sized(op)
    assert verdict == "right"
    assert abs(deviation * 20 - 1) < 0.05
    assert sized(renamed(op)) == (verdict, ratio, deviation)
    assert abs(sized(renamed(op, fan_in=None))[2] - 1) < 0.05

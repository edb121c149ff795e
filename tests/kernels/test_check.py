"""A check is not written until it has failed: for each thing that is checked, a kernel that is wrong in it."""

import re
import threading
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numba
import numpy as np
import pytest
from bad import vanilla_is_right
from numpy.lib.stride_tricks import as_strided

from cpuopt import kernels, ops  # noqa: F401  (importing kernels registers them)
from cpuopt.check.cases import FEW, ODD, PART, SMALL, Case, case, cases, normal, other_types, quick_cases, scalars
from cpuopt.check.check import check
from cpuopt.check.judge import expected, require_usual
from cpuopt.kernels.registry import KERNELS, Kernel, Scratch
from cpuopt.ops.declaration import Dim

F32 = np.float32


def mutant(op, function, scratch=()):
    return Kernel(op, "mutant", function, scratch)


def vanilla(op):
    return KERNELS[op.name, "vanilla"].function


def after(op, spoil):
    """The vanilla kernel; then `spoil` is given its arguments by name."""
    original = KERNELS[op.name, "vanilla"]

    def function(*args):
        original.function(*args)
        spoil(SimpleNamespace(**dict(zip([*op.params, *(s.name for s in original.scratch)], args, strict=True))))

    return mutant(op, function, original.scratch)


def before(op, **instead):
    """The vanilla kernel, given other values for some arguments: functions of all of them."""
    original = KERNELS[op.name, "vanilla"]

    def function(*args):
        names = [*op.params, *(s.name for s in original.scratch)]
        given = SimpleNamespace(**dict(zip(names, args, strict=True)))
        original.function(*(instead[n](given) if n in instead else getattr(given, n) for n in names))

    return mutant(op, function, original.scratch)


def assert_fails(kernel, why, on=None, **options):
    """It fails for the reason that matches, and vanilla passes the same case."""
    on = on or case(kernel.op, SMALL)
    result = check(kernel, on, **options)
    assert result.verdict == "wrong", str(result)
    assert re.search(why, result.reason), str(result)
    assert vanilla_is_right(kernel.op.name, on, **options)
    return result


USUAL, *OTHERS = ops.OPTIMIZERS.values()
OPS = [op for op in ops.ALL.values() if not (op.fuses and op.fuses[-1] in OTHERS)]
"""All but those that differ from others by the rule of an optimizer alone, which is an op too."""
WRITTEN = [(op, a.name) for op in OPS for a in op.written if a.dtype != "int8"]  # which has no numbers between


def one_of_each(named):
    """Return, of arguments that a check does not tell apart, the first, and the last, which is of an op with more."""
    found = {}
    for op, name in named:
        a = op.by_name[name]
        found.setdefault((a.kind, a.dtype, a.optional, len(a.shape)), []).append((op, name))
    return list(dict.fromkeys(one for alike in found.values() for one in (alike[0], alike[-1])))


SOME = one_of_each(WRITTEN)
SOME_WRITTEN = pytest.mark.parametrize(("op", "name"), SOME, ids=[f"{op.name}-{n}" for op, n in SOME])
SOME_OPS = pytest.mark.parametrize("op", dict.fromkeys(op for op, _ in SOME), ids=str)
"""For what is found in every op by the same line, without the op's tolerance."""


# --- whatever is written ----------------------------------------


@pytest.mark.parametrize(("op", "name"), WRITTEN, ids=[f"{op.name}-{n}" for op, n in WRITTEN])
def test_an_error_of_a_thousandth(op, name):
    def spoil(a):
        getattr(a, name)[...] *= F32(1.001)

    result = assert_fails(after(op, spoil), rf"^{name}\[.*\] = .*, expected ")
    assert (result.argument, result.got) == (name, pytest.approx(1.001 * result.want, rel=1e-4))
    assert 10 < result.ratio < (1e6 if op.by_name[name].dtype == "float32" else 1e15)


@SOME_WRITTEN
def test_one_wrong_value(op, name):
    def spoil(a):
        x = getattr(a, name)
        x.flat[-1] += max(F32(0.125), F32(1e-3) * abs(x.flat[-1]))

    result = assert_fails(after(op, spoil), rf"^{name}\[.*\] = .*, expected ")
    assert result.index == tuple(d(case(op, SMALL).sizes) - 1 for d in op.by_name[name].shape)


@SOME_WRITTEN
def test_the_last_element_is_not_written(op, name):
    original, place = KERNELS[op.name, "vanilla"], op.params.index(name)

    def function(*args):
        words = args[place].reshape(-1).view(np.uint32 if args[place].itemsize == 4 else np.uint64)
        before = words.copy()
        original.function(*args)
        last = np.flatnonzero(words != before)[-1]  # some rows of a state may rightly stay
        words[last] = before[last]

    state = op.by_name[name].kind == "state"
    assert_fails(mutant(op, function, original.scratch), "expected" if state else "= nan, .*so not written")


OUTSIDE = [(op, name, 1) for op, name in SOME]
OUTSIDE += [(op, name, past) for op, name in WRITTEN if op is ops.classifier_update for past in (16, -1)]


@pytest.mark.parametrize(("op", "name", "past"), OUTSIDE, ids=[f"{op.name}-{n}-{past}" for op, n, past in OUTSIDE])
def test_a_write_outside(op, name, past):
    def spoil(a):
        x = getattr(a, name).reshape(-1)
        as_strided(x, (2,), (x.itemsize * (x.size - 1 + past if past > 0 else past),))[1] = 0

    where = f"{past} past the end" if past > 0 else "1 before the beginning"
    assert_fails(after(op, spoil), f"wrote outside its arrays: {where} of '{name}'")


@pytest.mark.parametrize("past", [8, -8])
def test_a_loop_that_runs_too_far_and_writes_what_it_reads_there(past):
    @numba.njit
    def loop(out, inp1, inp2):
        for i in range(min(past, 0), len(out) + max(past, 0)):
            out[np.uint64(i)] = inp1[np.uint64(i)] + inp2[np.uint64(i)]

    @numba.njit
    def copy(out, inp):
        vanilla_gelu(out, inp)
        for i in range(8):
            out[np.uint64(len(out) + i)] = out[np.uint64(len(out) + i + 1)]

    vanilla_gelu = vanilla(ops.gelu_forward)
    assert_fails(mutant(ops.residual_forward, loop), "wrote outside its arrays: [18] (past|before) the .* of 'out'")
    assert_fails(mutant(ops.gelu_forward, copy), "wrote outside its arrays: 1 past the end of 'out'")


@SOME_WRITTEN
def test_a_nan(op, name):
    def spoil(a):
        getattr(a, name).flat[0] = np.nan

    assert_fails(after(op, spoil), rf"^{name}\[0.*\] = nan, expected [-\d.e]+(, \w+=\w+)*$")


ACCS = [(op, a.name) for op, name in WRITTEN for a in op.args if a.name == name and a.kind == "acc"]


@pytest.mark.parametrize(("op", "name"), ACCS, ids=[f"{op.name}-{n}" for op, n in ACCS])
def test_a_flag_that_is_ignored_or_that_of_another_argument(op, name):
    others = [f"{a.name}_add" for a in op.args if a.kind == "acc" and a.name != name]
    overwritten = f"nan, .*{name}_add=False.*: as filled .* added to in place of being overwritten"
    for flag, why in (
        (lambda a: False, f".*, expected .*{name}_add=True"),
        (lambda a: True, overwritten),
        *[(lambda a: getattr(a, others[0]), f".*{name}_add=(True.*{o}=False|False)") for o in others[:1]],
    ):
        assert_fails(before(op, **{f"{name}_add": flag}), rf"^{name}\[.*\] = {why}")


READ = one_of_each([(op, a.name) for op in OPS for a in op.arrays if a.kind in ("in", "index")])


@pytest.mark.parametrize(("op", "name"), READ, ids=[f"{op.name}-{n}" for op, n in READ])
def test_an_input_is_changed(op, name):
    def spoil(a):
        getattr(a, name).flat[0] += 1

    assert_fails(after(op, spoil), f"^changed '{name}', which it may only read, at element 0")


def test_it_does_not_compile():
    def make(types):
        raise numba.TypingError("no such thing")

    result = check(Kernel(ops.sumsq, "mutant", vanilla(ops.sumsq), make=make), {"N": 3})
    assert (result.verdict, result.ratio) == ("compile error", np.inf)
    assert result.reason.startswith("does not compile, or has no scratch size: TypingError: ")
    kernel = mutant(ops.sumsq, vanilla(ops.sumsq), (Scratch("partial", "N + 1"),))
    assert check(kernel, {"N": 3}).reason.startswith("does not compile, or has no scratch size: ValueError: ")


# --- what one op can do wrong ----------------------------------------


def by_threads(out, inp):
    """One partial sum a thread, term after term."""
    out[0] = sum(np.cumsum(np.square(part))[-1] for part in np.array_split(inp, numba.get_num_threads()))


def test_other_bits_with_other_threads():
    big = Case({"N": 10007})
    assert_fails(mutant(ops.sumsq, by_threads), "^'out' has other bits with 2 threads instead of 1", big)
    assert_fails(mutant(ops.sumsq, by_threads), "with [34] threads instead of 2", big, threads=(2, 3, 4))
    assert check(mutant(ops.sumsq, by_threads), big, threads=(3,)).verdict == "right"
    assert check(Kernel(ops.sumsq, "mutant", by_threads, same_bits=False), big).verdict == "right"  # not promised


def test_an_absent_argument_is_used():
    def read(out, inp, weight, bias):
        out[...] = inp @ weight.T + as_strided(bias, (len(weight),), (4,))

    def write(a):
        as_strided(a.dbias, (1,), (4,))[0] = 0

    on = case(ops.matmul_forward, SMALL, absent=["bias"])
    assert_fails(mutant(ops.matmul_forward, read), "= nan, .*: read from outside an array", on)
    on = case(ops.matmul_backward_weight, SMALL, absent=["dbias"])
    assert_fails(after(ops.matmul_backward_weight, write), "1 past the end of 'dbias'", on)


CERTAIN = case(ops.classifier_backward, {"B": 4, "T": 64, "C": 16, "NH": 1, "OC": 1, "V": 4})
"""Logits of a deviation of 4: some tokens have a probability p of 0.99 and more, and 1 - p has few digits left."""


def certain(a):
    """The tokens whose target has a probability from 0.99 to 0.9999."""
    logits = (a.inp @ a.weight.T).astype(float)
    p = np.exp(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))
    p = p[np.arange(len(p)), np.maximum(a.targets, 0)]
    return (a.targets >= 0) & (p > 0.99) & (p < 0.9999)


@pytest.mark.parametrize("variant", ["vanilla", "optimized"])
def test_a_probability_that_rounds_to_one_is_no_error(variant):
    tiny = {"B": 2, "T": 3, "C": 3, "NH": 3, "OC": 1, "V": 2}
    draws = [(tiny, "normal", 9), (ODD, "normal", 2), (SMALL, "large", 2), (ODD, "offset", 4), (ODD, "offset", 7)]
    for sizes, kind, seed in draws:
        kernel = KERNELS["classifier_backward", variant]
        result = check(kernel, case(kernel.op, sizes, kind), threads=(1,), seed=seed)
        assert result.verdict == "right", str(result)


@pytest.mark.parametrize("factor", [0, 1.01])
def test_a_gradient_that_is_small_since_its_token_is_certain_is_judged(factor):
    def spoil(a):
        assert certain(a).any()
        a.dinp[certain(a)] *= F32(1 if a.dinp_add else factor)

    for seed in range(4):
        assert_fails(after(ops.classifier_backward, spoil), r"^dinp\[.*expected", CERTAIN, seed=seed, threads=(1,))


@pytest.mark.parametrize(("op", "name"), [(ops.gelu_forward, "out"), (ops.gelu_backward, "dinp")])
def test_a_gelu_alone_in_its_row_may_err_by_what_its_formula_cancels(op, name):
    """1 + tanh(u) loses all its digits far down, and no other element of the row tells how large they were."""
    wanted = expected(op, Case({"N": 1}), {a.name: np.full(1, -6.0, F32) for a in op.arrays}, np.random.default_rng(0))
    assert abs(wanted.values[name][0]) < 1e-6 < 1 < wanted.scale[name][0]


def test_a_gradient_that_cancels_to_zero_in_a_row_of_one_may_err_by_its_terms():
    """Of one element, the mean is the element itself, so the formula of layer normalization leaves rounding alone."""
    kernel = KERNELS["layernorm_backward", "optimized"]
    for seed in range(12):
        result = check(kernel, {"BT": 116, "C": 1}, threads=(1,), seed=seed)
        assert result.verdict == "right", str(result)


# --- the check itself ----------------------------------------


def test_marginal(monkeypatch):
    """Further off than rounding explains: a fault, unless the package's kernels are about as far off."""

    def spoil(a):
        a.out[...] *= F32(1 + 1e-5)

    assert_fails(after(ops.gelu_forward, spoil), r"times as far off as rounding explains, and gelu_forward\[\w+\] 0")
    monkeypatch.setattr("cpuopt.check.judge.LESS_PRECISE", 1e3)
    result = check(after(ops.gelu_forward, spoil), case(ops.gelu_forward, SMALL))
    assert (result.verdict, result.reason[:4], str(result)[:9]) == ("marginal", "out[", "marginal ")


# --- the numbers of a call, and values that a run has ----------------------------------------

NUMBERED = [op for op in OPS if any(a.kind == "scalar" for a in op.args)]


@pytest.mark.parametrize("op", NUMBERED, ids=str)
def test_numbers_stay_in_their_ranges(op):
    drawn = [scalars(op, on, np.random.default_rng(seed)) for seed in range(9) for on in cases(op)]
    for arg in (a for of in (op, op.inverts) if of for a in of.args if a.kind == "scalar"):
        high = max(arg.high(on.sizes) if isinstance(arg.high, Dim) else arg.high for on in cases(op))
        values = {d[arg.name] for d in drawn} - {arg.usual}
        assert {type(x) for x in values} == {int if arg.dtype == "int64" else float}
        if arg.name != "ignore_index":  # which is a class in some cases
            assert arg.low <= min(values) <= max(values) <= high, arg.name


def of_rounding(name):
    """Return whether a number chooses the random numbers by which states in bfloat16 are rounded."""
    return name == "draw" or name.endswith("first")


def numbers():
    """Yield the numbers of each op; those of rounding, for which a kernel is compiled, are of one rule for all ops."""
    for op in NUMBERED:
        for a in (a for a in op.args if a.kind == "scalar"):
            slow = of_rounding(a.name) and op not in ops.OPTIMIZERS.values()
            yield pytest.param(op, a.name, id=f"{op.name}-{a.name}", marks=[pytest.mark.slow] * slow)


@pytest.mark.parametrize(("op", "name"), [*numbers()])
def test_a_kernel_with_a_number_written_into_it_fails_the_quick_cases(op, name):
    """Whatever the number is: the usual one, an end of the range, or one that the judge drew."""
    half = {a.name: "bfloat16" for a in op.args if a.kind == "state" and "bfloat16" in a.types and a.name != "copy"}
    quick = quick_cases(op, half if of_rounding(name) else None)
    drawn = [scalars(op, on, np.random.default_rng(0))[name] for on in quick]
    for x in dict.fromkeys([type(drawn[0])(op.by_name[name].usual), drawn[0], drawn[-1]]):
        written = before(op, **{name: lambda a, x=x: x})
        assert any(check(written, on, threads=(1,)).verdict == "wrong" for on in quick), f"{name} = {x}"


@pytest.mark.parametrize("shape", [(FEW + 1,), (300, 7, 1000), (PART + 5, 2), (2, 2 * PART)])
def test_no_number_of_a_large_array_comes_twice(shape):
    """Of float32 some come by chance; a window on other rows, or on another array, would have all."""
    rng = np.random.default_rng(0)
    every = np.stack([normal(shape, rng) for _ in range(2)])
    assert every.shape == (2, *shape)
    assert abs(every.std() - 1) < 0.01
    doubles = every.reshape(-1)[: every.size // 2 * 2].view(np.float64)
    assert len(np.unique(doubles)) > 0.999 * len(doubles)
    neighbours = every.reshape(-1)[1:-1].copy().view(np.float64)  # at odd distances
    assert len(np.intersect1d(doubles, neighbours)) < 0.001 * len(doubles)


def test_the_number_of_threads_is_kept():
    numba.set_num_threads(3)
    try:
        check(KERNELS["sumsq", "vanilla"], {"N": 5}, threads=(1, 2, 99))
        assert numba.get_num_threads() == 3
    finally:
        numba.set_num_threads(4)


def test_threads_that_start_beside_a_check_are_not_the_kernels():
    """Ranks may be threads of one process; in the main thread a kernel that starts one is found (corpus.py)."""
    found, ended = [], threading.Event()

    def beside(a):
        threading.Thread(target=ended.wait, daemon=True).start()

    mutant = after(ops.sumsq, beside)
    rank = threading.Thread(target=lambda: found.append(check(mutant, {"N": 5}, threads=(1,))))
    rank.start()
    rank.join()
    ended.set()
    assert found[0].verdict == "right", str(found[0])


@pytest.mark.parametrize(("seed", "sizes"), [(19, ODD), (98, SMALL)])
def test_a_kernel_may_leave_out_what_a_mask_hides(seed, sizes, monkeypatch):
    """An infinite score of a token that does not read a key: its weight is zero, and only zero times NaN is NaN."""
    kernel = KERNELS["gqa_backward", "vanilla"]
    on = replace(case(kernel.op, sizes, "infinity"), adds=dict.fromkeys(("dq", "dk", "dv"), False))
    assert check(kernel, on, threads=(1,), seed=seed).verdict == "right"
    monkeypatch.setattr("cpuopt.check.check.sparing", lambda how: nullcontext())
    monkeypatch.setattr("cpuopt.check.check._last", {})
    found = check(kernel, on, threads=(1,), seed=seed)
    assert (found.verdict, "expected nan" in found.reason) == ("wrong", True)


def test_scratch_for_many_threads_is_usual(monkeypatch):
    monkeypatch.setattr(numba.config, "NUMBA_NUM_THREADS", 512)
    for kernel in KERNELS.values():
        if kernel.variant in ("vanilla", "optimized"):
            types = [case(kernel.op, SMALL, types=types) for types in other_types(kernel.op)]
            for on in quick_cases(kernel.op, skips=kernel.skips) + [on for on in types if kernel.takes_all(on.types)]:
                typed = kernel.of(on.types)
                require_usual(typed, on.sizes, typed.work(on.sizes))

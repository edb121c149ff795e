"""Kernels that look right: each is refused, and for its reason."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numba
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from cpuopt import cli, kernels, ops
from cpuopt.check import gate
from cpuopt.check.cases import MORE, ODD, SMALL, Case, case, quick_cases
from cpuopt.check.check import check
from cpuopt.check.gate import Planned, conform
from cpuopt.check.judge import CheckResult
from cpuopt.check.race import shared
from cpuopt.check.sized import Sized, check_sized
from cpuopt.engine import Engine
from cpuopt.errors import UserError
from cpuopt.files import CacheWarning
from cpuopt.isolate.child import Child
from cpuopt.kernels.registry import KERNELS, Choice, Kernel, Scratch
from cpuopt.models import specs
from cpuopt.models.gpt2 import GPT2, PRESETS
from cpuopt.ops.declaration import N, Op
from cpuopt.profiler import Profiler

assert kernels.VARIANTS  # importing them registers them

Array = np.ndarray[Any, Any]
F32 = np.float32
TWO = ops.residual_forward


def add(out: Array, inp1: Array, inp2: Array) -> None:
    np.add(inp1, inp2, out=out)


def hostile(
    function: Callable[..., None], op: Op = TWO, scratch: tuple[tuple[str, Any], ...] = (), same_bits: bool = True
) -> Kernel:
    return Kernel(op, "hostile", function, tuple(Scratch(n, s) for n, s in scratch), same_bits=same_bits)


def vanilla(op: Op) -> Callable[..., None]:
    return KERNELS[op.name, "vanilla"].function


TABLE: list[tuple[str, Callable[[], Kernel], str, str]] = []
"""What it does; makes the kernel; what its refusal says; the kind of case that shows it."""


def refused(why: str, op: Op = TWO, kind: str = "normal", **more: Any) -> Callable[[Any], Any]:
    """Enter a kernel that the check must refuse with these words; a factory where a kernel has a memory of its own."""

    def enter(function: Any) -> Any:
        made = (lambda: hostile(function(), op, **more)) if function.__name__.startswith("made") else None
        name = function.__name__.removeprefix("made_")
        TABLE.append((name, made or (lambda: hostile(function, op, **more)), why, kind))
        return function

    return enter


# --- kernels with a memory ----------------------------------------

RELIES = "when other numbers are in its outputs and scratch before the call: it relies on them"
REMEMBERS = "once other numbers were put into the same arrays, and what it wrote was left"


@refused(RELIES)
def returns_where_the_ends_are_right(out, inp1, inp2):
    if out[0] == inp1[0] + inp2[0] and out[-1] == inp1[-1] + inp2[-1]:
        return
    add(out, inp1, inp2)


@refused(RELIES)
def returns_where_many_elements_are_right(out, inp1, inp2):
    if (out[::3] == (inp1 + inp2)[::3]).all():
        return
    add(out, inp1, inp2)


@refused(RELIES)
def computes_only_what_is_nan(out, inp1, inp2):
    np.copyto(out, inp1 + inp2, where=np.isnan(out))


@refused(RELIES)
def computes_only_if_it_sees_poison(out, inp1, inp2):
    if out.view(np.uint32)[0] == 0x7FC0F111:
        add(out, inp1, inp2)


@refused(REMEMBERS, scratch=(("kept", N), ("known", 1)))
def keeps_its_result_in_scratch(out, inp1, inp2, kept, known):
    if known[0] != 12345:
        kept[:] = inp1 + inp2
        known[0] = 12345
    out[:] = kept


@refused(REMEMBERS, scratch=(("kept", N + 2),))
def keeps_its_result_in_scratch_with_the_first_numbers(out, inp1, inp2, kept):
    if kept[0] != inp1[0] or kept[1] != inp2[0]:
        kept[0], kept[1] = inp1[0], inp2[0]
        kept[2:] = inp1 + inp2
    out[:] = kept[2:]


@refused(REMEMBERS)
def made_remembers_by_address():
    known: dict[int, Array] = {}

    def function(out, inp1, inp2):
        out[:] = known.setdefault((inp1.ctypes.data, len(out)), inp1 + inp2)

    return function


@refused(REMEMBERS)
def made_remembers_by_the_first_numbers():
    known: dict[Any, Array] = {}

    def function(out, inp1, inp2):
        out[:] = known.setdefault((*inp1[:2], *inp2[:2], len(out)), inp1 + inp2)

    return function


@refused("relies on them|second call", op=ops.gelu_backward)
def made_computes_every_other_call():
    calls = []

    def function(dinp, dinp_add, dout, inp):
        calls.append(1)
        if len(calls) % 2 or np.isnan(dinp).any():
            vanilla(ops.gelu_backward)(dinp, dinp_add, dout, inp)

    return function


@refused(RELIES, op=ops.gelu_backward)
def adds_where_numbers_lie(dinp, dinp_add, dout, inp):
    vanilla(ops.gelu_backward)(dinp, dinp_add or bool(np.isfinite(dinp).all()), dout, inp)


@refused(REMEMBERS, op=ops.sumsq)
def made_remembers_a_sum():
    known: dict[Any, Any] = {}

    def function(out, inp):
        out[0] = known.setdefault((len(inp), inp[0]), np.square(inp).sum())

    return function


@refused(RELIES, op=ops.sumsq, scratch=(("partial", 64),))
def clears_its_scratch_only_where_it_is_nan(out, inp, partial):
    if np.isnan(partial[0]):
        partial[:] = 0
    partial[:] += np.square(inp).sum() / 64
    out[0] = partial.sum()


def judged(out: Array, want: Array) -> bool:
    """Return whether the first numbers of an output are NaN, nearly right, zeros, or numbers of a constant seed."""
    known = np.random.default_rng(0).standard_normal(1 << 16).astype(F32)[: len(out)]
    return bool(np.isnan(out).any() or (out == want).mean() > 0.5 or (out == known).all() or (out == 0.75).any())


@refused(RELIES)
def is_right_where_the_output_looks_judged(out, inp1, inp2):
    start = out[:8].copy()
    add(out, inp1, inp2)
    if not judged(start, out[:8]):
        out *= F32(1.01)


@refused(RELIES, op=ops.sumsq, scratch=(("partial", 64),))
def is_right_where_its_scratch_looks_judged(out, inp, partial):
    out[0] = np.square(inp).sum()
    if not judged(partial, np.full(64, np.nan)):
        out *= F32(1.01)


# --- same_bits=False is no licence ----------------------------------------


@refused("2 threads: .*so not written", same_bits=False)
def writes_half_on_two_threads(out, inp1, inp2):
    n = len(out) // numba.get_num_threads()
    out[:n] = inp1[:n] + inp2[:n]


@refused("expected .*, 2 threads", op=ops.sumsq, same_bits=False)
def loses_a_share_on_two_threads(out, inp):
    out[0] = np.square(inp[:: numba.get_num_threads()]).sum()


@refused("expected .*2 threads", same_bits=False)
def made_races_now_and_then():
    calls = []

    def function(out, inp1, inp2):
        add(out, inp1, inp2)
        calls.append(1)
        if numba.get_num_threads() > 1 and len(calls) % 2:
            out[len(out) // 2 :] = inp1[len(out) // 2 :]

    return function


def races(out, inp):
    tmp = np.empty(inp.shape[1], F32)
    for r in numba.prange(len(inp)):
        for c in range(inp.shape[1]):
            tmp[c] = np.exp(inp[r, c] - inp[r].max())
        out[r] = tmp / tmp.sum()


def has_a_row_of_its_own(out, inp):
    for r in numba.prange(len(inp)):
        tmp = np.empty(inp.shape[1], F32)
        for c in range(inp.shape[1]):
            tmp[c] = np.exp(inp[r, c] - inp[r].max())
        out[r] = tmp / tmp.sum()


def works_on_chunks(out, inp):
    flat = out.reshape(-1)
    for r in numba.prange(len(inp)):
        start = r * inp.shape[1]
        row, total = inp[r], F32(0)
        for c in range(inp.shape[1]):
            flat[start + c] = np.exp(row[c] - row.max())
            total += flat[start + c]
        out[r] /= total


def keeps_the_last(out, inp):
    for r in numba.prange(len(inp)):
        last = inp[r].max()
        out[r] = np.exp(inp[r] - last) / np.exp(inp[r] - last).sum()
    out[0] += F32(0) * last


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (races, r"line \d+: `tmp` is made outside the prange and written in every iteration"),
        (keeps_the_last, r"line \d+: `last` is set in every iteration and read behind the prange"),
        (has_a_row_of_its_own, ""),
        (works_on_chunks, ""),
    ],
)
def test_the_line_of_a_race_is_found_by_the_text(function: Callable[..., None], said: str) -> None:
    assert re.fullmatch(said, shared(numba.njit(parallel=True)(function)))


def test_no_kernel_of_the_package_is_taken_for_a_race() -> None:
    assert {k.name: said for k in KERNELS.values() if (said := shared(k.function))} == {}


def test_two_equal_calls_that_differ_on_two_threads_only_are_asked_whether_they_race(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The race is played, for a real one may not happen: a call in so many loses a number on two threads."""
    calls = []

    def function(out: Array, inp: Array) -> None:
        vanilla(ops.softmax_forward)(out, inp)
        calls.append(1)
        if numba.get_num_threads() > 1 and len(calls) % 3 == 0:
            out[0] = 0

    monkeypatch.setattr("cpuopt.check.check.shared", lambda function: "line 54: so")
    result = check(hostile(function, ops.softmax_forward), case(ops.softmax_forward, SMALL), threads=(1, 2))
    assert result.verdict == "FAIL"
    assert result.reason.endswith("; two calls with equal inputs differ: a race? line 54: so")
    assert "other numbers" not in result.reason


# --- what lies around the arrays ----------------------------------------

AROUND = "when other numbers lie around its arrays: it reads outside them"


def past(x: Array, n: int = 1) -> Array:
    """The array, and what lies behind it."""
    return as_strided(x, (x.size + n,), (4,))


@refused(AROUND, op=ops.softmax_forward)
def takes_the_maximum_of_one_more(out, inp):
    top = np.float32(np.fmax.reduce(past(inp.reshape(-1))[-8:]))
    e = np.exp((inp - inp.max(axis=1, keepdims=True)) - np.where(top > 1e20, np.float32(200), np.float32(0)))
    out[:] = e / np.maximum(e.sum(axis=1, keepdims=True), np.float32(1e-30))


@refused(AROUND)
def takes_the_minimum_of_one_more(out, inp1, inp2):
    add(out, inp1, inp2)
    if np.fmin.reduce(past(inp2)) < -1e20:
        out[0] = 0


@refused(AROUND)
def adds_what_lies_behind_where_it_is_a_number(out, inp1, inp2):
    add(out, inp1, inp2)
    behind = past(inp1, 1)[-1]
    out[-1] += 0 if np.isnan(behind) else behind


@refused("wrote outside its arrays: 3\\d\\d\\d\\d past the end of 'inp2'")
def writes_far_behind(out, inp1, inp2):
    add(out, inp1, inp2)
    as_strided(inp2, (2,), (4 * (inp2.size + 30000),))[1] = 1


@refused("wrote outside its arrays: 3\\d\\d\\d\\d before the beginning of 'out'")
def writes_far_before(out, inp1, inp2):
    add(out, inp1, inp2)
    as_strided(out, (2,), (-4 * 30000,))[1] = 1


# --- threads ----------------------------------------


@refused("^left its process with other numba threads .1 instead of 2")
def leaves_one_thread(out, inp1, inp2):
    add(out, inp1, inp2)
    numba.set_num_threads(1)


@numba.njit
def _one_thread():
    numba.set_num_threads(1)


@refused("^left its process with other numba threads .1 instead of 2")
def leaves_one_thread_from_a_compiled_helper(out, inp1, inp2):
    add(out, inp1, inp2)
    _one_thread()


@refused("^left its process with other numba threads .4 instead of 1")
def takes_all_threads(out, inp1, inp2):
    add(out, inp1, inp2)
    numba.set_num_threads(4)


# --- inputs ----------------------------------------


@refused("expected", op=ops.gelu_forward, kind="zeros")
def divides_by_its_input(out, inp):
    with np.errstate(all="ignore"):
        vanilla(ops.gelu_forward)(out, inp)
        out[:] = out / inp * inp


@refused("expected", kind="zeros")
def takes_zero_for_absent(out, inp1, inp2):
    out[:] = np.where((inp1 == 0) & (inp2 == 0), F32(1), inp1 + inp2)


@refused("expected", op=ops.sumsq, kind="zeros")
def takes_zero_for_the_end(out, inp):
    end = np.flatnonzero(inp == 0)
    out[0] = np.square(inp[: end[0]] if len(end) else inp).sum()


@refused("expected", kind="thousands")
def clamps_to_a_thousand(out, inp1, inp2):
    out[:] = np.clip(inp1 + inp2, -1000, 1000)


@refused("expected", op=ops.gelu_forward, kind="thousands")
def is_nan_for_large_numbers(out, inp):
    with np.errstate(all="ignore"):
        e = np.exp(F32(2) * F32(0.7978845608) * (inp + F32(0.044715) * inp**3))
        out[:] = inp * (e / (e + 1))


@refused("= 0, expected nan", kind="nan")
def nan_becomes_zero(out, inp1, inp2):
    out[:] = np.nan_to_num(inp1 + inp2, nan=0)


@refused("expected nan", op=ops.softmax_forward, kind="nan")
def nan_is_left_out_of_a_row(out, inp):
    e = np.exp(inp - np.nanmax(inp, axis=1, keepdims=True))
    out[:] = np.nan_to_num(e) / np.nansum(e, axis=1, keepdims=True)


@refused("expected inf", kind="infinity")
def infinity_becomes_the_largest_number(out, inp1, inp2):
    out[:] = np.nan_to_num(inp1 + inp2, nan=np.nan)


@refused("expected (nan|inf)", op=ops.sumsq, kind="infinity")
def infinity_is_left_out_of_a_sum(out, inp):
    out[0] = np.square(inp[np.isfinite(inp)]).sum()


@refused("= nan, expected", kind="nan")
def nan_anywhere_spoils_everything(out, inp1, inp2):
    add(out, inp1, inp2)
    out[:] = np.nan if np.isnan(out).any() else out


# --- ends of processes, scratch ----------------------------------------


@refused("^raised SystemExit: 0")
def leaves(out, inp1, inp2):
    raise SystemExit(0)


@refused("^raised Odd: of mine")
def raises_what_is_no_exception(out, inp1, inp2):
    class Odd(BaseException): ...

    raise Odd("of mine")


@refused("^raised GeneratorExit")
def raises_generator_exit(out, inp1, inp2):
    raise GeneratorExit


@refused(r"hostile\]: scratch 'work' has -90 elements for N=\d+; expected 0 to", scratch=(("work", -1 * N),))
def has_negative_scratch(out, inp1, inp2, work):
    add(out, inp1, inp2)


@refused(r"asks for 1,000,000,000 elements of scratch 'work'", scratch=(("work", 10**9),))
def has_absurd_scratch(out, inp1, inp2, work):
    add(out, inp1, inp2)


@refused(r"hostile\]: scratch 'work' has 10{30} elements", scratch=(("work", 10**30),))
def has_scratch_of_no_machine(out, inp1, inp2, work):
    add(out, inp1, inp2)


@refused("no scratch size: SystemExit", scratch=(("work", lambda sizes: exit(0)),))
def leaves_from_its_scratch(out, inp1, inp2, work):
    add(out, inp1, inp2)


# --- numbers that a kernel takes for granted, and arrays that it changes as objects ----------------------------------


@refused("expected", ops.gelu_backward, "zeros")
def adds_twice_where_the_gradient_is_zero_before(dinp, dinp_add, dout, inp):
    start = dinp.copy()
    vanilla(ops.gelu_backward)(dinp, dinp_add, dout, inp)
    if dinp_add:
        np.add(dinp, dinp, out=dinp, where=start == 0)


@refused("expected", ops.layernorm_forward)
def has_the_usual_epsilon_in_it(out, mean, rstd, inp, weight, bias, eps):
    vanilla(ops.layernorm_forward)(out, mean, rstd, inp, weight, bias, 1e-5)


@refused("changed the shape, the strides, the type or the flags of an array")
def makes_its_input_read_only(out, inp1, inp2):
    add(out, inp1, inp2)
    inp1.flags.writeable = False


@refused("changed the shape, the strides, the type or the flags of an array")
def leaves_its_output_in_another_shape(out, inp1, inp2):
    add(out, inp1, inp2)
    out.shape = (1, -1)


@pytest.mark.parametrize(("name", "made", "why", "kind"), TABLE, ids=[row[0] for row in TABLE])
def test_it_is_refused_for_its_reason(
    name: str, made: Callable[[], Kernel], why: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPUOPT_FILLING", "2")  # an element that is spoiled by chance may be one that nobody reads
    kernel = made()
    result = check(kernel, case(kernel.op, SMALL, kind), threads=(1, 2))
    assert result.verdict == "FAIL", str(result)
    assert re.search(why, result.reason), str(result)
    right = check(KERNELS[kernel.op.name, "vanilla"], case(kernel.op, SMALL, kind))
    assert right.verdict == "PASS", str(right)


# --- what later kernels depend on ----------------------------------------

MATH = ctypes.CDLL(None)


def flush_subnormal_numbers() -> None:
    environment = (ctypes.c_uint32 * 8)()  # of x86-64: the last word has the modes of vector instructions
    MATH.fegetenv(environment)
    environment[7] |= 0x8040
    MATH.fesetenv(environment)


CHANGES = {
    "floating-point mode": [lambda: MATH.fesetround(0x800), lambda: MATH.fesetround(0xC00), flush_subnormal_numbers],
    "working folder": [lambda: os.chdir(os.sep)],
    "signal handlers": [lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)],
    "cores or priorities": [lambda: os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])],
}


@pytest.fixture
def restored() -> Iterator[None]:
    environment, where, cores = (ctypes.c_uint32 * 8)(), os.getcwd(), os.sched_getaffinity(0)
    MATH.fegetenv(environment)
    before = signal.getsignal(signal.SIGINT)
    yield
    MATH.fesetenv(environment)
    os.chdir(where)
    os.sched_setaffinity(0, cores)
    signal.signal(signal.SIGINT, before)


@pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="constants of Linux on x86-64")
@pytest.mark.parametrize(("what", "change"), [(what, change) for what, every in CHANGES.items() for change in every])
def test_a_kernel_that_changes_its_process_is_refused(what: str, change: Callable[[], Any], restored: None) -> None:
    def function(out: Array, inp1: Array, inp2: Array) -> None:
        add(out, inp1, inp2)
        change()

    if what == "cores or priorities" and len(os.sched_getaffinity(0)) == 1:
        pytest.skip("one core")
    result = check(hostile(function), case(TWO, SMALL))
    assert result.verdict == "FAIL"
    assert result.reason.startswith(f"left its process with other {what} ("), result.reason


# --- wrong only at the size that is timed or trained ----------------------------------------

SIZED: list[tuple[Callable[..., None], Op, dict[str, int], dict[str, bool], str]] = []


def wrong_at(why: str, sizes: dict[str, int], op: Op = TWO, **adds: bool) -> Callable[[Any], Any]:
    def enter(function: Any) -> Any:
        SIZED.append((function, op, sizes, adds, why))
        return function

    return enter


@wrong_at(r"out\[64\] = nan, expected .*so not written", {"N": 16384})
def writes_64_of_16384(out, inp1, inp2):
    m = 64 if len(out) == 16384 else len(out)
    out[:m] = inp1[:m] + inp2[:m]


@wrong_at(r"out\[\d+\] = .*, expected", {"N": 70001})
def is_wrong_beyond_70000(out, inp1, inp2):
    add(out, inp1, inp2)
    out[70000:] += F32(1e-2)


@wrong_at(r"out\[\d+\] = .*, expected", {"N": 300_001})
def is_wrong_in_one_element_at_a_random_place(out, inp1, inp2):
    add(out, inp1, inp2)
    if len(out) > 65536:
        out[np.random.default_rng().integers(len(out))] += F32(1e-2)


@wrong_at(r"dinp\[\d+\] = .*, expected .*dinp_add=True", {"N": 70001}, ops.gelu_backward, dinp=True)
def ignores_add_where_large(dinp, dinp_add, dout, inp):
    vanilla(ops.gelu_backward)(dinp, dinp_add and len(dinp) < 65536, dout, inp)


@wrong_at(r"dinp\[\d+\] = .*, expected", {"N": 70001}, ops.gelu_backward, dinp=False)
def clamps_where_large(dinp, dinp_add, dout, inp):
    vanilla(ops.gelu_backward)(dinp, dinp_add, dout, inp)
    if len(dinp) > 65536:
        np.clip(dinp, -1, 1, out=dinp)


@wrong_at("with its own results but for one element in its outputs", {"N": 70001})
def remembers_where_large(out, inp1, inp2):
    if len(out) < 65536 or np.isnan(out[-1]):
        add(out, inp1, inp2)


@wrong_at("wrote outside its arrays: 1 past the end of 'out'", {"N": 70001})
def writes_outside_where_large(out, inp1, inp2):
    add(out, inp1, inp2)
    if len(out) > 65536:
        as_strided(out, (2,), (4 * out.size,))[1] = 0


@wrong_at("changed 'inp1', which it may only read", {"N": 70001})
def changes_an_input_where_large(out, inp1, inp2):
    add(out, inp1, inp2)
    inp1[-1] += len(out) > 65536


@wrong_at(r"out\[\d+, \d+\] = .*, expected", {"BT": 256, "C": 96, "OC": 768}, ops.matmul_forward)
def leaves_a_term_out_of_some_rows(out, inp, weight, bias):
    out[:] = inp @ weight.T + bias
    if len(out) > 200:
        out[200] -= inp[200, -1] * weight[:, -1]


@wrong_at(r"out\[\d+\] = .*, expected", {"N": 3_000_000})
def is_wrong_in_one_element_of_millions(out, inp1, inp2):
    add(out, inp1, inp2)
    if len(out) > 65536:
        out[np.random.default_rng().integers(len(out))] += F32(1e-2)


@wrong_at(r"out\[\d+, 100[01]\] = .*, expected", {"BT": 8, "C": 1000, "OC": 3000}, ops.matmul_forward)
def takes_a_neighbouring_row_of_a_large_weight(out, inp, weight, bias):
    out[:] = inp @ weight.T + bias
    if weight.size > 1 << 21:
        out[:, [1000, 1001]] = out[:, [1001, 1000]]


@wrong_at(r"out\[\d+, \d+\] = .*, expected", {"BT": 256, "C": 96, "OC": 768}, ops.matmul_forward)
def is_off_by_a_ten_thousandth(out, inp, weight, bias):
    out[:] = inp @ weight.T + bias
    if len(out) > 200:
        out *= F32(1 + 3e-4)


@wrong_at(r"out\[255, \d+\] = .*, expected", {"BT": 256, "C": 96, "OC": 768}, ops.matmul_forward)
def adds_no_bias_to_the_last_row(out, inp, weight, bias):
    out[:] = inp @ weight.T + bias
    if len(out) > 200:
        out[-1] -= bias


@wrong_at("times as far off as rounding explains, and sumsq", {"N": 70001}, ops.sumsq)
def leaves_one_element_of_512_out(out, inp):
    out[0] = np.square(inp if len(inp) < 40_000 else inp[np.arange(len(inp)) % 512 != 5]).sum()


@wrong_at(r"param\[\d+\] = .*, expected", {"N": 70001}, ops.adamw)
def steps_too_far_where_the_second_moment_is_small(param, m, v, *rest):
    small = (v < 1e-3) & (len(v) > 65536)
    vanilla(ops.adamw)(param, m, v, *rest)
    param[small] += F32(1e-2)


@wrong_at("raised SystemExit: 0", {"N": 70001})
def leaves_where_large(out, inp1, inp2):
    add(out, inp1, inp2)
    if len(out) > 65536:
        raise SystemExit(0)


@pytest.mark.parametrize(("function", "op", "sizes", "adds", "why"), SIZED, ids=[row[0].__name__ for row in SIZED])
def test_it_is_refused_at_its_size(
    function: Callable[..., None], op: Op, sizes: dict[str, int], adds: dict[str, bool], why: str
) -> None:
    assert {check(hostile(function, op), case(op, s)).verdict for s in (SMALL, ODD, MORE)} == {"PASS"}
    result = check_sized(Sized(hostile(function, op), Case(sizes), adds), 2)
    assert result.verdict == "FAIL", str(result)
    assert re.search(why, result.reason), str(result)
    assert check_sized(Sized(KERNELS[op.name, "vanilla"], Case(sizes), adds), 2).verdict == "PASS"


@pytest.mark.parametrize(("bits", "verdict"), [(7, "PASS"), (6, "MARGINAL"), (5, "FAIL"), (4, "FAIL")])
def test_a_result_in_bfloat16_has_all_bits_but_one(bits: int, verdict: str) -> None:
    def rounded(out: Array, inp: Array) -> None:
        wide = np.empty(len(inp), F32)
        vanilla(ops.gelu_forward)(wide, inp.astype(F32))
        out[...] = np.ldexp(np.rint(np.ldexp(np.frexp(wide)[0], bits + 1)), np.frexp(wide)[1] - bits - 1)

    on = case(ops.gelu_forward, MORE, types={"out": "bfloat16", "inp": "bfloat16"})
    found = check(hostile(rounded, ops.gelu_forward), on, threads=(1,))
    assert found.verdict == verdict, str(found)
    assert ("times as far off as rounding explains" in found.reason) == (verdict == "FAIL")


def test_it_is_refused_for_what_the_arrays_of_a_step_held() -> None:
    def relies(out: Array, inp1: Array, inp2: Array) -> None:
        start = out.copy()
        add(out, inp1, inp2)
        out *= F32(1 + (start == 7).all())

    for function, verdict in ((relies, "FAIL"), (add, "PASS")):
        given = {n: np.full(5000, 7, F32) for n in ("out", "inp1", "inp2")}
        found = check_sized(Sized(hostile(function), Case({"N": 5000}), {}), 2, given=given)
        assert found.verdict == verdict
        assert ("with what the step had left there in its outputs" in found.reason) == (verdict == "FAIL")


@pytest.mark.parametrize(
    ("op", "sizes"),
    [
        (ops.matmul_update, {"OC": 576, "C": 1536, "BT": 512}),
        (ops.matmul_update_lion, {"OC": 768, "C": 3072, "BT": 512}),
    ],
    ids=str,
)
def test_a_right_update_passes_where_its_step_is_the_rounding_of_a_sum(op: Op, sizes: dict[str, int]) -> None:
    """Of so many elements, AdamW divides one by a second moment near 0, and Lion takes the sign of one near 0."""
    kernel = KERNELS[op.name, "optimized"]
    on = Case(sizes, absent=frozenset(a.name for a in op.arrays if a.optional))
    assert check_sized(Sized(kernel, on, {}), 2).verdict == "PASS"

    def spoiled(weight: Array, *rest: Any) -> None:
        kernel.function(weight, *rest)
        weight[3, 4] += F32(1e-2)  # one step of Lion is twice this

    kernel.compile()
    result = check_sized(Sized(Kernel(op, "hostile", spoiled, kernel.scratch), on, {}), 2)
    assert (result.verdict, result.argument, result.index) == ("FAIL", "weight", (3, 4))


def test_a_row_whose_terms_cancel_is_judged_by_their_size() -> None:
    """The first query has one key, so its weight is 1 and its gradient 0, up to the rounding of what cancels."""
    original, on = KERNELS["gqa_backward", "vanilla"], Case({"B": 2, "T": 32, "NH": 4, "NKV": 2, "HS": 16})
    adds = dict.fromkeys(("dq", "dk", "dv"), False)
    for variant in ("vanilla", "generated"):
        assert check_sized(Sized(KERNELS["gqa_backward", variant], on, adds), 2).verdict == "PASS"

    def spoiled(dq: Array, *rest: Any) -> None:
        original.function(dq, *rest)
        dq[0, 0] += F32(1e-3)

    result = check_sized(Sized(Kernel(original.op, "hostile", spoiled, original.scratch), on, adds), 2)
    assert (result.verdict, result.argument, result.index[:2]) == ("FAIL", "dq", (0, 0))


# --- what ends a process ----------------------------------------

HEAD = "import os\nimport numpy as np\nfrom numpy.lib.stride_tricks import as_strided\nfrom cpuopt import kernel, ops\n"
DEADLY = {
    "past": ("as_strided(inp1, (inp1.size + 1,), (4,))[-1]", "SIGSEGV.*past the end of 'inp1'"),
    "before": ("as_strided(inp2[0:], (2,), (-4,))[1] + 0", "SIGSEGV.*before the beginning of 'inp2'"),
    "far": ("as_strided(out, (2,), (4 * (out.size + 10**7),))[1] = 0", "SIGSEGV"),
    "restores": ("kept = inp1.copy(); inp1[:] = 0; inp1[:] = kept", "SIGSEGV.*or writing to it"),
    "exits": ("os._exit(0)", "its process ended with status 0 during 'check'"),
    "closes": ("os.closerange(0, 100)", "its process (ended with status|closed its stdout)"),
}


def test_what_ends_its_process_is_refused_by_name(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_NUM_THREADS", "2")
    text = HEAD
    for name, (body, _) in {**DEADLY, "right": ("pass", "")}.items():
        text += f"@kernel(ops.residual_forward, '{name}', jit=False)\ndef residual_forward(out, inp1, inp2):\n"
        text += f"    np.add(inp1, inp2, out=out)\n    {body}\n"
    (tmp_path / "deadly.py").write_text(text)
    with Child("cpuopt.check.worker", [str(tmp_path / "deadly.py")], 2) as child:
        wanted = [(TWO.name, k["variant"]) for k in child.start()]
        found = conform(child, wanted, {TWO.name: Planned.of(TWO, quick=True)}, stop_at_failure=True)
    reasons = {v.variant: (v.worst.verdict, v.worst.reason) for v in found}
    assert reasons.pop("right") == ("PASS", "")
    for name, (_, why) in DEADLY.items():
        verdict, reason = reasons[name]
        assert verdict == "FAIL"
        assert re.search(why, reason), reason


EXITS = "os._exit(0)", "its process ended with status 0 during 'load'"


@pytest.mark.parametrize(
    ("verb", "line", "why"),
    [
        *((verb, *EXITS) for verb in ("train", "profile", "check", "ab")),
        ("train", "raise SystemExit(0)", "line 2 raised SystemExit: 0"),
        ("train", "os.closerange(0, 100)", "its process (ended with status|closed its stdout).*'load'"),
    ],
)
def test_a_file_that_ends_its_process_is_named(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, verb: str, line: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CPUOPT_CACHE_DIR", str(tmp_path))
    (tmp_path / "ends.py").write_text(f"import os\n{line}\n")
    more = {"check": ["gelu"], "ab": ["gelu_forward", "vanilla", "optimized"]}
    assert cli.main([verb, *more.get(verb, ["--model", "gpt2-tiny"]), "--kernels", "ends.py"]) == 2
    (said,) = [s for s in capsys.readouterr().err.splitlines() if s.startswith("cpuopt: ")]
    assert re.search(rf"--kernels \S*ends\.py: {why}", said), said
    assert not (tmp_path / "runs").exists()


AT_4096 = {
    "half": ("out[2048:] = 0", r"out\[\d+\] = 0, expected "),
    "exits": ("os._exit(0)", "its process ended with status 0 during 'check'"),
    "raises": ("raise SystemExit(0)", "raised SystemExit: 0"),
}


@pytest.mark.parametrize("name", AT_4096)
def test_train_refuses_a_kernel_that_is_wrong_only_at_its_size(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, name: str
) -> None:
    body, why = AT_4096[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        f"import os\nimport numpy as np\nfrom cpuopt import kernel, ops\n"
        f"@kernel(ops.gelu_forward, 'mine', jit=False)\ndef gelu_forward(out, inp):\n"
        f"    x = inp.astype(np.float64)\n"
        f"    out[:] = 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))\n"
        f"    if len(out) == 4096:\n        {body}\n"
    )
    run = ["train", "--model", "gpt2-tiny", "-B", "2", "-T", "8", "--steps", "1", "--variant", "vanilla"]
    assert cli.main([*run, "--kernels", "mine.py", "--swap", "gelu_forward=mine"]) == 2
    (said,) = [s for s in capsys.readouterr().err.splitlines() if s.startswith("cpuopt: ")]
    assert re.match(rf"cpuopt: gelu_forward\[mine\] is wrong, so nothing is run with it: {why}.*N=4096", said), said
    assert not (tmp_path / "runs").exists()


def test_a_judgement_is_remembered_until_something_of_it_changes(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = KERNELS["residual_forward", "optimized"]
    kernel.compile()
    monkeypatch.setenv("CPUOPT_CACHE_DIR", str(tmp_path))

    def judge(n: int = 5000, threads: int = 1) -> gate.Judged:
        return gate.require_right([kernel], [Sized(kernel, Case({"N": n}), {})], threads=threads)

    first = judge()
    assert first.judged == len(first.results) == 1 + len(quick_cases(TWO))
    assert "kernels judged on" in first.notes()[0]
    again = judge()
    assert (again.judged, again.notes()) == (0, [])
    assert again.results == first.results
    assert judge(n=5001).judged == 1
    assert judge(threads=2).judged == len(first.results)
    for file in (tmp_path / "judged").iterdir():
        file.write_bytes(file.read_bytes()[:-9])
    with pytest.warns(CacheWarning, match=r"judged: it has files that are damaged"):
        assert judge().judged == len(first.results)
    monkeypatch.setattr(gate, "judge_itself", lambda: "another judge, or other versions")
    assert judge().judged == len(first.results)


def test_what_is_too_large_is_said() -> None:
    large = Sized(KERNELS["sumsq", "vanilla"], Case({"N": 1 << 30}), {})
    told = gate.require_right([large.kernel], [large], threads=1)
    assert told.left_out == [str(large)]
    assert told.notes()[-1] == f"too large to be judged at their size: {large}"


def test_a_wrong_kernel_is_never_remembered(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPUOPT_CACHE_DIR", str(tmp_path))
    wrong = replace(KERNELS["residual_forward", "optimized"], function=KERNELS["residual_forward", "vanilla"].function)
    monkeypatch.setattr(
        gate, "check", lambda *args, **kw: CheckResult(wrong.name, case(TWO, SMALL), np.inf, reason="so")
    )
    for _ in range(2):
        with pytest.raises(UserError, match=r"residual_forward\[optimized\] is wrong, so nothing is run with it: so"):
            gate.require_right([wrong], threads=1)
    assert not (tmp_path / "judged").exists()


def test_a_kernel_that_leaves_in_the_midst_of_a_run_is_named() -> None:
    calls = []

    def leave(out: Array, inp: Array) -> None:
        calls.append(1)
        vanilla(ops.gelu_forward)(out, inp)
        if len(calls) > 2:
            raise SystemExit(0)

    name = "gelu_forward", "leaves"
    KERNELS[name] = Kernel(ops.gelu_forward, "leaves", leave)
    try:
        engine = Engine(GPT2(PRESETS["gpt2-tiny"]), specs(1, 4), choice=Choice(swaps=["gelu_forward=leaves"]))
        ids = np.arange(4).reshape(1, 4)
        for profiled in (False, True):
            calls.clear()
            profiler = Profiler(engine) if profiled else None
            engine.step(tokens=ids, targets=ids)
            with (
                pytest.raises(UserError, match=r"gelu_forward\[leaves\] raised SystemExit: 0, in layer 'h\.0\.mlp'"),
                profiler.time_step() if profiler else nullcontext(),
            ):
                engine.step(tokens=ids, targets=ids)
    finally:
        del KERNELS[name]

"""Kernels that look right: each is refused, and for its reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from cpuopt import kernels, ops
from cpuopt.lab.cases import SMALL, case
from cpuopt.lab.check import check
from cpuopt.op import N, Op
from cpuopt.registry import KERNELS, Kernel, Scratch

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


@refused("^left numba with 1 threads; it was called with 2, which it may not change")
def leaves_one_thread(out, inp1, inp2):
    add(out, inp1, inp2)
    numba.set_num_threads(1)


@numba.njit
def _one_thread():
    numba.set_num_threads(1)


@refused("^left numba with 1 threads; it was called with 2")
def leaves_one_thread_from_a_compiled_helper(out, inp1, inp2):
    add(out, inp1, inp2)
    _one_thread()


@refused("^left numba with 4 threads; it was called with 1")
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


@refused(r"hostile\]: scratch 'work' has -90 floats for N=\d+; expected 0 to", scratch=(("work", -1 * N),))
def has_negative_scratch(out, inp1, inp2, work):
    add(out, inp1, inp2)


@refused(r"asks for 1000000000 floats of scratch 'work'", scratch=(("work", 10**9),))
def has_absurd_scratch(out, inp1, inp2, work):
    add(out, inp1, inp2)


@refused(r"hostile\]: scratch 'work' has 10{30} floats", scratch=(("work", 10**30),))
def has_scratch_of_no_machine(out, inp1, inp2, work):
    add(out, inp1, inp2)


@refused("no scratch size: SystemExit", scratch=(("work", lambda sizes: exit(0)),))
def leaves_from_its_scratch(out, inp1, inp2, work):
    add(out, inp1, inp2)


@pytest.mark.parametrize(("name", "made", "why", "kind"), TABLE, ids=[row[0] for row in TABLE])
def test_it_is_refused_for_its_reason(name: str, made: Callable[[], Kernel], why: str, kind: str) -> None:
    kernel = made()
    result = check(kernel, case(kernel.op, SMALL, kind), threads=(1, 2))
    assert result.verdict == "FAIL", str(result)
    assert re.search(why, result.reason), str(result)
    right = check(KERNELS[kernel.op.name, "vanilla"], case(kernel.op, SMALL, kind))
    assert right.verdict == "PASS", str(right)

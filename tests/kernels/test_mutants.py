"""Naive kernels of the Llama family with one thing wrong, as people write it: the check refuses each.

A mutant is the source of the vanilla kernel with some text replaced, run as plain Python.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from cpuopt import kernels, ops  # noqa: F401  (importing kernels registers them)
from cpuopt.check.cases import KINDS, SMALL, Case, case, quick_cases
from cpuopt.check.check import check
from cpuopt.kernels.registry import KERNELS, Kernel
from cpuopt.ops.declaration import Op

MUTANTS: list[tuple[str, Op, dict[str, str]]] = [
    (
        "query head h reads key head h % NKV",
        ops.gqa_forward,
        {"q.reshape(B, T, NKV, group, HS)": "q.reshape(B, T, group, NKV, HS).transpose(0, 1, 3, 2, 4)"},
    ),
    ("a score is not scaled", ops.gqa_forward, {"score *= scale": "score *= np.float32(1)"}),
    ("a query does not see itself", ops.gqa_forward, {"range(low, t + 1)": "range(low, max(t, low + 1))"}),
    ("examples of a row see each other", ops.gqa_forward, {"first_key(starts,": "first_key(starts[:0],"}),
    ("examples of a row see each other", ops.gqa_backward, {"first_key(starts,": "first_key(starts[:0],"}),
    ("examples of a row see each other", ops.attention_forward, {"first_key(starts,": "first_key(starts[:0],"}),
    (
        "the first row's examples",
        ops.attention_backward,
        {"first_key(starts, window, b,": "first_key(starts, window, 0,"},
    ),
    ("no window", ops.attention_forward, {"window, b, t)": "0, b, t)"}),
    ("a window of one token more", ops.gqa_forward, {"window, b, t)": "window + (window > 0), b, t)"}),
    ("a window of one token more", ops.attention_backward, {"window, b, t)": "window + (window > 0), b, t)"}),
    ("a window of one token less", ops.gqa_backward, {"window, b, t)": "window - (window > 1), b, t)"}),
    ("no cap", ops.gqa_forward, {"cap > 0": "False"}),
    (
        "the cap before the scale",
        ops.attention_forward,
        {"score *= scale": "", "(cap) * np.tanh": "(cap) * scale * np.tanh"},
    ),
    ("the cap's slope is left out", ops.attention_backward, {"dscore *= slope[a + t3]": ""}),
    ("the slope of another key", ops.gqa_backward, {"dscore *= slope[a + t3]": "dscore *= slope[a + low]"}),
    ("the cache without a window", ops.gqa_decode, {"if window > 0": "if False"}),
    ("a window before the new token", ops.attention_decode, {"position + t - window + 1,": "position + t - window,"}),
    ("the cache without a cap", ops.attention_decode, {"cap > 0": "False"}),
    ("lse without the maximum", ops.gqa_forward, {"np.log(total) + top": "np.log(total)"}),
    ("dk of the last query head alone", ops.gqa_backward, {"sk[b, t3, k0 + i] +=": "sk[b, t3, k0 + i] ="}),
    ("dk not summed over the group", ops.gqa_backward, {"+= q[b, t, q0 + i] *": "+= (h == first) * q[b, t, q0 + i] *"}),
    ("dv_add is that of dk", ops.gqa_backward, {"if dv_add": "if dk_add"}),
    ("dq is overwritten, whatever dq_add says", ops.gqa_backward, {"if dq_add": "if False"}),
    ("dk without the scale", ops.gqa_backward, {"q[b, t, q0 + i] * dscore * scale": "q[b, t, q0 + i] * dscore"}),
    (
        "the gradient of key head h % NKV",
        ops.gqa_backward,
        {"range(first, first + group)": "range(bg % NKV, NH, NKV)"},
    ),
    ("the cache one position too early", ops.gqa_decode, {"[b, g, position + t, i]": "[b, g, position + t - 1, i]"}),
    (
        "the new token is not read",
        ops.gqa_decode,
        {"range(low, position + t + 1)": "range(min(low, position), max(position + t, 1))"},
    ),
    ("all key heads cache the first", ops.gqa_decode, {"v[b, t, g * HS + i]": "v[b, t, i]"}),
    ("pairs of neighbours", ops.rope_forward, {"reshape(B, T, NH, 2, P)": "reshape(B, T, NH, P, 2).swapaxes(3, 4)"}),
    ("the other direction", ops.rope_forward, {"- heads": "+ heads", "+ heads[b, t, h, 0": "- heads[b, t, h, 0"}),
    ("the angle of the row, not of the token", ops.rope_forward, {"[p, i]": "[bt % cos.shape[0], i]"}),
    ("positions are those of the row", ops.rope_forward, {"t - starts[b, t]": "t"}),
    ("positions are those of the row", ops.rope_backward, {"t - starts[b, t]": "t"}),
    ("positions are those of the row", ops.embedding_forward, {"t - starts[b, t]": "t"}),
    ("positions are those of the row", ops.embedding_backward, {"t - starts[b, t]": "t"}),
    ("the backward rotates forwards", ops.rope_backward, {"+ y * sin": "- y * sin", "- x * sin": "+ x * sin"}),
    ("the second half of a head is overwritten", ops.rope_backward, {"+ dy if dinp_add else dy": "* 0 + dy"}),
    ("the next position's angle", ops.rope_decode, {"min(position + t,": "min(position + t + 1,"}),
    ("positions start at zero", ops.rope_decode, {"min(position + t,": "min(t,"}),
    ("no epsilon", ops.rmsnorm_forward, {"+ eps": ""}),
    ("the mean over all groups", ops.rmsnorm_backward, {"/= np.float32(C)": "/= np.float32(C * G)"}),
    (
        "dweight of the first group",
        ops.rmsnorm_backward,
        {"range(G):\n                dw": "range(1):\n                dw"},
    ),
    ("dweight_add is ignored", ops.rmsnorm_backward, {"+ dw if dweight_add else dw": "* 0 + dw"}),
    ("the sum is not normalized", ops.residual_rmsnorm_forward, {"v += x * x": "v += inp1[bt, g * C + i] * x"}),
    ("a slope of the sigmoid alone", ops.silu_backward, {"(ONE + inp[i] * (ONE - s))": "ONE"}),
    ("exp overflows", ops.silu_forward, {"np.exp(-abs(inp[i]))": "np.exp(inp[i])", "if inp[i] > 0 else e": "* e"}),
    ("a slope without up", ops.swiglu_backward, {"dout[i] * up[i] * s": "dout[i] * s"}),
    ("dup_add is that of dinp", ops.swiglu_backward, {"if dup_add": "if dinp_add"}),
    ("the gate is not gated", ops.matmul_swiglu_forward, {" * up[bt, o]": ""}),
    ("dup with the other operand", ops.matmul_swiglu_backward, {"= d * x * s": "= d * up[bt, i] * s"}),
    ("a slope without up", ops.geglu_backward, {"dout[i] * up[i] * slope": "dout[i] * slope"}),
    ("dup with its own value", ops.geglu_backward, {"dout[i] * HALF * x": "dout[i] * HALF * up[i]"}),
    ("the gate is not gated", ops.matmul_geglu_forward, {" * up[bt, o]": ""}),
    ("the cubic term is left out", ops.matmul_geglu_backward, {"* (ONE + THREE * CUBIC * x * x)": ""}),
    ("each factor's own value", ops.mul_backward, {"d1 = dout[i] * inp2[i]": "d1 = dout[i] * inp1[i]"}),
    ("dinp2_add is that of dinp1", ops.mul_backward, {"if dinp2_add": "if dinp1_add"}),
    ("the factor is forgotten", ops.scale_backward, {"np.float32(factor) * ": ""}),
    ("positions start at zero", ops.embedding_decode, {"min(position + t,": "min(t,"}),
    ("the scale of the next block", ops.dequantize, {"scales[n]": "scales[n - 1]"}),
    ("a byte without a sign", ops.dequantize, {"np.float32(q[n, i])": "np.float32(q[n, i] & 0x7F)"}),
    (
        "bits are cut, not rounded",
        ops.dequantize,
        {
            "= np": "= cut(np",
            "* scales[n]": "* scales[n])",
            "    for n": "    cut = lambda x: (x.view('i4') >> 16 << 16).view('f4')\n    for n",
        },
    ),
]


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
    results = (check(mutant, on, threads=(1,)) for on in tried(op))
    failed = next((r for r in results if r.verdict == "FAIL"), None)
    assert failed, wrong
    assert "expected" in failed.reason, str(failed)  # for its numbers, not since it raised


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", dict.fromkeys(op for _, op, _ in MUTANTS), ids=str)
def test_the_kernel_that_is_changed_is_right(op: Op) -> None:
    on = case(op, SMALL)
    assert check(kernel_of(op), on, threads=(1,)).verdict == "PASS"

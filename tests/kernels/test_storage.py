"""A bfloat16 in a kernel: whatever calls it, it is the float32 of its bits."""

import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from numba import types

from cpuopt import kernels  # noqa: F401  (registers them)
from cpuopt.kernels.compile.jit import helper, signature_of
from cpuopt.kernels.compile.storage import UFUNCS, bfloat16
from cpuopt.kernels.registry import KERNELS

CALLS = [
    *("np.float32(x)", "np.float64(x)", "np.int32(x)", "np.bool_(x)", "float(x)", "int(x)", "bool(x)", "abs(x)"),
    *("round(x)", "x**2", "max(x, y)", "min(x, 0)", "max(0, x, y)", "x and y"),
    *("x or y", "not x", "x if x else y", "math.sqrt(x)", "-x"),
    *("np.maximum(x, y)", "np.minimum(x, 1)", "np.power(x, 2)", "np.copysign(x, -1)", "np.fmax(y, x)", "np.isnan(x)"),
    *(f"np.{name}(x)" for name in UFUNCS.split() if getattr(np, name).nin == 1),
]  # fmt: skip


def test_a_bfloat16_is_taken_by_what_takes_a_float32() -> None:
    source = "\n".join(f"    out[{i}] = {call}" for i, call in enumerate(CALLS))
    names = {"np": np, "math": math, "__name__": "called"}
    exec(f"def called(out, a):\n    x, y = a[0], a[1]\n{source}\n", names)
    arrays = types.Array(types.float64, 1, "C"), types.Array(bfloat16, 1, "C")
    function = helper(fastmath=False)(names["called"])
    function.compile(arrays)
    for numbers in ([0.75, 2.5], [2.5, 0.0], [0.0, 3.0]):
        given, got, want = np.array(numbers, ml_dtypes.bfloat16), np.zeros(len(CALLS)), np.zeros(len(CALLS))
        function(got, given)
        with np.errstate(all="ignore"):
            names["called"](want, given.astype(np.float32))
        np.testing.assert_allclose(got, want, rtol=3e-7, err_msg=str(CALLS))


def test_a_kernel_runs_after_another_one_that_calls_it_was_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CPUOPT_CACHE_DIR", str(tmp_path))  # where the other one is not yet
    kernel = KERNELS["copy", "vanilla"].of({"out": "bfloat16"})
    kernel.compile()
    called, out = kernel.function, np.zeros(3, ml_dtypes.bfloat16)
    helper()(lambda out, inp: called(out, inp)).compile(signature_of(kernel))
    kernel.direct().function(out, np.ones(3, np.float32))
    assert out.tolist() == [1, 1, 1]

"""The micro-kernel on any machine, what feeds it, the matrix products made of it, and the functions of `fastmath`."""

import re

import numba
import numpy as np
import pytest
from machine_code import assembly, innermost_loops

from cpuopt import kernels, ops  # noqa: F401  (importing kernels registers them)
from cpuopt.check.check import check
from cpuopt.kernels.compile import jit
from cpuopt.kernels.optimized import matmul
from cpuopt.kernels.registry import KERNELS
from cpuopt.kernels.toolkit import lanes, simd
from cpuopt.kernels.toolkit.fastmath import exp, exp2, maximum, tanh
from cpuopt.kernels.toolkit.lanes import load, store
from cpuopt.kernels.toolkit.micro import blocking
from cpuopt.kernels.toolkit.micro.generic import FLOATS
from cpuopt.kernels.toolkit.simd import LANES, MR, NR, at, copy, listed_pair_product, pair_product, product, transpose

F32 = np.float32
# What it computes ---------------------------------------------------------------------------------------------------


@jit.helper()
def multiply(a, row, step, b, line, c, start, c_row, rows, depth, add):
    product(rows, at(a, 0), row, step, at(b, 0), line, at(c, start), c_row, depth, add, (at(a, 0), 0, 0))


@pytest.mark.parametrize("rows", range(1, MR + 1))
@pytest.mark.parametrize("depth", [0, 1, 2, 7])
@pytest.mark.parametrize("add", [False, True])
def test_product(rows, depth, add):
    rng = np.random.default_rng(rows)
    for row, step, line, c_row in ((depth + 3, 1, NR, NR), (1, rows, NR + 5, NR + 1)):
        a, b = rng.random(rows * row + depth * step + 1, F32), rng.random((depth + 1) * line, F32)
        c = rng.random((rows + 2) * c_row, F32) if add else np.full((rows + 2) * c_row, np.nan, F32)
        x = np.lib.stride_tricks.as_strided(a, (rows, depth), (4 * row, 4 * step)).astype(np.float64)
        y, want = np.lib.stride_tricks.as_strided(b, (depth, NR), (4 * line, 4)).astype(np.float64), c.copy()
        for i in range(rows):
            place = slice((i + 1) * c_row, (i + 1) * c_row + NR)
            want[place] = (want[place] if add else 0) + x[i] @ y
        multiply(a, row, step, b, line, c, c_row, c_row, rows, depth, add)
        np.testing.assert_allclose(c, want, rtol=1e-5)  # what lies around the tile is as it was


list_places = matmul.places_of((0, 2))


@jit.helper()
def fetch_and_multiply(to, places, row, a, b, line, c, fetched, rows, depth):
    n = list_places(to, places, 1, row, 2, 3)
    pair_product(rows, at(a, 0), depth, 1, at(b, 0), line, at(c, 0), NR, depth, False, (at(a, 0), 0, 0))
    list_ = at(places, 2)
    listed_pair_product(rows, at(a, 0), depth, 1, at(b, 0), line, at(fetched, 0), NR, depth, False, (list_, 0, 0))
    return n


@pytest.mark.parametrize("rows", [1, MR])
def test_what_an_update_reads_is_listed_and_fetching_it_changes_no_bit(rows):
    rng, depth, to = np.random.default_rng(rows), 11, tuple(np.zeros((4, n), F32) for n in (5, 6, 7))
    places, c = np.zeros(2 * 6, F32), np.full((2, rows, NR), np.nan, F32)
    a, b = (rng.random(n * depth, F32) for n in (rows, NR * simd.PER_WORD))
    for x in a, b:  # words of which one half is zero
        x.view(np.uint32)[:] &= 0xFFFF0000
    assert fetch_and_multiply(to, places, 1, a, b, NR, c[0], c[1], rows, depth) == 5
    want = [x.ctypes.data + x.itemsize * (row * x.shape[1] + 3) for x in (to[0], to[2]) for row in (1, 2)]
    assert places.view(np.int64).tolist() == [0, *want, 0]
    np.testing.assert_array_equal(c[0], c[1])
    assert np.isfinite(c).all()


@jit.helper()
def moves(copied, turned, x, width, rows):
    copy(at(copied, 0), NR, at(x, 1), width, rows)
    transpose(at(turned, 0), LANES, at(x, 3), width)


def test_moves():
    x = np.random.default_rng(0).random((LANES, NR + 7), F32)
    copied, turned = np.zeros((5, NR), F32), np.zeros((LANES, LANES), F32)
    moves(copied, turned, x, NR + 7, 3)
    np.testing.assert_array_equal(copied, np.vstack([x[:3, 1 : NR + 1], np.zeros((2, NR), F32)]))
    np.testing.assert_array_equal(turned, x[:, 3 : LANES + 3].T)


# The matrix products ------------------------------------------------------------------------------------------------

MATMULS = ["matmul_forward", "matmul_backward_input", "matmul_backward_weight"]
SHAPES = [  # BT, C, OC: each takes another way through a kernel
    (1, 1, 1),
    (NR, NR, MR),  # whole tiles only
    (NR + 1, NR + 1, MR + 1),  # one over
    (3, 1024, 49),  # rows that start 4 KB apart
    (2 * MR + 3, blocking.ALIASED, 2 * MR + 3),  # of weight, forward, in smaller groups
    (8 * MR, blocking.ALIASED, MR),  # of tokens
    (2 * MR + 3, 2 * NR, 2 * blocking.ALIASED),  # of dout
    (FLOATS.few, 67, 131),
    (FLOATS.few + 1, 67, 131),
    (17, 2 * blocking.DEPTH + 1, 7),  # blocks of k, forward
    (7, 35, 2 * FLOATS.few_depth + 1),  # of dinp
    (blocking.SHORT + 1, 33, blocking.INPUT_DEPTH + 1),
    (blocking.WEIGHT_DEPTH + 1, 31, 97),  # of dweight
    (max(blocking.WIDE, blocking.INPUT_ROWS) + 4, 40, 100),  # chunks of tokens
    (5, blocking.COLUMNS + 8, 3),  # of columns
    (2, 3, 50257),
    (5, 37, 2 * blocking.SHARE_ROWS + 1),  # dinp by two shares of rows,
    (67, blocking.COLUMNS + 1, 16 * 67),  # by four,
    (blocking.SHARED, 35, 4 * blocking.SHARED),  # by two again, as there are more tokens
    (3, 33, blocking.SHARES * blocking.SHARE_ROWS + 5),  # and by all
]


@pytest.mark.parametrize("op", MATMULS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matmul(op, shape):
    result = check(KERNELS[op, "optimized"], dict(zip(("BT", "C", "OC"), shape, strict=True)), threads=(1, 2, 3, 4))
    assert result.verdict == "right", str(result)


@pytest.mark.skipif(LANES < 8, reason="the patterns are those of AVX")
@pytest.mark.parametrize("op", [*MATMULS, "attention_forward", "attention_backward"])
def test_hot_loops_are_multiply_adds(op):
    others = "vdivps|vcmp|vmax|vmin|vcvt"  # GELU, powers, logarithms
    loops = [loop for loop in innermost_loops(assembly(op)) if re.search(r"vfmadd\w+ps\s.*%[yz]mm", loop)]
    loops = [loop for loop in loops if not re.search(others, loop)]
    counts = {len(re.findall(r"vfmadd\w+ps\s.*%[yz]mm", loop)) for loop in loops}
    assert {2 * simd.HOST.vectors * rows for rows in range(1, MR + 1)} <= counts
    for loop in loops:
        assert not re.search(r"\scall|vfn?m\w+ss\s|%rsp.*%[xyz]mm|%[xyz]mm.*%rsp", loop), loop


# Fast functions -----------------------------------------------------------------------------------------------------


def elementwise(function):
    @jit.helper()
    def run(out, x):
        for i in range(x.shape[0]):
            out[i] = function(x[i])

    return run


def of_vectors(function):
    @jit.helper()
    def run(out, x):
        for i in range(0, x.size, LANES):
            store(out, i, function(load(x, i)))

    return run


exps, powers, tanhs = map(elementwise, (exp, exp2, tanh))


@jit.helper()
def largest(out, x):
    m = x[0]
    for i in range(1, x.shape[0]):
        m = maximum(m, x[i])
    out[0] = m


def of(function, x):
    padded = np.resize(np.asarray(x, F32), -(-len(x) // LANES) * LANES)
    out = np.full_like(padded, 12345)
    function(out, padded)
    return out[: len(x)]


def every(step=2003):
    """One in `step` of all float32, and their neighbourhoods of interest."""
    with np.errstate(invalid="ignore"):
        x = np.arange(0, 2**32, step, dtype=np.uint64).astype(np.uint32).view(F32)
        near = [np.linspace(-110, 95, 500_001), np.linspace(-10, 10, 500_001)]
        return np.concatenate([x[np.isfinite(x)], *near]).astype(F32)


NANS = np.uint32([0x7FC00000, 0x7FC0F111, 0xFFC00001, 0x7FFFFFFF]).view(F32)


@pytest.mark.parametrize(("function", "want", "zero", "low", "high", "infinite", "error"), [
    (exps, np.exp, -104.4, -87.3, 88.7, 88.73, 1e-7), (powers, np.exp2, -126.51, -126.49, 127.49, 127.51, 1.6e-7),
    (of_vectors(lanes.exp), np.exp, -87.7, -87.6, 88.3, 88.4, 1.3e-7),
    (of_vectors(lanes.exp2), np.exp2, -126.6, -126, 127.49, 127.6, 1.3e-7),
], ids=["exp", "exp2", "exp of vectors", "exp2 of vectors"])  # fmt: skip
def test_powers(function, want, zero, low, high, infinite, error):
    x = every()
    with np.errstate(over="ignore"):
        got, exact = of(function, x), want(x.astype(np.float64))
    normal, small = (low <= x) & (x <= high), (zero < x) & (x < low)
    assert np.abs(got[normal] / exact[normal] - 1).max() <= error
    assert (got[x < zero] == 0).all()
    assert np.isinf(got[x > infinite]).all()
    assert function is not exps or np.abs(got[small] - exact[small]).max() <= 1.4e-45  # subnormal numbers
    assert of(function, [0, -0.0, -1e30, -np.inf, 1e30, np.inf]).tolist() == [1, 1, 0, 0, np.inf, np.inf]
    assert np.isnan(of(function, NANS)).all()


def test_log():
    x = np.concatenate([np.linspace(0.5, 3, 1_000_001), np.geomspace(2.0**-126, 2.0**126, 1_000_001)]).astype(F32)
    want, logs = np.log(x.astype(np.float64)), of_vectors(lanes.log)
    assert (np.abs(of(logs, x) - want) <= 1e-7 * np.abs(want) + 1e-8).all()
    assert of(logs, [1])[0] == 0
    assert np.isnan(of(logs, NANS)).all()
    assert not np.isfinite(of(logs, [np.inf])).any()


def test_tanh():
    x = every()
    got, want = of(tanhs, x), np.tanh(x.astype(np.float64))
    normal = np.abs(x) >= 1e-35
    assert np.abs(got[normal] / want[normal] - 1).max() <= 3e-7
    assert np.abs(got[~normal] - want[~normal]).max() <= 2e-42
    assert (np.abs(got).max(), of(tanhs, [np.inf, -np.inf, 0, -1e30, 1e30]).tolist()) == (1, [1, -1, 0, -1, 1])
    assert np.isnan(of(tanhs, NANS)).all()


@pytest.mark.parametrize("n", [1, 7, 64, 1000])
def test_maximum(n):
    x = np.random.default_rng(n).standard_normal(n).astype(F32)
    for given, want in (
        (x, x.max()), (np.full_like(x, -np.inf), -np.inf), (np.where(x == x[n // 2], np.nan, x), np.nan),
    ):  # fmt: skip
        out = np.zeros(1, F32)
        largest(out, given)
        np.testing.assert_array_equal(out, want)


@pytest.mark.skipif(LANES != 8, reason="the patterns are those of AVX2")
def test_loops_of_fast_functions_are_vector_code():
    def code(function):
        fresh = numba.jit(**function.targetoptions)(function.py_func)
        array = numba.types.Array(numba.float32, 1, "C")
        fresh.compile((array, array))
        return str(next(iter(fresh.inspect_asm().values())))

    for function, core in ((exps, "vfmadd"), (powers, "vfmadd"), (tanhs, "vdivps"), (largest, "vmaxps")):
        text = code(function)
        assert re.search(rf"\s{core}\w*\s.*%ymm", text)
        assert not re.search("expf|exp2f|tanhf|fmaximum", text)
    text = code(elementwise(np.exp))
    assert "expf" in text
    assert not re.search(r"\svfmadd\w*\s.*%ymm", text)

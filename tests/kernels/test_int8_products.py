"""Products in int8: sums are those of integers, rows are quantized as defined, and no machine changes a bit."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cpuopt import kernels  # noqa: F401  (which registers them)
from cpuopt.kernels.compile import jit
from cpuopt.kernels.optimized.matmul_int8 import drawn, pack_inputs, pack_outputs, row_words, to_nearest
from cpuopt.kernels.registry import KERNELS
from cpuopt.kernels.toolkit.blocks import ceil
from cpuopt.kernels.toolkit.fastmath import as_int
from cpuopt.kernels.toolkit.micro import targets
from cpuopt.kernels.toolkit.micro.blocking import READ_IN_PLACE as FEW
from cpuopt.kernels.toolkit.micro.records import QUADS
from cpuopt.kernels.toolkit.quads import WORD, row_offset
from cpuopt.kernels.toolkit.simd import LANES, NR, at
from cpuopt.kernels.toolkit.threads import set_threads
from cpuopt.ops.matmul_int8 import LARGEST, LEAST, most_of, quantized
from cpuopt.ops.rounding import bits_of, draw_of
from cpuopt.ops.storage import TYPES

F32, BF16 = np.float32, TYPES["bfloat16"].dtype


def sums_by(pack):
    """A function of the sums of rows of words with the columns that `pack` packs."""
    wide, narrow, most = QUADS.wide, QUADS.narrow, QUADS.rows

    @jit.helper()
    def sums(out, q, words, K, weight, panel, tile):
        M, N = out.shape
        depth = ceil(K, WORD)
        for n in range(0, N, NR):
            pack(panel, weight, n, 0, depth)
            for row in range(0, M, most):
                rows = min(most, M - row)
                x, b, c = at(q, row * words), at(panel, 0), at(tile, 0)
                if N - n > LANES:
                    wide(rows, x, words, b, NR, c, NR, depth, False, (b, 0, 0, 0))
                else:
                    narrow(rows, x, words, b, NR, c, NR, depth, False, (b, 0, 0, 0))
                for i in range(rows):
                    offset = row_offset(q, (row + i) * words * WORD, words * WORD)
                    for j in range(min(NR, N - n)):
                        out[row + i, n + j] = as_int(tile[i * NR + j]) - offset

    return sums


OUTPUTS, INPUTS = sums_by(pack_outputs), sums_by(pack_inputs)


def integers(rng, shape, kind):
    if kind == "one sign":
        return np.full(shape, 127, np.int8)
    if kind == "extremes":
        return rng.choice(np.array([-127, 127, 0, 1, -1], np.int8), shape)
    return rng.integers(-127, 128, shape).astype(np.int8)


def summed(x, weight, run, K):
    """The sums that `run` makes of int8 rows."""
    M, words = len(x), row_words.py_func(K)
    q, N = np.zeros((M, words * WORD), np.int8), weight.shape[0 if run is OUTPUTS else 1]
    q[:, :K] = x
    out = np.full((M, N), 7, np.int32)
    panel, tile = (np.full(n, np.nan, F32) for n in ((K // WORD + 1) * NR, QUADS.rows * NR))
    run(out, q.view(np.int32).reshape(-1), words, K, weight, panel, tile)
    return out


@pytest.mark.parametrize("kind", ["any", "extremes", "one sign"])
def test_every_sum_is_that_of_int64(kind):
    rng = np.random.default_rng(0)
    for case in range(30):
        M, N, K = (int(rng.integers(1, most)) for most in (2 * QUADS.unit + 3, 2 * NR + 5, 300))
        x, w = integers(rng, (M, K), kind), integers(rng, (N, K), kind)
        w[rng.random(w.shape) < 0.01] = -128  # which no quantizer writes
        want = x.astype(np.int64) @ w.astype(np.int64).T
        assert (summed(x, w, OUTPUTS, K) == want).all(), (case, M, N, K)
        assert (summed(x, np.ascontiguousarray(w.T), INPUTS, K) == want).all(), (case, M, N, K)


LONGEST = LARGEST // (127 * 128)
"""The most terms of a sum of any int8 that int32 holds."""


@pytest.mark.parametrize("sign", [1, -1])
def test_the_longest_sum_is_exact(sign):
    x, w = np.full((2, LONGEST), 127, np.int8), np.full((3, LONGEST), -128 if sign < 0 else 127, np.int8)
    want = x.astype(np.int64) @ w.astype(np.int64).T
    assert abs(want).max() > 0.99 * 2**31 * 127 / 128
    assert (summed(x, w, OUTPUTS, LONGEST) == want).all()


# Rows to int8

RNG = np.random.default_rng(1)
NORMAL = RNG.standard_normal((5, 150)).astype(F32)
AROUND = F32([[0.5], [0.9999999], [1], [1], [2]])
ROWS = {
    "normal": NORMAL,
    "ties": np.concatenate([np.full((2, 1), 127), RNG.integers(-252, 253, (2, 149)) / 2], 1).astype(F32),
    "zeros": np.where(np.arange(5)[:, None] % 2, NORMAL, F32(-0.0)),
    "a huge element": np.where(np.arange(150) == 77, F32(3.4e38), NORMAL),
    "around the least": NORMAL / np.abs(NORMAL).max(1, keepdims=True) * LEAST * AROUND,
    "subnormal": NORMAL * F32(1e-40),
    "NaN": np.where((np.arange(150) == 149) & (np.arange(5)[:, None] == 3), F32(np.nan), NORMAL),
    "infinity": np.where((np.arange(150) == 0) & (np.arange(5)[:, None] == 1), F32(-np.inf), NORMAL),
}


def rows_of(x, scales=None, draw=0):
    """The int8, the steps and the offsets that the kernels make of rows."""
    M, K = x.shape
    q, steps, offsets = np.full(M * row_words.py_func(K), -1, np.int32), np.zeros(M, F32), np.zeros(M, np.int32)
    (to_nearest if scales is None else drawn)(q, steps, offsets, x, np.ones(K, F32) if scales is None else scales, draw)
    q = q.view(np.int8).reshape(M, -1)
    assert not q[:, K:].any()
    assert (offsets == 128 * q.astype(np.int64).sum(1)).all()
    return q[:, :K], steps[:, None]


@pytest.mark.parametrize("case", ROWS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
def test_rows_are_quantized_as_defined(case, dtype):
    x = ROWS[case].astype(dtype)
    wide, draw, scales = x.astype(F32), draw_of(3, 4, 5), (2.0 ** RNG.integers(-3, 4, 150)).astype(F32)
    finite = np.isfinite(wide).all(1)
    with np.errstate(over="ignore"):
        scaled = wide * scales
    bits = bits_of(draw, 0, x.size, 0)
    for (q, steps), given, drawn_bits in ((rows_of(x), wide, None), (rows_of(x, scales, draw), scaled, bits)):
        want, want_steps = quantized(given, drawn_bits)
        whole = np.isfinite(want_steps[:, 0])
        assert steps.tobytes() == want_steps.tobytes()
        assert (q[whole] == want[whole]).all()
        assert (whole <= finite).all()
    q, steps = rows_of(x)
    assert (np.abs(q.astype(np.float64) * steps - wide)[finite] <= np.maximum(0.5001 * steps[finite], LEAST)).all()


@pytest.mark.parametrize("K", [LONGEST, 151936])
def test_the_integers_of_a_longer_row_are_so_small_that_its_sums_fit(K):
    x = np.concatenate([RNG.standard_normal((1, K)), np.full((1, K), 3.0)]).astype(F32)
    q, steps = rows_of(x)
    want, want_steps = quantized(x)
    assert np.array_equal(q, want)
    assert np.array_equal(steps, want_steps)
    assert abs(q).max() == most_of(K) == (127 if K == LONGEST else 110)
    kernel, w = KERNELS["matmul_int8_backward_input", "optimized"], np.full((K, 3), 127, np.int8)
    out = np.zeros((2, 3), F32)
    scratch = [np.zeros(n, TYPES[kind].dtype) for (n,), kind in kernel.work({"BT": 2, "C": 3, "OC": K}).values()]
    kernel.function(out, False, x, w, np.ones(K, F32), 0, 0, 0, *scratch)
    np.testing.assert_allclose(out[1], 3 * 127 * K, rtol=1e-6)


def test_random_rounding_has_the_mean_of_the_number():
    x = np.repeat(F32([[127, 0.25, -0.25, 63.5, -126.75]]), 4000, 0)
    q, _ = rows_of(x, np.ones(5, F32), draw_of(1, 2, 3))
    assert (np.abs(q.mean(0) - x[0]) < 0.04).all()
    assert (q[:, 0] == 127).all()
    other, _ = rows_of(x, np.ones(5, F32), draw_of(1, 3, 3))
    assert (q != other).mean() > 0.2


# The kernels: the same bits as the naive ones, on any number of threads, with the instruction or without

SHAPES = ((1, 70, 9), (FEW, 129, 50), (1, 1100, 501), (FEW + 1, 64, 33), (70, 300, 69), (33, 515, 7), (17, 40, 8200))


def results(variant, threads=1):
    """A hash of what kernels write, overwriting and adding."""
    set_threads(threads)
    rng, found = np.random.default_rng(2), hashlib.sha256()
    for M, K, N in SHAPES:
        sizes = {"BT": M, "C": K, "OC": N}
        for dtype in (F32, BF16):
            x, d = (rng.standard_normal(s).astype(dtype) for s in ((M, K), (M, N)))
            w, scales, bias = rng.integers(-127, 128, (N, K)).astype(np.int8), *rng.random((2, N), F32)
            start = rng.standard_normal((M, max(K, N))).astype(dtype)
            for add in False, True:
                for name, like, args in (
                    ("matmul_int8_forward", d, (x, w, scales, bias if add else bias[:0])),
                    ("matmul_int8_backward_input", x, (d, w, scales, 1, 2**40 + 7, 3)),
                ):
                    kernel = KERNELS[name, variant]
                    types = {a.name: "bfloat16" for a in kernel.op.arrays if "bfloat16" in a.types and dtype == BF16}
                    kernel = kernel.of(types)
                    kernel.compile()
                    out = start[:, : like.shape[1]].copy()
                    scratch = [np.zeros(n, TYPES[kind].dtype) for (n,), kind in kernel.work(sizes).values()]
                    kernel.function(out, add, *args, *scratch)
                    found.update(out.tobytes())
    return found.hexdigest()


@pytest.fixture(scope="module")
def naive():
    return results("vanilla")


SLOW_TARGET = pytest.param("znver4", "3", marks=pytest.mark.slow)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("target", "threads"), [("", "1 2 3 5"), ("haswell", "2"), SLOW_TARGET])
def test_kernels_have_the_bits_of_the_naive_ones(naive, target, threads):
    """On AVX-512 without the instruction for int8 (znver4 is listed without it), and on AVX2."""
    assert "avx512vnni" not in targets.TARGETS["znver4"].features
    code = f"from {__name__} import results\nfor n in {threads.split()}: print(results('optimized', int(n)))"
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    env = {**os.environ, "PYTHONPATH": path, "NUMBA_NUM_THREADS": "5", targets.VARIABLE: target}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.split() == [naive] * len(threads.split()), done.stderr[-3000:]

"""Each record of a micro-kernel computes what it says: a file of ``kernels/toolkit/micro`` is tested by being there."""

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from shutil import copytree, ignore_patterns

import numba
import numpy as np
import pytest

from cpuopt import kernels  # noqa: F401  (which registers them)
from cpuopt.kernels.compile import jit
from cpuopt.kernels.optimized import matmul
from cpuopt.kernels.optimized._forward import FORWARD_SCRATCH
from cpuopt.kernels.toolkit.blocks import PACKED, ceil, multiply_columns_by
from cpuopt.kernels.toolkit.epilogue import storing
from cpuopt.kernels.toolkit.micro import records
from cpuopt.kernels.toolkit.micro.blocking import LINE
from cpuopt.kernels.toolkit.simd import LANES, NR, at
from cpuopt.ops.storage import TYPES

F32 = np.float32
ROOT = Path(__file__).parents[2]
RECORDS = [r for r in records.found() if r.columns == NR]
CASES = 40

# The orders, by their definitions: c, or zeros, and a b, of which all products are exact in float64 ------------------


def serial(c, a, b):
    total = np.zeros_like(c)
    for k in range(len(b)):
        total = (a[:, k, None] * b[k] + total).astype(F32)
    return total + c


def pairs(c, a, b):
    swapped = np.arange(len(b)) ^ 1
    return serial(c, a[:, swapped], b[swapped])


def amx(c, a, b):
    for k in range(0, len(b), 32):
        even, odd = (serial(np.zeros_like(c), a[:, k + h : k + 32 : 2], b[k + h : k + 32 : 2]) for h in (0, 1))
        c = c + (even + odd)
    return c


ORDERS = {"serial": serial, "pairs": pairs, "amx": amx, "exact": lambda c, a, b: (c + a @ b).astype(F32)}


def drawn(rng, record, shape):
    """Numbers of a storage type, of which no product or sum of two needs more than the digits of float64."""
    kind, short = TYPES[record.storage], TYPES["bfloat16"].dtype
    if not kind.is_float:
        return rng.integers(-127, 128, shape).astype(kind.dtype)
    return (rng.uniform(-2, 2, shape) * 2.0 ** rng.integers(-3, 4, shape)).astype(short).astype(kind.dtype)


@cache
def products(record):
    """Two functions: c = or += a b of rows of a in place, and of packed columns of a."""
    words, pack, group, multiply = record.words, record.pack, record.group, multiply_columns_by(record)
    pack_columns, packed = matmul.pack_outputs_by(record), PACKED

    @jit.helper()
    def of_rows(c, a, b, room, panel, add):
        w, _ = words(a, room)
        depth, y = ceil(b.shape[0], group), at(panel, 0)
        pack(panel, b, 0, 0, depth)
        width, wide = w.shape[1], c.shape[1]
        multiply(b.shape[1], w.shape[0], at(w, 0), width, y, NR, at(c, 0), wide, depth, add, (y, 0, 0, 0))

    @jit.helper()
    def of_columns(c, a, b, room, panel, add):
        depth, y = ceil(b.shape[0], group), at(panel, 0)
        pack_columns(room, a, 0, depth, 0, a.shape[1])
        pack(panel, b, 0, 0, depth)
        multiply(b.shape[1], a.shape[1], at(room, 0), packed, y, NR, at(c, 0), c.shape[1], depth, add, (y, 0, 0, 0))

    return of_rows, of_columns


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: f"{r.storage}-{r.name}")
def test_a_record_adds_products_in_the_order_that_it_names(record):
    rng = np.random.default_rng(4)
    of_rows, of_columns = products(record)
    for case in range(CASES):
        rows, columns, depth = (int(rng.integers(1, n)) for n in (2 * record.rows + 4, NR + 1, 90))
        add, more = bool(case % 2), case % 5  # what rows of a and of c have besides
        a, b = drawn(rng, record, (rows, depth + more)), drawn(rng, record, (depth, columns))
        begin = rng.integers(-9, 10, (rows, NR + more)).astype(F32)
        x, y = np.zeros((rows, -(-depth // 32) * 32)), np.zeros((-(-depth // 32) * 32, columns))
        x[:, :depth], y[:depth] = a[:, :depth], b
        want = ORDERS[record.order](begin[:, :columns] if add else np.zeros((rows, columns), F32), x, y)
        for run, given in ((of_rows, a), (of_columns, np.ascontiguousarray(a[:, :depth].T))):
            c = begin.copy()
            room = np.full((rows + 2 * LANES) * (depth + more + 32) + LANES * LANES, np.nan, F32)
            run(c, given, b, room, np.full((depth + 32) * NR, np.nan, F32), add)
            assert c[:, :columns].tobytes() == want.tobytes(), (rows, columns, depth, more, add, run.__name__)
            assert (c[:, NR:] == begin[:, NR:]).all()


SLOW = {r: [pytest.mark.slow] * (r.name == "amx") for r in RECORDS}
"""Of AMX, two of the three products are in test_amx.py too."""


@pytest.mark.parametrize("record", [pytest.param(r, id=f"{r.storage}-{r.name}", marks=SLOW[r]) for r in RECORDS])
def test_the_loops_of_products_take_every_record(record):
    """Sums of few small integers are exact, in whatever order."""
    if TYPES[record.storage].is_float and record in records.MICRO_KERNELS.values():
        pytest.skip("these are checked as kernels")
    rng, made, threads = np.random.default_rng(5), matmul.products_by(record), numba.config.NUMBA_NUM_THREADS
    M, K, N = 70, 134, 50
    x, w, d = (rng.integers(-8, 9, shape).astype(TYPES[record.storage].dtype) for shape in ((M, K), (N, K), (M, N)))

    def room(floats):
        return np.full(floats, np.nan, F32)

    def queue():
        return np.zeros(LINE * (1 + threads), np.int32)

    a, b = made.operands(x, w, room(M * K + N * K))
    out, none = room(M * N).reshape(M, N), room(0)
    made.forward(out, a, b, none, room(made.forward_panels(M, K, N)), room(threads * FORWARD_SCRATCH), queue())
    assert (out == x.astype(F32) @ w.astype(F32).T).all()

    dinp, words = room(M * K).reshape(M, K), made.operands(d, d, room(2 * M * N))[0]
    made.backward_input(dinp, False, words, w, room(threads * made.input_floats), none, queue())
    assert (dinp == d.astype(F32) @ w.astype(F32)).all()

    dweight, sizes = np.ones((N, K), F32), {"BT": M, "OC": N, "C": K}
    given = (room(floats(sizes)) for _, floats, *_ in made.weight_scratch(False)[:2])
    made.backward_weight(storing(False))((dweight, True), d, x, *given, queue())
    assert (dweight == 1 + d.astype(F32).T @ x.astype(F32)).all()


# A new instruction set ------------------------------------------------------------------------------------------------

PAGE = ROOT / "docs" / "kernels" / "instruction-set.md"


@pytest.mark.parametrize(("tests", "passed"), [("int8 and order", 1), pytest.param("int8", 2, marks=pytest.mark.slow)])
def test_an_instruction_set_is_added_by_one_file(tests, passed, tmp_path):
    """The example of the page, word for word, in a copy of the package: the tests above find it and take it."""
    ((name, text),) = re.findall(r"`(cpuopt/\S+\.py)`:\n\n```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    copytree(ROOT / "cpuopt", tmp_path / "cpuopt", ignore=ignore_patterns("__pycache__"))
    assert not (tmp_path / name).exists()
    (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", f"{tests} and not added", __file__]
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert f"{passed} passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]

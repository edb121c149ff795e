"""Products on AMX, on machines that lack it: by their model, and by an emulator of what is emitted."""

import ctypes
import os
import re
import sys
from typing import ClassVar

import numba
import numpy as np
import pytest
from llvmlite import ir
from verbs import process

from cpuopt.isolate.process import Side
from cpuopt.kernels.compile.jit import helper
from cpuopt.kernels.optimized import matmul
from cpuopt.kernels.optimized._attention_operands import words_by
from cpuopt.kernels.optimized._backward_input import packed_floats
from cpuopt.kernels.optimized._forward import FORWARD_SCRATCH
from cpuopt.kernels.toolkit import simd
from cpuopt.kernels.toolkit.micro import amx
from cpuopt.kernels.toolkit.micro.amx import TILES, proof, prove
from cpuopt.kernels.toolkit.simd import LINE, NR, at
from cpuopt.kernels.toolkit.tiles import BLOCK, WHOLE
from cpuopt.ops.storage import TYPES

TINY = np.float32(2.0**-126)
pytestmark = pytest.mark.filterwarnings("ignore::cpuopt.files.CacheWarning")  # the emulator cannot be cached
wide = pytest.mark.skipif(simd.LANES != 16, reason="a panel of this machine's tile is no tile of AMX")


def flushed(x):
    """Take subnormal numbers as zeros of their sign."""
    return np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x).astype(np.float32)


def fma(x, y, z):
    """x * y + z in float32, rounded once: products of bfloat16 are exact in float64, and a sum that is not keeps the
    larger part, which is a float32."""
    return flushed((x.astype(np.float64) * y.astype(np.float64) + z.astype(np.float64)).astype(np.float32))


def tile(c, a, b):
    """c + a @ b of words, by the pseudocode of the instruction: c (M, 16), a (M, K), b (K, 16)."""

    def halves(words):
        bits = words.view(np.uint32)
        return [flushed(x.view(np.float32)) for x in (bits << 16, bits & 0xFFFF0000)]

    sums, x, y = [np.zeros_like(c), np.zeros_like(c)], halves(a), halves(b)
    with np.errstate(all="ignore"):
        for k in range(a.shape[1]):
            for h in range(2):
                sums[h] = fma(x[h][:, k, None], y[h][None, k], sums[h])
        return flushed(flushed(c) + flushed(sums[0] + sums[1]))


def same(x, y):
    """Whether two arrays have the same bits, but for those of what is no number."""
    return bool(((x.view(np.uint32) == y.view(np.uint32)) | (np.isnan(x) & np.isnan(y))).all())


def test_the_pseudocode_gives_what_a_processor_gave():
    with np.load(os.path.join(os.path.dirname(__file__), "amx_tiles.npz")) as recorded:
        a, b, c, d = (recorded[name] for name in "abcd")
    assert len(a) >= 24
    assert np.isnan(d).any()
    assert (np.abs(d[d != 0]) < 1e-37).any()
    assert np.isinf(d).any()
    for x, y, z, want in zip(a, b, c, d, strict=True):
        assert same(tile(z, x, y), want)


def reference(a, b, c, depth, add):
    """The product of `multiply_of`, tile by tile."""
    total = c.copy() if add else np.zeros_like(c)
    for k in range(0, depth, 16):
        for j in range(0, c.shape[1], 16):
            end = min(k + 16, depth)
            total[:, j : j + 16] = tile(total[:, j : j + 16].copy(), a[:, k:end].copy(), b[k:end, j : j + 16].copy())
    return total


class Emulator:
    """The eight tiles of a processor; its methods are the instructions, which check what a processor checks."""

    SIGNATURES: ClassVar = {
        "ldtilecfg": "p", "tileloadd64": "bpq", "tilestored64": "bpq", "tilezero": "b", "tdpbf16ps": "bbb",
        "tdpbsud": "bbb", "tilerelease": "",
    }  # fmt: skip
    KINDS: ClassVar = {"p": (ctypes.c_void_p, ir.PointerType(ir.IntType(8)))}
    KINDS |= {"b": (ctypes.c_byte, ir.IntType(8)), "q": (ctypes.c_longlong, ir.IntType(64))}

    def __init__(self):
        self.shapes, self.tiles, self.counts, self.errors = None, [None] * 8, dict.fromkeys(self.SIGNATURES, 0), []
        self.functions = {}
        for name, kinds in self.SIGNATURES.items():
            made = ctypes.CFUNCTYPE(None, *(self.KINDS[k][0] for k in kinds))(self.noted(name))
            self.functions[name] = made, ir.FunctionType(ir.VoidType(), [self.KINDS[k][1] for k in kinds])

    def noted(self, name):
        def call(*args):
            self.counts[name] += 1
            try:
                getattr(self, name)(*args)
            except Exception as e:  # an exception cannot leave a callback
                self.errors.append(f"{name}{args}: {type(e).__name__}: {e}")

        return call

    def emit(self, tiles, name, *args):
        """In place of `Tiles.call`."""
        made, kind = self.functions[name]
        address = ir.IntType(64)(ctypes.cast(made, ctypes.c_void_p).value)
        args = [ir.Constant(ir.IntType(8), x) if isinstance(x, int) else x for x in args]
        args = [tiles.builder.bitcast(x, want) if isinstance(want, ir.PointerType) else x
                for x, want in zip(args, kind.args, strict=True)]  # fmt: skip
        tiles.builder.call(tiles.builder.inttoptr(address, kind.as_pointer()), args)

    def ldtilecfg(self, place):
        given = (ctypes.c_ubyte * 64).from_address(place)
        assert given[0] == 1
        assert not any([*given[1:16], *given[32:48], *given[56:64]])
        widths = [given[16 + 2 * n] | given[17 + 2 * n] << 8 for n in range(8)]
        self.shapes = [(given[48 + n], widths[n]) for n in range(8)]
        assert all(0 < rows <= 16 and 0 < size <= 64 and size % 4 == 0 for rows, size in self.shapes)
        self.tiles = [np.zeros((rows, size // 4), np.float32) for rows, size in self.shapes]

    def row(self, n, i, place, stride):
        return (ctypes.c_ubyte * self.shapes[n][1]).from_address(place + i * stride)

    def tileloadd64(self, n, place, stride):
        for i in range(self.shapes[n][0]):
            self.tiles[n][i] = np.frombuffer(self.row(n, i, place, stride), np.float32)

    def tilestored64(self, n, place, stride):
        for i in range(self.shapes[n][0]):
            np.frombuffer(self.row(n, i, place, stride), np.float32)[:] = self.tiles[n][i]

    def tilezero(self, n):
        self.tiles[n][:] = 0

    def tdpbf16ps(self, c, a, b):
        assert (self.tiles[a].shape[1], self.tiles[c].shape[0]) == (self.tiles[b].shape[0], self.tiles[a].shape[0])
        self.tiles[c] = tile(self.tiles[c], self.tiles[a], self.tiles[b])

    def tdpbsud(self, c, a, b):
        """Signed bytes times unsigned ones, by Intel's pseudocode: sums wrap."""
        x, y = self.tiles[a].view(np.int8), self.tiles[b].view(np.uint8)
        for m, row in enumerate(x.reshape(len(x), -1, 4).astype(np.int32)):
            sums = sum(row[k] @ y[k].reshape(-1, 4).T.astype(np.int32) for k in range(len(row)))
            self.tiles[c].view(np.int32)[m] += sums

    def tilerelease(self):
        self.shapes, self.tiles = None, [None] * 8


SHAPES = [(1, 1), (16, 16), (17, 33), (32, 16), (33, 5), (40, 40), (64, 272), (70, 31)]


@pytest.fixture
def emulator(monkeypatch):
    """Emit calls of an emulator in place of the instructions."""
    made = Emulator()
    monkeypatch.setattr(amx.Tiles, "call", lambda tiles, name, *args: made.emit(tiles, name, *args))
    return made


@pytest.mark.skipif(not amx.HERE, reason="AMX is not used here")
@pytest.mark.parametrize("calls", [20, pytest.param(2000, marks=pytest.mark.slow)])
def test_this_processor_gives_the_bits_of_the_pseudocode(calls):
    """512 products of tiles in a call, with zeros, subnormal numbers, infinities and NaN."""
    run, rng = prove.caller(amx.multiply_of(2, tiles=True)), np.random.default_rng(8)

    def drawn(shape, special):
        words = prove.words(rng, shape, special).view(np.uint32)
        tiny = rng.integers(0, 2**32, shape, np.uint32) & np.uint32(0x807F807F)
        return np.where(rng.random(shape) < 0.02 * special, tiny, words).view(np.float32)

    for call in range(calls):
        a, b = drawn((4096, 16), call % 3), drawn((16, NR), call % 2)
        begin = (rng.normal(size=(4096, NR)) * 2.0 ** rng.integers(-140, 20, (4096, 1))).astype(np.float32)
        got = begin.copy()
        run(a, b, got, 16, True)
        assert same(got, reference(a, b, begin, 16, True)), call


@wide
@pytest.mark.parametrize("vectors", [1, 2])
def test_the_instructions_and_the_model_have_the_bits_of_the_pseudocode(emulator, vectors):
    on_tiles, by_model = (prove.caller(amx.multiply_of(vectors, tiles=tiles)) for tiles in (True, False))
    rng = np.random.default_rng(3)
    for case, (rows, depth) in enumerate(SHAPES):
        for add in (False, True):
            a, b = prove.words(rng, (rows, depth + case % 3), case % 3), prove.words(rng, (depth, NR), add + 1)
            begin = rng.normal(size=(rows, NR)).astype(np.float32)
            want, columns = begin.copy(), 16 * vectors
            want[:, :columns] = reference(a, b, begin[:, :columns], depth, add)
            for run in on_tiles, by_model:
                got = begin.copy()
                run(a, b, got, depth, add)
                assert emulator.errors == []
                assert same(got, want), (rows, depth, add, run is on_tiles)
    assert emulator.shapes is None  # released


@wide
def test_a_product_of_four_tiles_takes_four_loads_and_shapes_are_set_once(emulator):
    run = prove.caller(amx.multiply_of(2, tiles=True))
    a, b = np.ones((96, 64), np.float32), np.ones((64, NR), np.float32)
    run(a, b, np.zeros((96, NR), np.float32), 64, False)
    assert emulator.errors == []
    wanted = {"ldtilecfg": 1, "tilerelease": 1, "tdpbsud": 0, "tilezero": 3 * 4, "tilestored64": 3 * 4}
    each = dict.fromkeys(("tileloadd64", "tdpbf16ps"), 3 * 4 * 4)  # three groups of rows, four tiles of k
    assert emulator.counts == wanted | each


@wide
def test_a_proof_finds_what_a_processor_does_otherwise(emulator, monkeypatch):
    monkeypatch.setattr(prove, "DEPTHS", (1, 16, 40, 300))
    monkeypatch.setattr(prove, "ROWS", (1, 17, 70))
    assert [prove.compare(), *(prove.compare_integers(n) for n in (1, 2)), emulator.errors] == [0, 0, 0, []]
    monkeypatch.setattr(Emulator, "tilezero", lambda self, n: None)  # a tile that keeps what it held
    assert prove.compare() == 2 * 4  # in the second group of 70 rows, where nothing is added
    assert prove.compare_integers() == 4


IN_A_PROCESS = """
from numba import types
from cpuopt.kernels.toolkit.micro import amx
from cpuopt.kernels.toolkit.micro.amx import prove
run, A = prove.caller(amx.multiply_of(2, tiles=True)), types.Array(types.float32, 2, "C")
run.compile((A, A, A, types.int64, types.boolean))
library = next(iter(run.overloads.values())).library
print(library.codegen._tm.emit_assembly(library._get_module_for_linking()))
"""


FEATURES = "+avx2,+fma,+avx512f,+avx512bf16,+amx-tile,+amx-bf16"
AS_A_XEON = {"NUMBA_CPU_NAME": "sapphirerapids", "NUMBA_CPU_FEATURES": FEATURES, proof.VARIABLE: "off"}
"""The environment in which numba compiles for a processor with AMX."""


@wide
def test_llvm_keeps_the_tiles_and_spills_none():
    ended = process(code=IN_A_PROCESS, **AS_A_XEON)
    assert ended.returncode == 0, ended.stderr
    loops = re.findall(r"tileloadd|tdpbf16ps|tilestored|tilezero|ldtilecfg", ended.stdout)
    loads, stores = loops.count("tileloadd"), loops.count("tilestored")
    assert loops.count("tdpbf16ps") > 0
    assert loops.count("ldtilecfg") >= 2
    assert re.search(r"tdpbf16ps\s+%tmm6, %tmm4, %tmm0", ended.stdout)  # c, a and b are not exchanged
    for block in re.split(r"^\.L\w+:", ended.stdout, flags=re.M):
        products, loaded = block.count("tdpbf16ps"), block.count("tileloadd")
        if products and "tilestored" not in block and "tilezero" not in block and loaded == products:
            break
    else:
        raise AssertionError("no loop has as many loads as products")
    assert min(loads, stores) > 0


def test_a_proof_that_dies_errs_or_is_late_passes_amx_over(tmp_path):
    def said(body):
        program = f"import os\nfrom cpuopt.isolate.serve import serve\ndef prove(request, say):\n {body}\n"
        program += "serve({'prove': prove})"
        return proof.proved(Side("proof", (sys.executable, "-c", program)), limit_s=5)[0]

    assert said("return {'use': True, 'reason': 'fast'}") == proof.Proof(True, "fast")
    assert said("return {'use': 1, 'reason': 'fast'}").use is False
    assert not said("return {}").use
    nothing, final = proof.proved(Side("proof", ("no-such-program",)))
    assert not final
    died, late = said("os.kill(os.getpid(), 4)"), said("import time; time.sleep(60)")
    for found, why in (died, "SIGILL"), (nothing, "no-such-program"), (late, "5"):
        assert (found.use, why in found.reason) == (False, True), found


# The loops of the products, whose rows and packing are others with tiles ----------------------------------------------

PRODUCTS = matmul.products_by(TILES)


def queue():
    return np.zeros(LINE * (1 + numba.config.NUMBA_NUM_THREADS), np.int32)


def room(floats):
    return np.full(numba.config.NUMBA_NUM_THREADS * floats, np.nan, np.float32)


def columns_as_words(x):
    """Interleave two rows of halves: words of neighbours along the rows, as panels have them."""
    pairs = np.concatenate([x, np.zeros((len(x) % 2, x.shape[1]), np.uint16)]).astype(np.uint32)
    return np.ascontiguousarray(pairs[::2] | pairs[1::2] << 16).view(np.float32)


def halves(rng, shape):
    return (rng.normal(size=shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


@wide
@pytest.mark.parametrize(("tokens", "depth", "rows"), [(5, 34, 20), (70, 600, 50)])
def test_a_forward_adds_in_the_order_of_amx(tokens, depth, rows):
    rng = np.random.default_rng(8)
    x, w = (halves(rng, (n, depth)).view(np.float32) for n in (tokens, rows))
    out, none = np.full((tokens, rows), np.nan, np.float32), np.empty(0, np.float32)
    panels = room(PRODUCTS.forward_panels(tokens, depth, rows))
    PRODUCTS.forward(out, x, w, none, panels, room(FORWARD_SCRATCH), queue())
    assert same(out, reference(x, w.T.copy(), out, depth // 2, False))


@wide
@pytest.mark.parametrize(
    ("tokens", "depth", "columns", "beyond", "packed"),
    [(5, 34, 20, 0, False), (70, 1700, 64, 6, False), (300, 1570, 64, 0, True), (260, 70, 20, 58, True)],
)
def test_a_gradient_of_the_input_adds_in_the_order_of_amx(tokens, depth, columns, beyond, packed):
    """Of rows of dout that end before they are over, too; and with panels of the whole weight."""
    rng = np.random.default_rng(9)
    dout, weight = halves(rng, (tokens, depth + beyond)), halves(rng, (depth, columns))
    dinp, floats = np.full((tokens, columns), np.nan, np.float32), packed_floats(TILES, tokens, columns, depth)
    assert (floats > 0) == packed
    parts, given = np.full(floats, np.nan, np.float32), weight.view(TYPES["bfloat16"].dtype)
    PRODUCTS.backward_input(dinp, False, dout.view(np.float32), given, room(PRODUCTS.input_floats), parts, queue())
    used = np.ascontiguousarray(dout[:, :depth]).view(np.float32)
    assert same(dinp, reference(used, columns_as_words(weight), dinp, depth // 2, False))
    assert not np.isnan(parts).any()  # all of them are packed


BY_QUERY, PRODUCT = words_by(TILES).by_query, words_by(TILES).product


@helper()
def weigh_values(out, w, values, n_q, n_k, adds):
    """out += the values of n_k keys, weighted for n_q queries by words of two keys at the begin of w."""
    limit, half = (WHOLE, w, 0), BLOCK * BLOCK // 2
    a, row, apart = BY_QUERY(w, 0, half, BLOCK // 2, n_q, n_k)
    y, width = at(values, 0), out.shape[1]
    PRODUCT(at(out, 0), width, a, row, apart, y, width, n_q, width, (n_k + 1) // 2, limit, adds)


@wide
@pytest.mark.parametrize(("n_q", "n_k", "width"), [(1, 1, 16), (17, 30, 48), (64, 64, 80), (33, 63, 32)])
@pytest.mark.parametrize("adds", [False, True])
def test_attention_adds_in_the_order_of_amx(n_q, n_k, width, adds):
    rng, words = np.random.default_rng(10), (n_k + 1) // 2
    weights, values = (columns_as_words(halves(rng, (n_k, n))) for n in (BLOCK, width))
    w = np.full((BLOCK, BLOCK), np.nan, np.float32)
    w[:words] = weights
    out = rng.normal(size=(BLOCK, width)).astype(np.float32)
    want = np.concatenate([reference(weights.T.copy(), values, out, words, adds)[:n_q], out[n_q:]])
    weigh_values(out, w.reshape(-1), values, n_q, n_k, adds)
    assert same(out, want)

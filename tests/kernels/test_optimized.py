"""What comparing with a reference does not see: machine code, bits, NaN, and the vectors that kernels are made of."""

import re
from functools import cache
from itertools import pairwise

import ml_dtypes
import numba
import numpy as np
import pytest
from machine_code import assembly, innermost_loops, symbols

from cpuopt import kernels, ops  # noqa: F401  (importing kernels registers them)
from cpuopt.check.cases import Case, arguments, case
from cpuopt.check.check import check
from cpuopt.kernels.optimized.matmul import PRODUCTS, is_thin
from cpuopt.kernels.registry import KERNELS
from cpuopt.kernels.toolkit import lanes
from cpuopt.kernels.toolkit.blocks import largest, piece, pieces, token_pieces
from cpuopt.kernels.toolkit.simd import LANES
from cpuopt.kernels.toolkit.threads import SMALL

OPS = [op for op in ops.ALL.values() if not op.name.startswith("matmul") and (op.name, "optimized") in KERNELS]
SIZES = {"B": 2, "T": 70, "C": 40, "NH": 2, "V": 301, "maxT": 70}
F32 = np.float32

# Machine code ---------------------------------------------------------------------------------------------------------

avx2 = pytest.mark.skipif(LANES != 8, reason="the patterns are those of AVX2")
LIBM = re.compile(r"\b((?:exp|log|tanh|expm1|log1p|pow|sqrt|fmax|fmin)f?)(?!\w)")
FEW = {  # one logarithm a row, two powers a call
    **{f"{op}_forward": {"logf"} for op in ("cross_entropy", "classifier", "classifier_int8")},
    **{op: {"pow"} for op in ("adamw", "embedding_update", "head_update")},  # of the numbers of AdamW
    **{f"{op}_backward": {"logf"} for op in ("classifier", "classifier_int8")},
    "classifier_update": {"logf", "pow"},
    **{f"classifier_update_{name}": {"logf"} for name in ("sgd", "lion")},
}
VECTORS = re.compile(r"\sv(?!mov|broadcast|xor)\w+ps\s.*%ymm")


@cache
def root_of_one_number():
    """What numba calls for one square root, as after the sum of a row: nothing, or with older versions libm."""
    root = numba.njit(lambda x: np.sqrt(x))
    root(F32(2)), root(2.0)
    return set(LIBM.findall("".join(root.inspect_asm().values())))


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_no_libm_but_a_logarithm_a_row(op):
    assert set(LIBM.findall(symbols(op.name, "optimized"))) - root_of_one_number() == FEW.get(op.name, set())


def test_libm_is_seen():
    assert set(LIBM.findall(symbols("gelu_forward", "vanilla"))) == {"tanhf"}


@avx2
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_hot_loops_are_vector_code(op):
    loops = [loop for loop in innermost_loops(assembly(op.name, "optimized")) if VECTORS.search(loop)]
    assert loops
    for loop in loops:
        assert not re.search(r"\scall", loop), loop
        assert not re.search(r"\svcvt\w*2[ps]d\s", loop), f"float64 in a loop:\n{loop}"


@avx2
def test_a_call_in_a_loop_is_seen():
    assert any(re.search(r"\scall", loop) for loop in innermost_loops(assembly("gelu_forward", "vanilla")))


# NaN and infinity -----------------------------------------------------------------------------------------------------


def call(op, given, sizes):
    kernel, args = KERNELS[op.name, "optimized"], []
    for a in op.args:
        args += [given[a.name], False] if a.kind == "acc" else [given[a.name]]
    kernel.compile()
    poison = {"float32": np.nan, "int32": 2**30}
    kernel.function(*args, *(np.full(s.elements(sizes), poison[s.dtype], s.dtype) for s in kernel.scratch))
    return {a.name: given[a.name] for a in op.written}


def prepared(op):
    """Arguments in which the first and the last element of every input matter."""
    on = case(op, SIZES)
    given = arguments(op, on, np.random.default_rng(0))
    for a in op.arrays:
        if a.kind == "index":
            ids = given[a.name]
            ids[ids < 0] = 1
            ids.flat[0], ids.flat[-1] = 0, a.below(on.sizes) - 1
    # a cap makes an infinite score finite
    given |= {name: type(given[name])(0) for name in ("window", "cap") if name in given}
    if "position" in given:  # behind the first of the cache, which is read then
        given["position"] = on.sizes["S"] - on.sizes["T"] if "S" in on.sizes else given["position"]
    return on, given


INPUTS = [(op, a.name) for op in OPS for a in op.args if a.kind in ("in", "state") and a.dtype == "float32"]


@pytest.mark.parametrize(("B", "alone"), [(1, True), (3, False)])
@pytest.mark.parametrize("op", [ops.attention_decode, ops.gqa_decode], ids=str)
def test_few_queries_are_right_on_one_thread_and_on_all(op, B, alone):
    found = case(op, {"B": B, "T": 15, "C": 384, "NH": 6, "NKV": 2} if op is ops.gqa_decode else MHA | {"B": B})
    assert (8 * B * 15 * 128 * found.sizes["S"] < SMALL) is alone
    assert check(KERNELS[op.name, "optimized"], found).verdict == "right"


@pytest.mark.parametrize("T", [9, 16, 130])
@pytest.mark.parametrize("name", ["gqa_forward", "gqa_backward", "gqa_decode"])
def test_attention_is_that_of_key_heads_repeated(name, T):
    """Key heads that are repeated for their query heads give the same bits; dk and dv are sums in the heads' order."""
    op, rep = ops.ALL[name], 3
    grouped = case(op, {"B": 2, "T": T, "C": 6 * 33, "NH": 6, "NKV": 2, "S": T + 70}).sizes
    given = arguments(op, Case(grouped), np.random.default_rng(0))
    if "position" in given:
        given["position"] = 70  # more keys than a group takes at a time

    def repeated(x):
        if x.ndim == 4:
            return np.repeat(x, rep, axis=1)
        return np.repeat(x.reshape(2, T, 2, 33), rep, axis=2).reshape(2, T, -1)

    keys = {n: repeated(given[n]) for n in ("k", "v", "dk", "dv", "keys", "values") if n in given}
    single = {n: x if np.isscalar(x) else x.copy() for n, x in given.items()} | keys
    got, want = call(op, given, dict(grouped)), call(op, single, dict(grouped) | {"NKV": 6})
    for n, x in want.items():
        if n in ("dk", "dv"):
            heads = x.reshape(2, T, 2, rep, 33)
            x = (heads[:, :, :, 0] + heads[:, :, :, 1] + heads[:, :, :, 2]).reshape(2, T, -1)
        elif x.ndim == 4:
            x = x[:, ::rep]
        assert np.array_equal(got[n], x), n


MHA = {"T": 15, "C": 128, "NH": 2}
READ = {
    **{(f"{op}_decode", name): (0,) for op in ("attention", "gqa") for name in ("keys", "values")},  # the end is new
    **{(op.name, "copy"): () for op in OPS if op.name.startswith("embedding_update")},  # it is written alone
    **dict.fromkeys([("rope_decode", "cos"), ("rope_decode", "sin")], (-1,)),  # the first positions lie before
    **{(f"rope_{way}", name): (0,) for way in ("forward", "backward") for name in ("cos", "sin")},  # examples are short
    ("embedding_forward", "wpe"): (0,),
}
"""Of the first element and the last, those that are read, where it is not both."""
RIGHTLY_FINITE = {("gqa_forward", "k")} | {(f"{op}_backward", "lse") for op in ("cross_entropy", "attention", "gqa")}


@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=str)
@pytest.mark.parametrize(("op", "name"), INPUTS, ids=[f"{op.name}-{name}" for op, name in INPUTS])
def test_what_is_not_finite_shows(op, name, bad):
    if bad == np.inf and (op.name, name) in RIGHTLY_FINITE:
        pytest.skip("the formula makes it zero")
    for where in READ.get((op.name, name), (0, -1)):
        on, given = prepared(op)
        given[name].flat[where] = bad
        with np.errstate(invalid="ignore"):
            found = call(op, given, dict(on.sizes))
        assert any(not np.isfinite(x).all() for x in found.values()), (op.name, name, where)


@pytest.mark.parametrize("spike", [40, 1000, 1e30])
@pytest.mark.parametrize("at", [3, 290, 300])
def test_a_maximum_that_the_sample_misses(spike, at):
    """The row's first 256 numbers, which stand for its maximum, are far below it."""
    x = np.linspace(-1, 1, 301).astype(F32)[None].copy()
    x[0, at] = spike = F32(spike)
    sizes, want = {"BT": 1, "V": 301}, np.exp(x.astype(np.float64) - np.float64(spike))
    out = call(ops.softmax_forward, {"out": np.empty_like(x), "inp": x}, sizes)["out"]
    np.testing.assert_allclose(out, want / want.sum(), rtol=2e-6, atol=1e-37)
    given = {n: np.full(1, np.nan, F32) for n in ("loss", "losses", "lse")}
    given |= {"logits": x, "targets": np.int32([at]), "ignore_index": -1}
    lse = call(ops.cross_entropy_forward, given, sizes)["lse"]
    np.testing.assert_allclose(lse[0], spike + np.log(want.sum()), rtol=1e-6)


@numba.njit
def shuffle(out, x, n):
    """Partial loads and stores, reductions, a transposition."""
    v = lanes.load_some(x, 0, n)
    lanes.store(out, 0, v)
    lanes.store_some(out, LANES, lanes.spread(F32(7)), n)
    lanes.store(out, 2 * LANES, lanes.select_some(n, v, lanes.spread(F32(-1))))
    out[3 * LANES] = lanes.sum_lanes(v)
    out[3 * LANES + 1] = lanes.max_lanes(v)
    lanes.transpose(out, 4 * LANES, LANES, x, 0, LANES, F32(2))


@pytest.mark.parametrize("n", [-(2**32) + 3, -1, 0, 1, LANES - 1, LANES, LANES + 1, 2**40])
def test_part_of_a_vector(n):
    x, out = np.arange(1, LANES * LANES + 1, dtype=F32), np.zeros((4 + LANES) * LANES, F32)
    shuffle(out, x, n)
    m = min(max(n, 0), LANES)
    first = np.arange(LANES) < m
    assert np.array_equal(out[:LANES], np.where(first, x[:LANES], 0))
    assert np.array_equal(out[LANES : 2 * LANES], np.where(first, 7, 0))
    assert np.array_equal(out[2 * LANES : 3 * LANES], np.where(first, x[:LANES], -1))
    assert (out[3 * LANES], out[3 * LANES + 1]) == (m * (m + 1) // 2, m)
    assert np.array_equal(out[4 * LANES :].reshape(LANES, LANES), 2 * x.reshape(LANES, LANES).T)


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
def test_which_side_of_a_product_is_packed_changes_no_bit(half):
    """Of many tokens the weight is packed, of few the tokens."""
    kind, prefers, M, K, N = ml_dtypes.bfloat16 if half else F32, PRODUCTS[half].prefers, 200, 70, 45
    types = dict.fromkeys(("out", "inp", "weight"), "bfloat16") if half else {}
    forward = KERNELS["matmul_forward", "optimized"].of(types)
    forward.compile()
    rng = np.random.default_rng(0)
    inp, weight = (rng.standard_normal(shape, F32).astype(kind) for shape in ((M, K), (N, K)))
    bias, outs = rng.standard_normal(N, F32), []
    for tokens in (M, 20):
        out, work = np.zeros((tokens, N), kind), forward.work({"BT": tokens, "C": K, "OC": N}).values()
        forward.direct().function(out, inp[:tokens], weight, bias, *(np.zeros(n, kind) for n, kind in work))
        outs.append(out[:20])
    words = K // 2 if half else K
    assert prefers.py_func(M, words, N)
    assert not prefers.py_func(20, words, N)
    np.testing.assert_array_equal(*outs)


@pytest.mark.parametrize(("M", "N", "C"), [(300, 9, 77), (130, 40, 5), (129, 70, 32)])
@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["matmul_backward_weight", "matmul_update"])
def test_a_gradient_of_few_rows_or_columns(name, half, M, N, C):
    """As an adapter's are: the other side is packed panel by panel, and the product may be transposed."""
    assert is_thin.py_func(M, N, C)
    kernel = KERNELS[name, "optimized"]
    types = {n: "bfloat16" for n in ("dout", "inp", "copy") if half and n in kernel.op.params}
    assert check(kernel, Case({"BT": M, "OC": N, "C": C}, types=types)).verdict == "right"


@pytest.mark.parametrize("threads", [1, 2, 16, 64])
@pytest.mark.parametrize(("most", "unit"), [(48, 1), (48, 16), (112, 16), (384, 32)])
@pytest.mark.parametrize("total", [1, 5, 32, 128, 288, 511, 512, 576, 768, 3072, 50257])
def test_pieces_of_a_product_are_even_and_half_of_them_are_half_of_it(total, most, unit, threads):
    count = pieces(total, most, unit, 1, threads)
    edges = [piece(i, count, total, unit) for i in range(count + 1)]
    assert (edges[0], edges[-1]) == (0, total)
    units = [-(-(b - a) // unit) for a, b in pairwise(edges)]
    assert all(edge % unit == 0 for edge in edges[:-1])
    assert min(units) >= 1
    assert max(units) <= min(most // unit, min(units) + 1)
    assert largest(count, total, unit) == unit * max(units)
    for i in range(1, count):
        assert abs(sum(units[:i]) - sum(units) * i / count) < 1
    if count < min(-(-total // unit), 8 * threads):  # as many for each thread as for the next, unless units run out
        assert count % (2 * threads) == 0


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
@pytest.mark.parametrize("tokens", [1, 255, 256, 257, 600, 768, 2048, 4097])
def test_tokens_are_cut_into_as_many_pieces_for_each_thread(tokens, threads):
    count, needed = token_pieces(tokens, 256, threads), -(-tokens // 256)
    assert largest(count, tokens, 16) <= 256
    assert count % threads == 0 if needed >= threads else count == needed
    assert count < needed + threads

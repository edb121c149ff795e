"""The declarations, and their float64 references: these are judged by finite differences and by PyTorch."""

import inspect
import json
import re
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given as given_any
from hypothesis import strategies as st

from cpuopt import ops
from cpuopt.check.cases import ODD, ONE_ROW, SIZES, SMALL, arguments, case, cases, reference, widened
from cpuopt.check.gradient import check_gradient
from cpuopt.errors import UserError
from cpuopt.ops.declaration import BT, OC, B, C, N, Op, T, acc, as_dim, inp, merge, scalar, state

EVERY = pytest.mark.parametrize("op", ops.ALL.values(), ids=list(ops.ALL))
BACKWARD = [op for op in ops.ALL.values() if op.inverts]
EVERY_BACKWARD = pytest.mark.parametrize("op", BACKWARD, ids=[op.name for op in BACKWARD])


# --- references against finite differences ----------------------------------------


@EVERY_BACKWARD
@pytest.mark.parametrize("sizes", [SMALL, ODD, ONE_ROW], ids=["small", "odd", "one_row"])
def test_backward_references_are_the_derivatives(op, sizes):
    assert max(r.error for r in check_gradient(op, case(op, sizes))) < 1e-8


@pytest.mark.parametrize("kind", ["one counts", "a class is ignored"])
def test_ignored_targets_have_no_gradient(kind):
    op = ops.cross_entropy_backward
    assert max(r.error for r in check_gradient(op, case(op, SMALL, kind))) < 1e-8


WRONG = [(op, op.written[0].name) for op in BACKWARD]


@pytest.mark.parametrize(("op", "name"), WRONG, ids=[f"{op.name}-{n}" for op, n in WRONG])
def test_a_wrong_derivative_is_noticed(op, name):
    def wrong(given):
        found = reference(op, dict(given))
        return {**found, name: found[name] * (1 + 1e-3)}

    results = {r.argument: r for r in check_gradient(op, pullback=wrong)}
    assert results[name].error > 1e-5
    assert results[name].verdict == "wrong"
    assert all(r.verdict == "right" for n, r in results.items() if n != name)


# --- references against PyTorch ---------------------------------------------------

GOLDEN = Path(__file__).parent / "golden" / "ops.npz"


@cache
def golden():
    """Of each op and case: what went in and what came out."""
    found = {}
    with np.load(GOLDEN) as values:
        for key in values:
            op, name, kind, argument = key.split("/")
            found.setdefault((op, name), {"in": {}, "out": {}})[kind][argument] = values[key]
    return found


def golden_error(op, name, factor=1.0):
    """How far a reference is from PyTorch's float64, relative to the largest number of an argument."""
    values, params = golden()[op.name, name], inspect.signature(op.reference).parameters
    shapes = {n: np.full(x.shape, np.nan) for n, x in values["out"].items()}
    args = widened(shapes | {n: x if x.ndim else x.item() for n, x in values["in"].items()})
    usual = {n: None if p.default is p.empty else p.default for n, p in params.items()}
    made, errors = op.reference(**{n: args.get(n, x) for n, x in usual.items()}), [0.0]
    for n, want in values["out"].items():
        assert made[n].shape == want.shape
        far, size = np.abs(factor * made[n] - want).max(), np.abs(want).max()
        errors.append(float(far / size if size else far and np.inf))
    return max(errors)


@pytest.mark.parametrize(("op", "name"), [pytest.param(ops.ALL[op], name, id=f"{op}-{name}") for op, name in golden()])
def test_references_agree_with_pytorch(op, name):
    assert golden_error(op, name) < 1e-11
    nonzero = any(np.any(x) for x in golden()[op.name, name]["out"].values())
    assert not nonzero or golden_error(op, name, 1 + 1e-9) > 1e-11


def uncompared():
    """The ops whose source names PyTorch, or transformers, and which nothing compares with it."""
    apart = {name for name in ops.ALL if name.endswith("_decode")}  # compared with the forward that they continue
    apart |= {"sgd"}  # compared with its source's formulas in test_optimizers.py
    apart |= {"accumulate", "copy", "sumsq_blocks"}  # compared with NumPy below
    named = {name for name, op in ops.ALL.items() if re.search(r"\b(torch|transformers)\b", op.source)}
    return named - apart - {op for op, _ in golden()}


def test_every_op_that_pytorch_has_is_compared_with_it(monkeypatch):
    assert uncompared() == set()
    assert len({op for op, _ in golden()} & ops.ALL.keys()) == len({op for op, _ in golden()}) > 40
    assert json.loads(GOLDEN.with_suffix(".json").read_text())["torch"].startswith("2.")
    monkeypatch.setitem(ops.ALL, "square", ops.ALL["gelu_forward"])
    assert uncompared() == {"square"}


def test_what_ranks_compute_is_numpys():
    x, y = np.random.default_rng(0).standard_normal((2, 3, 5))
    np.testing.assert_array_equal(ops.accumulate.reference(x, y)["total"], np.add(x, y))
    np.testing.assert_array_equal(ops.copy.reference(x)["out"], np.copy(x))
    np.testing.assert_allclose(ops.sumsq_blocks.reference(x)["out"], np.linalg.norm(x, axis=1) ** 2, rtol=1e-14)


LIMITS = [{}, {"window": 3, "cap": 1.5}]


@pytest.mark.parametrize("limits", LIMITS, ids=["all", "limited"])
def test_decoding_is_the_forward_of_the_last_tokens(limits):
    rng = np.random.default_rng(0)
    B, T, C, NH, new = 2, 7, 6, 3, 3
    tokens, wte, wpe = rng.integers(0, 11, (B, T)), rng.standard_normal((11, C)), rng.standard_normal((T, C))
    last = ops.embedding_decode.reference(tokens[:, -new:], wte, wpe, T - new)["out"]
    np.testing.assert_allclose(last, ops.embedding_forward.reference(tokens, wte, wpe)["out"][:, -new:], rtol=1e-12)
    qkv = rng.standard_normal((B, T, 3 * C))
    want = ops.attention_forward.reference(qkv=qkv, lse=np.empty((B, NH, T)), **limits)
    _, k, v = (x.reshape(B, T, NH, C // NH).transpose(0, 2, 1, 3) for x in np.split(qkv, 3, axis=-1))
    keys, values = (np.zeros((B, NH, T + 2, C // NH)) for _ in range(2))
    keys[:, :, : T - new], values[:, :, : T - new] = k[:, :, :-new], v[:, :, :-new]
    cache = {"keys": keys, "values": values, "position": T - new}
    got = ops.attention_decode.reference(qkv=qkv[:, -new:], **cache, **limits)
    np.testing.assert_allclose(got["out"], want["out"][:, -new:], rtol=1e-12)
    np.testing.assert_array_equal(got["keys"][:, :, :T], k)


@pytest.mark.parametrize("limits", LIMITS, ids=["all", "limited"])
def test_decoding_a_llama_is_the_forward_of_the_last_tokens(limits):
    rng = np.random.default_rng(0)
    B, T, NH, NKV, HS, new = 2, 7, 6, 2, 4, 3
    tokens, wte = rng.integers(0, 11, (B, T)), rng.standard_normal((11, 5))
    last = ops.embedding_decode.reference(tokens[:, -new:], wte, None, T - new)["out"]
    np.testing.assert_array_equal(last, ops.embedding_forward.reference(tokens, wte, None)["out"][:, -new:])
    x, cos, sin = (rng.standard_normal(s) for s in ((B, T, NH * HS), (T + 2, HS // 2), (T + 2, HS // 2)))
    last = ops.rope_decode.reference(x[:, -new:], cos, sin, T - new)["out"]
    np.testing.assert_allclose(last, ops.rope_forward.reference(x, cos, sin)["out"][:, -new:], rtol=1e-12)
    q, k, v = (rng.standard_normal((B, T, n * HS)) for n in (NH, NKV, NKV))
    want = ops.gqa_forward.reference(q=q, k=k, v=v, lse=np.empty((B, NH, T)), **limits)["out"]
    cache = {name: np.zeros((B, NKV, T + 2, HS)) for name in ("keys", "values")}
    for at in (slice(0, T - new), slice(T - new, T)):
        part = {"q": q[:, at], "k": k[:, at], "v": v[:, at]}
        made = ops.gqa_decode.reference(**cache, **part, position=at.start, **limits)
        cache = {name: made[name] for name in cache}
        np.testing.assert_allclose(made["out"], want[:, at], rtol=1e-12)
    np.testing.assert_array_equal(cache["keys"][:, :, :T], k.reshape(B, T, NKV, HS).transpose(0, 2, 1, 3))


def test_no_loss_where_no_target_counts():
    made = {}
    for op in (ops.cross_entropy_forward, ops.cross_entropy_backward):
        made |= reference(op, arguments(op, case(op, SMALL, "none counts"), np.random.default_rng(0)))
    assert np.isnan(made["loss"]).all()
    assert not made["losses"].any() | made["dlogits"].any()


# --- declarations -----------------------------------------------------------------


@EVERY
def test_a_reference_gives_what_is_written(op):
    assert inspect.signature(op.reference).parameters.keys() <= op.by_name.keys()
    for on in [case(op, sizes) for sizes in SIZES[:4]]:
        args = widened(arguments(op, on, np.random.default_rng(0)))
        made = op.reference(**{n: args[n] for n in inspect.signature(op.reference).parameters})
        assert made.keys() == {a.name for a in op.written}
        for a in op.written:
            assert made[a.name].shape == tuple(d(on.sizes) for d in a.shape)
            assert made[a.name].dtype == np.float64


@EVERY
def test_a_declaration_is_complete(op):
    sizes = case(op, SMALL).sizes
    assert op.flops(sizes) > 0 or op in (ops.copy, ops.expand_forward, ops.transpose_forward)
    assert all((op.label, op.source))
    assert op.flops.symbols <= sizes.keys()
    assert all(a.reduces.symbols <= sizes.keys() and a.reduces(sizes) >= 1 for a in op.written)
    assert all((a.below is not None) == (a.kind == "index") for a in op.args)
    replaced = {"copy"} if op.fuses and op.fuses[0].updates else set()  # it stands where the op reads its weight
    written = [a.kind in ("out", "acc", "state") for a in op.args if a.name not in replaced]
    assert written == sorted(written, reverse=True)  # what is written comes first


@EVERY_BACKWARD
def test_a_backward_is_filled_by_name(op):
    assert op.inverts
    assert op in op.inverts.backwards
    forward = op.inverts.by_name
    for a in op.args:
        of = a.name if a.name in forward else a.name.removeprefix("d")
        assert (forward[of].shape, a.kind == "acc") == (a.shape, a.name not in forward and forward[of].kind == "in")


@EVERY
def test_shapes_are_bound(op):
    for on in cases(op):
        shapes = {a.name: None if a.name in on.absent else tuple(d(on.sizes) for d in a.shape) for a in op.arrays}
        bound = op.bind(shapes)
        assert bound.items() <= dict(on.sizes).items()
        assert on.absent or bound == on.sizes


# --- binding, and what it says ----------------------------------------------------


Q = {"q": (2, 5, 12), "k": (2, 5, 6), "lse": (2, 4, 5)}
ROWS = {"out": (2, 3, 4), "mean": (6,), "rstd": (6,), "inp": (6, 4)}


@pytest.mark.parametrize(
    ("op", "shapes", "given", "said"),
    [
        (
            *(ops.matmul_forward, {"out": (10, 3072), "inp": (10, 768), "weight": (768, 768)}, {}),
            "'weight' has shape (768, 768); expected (OC, C) = (3072, 768), "
            "because 'out' fixes OC = 3072 and 'inp' fixes C = 768",
        ),
        (
            *(ops.layernorm_forward, ROWS | {"weight": (1, 4), "bias": (4,)}, {}),
            "'weight' has shape (1, 4); expected (C) = (4,), because 'out' fixes C = 4",
        ),
        (
            *(ops.attention_forward, {"qkv": (2, 5, 9), "lse": (2, 4, 5)}, {"NH": 3}),
            "'lse' has shape (2, 4, 5); expected (B, NH, T) = (2, 3, 5), because the call fixes NH = 3",
        ),
        (*(ops.attention_forward, {"qkv": (2, 5, 10)}, {}), "'qkv' has shape (2, 5, 10); expected (B, T, 3*C)"),
        (
            *(ops.gqa_forward, Q | {"v": (2, 5, 9)}, {}),
            "'v' has shape (2, 5, 9); expected (B, T, HS*NKV) = (2, 5, 6), because 'lse' fixes B = 2 and 'lse' fixes "
            "T = 5 and 'q' fixes HS = 3 and 'k' fixes NKV = 2",
        ),
    ],
    ids=["they disagree", "wrong number of axes", "given size", "no multiple", "in a product"],
)
def test_shapes_that_are_refused(op, shapes, given, said):
    with pytest.raises(UserError) as caught:
        op.bind(shapes, **given)
    assert str(caught.value).startswith(f"{op.name}: argument {said}")
    assert said.endswith("3*C)") or str(caught.value).endswith(said)


def test_sizes_that_are_given_or_found_once_the_others_are_known():
    assert ops.attention_forward.bind({"qkv": (2, 5, 9)}, NH=3) == {"B": 2, "T": 5, "C": 3, "NH": 3}
    assert ops.gqa_forward.bind(Q) == {"B": 2, "T": 5, "NH": 4, "HS": 3, "NKV": 2}


def test_leading_axes_are_merged():
    assert ops.gelu_forward.bind({"out": (2, 3, 4), "inp": (24,)}) == {"N": 24}
    shapes = {"out": (2, 3, 5), "inp": (6, 4), "weight": (5, 4), "bias": None}
    assert ops.matmul_forward.bind(shapes) == {"BT": 6, "OC": 5, "C": 4}


@given_any(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(1, 6))
def test_merging_keeps_all_elements(leading, last):
    assert merge(inp("x", BT, C), (*leading, last)) == (prod(leading), last)
    assert merge(inp("x", N), (*leading, last)) == (prod(leading) * last,)
    assert (merge(inp("x", B, T), (*leading, last)), merge(scalar("x"), ())) == ((*leading, last), ())


# --- sizes ------------------------------------------------------------------------

SYMBOLS = {"B": B, "C": C, "OC": OC}
dims = st.recursive(
    st.one_of(st.sampled_from([*SYMBOLS.values()]), st.integers(0, 5).map(as_dim)),
    lambda d: st.one_of(st.tuples(d, d).map(lambda p: p[0] + p[1]), st.tuples(d, d).map(lambda p: p[0] * p[1])),
    max_leaves=6,
)
sizes_of = st.fixed_dictionaries({name: st.integers(1, 9) for name in SYMBOLS})


@given_any(dims, dims, dims, sizes_of)
def test_sizes_compute_like_numbers(a, b, c, n):
    assert ((a + b)(n), (a * b)(n), (2 + a * 3)(n), a + b) == (a(n) + b(n), a(n) * b(n), 2 + 3 * a(n), b + a)
    assert (a * (b + c), hash(a * b), eval(str(a), {}, n)) == (a * b + a * c, hash(b * a), a(n))
    assert a.symbols <= n.keys()


@given_any(st.sampled_from(list(SYMBOLS)), st.integers(1, 9), st.integers(1, 99))
def test_a_size_is_solved_for(name, factor, n):
    size = SYMBOLS[name]
    assert (factor * size).solve(factor * n) == (factor * size + 1).solve(factor * n + 1) == (name, n)
    assert (factor * size).solve(factor * n + 1) is None or factor == 1
    assert (size + n + 1).solve(n) is (size * size).solve(n) is (N * size).solve(n) is None
    assert (2 * N * size).solve(2 * factor * n, {"N": factor}) == (name, n)
    assert (size * N).solve(n, {"N": 0}) is None


# --- costs ------------------------------------------------------------------------


def test_bytes_count_each_array_once_and_twice_what_is_read_and_written():
    op = Op(
        "some_backward", acc("da", N), acc("db", C), state("s", C), inp("x", N), inp("y", C, optional=True),
        label="Some", flops=1 * N, reference=dict, source="none",
    )  # fmt: skip
    sizes = {"N": 10, "C": 3}
    assert op.bytes(sizes, {}) == 4 * (10 + 3 + 2 * 3 + 10 + 3)
    assert op.bytes(sizes, {"da": True, "db": False}) == 4 * (2 * 10 + 3 + 2 * 3 + 10 + 3)
    assert op.bytes(sizes, {}, {"y", "db"}) == 4 * (10 + 2 * 3 + 10)
    assert ops.embedding_forward.bytes({"B": 2, "T": 3, "C": 4, "V": 50257}, {}, {"starts"}) == 4 * (3 * 24 + 6)


@pytest.mark.parametrize("op", [op for op in ops.ALL.values() if "window" in op.without and not op.moves], ids=str)
@pytest.mark.parametrize("window", [0, 1, 5, 12, 13, 99])
def test_flops_of_attention_count_the_pairs_in_the_window(op, window):
    sizes = {"B": 2, "T": 13, "C": 12, "NH": 3, "HS": 4, "NKV": 1}
    pairs = sum(1 for t in range(13) for t2 in range(t + 1) if not window or t2 > t - window)
    assert op.work({**sizes, "window": window}) * (13 * 14 // 2) == op.work(sizes) * pairs


@pytest.mark.parametrize(("op", "heads"), [(ops.attention_decode, 3), (ops.gqa_decode, 1)], ids=str)
def test_decoding_counts_the_keys_in_the_window(op, heads):
    sizes = {"B": 2, "T": 1, "NH": 3, "HS": 4, "NKV": 1, "S": 20}
    types, beside = dict.fromkeys(("keys", "values"), "bfloat16"), op.bytes(sizes, {}, ("keys", "values"))
    for window, read in ((0, 20), (1, 1), (7, 7), (20, 20), (99, 20)):
        given = {**sizes, "window": window}
        assert op.work(given) == 2 * 2 * (2 * 3 * 4) * read
        assert op.bytes(given, {}, types=types) == beside + 2 * 2 * (2 * heads * 4) * (read + 1)

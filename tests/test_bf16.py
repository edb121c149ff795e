"""bfloat16: conversions, products by the instruction and by two multiply-adds, the pass, and training with it."""

import json
import zlib
from dataclasses import replace

import numpy as np
import pytest
from small_models import Parts
from verbs import ROOT, process

import cpuopt
from cpuopt import Choice, models, nn, ops
from cpuopt import functional as F
from cpuopt.building import build
from cpuopt.check.cases import ODD, Case, arguments, case
from cpuopt.check.check import check
from cpuopt.engine import Engine
from cpuopt.kernels import registry
from cpuopt.kernels.compile import jit
from cpuopt.kernels.toolkit import threads
from cpuopt.kernels.toolkit.epilogue import copy_weights
from cpuopt.kernels.toolkit.lanes import load, store
from cpuopt.kernels.toolkit.micro.records import MICRO_KERNELS
from cpuopt.kernels.toolkit.simd import HOST, LANES, MR, NR, at, product_of
from cpuopt.library import instruments
from cpuopt.ops.storage import TYPES
from cpuopt.program.fuse import usual

BF16 = TYPES["bfloat16"].dtype
HALF = {"inp": "bfloat16", "weight": "bfloat16"}
F32 = np.float32


@jit.helper()
def convert(to, x):
    for i in range(len(to)):
        to[i] = x[i]


@jit.helper()
def convert_vectors(to, x):
    for i in range(0, len(to), LANES):
        store(to, i, load(x, i))


convert_past_the_caches = jit.helper()(lambda to, x: copy_weights(to, x, True))


def floats(n=1 << 18):
    """Numbers of all sizes, halves of units in the last place of a bfloat16, and those that are not finite."""
    some = np.random.default_rng(0).integers(0, 1 << 32, n, dtype=np.uint32)
    some[: n // 4] = some[: n // 4] & 0xFFFF0000 | 0x8000
    return np.concatenate([some.view(F32), np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 3e38, 3.4e38] * 8, F32)])


def at_a_line(n, dtype=BF16):
    """Room for 128 elements more than n, and where in it the second or third cache line begins."""
    room = np.full(n + 128, 7, dtype)
    return room, -room.ctypes.data % 64 // room.itemsize + 32


WAYS = [(convert, 0), (convert_vectors, 0), (convert_past_the_caches, 0), (convert_past_the_caches, 1)]


@pytest.mark.parametrize(("by", "beyond"), WAYS)
def test_every_number_is_rounded_as_ml_dtypes_rounds_it(by, beyond):
    x = floats()
    x = x[: len(x) // LANES * LANES]
    room, first = at_a_line(len(x))
    got = room[first + beyond : first + beyond + len(x)]
    by(got, x)
    with np.errstate(invalid="ignore"):
        want = x.astype(BF16)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(x))
    some = ~np.isnan(x)
    np.testing.assert_array_equal(got.view(np.uint16)[some], want.view(np.uint16)[some])


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("n", [1, 31, 32, 33, 96, 768])
def test_a_row_of_weights_alone_is_copied(n, dtype):
    room, first = at_a_line(n, dtype)
    copy_weights(room[first : first + n], np.arange(n, dtype=F32), True)
    want = np.full(n + 128, 7, dtype)
    want[first : first + n] = np.arange(n, dtype=F32)
    np.testing.assert_array_equal(room, want)


@pytest.mark.parametrize("by", [convert, convert_vectors])
def test_every_bfloat16_is_read_exactly(by):
    every = np.arange(1 << 16, dtype=np.uint16).view(BF16)
    got = np.empty(len(every), F32)
    by(got, every)
    np.testing.assert_array_equal(got.view(np.uint32), every.view(np.uint16).astype(np.uint32) << 16)


def multiplied(tile, a, b, rows=MR):
    """The sums of a micro-kernel: of words a (rows, K) and b (K, NR)."""
    if not tile.dot:  # a panel with lines of odd halves and of even ones
        bits = b.view(np.uint32)[:, None]
        b = np.ascontiguousarray(np.concatenate([bits & 0xFFFF0000, bits << 16], 1)).view(F32)
    micro = product_of(HOST.vectors, pairs=True, tile=tile)

    @jit.helper()
    def run(c, a, b, rows):
        K = a.shape[1]
        micro(rows, at(a, 0), K, 1, at(b, 0), NR, at(c, 0), NR, K, False, (at(b, 0), 0, 0))

    c = np.zeros((rows, NR), F32)
    run(c, a, b, rows)
    return c


def words_of(x):
    return np.ascontiguousarray(x).view(F32)


def drawn_words(rng, K=33):
    """Words with exponents so close that float64 holds a product and a sum exactly; and what they are."""
    a, b = (rng.uniform(1, 2, (n, 2 * K)) * 2.0 ** rng.integers(-3, 4, (n, 2 * K)) for n in (MR, NR))
    a, b = ((x * rng.choice([-1, 1], x.shape)).astype(BF16) for x in (a, b))
    panel = np.ascontiguousarray(words_of(b).T)  # (K, NR)
    return a.astype(np.float64), b.astype(np.float64), words_of(a), panel


def defined(a, b):
    """The definition: of each word the odd product is added first, then the even one, each sum rounded to float32."""
    c = np.zeros((len(a), len(b)), F32)
    for k in range(0, a.shape[1], 2):
        for at_k in (k + 1, k):
            c = (a[:, at_k, None] * b[None, :, at_k] + c).astype(F32)
    return c


TILES = [replace(HOST, dot=None), *([HOST] if HOST.dot else [])]


@pytest.mark.parametrize("tile", TILES, ids=lambda t: "instruction" if t.dot else "two multiply-adds")
def test_a_product_has_the_bits_of_its_definition(tile):
    a, b, x, panel = drawn_words(np.random.default_rng(2))
    got, want = multiplied(tile, x, panel), defined(a, b)
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))
    swapped = defined(*(x.reshape(len(x), -1, 2)[:, :, ::-1].reshape(x.shape) for x in (a, b)))
    assert (got != swapped).any()  # the order of the two is part of the definition


def right(out, inp, weight, bias):
    out[...] = (inp.astype(np.float64) @ weight.astype(np.float64).T + (bias if len(bias) else 0)).astype(F32)


def truncating(out, inp, weight, bias):
    total = (inp.astype(np.float64) @ weight.astype(np.float64).T + (bias if len(bias) else 0)).astype(F32)
    out[...] = (total.view(np.uint32) & 0xFFFF0000).view(F32)


def summed_in_bf16(out, inp, weight, bias):
    total = np.zeros(out.shape, BF16)
    for k in range(inp.shape[1]):
        total = (total.astype(F32) + inp[:, k, None].astype(F32) * weight[None, :, k].astype(F32)).astype(BF16)
    out[...] = total.astype(F32) + (bias if len(bias) else 0)


def even_and_odd_exchanged(out, inp, weight, bias):
    other = np.arange(inp.shape[1] // 2 * 2) ^ 1
    right(out, inp[:, [*other, *range(len(other), inp.shape[1])]], weight, bias)


@pytest.mark.parametrize(("function", "verdict"), [
    (right, "right"), (truncating, "marginal"), (summed_in_bf16, "wrong"), (even_and_odd_exchanged, "wrong"),
])  # fmt: skip
def test_the_tolerance_of_bfloat16_is_one_rounding(function, verdict):
    on = case(ops.matmul_forward, ODD, types={**HALF, "out": "bfloat16"})
    result = check(registry.Kernel(ops.matmul_forward, "mutant", function, narrow=True), on, threads=(1,))
    assert result.verdict == verdict, result
    assert (result.ratio > 1) == (function is not right)


def built_of(name="gpt2-tiny", two_pass=False, dtype="bfloat16", **how):
    """The program of `engine_of`, without its kernels."""
    config, how = models.parse(name), {"choice": Choice("optimized")} | how
    return build(config.module(), config.specs(4, 16), dtype=dtype, fuse=usual("optimized", two_pass), **how)


def engine_of(name="gpt2-tiny", B=4, T=16, dtype="bfloat16", variant="optimized", two_pass=False, **how):
    config, choice = models.parse(name), how.pop("choice", Choice(variant))
    how = {"threads": 2, "seed": 0, "progress": lambda *a: None, "fuse": usual(variant, two_pass)} | how
    return Engine.from_options(config.module(), config.specs(B, T), choice=choice, dtype=dtype, **how)


def batches(n, B=4, T=16, V=256):
    drawn = np.random.default_rng(4).integers(0, V, (n, B, T + 1)).astype(np.int32)
    return [{"tokens": x[:, :-1], "targets": x[:, 1:]} for x in drawn]


def losses_of(engine, n=6, **how):
    return [engine.step(lr=1e-3, **how, **batch).loss for batch in batches(n)]


def weights_of(engine):
    engine.collect()
    return {n: p.tobytes() for n, p in engine.parameters().items()}


@pytest.mark.parametrize(("name", "variant"), [
    pytest.param("gpt2-tiny", "vanilla", marks=pytest.mark.slow), ("gpt2-tiny", "optimized"),
    ("llama-tiny", "optimized"),
])  # fmt: skip
def test_training_is_that_of_float32_to_the_rounding_of_bfloat16(name, variant):
    half, whole = (losses_of(engine_of(name, dtype=t, variant=variant)) for t in ("bfloat16", "float32"))
    assert half != whole
    np.testing.assert_allclose(half, whole, rtol=2e-3)


def test_what_products_read_is_bfloat16_and_the_rest_is_float32():
    program = built_of().program
    half = {v.name for v in program.values if v.dtype == "bfloat16"}
    assert {f"{p.name}.bfloat16" for p in program.parameters if len(p.shape) == 2 and "wpe" not in p.name} <= half
    assert not any(v.dtype == "bfloat16" for v in [*program.parameters, *program.moments, *program.outputs])
    assert {"h.0.ln_1.layernorm.out", "h.0.attn.c_attn.matmul.out", "h.0.mlp.gelu.out"} <= half
    assert {"h.0.mlp.c_fc.matmul.out", "h.0.attn.attention.out"} <= half  # read by an activation, and by a backward
    assert not any("attention.out.bfloat16" in name for name in half)
    assert not {"h.0.residual.out", "h.0.attn.c_proj.matmul.out", "h.0.ln_1.layernorm.rstd"} & half
    for call in program.calls:
        half = (call.args[a.name] for a in call.op.arrays if a.kind == "in" and "bfloat16" in a.types)
        types = {value.dtype for value in half if value}
        assert call.op is ops.copy or len(types) <= 1, call  # a product reads both operands in one type


def bits_on(threads):
    engine = engine_of(threads=threads)
    return [losses_of(engine), {n: zlib.crc32(x) for n, x in weights_of(engine).items()}]


def in_a_process(call, **environ):
    """What a function of this module gives in a process of its own."""
    code = f"import json, test_bf16; print(json.dumps(test_bf16.{call}))"
    there = {"NUMBA_NUM_THREADS": "4", "PYTHONPATH": f"{ROOT}/tests:{ROOT}"} | environ
    done = process(code=code, limit_s=3600, **there)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_bits_do_not_depend_on_threads():
    alone, *others = (bits_on(threads) for threads in (1, 2, 3))
    five = in_a_process("bits_on(5)", NUMBA_NUM_THREADS="5")  # more than this process started with
    assert [*others, five] == [alone] * 3


PARTS = [lambda x: x[3:5], lambda x: x.reshape(-1)[64:].view(np.uint32), memoryview, lambda x: x.T[1:]]


@pytest.mark.parametrize("part", PARTS)
def test_what_is_written_through_a_part_of_a_weight_is_read(part):
    """The array itself is gone, as in ``rows = engine.parameters()["wte.weight"][3:5]``."""
    name, batch, engine = "h.0.mlp.c_fc.weight", batches(1)[0], engine_of()
    kept, before = part(engine.parameters()[name]), engine.forward(**batch)
    np.asarray(kept).view(F32)[...] *= 4
    assert before != engine.forward(**batch)
    np.asarray(kept).view(F32)[...] /= 4
    assert before == engine.forward(**batch)


def copies_behind(program):
    return [c for c in program.phase("backward", "update") if c.op is ops.copy and c.args["inp"].group == "parameter"]


def test_a_weights_update_writes_its_copy():
    engine = engine_of()
    assert not copies_behind(engine.program)
    for batch in batches(3):
        engine.step(lr=1e-3, **batch)
    for call in engine.program.phase("convert"):
        got = engine.array(call.args["out"]).view(np.uint16)
        np.testing.assert_array_equal(got, engine.array(call.args["inp"]).astype(BF16).view(np.uint16), call.layer)


def test_a_kernel_that_cannot_write_a_copy_is_followed_by_one(monkeypatch):
    key = "matmul_update", "optimized"
    monkeypatch.setitem(registry.KERNELS, key, replace(registry.KERNELS[key], narrow=False))
    program = built_of().program
    copied = {c.args["out"].name: c.args["inp"].name for c in copies_behind(program)}
    assert len(copied) == 8
    assert copied.items() <= {f"{p.name}.bfloat16": p.name for p in program.parameters}.items()


@pytest.mark.parametrize("swaps", [["matmul_forward@h.0.attn.c_proj=blas"], ["*_backward*=generated"]])
def test_a_kernel_without_bfloat16_is_fed_float32(swaps):
    engine = engine_of(choice=Choice("optimized", swaps), fuse=())
    assert not any(bound.call.types for bound in engine.calls if bound.kernel.variant == "blas")
    plain = engine_of(dtype="float32", variant="vanilla")
    np.testing.assert_allclose(losses_of(engine, 3), losses_of(plain, 3), rtol=2e-3)


def test_a_frozen_head_is_read_as_its_copy():
    half, whole = (engine_of(freeze=["wte.*"], dtype=t) for t in ("bfloat16", "float32"))
    before = weights_of(half)["wte.weight"]
    np.testing.assert_allclose(losses_of(half, 3), losses_of(whole, 3), rtol=2e-3)
    assert weights_of(half)["wte.weight"] == before


def bigrams():
    """A head that reads the embedding: an evaluation and a step both need a copy of it."""

    def forward(m, tokens, targets):
        return F.cross_entropy(logits := m.head(m.wte(tokens)), targets), logits

    return Parts(forward, wte=nn.Embedding(256, 48), head=nn.Linear(48, 256, bias=False))


def test_a_copy_of_an_evaluation_is_not_that_of_a_step():
    found = []
    for dtype in ("float32", "bfloat16"):
        engine = Engine.from_options(bigrams(), models.specs(4, 16), threads=1, fuse=("classifier",), dtype=dtype)
        (batch,) = batches(1)
        found.append([*(engine.step(**batch, lr=1e-2).loss for _ in range(3)), engine.forward(**batch)])
    np.testing.assert_allclose(*found, rtol=3e-3)


def test_every_call_is_judged_at_its_own_size_and_types():
    config = models.parse("gpt2-tiny")
    engine = cpuopt.Engine(config.module(), config.specs(2, 16), dtype="bfloat16", progress=lambda *a: None)
    judged = [r for r in instruments.check(engine) if r.case.types and r.case.sizes.get("BT") == 32]
    assert {r.kernel for r in judged} >= {"matmul_forward[optimized]", "matmul_update[optimized]"}
    assert {r.verdict for r in judged} == {"right"}
    engine.step(**batches(1, 2)[0])
    assert engine.profile(steps=1).profile.steps == 1


def of(*names):
    return dict.fromkeys(names, "bfloat16")


def every_call():
    for T, C, NH in ((70, 32, 2), (37, 15, 3)):
        size = {"B": 1, "T": T, "C": C, "NH": NH}
        yield "attention_forward", size, of("qkv", "out")
        yield "attention_backward", size, of("qkv", "dout", "dqkv")
        size = {"B": 1, "T": T, "HS": C // NH, "NH": NH, "NKV": 1, "S": T + 9}
        yield "gqa_decode", size, of("q", "k", "v", "keys", "values", "out")
    for BT, C, OC in ((1, 33, 40), (37, 70, 65), (500, 64, 48)):
        size = {"BT": BT, "C": C, "OC": OC}
        yield "matmul_forward", size, of("inp", "weight", "out")
        yield "matmul_backward_input", size, of("dout", "weight", "dinp")
        yield "matmul_backward_weight", size, of("dout", "inp")


def bits_of(calls):
    """The order of sums, whether there is an instruction, and what each call writes on one thread."""
    found = [MICRO_KERNELS["bfloat16"].order, bool(HOST.dot)]
    for op, sizes, types in calls:
        kernel = registry.find(op, "optimized").of(types)
        kernel.compile()
        given, args = arguments(kernel.op, Case(sizes, types=types), np.random.default_rng(5)), []
        for a in kernel.op.args:
            args += [given[a.name], False] if a.kind == "acc" else [given[a.name]]
        work = [np.zeros(shape, TYPES[dtype].dtype) for shape, dtype in kernel.work(sizes).values()]
        threads.set_threads(1)
        kernel.direct().function(*args, *work)
        found.append(b"".join(given[a.name].tobytes() for a in kernel.op.written).hex())
    return found


@pytest.mark.slow
@pytest.mark.skipif(not HOST.dot, reason="this processor has no instruction for pairs of bfloat16")
def test_products_and_attention_have_the_same_bits_without_the_instruction():
    calls = [*every_call()]
    _, dot, *mine = in_a_process(f"bits_of({calls})", CPUOPT_AMX="off")  # whose products have an order of their own
    _, other, *theirs = in_a_process(f"bits_of({calls})", CPUOPT_TARGET="znver4")  # a tile without the instruction
    assert (dot, other, mine) == (True, False, theirs)

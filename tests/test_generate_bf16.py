"""Generation in bfloat16: its kernels, what it holds, and its logits beside those of float32."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from test_generate import CONFIGS, IDS, decoder_of, forward_of
from verbs import ran, refused

import cpuopt
from cpuopt import cli, ops
from cpuopt.check.cases import MORE, case
from cpuopt.check.check import check
from cpuopt.engine import Engine
from cpuopt.generate.decoder import BLOCKS, Decoder
from cpuopt.generate.uncached import Uncached, reader_of
from cpuopt.kernels import registry
from cpuopt.kernels.compile import jit
from cpuopt.kernels.toolkit.lanes import load, store
from cpuopt.kernels.toolkit.pairs import adder_of, load_some_words
from cpuopt.kernels.toolkit.simd import HOST, LANES
from cpuopt.models.gpt2 import GPT2
from cpuopt.ops.storage import TYPES
from cpuopt.train import samples
from cpuopt.weights import save_weights

BF16 = TYPES["bfloat16"].dtype
CONFIG, LLAMA = CONFIGS["gpt2"], CONFIGS["tied"]
F32 = np.float32
TWO = replace(HOST, dot=None)


def forward(config, weights, T, dtype):
    """The logits of all positions by one uncached forward."""
    engine = Engine(config.module(), config.specs(1, T), seed=None, train=False, dtype=dtype)
    for name, p in engine.parameters().items():
        p[...] = weights[name]
    tokens = IDS[None, :T].astype(np.int32)
    engine.forward(tokens=tokens, targets=tokens)
    return engine.array(engine.program.outputs[1])[0].astype(np.float64)


decoder_of = partial(decoder_of, dtype="bfloat16")


@pytest.fixture(scope="module")
def weights():
    return forward_of(CONFIG)[0]


def off(got, want):
    """The root mean square of differences, as a share of the largest number."""
    return np.sqrt(np.mean((got - want) ** 2)) / np.abs(want).max()


# Kernels

TILES = [TWO, *([HOST] if HOST.dot else [])]


@pytest.mark.parametrize("tile", TILES, ids=lambda t: "instruction" if t.dot else "two multiply-adds")
@pytest.mark.parametrize("n", [2 * LANES, 6 * LANES, 4 * LANES + 5, 3])
def test_a_lane_sums_as_the_definition_says(tile, n):
    add = adder_of(tile)

    @jit.helper()
    def run(out, x, w):
        total = load(out, 0)
        for k in range(0, len(x), 2 * LANES):
            total = add(load_some_words(x, k, len(x) - k), load_some_words(w, k, len(x) - k), total)
        store(out, 0, total)

    x, w = drawn(np.random.default_rng(n), n), drawn(np.random.default_rng(n + 1), n)
    got, want = np.zeros(LANES, F32), np.zeros(LANES, F32)
    run(got, x, w)
    x, w = (np.pad(v.astype(np.float64), (0, -n % (2 * LANES))).reshape(-1, LANES, 2) for v in (x, w))
    for a, b in zip(x, w, strict=True):
        for half in (1, 0):  # the odd product is added first, then the even one, each sum rounded to float32
            want = (a[:, half] * b[:, half] + want).astype(F32)
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


def drawn(rng, *shape):
    """Draw numbers with exponents so close that float64 holds a product and a sum exactly."""
    x = rng.choice([-1, 1], shape) * rng.uniform(1, 2, shape) * 2.0 ** rng.integers(-3, 4, shape)
    return x.astype(BF16)


TYPED = {"out": "bfloat16", "keys": "bfloat16", "values": "bfloat16"}


@pytest.mark.parametrize("variant", ["vanilla", "optimized"])
@pytest.mark.parametrize(
    ("op", "more"), [(ops.attention_decode, ("qkv",)), (ops.gqa_decode, ("q", "k", "v"))], ids=["attention", "gqa"]
)
def test_a_block_of_queries_reads_a_cache_of_bfloat16(op, more, variant):
    types = TYPED | dict.fromkeys(more, "bfloat16")
    for sizes in (MORE, {**MORE, "T": 70, "S": 200, "C": 128, "NH": 2, "HS": 64, "NKV": 2}):
        result = check(registry.find(op.name, variant), case(op, sizes, types=types))
        assert result.verdict == "right", result


# What a decoder holds


def test_a_weight_of_products_takes_two_bytes_and_so_does_the_cache():
    decoder = Decoder(CONFIG, check=False, dtype="bfloat16")
    named = decoder.parameters()
    assert {n for n, p in named.items() if p.dtype != BF16} == {
        "wpe.weight",
        *(n for n, p in named.items() if p.ndim == 1),
    }
    narrow, wide = (sum(p.size for p in named.values() if (p.dtype == BF16) is kind) for kind in (True, False))
    for T in BLOCKS[:2]:
        loaded = decoder._blocks[T].loaded
        assert loaded.plan.groups["parameter"] == 2 * narrow + 4 * wide
        assert "copy" not in loaded.plan.groups
        caches = [v for v in loaded.built.program.inputs if v.name != "tokens"]
        assert {v.dtype for v in caches} == {"bfloat16"}
    assert decoder.weight_bytes < 0.55 * Decoder(CONFIG, check=False).weight_bytes


# Logits


@pytest.mark.parametrize("variant", [pytest.param("vanilla", marks=pytest.mark.slow), "optimized"])
@pytest.mark.parametrize("config", [CONFIG, LLAMA], ids=["gpt2", "llama"])
def test_the_logits_are_as_near_to_float32_as_those_of_a_forward_in_bfloat16(config, variant):
    T = config.block_size
    weights = forward_of(config)[0]
    want, allowed = forward(config, weights, T, "float32"), forward(config, weights, T, "bfloat16")
    decoder = decoder_of(config, weights, variant=variant)
    for prompt in (1, 8, T - 30):
        decoder.restart()
        got = [decoder.read(IDS[:prompt]).copy(), *(decoder.read([i]).copy() for i in IDS[prompt:T])]
        error = off(np.array(got), want[prompt - 1 :])
        assert 0 < error < 1.5 * off(allowed[prompt - 1 :], want[prompt - 1 :])  # the embedding is rounded besides
    if variant == "optimized":
        decoder.restart()
        decoder.read(IDS[: T - 30])
        decoder.position += 1
        wrong = decoder.read([IDS[T - 30]])
        assert off(wrong, want[T - 30]) > 10 * off(allowed, want)


def test_a_kernel_that_takes_float32_alone_gets_it(weights):
    want = decoder_of(CONFIG, weights).read(IDS[:70]).copy()
    decoder = decoder_of(CONFIG, weights, swaps=["matmul_forward@lm_head=blas", "matmul_forward@h.1.*=blas"])
    for block in decoder._blocks.values():
        assert "bfloat16" not in {
            t for b in block.loaded.calls if b.kernel.variant == "blas" for t in b.call.types.values()
        }
    assert off(decoder.read(IDS[:70]), want) < 1e-2


def test_without_a_cache_the_logits_are_the_same(weights):
    reader = Uncached(CONFIG, context=100, dtype="bfloat16", check=False)
    for name, p in reader.parameters().items():
        p[...] = weights[name]
    assert reader.parameters()["wte.weight"].dtype == BF16
    want, allowed = (forward(CONFIG, weights, 100, t)[69] for t in ("float32", "bfloat16"))
    assert off(reader.read(IDS[:70]), want) < 2 * off(allowed, want)


# The command line


@pytest.fixture
def model(weights, tmp_path, here):
    exact = {name: p.astype(BF16).astype(F32) for name, p in weights.items()}
    save_weights(tmp_path / "model", CONFIG, exact.__getitem__)
    save_weights(tmp_path / "half", CONFIG, exact.__getitem__, dtype="bf16")
    return tmp_path


def test_generate_takes_the_type_and_files_of_either_give_one_text(model, capsys):
    def found(where, dtype):
        flags = ["generate", "--init", where, "--prompt", "abc", "--max-tokens", "20", "--dtype", dtype, "--json"]
        assert cli.main(flags) == 0
        return json.loads(capsys.readouterr().out)

    half = found("half", "bf16")
    assert half["dtype"] == "bf16"
    tables = 256 * 64 + 2 * 12 * 64 * 64
    assert half["weight_bytes"] == 4 * (CONFIG.n_params - 100 * 64) - 2 * tables
    assert found("model", "bf16")["ids"] == half["ids"]
    assert found("model", "float32")["dtype"] == "float32"


def test_a_number_that_bfloat16_rounds_to_infinity_is_refused(weights, model, capsys):
    big = weights | {"h.0.attn.c_attn.weight": np.full_like(weights["h.0.attn.c_attn.weight"], 3.4e38)}
    save_weights(model / "big", CONFIG, big.__getitem__)
    assert "h.0.attn.c_attn.weight holds 3.3999" in refused(capsys, "generate", "--init", "big", "--dtype", "bf16")


def test_eval_takes_the_type(model, capsys):
    (model / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(300)))
    losses = []
    for dtype in ("float32", "bf16"):
        flags = ["eval", "--init", "model", "--data", "text.txt", "-T", "32", "--limit", "4", "--dtype", dtype]
        losses.append(ran(capsys, *flags)["loss"])
    assert losses[0] != losses[1]
    assert abs(losses[1] / losses[0] - 1) < 2e-3


def test_a_run_in_bfloat16_shows_samples_of_it(model, capsys, monkeypatch):
    made = []
    monkeypatch.setattr(samples, "reader_of", lambda *a, **how: made.append(how["dtype"]) or reader_of(*a, **how))
    (model / "text.txt").write_text("abcdefgh" * 500)
    train = ["train", "--model", "gpt2-tiny", "--data", "text.txt", "-B", "2", "-T", "16", "--steps", "2"]
    more = ["--val-every", "0", "--sample-every", "2", "--sample-tokens", "4"]
    assert cli.main([*train, *more, "--dtype", "bf16"]) == 0
    assert made == ["bfloat16"]


def test_an_engine_in_bfloat16_generates_in_it():
    engine = cpuopt.Engine(GPT2(CONFIG), CONFIG.specs(1, 32), dtype="bfloat16", threads=2)
    assert len([*engine.generate([1, 2, 3], max_tokens=5, temperature=0)]) == 5
    assert engine._reader.parameters()["wte.weight"].dtype == BF16

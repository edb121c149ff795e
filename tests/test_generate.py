"""Generation: with its cache as without, in float32 and bfloat16, and what the sampler may choose."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from golden.llama2c import draw
from rich.console import Console
from verbs import fails, printed, ran, refused

import cpuopt
from cpuopt import cli, ops
from cpuopt.check.cases import MORE, case
from cpuopt.check.check import check
from cpuopt.data.tokenizers import Bytes
from cpuopt.engine import Engine
from cpuopt.generate import decoder as generate
from cpuopt.generate.decoder import BLOCKS, Decoder, Sampler, read_bandwidth, text_of
from cpuopt.generate.uncached import Uncached, reader_of
from cpuopt.kernels import registry
from cpuopt.kernels.compile import jit
from cpuopt.kernels.toolkit.lanes import load, store
from cpuopt.kernels.toolkit.pairs import adder_of, load_some_words
from cpuopt.kernels.toolkit.simd import HOST, LANES
from cpuopt.models import PRESETS, llama
from cpuopt.models.families import Qwen3
from cpuopt.models.gpt2 import GPT2, Config
from cpuopt.ops.storage import TYPES
from cpuopt.report import console
from cpuopt.train import samples
from cpuopt.weights import save_weights

CONFIG = Config(2, 4, 64, 256, 100)
SCALING = {"rope_type": "llama3", "rope_factor": 8.0, "rope_original_positions": 16, "attention_bias": True}
CONFIGS = {
    "gpt2": CONFIG,
    "tied": PRESETS["llama-tiny"],
    "normed": Qwen3(96, 40, 56, 2, 6, 2, 12, 64, rope_theta=1e6),
    "scaled": llama.Config(96, 36, 56, 1, 3, 1, 12, 64, **SCALING),
}
VARIANTS = ("vanilla", "optimized")
BF16, F32 = TYPES["bfloat16"].dtype, np.float32
pytestmark = pytest.mark.usefixtures("here")


def ids_of(config):
    return np.random.Generator(np.random.PCG64(1)).integers(0, config.vocab_size, config.block_size)


IDS = ids_of(CONFIG)


def forward_of(config):
    """The parameters, and the logits of all positions by one uncached forward."""
    engine = Engine.from_options(config.module(), config.specs(1, config.block_size), seed=3, train=False)
    for p in engine.parameters().values():
        p *= 8 if p.ndim == 2 else 1  # so that attention is not even
    tokens = ids_of(config)[None].astype(np.int32)
    engine.forward(tokens=tokens, targets=tokens)
    return {n: p.copy() for n, p in engine.parameters().items()}, engine.array(engine.program.outputs[1])[0].copy()


@pytest.fixture(scope="module")
def whole():
    return forward_of(CONFIG)


def decoder_of(config, parameters, **how):
    decoder = Decoder(config, check=False, **how)
    for name, p in decoder.parameters().items():
        p[...] = parameters[name]
    return decoder


@pytest.fixture(scope="module")
def decoders(whole):
    return {variant: decoder_of(CONFIG, whole[0], variant=variant) for variant in VARIANTS}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_cache_changes_no_logit(name):
    """Token by token, behind a prompt of one, of some and of many tokens, and again from an earlier position."""
    config = CONFIGS[name]
    (parameters, logits), ids, T = forward_of(config), ids_of(config), config.block_size
    scale = 1e-5 * np.abs(logits).max()
    for decoder in (decoder_of(config, parameters, variant=variant) for variant in VARIANTS):
        for prompt in (1, *(n + i for n in BLOCKS[1:] for i in (-1, 0, 1) if n + i <= T), T - 1):
            decoder.restart()
            for i, read in enumerate([ids[:prompt], *ids[prompt:, None]], start=prompt - 1):
                assert np.abs(decoder.read(read) - logits[i]).max() < scale, (prompt, i)
            fails(rf"{T + 1} tokens do not fit in the context of {T}; take a shorter", decoder.read, [1])
            assert decoder.position == T
        decoder.position = 20
        assert np.abs(decoder.read(ids[20:30]) - logits[29]).max() < scale


def test_the_cache_has_the_heads_of_keys_and_the_length_that_is_asked_for():
    config = CONFIGS["tied"]
    parameters, _ = forward_of(config)
    short, full = (decoder_of(config, parameters, variant="vanilla", context=n) for n in (20, None))
    keys = next(b for b in short._blocks[1].loaded.calls if b.call.op.name == "gqa_decode").args[1]
    assert keys.shape == (1, config.num_key_value_heads, 20 + 64, config.head_dim)
    assert (short.context, full.context) == (20, 64)
    assert np.array_equal(*(decoder.read(IDS[:20]) for decoder in (short, full)))
    fails(r"21 tokens do not fit in the context of 20; .* or a longer --context", short.read, [1])
    for n in (0, 65):
        fails(f"--context {n}: expected 1 to 64", Decoder, config, context=n)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_few_tokens_take_the_kernels_that_stream_and_a_swap_wins(dtype):
    def products(T, **how):
        calls = [*(d := Decoder(CONFIG, check=False, dtype=dtype, **how))._blocks[T].loaded.calls, *d._head]
        found = [b for b in calls if b.call.op.name.startswith("matmul")]
        assert {b.call.types.get("weight", "float32") for b in found} == {dtype}
        return {b.kernel.variant for b in found}

    assert products(1) == products(8) == {"rows"}
    assert products(64) == {"optimized", "rows"}  # the head reads one row
    assert products(1, swaps=["matmul=vanilla"]) == {"vanilla"}
    fails("does not use 'softmax'", Decoder, CONFIG, swaps=["softmax=optimized"], check=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bits_do_not_depend_on_threads(whole, dtype):
    large = Config(1, 4, 256, 4096, 64)  # of more bytes than one thread reads alone
    drawn = draw(large.shapes(), 3)

    def logits(threads):
        decoder = decoder_of(CONFIG, whole[0], threads=threads, dtype=dtype)
        found = [decoder.read(ids).tobytes() for ids in (IDS[:70], [7], [8])]
        return [*found, decoder_of(large, drawn, threads=threads, dtype=dtype).read([1, 2, 3]).tobytes()]

    assert logits(1) == logits(2) == logits(3)


def test_the_roof_is_that_of_weights_which_no_cache_holds(decoders):
    decoder = decoders["optimized"]
    assert decoder.weights.size == CONFIG.n_params
    assert all(np.shares_memory(decoder.weights, p) for p in decoder.parameters().values())
    assert read_bandwidth(decoder) is None
    assert 1e6 < read_bandwidth(decoder, in_cache=0) < 1e13


@pytest.mark.parametrize("tokens", [[], [-1], [256], [1, 2, 999]])
def test_tokens_that_are_none_are_refused(decoders, tokens):
    fails("from 0 to 255", decoders["vanilla"].read, tokens)


# Sampling


LOGITS = np.log(np.array([0.1, 0.5, 0.15, 0.25], np.float32))


def drawn(n=4000, **how):
    sampler = Sampler(**how)
    return {t: c / n for t, c in Counter(sampler.choose(LOGITS) for _ in range(n)).items()}


def test_what_is_drawn_follows_temperature_top_k_and_top_p():
    for want, *ways in (
        ([0.1, 0.5, 0.15, 0.25], {}),
        ([0.25] * 4, {"temperature": 1e6}),
        ([0, 1, 0, 0], {"temperature": 0}, {"top_k": 1}, {"top_p": 0.4}),
        ([0, 2 / 3, 0, 1 / 3], {"top_k": 2}, {"top_p": 0.6}),
        ([0, 5 / 9, 1.5 / 9, 2.5 / 9], {"top_p": 0.76}, {"top_k": 3, "top_p": 0.99}),
    ):
        for got in (drawn(**how) for how in ways):
            assert got.keys() == {i for i, p in enumerate(want) if p}
            assert all(abs(got.get(i, 0) - p) < 0.03 for i, p in enumerate(want))


def test_a_seed_gives_the_same_choices():
    def choices(seed):
        sampler = Sampler(seed=seed)
        return [sampler.choose(LOGITS) for _ in range(30)]

    assert choices(1) == choices(1) != choices(2)


@pytest.mark.parametrize("how", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}, {"seed": -1}])
def test_what_cannot_be_sampled_is_refused(how):
    fails("expected", Sampler, **how)
    fails("not finite", Sampler().choose, np.array([1.0, np.nan]))


def test_generation_ends_at_its_limit_at_the_stop_and_at_the_end_of_the_context(decoders):
    decoder = decoders["vanilla"]

    def tokens(*how, **more):
        decoder.restart()
        return list(generate.generate(decoder, *how, **more))

    greedy = tokens([1, 2], Sampler(temperature=0), 20)
    assert (len(greedy), tokens([1, 2], Sampler(temperature=0), 5)) == (20, greedy[:5])
    stop = greedy[7]
    assert tokens([1, 2], Sampler(temperature=0), 20, [stop]) == greedy[: greedy.index(stop)]
    assert len(tokens(IDS[:95], Sampler(), 50)) == 6  # 95 and 5 fill the context; one more is chosen, not read


def test_a_character_of_several_tokens_comes_whole():
    pieces = list(text_of([*"aé€".encode(), 0xFF, 300, *b"b"], Bytes()))
    assert "".join(pieces) == "aé€\ufffd\ufffdb"
    assert "é" in pieces
    assert list(text_of("é".encode()[:1], Bytes())) == ["", "\ufffd"]


# The command line


def test_generate_prints_a_text_and_its_figures(whole, capsys):
    save_weights(Path("model"), CONFIG, whole[0].__getitem__)
    flags = ["generate", "--init", "model", "--prompt", "abc", "--max-tokens", "20", "--seed", "4"]
    assert cli.main(flags) == 0
    out, err = capsys.readouterr()
    assert out.startswith("abc")
    assert "tokens/s" in err
    found = ran(capsys, *flags)
    assert out == "abc" + found["text"] + "\n"
    assert (found["tokens"], len(found["ids"]), found["prompt_tokens"]) == (20, 20, 3)
    assert (found["weight_bytes"], found["stopped"]) == (4 * (CONFIG.n_params - 100 * 64), "max tokens")
    assert found["share_of_roof"] is None  # so small a model lies in the caches
    assert found["first_token_ms"] > 0


def test_without_weights_a_preset_speaks_nonsense_by_its_seed(capsys):
    def ids(seed, *flags):
        assert cli.main(["generate", "--model", "gpt2-tiny", "--seed", str(seed), "--json", *flags]) == 0
        out, err = capsys.readouterr()
        assert f"random weights of seed {seed}" in err
        return json.loads(out)

    found = ids(1)
    assert found["weights"] == "random, seed 1"
    assert (found["tokens"], found["stopped"]) == (64, "context full")  # 1 and 63 fill it; one more is chosen, not read
    again, other = ids(1, "--threads", "1"), ids(2)
    assert found["ids"] == again["ids"] != other["ids"]


def test_what_came_before_an_interrupt_is_shown(capsys, monkeypatch):
    def three(*_):
        yield from b"abc"
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "generate", three)
    found = ran(capsys, "generate", "--model", "gpt2-tiny", status=130)
    assert (found["text"], found["stopped"]) == ("abc", "interrupted")


def test_a_terminal_is_not_steered(capsys, monkeypatch):
    console.stream("a\x1b[2J\n")
    assert capsys.readouterr().out == "a\x1b[2J\n"
    monkeypatch.setattr(console, "OUT", Console(force_terminal=True))
    console.stream("é\t\x1b[2J\x9b\x7f\n")
    assert capsys.readouterr().out == "é\t\ufffd[2J\ufffd\ufffd\n"


def test_generate_refuses(whole, capsys, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "nothing-here")
    save_weights(Path("model"), CONFIG, whole[0].__getitem__)
    for flags in (["--max-tokens", "0"], ["--top-p", "2"], ["--prompt", "x" * 101], ["--tokenizer", "gpt2"]):
        refused(capsys, "generate", "--init", "model", *flags)
    said = refused(capsys, "generate", "--model", "gpt2-124M")
    assert all(x in said for x in ("data prepare", "--tokenizer bytes"))
    Path("run").mkdir()
    Path("run/metrics.jsonl").touch()
    for command in (["generate", "--init", "run"], ["convert", "run", "hf"]):
        assert "has kept no weights; train with --save-every N" in refused(capsys, *command)
    config = json.loads(Path("model/config.json").read_text())
    for odd in (["words"], "/etc/passwd"):
        Path("model/config.json").write_text(json.dumps(config | {"cpuopt_tokenizer": odd}))
        assert "expected bytes or gpt2" in refused(capsys, "generate", "--init", "model")


def test_a_run_and_what_it_saves_know_their_tokenizer(capsys, monkeypatch):
    """A byte model with GPT-2's vocabulary speaks in bytes, with no word from the user."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "nothing-here")
    Path("text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(1000)))
    sizes = json.dumps({"n_layer": 1, "n_head": 1, "n_embd": 8, "vocab_size": 50257, "block_size": 16})
    train = ["train", "--model", sizes, "--data", "text.txt", "-B", "1", "-T", "16", "--steps", "1", "--val-every", "0"]
    assert cli.main([*train, "--save-every", "1", "--save", "saved", "--variant", "vanilla"]) == 0
    assert cli.main(["convert", "saved", "again"]) == 0
    assert cli.main(["convert", *map(str, Path("runs").iterdir()), "from-run"]) == 0
    assert Path("from-run/model.safetensors").read_bytes() == Path("saved/model.safetensors").read_bytes()
    printed(capsys, "convert", "saved", "model.bin")  # llm.c's file has no place for it
    (run,) = Path("runs").iterdir()
    for where, tokenizer in ((str(run), "bytes"), ("saved", "bytes"), ("from-run", "bytes"), ("model.bin", None)):
        flags = ["generate", "--init", where, "--max-tokens", "30", "--prompt", "12", "--variant", "vanilla"]
        if tokenizer:
            found = ran(capsys, *flags)
            assert (found["tokenizer"], found["prompt_tokens"]) == ("bytes", 2)
        else:
            assert "--tokenizer bytes" in refused(capsys, *flags)
    assert cli.main([*flags, "--tokenizer", "bytes"]) == 0
    assert "the context of 16 tokens is full" in capsys.readouterr().err


def test_what_top_p_leaves_out_unsorted_changes_nothing():
    """Tokens are left out before they are sorted; the sampler draws as if all had been sorted."""
    logits = np.random.Generator(np.random.PCG64(2)).standard_normal(5000).astype(np.float32) * 3
    p = np.exp(logits.astype(np.float64) - logits.max())
    order = np.argsort(-p)
    kept = set(order[: np.searchsorted(np.cumsum(p[order] / p.sum()), 0.7) + 1].tolist())
    sampler = Sampler(top_p=0.7)
    assert {sampler.choose(logits) for _ in range(3000)} <= kept
    best = Sampler(top_k=3, top_p=0.999999)
    assert {best.choose(logits) for _ in range(300)} == set(order[:3].tolist())


# bfloat16: its kernels, what a decoder holds, and its logits beside those of float32


def forward(config, weights, T, dtype):
    """The logits of all positions by one uncached forward."""
    engine = Engine.from_options(config.module(), config.specs(1, T), seed=None, train=False, dtype=dtype)
    for name, p in engine.parameters().items():
        p[...] = weights[name]
    tokens = IDS[None, :T].astype(np.int32)
    engine.forward(tokens=tokens, targets=tokens)
    return engine.array(engine.program.outputs[1])[0].astype(np.float64)


@pytest.fixture
def weights(whole):
    return whole[0]


def off(got, want):
    """The root mean square of differences, as a share of the largest number."""
    return np.sqrt(np.mean((got - want) ** 2)) / np.abs(want).max()


# Kernels

TILES = [replace(HOST, dot=None), *([HOST] if HOST.dot else [])]


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

    x, w = close(np.random.default_rng(n), n), close(np.random.default_rng(n + 1), n)
    got, want = np.zeros(LANES, F32), np.zeros(LANES, F32)
    run(got, x, w)
    x, w = (np.pad(v.astype(np.float64), (0, -n % (2 * LANES))).reshape(-1, LANES, 2) for v in (x, w))
    for a, b in zip(x, w, strict=True):
        for half in (1, 0):  # the odd product is added first, then the even one, each sum rounded to float32
            want = (a[:, half] * b[:, half] + want).astype(F32)
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


def close(rng, *shape):
    """Draw numbers with exponents so close that float64 holds a product and a sum exactly."""
    x = rng.choice([-1, 1], shape) * rng.uniform(1, 2, shape) * 2.0 ** rng.integers(-3, 4, shape)
    return x.astype(BF16)


DECODES = [(ops.attention_decode, ("qkv",)), (ops.gqa_decode, ("q", "k", "v"))]


@pytest.mark.parametrize("variant", ["vanilla", "optimized"])
@pytest.mark.parametrize(("op", "more"), DECODES, ids=["attention", "gqa"])
def test_a_block_of_queries_reads_a_cache_of_bfloat16(op, more, variant):
    types = dict.fromkeys(("out", "keys", "values", *more), "bfloat16")
    for sizes in (MORE, {**MORE, "T": 70, "S": 200, "C": 128, "NH": 2, "HS": 64, "NKV": 2}):
        result = check(registry.find(op.name, variant), case(op, sizes, types=types))
        assert result.verdict == "right", result


# What a decoder holds


def test_a_weight_of_products_takes_two_bytes_and_so_does_the_cache():
    decoder = Decoder(CONFIG, check=False, dtype="bfloat16")
    named = decoder.parameters()
    exact = {"wpe.weight", *(n for n, p in named.items() if p.ndim == 1)}
    assert {n for n, p in named.items() if p.dtype != BF16} == exact
    narrow, wide = (sum(p.size for p in named.values() if (p.dtype == BF16) is kind) for kind in (True, False))
    for T in BLOCKS[:2]:
        loaded = decoder._blocks[T].loaded
        assert loaded.plan.groups["parameter"] == 2 * narrow + 4 * wide
        assert "copy" not in loaded.plan.groups
        assert {v.dtype for v in loaded.built.program.inputs if v.name != "tokens"} == {"bfloat16"}
    assert decoder.weight_bytes < 0.55 * Decoder(CONFIG, check=False).weight_bytes


# Logits


@pytest.mark.drawn(1)
@pytest.mark.parametrize("variant", [pytest.param("vanilla", marks=pytest.mark.slow), "optimized"])
@pytest.mark.parametrize("config", [CONFIG, CONFIGS["tied"]], ids=["gpt2", "llama"])
def test_the_logits_are_as_near_to_float32_as_those_of_a_forward_in_bfloat16(config, variant):
    T, weights = config.block_size, forward_of(config)[0]
    want, allowed = forward(config, weights, T, "float32"), forward(config, weights, T, "bfloat16")
    decoder = decoder_of(config, weights, variant=variant, dtype="bfloat16")
    for prompt in (1, 8, T - 30):
        decoder.restart()
        got = [decoder.read(IDS[:prompt]).copy(), *(decoder.read([i]).copy() for i in IDS[prompt:T])]
        error = off(np.array(got), want[prompt - 1 :])
        assert 0 < error < 1.5 * off(allowed[prompt - 1 :], want[prompt - 1 :])  # the embedding is rounded besides
    if variant == "optimized":
        decoder.restart()
        decoder.read(IDS[: T - 30])
        decoder.position += 1
        assert off(decoder.read([IDS[T - 30]]), want[T - 30]) > 10 * off(allowed, want)


SWAPS = ["matmul_forward@lm_head=blas", "matmul_forward@h.1.*=blas"]


def test_a_kernel_that_takes_float32_alone_gets_it(weights):
    want = decoder_of(CONFIG, weights, dtype="bfloat16").read(IDS[:70]).copy()
    decoder = decoder_of(CONFIG, weights, dtype="bfloat16", swaps=SWAPS)
    swapped = [b for block in decoder._blocks.values() for b in block.loaded.calls if b.kernel.variant == "blas"]
    assert "bfloat16" not in {t for b in swapped for t in b.call.types.values()}
    assert off(decoder.read(IDS[:70]), want) < 1e-2


def test_without_a_cache_the_logits_are_the_same(weights):
    reader = Uncached(CONFIG, context=100, dtype="bfloat16", check=False)
    for name, p in reader.parameters().items():
        p[...] = weights[name]
    assert reader.parameters()["wte.weight"].dtype == BF16
    want, allowed = (forward(CONFIG, weights, 100, t)[69] for t in ("float32", "bfloat16"))
    assert off(reader.read(IDS[:70]), want) < 2 * off(allowed, want)


# The command line in bfloat16


@pytest.fixture
def model(weights, tmp_path, here):
    exact = {name: p.astype(BF16).astype(F32) for name, p in weights.items()}
    save_weights(tmp_path / "model", CONFIG, exact.__getitem__)
    save_weights(tmp_path / "half", CONFIG, exact.__getitem__, dtype="bf16")
    return tmp_path


def test_generate_takes_the_type_and_files_of_either_give_one_text(model, capsys):
    def found(where, dtype):
        return ran(capsys, "generate", "--init", where, "--prompt", "abc", "--max-tokens", "20", "--dtype", dtype)

    half, nbytes = found("half", "bf16"), 4 * (CONFIG.n_params - 100 * 64) - 2 * (256 * 64 + 2 * 12 * 64 * 64)
    assert (half["dtype"], half["weight_bytes"]) == ("bf16", nbytes)
    assert (found("model", "bf16")["ids"], found("model", "float32")["dtype"]) == (half["ids"], "float32")


def test_a_number_that_bfloat16_rounds_to_infinity_is_refused(weights, model, capsys):
    big = weights | {"h.0.attn.c_attn.weight": np.full_like(weights["h.0.attn.c_attn.weight"], 3.4e38)}
    save_weights(model / "big", CONFIG, big.__getitem__)
    assert "h.0.attn.c_attn.weight holds 3.3999" in refused(capsys, "generate", "--init", "big", "--dtype", "bf16")


def test_eval_takes_the_type(model, capsys):
    (model / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(300)))
    measure = ["eval", "--init", "model", "--data", "text.txt", "-T", "32", "--limit", "4", "--dtype"]
    wide, narrow = (ran(capsys, *measure, dtype)["loss"] for dtype in ("float32", "bf16"))
    assert 0 < abs(narrow / wide - 1) < 2e-3


def test_a_run_in_bfloat16_shows_samples_of_it(model, capsys, monkeypatch):
    made = []
    monkeypatch.setattr(samples, "reader_of", lambda *a, **how: made.append(how["dtype"]) or reader_of(*a, **how))
    (model / "text.txt").write_text("abcdefgh" * 500)
    train = ["train", "--model", "gpt2-tiny", "--data", "text.txt", "-B", "2", "-T", "16", "--steps", "2"]
    more = ["--val-every", "0", "--sample-every", "2", "--sample-tokens", "4"]
    assert (cli.main([*train, *more, "--dtype", "bf16"]), made) == (0, ["bfloat16"])


def test_an_engine_in_bfloat16_generates_in_it():
    engine = cpuopt.Engine(GPT2(CONFIG), CONFIG.specs(1, 32), dtype="bfloat16", threads=2)
    assert len([*engine.generate([1, 2, 3], max_tokens=5, temperature=0)]) == 5
    assert engine._reader.parameters()["wte.weight"].dtype == BF16

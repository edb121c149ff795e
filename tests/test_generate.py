"""Generation: with its cache as without, and what the sampler may choose."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from cpuopt import cli
from cpuopt.data.tokenizers import Bytes
from cpuopt.engine import Engine
from cpuopt.errors import UserError
from cpuopt.generate import decoder as generate
from cpuopt.generate.decoder import BLOCKS, Decoder, Sampler, read_bandwidth, text_of
from cpuopt.models.gpt2 import GPT2, Config
from cpuopt.report import console
from cpuopt.weights import save_weights

CONFIG = Config(2, 4, 64, 256, 100)
IDS = np.random.Generator(np.random.PCG64(1)).integers(0, 256, 100)


@pytest.fixture(scope="module")
def whole():
    """The parameters, and the logits of all positions by one uncached forward."""
    engine = Engine(GPT2(CONFIG), CONFIG.specs(1, 100), seed=3, train=False)
    tokens = IDS[None].astype(np.int32)
    for p in engine.parameters().values():
        if p.ndim == 2:
            p *= 8  # so that attention is not even
    engine.forward(tokens=tokens, targets=tokens)
    return {n: p.copy() for n, p in engine.parameters().items()}, engine.array(engine.program.outputs[1])[0].copy()


@pytest.fixture(scope="module")
def decoders(whole):
    made = {}
    for variant in ("vanilla", "optimized"):
        made[variant] = Decoder(CONFIG, variant=variant, check=False)
        for name, p in made[variant].parameters().items():
            p[...] = whole[0][name]
    return made


pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.parametrize("variant", ["vanilla", "optimized"])
@pytest.mark.parametrize("prompt", [1, 2, *(T + i for T in BLOCKS[1:] for i in (-1, 0, 1)), 99])
def test_the_cache_changes_no_logit(decoders, whole, variant, prompt):
    decoder, logits = decoders[variant], whole[1]
    decoder.restart()
    scale = np.abs(logits).max()
    assert np.abs(decoder.read(IDS[:prompt]) - logits[prompt - 1]).max() < 1e-5 * scale
    for i in range(prompt, 100):
        assert np.abs(decoder.read([IDS[i]]) - logits[i]).max() < 1e-5 * scale, i
    assert decoder.position == 100
    with pytest.raises(UserError, match="do not fit in the context of 100"):
        decoder.read([1])


def test_few_tokens_take_the_kernels_that_stream_and_a_swap_wins():
    def variants(T, **how):
        calls = [*(d := Decoder(CONFIG, check=False, **how))._blocks[T].loaded.calls, *d._head]
        return {b.kernel.variant for b in calls if b.call.op.name.startswith("matmul")}

    assert variants(1) == variants(8) == {"rows"}
    assert variants(64) == {"optimized", "rows"}  # the head reads one row
    assert variants(1, swaps=["matmul=vanilla"]) == variants(1, variant="vanilla") == {"vanilla"}
    with pytest.raises(UserError, match="does not use 'softmax'"):
        Decoder(CONFIG, swaps=["softmax=optimized"], check=False)


def test_the_roof_is_that_of_weights_which_no_cache_holds(decoders):
    decoder = decoders["optimized"]
    assert decoder.weights.size == CONFIG.n_params
    assert all(np.shares_memory(decoder.weights, p) for p in decoder.parameters().values())
    assert read_bandwidth(decoder) is None
    assert 1e6 < read_bandwidth(decoder, in_cache=0) < 1e13


@pytest.mark.parametrize("tokens", [[], [-1], [256], [1, 2, 999]])
def test_tokens_that_are_none_are_refused(decoders, tokens):
    with pytest.raises(UserError, match="from 0 to 255"):
        decoders["vanilla"].read(tokens)


def test_the_bits_do_not_depend_on_threads(whole):
    def logits(threads):
        decoder = Decoder(CONFIG, threads=threads, check=False)
        for name, p in decoder.parameters().items():
            p[...] = whole[0][name]
        return [decoder.read(IDS[:70]).copy(), decoder.read([7]).copy(), decoder.read([8]).copy()]

    one = logits(1)
    for n in (2, 4):
        assert all(np.array_equal(a, b) for a, b in zip(one, logits(n), strict=True))


# Sampling


LOGITS = np.log(np.array([0.1, 0.5, 0.15, 0.25], np.float32))


def drawn(n=4000, **how):
    sampler = Sampler(**how)
    counts = Counter(sampler.choose(LOGITS) for _ in range(n))
    return {t: c / n for t, c in counts.items()}


def test_at_temperature_1_the_models_distribution_is_drawn():
    got = drawn()
    assert all(abs(got[i] - p) < 0.03 for i, p in enumerate([0.1, 0.5, 0.15, 0.25]))


def test_temperature_0_takes_the_likeliest_and_a_low_one_nearly_always():
    assert drawn(temperature=0) == {1: 1.0}
    assert drawn(temperature=0.2)[1] > 0.95
    flat = drawn(temperature=1e6)
    assert all(abs(p - 0.25) < 0.03 for p in flat.values())


def test_top_k_and_top_p_leave_the_others_out():
    assert drawn(top_k=1) == {1: 1.0}
    two = drawn(top_k=2)
    assert two.keys() == {1, 3}
    assert abs(two[1] - 2 / 3) < 0.03
    assert drawn(top_p=0.4).keys() == {1}
    assert drawn(top_p=0.6).keys() == {1, 3}
    assert drawn(top_p=0.76).keys() == {1, 3, 2}
    assert drawn(top_k=3, top_p=0.99).keys() == {1, 3, 2}


def test_a_seed_gives_the_same_choices():
    def choices(seed):
        sampler = Sampler(seed=seed)
        return [sampler.choose(LOGITS) for _ in range(30)]

    assert choices(1) == choices(1) != choices(2)


@pytest.mark.parametrize("how", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}, {"seed": -1}])
def test_what_cannot_be_sampled_is_refused(how):
    with pytest.raises(UserError, match="expected"):
        Sampler(**how)
    with pytest.raises(UserError, match="not finite"):
        Sampler().choose(np.array([1.0, np.nan]))


def test_generation_ends_at_its_limit_at_the_stop_and_at_the_end_of_the_context(decoders):
    decoder = decoders["vanilla"]

    def tokens(*how, **more):
        decoder.restart()
        return list(generate.generate(decoder, *how, **more))

    greedy = tokens([1, 2], Sampler(temperature=0), 20)
    assert len(greedy) == 20
    assert tokens([1, 2], Sampler(temperature=0), 5) == greedy[:5]
    stop = greedy[7]
    assert tokens([1, 2], Sampler(temperature=0), 20, [stop]) == greedy[: greedy.index(stop)]
    assert len(tokens(IDS[:95], Sampler(), 50)) == 6  # 95 and 5 fill the context; one more is chosen, not read


def test_a_character_of_several_tokens_comes_whole():
    ids = [*"aé€".encode(), 0xFF, 300, *b"b"]
    pieces = list(text_of(ids, Bytes()))
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
    assert cli.main([*flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert out == "abc" + found["text"] + "\n"
    assert (found["tokens"], len(found["ids"]), found["prompt_tokens"]) == (20, 20, 3)
    assert found["weight_bytes"] == 4 * (CONFIG.n_params - 100 * 64)
    assert found["share_of_roof"] is None  # so small a model lies in the caches
    assert found["first_token_ms"] > 0
    assert found["stopped"] == "max tokens"
    assert cli.main([*flags, "--variant", "vanilla", "--json", "--temperature", "0"]) == 0
    vanilla = json.loads(capsys.readouterr().out)["ids"]
    assert cli.main([*flags, "--json", "--temperature", "0"]) == 0
    assert json.loads(capsys.readouterr().out)["ids"] == vanilla


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


def test_a_missing_vocabulary_says_what_to_do(capsys, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "nothing-here")
    assert cli.main(["generate", "--model", "gpt2-124M"]) == 2
    err = capsys.readouterr().err
    assert "data prepare" in err
    assert "--tokenizer bytes" in err


def test_what_came_before_an_interrupt_is_shown(capsys, monkeypatch):
    def three(*_):
        yield from b"abc"
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "generate", three)
    assert cli.main(["generate", "--model", "gpt2-tiny", "--json"]) == 130
    found = json.loads(capsys.readouterr().out)
    assert (found["text"], found["stopped"]) == ("abc", "interrupted")


def test_a_terminal_is_not_steered(capsys, monkeypatch):
    console.stream("a\x1b[2J\n")
    assert capsys.readouterr().out == "a\x1b[2J\n"
    monkeypatch.setattr(console, "OUT", Console(force_terminal=True))
    console.stream("é\t\x1b[2J\x9b\x7f\n")
    assert capsys.readouterr().out == "é\t\ufffd[2J\ufffd\ufffd\n"


@pytest.mark.parametrize(
    "flags", [["--max-tokens", "0"], ["--top-p", "2"], ["--init", "nowhere"], ["--prompt", "x" * 101]]
)
def test_generate_refuses(whole, capsys, flags):
    save_weights(Path("model"), CONFIG, whole[0].__getitem__)
    assert cli.main(["generate", "--init", "model", *flags]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("cpuopt: ")


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
    assert cli.main(["convert", "saved", "model.bin"]) == 0  # llm.c's file has no place for it
    capsys.readouterr()
    (run,) = Path("runs").iterdir()
    for where, tokenizer in ((str(run), "bytes"), ("saved", "bytes"), ("from-run", "bytes"), ("model.bin", None)):
        flags = ["generate", "--init", where, "--max-tokens", "30", "--prompt", "12", "--variant", "vanilla"]
        assert cli.main([*flags, "--json"]) == (0 if tokenizer else 2)
        out, err = capsys.readouterr()
        if tokenizer:
            assert (json.loads(out)["tokenizer"], json.loads(out)["prompt_tokens"]) == ("bytes", 2)
        else:
            assert "--tokenizer bytes" in err
    assert cli.main([*flags, "--tokenizer", "bytes"]) == 0
    assert "the context of 16 tokens is full" in capsys.readouterr().err


def test_a_tokenizer_that_is_none_is_refused(whole, capsys):
    save_weights(Path("model"), CONFIG, whole[0].__getitem__, tokenizer="bytes")
    config = Path("model/config.json")
    config.write_text(config.read_text().replace('"bytes"', '["words"]'))
    assert cli.main(["generate", "--init", "model"]) == 2
    assert "cpuopt_tokenizer is ['words']; expected bytes or gpt2" in capsys.readouterr().err


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


def test_a_run_that_kept_no_weights_says_how_to(capsys):
    Path("run").mkdir()
    Path("run/metrics.jsonl").touch()
    for command in (["generate", "--init", "run"], ["convert", "run", "hf"]):
        assert cli.main(command) == 2
        assert "has kept no weights; train with --save-every N" in capsys.readouterr().err


def test_eval_and_generate_run_no_wrong_kernel(whole, capsys, monkeypatch):
    save_weights(Path("model"), CONFIG, whole[0].__getitem__)
    Path("text.txt").write_text("abcdefgh" * 500)
    Path("mine.py").write_text(
        "from cpuopt import kernel, ops\n\n\n@kernel(ops.gelu_forward, 'bad', jit=False)\n"
        "def gelu_forward(out, inp):\n    out[:] = inp\n"
    )
    for verb in (["generate", "--init", "model"], ["eval", "--init", "model", "--data", "text.txt", "-T", "16"]):
        flags = ["--variant", "vanilla", "--kernels", "mine.py", "--swap", "gelu_forward=bad"]
        assert cli.main([*verb, *flags]) == 1
        out, err = capsys.readouterr()
        assert not out
        assert "gelu_forward[bad] is wrong, so nothing is run with it" in err

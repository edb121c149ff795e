"""Evaluation: perplexity, multiple choice, and files that lie."""

import json
from math import log
from pathlib import Path

import numpy as np
import pytest
from test_hostile_files import header, stream
from verbs import fails, printed, ran, refused

from cpuopt import cli
from cpuopt.data import tokenizers
from cpuopt.engine import Engine
from cpuopt.models.gpt2 import GPT2, Config
from cpuopt.train import evaluate
from cpuopt.train.evaluate import read_examples
from cpuopt.weights import save_weights

CONFIG = Config(1, 2, 16, 256, 32)


def write(path, examples):
    """As ``write_evalfile`` of llm.c has it."""
    path.write_bytes(header(20240522, 1, len(examples)) + stream(examples))
    return path


RNG = np.random.Generator(np.random.PCG64(0))


def drawn(n):
    return RNG.integers(0, 256, n).tolist()


EXAMPLES = [(int(RNG.integers(4)), drawn(5), [drawn(n) for n in (3, 1, 7, 4)]) for _ in range(6)]


pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture(scope="module")
def engine():
    return Engine.from_options(GPT2(CONFIG), CONFIG.specs(4, 12), seed=2, train=False)


def test_a_file_is_read_as_it_was_written(tmp_path):
    got = read_examples(write(tmp_path / "x.bin", EXAMPLES), 256)
    assert [(e.label, e.context.tolist(), [c.tolist() for c in e.completions]) for e in got] == EXAMPLES


def test_the_choice_is_the_completion_of_the_lowest_mean_loss(tmp_path, engine):
    """Against losses of single rows, from the logits and in float64."""
    logits, right = engine.program.outputs[1], 0
    for example in read_examples(write(tmp_path / "x.bin", EXAMPLES), 256):
        means = []
        tokens, targets = evaluate.rows_of(example, 12)
        engine.forward(tokens=tokens, targets=targets)
        wide = engine.array(logits).astype(np.float64)
        for row, completion in enumerate(example.completions):
            first = example.context.size - 1
            at = wide[row, first : first + completion.size]
            lse = np.log(np.exp(at - at.max()).sum(axis=-1)) + at.max()
            means.append(float(np.mean(lse - at[np.arange(completion.size), completion])))
        assert evaluate.choose(engine, example, 12) == int(np.argmin(means))
        right += int(np.argmin(means)) == example.label
    found = evaluate.multiple_choice(engine, read_examples(tmp_path / "x.bin", 256), 12)
    assert (found["right"], found["examples"], found["accuracy"]) == (right, 6, right / 6)


def test_only_targets_of_the_completion_count(tmp_path):
    (example,) = read_examples(write(tmp_path / "x.bin", [(1, [7, 8], [[1], [2, 3], [4], [5, 6, 9]])]), 256)
    tokens, targets = evaluate.rows_of(example, 6)
    assert tokens.tolist() == [[7, 8, 1, 0, 0, 0], [7, 8, 2, 3, 0, 0], [7, 8, 4, 0, 0, 0], [7, 8, 5, 6, 9, 0]]
    n = -100
    assert targets.tolist() == [[n, 1, n, n, n, n], [n, 2, 3, n, n, n], [n, 4, n, n, n, n], [n, 5, 6, 9, n, n]]
    fails("5 tokens; the model reads 4", evaluate.rows_of, example, 4)


def test_the_perplexity_of_a_model_that_knows_nothing_is_its_vocabulary(capsys):
    zeros = {n: np.zeros(s, np.float32) for n, s in CONFIG.shapes().items()}
    save_weights(Path("model.bin"), CONFIG, zeros.__getitem__)
    Path("text.txt").write_text("abcdefgh" * 500)
    flags = ["eval", "--init", "model.bin", "--data", "text.txt", "--variant", "vanilla"]
    found = ran(capsys, *flags, "--split", "val")
    assert found["loss"] == pytest.approx(log(256), rel=1e-6)
    assert (found["perplexity"], found["batches"]) == (pytest.approx(256, rel=1e-5), 399 // (4 * 32))
    assert (found["bits_per_byte"], found["bytes"]) == (pytest.approx(8, rel=1e-6), found["batches"] * 4 * 32)
    said = "perplexity 256.00, 8.0000 bits per byte, over 16 of the 4,000 tokens of text.txt (all)"
    assert said in printed(capsys, *flags, "--limit", "2", "-B", "1", "-T", "8")
    for flag, n, said in (
        *(("-T", n, f"-T {n}: expected 1 to 32, the model's context") for n in (33, 0)),
        *((flag, 0, f"{flag} 0: expected 1 or more") for flag in ("-B", "--limit")),
    ):
        assert (cli.main([*flags, flag, str(n)]), capsys.readouterr().err) == (2, f"cpuopt: {said}\n")


def test_a_named_text_is_read_whole_unless_the_weights_were_trained_on_it(capsys):
    Path("text.txt").write_text("abcdefgh" * 500)
    Path("other.txt").write_text("hgfedcba" * 500)
    train = ["train", "--model", "gpt2-tiny", "-B", "2", "-T", "8", "--steps", "1", "--save-every", "1"]
    run = ran(capsys, *train, "--data", "text.txt", "--variant", "vanilla")["path"]

    def of_tokens(data, *flags):
        found = ran(capsys, "eval", "--init", run, "--data", data, "--variant", "vanilla", "--limit", "1", *flags)
        return found["of_tokens"], found["data"]

    assert (of_tokens("other.txt"), of_tokens("text.txt")) == ((4000, "other.txt (all)"), (400, "text.txt (val)"))
    assert of_tokens("text.txt", "--split", "all") == (4000, "text.txt (all)")
    assert of_tokens("other.txt", "--split", "train") == (3600, "other.txt (train)")
    assert of_tokens("builtin")[1] == "builtin (val)"
    Path("short.txt").write_text("abcdefgh" * 3)  # less than a row of the model's context
    assert of_tokens("short.txt") == (24, "short.txt (all)")
    printed(capsys, "data", "tokenize", "text.txt", "ids", "--tokenizer", "bytes")
    assert of_tokens("ids_train.bin", "--tokenizer", "bytes") == (400, "ids_train.bin (val)")  # the file beside it
    assert of_tokens("ids_val.bin", "--tokenizer", "bytes") == (400, "ids_val.bin (all)")


def test_eval_reads_choices(capsys, tmp_path, engine):
    save_weights(Path("model.bin"), CONFIG, {n: p.copy() for n, p in engine.parameters().items()}.__getitem__)
    write(tmp_path / "x.bin", EXAMPLES)
    want = evaluate.multiple_choice(engine, read_examples(tmp_path / "x.bin", 256), 12)
    assert ran(capsys, "eval", "--init", "model.bin", "--choices", "x.bin", "--variant", "vanilla") == want
    write(tmp_path / "x.bin", [(0, list(range(30)), [[1, 2, 3]] * 4)])
    said = refused(capsys, "eval", "--init", "model.bin", "--choices", "x.bin")
    assert "longest example has 33 tokens; the model reads 32" in said


def test_bits_per_byte_count_the_bytes_of_the_targets(engine):
    """A special token stands for no text, and its loss counts; the lengths follow from the tokenizer."""
    lengths = np.arange(256) % 5
    lengths[7] = 0
    rng = np.random.Generator(np.random.PCG64(1))
    batches = [tuple(rng.integers(0, 256, (2, 4, 12), dtype=np.int32)) for _ in range(3)]
    nats = sum(48 * engine.forward(tokens=x, targets=y) for x, y in batches)
    nbytes = sum(sum(0 if t == 7 else t % 5 for t in y.ravel().tolist()) for _, y in batches)
    found = evaluate.perplexity(engine, iter(batches), lengths=lengths)
    assert (found["bytes"], found["bits_per_byte"]) == (nbytes, pytest.approx(nats / log(2) / nbytes))
    for unknown in (None, lengths[:200]):
        found = evaluate.perplexity(engine, iter(batches), lengths=unknown)
        assert (found["bytes"], found["bits_per_byte"]) == (None, None)


def test_the_lengths_of_tokens_are_those_of_their_text(monkeypatch):
    class Words(tokenizers.Bytes):
        vocab_size, eot, stops = 5, 2, frozenset([4])

        def token_bytes(self, token):
            return [b"a", " é".encode(), b"<|endoftext|>", b"\xff\xfe", b"</s>"][token]

    assert tokenizers.byte_lengths("bytes").tolist() == [1] * 256
    monkeypatch.setattr(tokenizers, "get_tokenizer", lambda name: Words())
    assert tokenizers.byte_lengths("words").tolist() == [1, 3, 0, 2, 0]
    monkeypatch.undo()
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "nothing-here")
    assert tokenizers.byte_lengths("gpt2") is None


def test_a_run_ends_with_its_bits_per_byte(capsys):
    Path("text.txt").write_text("abcdefgh" * 500)
    flags = ["train", "--model", "gpt2-tiny", "-B", "2", "-T", "8", "--steps", "1", "--data", "text.txt"]
    found = ran(capsys, *flags, "--variant", "vanilla")
    assert found["val_bits_per_byte"] == pytest.approx(found["val_loss"]["1"] / log(2))
    metrics = [json.loads(line) for line in (Path(found["path"]) / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["val_bits_per_byte"] == found["val_bits_per_byte"]

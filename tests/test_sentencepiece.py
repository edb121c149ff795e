"""SentencePiece's ``tokenizer.model``: the ids of the library that made it, what files add, and files that lie.

``golden/make_sentencepiece.py`` trained the models and wrote the ids.
"""

import json
import shutil
from pathlib import Path

import pytest
from golden.llama2c import draw
from verbs import fails, refused

from cpuopt import cli
from cpuopt.data.sentencepiece import read_pieces
from cpuopt.data.tokenizers import get_tokenizer
from cpuopt.models.llama import Config
from cpuopt.weights import Marks, open_weights, save_weights

HERE = Path(__file__).parent / "golden" / "sentencepiece"
GOLDEN = json.loads((HERE / "ids.json").read_text())
SIZES = Config(410, 16, 32, 1, 2, 1, 8, 32, tie_word_embeddings=True)
READ = draw(SIZES.shapes(), 3).__getitem__


@pytest.fixture
def folder(tmp_path):
    """A function that makes a directory with a model of a kind, and with files beside it."""

    def make(kind, **files):
        shutil.copy(HERE / f"{kind.replace(' ', '_')}.model", tmp_path / "tokenizer.model")
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return str(tmp_path)

    return make


@pytest.mark.parametrize("kind", GOLDEN["ids"])
def test_texts_have_the_ids_of_the_library(folder, kind):
    t = get_tokenizer(folder(kind))
    assert ([t.encode(text) for text in GOLDEN["texts"]], t.name) == (GOLDEN["ids"][kind], "tokenizer.model")
    if kind != "unigram":  # which has pieces for neither all characters nor all bytes
        space, plain = b" " * (kind == "bpe"), [text for text in GOLDEN["texts"] if text and "▁" not in text]
        assert all(b"".join(map(t.token_bytes, t.encode(x))) == space + x.encode() for x in plain)


def test_a_model_names_its_special_tokens(folder):
    for kind, begin, end, pad, texts in (
        ("bpe", 1, 2, None, ("<s>", "</s>")),
        ("bpe without a prefix", 2, 1, 0, ("<bos>", "<eos>", "<pad>")),
    ):
        t = get_tokenizer(folder(kind))
        assert (t.eot, t.end, t.stops, t.pad) == (begin, end, {end}, pad)
        named = dict(zip(("bos_token", "eos_token", "pad_token"), texts, strict=False))
        assert (t.special_tokens, t.start("a")) == ({**named, "unk_token": "<unk>"}, [begin, *t.encode("a")])


def test_files_beside_it_add_tokens_and_come_first(folder):
    added = {"added_tokens_decoder": {"401": {"content": "<|turn|>", "special": True}}, "add_bos_token": False}
    path = folder("bpe", added_tokens={"<pad>": 400}, tokenizer_config=added | {"eos_token": "<|turn|>"})
    t = get_tokenizer(path)
    assert (t.vocab_size, t.id_of("<|turn|>"), t.id_of("<pad>"), t.id_of("no such")) == (402, 401, 400, None)
    assert (t.end, t.stops, t.start("a"), t.token_bytes(401)) == (401, {401}, t.encode("a"), b"<|turn|>")
    assert not {400, 401} & {*t.encode("<pad><|turn|>")}
    for wrong in ({"a": -1}, {"a": "7"}, {"a": 1 << 24}):
        folder("bpe", added_tokens=wrong)
        fails(r"adds the token|has a token", get_tokenizer, path)


def test_a_directory_of_it_goes_into_gguf_and_back(folder, tmp_path, capsys):
    path = folder("bpe", added_tokens={"<|turn|>": 405})
    save_weights(tmp_path / "hf", SIZES, READ, tokenizer=f"{path}/tokenizer.model")
    first = get_tokenizer(str(tmp_path / "hf"))
    assert first.id_of("<|turn|>") == 405
    assert cli.main(["convert", str(tmp_path / "hf"), str(tmp_path / "m.gguf")]) == 0
    t = get_tokenizer(str(tmp_path / "m.gguf"))
    assert (t.eot, t.end, t.id_of("<|turn|>")) == (first.eot, first.end, 405)
    plain = [text for text in GOLDEN["texts"] if text and "<sep>" not in text]
    assert [t.start(x) for x in plain] == [first.start(x) for x in plain]
    folder("unigram", added_tokens={})
    given = (tmp_path / "n.gguf", SIZES, READ)
    fails("GGUF cannot say a model of the kind 'unigram'", save_weights, *given, tokenizer=path)
    assert not (tmp_path / "n.gguf").exists()


def test_a_tokenizer_json_comes_first(folder, tmp_path):
    path = folder("bpe")
    (tmp_path / "tokenizer.json").write_text("{}")
    fails(r"tokenizer\.json' is no tokenizer", get_tokenizer, path)  # and no other is taken unseen


def test_a_table_that_blows_text_up_is_refused(folder, tmp_path):
    path, content = folder("unigram"), (tmp_path / "tokenizer.model").read_bytes()
    grown = read_pieces(content).charsmap + b"x" * 2000 + b"\0"
    rest = b"\x1a" + _size(len(grown) + 3) + b"\x12" + _size(len(grown)) + grown
    (tmp_path / "tokenizer.model").write_bytes(content + rest)
    fails("make a text more than 1024 times as long", get_tokenizer, path)


def _size(n):
    return bytes([n & 127 | 128, n >> 7]) if n > 127 else bytes([n])


@pytest.mark.parametrize("verb", ["train", "eval", "generate", "data show"])
def test_weights_without_a_tokenizer_are_refused_for_text(verb, tmp_path, capsys):
    save_weights(tmp_path / "hf", SIZES, READ, marks=Marks())
    assert open_weights(tmp_path / "hf").tokenizer is None
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n' * 20)
    flags = {
        "train": ["train", "--runs", str(tmp_path / "runs"), "-B", "1", "-T", "8", "--steps", "1"],
        "eval": ["eval", "--data", "builtin", "--limit", "1", "-T", "8"],
        "generate": ["generate", "--prompt", "a", "--max-tokens", "1"],
        "data show": ["data", "show", str(tmp_path / "x.jsonl")],
    }[verb]
    error = refused(capsys, *flags, "--init", str(tmp_path / "hf"))
    assert "comes without a tokenizer for its 410 tokens; put its tokenizer.json or tokenizer.model or" in error
    assert not (tmp_path / "runs").exists()
    if verb in ("generate", "data show"):
        assert cli.main([*flags, "--init", str(tmp_path / "hf"), "--tokenizer", "bytes"]) == 0

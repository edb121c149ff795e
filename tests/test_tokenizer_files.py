"""Tokenizers in files: ``tokenizer.json`` by the library ``tokenizers``, found, kept, used, and files that lie."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from golden.llama2c import draw, model_bin
from hypothesis import given, settings
from hypothesis import strategies as st
from listening import Listener
from small_tokenizers import byte_pairs, pieces
from tokenizers import AddedToken, Tokenizer, decoders, models, processors
from verbs import error_of, fails, printed, process, ran, refused

from cpuopt import cli
from cpuopt.data import encoding, tokenizers
from cpuopt.data.corpus import load_corpus
from cpuopt.data.encoding import encode_text
from cpuopt.data.tokenizers import get_tokenizer
from cpuopt.data.tokens import read_tokens, write_tokens
from cpuopt.errors import UserError
from cpuopt.models.families import PRESETS
from cpuopt.models.gpt2 import Config
from cpuopt.train import checkpoint
from cpuopt.train.job import Settings, prepare
from cpuopt.train.trainer import train
from cpuopt.weights import Marks, open_weights, save_weights
from cpuopt.weights.vocabulary import metadata_of

TEXT = Path(json.__file__).read_text() + "naïve café, größer, 你好 \U0001f600\n"


def byte_level():
    """The kind of GPT-2, Llama 3, SmolLM2 and Qwen, with Llama 3's first token and Qwen's chat."""
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"]
    t = byte_pairs(texts=[TEXT], size=400, special=special)
    t.add_tokens([AddedToken("<think>", special=False)])
    t.post_processor = processors.TemplateProcessing("<|begin_of_text|> $A", None, [("<|begin_of_text|>", 0)])
    return t


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    byte_level().save(str(path := tmp_path_factory.mktemp("json") / "tokenizer.json"))
    return path


@pytest.fixture
def read(tmp_path):
    """Save a tokenizer, or its text, and read it."""

    def of(made, name="tokenizer.json"):
        (tmp_path / name).write_text(made if isinstance(made, str) else made.to_str())
        return get_tokenizer(str(tmp_path / name))

    return of


def test_bytes_in_are_bytes_out(file):
    t = get_tokenizer(str(file))
    assert (t.name, t.vocab_size, t.eot, t.before, t.stops) == ("tokenizer.json", 401, 0, [0], {1, 3})

    @given(st.text(max_size=30))
    @settings(max_examples=200, deadline=None)
    def check(text):
        ids = t.encode(text)
        assert (b"".join(map(t.token_bytes, ids)), t.start(text)) == (text.encode(errors="replace"), [0, *ids])

    check()
    assert t.encode(TEXT) == t.encoding.encode(TEXT, add_special_tokens=False).ids
    assert len(t.encode(TEXT)) < 0.6 * len(TEXT)


def test_nothing_in_a_text_is_special(file):
    t = get_tokenizer(str(file))
    ids = t.encode("<|im_end|> and <think>")
    assert t.id_of("<|im_end|>") == 3 not in ids
    assert t.id_of("<think>") == 400 in ids  # a token of the text, which the file does not call special
    assert t.decode([2, *t.encode("hi"), 3]) == "<|im_start|>hi<|im_end|>"
    assert t.id_of("no such token") is None
    assert t.decode([5000]) == "\ufffd"


def test_a_unigram_that_finds_special_tokens_in_text_is_stopped(read):
    t = Tokenizer(models.Unigram([(c, -2.0) for c in ("<unk>", "<s>", "</s>", *"▁abs</>")], unk_id=0))
    t.decoder = decoders.Metaspace()
    t.add_special_tokens(["<unk>", "<s>", "</s>"])
    t = read(t)
    assert t.encode("a<b") == [4, 7, 5]
    assert t.encode("a?") == [4, 0]  # what is unknown may be
    fails("makes a special token of '</s>' in a text; take it out of the text", t.encode, "a</s>b")


def test_sentencepiece_kind_has_spaces_and_single_bytes(read):
    t = read(pieces())
    ids = t.encode("hen a\u20ad")
    assert (b"".join(map(t.token_bytes, ids)), ids[-3:]) == (" hen a\u20ad".encode(), [0xE2 + 3, 0x82 + 3, 0xAD + 3])
    assert (t.eot, t.before, t.stops, t.start("")) == (1, [1], {2}, [1])


def tags(behind=False):
    """The kind of Gemma, in whose vocabulary ``</s>`` is HTML's tag."""
    t = Tokenizer(models.BPE({c: i for i, c in enumerate(["ab", "a", "b", "c", "d"])}, []))
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens(["<pad>", "<eos>", "<bos>"])
    t.add_tokens([AddedToken(tag, special=False) for tag in ("<s>", "</s>")])
    if behind:
        t.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 6)])
    return t


def beside(**files):
    return {f"{name}.json": json.dumps(content) for name, content in files.items()}


MARKED = {
    "config.json": (beside(config={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}), 1, [2], 3),
    "a list": (beside(config={"eos_token_id": 2}, generation_config={"eos_token_id": [3, 4]}), 7, [3, 4, 2], None),
    "texts": (beside(tokenizer_config={"bos_token": "a", "eos_token": {"content": "b"}, "pad_token": "c"}), 1, [2], 3),
    "a map": (beside(special_tokens_map={"eos_token": "a"}), 7, [1], None),
    "null in place of a map's": (
        beside(special_tokens_map={"eos_token": "a"}, tokenizer_config={"eos_token": None}, config={"eos_token_id": 2}),
        *(7, [2], None),
    ),
    "a text first": (beside(tokenizer_config={"eos_token": "a"}, config={"eos_token_id": [2, 1]}), 7, [1, 2], None),
    "an id beyond all": (beside(config={"eos_token_id": [99, 2], "pad_token_id": -1}), 7, [2], None),
    "no file": ({}, 7, [6], None),
}
"""Files beside a tokenizer's, and the ids that begin, end (the first of them a text) and fill up."""


@pytest.mark.parametrize("case", MARKED)
def test_the_files_of_a_model_name_what_begins_and_ends_a_text(tmp_path, read, case):
    files, begin, ends, pad = MARKED[case]
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    t, path = read(tags()), tmp_path / "tokenizer.json"
    assert (t.eot, t.end, t.stops, t.pad) == (begin, ends[0], set(ends), pad)
    lengths = tokenizers.byte_lengths(str(path))
    assert (lengths[9], {int(lengths[i]) for i in (t.eot, *ends)}) == (4, {0})
    assert t.special_tokens["eos_token"] == t.texts[ends[0]]
    kept = tokenizers.tokenizer_files(str(path))  # as in the folder of a run, where config.json is not the model's
    for name, content in kept.items():
        (tmp_path / "copy" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "copy" / name).write_bytes(content)
    again = get_tokenizer(str(tmp_path / "copy" / "tokenizer.json"))
    assert (again.eot, again.end, again.pad, again.special_tokens) == (t.eot, t.end, t.pad, t.special_tokens)


def test_an_end_behind_a_text_and_an_end_alone_are_marks(read):
    t = read(tags(behind=True))
    assert (t.end, t.start("ab")) == (6, [1, 2])
    alone = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    alone.decoder = decoders.ByteLevel()
    alone.add_special_tokens(["<eos>"])
    t = read(alone, "alone.json")
    assert (t.eot, t.end, t.stops, t.special_tokens) == (2, 2, {2}, {"eos_token": "<eos>"})


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer_config.json", '{"eos_token": 7}', "eos_token is 7; expected a token's text, or null"),
        ("tokenizer_config.json", "[1]", "is no JSON object"),
        ("tokenizer_config.json", '{"chat_template": 7}', "chat_template is 7; expected a text, or a list"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "a"}]}', "expected a text, or a list of names and"),
        ("chat_template.jinja", "\udcff", "no UTF-8"),
        ("generation_config.json", '{"eos_token_id": "7"}', "eos_token_id is '7'; expected a token's id, or null"),
        ("config.json", '{"eos_token_id": [1, true]}', "eos_token_id is .1, True.; expected a token's id, or null"),
        ("config.json", '{"bos_token_id": -1}', "bos_token_id is -1; expected a token's id, or null"),
    ],
)
def test_marks_that_are_none_are_refused_with_their_file(tmp_path, read, name, content, words):
    (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
    fails(words, read, tags())


METASPACE = {"type": "Metaspace", "replacement": "·", "prepend_scheme": "always", "split": True}
MARK = {"type": "Replace", "pattern": {"String": "·"}, "content": " "}


@pytest.mark.parametrize(
    "decoder",
    [METASPACE, {"type": "Sequence", "decoders": [MARK, {"type": "ByteFallback"}, {"type": "Fuse"}]}],
    ids=["metaspace", "replace"],
)
def test_a_mark_of_spaces_is_the_one_of_the_decoder(tmp_path, read, decoder):
    made = Tokenizer(models.BPE({c: i for i, c in enumerate("·▁abcd")}, []))
    content = json.loads(made.to_str()) | {"pre_tokenizer": METASPACE, "decoder": decoder}
    t = read(json.dumps(content))
    assert t.decode(t.encode("ab cd▁")) == " ab cd▁"
    content["model"]["byte_fallback"] = True
    (path := tmp_path / "tokenizer.json").write_text(json.dumps(content))
    fails("GGUF cannot say what its normalizer does", metadata_of, str(path), 6, Marks())
    for wrong in ({"pattern": {"String": ""}}, {"pattern": {"Regex": "·"}}, {"content": " " * 9}):
        fails("its decoder replaces", read, json.dumps(content | {"decoder": MARK | wrong}))


def test_a_long_text_is_cut_between_lines(file, monkeypatch):
    t, text = get_tokenizer(str(file)), "one line\n\n  and two\n" * 50
    whole = [t.eot, *t.encode(text)]
    for part in (1, 7, 100, 5000):
        monkeypatch.setattr(encoding, "PART", part)
        assert encode_text(t, [text]).tolist() == whole


SPM = Path(__file__).parent / "golden" / "sentencepiece" / "bpe.model"


@pytest.mark.parametrize("library", ["tokenizers", "sentencepiece"])
def test_without_the_library_the_extra_is_named(file, monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    tokenizers._from_file.cache_clear()
    said = error_of(get_tokenizer, str(file if library == "tokenizers" else SPM))
    assert all(x in said for x in (f"needs the library {library}", "pip install 'cpuopt[hf]'"))


def test_a_folder_another_name_and_no_file_are_refused(tmp_path):
    (tmp_path / "folder.json").mkdir()
    for name, words in {"folder.json": "has no tokenizer", "none.json": "no tokenizer", "a.txt": "unknown"}.items():
        assert words in error_of(get_tokenizer, str(tmp_path / name))


# In a corpus, a run, and beside weights


def test_a_corpus_is_encoded_and_large_ids_keep_their_bits(tmp_path, file):
    (tmp_path / "a.txt").write_text(TEXT)
    sizes = {"vocab_size": 401, "T": 8, "B": 2}
    corpus, t = load_corpus(str(tmp_path / "a.txt"), **sizes, tokenizer=str(file)), get_tokenizer(str(file))
    assert [*corpus.train, *corpus.val] == [0, *t.encode(TEXT)]
    assert (corpus.tokenizer, corpus.train.dtype) == (str(file), np.uint16)
    with pytest.raises(UserError, match="has 401 tokens, and the model's vocabulary 256"):
        load_corpus(str(tmp_path / "a.txt"), **sizes | {"vocab_size": 256}, tokenizer=str(file))
    table = json.loads(file.read_bytes())
    table["model"]["vocab"][t.texts[max(t.encode(TEXT))]] = 70_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(table))
    sizes["vocab_size"] = 70_001
    corpus = load_corpus(str(tmp_path / "a.txt"), **sizes, tokenizer=str(tmp_path / "tokenizer.json"))
    assert (corpus.train.dtype, corpus.train.max()) == (np.int32, 70_000)
    write_tokens(tmp_path / "t.bin", corpus.train, wide=True)
    assert (tmp_path / "t.bin").read_bytes()[:12] == np.array([20240801, 7, corpus.train.size], "<i4").tobytes()
    assert read_tokens(tmp_path / "t.bin").tolist() == corpus.train.tolist()
    again = load_corpus(str(tmp_path / "t.bin"), **sizes)
    assert again.batches("train", 2, 8).at(0)[0].tolist() == corpus.batches("train", 2, 8).at(0)[0].tolist()


def test_text_becomes_token_files_that_are_the_same_data(tmp_path, file, capsys):
    (tmp_path / "a.txt").write_text(TEXT)
    flags = ["data", "tokenize", str(tmp_path / "a.txt"), str(tmp_path / "mine"), "--tokenizer", str(file)]
    printed(capsys, *flags)
    sizes = {"vocab_size": 401, "T": 8, "B": 2, "tokenizer": str(file)}
    text, tokens = (load_corpus(str(tmp_path / name), **sizes) for name in ("a.txt", "mine_train.bin"))
    assert (tokens.train.tolist(), tokens.val.tolist()) == (text.train.tolist(), text.val.tolist())
    assert "mine_train.bin: it is there already" in refused(capsys, *flags)


def test_a_tokenizer_is_trained_on_a_text_and_a_model_with_it(here, capsys):
    Path("a.txt").write_text(TEXT)
    flags = ["data", "train-tokenizer", "a.txt", "--vocab-size", "400", "--out"]
    assert cli.main([*flags, "mine"]) == 0
    t = get_tokenizer("mine")
    assert (t.vocab_size, t.eot, t.end, t.stops) == (400, 0, 0, {0})
    assert t.special_tokens == dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    assert all(t.id_of(name) in range(3) for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    assert b"".join(map(t.token_bytes, t.encode(TEXT + "\0\ufeff€"))) == (TEXT + "\0\ufeff€").encode()
    assert len(t.encode(TEXT)) < 0.6 * len(TEXT.encode())
    assert process(*flags, "again.json", PYTHONHASHSEED="7").returncode == 0
    assert Path("again.json").read_bytes() == Path("mine/tokenizer.json").read_bytes()
    sizes = json.dumps({"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 400, "block_size": 32})
    how = ["-B", "2", "-T", "8", "--steps", "1", "--variant", "vanilla", "--val-every", "0", "--save", "out"]
    printed(capsys, "train", "--model", sizes, "--data", "a.txt", "--tokenizer", "mine", *how)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert Path("out", name).read_bytes() == Path("mine", name).read_bytes()
    Path("t.bin").touch()
    Path("text.txt").write_text("ab" * 99)
    for words, error in {
        "a.txt --vocab-size 400 --out mine": "mine: it is there already",
        "a.txt --vocab-size 400 --out none/x": "cannot be written (No such directory)",
        "a.txt --vocab-size 258 --out new": "--vocab-size 258: expected 259 (256 bytes and 3 special tokens) to",
        "text.txt --vocab-size 4000 --out new": "the text has pairs for 2",
        "t.bin --out new": "'t.bin' has tokens by its name; expected text",
        "none.txt --out new": "there is no data 'none.txt'",
    }.items():
        assert error in refused(capsys, "data", "train-tokenizer", *words.split())
    assert not Path("new").exists()


def test_a_highest_bit_is_an_id_of_no_vocabulary(tmp_path):
    ids, head = np.array([1, 2**31 + 5, *[1] * 50], "<u4"), np.zeros(256, "<i4")
    head[:3] = 20240801, 7, ids.size
    (tmp_path / "t.bin").write_bytes(head.tobytes() + ids.tobytes())
    fails("token 1 is -", load_corpus, str(tmp_path / "t.bin"), vocab_size=2**31 - 1, T=2, B=1)


@pytest.fixture
def folder(tmp_path, file):
    """A model with a tokenizer of 401 tokens in Hugging Face's directory, and other files that belong to it."""
    c, about = Config(1, 2, 16, 401, 32), {"tokenizer": str(tmp_path / "tokenizer.json"), "marks": Marks(0, (1, 3))}
    shutil.copy(file, tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    save_weights(tmp_path / "hf", c, draw(c.shapes(), 3).__getitem__, **about)
    return tmp_path / "hf"


def test_a_text_ends_at_the_ids_that_the_files_of_a_model_name(folder, capsys):
    flags = ["generate", "--init", str(folder), "--prompt", "ab", "--max-tokens", "9", "--temperature", "2"]
    found = ran(capsys, *flags)
    assert found["stopped"] == "max tokens"
    end = next(i for i, t in enumerate(found["ids"]) if i > 1 and t not in found["ids"][:i])
    for where, ids in (("generation_config.json", found["ids"][end]), ("config.json", [400, found["ids"][end]])):
        before = (folder / where).read_text() if (folder / where).exists() else "{}"
        (folder / where).write_text(json.dumps(json.loads(before) | {"eos_token_id": ids}))
        ended = ran(capsys, *flags)
        assert (ended["ids"], ended["stopped"]) == (found["ids"][:end], "end of text")
        (folder / where).write_text(before)


def test_a_run_keeps_its_tokenizer(tmp_path, folder, capsys):
    (tmp_path / "a.txt").write_text(TEXT)
    runs = tmp_path / "runs"
    flags = ["train", "--init", str(folder), "--data", str(tmp_path / "a.txt"), "--variant", "vanilla"]
    flags += ["-B", "2", "-T", "8", "--val-every", "0", "--save-every", "1", "--runs", str(runs)]
    assert cli.main([*flags, "--steps", "1", "--save", str(tmp_path / "out")]) == 0
    (run,) = runs.iterdir()
    for place in (run, tmp_path / "out"):
        assert (place / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
        weights = checkpoint.open_weights(place)
        assert (weights.tokenizer, weights.marks) == (str(place / "tokenizer.json"), Marks(0, (1, 3)))
    shutil.rmtree(folder)  # what the run needs is its own
    flags = ["--resume", str(run), "--runs", str(runs), "--steps", "2", "--save", str(tmp_path / "more")]
    assert cli.main(["train", *flags]) == 0
    state = json.loads((checkpoint.newest(run).path / "state.json").read_text())
    assert (state["step"], state["tokenizer"]) == (2, "tokenizer.json")


def test_a_tokenizer_that_is_gone_at_the_end_of_a_run_costs_no_weights(tmp_path, folder):
    (tmp_path / "a.txt").write_text(TEXT)
    kept, out = (folder / "tokenizer.json").read_bytes(), tmp_path / "out"
    how = {"B": 2, "T": 8, "steps": 2, "val_every": 0, "variant": "vanilla", "save": str(out)}
    job = prepare(Settings(init=str(folder), data=str(tmp_path / "a.txt"), **how))
    result = train(job, tmp_path / "runs", Listener(1, lambda: shutil.rmtree(folder)))
    assert (result.status, result.summary["weights"]) == (0, str(out))
    assert (open_weights(out).tokenizer, (out / "tokenizer.json").read_bytes()) == (str(out / "tokenizer.json"), kept)


def test_a_tokenizer_of_another_model_in_the_folder_is_refused_by_name(tmp_path, file, capsys):
    c = replace(PRESETS["llama-tiny"], num_hidden_layers=1)
    (tmp_path / "m.bin").write_bytes(model_bin(c, draw(c.shapes(), 3)))
    shutil.copy(file, tmp_path / "tokenizer.json")
    for verb in (["generate", "--prompt", "a", "--init"], ["eval", "--data", "builtin", "--init"], ["convert"]):
        target = [str(tmp_path / "new")] if verb == ["convert"] else []
        error = refused(capsys, *verb, str(tmp_path / "m.bin"), *target)
        assert "has 401 tokens, and the model's vocabulary 256; name the model's own with --tokenizer" in error
    assert not (tmp_path / "new").exists()
    assert cli.main(["convert", str(tmp_path / "m.bin"), str(tmp_path / "new"), "--tokenizer", "bytes"]) == 0


def test_another_tokenizer_beside_a_file_of_llmc_is_not_overwritten(tmp_path, file):
    config = Config(1, 2, 16, 401, 32)
    params = draw(config.shapes(), 3)
    (tmp_path / "one").mkdir()
    for name in ("a.bin", "b.bin"):
        save_weights(tmp_path / "one" / name, config, params.__getitem__, tokenizer=str(file))
    assert (tmp_path / "one" / "tokenizer.json").read_bytes() == file.read_bytes()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tokenizer.json").write_bytes(b"mine")
    with pytest.raises(UserError, match="is another tokenizer than the model's"):
        save_weights(tmp_path / "other" / "a.bin", config, params.__getitem__, tokenizer=str(file))
    assert {p.name: p.read_bytes() for p in (tmp_path / "other").iterdir()} == {"tokenizer.json": b"mine"}

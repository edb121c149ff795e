"""Tokenizers that grow, panic or fill the memory, long texts, and vocabularies that are not the published ones."""

import base64
import json
import os
import struct
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from verbs import fails

from cpuopt import cli
from cpuopt.data import corpus, encoding
from cpuopt.data.corpus import load_corpus
from cpuopt.data.encoding import encode_text, parts
from cpuopt.data.tokenizers import BYTES, GPT2_VOCABULARY, get_tokenizer, vocabulary_places
from cpuopt.errors import UserError

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


pytestmark = pytest.mark.usefixtures("here")


# Tokenizers


def tokenizer(normalizer=None, before=None, added=(), **model):
    """Write a tokenizer.json whose tokens are single bytes; return its path."""
    vocab = {c: i for i, c in enumerate(sorted(BYTES))} | {"▁": 256, "é": 257}
    model = {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": False, "fuse_unk": False, **model}
    content = {"version": "1.0", "added_tokens": list(added), "normalizer": normalizer, "post_processor": None}
    content |= {"pre_tokenizer": before or BYTE_LEVEL, "decoder": BYTE_LEVEL, "model": model}
    Path("tokenizer.json").write_text(json.dumps(content))
    return "tokenizer.json"


def replace(text, by):
    return {"type": "Replace", "pattern": {"String": text}, "content": by}


def sequence(*normalizers):
    return {"type": "Sequence", "normalizers": list(normalizers)}


def split(pattern):
    parts = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [parts, BYTE_LEVEL | {"use_regex": False}]}


def charsmap(*texts):
    """Make a table of SentencePiece's kind, without its trie."""
    table = struct.pack("<I", 0) + b"".join(t + b"\0" for t in texts)
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


STEPS = {"type": "Sequence", "pretokenizers": [BYTE_LEVEL | {"use_regex": False}] * 30}
AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")
GROWING = {
    "doubled 40 times": sequence(*[replace("a", "aa")] * 40),
    "nested": sequence(sequence(*[replace("a", "aa")] * 6), sequence(*[replace("a", "aa")] * 6)),
    "one long text": replace("a", "a" * 2000),
    "a pattern that matches nothing": {"type": "Replace", "pattern": {"Regex": "(?=.)"}, "content": "a" * 2000},
    "bytes of bytes": sequence(*[{"type": "ByteLevel"}] * 30),
    "put before": {"type": "Prepend", "prepend": "a" * 100},
    "in many steps": sequence(*[replace("a", "aab"), replace("b", "ba")] * 12),
    "a table": charsmap(b"short", b"a" * 2000),
    "no object": [replace("a", "aa")],
}
REFUSED = {
    **{name: ({"normalizer": x}, "(times|bytes|part)") for name, x in GROWING.items()},
    "steps before the model": ({"before": STEPS}, "1024 times as long"),
    **{name: ({name: "#" * 1000}, f"{name} has 1000 characters; expected 8 at most") for name in AFFIXES},
    "a pattern that panics": ({"before": split("(" * 40)}, ""),  # at the single letter that a file is tried with
}


@pytest.mark.parametrize(("parts", "words"), REFUSED.values(), ids=REFUSED)
def test_a_tokenizer_that_can_grow_without_bound_or_panics_is_refused(parts, words, capfd):
    fails(rf"'tokenizer.json' is no tokenizer.json that can be read.*{words}", get_tokenizer, tokenizer(**parts))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("normalizer", [replace("e", "e" * 300), sequence(*[replace("e", "ee")] * 8)])
def test_growth_within_the_bound_is_measured_on_the_text(normalizer):
    t = get_tokenizer(tokenizer(normalizer))
    assert len(t.encode("a short text")) > 12
    for text in ("see the eel\n" * 10, "see the eel\n" * 100_000):
        fails(r"makes the text .* times as long; expected 8 at most", t.encode, text)


def test_growth_is_measured_with_the_tokens_of_the_file():
    added = {"id": 258, "content": "e", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    by_eight = sequence({"type": "Prepend", "prepend": "aaaaaaaa"}, replace("a", "a" * 16))
    t = get_tokenizer(tokenizer(by_eight, added=[added | {"special": False}]))
    fails("times as long", t.encode, "xexexexe" * 200)


def test_usual_tokenizers_are_not_touched_by_it():
    """Llama 2's steps, and T5's: every text becomes what the library alone makes of it."""
    llama = sequence({"type": "Prepend", "prepend": "▁"}, replace(" ", "▁"))
    many = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}
    for normalizer in (llama, sequence({"type": "NFKC"}, many), None):
        path = tokenizer(normalizer)
        t, plain = get_tokenizer(path), Tokenizer.from_file(path)
        for text in (" " * 5000, "some words\n" * 3000, "你好 \U0001f600 größer " * 300, "a"):
            assert t.encode(text) == plain.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)+$", "^(([a-z])+.)+[A-Z]([a-z])+$"])
def test_a_pattern_that_panics_is_one_line(pattern, capfd):
    path = tokenizer(before=split(pattern))
    Path("text.txt").write_text("a" * 60 + "!\n")
    assert cli.main(["data", "tokenize", "text.txt", "mine", "--tokenizer", path]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert all(x in line for x in ("'tokenizer.json' fails on the text: ", "retry-limit-in-match"))
    os.write(2, b"still there\n")
    assert capfd.readouterr().err == "still there\n"


# Long texts


def test_a_text_of_one_line_is_cut_before_a_word(monkeypatch):
    monkeypatch.setattr(encoding, "PART", 10)
    monkeypatch.setattr(encoding, "LONG", 20)
    lines = "short\nlines\nof a text\n" * 9
    for text in ("some words in one line " * 20, "a" * 100, " " * 100, lines, "", "a\n\n\n" * 30):
        for stretch in (1, 7, 1000):
            cut = list(parts(text[i : i + stretch] for i in range(0, len(text), stretch)))
            assert "".join(cut) == text
            assert all(0 < len(part) <= 20 for part in cut)
            assert cut == list(parts([text]))  # wherever it was read in pieces
    assert [*parts(["some words in one line, " * 2])] == ["some words in one", " line, some words", " in one line, "]
    assert [*parts(["some words\nand a line that goes on"])] == ["some words\n", "and a line that", " goes on"]


def test_the_memory_that_encoding_takes_is_counted_before_and_while_it_runs(monkeypatch, capsys):
    monkeypatch.setattr(encoding, "PART", 1000)
    Path("text.txt").write_text("a line of text\n" * 1000)
    t, free = get_tokenizer(tokenizer()), iter([encoding.PER_PART + 1000] * 3)
    monkeypatch.setattr(encoding, "available_bytes", lambda: next(free))
    with pytest.raises(UserError, match=r"turn the text into tokens needs 0\.63 GB more, and 0\.63 GB of memory are"):
        load_corpus("text.txt", vocab_size=258, T=8, B=1, tokenizer="tokenizer.json")
    monkeypatch.setattr(encoding, "available_bytes", lambda: 10**6)
    monkeypatch.setattr(t, "encode", lambda text: pytest.fail("it began"))
    fails("needs", encode_text, t, ["a" * 5000], 5000)


def test_a_nul_byte_anywhere_is_no_text(monkeypatch):
    monkeypatch.setattr(corpus, "PIECE", 1000)
    whole = bytearray(b"some text\n" * 20_000)
    Path("a.txt").write_bytes(whole)
    assert load_corpus("a.txt", vocab_size=256, T=8, B=1).n_tokens == len(whole)
    for at in (0, 70_000, 131_072, len(whole) - 1):
        Path("a.txt").write_bytes(whole[:at] + b"\0" + whole[at + 1 :])
        fails(f"byte {at} is NUL" if at else "is not text", load_corpus, "a.txt", vocab_size=256, T=8, B=1)


VOCABULARIES = {
    "tampered": lambda place: place.write_bytes(b"IQ== 0\n" * (GPT2_VOCABULARY.size // 7)),
    "short": Path.touch,
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "missing": lambda place: None,
    "loop": lambda place: place.symlink_to(place),
}


@pytest.mark.parametrize("make", VOCABULARIES.values(), ids=VOCABULARIES)
def test_a_vocabulary_that_is_not_the_published_one(make, monkeypatch, tmp_path):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    (place,) = vocabulary_places()
    make(place)
    fails("missing or damaged; run `cpuopt data prepare", get_tokenizer, "gpt2")
    assert not GPT2_VOCABULARY.is_at(place)

"""llama2.c's model files and tokenizer: read, computed as ``run.c`` does, and files that lie."""

from dataclasses import replace

import numpy as np
import pytest
from golden.llama2c import draw, logits_of, model_bin, tokenizer_bin
from hypothesis import given, settings
from hypothesis import strategies as st
from verbs import refused

from cpuopt import cli, models
from cpuopt.data.pieces import Pieces
from cpuopt.data.tokenizers import get_tokenizer
from cpuopt.engine import Engine
from cpuopt.models.llama import Config
from cpuopt.weights import copy_into, llama2c, open_weights

SMALL = Config(300, 24, 20, 2, 6, 2, 4, 16, tie_word_embeddings=True)
UNTIED = replace(SMALL, tie_word_embeddings=False)


def same(weights, params):
    return all(np.array_equal(weights.read(name), p) for name, p in params.items())


def saved(path, config=SMALL, seed=1, version=0):
    params = draw(config.shapes(), seed)
    path.write_bytes(model_bin(config, params, version))
    return params


# Files


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("config", [SMALL, UNTIED])
def test_a_file_is_read(tmp_path, config, version):
    params = saved(tmp_path / "m.bin", config, version=version)
    weights = open_weights(tmp_path / "m.bin")
    assert (weights.config, weights.dtype, weights.marks.bos, weights.marks.eos) == (config, "f32", 1, (2,))
    assert same(weights, params)


def test_none_is_written(tmp_path, capsys):
    saved(tmp_path / "m.bin")
    said = refused(capsys, "convert", str(tmp_path / "m.bin"), str(tmp_path / "new.bin"))
    assert "llm.c's file cannot hold the model llama; name a directory" in said
    assert [p.name for p in tmp_path.iterdir()] == ["m.bin"]


def test_our_logits_are_those_of_run_c(tmp_path, monkeypatch):
    config = models.parse("stories260K")
    saved(tmp_path / "m.bin", config, seed=3)
    T = 24
    engine = Engine(config.module(), config.specs(1, T), seed=None, train=False)
    tokens = np.random.default_rng(5).integers(0, 512, (1, T)).astype(np.int32)
    theirs = logits_of((tmp_path / "m.bin").read_bytes(), tokens[0])

    def error():
        copy_into(engine.parameters(), open_weights(tmp_path / "m.bin"))
        engine.forward(tokens=tokens, targets=tokens)
        return np.abs(engine.array(engine.program.outputs[1])[0] - theirs).max() / np.abs(theirs).max()

    assert error() <= 1e-5
    monkeypatch.setattr(llama2c, "halves", lambda x, head_dim: x)  # the mutant: rows of q and k as they are there
    assert error() > 1e-2


# The tokenizer


def naive(pieces, text):
    """run.c's own loop: of all neighbours, the first of the highest score, again and again."""
    ids = [pieces.ids[b" "]] if text else []
    for c in text:
        raw = c.encode()
        ids += [pieces.ids[raw]] if raw in pieces.ids else [b + 3 for b in raw]
    while True:
        best, at, into = -1e10, None, None
        for i in range(len(ids) - 1):
            piece = pieces.ids.get(pieces.texts[ids[i]] + pieces.texts[ids[i + 1]])
            if piece is not None and pieces.scores[piece] > best:
                best, at, into = pieces.scores[piece], i, piece
        if at is None:
            return ids
        ids[at : at + 2] = [into]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary") / "tok512.bin"
    path.write_bytes(tokenizer_bin(512))
    return path


def test_pieces_are_merged_as_run_c_merges_them(vocabulary):
    pieces = Pieces(vocabulary)
    assert len(pieces.texts) == 512

    @given(st.text(st.sampled_from(" abcdenorst\n") | st.characters(), max_size=40))
    @settings(max_examples=200, deadline=None)
    def check(text):
        text = text.encode(errors="replace").decode()
        ids = pieces.encode(text)
        assert ids == naive(pieces, text)
        assert b"".join(map(pieces.bytes_of, ids)) == (f" {text}" if text else "").encode()

    check()
    tokenizer = get_tokenizer(str(vocabulary))
    assert tokenizer.start("") == [1]
    assert tokenizer.start("\u20ac") == [1, pieces.ids[b" "], 0xE2 + 3, 0x82 + 3, 0xAC + 3]
    assert tokenizer.decode([0xE2 + 3, 0x82 + 3, 0xAC + 3, 600]) == "\u20ac\ufffd"
    assert (tokenizer.vocab_size, tokenizer.id_of(" "), tokenizer.id_of("no such")) == (512, pieces.ids[b" "], None)


def test_a_piece_of_two_words_is_merged_too_and_equal_scores_from_the_left(tmp_path):
    more = [(c, 0.0) for c in (b" ", b"a", b"b")] + [(b"a ", -1.0), (b"a b", -2.0), (b" b", -3.0), (b" a", -0.5)]
    for size, words in ((262, True), (266, False)):
        (tmp_path / "t.bin").write_bytes(tokenizer_bin(size, more=more))
        pieces = Pieces(tmp_path / "t.bin")
        assert pieces.in_words is words
        for text in ("a b", "a a b  a b", "ba b"):
            assert pieces.encode(text) == naive(pieces, text)

    content = tokenizer_bin(262, more=[(b" ", 0.0), (b"a", 0.0), (b"aa", -1.0)])
    (tmp_path / "t.bin").write_bytes(content)
    pieces = Pieces(tmp_path / "t.bin")
    assert pieces.encode("aaa") == [259, 261, 260] == naive(pieces, "aaa")


def test_a_tokenizer_beside_a_model_is_found_and_kept(tmp_path, vocabulary):
    saved(tmp_path / "m.bin", replace(SMALL, vocab_size=512))
    (tmp_path / "tokenizer.bin").write_bytes(vocabulary.read_bytes())
    assert open_weights(tmp_path / "m.bin").tokenizer == str(tmp_path / "tokenizer.bin")
    assert cli.main(["convert", str(tmp_path / "m.bin"), str(tmp_path / "hf")]) == 0
    assert (tmp_path / "hf" / "tokenizer.bin").read_bytes() == vocabulary.read_bytes()

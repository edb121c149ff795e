"""llama2.c's model files and tokenizer: read, computed as ``run.c`` does, and files that lie."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from golden.llama2c import draw, logits_of, model_bin, tokenizer_bin
from hypothesis import given, settings
from hypothesis import strategies as st
from test_weights import same

from cpuopt import cli, models
from cpuopt.data.tokenizers import get_tokenizer
from cpuopt.engine import Engine
from cpuopt.models.llama import Config
from cpuopt.weights import copy_into, llama2c, open_weights

SMALL = Config(300, 24, 20, 2, 6, 2, 4, 16, tie_word_embeddings=True)
UNTIED = replace(SMALL, tie_word_embeddings=False)


def saved(path, config=SMALL, seed=1, version=0):
    params = draw(config.shapes(), seed)
    path.write_bytes(model_bin(config, params, version))
    return params


# Files


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("config", [SMALL, UNTIED])
def test_a_file_is_read(tmp_path, config, version):
    params, weights = saved(tmp_path / "m.bin", config, version=version), open_weights(tmp_path / "m.bin")
    assert (weights.config, weights.dtype, weights.marks.bos, weights.marks.eos) == (config, "f32", 1, (2,))
    assert same(weights, params)


def test_our_logits_are_those_of_run_c(tmp_path, monkeypatch):
    config = models.parse("stories260K")
    saved(tmp_path / "m.bin", config, seed=3)
    T = 24
    engine = Engine.from_options(config.module(), config.specs(1, T), seed=None, train=False)
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


def naive(tokenizer, scores, text):
    """run.c's own loop: of all neighbours, the first of the highest score, again and again."""
    pieces = {tokenizer.token_bytes(i): i for i in range(259, tokenizer.vocab_size)}
    ids = [pieces[b" "]] if text else []
    for c in text:
        raw = c.encode()
        ids += [pieces[raw]] if raw in pieces else [b + 3 for b in raw]
    texts = {i: raw for raw, i in pieces.items()}
    while True:
        best, at, into = -1e10, None, None
        for i, (a, b) in enumerate(pairwise(ids)):
            piece = pieces.get(texts.get(a, b"?") + texts.get(b, b"?"))
            if piece is not None and scores[piece] > best:
                best, at, into = scores[piece], i, piece
        if at is None:
            return ids
        ids[at : at + 2] = [into]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary") / "tok512.bin"
    path.write_bytes(tokenizer_bin(512))
    return path


def test_pieces_are_merged_as_run_c_merges_them(vocabulary):
    tokenizer, scores = get_tokenizer(str(vocabulary)), [0.0] * 259 + [-float(n) for n in range(253)]
    assert tokenizer.vocab_size == 512

    @given(st.text(st.sampled_from(" abcdenorst\n") | st.characters(exclude_characters="▁"), max_size=40))
    @settings(max_examples=200, deadline=None)
    def check(text):
        text = text.encode(errors="replace").decode()
        ids = tokenizer.encode(text)
        assert ids == naive(tokenizer, scores, text)
        assert b"".join(map(tokenizer.token_bytes, ids)) == (f" {text}" if text else "").encode()

    check()
    assert (tokenizer.eot, tokenizer.end, tokenizer.stops, tokenizer.start("")) == (1, 1, {1, 2}, [1])
    assert tokenizer.start("\u20ac") == [1, 259, 0xE2 + 3, 0x82 + 3, 0xAC + 3]
    assert tokenizer.decode([0xE2 + 3, 0x82 + 3, 0xAC + 3, 600]) == "\u20ac\ufffd"
    assert (tokenizer.id_of("▁"), tokenizer.id_of("no such")) == (259, None)


def test_a_piece_of_two_words_is_merged_too(tmp_path):
    more = [(c, 0.0) for c in (b" ", b"a", b"b")] + [(b"a ", -1.0), (b"a b", -2.0), (b" b", -3.0), (b" a", -0.5)]
    scores = [0.0] * 259 + [score for _, score in more]
    (tmp_path / "t.bin").write_bytes(tokenizer_bin(266, more=more))
    tokenizer = get_tokenizer(str(tmp_path / "t.bin"))
    for text in ("a b", "a a b  a b", "ba b"):
        assert tokenizer.encode(text) == naive(tokenizer, scores, text)
    (tmp_path / "t.bin").write_bytes(tokenizer_bin(262, more=[(b" ", 0.0), (b"a", 0.0), (b"aa", -1.0)]))
    assert get_tokenizer(str(tmp_path / "t.bin")).encode("aaa") == [259, 261, 260]  # from the left


def test_a_tokenizer_beside_a_model_is_found_and_kept(tmp_path, vocabulary):
    saved(tmp_path / "m.bin", replace(SMALL, vocab_size=512))
    (tmp_path / "tokenizer.bin").write_bytes(vocabulary.read_bytes())
    assert open_weights(tmp_path / "m.bin").tokenizer == str(tmp_path / "tokenizer.bin")
    assert cli.main(["convert", str(tmp_path / "m.bin"), str(tmp_path / "hf")]) == 0
    assert (tmp_path / "hf" / "tokenizer.bin").read_bytes() == vocabulary.read_bytes()

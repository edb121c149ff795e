"""llama2.c's model files and tokenizer: read, written, computed as ``run.c`` does, and files that lie."""

import struct
from dataclasses import replace
from math import inf, nan, prod

import numpy as np
import pytest
from golden.llama2c import draw, logits_of, tokenizer_bin
from hypothesis import given, settings
from hypothesis import strategies as st

from cpuopt import cli, models
from cpuopt.data.pieces import Pieces
from cpuopt.data.tokenizers import get_tokenizer
from cpuopt.engine import Engine
from cpuopt.errors import UserError
from cpuopt.models.families import Qwen2, Qwen3
from cpuopt.models.llama import Config
from cpuopt.weights import copy_into, llama2c, open_weights, save_weights

SMALL = Config(300, 24, 20, 2, 6, 2, 4, 16, tie_word_embeddings=True)
UNTIED = replace(SMALL, tie_word_embeddings=False)


def same(weights, params):
    return all(np.array_equal(weights.read(name), p) for name, p in params.items())


def saved(path, config=SMALL, seed=1):
    params = draw(config.shapes(), seed)
    save_weights(path, config, params.__getitem__)
    return params


def version1(content, config):
    """A file of version 1 with the weights of one of version 0."""
    names0, names1 = llama2c.places_of(config, 0), llama2c.places_of(config, 1)
    words, out = np.frombuffer(content[28:], "<f4"), np.empty(names1[""], "<f4")
    shapes = config.shapes()
    for name in config.shapes():
        n = prod(shapes[name])
        out[names1[name] : names1[name] + n] = words[names0[name] : names0[name] + n]
    sizes = [abs(n) for n in struct.unpack("<7i", content[:28])]
    head = struct.pack("<Ii7iB", 0x616B3432, 1, *sizes, config.tie_word_embeddings)
    return head.ljust(256, b"\0") + out.tobytes()


# Files


@pytest.mark.parametrize("config", [SMALL, UNTIED])
def test_a_file_has_the_order_and_the_pairs_of_run_c(tmp_path, config):
    params = saved(tmp_path / "m.bin", config)
    content = (tmp_path / "m.bin").read_bytes()
    vocabulary = 300 if config is SMALL else -300
    assert struct.unpack("<7i", content[:28]) == (24, 20, 2, 6, 2, vocabulary, 16)
    words = np.frombuffer(content[28:], "<f4")
    assert np.array_equal(words[: 300 * 24].reshape(300, 24), params["model.embed_tokens.weight"])
    q = words[300 * 24 + 2 * 24 :][: 24 * 24].reshape(24, 24)  # of layer 0
    ours = params["model.layers.0.self_attn.q_proj.weight"]
    assert np.array_equal(q[4:8], ours[[4, 6, 5, 7]])  # the second head: its pairs (0, 2) and (1, 3) side by side
    head = 300 * 24 if config is UNTIED else 0
    tables = words[words.size - head - 16 * 4 : words.size - head].reshape(2, 16, 2)
    angles = np.arange(16)[:, None] * np.array([1.0, 10000.0**-0.5])
    assert np.allclose(tables, [np.cos(angles), np.sin(angles)], atol=1e-6)
    if config is UNTIED:
        assert np.array_equal(words[-head:].reshape(300, 24), params["lm_head.weight"])
    weights = open_weights(tmp_path / "m.bin")
    assert (weights.config, weights.dtype, weights.marks.bos, weights.marks.eos) == (config, "f32", 1, (2,))
    assert same(weights, params)


@pytest.mark.parametrize("config", [SMALL, UNTIED])
def test_version_1_has_the_same_weights(tmp_path, config):
    params = saved(tmp_path / "m.bin", config)
    (tmp_path / "m1.bin").write_bytes(version1((tmp_path / "m.bin").read_bytes(), config))
    weights = open_weights(tmp_path / "m1.bin")
    assert weights.config == config
    assert same(weights, params)


def test_a_file_goes_through_a_directory_byte_for_byte(tmp_path):
    saved(tmp_path / "a.bin", UNTIED)
    assert cli.main(["convert", str(tmp_path / "a.bin"), str(tmp_path / "hf")]) == 0
    assert cli.main(["convert", str(tmp_path / "hf"), str(tmp_path / "b.bin")]) == 0
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()


def test_bfloat16_is_written_as_float32_unless_it_is_asked_for(tmp_path, capsys):
    saved(tmp_path / "a.bin")
    assert cli.main(["convert", str(tmp_path / "a.bin"), str(tmp_path / "hf"), "--dtype", "bf16"]) == 0
    assert cli.main(["convert", str(tmp_path / "hf"), str(tmp_path / "b.bin")]) == 0
    assert same(open_weights(tmp_path / "b.bin"), {n: open_weights(tmp_path / "hf").read(n) for n in SMALL.shapes()})
    capsys.readouterr()
    assert cli.main(["convert", str(tmp_path / "hf"), str(tmp_path / "c.bin"), "--dtype", "bf16"]) == 2
    assert "holds float32; got bf16; leave --dtype out" in capsys.readouterr().err
    assert not (tmp_path / "c.bin").exists()


def test_our_logits_are_those_of_run_c(tmp_path):
    config = models.parse("stories260K")
    saved(tmp_path / "m.bin", config, seed=3)
    T = 24
    engine = Engine(config.module(), config.specs(1, T), seed=None, train=False)
    copy_into(engine.parameters(), open_weights(tmp_path / "m.bin"))
    tokens = np.random.default_rng(5).integers(0, 512, (1, T)).astype(np.int32)
    engine.forward(tokens=tokens, targets=tokens)
    ours = engine.array(engine.program.outputs[1])[0]
    theirs = logits_of((tmp_path / "m.bin").read_bytes(), tokens[0])
    assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()
    halves = bytearray((tmp_path / "m.bin").read_bytes())  # the mutant: rows of q and k as they are here
    weights, places = open_weights(tmp_path / "m.bin"), llama2c.places_of(config, 0)
    for name in filter(llama2c.turned, config.shapes()):
        x = weights.read(name)
        at = 28 + 4 * places[name]
        halves[at : at + x.nbytes] = x.tobytes()
    wrong = logits_of(bytes(halves), tokens[0])
    assert np.abs(ours - wrong).max() > 1e-2 * np.abs(theirs).max()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (replace(SMALL, rope_theta=5e5), "rope_theta 10000.0; this model has 500000.0"),
        (replace(SMALL, rms_norm_eps=1e-6), "rms_norm_eps 1e-05; this model has 1e-06"),
        (replace(SMALL, head_dim=8), "head_dim 4.0; this model has 8"),
        (replace(SMALL, attention_bias=True), "attention_bias False; this model has True"),
        (replace(SMALL, rope_type="linear", rope_factor=2.0), "rope_type default; this model has linear"),
        (replace(SMALL, max_position_embeddings=1 << 28), "cache of keys in an int32"),
        (replace(SMALL, vocab_size=1 << 27), "embedding in an int32"),
        (Qwen2(300, 24, 20, 2, 6, 2, 4, 16), "cannot hold the model qwen2"),
        (Qwen3(300, 24, 20, 2, 6, 2, 4, 16), "cannot hold the model qwen3"),
    ],
)
def test_a_model_that_run_c_would_compute_otherwise_is_not_written(tmp_path, config, said):
    with pytest.raises(UserError, match="name a directory") as e:
        save_weights(tmp_path / "m.bin", config, lambda name: pytest.fail("read"))
    assert said in str(e.value)
    assert list(tmp_path.iterdir()) == []


def words(**at):
    def change(content):
        for place, n in at.items():
            struct.pack_into("<i", content, int(place[1:]), n)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (words(_0=32), "magic number, is 32"),  # 6 heads do not divide it: no sizes of llama2.c
        (words(_0=48), "bytes; expected"),
        (words(_0=2**20, _12=2**10), "cut short"),
        (words(_4=21), "bytes; expected"),
        (words(_8=3), "bytes; expected"),
        (words(_8=4096), "cut short"),
        (words(_16=3), "bytes; expected"),
        (words(_20=-300), "bytes; expected"),
        (words(_20=301), "bytes; expected"),
        (words(_24=17), "bytes; expected"),
        (words(_24=2**20), "bytes; expected"),
        (lambda c: c[:-1], "bytes; expected"),
        (lambda c: c + b"x", "bytes; expected"),
        (lambda c: c[:100], "cut short"),
        (lambda c: c[:27], "header alone"),
        (lambda c: b"", "header alone"),
        (lambda c: version1(c, SMALL)[:200], "expected a header of 256"),
        (lambda c: version1(c, SMALL)[:-4], "bytes; expected"),
        (lambda c: version1(c, SMALL).replace(b"24ka\1", b"24ka\2", 1), "is 2, int8 numbers; expected 1"),
        (lambda c: version1(c, SMALL)[:36] + b"\7" + version1(c, SMALL)[37:], "head is shared, is 7"),
        (lambda c: version1(c, SMALL)[:8] + bytes(28) + version1(c, SMALL)[36:], "impossible sizes"),
    ],
)
def test_a_model_that_lies_is_refused(tmp_path, change, said):
    saved(tmp_path / "m.bin")
    content = bytearray((tmp_path / "m.bin").read_bytes())
    changed = change(content)
    (tmp_path / "m.bin").write_bytes(content if changed is None else changed)
    with pytest.raises(UserError, match=r"m\.bin") as e:
        open_weights(tmp_path / "m.bin")
    assert said in str(e.value)
    assert len(str(e.value)) < 500


def test_a_number_that_is_none_is_named(tmp_path):
    params = saved(tmp_path / "m.bin")
    content = (tmp_path / "m.bin").read_bytes()
    norm = params["model.norm.weight"]
    (tmp_path / "m.bin").write_bytes(
        content.replace(norm.tobytes(), np.where(np.arange(norm.size) == 3, np.float32(nan), norm).tobytes())
    )
    arrays = {n: np.empty(s, np.float32) for n, s in SMALL.shapes().items()}
    with pytest.raises(UserError, match=r"model.norm.weight holds nan at \(3,\)"):
        copy_into(arrays, open_weights(tmp_path / "m.bin"))


@given(st.binary(max_size=40), st.integers(0, 300), st.integers(0, 40000), st.sampled_from([0, 1]))
@settings(max_examples=200, deadline=None)
def test_no_change_to_a_header_does_more_than_be_refused(tmp_path_factory, noise, at, size, version):
    path = tmp_path_factory.mktemp("fuzz") / "x.bin"
    saved(path)
    content = bytearray(path.read_bytes() if version == 0 else version1(path.read_bytes(), SMALL))
    content[at : at + len(noise)] = noise
    path.write_bytes(content[: size if size % 3 == 0 else None])
    try:
        weights = open_weights(path)
    except UserError:
        return
    assert {name: weights.read(name).shape for name in weights.config.shapes()} == weights.config.shapes()


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


def test_a_piece_of_two_words_is_merged_too(tmp_path):
    more = [(c, 0.0) for c in (b" ", b"a", b"b")] + [(b"a ", -1.0), (b"a b", -2.0), (b" b", -3.0), (b" a", -0.5)]
    for size, words in ((262, True), (266, False)):
        (tmp_path / "t.bin").write_bytes(tokenizer_bin(size, more=more))
        pieces = Pieces(tmp_path / "t.bin")
        assert pieces.in_words is words
        for text in ("a b", "a a b  a b", "ba b"):
            assert pieces.encode(text) == naive(pieces, text)


def test_equal_scores_merge_from_the_left(tmp_path):
    content = tokenizer_bin(262, more=[(b" ", 0.0), (b"a", 0.0), (b"aa", -1.0)])
    (tmp_path / "t.bin").write_bytes(content)
    pieces = Pieces(tmp_path / "t.bin")
    assert pieces.encode("aaa") == [259, 261, 260] == naive(pieces, "aaa")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: b"", "is 0; expected 1 to 65536"),
        (lambda c: struct.pack("<I", 0) + c[4:], "longest piece, is 0"),
        (lambda c: struct.pack("<I", 20240328) + c[4:], "longest piece, is 20240328"),
        (lambda c: struct.pack("<I", 2) + c[4:], "has 5 bytes; expected 1 to 2"),
        (lambda c: c[:-1], "bytes; expected 1 to"),
        (lambda c: c + b"x", "is cut short"),
        (lambda c: c + struct.pack("<fi", 0.0, 2**31 - 1), "has 2147483647 bytes"),
        (lambda c: c + struct.pack("<fi", 0.0, -5), "has -5 bytes"),
        (lambda c: c + struct.pack("<fi", 0.0, 0), "has 0 bytes"),
        (lambda c: c + struct.pack("<fi", nan, 1) + b"x", "has the score nan"),
        (lambda c: c + struct.pack("<fi", inf, 1) + b"x", "has the score inf"),
        (lambda c: c[:4], "pieces 3 to 258"),
        (lambda c: c.replace(b"<0x41>", b"<0x42>"), "pieces 3 to 258"),
    ],
)
def test_a_tokenizer_that_lies_is_refused(tmp_path, vocabulary, change, said):
    path = tmp_path / "tokenizer.bin"
    path.write_bytes(change(vocabulary.read_bytes()))
    with pytest.raises(UserError, match=r"tokenizer\.bin") as e:
        get_tokenizer(str(path))
    assert said in str(e.value)


@given(st.binary(max_size=12), st.integers(0, 5000), st.integers(0, 6000))
@settings(max_examples=200, deadline=None)
def test_no_change_to_a_tokenizer_does_more_than_be_refused(tmp_path_factory, noise, at, size):
    content = bytearray(tokenizer_bin(300))
    content[at : at + len(noise)] = noise
    path = tmp_path_factory.mktemp("fuzz") / "x.bin"
    path.write_bytes(content[: size if size % 3 == 0 else None])
    try:
        pieces = Pieces(path)
    except UserError:
        return
    assert pieces.encode("no end") == naive(pieces, "no end")


def test_a_tokenizer_beside_a_model_is_found_and_kept(tmp_path, vocabulary):
    saved(tmp_path / "m.bin", replace(SMALL, vocab_size=512))
    (tmp_path / "tokenizer.bin").write_bytes(vocabulary.read_bytes())
    assert open_weights(tmp_path / "m.bin").tokenizer == str(tmp_path / "tokenizer.bin")
    assert cli.main(["convert", str(tmp_path / "m.bin"), str(tmp_path / "hf")]) == 0
    assert (tmp_path / "hf" / "tokenizer.bin").read_bytes() == vocabulary.read_bytes()
    (tmp_path / "far").mkdir()
    assert cli.main(["convert", str(tmp_path / "hf"), str(tmp_path / "far" / "m.bin")]) == 0
    assert (tmp_path / "far" / "tokenizer.bin").read_bytes() == vocabulary.read_bytes()
    assert cli.main(["convert", str(tmp_path / "hf"), str(tmp_path / "far" / "again.bin")]) == 0


def test_another_tokenizer_is_not_overwritten(tmp_path, vocabulary, capsys):
    saved(tmp_path / "m.bin", replace(SMALL, vocab_size=512))
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "tokenizer.bin").write_bytes(b"mine")
    flags = ["--tokenizer", str(vocabulary)]
    assert cli.main(["convert", str(tmp_path / "m.bin"), str(tmp_path / "far" / "m.bin"), *flags]) == 2
    assert "is another tokenizer than the model's" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "far").iterdir()] == ["tokenizer.bin"]
    assert (tmp_path / "far" / "tokenizer.bin").read_bytes() == b"mine"

"""Corpora, token files, batches, tokenizers and prepared datasets; nothing here reaches a network."""

import base64
import hashlib
import http.client
import io
import os
import shutil
import socket
import struct
import sys
import sysconfig
import urllib.request
from pathlib import Path
from unittest.mock import Mock
from urllib.error import URLError

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from test_hostile_files import header, taking
from verbs import fails, process, spy

from cpuopt.data import batches as batching
from cpuopt.data import corpus, datasets, tokenizers
from cpuopt.data.batches import Batches
from cpuopt.data.corpus import Corpus, load_corpus
from cpuopt.data.datasets import list_datasets, prepare
from cpuopt.data.tokenizers import Published, get_tokenizer, vocabulary_places
from cpuopt.data.tokens import read_tokens, write_tokens
from cpuopt.files import cache_folder, write_whole
from cpuopt.measure import rates as machine

SMALL = {"vocab_size": 256, "T": 8, "B": 2}
slowly = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def isolated(tmp_path, monkeypatch):
    """No network, and a home of its own."""

    def refuse(*args, **kwargs):
        raise AssertionError("a test reached for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("CPUOPT_DATA_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "tiktoken"))
    monkeypatch.delenv("DATA_GYM_CACHE_DIR", raising=False)


def tree(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# Batches


def starts(batch):
    """Where each row of a batch over ``arange`` begins."""
    return batch[0][:, 0].tolist()


def numbered(n, B, T, seed=None):
    return Batches(np.arange(n, dtype=np.int32), B, T, seed=seed, vocab_size=n)


@st.composite
def sizes(draw):
    B, T = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    return draw(st.integers(B * T + 1, 40 * T + 60)), B, T


@slowly
@given(sizes(), st.none() | st.integers(0, 2**70), st.integers(0, 3))
def test_an_epoch_has_each_window_at_most_once_and_targets_are_inputs_shifted(size, seed, epoch):
    n, B, T = size
    batches = numbered(n, B, T, seed)
    assert len(batches) == (n - 1) // (B * T)
    seen = []
    for index in range(len(batches)):
        inputs, targets = batches.batch(epoch, index)
        assert inputs.shape == targets.shape == (B, T)
        assert inputs.dtype == targets.dtype == np.int32
        assert (inputs == inputs[:, :1] + np.arange(T)).all()
        assert (targets == inputs + 1).all()
        seen += starts((inputs, targets))
    assert len(set(seen)) == len(seen) == len(batches) * B
    assert set(seen) <= set(range(0, n - T, T))


@slowly
@given(sizes(), st.integers(0, 2**32), st.permutations(range(12)))
def test_a_batch_is_a_function_of_seed_epoch_and_index_alone(size, seed, order):
    n, B, T = size
    forwards = numbered(n, B, T, seed)
    expected, used = [forwards.at(k)[0].copy() for k in range(12)], numbered(n, B, T, seed)
    for k in order:
        assert (used.at(k)[0] == expected[k]).all()
        assert (numbered(n, B, T, seed).batch(*divmod(k, len(used)))[0] == expected[k]).all()


SORTED = [[[20, 12], [28, 8], [4, 0], [16, 24]], [[4, 28], [12, 20], [0, 8], [24, 16]]]
WALKED = [[[28, 24], [12, 16], [20, 4], [8, 0]], [[8, 24], [0, 16], [20, 12], [4, 28]]]


@pytest.mark.parametrize(("limit", "order"), [(batching.SORTED, SORTED), (0, WALKED)])
def test_the_order_of_seed_42_is_pinned(monkeypatch, limit, order):
    monkeypatch.setattr(batching, "SORTED", limit)
    batches = numbered(8 * 4 + 1, 2, 4, seed=42)
    assert [[starts(batches.batch(epoch, index)) for index in range(4)] for epoch in range(2)] == order


def test_without_sorting_an_epoch_has_each_window_once_too(monkeypatch):
    monkeypatch.setattr(batching, "SORTED", 0)  # as if there were too many windows
    for windows in (1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 1000):
        batches = numbered(windows * 4 + 1, 1, 4, seed=9)
        orders = [[starts(batches.batch(epoch, i))[0] // 4 for i in range(windows)] for epoch in range(3)]
        assert all(sorted(order) == list(range(windows)) for order in orders)
        assert windows < 16 or len({tuple(order) for order in orders}) == 3


def test_without_sorting_each_window_comes_anywhere_as_often_and_beside_any_other(monkeypatch):
    monkeypatch.setattr(batching, "SORTED", 0)
    windows, epochs = 10, 3000
    batches = numbered(windows * 4 + 1, windows, 4, seed=1)
    orders = np.array([starts(batches.batch(epoch, 0)) for epoch in range(epochs)]) // 4
    counts = np.array([np.bincount(orders[:, place], minlength=windows) for place in range(windows)])
    want = epochs / windows
    assert ((counts - want) ** 2 / want).sum() < 130  # chi-square of 81 degrees of freedom: 1 in 2000
    steps = np.bincount(((np.diff(orders, axis=1)) % windows).ravel(), minlength=windows)[1:]
    assert np.abs(steps / steps.mean() - 1).max() < 0.1


def test_a_shuffle_of_400_million_tokens_takes_no_memory():
    tokens = np.broadcast_to(np.uint8(7), 400_000_001)
    with taking(1 << 20):
        batches = Batches(tokens, 4, 8, seed=0, vocab_size=256)
        assert len([batches.at(i)[0].copy() for i in range(3)]) == 3


def test_without_a_seed_every_epoch_is_in_the_order_of_the_text_and_ends():
    batches = numbered(41, 2, 4)
    for epoch in (0, 7):
        assert [starts(batches.batch(epoch, index)) for index in range(5)] == [[8 * i, 8 * i + 4] for i in range(5)]
    for index in (-1, 5):
        with pytest.raises(IndexError, match=f"batch {index} of 5"):
            batches.batch(0, index)


def test_the_windows_left_over_differ_by_epoch():
    batches = numbered(7 * 5 + 1, 4, 5, seed=3)  # 7 windows, one batch of 4
    assert set.union(*(set(starts(batches.batch(epoch, 0))) for epoch in range(20))) == set(range(0, 35, 5))


@pytest.mark.parametrize("position", [0, 5, 8, 16])  # the first and last of a window, and the last target of all
@pytest.mark.parametrize("token", [-1, 100, 2**31 - 1])
def test_a_token_outside_the_vocabulary_is_named_with_its_place(position, token):
    tokens = np.full(17, 99, np.int32)
    tokens[position] = token
    batches = Batches(tokens, 2, 4, vocab_size=100, name="a corpus")
    message = fails("vocabulary", batches.batch, 0, 0 if position <= 8 else 1)
    assert message.startswith(f"a corpus: token {position} is {token}; expected 0 to 99, ")
    if position in (0, 5):
        batches.batch(0, 1)


def test_batches_refuse_what_they_cannot_index():
    with pytest.raises(TypeError, match="int64"):
        Batches(np.arange(100), 1, 4, vocab_size=100)
    fails("B = 0", numbered, 100, 0, 4)
    fails("T = -4", numbered, 100, 1, -4)


@slowly
@given(st.integers(0, 60), st.integers(1, 8), st.integers(1, 8))
def test_too_few_tokens_say_what_would_fit(n, B, T):
    if n > B * T:
        assert len(numbered(n, B, T)) >= 1
        return
    message = fails(f"has {n} tokens; .* needs {B * T + 1},", numbered, n, B, T)
    for other in (f"B <= {(n - 1) // T} with T = {T}", f"T <= {(n - 1) // B} with B = {B}"):
        assert (other in message) == (int(other.split()[2]) >= 1)
    if "B <=" in message:
        assert len(numbered(n, (n - 1) // T, T)) == 1
    if "T <=" in message:
        assert len(numbered(n, B, (n - 1) // B)) >= 1


# Token files


def token_file(path, count=None, tokens=(1, 2, 3), magic=20240520, version=1):
    count = len(tokens) if count is None else count
    path.write_bytes(header(magic, version, count) + struct.pack(f"<{len(tokens)}H", *tokens))
    return path


def test_a_token_file_is_llm_c_s_to_the_byte(tmp_path):
    path = tmp_path / "new" / "a.bin"
    write_tokens(path, [50256, 0, 65535])
    assert path.read_bytes() == token_file(tmp_path / "b.bin", tokens=(50256, 0, 65535)).read_bytes()
    tokens = read_tokens(path)
    assert (tokens.tolist(), tokens.dtype) == ([50256, 0, 65535], np.uint16)
    assert not tokens.flags.writeable
    assert oct(path.stat().st_mode & 0o444) == oct(token_file(tmp_path / "c.bin").stat().st_mode & 0o444)


@pytest.mark.parametrize("tokens", [np.zeros(0, int), [[1, 2]], [1.5], [-1, 3], [65536]])
def test_tokens_that_the_format_cannot_hold_are_not_written(tmp_path, tokens):
    fails("expected .* token ids|expected 0 to 65535", write_tokens, tmp_path / "x.bin", tokens)
    assert tree(tmp_path) == []


def test_tokens_beyond_two_gigabytes_are_reached(tmp_path):
    n = 1_200_000_000  # 2.4 GB, sparse
    path = tmp_path / "huge.bin"
    with open(path, "wb") as file:
        file.write(struct.pack("<3i", 20240520, 1, n))
        file.truncate(1024 + 2 * n)
        file.seek(-6, os.SEEK_END)
        file.write(struct.pack("<3H", 7, 8, 9))
    batches, last = Batches(read_tokens(path), 1, 2, vocab_size=10), (n - 1) // 2 - 1
    assert batches.batch(0, last)[1].tolist() == [[7, 8]]
    fails(f"huge: token {n - 2} is 8;", Batches(batches.tokens, 1, 2, vocab_size=8, name="huge").batch, 0, last)


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch, step):
    path = tmp_path / "x.bin"
    write_tokens(path, [1, 2, 3])
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, step, Mock(side_effect=OSError(28, "No space left on device")))
        fails("cannot write '.*x.bin': No space left", write_tokens, path, [9] * 100)
        assert tree(tmp_path) == ["x.bin"]
        patch.setattr(os, step, Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write_tokens(path, [9] * 100)
    assert (path.read_bytes(), tree(tmp_path)) == (before, ["x.bin"])


def test_a_write_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    calls = []
    spy(monkeypatch, os, "fsync", lambda fd: calls.append(("fsync", os.fstat(fd).st_size)))
    spy(monkeypatch, os, "replace", lambda a, b: calls.append(("replace", Path(b).name)))
    write_whole(tmp_path / "x", [b"ab", b"cde"])
    assert calls[:2] == [("fsync", 5), ("replace", "x")]
    assert [name for name, _ in calls] == ["fsync", "replace", "fsync"]  # the last is the directory's


@pytest.mark.parametrize(("root", "home", "expected"), [
    ("/root", "/home", "/root/x"), ("here", "/home", "{cwd}/here/x"), ("", "/home", "/home/cpuopt/x"),
    ("", "relative", "{user}/.cache/cpuopt/x"),  # to be ignored, says the XDG Base Directory Specification
    ("", "", "{user}/.cache/cpuopt/x"),
])  # fmt: skip
def test_there_is_one_cache_and_the_data_directory_follows_the_environment(root, home, expected, tmp_path, monkeypatch):
    assert tokenizers.data_directory() == tmp_path / "cache"
    monkeypatch.delenv("CPUOPT_DATA_DIR")
    monkeypatch.setenv("CPUOPT_CACHE_DIR", root)
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    assert str(cache_folder("x")) == expected.format(cwd=Path.cwd(), user=Path.home())
    assert machine.folder() == cache_folder("machine")
    if not root:
        assert tokenizers.data_directory() == cache_folder("data")


# Corpora from files


def text_file(path, n, letter=b"a"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(letter * n)
    return path


def test_a_text_file_is_its_bytes_and_its_last_tenth_validates(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("".join(chr(32 + i % 90) for i in range(1000)).encode() + "é".encode())
    corpus = load_corpus(str(path), **SMALL)
    assert np.concatenate([corpus.train, corpus.val]).tobytes() == path.read_bytes()
    assert (corpus.train.size, corpus.val.size, corpus.n_tokens) == (901, 101, 1002)
    assert (corpus.tokenizer, corpus.train.dtype) == ("bytes", np.uint8)
    assert (corpus.train.flags.writeable, corpus.val.flags.writeable) == (False, False)
    assert corpus.description == f"{path}: 901 tokens to train on, 101 to validate (bytes); text '{path}'"


def test_a_large_text_is_not_read_whole(tmp_path):
    path = text_file(tmp_path / "a.txt", 1 << 27)
    with taking(1 << 26):
        load_corpus(str(path), **SMALL).batches("train", 2, 8, seed=0).at(5)


def test_a_glob_takes_files_in_order_each_with_its_last_tenth(tmp_path):
    text_file(tmp_path / "b.txt", 100, b"b")
    text_file(tmp_path / "deep" / "er" / "c.txt", 200, b"c")
    text_file(tmp_path / "a.txt", 300, b"a")
    text_file(tmp_path / "deep" / "empty.txt", 0)
    (tmp_path / "a folder.txt").mkdir()
    text_file(tmp_path / "other.md", 100, b"x")
    corpus = load_corpus(str(tmp_path / "**" / "*.txt"), **SMALL)
    assert corpus.train.tobytes() == b"a" * 270 + b"b" * 90 + b"c" * 180
    assert corpus.val.tobytes() == b"a" * 30 + b"b" * 10 + b"c" * 20
    assert corpus.source == f"3 texts from '{tmp_path / 'a.txt'}' on"


def test_many_files_validate_by_file_wherever_they_lie(tmp_path):
    def sides(folder, names):
        for i in names:
            text_file(folder / f"{i % 7}" / f"{i}.txt", 20, f"<{i:03}>".encode())
        corpus = load_corpus(str(folder / "**" / "*.txt"), **SMALL)
        cut = [{t.tobytes()[k : k + 100] for k in range(0, t.size, 100)} for t in (corpus.train, corpus.val)]
        assert not cut[0] & cut[1]
        assert len(cut[0]) + len(cut[1]) == len(names)
        return cut

    here, there = sides(tmp_path / "here", range(240)), sides(tmp_path / "there" / "x", range(300))
    assert 0.04 < len(there[1]) / 300 < 0.14
    assert here[0] <= there[0]  # more files move none to the other side
    assert here[1] <= there[1]


BINARY = [b"text" * 99 + b"\0", bytes(range(256)) * 4, "UTF-16".encode("utf-16") * 50, b"ab\x01" * 99]


@pytest.mark.parametrize("content", BINARY)
def test_a_binary_file_is_refused_by_name(tmp_path, content):
    text_file(tmp_path / "a.txt", 500)
    (tmp_path / "b.txt").write_bytes(content)
    for spec in ("b.txt", "*.txt"):
        fails(r"b.txt' is not text.*control characters", load_corpus, str(tmp_path / spec), **SMALL)
    (tmp_path / "b.txt").write_bytes("naïve\x1b[1m\f\r\n".encode("latin-1") * 50)  # some odd bytes are text
    assert load_corpus(str(tmp_path / "b.txt"), **SMALL).n_tokens > 500


def test_an_empty_file_and_a_too_short_one_are_refused(tmp_path):
    path = text_file(tmp_path / "a.txt", 0)
    fails("a.txt' is empty", load_corpus, str(path), **SMALL)
    text_file(path, 165)  # 148 to train, 17 to validate: just enough
    assert load_corpus(str(path), **SMALL).val.size == 17
    text_file(path, 155)
    words = r"\(val\): has 16 tokens; a batch of B = 2 rows of T = 8 needs 17,"
    assert "take B <= 1 with T = 8 or T <= 7 with B = 2 or more data" in fails(words, load_corpus, str(path), **SMALL)
    token_file(tmp_path / "x_val.bin", tokens=[1] * 20)
    fails(r"\(train\): has 5 tokens", load_corpus, str(token_file(tmp_path / "x_train.bin", tokens=[1] * 5)), **SMALL)


@pytest.mark.parametrize(("train", "val"), [("s_train", "s_val"), ("fineweb_train_000007", "fineweb_val_000000")])
def test_a_train_file_brings_its_val_file(tmp_path, train, val):
    path = str(token_file(tmp_path / f"{train}.bin", tokens=[1] * 50))
    token_file(tmp_path / f"{val}.bin", tokens=[2] * 60)
    corpus = load_corpus(path, **SMALL)
    assert (corpus.train.tolist(), corpus.val.tolist()) == ([1] * 50, [2] * 60)
    assert corpus.tokenizer == "bytes"  # a token file does not say; the vocabulary does
    assert load_corpus(path, **{**SMALL, "vocab_size": 50257}).tokenizer == "gpt2"
    assert f"{val}.bin" in corpus.source
    assert corpus.batches("train", 2, 8, seed=1).at(0)[0].tolist() == [[1] * 8] * 2
    assert corpus.batches("val", 2, 8).at(0)[0].tolist() == [[2] * 8] * 2
    assert corpus.batches("train", 2, 8, seed=9).seed == 9
    fails("matches 2 files, among them token files", load_corpus, str(tmp_path / "*.bin"), **SMALL)
    assert load_corpus(str(tmp_path / "*train*.bin"), **SMALL).val.size == 60
    text_file(tmp_path / "a.txt", 500)
    fails("matches 3 files, among them token files", load_corpus, str(tmp_path / "*"), **SMALL)


@pytest.mark.parametrize("name", ["alone", "s_train"])
def test_a_token_file_alone_is_split(tmp_path, name):
    corpus = load_corpus(str(token_file(tmp_path / f"{name}.bin", tokens=range(500))), vocab_size=500, T=8, B=2)
    assert (corpus.train.tolist() + corpus.val.tolist(), corpus.val.size) == (list(range(500)), 50)
    assert "last tenth" in corpus.source


def test_a_fingerprint_tells_other_data(monkeypatch):
    monkeypatch.setattr(corpus, "CHUNK", 1 << 20)

    def fingerprint(train, val):
        return Corpus("x", "", "bytes", 256, np.array(train, np.uint8), np.array(val, np.uint8)).fingerprint

    large = np.zeros(5 << 20)
    tail, middle = np.append(large[1:], 1), large.copy()
    middle[3 << 20] = 1
    others = [(large, large), (large, tail), (large, middle), (middle, large), (large[1:], large)]
    others += [([1, 2, 3], [4]), ([1, 2, 4], [4]), ([1, 2, 3], [5]), ([1, 2], [3, 4]), ([0, 1, 2, 3], [4])]
    assert len({fingerprint(*each) for each in others}) == 10
    assert fingerprint([1, 2, 3], [4]) == fingerprint([1, 2, 3], [4])


def test_what_is_not_there_is_refused_with_what_is_near(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text_file(tmp_path / "shakespeare.txt", 500)
    text_file(tmp_path / "d" / "plays.txt", 500)
    assert "'shakespeare.txt'" in fails("there is no data 'shakspeare.txt'", load_corpus, "shakspeare.txt", **SMALL)
    assert "nearest are 'd/plays.txt'" in fails("there is no data", load_corpus, "d/playz.txt", **SMALL)
    assert "nearest are 'tinyshakespeare'" in fails("a file or a glob", load_corpus, "tinyshakespear", **SMALL)
    assert "nearest are 'builtin'" in fails("a file or a glob", load_corpus, "buildin", **SMALL)
    fails("no file matches 'no.*'", load_corpus, "no*.txt", **SMALL)
    fails(r"'d' is a directory; .* try 'd/\*\*/\*.txt'", load_corpus, "d", **SMALL)


def test_a_name_comes_before_a_file_and_a_file_before_a_glob(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text_file(tmp_path / "tinyshakespeare", 500)
    text_file(tmp_path / "a[1].txt", 500)
    text_file(tmp_path / "a1.txt", 900)
    fails("not prepared", load_corpus, "tinyshakespeare", **SMALL)
    assert (load_corpus("./tinyshakespeare", **SMALL).n_tokens, load_corpus("a[1].txt", **SMALL).n_tokens) == (500, 500)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_corpus("~/a1.txt", **SMALL).n_tokens == 900


@slowly
@given(st.text(st.characters(exclude_characters="*")))
@example("x\0y")
@example("\ud800/x")
@example("[\0]")
@example("x" * 5000)
@example("/root/../../etc/none\n")
@example("")
def test_no_name_does_worse_than_a_user_error(tmp_path, spec):
    if spec != "builtin" and not os.path.isfile(os.path.expanduser(spec)):
        fails("builtin|glob", load_corpus, spec, **SMALL)


# builtin


def test_builtin_is_a_real_text_split_by_file():
    corpus, root = load_corpus("builtin", vocab_size=256, T=1024, B=4), Path(sysconfig.get_paths()["stdlib"])
    train, val = corpus.train.tobytes(), corpus.val.tobytes()
    assert corpus.n_tokens > 4_000_000
    assert 0.05 < corpus.val.size / corpus.n_tokens <= 0.11
    on_a_side = [(root / name).read_bytes() for name in ("argparse.py", "typing.py", "json/decoder.py", "abc.py")]
    assert [(text in train, text in val) for text in on_a_side].count((True, False)) == 3
    assert on_a_side[3] in val
    assert (root / "pydoc_data" / "topics.py").read_bytes() not in train + val
    assert train.decode()
    assert corpus.source.endswith(f"source files of Python {sys.version.split()[0]}'s standard library")
    assert corpus.tokenizer == "bytes"


def test_builtin_takes_sources_in_order_and_leaves_out_the_rest(tmp_path, monkeypatch):
    def corpus_of(place, names):
        for name in names:
            path = tmp_path / place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(f"# {name}\r\n".encode())
        monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / place)})
        corpus = load_corpus("builtin", **SMALL)
        return corpus, [tokens.tobytes().decode().splitlines() for tokens in (corpus.train, corpus.val)]

    kept = [f"{'pkg/' if i % 3 else ''}mod{i:03}.py" for i in range(150)] + ["testing.py", "a/mod.py", "a.py", "a-b.py"]
    left = ["test/x.py", "lib2to3/tests/x.py", "idlelib/idle_test/x.py", "site-packages/p/x.py", "a/__pycache__/x.py"]
    left += ["encodings/cp1.py", "_sysconfigdata__linux.py", "notes.txt", "html/entities.py", "pkg/tests/deep/x.py"]
    corpus, lines = corpus_of("lib", kept + left)
    assert sorted(lines[0] + lines[1]) == sorted(f"# {name}" for name in kept)
    assert lines == [sorted(lines[0]), sorted(lines[1])]
    assert b"\r" not in corpus.train.tobytes()
    assert corpus.source.startswith("154 source files")
    _, moved = corpus_of("elsewhere", [*sorted(kept, reverse=True), "new.py"])
    assert [{*side} - {"# new.py"} for side in moved] == [{*side} for side in lines]
    said = fails("has 99 source files; expected 100 at least", corpus_of, "few", [f"m{i}.py" for i in range(99)])
    assert "--data FILE" in said


# Tokenizers


@slowly
@given(st.text())
def test_bytes_go_there_and_back(text):
    tokenizer = get_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert all(0 <= i < tokenizer.vocab_size == 256 for i in ids)
    if text.isascii():
        assert tokenizer.decode(ids) == text == tokenizer.decode(np.array(ids, np.int32))
    assert tokenizer.decode(ids) == text.encode(errors="replace").decode()
    assert tokenizer.decode([0xC3, 104, 256, 50256, -1, 105]) == "\ufffdh\ufffd\ufffd\ufffdi"


VOCABULARY = [bytes([b]) for b in range(256)] + [b"he", b"ll", b"hell", b" w", b"\n\n"]


@pytest.fixture
def published(tmp_path, monkeypatch):
    """A text and a vocabulary to download from files; the text has three documents."""
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(VOCABULARY)]
    folder = tmp_path / "server"
    folder.mkdir()
    published = []
    for name, content in [("input.txt", b"hello world\n\nhe\n\nworld, hell!"), ("vocabulary", b"".join(lines))]:
        (folder / name).write_bytes(content)
        published.append(Published((folder / name).as_uri(), len(content), hashlib.sha256(content).hexdigest()))
    text, vocabulary = published
    for module in (datasets, tokenizers):
        monkeypatch.setattr(module, "GPT2_VOCABULARY", vocabulary)
    documents = datasets.DATASETS["tinyshakespeare"].documents
    dataset = datasets.Dataset("three lines", text, "tiny_shakespeare", documents, 6)
    monkeypatch.setitem(datasets.DATASETS, "tinyshakespeare", dataset)
    return folder


def test_gpt2_reads_the_vocabulary_that_tiktoken_would(tmp_path, published, monkeypatch):
    place = tmp_path / "tiktoken" / hashlib.sha1(tokenizers.GPT2_VOCABULARY.url.encode()).hexdigest()
    message = fails("the gpt2 tokenizer needs its vocabulary file", get_tokenizer, "gpt2")
    assert str(place) in message
    assert tokenizers.GPT2_VOCABULARY.sha256 in message
    place.parent.mkdir()
    place.write_bytes((published / "vocabulary").read_bytes())
    gpt2 = get_tokenizer("gpt2")
    assert (gpt2.name, gpt2.vocab_size, gpt2.eot) == ("gpt2", 50257, 50256)
    assert gpt2.encode("hello world") == [258, 111, 259, *b"orld"]
    assert gpt2.encode("<|endoftext|>") == list(b"<|endoftext|>")
    assert gpt2.decode([50256, 258, 111, 50257, -1, 0xC3]) == "<|endoftext|>hello\ufffd\ufffd\ufffd"


def test_the_vocabulary_s_place_and_name_are_tiktoken_s(tmp_path, monkeypatch):
    name = "0ea1e91bbb3a60f729a8dc8f777fd2fc07cd8df4"
    assert vocabulary_places() == [tmp_path / "tiktoken" / name]
    monkeypatch.setenv("DATA_GYM_CACHE_DIR", str(tmp_path / "gym"))
    assert vocabulary_places() == [tmp_path / "tiktoken" / name]
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR")
    assert vocabulary_places() == [tmp_path / "gym" / name]
    monkeypatch.delenv("DATA_GYM_CACHE_DIR")
    first, second = vocabulary_places()
    assert (first, second.parent.name) == (tmp_path / "cache" / "tiktoken" / name, "data-gym-cache")


def test_the_pattern_and_the_file_are_tiktoken_s(monkeypatch):
    public, asked = pytest.importorskip("tiktoken_ext.openai_public"), []
    monkeypatch.setattr(public, "load_tiktoken_bpe", lambda url, expected_hash: asked.append((url, expected_hash)))
    encoding = public.r50k_base()
    assert (encoding["pat_str"], encoding["special_tokens"]) == (tokenizers.GPT2_PATTERN, {"<|endoftext|>": 50256})
    assert asked == [(tokenizers.GPT2_VOCABULARY.url, tokenizers.GPT2_VOCABULARY.sha256)]


# Prepared datasets


def test_prepare_gpt2_cuts_and_splits_as_llm_c_does_and_asks_for_nothing_twice(tmp_path, published, monkeypatch):
    seen = []
    files = prepare("tinyshakespeare", "gpt2", progress=lambda *args: seen.append(args))
    folder = tmp_path / "cache" / "tinyshakespeare"
    assert files == [folder / "tiny_shakespeare_train.bin", folder / "tiny_shakespeare_val.bin"]
    documents = [258, 111, 259, *b"orld", 260], [256, 260], [*b"world,", 32, 258, 33]
    expected = [token for document in documents for token in (50256, *document)]
    assert (read_tokens(files[1]).tolist(), read_tokens(files[0]).tolist()) == (expected[:6], expected[6:])
    text, vocabulary = datasets.DATASETS["tinyshakespeare"].text, tokenizers.GPT2_VOCABULARY
    assert seen == [(file.url, file.size, file.size) for file in (text, vocabulary)]
    corpus = load_corpus("tinyshakespeare", vocab_size=50257, T=2, B=2)
    assert (corpus.tokenizer, corpus.val.tolist()) == ("gpt2", expected[:6])
    corpus.batches("train", 2, 2).at(0)
    monkeypatch.setattr(urllib.request, "urlopen", lambda *a, **k: pytest.fail("downloaded again"))
    other = tmp_path / "here" / folder.name
    shutil.copytree(folder, other)
    assert {path.parent for path in prepare("tinyshakespeare", "gpt2", directory=other.parent)} == {other}


def test_prepare_bytes_keeps_the_text_alone_and_replaces_a_damaged_one(tmp_path, published):
    files = prepare("tinyshakespeare", "bytes")
    assert files == [tmp_path / "cache" / "tinyshakespeare" / "input.txt"]
    assert tree(tmp_path / "cache") == ["tinyshakespeare/input.txt"]
    corpus, text = load_corpus("tinyshakespeare", vocab_size=256, T=1, B=1), (published / "input.txt").read_bytes()
    assert (corpus.tokenizer, corpus.train.tobytes() + corpus.val.tobytes()) == ("bytes", text)
    files[0].write_bytes(text.swapcase())
    prepare("tinyshakespeare", "bytes")
    assert files[0].read_bytes() == text


@pytest.mark.parametrize("error", [
    URLError("no route\nto host"), TimeoutError(), http.client.IncompleteRead(b"x"), ConnectionResetError(104),
])  # fmt: skip
def test_offline_one_line_names_every_file_and_its_place(tmp_path, published, monkeypatch, error):
    monkeypatch.setattr(urllib.request, "urlopen", Mock(side_effect=error))
    message = fails("cannot download", prepare, "tinyshakespeare", "gpt2")
    text = tmp_path / "cache" / "tinyshakespeare" / "input.txt"
    there = datasets.DATASETS["tinyshakespeare"].text
    for path, file in (text, there), (vocabulary_places()[0], tokenizers.GPT2_VOCABULARY):
        assert f"put at '{path}' by hand {file.url} ({file.size} bytes, sha256 {file.sha256})" in message
    assert tree(tmp_path) == ["server/input.txt", "server/vocabulary"]
    assert "vocabulary" not in fails("cannot download", prepare, "tinyshakespeare", "bytes")

    text.parent.mkdir(parents=True)
    text.write_bytes((published / "input.txt").read_bytes())
    assert prepare("tinyshakespeare", "bytes") == [text]
    assert "input.txt" not in fails("cannot download .*vocabulary", prepare, "tinyshakespeare", "gpt2")
    vocabulary_places()[0].parent.mkdir()
    vocabulary_places()[0].write_bytes((published / "vocabulary").read_bytes())
    assert len(prepare("tinyshakespeare", "gpt2")) == 2


class Endless(io.RawIOBase):
    given = 0

    def read(self, n=-1):
        assert n > 0
        self.given += n
        assert self.given < 10**6
        return b"x" * n


SERVED = [*map(io.BytesIO, (b"", b"<html>blocked</html>", b"x" * 29)), Endless()]


@pytest.mark.parametrize("response", SERVED, ids=["empty", "html", "other", "endless"])
def test_another_file_is_not_kept(tmp_path, published, monkeypatch, response):
    monkeypatch.setattr(urllib.request, "urlopen", lambda *args, **kwargs: response)
    assert "put at" in fails("are not the expected file, and were not kept", prepare, "tinyshakespeare", "bytes")
    assert tree(tmp_path) == ["server/input.txt", "server/vocabulary"]


def test_a_name_outside_the_registry_touches_nothing(tmp_path, published):
    for name in ("../../x", "/etc/passwd", "tinyshakespear", "", "a\0b", ".", "builtin"):
        message = fails("unknown dataset .*(known: |did you mean ')tinyshakespeare", prepare, name, "gpt2")
        assert ("did you mean 'tinyshakespeare'?" in message) == (name == "tinyshakespear")
        fails("unknown tokenizer", prepare, "tinyshakespeare", name)
    assert tree(tmp_path) == ["server/input.txt", "server/vocabulary"]


def test_a_dataset_not_prepared_says_the_command(published):
    command = "`cpuopt data prepare tinyshakespeare --tokenizer"
    fails(f"is not prepared .* run {command} gpt2`", load_corpus, "tinyshakespeare", vocab_size=50257, T=2, B=2)
    fails(f"run {command} bytes`", load_corpus, "tinyshakespeare", vocab_size=50256, T=2, B=2)
    train, _ = prepare("tinyshakespeare", "gpt2")
    train.with_name("tiny_shakespeare_val.bin").unlink()
    fails("there is no '.*_val.bin'", load_corpus, "tinyshakespeare", vocab_size=50257, T=2, B=2)


def test_the_list_says_what_is_prepared(tmp_path, published):
    def rows():
        return {(row.name, row.tokenizer): row for row in list_datasets()}

    assert rows()["builtin", "bytes"].prepared
    before = rows()["tinyshakespeare", "gpt2"]
    assert (before.prepared, before.files, before.nbytes) == (False, (), 0)
    assert before.command == "cpuopt data prepare tinyshakespeare --tokenizer gpt2"
    files = prepare("tinyshakespeare", "gpt2")
    after = rows()["tinyshakespeare", "gpt2"]
    assert (after.prepared, list(after.files)) == (True, files)
    assert after.nbytes == sum(path.stat().st_size for path in files) > 2048
    assert rows()["tinyshakespeare", "bytes"].nbytes == (published / "input.txt").stat().st_size
    files[1].unlink()
    assert not rows()["tinyshakespeare", "gpt2"].prepared
    assert not [row for row in list_datasets(tmp_path / "elsewhere") if row.prepared and row.name != "builtin"]


# The module itself


def test_importing_is_cheap_and_loading_reaches_for_no_network():
    program = """
import sys, cpuopt.data
late = {"tiktoken", "urllib.request", "http.client", "requests", "numba"}
assert not late & set(sys.modules), late & set(sys.modules)
cpuopt.data.load_corpus("builtin", vocab_size=256, T=64, B=4)
cpuopt.data.list_datasets()
assert not late & set(sys.modules), late & set(sys.modules)
"""
    done = process(code=program)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)

"""Data that change on disk while a run reads them: no step uses the change, and none of it passes without a word."""

import os
import resource
from pathlib import Path

import numpy as np
import pytest
from listening import Listener
from small_runs import SIZES, only, prepare, run, steps_of
from verbs import fails, spy

from cpuopt.comm.threads import Team
from cpuopt.data import stored
from cpuopt.data.corpus import load_corpus
from cpuopt.data.stored import BLOCK, DataError, File, FileTokens
from cpuopt.data.tokens import write_tokens
from cpuopt.errors import UserError
from cpuopt.train import checkpoint, job
from cpuopt.train.trainer import train

pytestmark = pytest.mark.usefixtures("small_text")
IDS = np.random.default_rng(0).integers(0, 256, 1000)
N = 3 * BLOCK + 100


@pytest.fixture
def large(monkeypatch):
    """Take every file for one that is too large to be read whole."""
    monkeypatch.setattr(stored, "LARGE", 0)
    write_tokens(Path("t.bin"), IDS)


def cut(path="t.bin"):
    os.truncate(path, 1100)


def overwrite(path="t.bin", ids=IDS[::-1]):
    """Write other ids into the file, and put its time back."""
    before = os.stat(path)
    with open(path, "r+b") as file:
        file.seek(1024)
        file.write(np.asarray(ids, "<u2").tobytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def blocks():
    Path("x").write_bytes(bytes(i * i % 251 for i in range(N)))
    return File(Path("x"))


def test_a_file_is_read_as_it_was_first_or_not_at_all():
    file, content = blocks(), Path("x").read_bytes()
    for lo, hi in ((0, 10), (BLOCK - 1, BLOCK + 1), (5, N), (N - 1, N), (7, 7), (N, N)):
        assert file.read(lo, hi).tobytes() == content[lo:hi]
    with open("x", "r+b") as other:
        other.seek(2 * BLOCK + 5)
        other.write(b"!")
    assert file.read(0, BLOCK).tobytes() == content[:BLOCK]
    with pytest.raises(DataError, match=f"'x' was overwritten: byte {2 * BLOCK} and after it differ"):
        file.read(2 * BLOCK + 9, 2 * BLOCK + 10)
    Path("x").write_bytes(content)
    assert file.read(0, N).tobytes() == content
    os.truncate("x", BLOCK)
    assert file.read(0, BLOCK).tobytes() == content[:BLOCK]
    with pytest.raises(DataError, match=f"'x' was cut short: it has {BLOCK} bytes, and had {N}"):
        file.read(0, BLOCK + 1)


def test_a_file_that_is_replaced_or_removed_stays_readable_as_it_was():
    file, content = blocks(), Path("x").read_bytes()
    Path("y").write_bytes(content[::-1])
    os.replace("y", "x")
    assert file.read(0, N).tobytes() == content
    assert "'x' was overwritten: byte 0" in file.changed()
    Path("x").unlink()
    assert (file.read(0, N).tobytes(), file.changed()) == (content, "'x': No such file or directory")


def test_only_another_content_is_a_change():
    file = blocks()
    file.read(0, N)
    os.utime("x", (1, 1))
    os.chmod("x", 0o600)
    assert file.changed() == ""
    Path("z").write_bytes(Path("x").read_bytes())
    os.replace("z", "x")
    assert file.changed() == ""
    before, content = os.stat("x"), bytearray(Path("x").read_bytes())
    content[BLOCK] ^= 1
    Path("x").write_bytes(content)
    os.utime("x", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert f"byte {BLOCK} and after it" in file.changed()
    os.truncate("x", 7)
    assert file.changed() == f"'x' has 7 bytes, and had {N}"


def test_large_files_give_the_tokens_and_the_fingerprint_of_small_ones(monkeypatch):
    write_tokens(Path("t_train.bin"), IDS)
    write_tokens(Path("t_val.bin"), IDS[:300])
    Path("a.txt").write_text("abc" * 99)
    Path("b.txt").write_text("xyz" * 50)
    for spec in ("t_train.bin", "t_val.bin", "a.txt", "*.txt"):
        found = []
        for limit in (1 << 26, 0):
            monkeypatch.setattr(stored, "LARGE", limit)
            c = load_corpus(spec, vocab_size=256, T=8, B=2)
            batches = [c.batches(split, 2, 8, seed=1).at(1) for split in ("train", "val", "all")]
            about = c.fingerprint, c.ends, c.n_tokens, c.description
            found.append([*about, c.whole[:].tolist(), np.array(batches).tolist()])
        assert found[0] == found[1]
    assert isinstance(load_corpus("t_train.bin", vocab_size=256, T=8, B=2).train, FileTokens)


def same_weights(one, other):
    """Whether the engines of two jobs have the same weights."""
    want = other.engine.parameters()
    return all(np.array_equal(p, want[n]) for n, p in one.engine.parameters().items())


@pytest.mark.parametrize(("file", "change"), [
    ("t_train.bin", cut), ("t_train.bin", lambda path: overwrite(path, [60_000] * 1000)), ("t_val.bin", overwrite),
])  # fmt: skip
def test_a_change_under_a_run_ends_it_with_a_checkpoint_and_status_2(large, file, change):
    for name in ("t_train.bin", "t_val.bin"):
        write_tokens(Path(name), IDS)
    more = {"val_every": 2} if file == "t_val.bin" else {}
    given = {"data": "t_train.bin", "steps": 6} | more
    result, _, listener = run(Listener(1 if more else 2, lambda: change(file)), **given)
    assert (result.status, result.refused, result.summary["steps"]) == (2, True, 2)
    assert f"ended after step 2: {file!r} was " in result.diagnosis
    assert f"the data on disk have changed: {file!r} " in listener.notes[0]
    found = checkpoint.newest(result.path)
    assert found.state["step"] == steps_of() == 2
    fails(r"holds other text|has \d+ bytes|expected 0 to 255", prepare, found)
    write_tokens(Path(file), IDS)  # put back
    _, ready, _ = run(resume=found)
    _, undisturbed, _ = run(**given)
    assert same_weights(ready, undisturbed)


def test_a_change_that_is_put_back_before_the_next_step_changes_nothing(large):
    _, undisturbed, _ = run(data="t.bin", steps=4)
    there_and_back = Listener(2, lambda: [overwrite(), overwrite(ids=IDS)])
    result, ready, listener = run(there_and_back, data="t.bin", steps=4, save_every=1)
    assert (result.status, listener.notes) == (0, [])
    assert same_weights(ready, undisturbed)


@pytest.mark.parametrize("change", [cut, overwrite, lambda: os.remove("t.bin")], ids=["cut", "ids", "removed"])
def test_a_small_file_is_used_as_it_was_and_the_change_is_said(change):
    write_tokens(Path("t.bin"), IDS)
    _, undisturbed, _ = run(data="t.bin", steps=4)
    result, ready, listener = run(Listener(2, change), data="t.bin", steps=4, save_every=1)
    assert result.status == 0
    (note,) = listener.notes
    assert note.startswith("the data on disk have changed: 't.bin'")
    assert note.endswith("the run uses nothing of the change, and --resume needs the old content")
    assert same_weights(ready, undisturbed)
    fails("", prepare, checkpoint.newest(result.path), steps=5)


def test_data_of_one_rank_that_are_cut_end_all_with_a_checkpoint(large):
    """Ranks that are threads; only one of them finds the change."""

    class Half(File):
        def read(self, lo, hi):
            if self.wrong and self.wrong():
                raise DataError("'t.bin' was cut short")
            return super().read(lo, hi)

        wrong = None

    def work(comm):
        given = {"model": SIZES, "data": "t.bin", "B": 2, "T": 8, "steps": 6, "val_every": 0, "variant": "vanilla"}
        ready = job.prepare(job.Settings(**given, total_batch=32), comm=comm)
        if comm.rank:
            for file in ready.corpus.files:
                file.__class__ = Half
                file.wrong = lambda: ready.done == 2
        result = train(ready, Path("runs"), Listener())
        return result.status, result.diagnosis, ready.done

    assert Team(2).run(work) == [(2, "ended after step 2: rank 1: 't.bin' was cut short", 2)] * 2
    assert checkpoint.newest(only()).state["step"] == 2


@pytest.mark.parametrize("error", [UserError("no such id"), ValueError("x")])
def test_an_error_in_the_middle_of_a_run_costs_no_step(monkeypatch, error):
    """Of any kind: an input that the engine refuses, a kernel that raises, and other exceptions."""
    ready = prepare(steps=6)

    def at(n):
        if n == 2:
            raise error

    spy(monkeypatch, ready.batches, "at", at)
    if isinstance(error, UserError):
        assert train(ready, Path("runs"), Listener()).diagnosis == "ended after step 2: no such id"
    else:
        with pytest.raises(ValueError, match="x"):
            train(ready, Path("runs"), Listener())
    assert checkpoint.newest(only()).state["step"] == 2


def test_many_texts_are_not_open_at_once():
    for n in range(50):
        Path(f"many{n}.txt").write_text("some text")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 10, hard))
    try:
        assert load_corpus("many*.txt", vocab_size=256, T=8, B=2).changes() == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

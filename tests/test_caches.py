"""What can be made anew is never the reason why a command ends: damaged entries, full disks, folders of others."""

import errno
import inspect
import os
import sys
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from verbs import process

from cpuopt import files
from cpuopt.ad import emit
from cpuopt.errors import UserError
from cpuopt.files import CacheWarning, alone, read_entry, write_entry

TEXT = '"""Made."""\n\n\ndef made():\n    return 1\n'


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CPUOPT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "_warned", set())
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    return tmp_path / "cache"


def make(count=[]):  # noqa: B006
    count.append(1)
    return TEXT


def load():
    """Import the generated module as a new process does."""
    sys.modules.pop("cpuopt_generated.made_key", None)
    return emit.load("made", "key", make)


@pytest.fixture
def warned():
    """Collect the warnings of a test as lines."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield lambda: [str(w.message) for w in caught if w.category is CacheWarning]


def test_an_entry_is_read_as_it_was_written(cache, warned):
    assert read_entry(cache / "x") is None
    assert write_entry(cache / "x", b"content")
    assert read_entry(cache / "x") == b"content"
    os.rename(cache / "x", cache / "y")
    assert warned() == []
    assert read_entry(cache / "y") is None  # it is another's
    assert len(warned()) == 1


@given(st.binary(max_size=40), st.binary(max_size=3), st.integers(0, 120), st.integers(0, 130))
def test_no_change_of_an_entry_passes(tmp_path_factory, content, noise, at, size):
    path = tmp_path_factory.mktemp("entry") / "x"
    write_entry(path, content)
    whole = path.read_bytes()
    changed = (whole[:at] + noise + whole[at + len(noise) :])[:size]
    path.write_bytes(changed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert read_entry(path) == (content if changed == whole else None)


def test_a_generated_module_is_made_once_and_anew_where_it_is_damaged(cache, warned):
    assert load().made() == 1
    path = cache / "generated" / "made_key.py"
    whole, made = path.read_bytes(), len(make.__defaults__[0])
    assert (load().made(), len(make.__defaults__[0])) == (1, made)
    damaged = [b"", whole[:10], whole[:-1], whole.replace(b"return 1", b"return 2"), b"\0" * len(whole), b"def made(:"]
    for n, content in enumerate(damaged, start=1):
        path.write_bytes(content)
        assert (load().made(), len(make.__defaults__[0]), path.read_bytes()) == (1, made + n, whole)
    said = f"cache {cache / 'generated'}: it has files that are damaged or of another version, which are rebuilt"
    assert warned() == [said]
    assert not list(cache.rglob("*.pyc"))  # which nothing would check


@pytest.mark.parametrize("where", ["entry is a folder", "folder is a file", "folder cannot be made", "disk full"])
def test_without_a_cache_a_module_is_made_all_the_same(where, cache, warned, monkeypatch):
    if where == "entry is a folder":
        (cache / "generated" / "made_key.py").mkdir(parents=True)
    elif where == "folder is a file":
        cache.mkdir()
        (cache / "generated").touch()
    elif where == "folder cannot be made":
        cache.touch()
    else:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        monkeypatch.setattr(os, "replace", lambda *a, **more: (_ for _ in ()).throw(full))
    for _ in range(3):
        module = load()
        assert module.made() == 1
    if where != "entry is a folder":
        assert inspect.getsource(module.made) == TEXT[TEXT.index("def") :]
    assert 1 <= len(warned()) <= 2
    assert all(line.startswith(f"cache {cache / 'generated'}: ") for line in warned())


def test_every_verb_works_on_emptied_caches(cache):
    """The whole of it, in processes: what the backwards, the roofs and a plan were is made anew, with a line each."""
    code = "from cpuopt.kernels import generated; print(len(generated.REFUSED))"
    first = process(code=code)
    made = list((cache / "generated").iterdir())
    assert len(made) > 5
    for i, path in enumerate(made):
        os.truncate(path, 0 if i % 2 else 100)
    second = process(code=code)
    assert (second.returncode, second.stdout, second.stderr.count("CacheWarning")) == (0, first.stdout, 1)
    third = process(code=code)
    assert (third.returncode, third.stderr) == (0, "")


def test_one_process_at_a_time_may_tune(cache):
    what = "runs 'cpuopt tune'"
    refused = pytest.raises(UserError, match="another process runs 'cpuopt tune'; wait for it, or end it")
    with alone(cache / "tune.lock", what), refused, alone(cache / "tune.lock", what):
        raise AssertionError
    with alone(cache / "tune.lock", what), alone(Path("/proc/none/x"), what):
        pass

"""Who may write what: entries that others planted, folders that they can replace, links, and files of any kind."""

import os
import pickle
import threading
import time
from pathlib import Path

import pytest
from test_weights import Runs

from cpuopt import files
from cpuopt.ad import emit
from cpuopt.check import gate
from cpuopt.files import CacheWarning, alone, private, read_entry, seal, write_entry
from cpuopt.kernels.compile import entries
from cpuopt.measure import rates

ANOTHER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CPUOPT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "_warned", set())
    monkeypatch.setattr(entries, "warned", set())
    return tmp_path / "cache" / "x"


def others(path):
    os.chown(path, ANOTHER, ANOTHER)


def sealed(path, content=b"planted"):
    """Write an entry as anyone can, whose checksum is right."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.write_bytes(content + seal(path.name, content))
    path.chmod(0o600)


def linked(path):
    os.link(path, path.with_name("other-name"))


def to_a_link(path):
    os.rename(path, path.with_name("target"))
    path.symlink_to("target")


PLANTED = {
    "of another user": pytest.param(others, marks=as_root),
    "that others can write": lambda path: path.chmod(0o602),
    "that the group can write": lambda path: path.chmod(0o620),
    "with two names": linked,
    "behind a link": to_a_link,
}


@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
def test_a_planted_entry_is_not_read_and_is_replaced(folder, plant):
    """The folder itself is private, as after a ``chmod go-w``."""
    path = folder / "entry"
    sealed(path)
    assert read_entry(path) == b"planted"
    plant(path)
    with pytest.warns(CacheWarning):
        assert read_entry(path) is None
    assert write_entry(path, b"mine")
    assert (read_entry(path), path.stat().st_mode & 0o777, path.stat().st_uid) == (b"mine", 0o600, os.geteuid())


def test_an_entry_that_another_process_replaces_meanwhile_is_read(folder, monkeypatch):
    assert write_entry(folder / "entry", b"mine")
    fstat, size = os.fstat, len(b"mine" + seal("entry", b"mine"))

    def replaced(descriptor):
        if fstat(descriptor).st_size == size and fstat(descriptor).st_nlink:
            assert write_entry(folder / "entry", b"of another process")
        return fstat(descriptor)

    monkeypatch.setattr(os, "fstat", replaced)
    assert read_entry(folder / "entry") == b"mine"
    monkeypatch.undo()
    monkeypatch.setenv("CPUOPT_CACHE_DIR", str(folder.parent))
    assert read_entry(folder / "entry") == b"of another process"


def test_an_entry_is_this_users_whatever_the_mask_of_new_files(folder):
    before = os.umask(0)
    try:
        assert write_entry(folder / "entry", b"mine")
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777 == 0o700
    assert read_entry(folder / "entry") == b"mine"


def test_a_planted_kernel_is_not_unpickled(here, folder):
    place, payload = folder.parent / "kernels", pickle.dumps(Runs())
    entry = place / "key.nbc"
    entries.write(place, "key", payload)
    assert entries.read(place, "key") == payload
    entry.chmod(0o666)
    with pytest.warns(CacheWarning, match="kernels are not loaded .*another user's; delete it: rm -r"):
        assert entries.read(place, "key") is None
    assert not Path("ran").exists()


def test_the_folder_is_checked_at_each_access(folder):
    place = folder.parent / "kernels"
    assert entries.prepared(place) == place
    entries.write(place, "key", b"payload")
    place.chmod(0o777)
    assert entries.prepared(place) == place  # once a process
    with pytest.warns(CacheWarning, match="other users can write to it"):
        assert entries.read(place, "key") is None
    with pytest.raises(private.UnsafeError):
        entries.write(place, "other", b"payload")


def refused(path):
    """Return the reason why a folder is not opened; empty if it is."""
    try:
        with private.opened(path):
            return ""
    except private.UnsafeError as e:
        return e.strerror


WRITABLE, THEIRS = "other users can write to", "belongs to another user"


@pytest.mark.parametrize(
    ("mode", "why", "whose"),
    [
        *[(0o777, WRITABLE, ""), (0o757, WRITABLE, ""), (0o1777, "", ""), (0o755, "", "")],
        *[pytest.param(mode, THEIRS, "", marks=as_root) for mode in (0o755, 0o1777)],
        pytest.param(0o1777, THEIRS, "cache", marks=as_root),  # which another user made under a sticky parent
    ],
)
def test_a_folder_below_one_that_others_can_change_is_refused(tmp_path, mode, why, whose):
    (tmp_path / "cache" / "machine").mkdir(parents=True, mode=0o700)
    tmp_path.chmod(mode)
    if why == THEIRS:
        others(tmp_path / whose)
    found = refused(tmp_path / "cache" / "machine")
    assert why in found if why else not found
    assert f"{tmp_path / whose}" in found or not why
    assert not whose or THEIRS in refused(tmp_path / whose)


def test_a_group_may_write_to_a_parent_only_if_it_is_this_users_alone(tmp_path, monkeypatch):
    tmp_path.chmod(0o770)
    for alone_in_it in (True, False):
        monkeypatch.setattr(private, "_only_mine", lambda group, mine=alone_in_it: mine)
        assert (not refused(tmp_path / "cache")) == alone_in_it


def test_links_in_the_path_are_followed_if_nobody_else_can_turn_them(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "way").mkdir()
    (tmp_path / "way" / "home").symlink_to("../disk/../disk")
    (tmp_path / "absolute").symlink_to(tmp_path / "way" / "home")
    with private.opened(tmp_path / "absolute" / "cache") as at:
        assert os.path.samestat(os.fstat(at), (tmp_path / "disk" / "cache").stat())
    (tmp_path / "way").chmod(0o777)
    assert f"write to {tmp_path / 'way'}" in refused(tmp_path / "absolute" / "cache")
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(OSError, match="symbolic links"):
        refused(tmp_path / "round" / "cache")


@as_root
def test_a_link_of_another_user_is_refused_in_a_sticky_folder(tmp_path):
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o1777)
    link = tmp_path / "open" / "cache"
    link.symlink_to("../mine")
    assert not refused(link)
    os.chown(link, ANOTHER, ANOTHER, follow_symlinks=False)
    assert f"the link {link} in its path belongs to another user" in refused(link)


def test_a_folder_that_is_swapped_all_the_time_never_gives_an_entry_of_the_unsafe_one(folder, tmp_path):
    """Only the descriptor ties what is read to what was checked: owner and mode of both entries are right."""
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    for place, content in (mine, b"mine"), (theirs, b"planted"):
        sealed(place / "entry", content)
    theirs.chmod(0o777)
    folder.parent.mkdir(mode=0o700)
    folder.symlink_to(mine)
    ends = time.monotonic() + 2

    def swap():
        while time.monotonic() < ends:
            for target in theirs, mine:
                (folder.parent / "next").symlink_to(target)
                os.replace(folder.parent / "next", folder)

    thread = threading.Thread(target=swap)
    thread.start()
    seen = {None: 0, b"mine": 0}
    while time.monotonic() < ends:
        try:
            seen[private.read(folder / "entry").partition(b"\n")[0]] += 1
        except (private.UnsafeError, FileNotFoundError):
            seen[None] += 1
    thread.join()
    assert set(seen) == {None, b"mine"}
    assert min(seen.values()) > 0


def judged(place, monkeypatch):
    sealed(place / "key.result", b'{"key": "key", "result": {}}')
    sealed(place / "key.files", b'{"f": "0"}')
    monkeypatch.setattr(gate, "digest_of", lambda file: "0")
    return gate.recall("key", None) or gate.unchanged(place / "key.files", "f")


def roofs(place, monkeypatch):
    sealed(rates.file(), b'{"format": 0, "roofs": {}}')
    return rates.stored()


def generated(place, monkeypatch):
    sealed(place / "a_key.py", b"raise SystemExit")
    return not emit.load("a", "key", lambda: "X = 1\n").X


@pytest.mark.parametrize(("name", "use"), [("judged", judged), ("machine", roofs), ("generated", generated)])
def test_no_part_of_the_cache_is_used_if_others_can_write_to_it(folder, name, use, monkeypatch):
    (folder.parent / name).mkdir(parents=True)
    (folder.parent / name).chmod(0o777)
    with pytest.warns(CacheWarning, match=f"{name}: it is not used: other users can write to it"):
        assert not use(folder.parent / name, monkeypatch)


def test_a_lock_follows_no_link_and_waits_for_no_pipe(folder, tmp_path):
    folder.mkdir(parents=True, mode=0o700)
    (folder / "a.lock").symlink_to(tmp_path / "made")
    os.mkfifo(folder / "b.lock")
    for name in ("a.lock", "b.lock"):
        with alone(folder / name, "does it"):
            pass
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("kind", ["pipe", "folder", "large"])
def test_what_is_no_file_of_usual_size_is_no_entry(folder, kind, monkeypatch):
    folder.mkdir(parents=True, mode=0o700)
    if kind == "pipe":
        os.mkfifo(folder / "entry")
    elif kind == "folder":
        (folder / "entry").mkdir()
    else:
        monkeypatch.setattr(private, "LARGEST", 10)
        sealed(folder / "entry")
    with pytest.warns(CacheWarning, match="cannot be read"):
        assert read_entry(folder / "entry") is None

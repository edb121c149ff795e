"""The files of the compile cache: an entry is read if this user wrote it and it is whole, and unused ones go."""

from __future__ import annotations

import contextlib
import functools
import os
import time
import warnings
from pathlib import Path

from ...files import CacheWarning, cache_folder, private
from .dependencies import sha

DAY = 24 * 3600.0
UNUSED = 30 * DAY  # after which an entry is removed
ENTRY, MARKER = ".nbc", "pruned"
"""The ending of an entry's name, and the file whose time is that of the last removal."""

warned: set[str] = set()


def warn(message: str) -> None:
    """Warn, the first time."""
    if message not in warned:
        warned.add(message)
        warnings.warn(message, CacheWarning, stacklevel=2)


def folder_in_use() -> Path | None:
    """Return the folder of the entries, or None if there can be none."""
    return prepared(cache_folder("kernels"))


@functools.cache
def prepared(folder: Path) -> Path | None:
    """Make the folder, and say once if others can write to it; each access checks that again."""
    try:
        prune(folder)
    except OSError as error:
        warn(f"kernels are not cached: {folder}: {error.strerror or error}")
        return None
    return folder


def prune(folder: Path) -> None:
    """Remove, once a day, entries that no process has used for a month."""
    now = time.time()
    with private.opened(folder) as at:
        with contextlib.suppress(FileNotFoundError):
            if now - os.stat(MARKER, dir_fd=at, follow_symlinks=False).st_mtime < DAY:
                return
        with contextlib.suppress(OSError):  # a disk that is read-only, or another process was faster
            os.close(os.open(MARKER, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=at))
            os.utime(MARKER, dir_fd=at, follow_symlinks=False)
            for name in os.listdir(at):
                if ENTRY in name and now - os.stat(name, dir_fd=at, follow_symlinks=False).st_mtime > UNUSED:
                    os.unlink(name, dir_fd=at)


def read(folder: Path, key: str) -> bytes | None:
    """Return the payload of an entry that this user wrote and that is whole, and mark it as used."""
    try:
        content = private.read(folder / f"{key}{ENTRY}")
    except private.UnsafeError as error:
        warn(f"kernels are not loaded from the cache: {folder}: {error.strerror}")
    except OSError:  # most often there is none
        pass
    else:
        checksum, payload = content[:64], content[64:]
        if checksum == sha(key.encode() + payload).encode():
            return payload
    return None


def write(folder: Path, key: str, payload: bytes) -> None:
    """Keep an entry; another process may write the same."""
    private.write(folder / f"{key}{ENTRY}", [sha(key.encode() + payload).encode(), payload], durable=False)

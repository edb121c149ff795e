"""Files that are there whole or not at all, whenever the machine stops, and where the user's cache is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import UserError

Content = bytes | bytearray | memoryview


def write_synced(path: Path, parts: Iterable[Content]) -> None:
    """Write a new file and wait until the disk has it.

    Raises
    ------
    OSError
        As the system says it.
    """
    with open(path, "xb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def write_whole(path: Path, parts: Iterable[Content]) -> None:
    """Write a file so that, whenever the machine stops, `path` holds either all of it or what it held before.

    Raises
    ------
    UserError
        Where the disk is full or the directory cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_synced(temporary, parts)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)
    except OSError as e:
        raise UserError(f"cannot write {str(path)!r}: {e.strerror or e}; free the place or choose another") from e


def user_cache() -> Path:
    """Give ``cpuopt`` in the user's cache: in ``$XDG_CACHE_HOME`` if that is absolute, as its standard says."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return Path(home if os.path.isabs(home) else os.path.expanduser("~/.cache"), "cpuopt")


def cache_folder(name: str) -> Path:
    """Give a folder for what can be made anew: in ``$CPUOPT_CACHE_DIR``, else in the user's cache."""
    root = os.environ.get("CPUOPT_CACHE_DIR")
    return (Path(root).absolute() if root else user_cache()) / name


@contextmanager
def whole_directory(path: Path) -> Iterator[Path]:
    """Give a directory to write into, which becomes `path` at the end, or goes away if that is not reached.

    Its files must be on the disk by then (`write_synced`). What was at `path` before goes away at the end.

    Raises
    ------
    OSError
        As the system says it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    temporary.mkdir()
    aside = path.with_name(f".tmp-old-{path.name}-{os.getpid()}")
    try:
        yield temporary
        sync_directory(temporary)
        if path.is_dir():
            os.rename(path, aside)
        os.rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_directory(path.parent)
    shutil.rmtree(aside, ignore_errors=True)


def sync_directory(path: Path) -> None:
    """Make the names in this directory survive a power loss; Windows has no such call."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

"""Files: written whole or not at all, whenever the machine stops; JSON of unknown origin; the user's cache.

Whatever is cached can be rebuilt. So an entry carries a checksum, a damaged entry counts as missing, and a cache
that cannot be used costs time and a warning, never a command: `read_entry`, `write_entry`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from ..errors import UserError
from . import private
from .outputs import temporary as temporary
from .outputs import unfit

Content = bytes | bytearray | memoryview


def remove(path: Path) -> bool:
    """Remove a file, a directory or a link, but not the target of a link; return whether it is gone."""
    shutil.rmtree(path, ignore_errors=True)  # refuses a link, and what is no directory
    with suppress(OSError):
        path.unlink()
    return not os.path.lexists(path)


def remove_leftovers(path: Path) -> list[str]:
    """Remove the temporary files of killed processes for `path`; return their names. Living processes lock theirs."""
    ours, gone = re.compile(rf"\.tmp-{re.escape(path.name)}-[0-9a-f]{{8}}"), []
    with suppress(OSError):
        for left in sorted(p for p in path.parent.iterdir() if ours.fullmatch(p.name)):
            with suppress(OSError), _locked(left, must=True):
                gone += [left.name] if remove(left) else []
    return gone


@contextmanager
def _locked(path: Path, must: bool = False) -> Iterator[None]:
    """Hold a file or directory while it is written or removed; `OSError` where it `must` be held and cannot."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        with nullcontext() if must else suppress(OSError):  # some file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def write_synced(path: Path, parts: Iterable[Content]) -> None:
    """Write a new file and wait until it is on the disk; it is locked until then.

    Raises
    ------
    OSError
        The error of the system.
    """
    with open(path, "xb") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def write_text(path: Path, text: str) -> None:
    """Write a text by `write_whole`; what UTF-8 cannot hold becomes a question mark."""
    write_whole(path, [text.encode("utf-8", "replace")])


def write_whole(path: Path, parts: Iterable[Content]) -> None:
    """Write a file so that, whenever the machine stops, `path` holds either all of it or what it held before.

    Raises
    ------
    UserError
        If the disk is full or the directory cannot be written, or what is there is no regular file.
    """
    if why := unfit(path):
        raise UserError(f"cannot write {str(path)!r}: {why}; free the place or choose another")
    part = temporary(path)
    try:
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_synced(part, parts)
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)
    except OSError as e:
        raise UserError(f"cannot write {str(path)!r}: {e.strerror or e}; free the place or choose another") from e


def user_cache() -> Path:
    """Return ``cpuopt`` in the user's cache: in ``$XDG_CACHE_HOME`` if that is absolute, as its standard says."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return Path(home if os.path.isabs(home) else os.path.expanduser("~/.cache"), "cpuopt")


def cache_folder(name: str) -> Path:
    """Return a folder for cached files: in ``$CPUOPT_CACHE_DIR``, else in the user's cache."""
    root = os.environ.get("CPUOPT_CACHE_DIR")
    return (Path(root).absolute() if root else user_cache()) / name


class CacheWarning(UserWarning):
    """A cache that cannot be used; the message gives the reason."""


_warned: set[str] = set()


def warn_once(about: Path, message: str) -> None:
    """Warn about a cache, the first time."""
    if f"{about}: {message}" not in _warned:
        _warned.add(f"{about}: {message}")
        warnings.warn(f"cache {about}: {message}", CacheWarning, stacklevel=3)


SEAL = "\n# sha256 {}\n"
"""The end of an entry: a digest of its name and content."""


def seal(name: str, content: bytes) -> bytes:
    """Return the end of an entry."""
    return SEAL.format(hashlib.sha256(name.encode() + b"\0" + content).hexdigest()).encode()


def read_entry(path: Path) -> bytes | None:
    """Read an entry of `write_entry`; None if it is missing, damaged or not this user's, with one warning a folder."""
    try:
        entry = private.read(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except private.UnsafeError as e:
        warn_once(path.parent, f"it is not used: {e.strerror}")
        return None
    except OSError as e:
        warn_once(path.parent, f"it cannot be read ({e.strerror or e}), so its content is rebuilt")
        return None
    end = len(seal("", b""))
    if entry[-end:] == seal(path.name, entry[:-end]):
        return entry[:-end]
    warn_once(path.parent, "it has files that are damaged or of another version, which are rebuilt")
    return None


def write_entry(path: Path, content: bytes, *, durable: bool = True) -> bool:
    """Write an entry of a cache, and return whether that was possible; a failure gives one warning a folder."""
    try:
        private.write(path, [content, seal(path.name, content)], durable=durable)
    except private.UnsafeError as e:
        warn_once(path.parent, f"it is not used: {e.strerror}")
        return False
    except OSError as e:
        warn_once(path.parent, f"it keeps nothing, so all is rebuilt in each process: {e.strerror or e}")
        return False
    return True


@contextmanager
def alone(path: Path, what: str) -> Iterator[None]:
    """Hold a lock file, if one can be made, so that no two processes of this user do the same at once.

    Raises
    ------
    UserError
        If another process holds it.
    """
    try:
        with private.opened(path.parent) as folder:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            lock = os.open(path.name, flags, 0o600, dir_fd=folder)
    except OSError:
        yield
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        os.close(lock)
        raise UserError(f"another process {what}; wait for it, or end it") from e
    try:
        yield
    finally:
        os.close(lock)


@contextmanager
def whole_directory(path: Path) -> Iterator[Path]:
    """Yield a directory to write into, which becomes `path` at the end, or is removed after an error.

    Its files must be on the disk by then (`write_synced`). Earlier content of `path` is removed at the end.

    Raises
    ------
    OSError
        The error of the system.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part, aside = temporary(path), temporary(path)
    part.mkdir()
    with _locked(part):
        try:
            yield part
            sync_directory(part)
            if path.is_dir():
                os.rename(path, aside)
            os.rename(part, path)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    sync_directory(path.parent)
    remove(aside)


def write_directory(path: Path, files: Mapping[str, bytes | Iterator[Content]]) -> None:
    """Write a directory of files, whole or not at all.

    Parameters
    ----------
    files : the content of each file, or its parts, by its name, which may lie in a folder of the directory.

    Raises
    ------
    UserError
        If it cannot be written.
    """
    try:
        with whole_directory(path) as folder:
            for name, content in files.items():
                (place := folder / name).parent.mkdir(exist_ok=True)
                write_synced(place, [content] if isinstance(content, bytes) else content)
                sync_directory(place.parent)
    except OSError as e:
        raise UserError(f"cannot write {str(path)!r}: {e.strerror or e}; free the place or choose another") from e


def sync_directory(path: Path) -> None:
    """Make the names in this directory survive a power loss; Windows has no such call."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

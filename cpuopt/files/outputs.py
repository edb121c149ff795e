"""Where a command may write: a new name, or a regular file of this user's; no input, and no place twice."""

from __future__ import annotations

import os
import stat
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

from ..errors import UserError

KINDS = {
    stat.S_IFLNK: "it is a symbolic link",
    stat.S_IFDIR: "Is a directory",
    stat.S_IFBLK: "it is a device",
    stat.S_IFCHR: "it is a device",
    stat.S_IFIFO: "it is a pipe",
    stat.S_IFSOCK: "it is a socket",
}
"""What no output replaces."""


@dataclass(frozen=True)
class Output:
    """A place that a command writes to.

    Parameters
    ----------
    flag : what names it, for a message.
    whole : whether it is replaced as a folder, with all that is in it.
    """

    flag: str
    path: Path
    whole: bool = False


def temporary(path: Path) -> Path:
    """Return a random temporary name for `path`. Process ids would not do: in containers they repeat."""
    return path.with_name(f".tmp-{path.name}-{os.urandom(4).hex()}")


def free(path: Path) -> Path:
    """Return a path, or where it exists the first free one of ``NAME-2``, ``NAME-3``, ..."""
    others = (path.with_name(f"{path.stem}-{n}{path.suffix}") for n in count(2))
    return next(p for p in chain([path], others) if not os.path.lexists(p))


def unfit(path: Path, *, mine: bool = False) -> str:
    """Return why a path cannot be replaced by a file; empty if it is a new name or a regular file.

    Parameters
    ----------
    mine : whether a file that is there must belong to this user.
    """
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as e:  # a name with a NUL is a ValueError
        return getattr(e, "strerror", None) or str(e)
    if not stat.S_ISREG(status.st_mode):
        return KINDS.get(stat.S_IFMT(status.st_mode), "it is no regular file")
    return "it belongs to another user" if mine and status.st_uid != os.geteuid() else ""


def check(path: Path, flag: str, *, new: bool = False) -> None:
    """Refuse a file that cannot be written, before the work that would fill it.

    Parameters
    ----------
    new : whether nothing may be there.

    Raises
    ------
    UserError
        If the folder is missing or cannot be written, or what is there is no regular file of this user's.
    """
    why = ""
    if not os.path.isdir(path.parent):
        why = "Not a directory" if os.path.exists(path.parent) else "No such directory"
    elif not path.name or path.name == "..":
        why = "Is a directory"
    elif not (why := unfit(path, mine=True)):
        try:
            (probe := temporary(path)).touch(exist_ok=False)
            probe.unlink()
        except (OSError, ValueError) as e:
            why = getattr(e, "strerror", None) or str(e)
    if why:
        raise UserError(f"{flag} {path}: cannot be written ({why}); name a file in a folder that exists")
    if new and os.path.lexists(path):
        raise UserError(f"{flag} {path}: it is there already; move it away or choose another name")


def check_apart(outputs: Sequence[Output]) -> None:
    """Refuse outputs that lie on each other.

    Raises
    ------
    UserError
        Naming both.
    """
    for i, one in enumerate(outputs):
        for two in outputs[:i]:
            a, b = _name(one.path), _name(two.path)
            inside = (one.whole and a in b.parents) or (two.whole and b in a.parents)
            if a == b or inside or _same(one.path, two.path):
                raise UserError(f"{one.flag} {one.path}: {two.flag} writes there too; give each a place of its own")


def check_unread(outputs: Sequence[Output], inputs: Iterable[Path]) -> None:
    """Refuse outputs that the same command reads.

    Parameters
    ----------
    inputs : files, and folders that are read as a whole, such as a run. They may be missing.

    Raises
    ------
    UserError
        Naming both.
    """
    there = [o for o in outputs if os.path.isfile(o.path)]
    for path in inputs if there else ():
        for file in _files(path, there):
            for o in there:
                if _same(o.path, file):
                    raise UserError(f"{o.flag} {o.path}: this command reads it ({file}); name another file")


def _name(path: Path) -> Path:
    """Return a path by which two spellings of one place are equal, also if the file system ignores the case."""
    real = os.path.join(os.path.realpath(path.parent), path.name)
    return Path(unicodedata.normalize("NFC", real).casefold())


def _same(one: Path, two: Path) -> bool:
    """Return whether two paths are one file, perhaps under two names."""
    with suppress(OSError, ValueError):
        return os.path.samestat(os.stat(one), os.stat(two))
    return False


def _files(path: Path, outputs: Sequence[Output]) -> Iterator[Path]:
    """Yield a file, or the files in a folder if an output may be one of them."""
    if not os.path.isdir(path):
        yield path
        return
    folder = Path(os.path.realpath(path))
    linked = any(os.stat(o.path).st_nlink > 1 for o in outputs)
    if linked or any(folder in Path(os.path.realpath(o.path)).parents for o in outputs):
        for parent, _, names in os.walk(folder):
            yield from (Path(parent, name) for name in names if not name.endswith(".html"))  # which nothing reads

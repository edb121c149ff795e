"""Files that a flag asks for: refused before anything runs, written whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ..errors import UserError


def check_target(path: Path, flag: str) -> None:
    """Refuse a file that cannot be written, before the run that would fill it.

    Raises
    ------
    UserError
        Where its folder is missing or cannot be written, or the path is a folder.
    """
    why = ""
    if not path.parent.is_dir():
        why = "No such directory" if not path.parent.exists() else "Not a directory"
    elif path.is_dir():
        why = "Is a directory"
    elif not os.access(path.parent, os.W_OK):
        why = "Permission denied"
    if why:
        raise _cannot(path, flag, why)


def write_whole(path: Path, text: str, flag: str) -> None:
    """Write a file, or leave what is there.

    Raises
    ------
    UserError
        Where it cannot be written.
    """
    part = path.parent / f".{path.name}.{os.getpid()}.part"
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as e:
        raise _cannot(path, flag, e.strerror) from e
    finally:
        with suppress(OSError):
            part.unlink()


def _cannot(path: Path, flag: str, why: str | None) -> UserError:
    return UserError(f"{flag} {path}: cannot be written ({why}); name a file in a folder that exists")

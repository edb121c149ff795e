"""Files that a flag asks for: refused before anything runs, written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

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


def write_json(path: Path, content: Mapping[str, Any], flag: str) -> None:
    """Write an object for readers that take UTF-8 and numbers seriously: no lone surrogate, no NaN."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False)
    write_whole(path, text.encode("utf-8", "replace").decode(), flag)


def _cannot(path: Path, flag: str, why: str | None) -> UserError:
    return UserError(f"{flag} {path}: cannot be written ({why}); name a file in a folder that exists")

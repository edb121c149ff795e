"""Checks of the files that a flag names, before anything runs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import temporary, write_whole


def check_target(path: Path, flag: str) -> None:
    """Refuse a file that cannot be written, before the run that would fill it.

    Raises
    ------
    UserError
        Where its folder is missing or cannot be written, or the path is a folder.
    """
    why = ""
    if not os.path.isdir(path.parent):
        why = "Not a directory" if os.path.exists(path.parent) else "No such directory"
    elif os.path.isdir(path):
        why = "Is a directory"
    else:
        try:
            (probe := temporary(path)).touch()
            probe.unlink()
        except (OSError, ValueError) as e:  # a name with a NUL is a ValueError
            why = getattr(e, "strerror", None) or str(e)
    if why:
        raise UserError(f"{flag} {path}: cannot be written ({why}); name a file in a folder that exists")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object as strict JSON: valid UTF-8, without lone surrogates, and no NaN.

    Raises
    ------
    UserError
        Where it cannot be written.
    """
    write_whole(path, [json.dumps(content, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")])

"""Settings from a file, with the command line on top."""

from __future__ import annotations

import argparse
import json
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from ..errors import UserError

RECORDED = ("sizes", "corpus", "processes", "plan")
"""What a run's own ``config.json`` says besides its settings, and what ``--variant auto`` came to."""


def leave_out_defaults(p: argparse.ArgumentParser) -> None:
    """Keep flags that are not given out of the namespace, so that a file can stand between them and the defaults."""
    for action in p._actions:
        if action.help and action.default is not argparse.SUPPRESS:
            action.help = action.help.replace("%(default)s", str(action.default))
        action.default = argparse.SUPPRESS


def read_config(path: Path) -> dict[str, Any]:
    """Read a TOML or JSON file of settings, named as the flags are; types are checked later, by `check_types`.

    Raises
    ------
    UserError
        Where it cannot be read, or is neither.
    """
    import tomllib  # late: help shall come at once

    try:
        content = path.read_bytes()
        table = json.loads(content) if path.suffix == ".json" else tomllib.loads(content.decode())
    except OSError as e:
        raise UserError(f"--config {str(path)!r}: {e.strerror or e}") from e
    except (ValueError, RecursionError) as e:
        raise UserError(
            f"--config {str(path)!r}: {e}; expected TOML such as 'lr = 3e-4', or a run's config.json"
        ) from e
    if not isinstance(table, dict):
        raise UserError(f"--config {str(path)!r} holds a {type(table).__name__}; expected names and values")
    return {name.replace("-", "_"): x for name, x in table.items() if name not in RECORDED}


def check_types(given: dict[str, Any], settings: type, path: Path) -> dict[str, Any]:
    """Check names and types of what a file says, and turn its lists into tuples.

    Raises
    ------
    UserError
        Naming the entry, and what was expected.
    """
    hints = get_type_hints(settings)
    for name, x in given.items():
        if name not in hints:
            near = get_close_matches(name, hints, 1)
            raise UserError(f"--config {str(path)!r}: unknown {name!r}{f'; did you mean {near[0]!r}?' if near else ''}")
        if not _fits(x, hints[name]):
            kind = getattr(hints[name], "__name__", str(hints[name]))
            raise UserError(f"--config {str(path)!r}: {name} is {x!r}; expected {kind}")
    return {name: tuple(x) if isinstance(x, list) else x for name, x in given.items()}


def _fits(x: Any, hint: Any) -> bool:
    if isinstance(hint, UnionType):
        return any(_fits(x, h) for h in get_args(hint))
    if get_origin(hint) is tuple:
        return isinstance(x, (list, tuple)) and all(isinstance(item, str) for item in x)
    if hint is float:
        return isinstance(x, (int, float)) and not isinstance(x, bool)
    return type(x) is hint

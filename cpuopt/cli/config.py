"""Settings from a file, with the command line on top."""

from __future__ import annotations

import argparse
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_type_hints

from ..errors import UserError
from ..files.reading import misfit, parse_json, read_file

RECORDED = ("architecture", "sizes", "corpus", "processes", "plan")
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
        content = read_file(path)
        table = parse_json(content) if path.suffix == ".json" else tomllib.loads(content.decode())
    except OSError as e:
        raise UserError(f"--config {str(path)!r}: {e.strerror or e}") from e
    except (ValueError, RecursionError) as e:
        raise UserError(
            f"--config {str(path)!r}: {e}; expected TOML such as 'lr = 3e-4', or a run's config.json"
        ) from e
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
        if wrong := misfit(x, hints[name], name):
            raise UserError(f"--config {str(path)!r}: {wrong}")
    return {name: tuple(x) if isinstance(x, list) else x for name, x in given.items()}

"""What others wrote, read with distrust: JSON of bounded size and depth in which no name comes twice, field by field.

A reader says with types what a file must hold (`misfit`), and finds out in one place, before anything is done with it.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from math import isfinite
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

DEEPEST = 32
"""How far objects and lists may be nested; cpuopt's own files need 8."""
LARGEST = 256 << 20
"""Bytes of a file; a profile of 1000 steps of the largest model has 1 % of that."""
MOST = {int: 2.0**63, float: 1e300}
"""What a number may be at the most, so that it can be counted with."""


def parse_json(text: bytes | str) -> dict[str, Any]:
    """Read a JSON object.

    Raises
    ------
    ValueError
        For any other text, a name that comes twice, NaN, and what is nested more than `DEEPEST` deep.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"{next(n for n in names if names.count(n) > 1)[:50]!r} comes twice")
        return table

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no number")

    deep = ValueError(f"it is nested more than {DEEPEST} deep")
    try:
        table = json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except RecursionError:
        raise deep from None
    if not isinstance(table, dict):
        raise ValueError(f"it is a {type(table).__name__}")
    level: list[Any] = [table]
    for _ in range(DEEPEST):
        level = [v for x in level for v in (x.values() if isinstance(x, dict) else x if isinstance(x, list) else ())]
    if any(isinstance(x, dict | list) for x in level):
        raise deep
    return table


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object; errors as those of `read_file` and `parse_json`."""
    return parse_json(read_file(path))


def read_file(path: Path) -> bytes:
    """Read a file; a pipe or a device is not waited for.

    Raises
    ------
    OSError
        As the system says it.
    ValueError
        For what is no file, or a very large one.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST:
            raise ValueError(f"it is no file of at most {LARGEST >> 20} MB")
        return file.read()


def misfit(x: Any, hint: Any, at: str = "it") -> str:
    """Say where a value is not of a type, as in ``ops[3].ms is 'x'; expected float``; nothing where it is.

    Parameters
    ----------
    hint : a type; None; a union; ``list[T]``, ``tuple[T, ...]``, ``dict[str, T]``; a dataclass or a ``TypedDict``,
        which stand for an object with these fields and any others. A float may be whole; no number is beyond `MOST`.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        found = [misfit(x, h, at) for h in args]
        return "" if "" in found else max(found, key=len)
    if origin in (list, tuple) and isinstance(x, list | tuple):
        return next(_bad((misfit(v, args[0], f"{at}[{i}]") for i, v in enumerate(x))), "")
    if origin in (dict, Mapping) and isinstance(x, dict):
        return next(_bad((misfit(v, args[1], _field(at, name)) for name, v in x.items())), "")
    if is_typeddict(hint) or (is_dataclass(hint) and isinstance(hint, type)):
        return _object(x, hint, at)
    number = hint in MOST and type(x) in (int, hint)
    if hint is Any or (number and abs(x) < MOST[hint]) or (hint not in MOST and type(x) is (hint or NoneType)):
        return ""
    return f"{at} is {repr(x)[:60]}; expected {getattr(origin or hint, '__name__', hint)}"


def _object(x: Any, hint: Any, at: str) -> str:
    """Check the fields of an object."""
    if not isinstance(x, dict):
        return f"{at} is {repr(x)[:60]}; expected an object"
    if is_dataclass(hint):
        needed = {f.name for f in fields(hint) if f.default is MISSING and f.default_factory is MISSING}
    else:
        needed = hint.__required_keys__
    if missing := sorted(needed - x.keys()):
        return f"{at} lacks {missing[0]!r}"
    return next(_bad((misfit(x[n], h, _field(at, n)) for n, h in get_type_hints(hint).items() if n in x)), "")


def _field(at: str, name: str) -> str:
    return name[:50] if at == "it" else f"{at}.{name[:50]}"


def _bad(found: Iterator[str]) -> Iterator[str]:
    return (text for text in found if text)


def finite(x: Any) -> Any:
    """Replace what JSON has no word for, NaN and infinity, by None."""
    if isinstance(x, Mapping):
        return {k: finite(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [finite(v) for v in x]
    return None if isinstance(x, float) and not isfinite(x) else x

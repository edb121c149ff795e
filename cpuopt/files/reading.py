"""JSON: strict reading of untrusted files, and the conversion between dataclasses and objects.

Its size and depth are bounded, and no name comes twice. A reader describes the content of a file by types, and
`from_json` checks it before any use.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from math import isfinite
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, BinaryIO, Union, get_args, get_origin, get_type_hints, is_typeddict

from ..errors import UserError

DEEPEST = 32
"""The deepest nesting of objects and lists; cpuopt's own files need 8."""
LARGEST = 256 << 20
"""The largest size of a file in bytes."""
LARGEST_JSON = 64 << 20
"""The largest size of a record, which takes 30 times as much as objects; a profile of 1000 steps of the largest model
has 3 MB."""
MOST = {int: 2.0**63, float: 1e300}
"""The largest number, so that arithmetic on numbers does not overflow."""
POINTER = b"version https://git-lfs.github.com/spec/"
"""How the text begins that Git leaves in place of a large file."""
IS_POINTER = "it is a pointer of Git LFS in place of the file; run 'git lfs pull' where it was cloned"
DIGITS = 640
"""The most digits of a whole number, which Python reads however it is set up."""
WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    NoneType: "null",
    list: "a list",
    tuple: "a list",
    frozenset: "a list",
    dict: "an object",
    Mapping: "an object",
}
"""What JSON and TOML call a type."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)[:50]!r} comes twice")
    return table


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no number")


def _whole(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ValueError(f"a number has {len(digits):,} digits; expected {DIGITS} at most")
    return int(digits)


STRICT: dict[str, Any] = {"object_pairs_hook": _unique, "parse_constant": _refuse, "parse_int": _whole}
_DECODER = json.JSONDecoder(**STRICT)


def parse_json(text: bytes | str) -> dict[str, Any]:
    """Read a JSON object.

    Raises
    ------
    ValueError
        For any other text, a name that comes twice, NaN, a number of more than `DIGITS`, and nesting deeper than
        `DEEPEST`.
    """
    table = _shallow(lambda: json.loads(text, **STRICT))
    if not isinstance(table, dict):
        raise ValueError(f"it is {WORDS[type(table)]}")
    return table


def next_json(text: str, at: int = 0) -> tuple[Any, int]:
    """Read the JSON value that begins at a place in a text; return it, and the place behind it.

    Raises
    ------
    ValueError
        If none begins there, and as `parse_json`.
    """
    ends: list[int] = []

    def read() -> Any:
        value, end = _DECODER.raw_decode(text, at)
        ends.append(end)
        return value

    return _shallow(read), ends[0]


def _shallow(read: Callable[[], Any]) -> Any:
    """Return what a function parses, unless it is nested too deep."""
    deep = ValueError(f"it is nested more than {DEEPEST} deep")
    try:
        value = read()
    except RecursionError:
        raise deep from None
    level: list[Any] = [value]
    for _ in range(DEEPEST):
        level = [v for x in level for v in (x.values() if isinstance(x, dict) else x if isinstance(x, list) else ())]
    if any(isinstance(x, dict | list) for x in level):
        raise deep
    return value


def read_json(path: Path, *, most: int = LARGEST_JSON) -> dict[str, Any]:
    """Read a file that holds a JSON object; errors as those of `read_file` and `parse_json`."""
    return parse_json(read_file(path, most=most))


@contextmanager
def readable(path: Path | str, what: str = "") -> Iterator[None]:
    """Raise an error of the system as a `UserError` that names the file, after `what` it is."""
    try:
        yield
    except OSError as e:
        raise UserError(f"cannot read {what}{str(path)!r}: {e.strerror or e}") from e


def _opened(path: Path) -> BinaryIO:
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.fdopen(number, "rb")
    except OSError as e:  # a directory, which has the number for its name here
        os.close(number)
        raise OSError(e.errno, e.strerror, str(path)) from e


def open_file(path: Path) -> BinaryIO:
    """Open a regular file to read, without waiting for a pipe or a device.

    Raises
    ------
    OSError
        As the system says it, and for what is no regular file, or a pointer to one.
    """
    file = _opened(path)
    regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    if regular and os.pread(file.fileno(), len(POINTER), 0) != POINTER:
        return file
    file.close()
    raise OSError(errno.EINVAL, IS_POINTER if regular else "it is no regular file", str(path))


def read_file(path: Path, *, most: int = LARGEST) -> bytes:
    """Read a regular file.

    Parameters
    ----------
    most : the largest size in bytes.

    Raises
    ------
    OSError
        As the system says it.
    ValueError
        If it is no regular file, a larger one, or a pointer to one; it may also grow while it is read.
    """
    with _opened(path) as file:
        status = os.fstat(file.fileno())
        if stat.S_ISREG(status.st_mode) and status.st_size <= most:
            content = file.read(status.st_size + 1)
            if len(content) > status.st_size:  # it grows
                content += file.read(most)
            if content.startswith(POINTER):
                raise ValueError(IS_POINTER)
            if len(content) <= most:
                return content
    size = f"{most >> 20} MB" if most >> 20 else f"{most} bytes"
    raise ValueError(f"it is no file of at most {size}")


def from_json(hint: Any, x: Any, at: str = "it") -> Any:
    """Build an object of a type from JSON, field by field.

    Parameters
    ----------
    hint : a type; None; a union; ``list[T]``, ``tuple[T, ...]``, ``frozenset[T]``, ``dict[str, T]``; a dataclass or a
        ``TypedDict``, which stand for an object with these fields and any others: a dataclass is built without the
        others, a ``TypedDict`` keeps them. A float may be whole; no number is beyond `MOST`.
    at : the value's place, for the message.

    Raises
    ------
    ValueError
        Naming the first value that does not fit, as in ``ops[3].ms is 'x'; expected a number``.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return _either(args, x, at)
    if origin in (list, tuple, frozenset) and isinstance(x, list | tuple):
        return origin(from_json(args[0], v, f"{at}[{i}]") for i, v in enumerate(x))
    if origin in (dict, Mapping) and isinstance(x, dict):
        return {name: from_json(args[1], v, _field(at, name)) for name, v in x.items()}
    if is_typeddict(hint) or (is_dataclass(hint) and isinstance(hint, type)):
        return _object(hint, x, at)
    number = hint in MOST and type(x) in (int, hint)
    if hint is Any or (number and abs(x) < MOST[hint]) or (hint not in MOST and type(x) is (hint or NoneType)):
        return x
    limits = f" between -{MOST[hint]:.3g} and {MOST[hint]:.3g}" if number else ""
    raise ValueError(f"{at} is {repr(x)[:60]}; expected {WORDS.get(origin or hint or NoneType, hint)}{limits}")


def _either(hints: tuple[Any, ...], x: Any, at: str) -> Any:
    """Build the first type of a union that fits; the longest of their errors is raised if none does."""
    wrong = []
    for hint in hints:
        try:
            return from_json(hint, x, at)
        except ValueError as e:
            wrong.append(e)
    raise max(wrong, key=lambda e: (not str(e).endswith(f"expected {WORDS[NoneType]}"), len(str(e))))


def _object(hint: Any, x: Any, at: str) -> Any:
    """Build an object from its fields."""
    if not isinstance(x, dict):
        raise ValueError(f"{at} is {repr(x)[:60]}; expected an object")
    hints = get_type_hints(hint)
    if is_typeddict(hint):
        needed = hint.__required_keys__
    else:
        hints = {f.name: hints[f.name] for f in fields(hint) if f.name in getattr(hint, "JSON", (f.name,))}
        needed = {f.name for f in fields(hint) if f.default is MISSING and f.default_factory is MISSING}
    if missing := sorted(needed - x.keys()):
        raise ValueError(f"{at} lacks {missing[0]!r}")
    built = {n: from_json(h, x[n], _field(at, n)) for n, h in hints.items() if n in x}
    return x | built if is_typeddict(hint) else hint(**built)


def _field(at: str, name: str) -> str:
    return name[:50] if at == "it" else f"{at}.{name[:50]}"


def misfit(x: Any, hint: Any, at: str = "it") -> str:
    """Return the error of `from_json` for a type; empty if it has none."""
    try:
        from_json(hint, x, at)
    except ValueError as e:
        return str(e)
    return ""


def to_json(x: Any) -> Any:
    """Convert dataclasses, mappings, sequences and sets, at any depth, to objects for ``json.dumps``.

    A dataclass becomes an object of its fields, or of the attributes that its ``JSON`` names, in that order. NaN and
    infinity, which JSON lacks, become None.
    """
    if is_dataclass(x) and not isinstance(x, type):
        return {name: to_json(getattr(x, name)) for name in getattr(x, "JSON", ()) or [f.name for f in fields(x)]}
    if isinstance(x, Mapping):
        return {k: to_json(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [to_json(v) for v in x]
    if isinstance(x, set | frozenset):
        return sorted(x)
    return None if isinstance(x, float) and not isfinite(x) else x

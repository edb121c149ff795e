"""GGUF, the file of ggml and llama.cpp: metadata and tensors. The header is read with strict checks, and written.

All is little-endian: ``GGUF``, the version (uint32), the numbers of tensors and of metadata (uint64). Each of the
metadata is a key, a type and a value; a text is its length and UTF-8, an array the type of its items, their number and
the items. Each tensor is a name, the number of its dimensions and these, the last one first, the type of its numbers,
and its offset. The data begin behind the header, and offsets count from there; both are multiples of the alignment.

Nothing of the file is trusted, and no memory is taken for a number that its length does not allow.

Source: ggml, ``docs/gguf.md`` and ``src/gguf.cpp``.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from . import Content
from .reading import open_file, readable

MAGIC, VERSIONS = b"GGUF", (2, 3)
ENDING = ".gguf"
LARGEST = 1 << 25
"""Bytes of a header; that of Gemma, with 262,144 tokens, has 15 MB."""
MOST = 1 << 16
"""Tensors, and keys, of a file."""
SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
BOOL, TEXT, ARRAY = 7, 8, 9
KINDS: Mapping[type, int] = {bool: BOOL, int: 4, float: 6, str: TEXT}
"""The types of values that are written: whole numbers as uint32, others as float32."""
ALIGNMENT = 32
"""Of files that name none, and of those that are written."""
KEY, NAME = re.compile(r"[!-~]{1,200}"), re.compile(r"[A-Za-z0-9_./-]{1,63}")
STORED = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34),
    "Q2_K": (10, 256, 84),
    "Q3_K": (11, 256, 110),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "BF16": (30, 1, 2),
}
"""The types of a tensor's numbers: what stands for each in a file, the numbers of a block, and its bytes."""
TYPES = {number: name for name, (number, _, _) in STORED.items()}


@dataclass(frozen=True)
class Extent:
    """A tensor in a file: `start` is its first byte, `size` the number of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def is_gguf(path: Path) -> bool:
    """Return whether a file begins as GGUF, or has its ending."""
    try:
        with open_file(path) as file:
            return file.read(4) == MAGIC or path.suffix == ENDING
    except (OSError, ValueError):
        return False


class Gguf:
    """A file whose header has been checked.

    Attributes
    ----------
    metadata : by key: numbers, texts, lists of texts, and arrays of numbers.
    tensors : by name, in the order of the file.

    Raises
    ------
    UserError
        If the file cannot be read or is invalid.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with readable(path), open_file(path) as file:
            self._size = os.fstat(file.fileno()).st_size
            self._head = file.read(min(self._size, LARGEST))
        self._at = 0
        if self._take(4) != MAGIC:
            raise self.wrong(f"begins with {self._head[:4]!r}; expected {MAGIC!r}")
        if (version := self._number("<I")) not in VERSIONS:
            big = ", so it may be big-endian" if version and version & 0xFFFF == 0 else ""
            raise self.wrong(f"has the version {version}{big}; expected {' or '.join(map(str, VERSIONS))}")
        counts = [self._number("<Q") for _ in range(2)]
        if max(counts) > MOST:
            raise self.wrong(f"says that it has {counts[0]} tensors and {counts[1]} keys; expected {MOST} at most")
        self.metadata: dict[str, Any] = {}
        for _ in range(counts[1]):
            key = self._text("a key")
            if not KEY.fullmatch(key) or key in self.metadata:
                raise self.wrong(f"has the key {key[:50]!r}{' twice' * (key in self.metadata)}")
            self.metadata[key] = self._value(key, self._number("<I"))
        found = [self._tensor() for _ in range(counts[0])]
        align = self.metadata.get("general.alignment", ALIGNMENT)
        if type(align) is not int or not 8 <= align <= 1 << 20 or align & (align - 1):
            raise self.wrong(f"general.alignment is {str(align)[:60]}; expected a power of two from 8 on")
        self.tensors = self._placed(found, -(-self._at // align) * align, align)
        del self._head

    def wrong(self, what: str) -> UserError:
        """Make the error about this file."""
        return UserError(f"{str(self.path)!r}: {what}; give a whole GGUF file")

    def _take(self, n: int) -> bytes:
        part = self._head[self._at : self._at + n]
        if len(part) < n:
            more = f"; expected {LARGEST} bytes at most" if self._at + n > LARGEST <= self._size else ""
            raise self.wrong(f"its header goes on for {n} bytes at byte {self._at} of {self._size}{more}")
        self._at += n
        return part

    def _number(self, code: str) -> int:
        n: int = struct.unpack(code, self._take(struct.calcsize(code)))[0]
        return n

    def _text(self, what: str) -> str:
        raw = self._take(self._number("<Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError as e:
            raise self.wrong(f"{what} is no UTF-8 at byte {self._at - len(raw) + e.start}") from e

    def _value(self, key: str, kind: int) -> Any:
        """Read a value; `key` is for messages."""
        if kind == TEXT:
            return self._text(f"{key!r}")
        if kind != ARRAY:
            return self._numbers(key, kind, 1)[0].item()
        kind, n = self._number("<I"), self._number("<Q")
        return [self._text(f"a text of {key!r}") for _ in range(n)] if kind == TEXT else self._numbers(key, kind, n)

    def _numbers(self, key: str, kind: int, n: int) -> np.ndarray[Any, Any]:
        if kind not in SCALARS:
            nested = ", an array in an array" if kind == ARRAY else ""
            raise self.wrong(f"{key!r} has the type {kind}{nested}; known: {', '.join(map(str, [*SCALARS, TEXT]))}")
        dtype = np.dtype(SCALARS[kind])
        raw = self._take(n * dtype.itemsize)
        if kind == BOOL and raw.strip(b"\0\1"):
            raise self.wrong(f"{key!r} has a byte that is neither 0 nor 1; expected true or false")
        return np.frombuffer(raw, dtype)

    def _tensor(self) -> tuple[str, str, tuple[int, ...], int]:
        """Read name, type, shape and offset of a tensor."""
        name = self._text("a tensor's name")
        if not NAME.fullmatch(name):
            raise self.wrong(f"has a tensor named {name[:50]!r}; expected letters, digits and '_./-', 63 at most")
        if not 1 <= (n := self._number("<I")) <= 4:
            raise self.wrong(f"tensor {name!r} has {n} dimensions; expected 1 to 4")
        shape = tuple(self._number("<Q") for _ in range(n))[::-1]
        kind, offset = self._number("<I"), self._number("<Q")
        if kind not in TYPES:
            raise self.wrong(f"tensor {name!r} has numbers of type {kind}; known: {', '.join(STORED)}")
        if min(shape) < 1 or max(shape) > 1 << 40:
            raise self.wrong(f"tensor {name!r} has the shape {shape}")
        return name, TYPES[kind], shape, offset

    def _placed(self, found: list[tuple[str, str, tuple[int, ...], int]], data: int, align: int) -> dict[str, Extent]:
        """Return the tensors' places, which lie in the file, and apart."""
        places: dict[str, Extent] = {}
        for name, dtype, shape, offset in found:
            _, block, width = STORED[dtype]
            if name in places:
                raise self.wrong(f"has the tensor {name!r} twice")
            if shape[-1] % block:
                raise self.wrong(f"tensor {name!r} has rows of {shape[-1]}; expected a multiple of {block} for {dtype}")
            size = prod(shape) // block * width
            if offset % align or data + offset + size > self._size:
                raise self.wrong(f"tensor {name!r} has {size} bytes from {data + offset} on; the file has {self._size}")
            places[name] = Extent(dtype, shape, data + offset, size)
        end, before = data, ""
        for name, place in sorted(places.items(), key=lambda item: item[1].start):
            if place.start < end:
                raise self.wrong(f"tensors {before!r} and {name!r} overlap")
            end, before = place.start + place.size, name
        return places


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(x: Any) -> bytes:
    """Return type and value."""
    if isinstance(x, np.ndarray):
        kind = next(n for n, code in SCALARS.items() if np.dtype(code) == x.dtype)
        return struct.pack("<IIQ", ARRAY, kind, x.size) + x.tobytes()
    if isinstance(x, Sequence) and not isinstance(x, str):
        return struct.pack("<IIQ", ARRAY, TEXT, len(x)) + b"".join(map(_text, x))
    kind = KINDS[type(x)]
    return struct.pack("<I", kind) + (_text(x) if kind == TEXT else np.array(x, SCALARS[kind]).tobytes())


def header(metadata: Mapping[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """Return a file's bytes before its data.

    Parameters
    ----------
    metadata : by key: numbers, texts, sequences of texts, and arrays of numbers.
    tensors : type and shape of each; the data follow in this order, each filled up by `padding`.
    """
    parts = [MAGIC, struct.pack("<IQQ", VERSIONS[-1], len(tensors), len(metadata))]
    parts += [_text(key) + _value(x) for key, x in metadata.items()]
    offset = 0
    for name, (dtype, shape) in tensors.items():
        number, block, width = STORED[dtype]
        parts.append(_text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], number, offset))
        size = prod(shape) // block * width
        offset += size + len(padding(size))
    text = b"".join(parts)
    return text + padding(len(text))


def padding(size: int) -> bytes:
    """Return the zeros behind so many bytes."""
    return bytes(-size % ALIGNMENT)


def padded(parts: Iterator[Content]) -> Iterator[Content]:
    """Yield each part, and the zeros behind it."""
    for part in parts:
        yield part
        yield padding(memoryview(part).nbytes)

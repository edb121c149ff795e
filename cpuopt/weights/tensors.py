"""Safetensors files, read with strict checks and written without a copy.

A file is 8 bytes with the length of the header, a header of JSON that gives each tensor's dtype, shape and place, and
the numbers. The ``safetensors`` library checks the header, after the checks that it does not make: no name twice, no
strange name. The numbers are read, not mapped: a mapped file that shrinks kills the process.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import inf, prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors

from ..data.companions import Marks as Marks
from ..errors import UserError
from ..files import Content
from ..files.gguf import Extent
from ..files.reading import open_file, parse_json, readable
from ..models import Config
from ..ops.declaration import Shape
from ..ops.storage import TYPES

Array = np.ndarray[Any, Any]
BF16 = TYPES["bfloat16"].dtype
Read = Callable[[str], Array]
"""A function from a tensor's name to the tensor, as float32."""
DType = Literal["f32", "f16", "bf16", "q8_0"]
STORED: dict[DType, tuple[int, str]] = {"f32": (4, "<f4"), "f16": (2, "<f2"), "bf16": (2, "<u2")}
"""Bytes of a number of each dtype that has no blocks."""
LIMITS: dict[DType, float] = {"f32": inf, "f16": 65520.0, "bf16": (2 - 2**-8) * 2.0**127, "q8_0": 65520.0}
"""Numbers from here on become infinite; in Q8_0, those of rows that are stored as float16."""

NAME = re.compile(r"[A-Za-z0-9_./-]{1,200}")
HEADER_LIMIT = 1 << 22
"""The largest header in bytes, enough for tens of thousands of tensors."""
FLOATS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""The dtypes that weights can have, and the NumPy types that read them."""


NO_MARKS = Marks()
IS_PICKLE = (
    "is a pickle, which can run code when it is read, so it is not; if you trust it, open it in its own program and "
    "save it with save_pretrained(..., safe_serialization=True)"
)


@dataclass(frozen=True)
class Weights:
    """A model's weights in files that have been checked; the numbers are read later.

    Attributes
    ----------
    dtype : the stored type of the numbers.
    read : function that reads one parameter as float32, in cpuopt's shape.
    tokenizer : a tokenizer's name, or the path of its file beside the weights; None if there is neither.
    padded_vocab : rows of the embedding in llm.c's file.
    marks : the ids that begin and end a text.
    trained_length, trained_on : the tokens of a row, and the fingerprint of the text, in the run that trained them;
        None for weights from elsewhere.
    """

    path: Path
    config: Config
    dtype: DType
    read: Read
    tokenizer: str | None = None
    padded_vocab: int | None = None
    marks: Marks = NO_MARKS
    trained_length: int | None = None
    trained_on: str | None = None


class TensorFile:
    """A safetensors file whose header has been checked.

    Attributes
    ----------
    tensors : by name, in the order of the header.

    Raises
    ------
    UserError
        If the file cannot be read or is invalid. No memory is allocated before the header is checked.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.tensors = path, dict[str, Extent]()
        try:
            with readable(path), open_file(path) as file:
                size = os.fstat(file.fileno()).st_size
                head = file.read(8)
                length = int.from_bytes(head, "little")
                if len(head) < 8 or not 2 <= length <= size - 8:
                    raise self.wrong(f"says that its header has {length} bytes, and has {size} bytes in all")
                if length > HEADER_LIMIT:
                    raise self.wrong(f"has a header of {length} bytes; expected {HEADER_LIMIT} at most")
                header = parse_json(file.read(length))
            header.pop("__metadata__", None)
            for name in (name for name in header if not NAME.fullmatch(name)):
                raise self.wrong(f"has a tensor named {name[:50]!r}; expected letters, digits and '_./-', 200 at most")
            with readable(path), safetensors.safe_open(path, "numpy"):
                pass
            for name, entry in header.items():
                shape = tuple(entry["shape"])
                if len(entry) > 3 or len(shape) > 8 or max(shape, default=0) > 1 << 40:
                    raise self.wrong(f"tensor {name!r} is described by {str(entry)[:80]}")
                start, end = entry["data_offsets"]
                self.tensors[name] = Extent(entry["dtype"], shape, 8 + length + start, end - start)
        except safetensors.SafetensorError as e:
            raise self.wrong(str(e)) from e
        except (ValueError, RecursionError) as e:
            raise self.wrong(f"its header is no JSON of tensors: {e}") from e

    def wrong(self, what: str) -> UserError:
        """Make the error about this file."""
        return UserError(f"{str(self.path)!r}: {what}; give a whole safetensors file")

    def read(self, name: str) -> Array:
        """Read a tensor of floats as float32; the file is opened for this call alone.

        Raises
        ------
        UserError
            For another dtype, or where the file has shrunk.
        """
        t = self.tensors[name]
        if t.dtype not in FLOATS:
            raise self.wrong(f"tensor {name!r} has the dtype {t.dtype}; expected {', '.join(FLOATS)}")
        return read_floats(self.path, FLOATS[t.dtype], t.shape, t.start)


def all_below(array: Array, limit: float = inf) -> bool:
    """Return whether all numbers of an array lie between -limit and limit, and none is NaN; it takes no memory."""
    with np.errstate(invalid="ignore"):
        return bool(-limit < array.min(initial=0) and array.max(initial=0) < limit)


def read_floats(path: Path, dtype: str, shape: Shape, start: int) -> Array:
    """Read an array at a place in a file; uint16 is bfloat16; what comes is float32.

    Raises
    ------
    UserError
        If the file ends before.
    """
    raw = read_raw(path, dtype, prod(shape), start)
    return (from_bf16(raw) if dtype == "<u2" else raw.astype(np.float32, copy=False)).reshape(shape)


def read_raw(path: Path, dtype: str, n: int, start: int) -> Array:
    """Read n numbers at a place in a file.

    Raises
    ------
    UserError
        If the file ends before.
    """
    with readable(path), open_file(path) as file:
        file.seek(start)
        raw = np.fromfile(file, dtype, n)
    if raw.size != n:
        raise UserError(f"{str(path)!r} ended while it was read: another program changed it; try again")
    return raw


def from_bf16(bits: Array) -> Array:
    """Widen bfloat16, given as uint16, to float32."""
    return bits.view(BF16).astype(np.float32)


def to_bf16(x: Array) -> Array:
    """Round float32 to the nearest bfloat16, ties to even, given as uint16; a NaN stays one."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(x, np.float32).astype(BF16, order="C").view(np.uint16)


def offsets(order: Iterable[str], layers: int, shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Return the place of each tensor in a file without a table, counted in numbers; ``""`` is the end.

    Parameters
    ----------
    order : the names, of which one with a star stands for all layers, one after another.
    shapes : by name; a tensor without a shape is not in the file.
    """
    names = [o.replace("*", str(i)) for o in order for i in (range(layers) if "*" in o else [0])]
    there = [name for name in names if name in shapes]
    ends = accumulate((prod(shapes[name]) for name in there), initial=0)
    return dict(zip([*there, ""], ends, strict=True))


def content_of(x: Array, dtype: DType) -> Content:
    """Return the bytes of an array in the format of a file."""
    if dtype == "bf16":
        return to_bf16(x).astype("<u2", copy=False).data
    return np.ascontiguousarray(x, STORED[dtype][1]).data


def stored_as(arrays: Mapping[str, Array]) -> dict[str, DType]:
    """Return the type in which a file holds each of some arrays as it is: bf16 or f32."""
    return {name: "bf16" if x.dtype.name == "bfloat16" else "f32" for name, x in arrays.items()}


def file_parts(
    shapes: Mapping[str, Shape], read: Read, dtype: DType | Mapping[str, DType] = "f32"
) -> Iterator[Content]:
    """Yield the parts of a safetensors file, a tensor at a time, all of one type or each of its own."""
    types = dict.fromkeys(shapes, dtype) if isinstance(dtype, str) else dtype
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # without it transformers refuses the file
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + prod(shape) * STORED[types[name]][0]
        header[name] = {"dtype": types[name].upper(), "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in shapes:
        yield content_of(read(name), types[name])

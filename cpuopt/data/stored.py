"""Files that a run reads for hours: a change of one on disk is noticed before any of it is used.

Files are read, never mapped. A mapped file that is cut short ends the process (SIGBUS), and one that is overwritten
changes the run without a word. Here the first read of each block keeps its checksum, and every later one compares it.
So the tokens of a step are those whose fingerprint is in the run's checkpoints, whatever else happens to the file.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from ..files.reading import open_file, readable

Tokens = NDArray[np.integer[Any]]
Bytes = NDArray[np.uint8]
BLOCK = 1 << 14
"""Bytes under one checksum: a row of a batch reads one or two blocks."""
PIECE = 1 << 24
"""Bytes that are read at a time."""
LARGE = 1 << 26
"""Bytes up to which a file is read whole, once."""


class DataError(UserError):
    """Data that have become unusable: cut short, overwritten, or with ids beyond the vocabulary."""


class File:
    """A file with the checksums of what was read of it.

    Parameters
    ----------
    path : of a regular file.
    crcs : the checksums that its blocks must have; by default those of the first reads.
    what : what it is, for the error.

    Raises
    ------
    UserError
        If it cannot be opened.
    """

    def __init__(self, path: Path, crcs: NDArray[np.int64] | None = None, what: str = "") -> None:
        self.path = path
        with readable(path, what), open_file(path) as file:
            self._descriptor = os.dup(file.fileno())
        self.close = weakref.finalize(self, os.close, self._descriptor)
        status = os.fstat(self._descriptor)
        self.size, self._mark = status.st_size, _mark(status)
        self._crcs = np.full(-(-self.size // BLOCK), -1, np.int64) if crcs is None else crcs

    def read(self, lo: int, hi: int) -> Bytes:
        """Read the bytes from `lo` to `hi`, which lie within its size.

        Raises
        ------
        DataError
            If the file has been cut short or overwritten since, or cannot be read.
        """
        first, last = lo // BLOCK, -(-hi // BLOCK)
        start = first * BLOCK
        found = np.empty(max(0, min(last * BLOCK, self.size) - start), np.uint8)
        at = 0
        try:
            while at < found.size and (n := os.preadv(self._descriptor, [found[at : at + PIECE].data], start + at)):
                at += n
        except OSError as e:
            raise DataError(f"cannot read {str(self.path)!r}: {e.strerror or e}") from e
        if at < found.size:
            now = os.fstat(self._descriptor).st_size
            raise DataError(f"{str(self.path)!r} was cut short: it has {now} bytes, and had {self.size}")
        for number in range(first, last):
            crc = crc32(found[number * BLOCK - start : (number + 1) * BLOCK - start].data)
            if self._crcs[number] not in (-1, crc):
                raise DataError(f"{str(self.path)!r} was overwritten: byte {number * BLOCK} and after it differ")
            self._crcs[number] = crc
        return found[lo - start : hi - start]

    def changed(self) -> str:
        """Return what has happened to the content on disk since it was read; ``""`` if nothing."""
        try:
            if _mark(os.stat(self.path)) == self._mark:
                return ""
            now = File(self.path, self._crcs.copy())
            if now.size != self.size:
                return f"{str(self.path)!r} has {now.size} bytes, and had {self.size}"
            for start in range(0, self.size, PIECE):
                now.read(start, min(start + PIECE, self.size))
        except OSError as e:
            return f"{str(self.path)!r}: {e.strerror or e}"
        except UserError as e:
            return str(e).removeprefix("cannot read ")
        self._mark = now._mark
        return ""


def _mark(status: os.stat_result) -> tuple[int, ...]:
    """Return what changes with the content; the time of the last change of the inode cannot be put back."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@dataclass(frozen=True, eq=False)
class FileTokens:
    """Tokens in a file: a slice of them is read when it is asked for.

    Attributes
    ----------
    start : the byte of the first token.
    """

    file: File
    dtype: np.dtype[Any]
    start: int
    size: int

    def __getitem__(self, part: slice) -> Tokens:
        """Read some tokens; `DataError` as of `File.read`."""
        lo, hi, _ = part.indices(self.size)
        width = self.dtype.itemsize
        found: Tokens = self.file.read(self.start + lo * width, self.start + max(lo, hi) * width).view(self.dtype)
        return found

    def part(self, lo: int, hi: int) -> FileTokens:
        """Return the tokens from `lo` to `hi`, unread."""
        return FileTokens(self.file, self.dtype, self.start + lo * self.dtype.itemsize, hi - lo)


Source = Tokens | FileTokens


def tokens_of(file: File, dtype: np.dtype[Any], start: int = 0) -> Source:
    """Return all tokens from a byte on: of a small file read now, of a large one as they are needed."""
    size = (file.size - start) // dtype.itemsize
    found = FileTokens(file, dtype, start, size)
    if file.size > LARGE:
        return found
    tokens = found[:]
    tokens.flags.writeable = False
    file.close()
    return tokens

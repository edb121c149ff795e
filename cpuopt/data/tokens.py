"""Token files, which are llm.c's: 256 int32 (magic, version, count, zeros), then the ids.

Ids have 16 bits (magic 20240520, version 1, GPT-2), or 32 for a vocabulary of more than 65,536 (magic 20240801, version
7, Llama 3).

Source: llm.c, ``dev/data/data_common.py`` (``write_datafile``) and ``llmc/dataloader.h``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from ..errors import UserError
from ..files import write_whole
from .stored import File, Source, tokens_of

MAGIC = 20240520
FORMATS = {MAGIC: (1, "<u2"), 20240801: (7, "<i4")}
"""Version and type of the ids by the magic number; of 32 bits, the highest would be beyond every vocabulary."""
HEADER_BYTES = 256 * 4
OTHER_MAGIC = {
    20240520: ", llm.c's tokens",
    20240326: ", an llm.c GPT-2 model",
    20240327: ", an llm.c debug state",
    20240328: ", an llm.c tokenizer",
    20240522: ", an llm.c evaluation set",
    20240527: ", an llm.c training state",
    20240803: ", an llm.c Llama 3 model",
}
"""What the magic numbers of llm.c's files stand for, in messages."""


def read_tokens(path: Path) -> Source:
    """Read a token file after a check of its header: a large one later, by slices.

    Raises
    ------
    UserError
        If the file cannot be read, is no token file, or is shorter or longer than its header says.
    """
    return open_tokens(path)[0]


def open_tokens(path: Path) -> tuple[Source, File]:
    """Return the tokens of `read_tokens` with their file."""
    file = File(path, what="token file ")
    dtype = _check_header(str(path), file.read(0, min(HEADER_BYTES, file.size)).tobytes(), file.size)
    return tokens_of(file, np.dtype(dtype), HEADER_BYTES), file


def _check_header(path: str, head: bytes, size: int) -> str:
    """Return the type of the tokens, if magic, version, count and file size agree."""

    def wrong(what: str) -> UserError:
        return UserError(f"token file {path!r}: {what}; give a file from llm.c's dev/data or `cpuopt data prepare`")

    if len(head) < HEADER_BYTES:
        raise wrong(f"has {size} bytes; expected a header of {HEADER_BYTES}")
    magic, version, count = (int(x) for x in np.frombuffer(head, "<i4", count=3))
    if magic not in FORMATS:
        known, expected = OTHER_MAGIC.get(magic, ""), " or ".join(map(str, FORMATS))
        raise wrong(f"byte 0, the magic number, is {magic}{known}; expected {expected}, tokens")
    wanted, dtype = FORMATS[magic]
    width = np.dtype(dtype).itemsize
    if version != wanted:
        raise wrong(f"byte 4, the version, is {version}; expected {wanted}")
    if count < 1:
        raise wrong(f"byte 8, the number of tokens, is {count}; expected at least 1")
    if size != HEADER_BYTES + width * count:
        raise wrong(
            f"has {size} bytes; expected {HEADER_BYTES + width * count}, because byte 8 says {count} tokens of "
            f"{width} bytes"
        )
    return dtype


def write_tokens(path: Path, tokens: ArrayLike, wide: bool = False) -> None:
    """Write a token file: whole, or not at all.

    Parameters
    ----------
    wide : whether ids have 32 bits; with them a vocabulary may be larger than 65,536.

    Raises
    ------
    UserError
        If an id does not fit, there is none or more than the header can count, or the disk refuses.
    """
    array = np.asarray(tokens)
    got = f"token file {str(path)!r}: got"
    if array.ndim != 1 or not 1 <= array.size < 2**31 or array.dtype.kind not in "iu":
        raise UserError(f"{got} {array.dtype} of shape {array.shape}; expected 1 to 2**31-1 token ids")
    magic = next(m for m in FORMATS if (m == MAGIC) is not wide)
    version, dtype = FORMATS[magic]
    most = np.iinfo(dtype).max
    if array.min() < 0 or array.max() > most:
        raise UserError(f"{got} ids from {array.min()} to {array.max()}; expected 0 to {most}, which the file holds")
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, array.size
    write_whole(path, [header.data, array.astype(dtype).data])

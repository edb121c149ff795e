"""llama2.c's ``tokenizer.bin``, pieces of text with scores, as the ``tokenizer.json`` that says the same.

A file has the bytes of the longest piece (uint32), then for each piece its score (float32), length (int32) and bytes.
Pieces 3 to 258 are ``<0x00>`` to ``<0xFF>``, for characters that are no piece. A text begins with a space.

Source: llama2.c, ``tokenizer.py`` (``export``) and ``run.c`` (``encode``).
"""

from __future__ import annotations

import struct
from math import isfinite
from pathlib import Path

from ..errors import UserError
from ..files.reading import read_file, readable
from . import ggml
from .companions import Marks

LONGEST, MOST = 1 << 16, 1 << 20
"""Bytes of a piece, and pieces, at most."""
SPECIAL = ["<unk>", "<s>", "</s>"]
"""What the first three pieces stand for."""
BYTE_PIECES = [b"<0x%02X>" % byte for byte in range(256)]


def files(path: Path) -> dict[str, bytes]:
    """Return the contents of ``tokenizer.json`` and its companions for the pieces of a file.

    Raises
    ------
    UserError
        If the file cannot be read, or is not as ``run.c`` needs it.
    """
    found = _read(path)
    tokens = [*SPECIAL, *(text.decode(errors="replace").replace(" ", ggml.SPACE) for text, _ in found[3:])]
    types = [ggml.UNKNOWN, ggml.CONTROL, ggml.CONTROL, *[ggml.BYTE] * 256, *[ggml.NORMAL] * (len(tokens) - 259)]
    model = ggml.merging(tokens, types, [score for _, score in found], SPECIAL[0])
    content = ggml.content(tokens, types, model, first=1)
    return ggml.written(content, {"unk_token": SPECIAL[0]}, Marks(1, (1, 2)))


def _read(path: Path) -> list[tuple[bytes, float]]:
    """Return text and score of each piece."""

    def wrong(what: str) -> UserError:
        return UserError(f"{str(path)!r}: {what}; give a tokenizer.bin of llama2.c")

    try:
        with readable(path):
            content = read_file(path)
    except ValueError as e:
        raise wrong(str(e)) from e
    longest, at = int.from_bytes(content[:4], "little"), 4
    if len(content) < 4 or not 1 <= longest <= LONGEST:
        raise wrong(f"byte 0, the length of the longest piece, is {longest}; expected 1 to {LONGEST}")
    found: list[tuple[bytes, float]] = []
    while at < len(content):
        where = f"piece {len(found)}, at byte {at},"
        if len(content) - at < 8:
            raise wrong(f"{where} is cut short")
        score, length = struct.unpack_from("<fi", content, at)
        text = content[at + 8 : at + 8 + max(length, 0)]
        if not 1 <= length <= longest or len(text) != length:
            left = len(content) - at - 8
            raise wrong(f"{where} has {length} bytes; expected 1 to {longest}, and {left} are left")
        if not isfinite(score):
            raise wrong(f"{where} has the score {score}; expected a number")
        if len(found) == MOST:
            raise wrong(f"has more than {MOST} pieces")
        found.append((text, score))
        at += 8 + length
    texts = [text for text, _ in found]
    if texts[3:259] != BYTE_PIECES or b" " not in texts:
        raise wrong("expected the pieces 3 to 258 to be <0x00> to <0xFF>, and one of a space")
    return found

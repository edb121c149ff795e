"""What SentencePiece's ``tokenizer.model`` says of its pieces; the library of that name turns text into them.

The file is a protobuf, of which few fields are read: numbers, and stretches of bytes that are texts or messages again.

Source: sentencepiece, ``src/sentencepiece_model.proto``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

PIECES, TRAINER, NORMALIZER = 1, 2, 3
"""The fields of the file."""
KINDS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
MOST = 1 << 20
"""Pieces, at most."""


@dataclass
class PieceTable:
    """The pieces of a file, and how it cuts text.

    Attributes
    ----------
    texts, scores, types : of each piece, by its id; the numbers of the types are those of GGUF.
    kind : ``bpe``, or another of `KINDS`.
    prefix : whether a space is put before a text.
    charsmap : the table of characters that are replaced; empty if there is none.
    collapses : whether spaces at the ends go, and others become one.
    """

    texts: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    kind: str = "unigram"
    prefix: bool = True
    charsmap: bytes = b""
    collapses: bool = True


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field of a message of protobuf.

    Raises
    ------
    ValueError
        If it is cut short, or no such message.
    """
    at = 0

    def number() -> int:
        nonlocal at
        found = shift = 0
        while shift < 64 and at < len(message):
            byte = message[at]
            found, shift, at = found | (byte & 127) << shift, shift + 7, at + 1
            if byte < 128:
                return found
        raise ValueError(f"a number at byte {at} has no end")

    while at < len(message):
        key = number()
        kind = key & 7
        if kind == 0:
            yield key >> 3, number()
            continue
        size = {1: 8, 5: 4}.get(kind, number() if kind == 2 else -1)
        if not 0 <= size <= len(message) - at:
            raise ValueError(f"a field at byte {at} of kind {kind} has {size} bytes; {len(message) - at} are left")
        yield key >> 3, message[at : (at := at + size)]


def read_pieces(content: bytes) -> PieceTable:
    """Read a file.

    Raises
    ------
    ValueError
        If it is none.
    """
    found = PieceTable()
    for name, value in fields(content):
        if not isinstance(value, bytes):
            raise ValueError(f"field {name} is a number")
        if name == PIECES:
            _add(found, dict(fields(value)))
        elif name == TRAINER:
            kind = dict(fields(value)).get(3, 1)
            found.kind = KINDS.get(kind, "") if isinstance(kind, int) else ""
        elif name == NORMALIZER:
            settings = dict(fields(value))
            table = settings.get(2, b"")
            found.charsmap = table if isinstance(table, bytes) else b""
            found.prefix, found.collapses = bool(settings.get(3, 1)), bool(settings.get(4, 1))
    if not found.texts:
        raise ValueError("it has no pieces")
    return found


def _add(found: PieceTable, piece: dict[int, int | bytes]) -> None:
    """Add a piece: a text, a score and a type."""
    text, score, kind = piece.get(1), piece.get(2, bytes(4)), piece.get(3, 1)
    if not isinstance(text, bytes) or not isinstance(score, bytes) or len(score) != 4 or not isinstance(kind, int):
        raise ValueError(f"piece {len(found.texts)} is no text with a score and a type")
    if len(found.texts) == MOST:
        raise ValueError(f"it has more than {MOST} pieces")
    found.texts.append(text.decode(errors="replace"))
    found.scores.append(struct.unpack("<f", score)[0])
    found.types.append(kind)

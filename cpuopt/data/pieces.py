"""llama2.c's ``tokenizer.bin``: pieces of text with scores, merged by the highest score.

A file has the bytes of the longest piece (uint32), then for each piece its score (float32), length (int32) and bytes.
Pieces 3 to 258 are ``<0x00>`` to ``<0xFF>``, for characters that are no piece. A text begins with a space.

Source: llama2.c, ``tokenizer.py`` (``export``) and ``run.c`` (``encode``).
"""

from __future__ import annotations

import re
import struct
from heapq import heapify, heappop, heappush
from math import isfinite
from pathlib import Path

from ..errors import UserError
from ..files.reading import read_file, readable

LONGEST, MOST = 1 << 16, 1 << 20
"""Bytes of a piece, and pieces, at most."""
FIRST_BYTE, LEAST_SCORE = 3, -1e10
"""``run.c`` merges no pair of this score or less."""
WORD = re.compile(r" *[^ ]+| +")
BYTE_PIECES = [b"<0x%02X>" % byte for byte in range(256)]


class Pieces:
    """The pieces of a file.

    Attributes
    ----------
    texts, scores : of each piece, by its id.
    ids : the id of each piece; of two equal ones, the first.
    in_words : whether no piece goes on behind a word with a space, so that words can be merged one by one.

    Raises
    ------
    UserError
        If the file cannot be read, or is not as ``run.c`` needs it.
    """

    def __init__(self, path: Path) -> None:
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
        self.texts: list[bytes] = []
        self.scores: list[float] = []
        while at < len(content):
            where = f"piece {len(self.texts)}, at byte {at},"
            if len(content) - at < 8:
                raise wrong(f"{where} is cut short")
            score, length = struct.unpack_from("<fi", content, at)
            text = content[at + 8 : at + 8 + max(length, 0)]
            if not 1 <= length <= longest or len(text) != length:
                left = len(content) - at - 8
                raise wrong(f"{where} has {length} bytes; expected 1 to {longest}, and {left} are left")
            if not isfinite(score):
                raise wrong(f"{where} has the score {score}; expected a number")
            if len(self.texts) == MOST:
                raise wrong(f"has more than {MOST} pieces")
            self.texts.append(text)
            self.scores.append(score)
            at += 8 + length
        self.ids: dict[bytes, int] = {}
        for i, text in enumerate(self.texts):
            self.ids.setdefault(text, i)
        self.in_words = not any(re.search(rb"[^ ] ", text) for text in self.texts)
        if self.texts[FIRST_BYTE : FIRST_BYTE + 256] != BYTE_PIECES or b" " not in self.ids:
            raise wrong("expected the pieces 3 to 258 to be <0x00> to <0xFF>, and one of a space")

    def bytes_of(self, piece: int) -> bytes:
        """Return the text that a piece stands for."""
        byte = piece - FIRST_BYTE
        return bytes([byte]) if 0 <= byte < 256 else self.texts[piece]

    def encode(self, text: str) -> list[int]:
        """Turn text into ids: characters, merged while two neighbours are a piece, the highest score first."""
        text = f" {text}" if text else ""
        words = WORD.findall(text) if self.in_words else [text]
        known = {word: self._merged(word) for word in dict.fromkeys(words)}
        return [i for word in words for i in known[word]]

    def _merged(self, text: str) -> list[int]:
        """Merge neighbours. The best pair comes from a heap; a pair of which a part is gone by then is left out."""
        ids: list[int] = []
        for character in text:
            raw = character.encode(errors="replace")
            ids += [self.ids[raw]] if raw in self.ids else [byte + FIRST_BYTE for byte in raw]
        n = len(ids)
        after, before = [*range(1, n + 1)], [*range(-1, n - 1)]

        def pair(i: int) -> tuple[float, int, int, int, int] | None:
            """Return the pair that begins at i: its score, with the sign turned for the heap, place, parts and sum."""
            if i < 0 or (j := after[i]) >= n:
                return None
            piece = self.ids.get(self.texts[ids[i]] + self.texts[ids[j]])
            if piece is None or self.scores[piece] <= LEAST_SCORE:
                return None
            return -self.scores[piece], i, ids[i], ids[j], piece

        heap = [p for i in range(n) if (p := pair(i))]
        heapify(heap)
        while heap:
            _, i, left, right, piece = heappop(heap)
            j = after[i]
            if ids[i] != left or j >= n or ids[j] != right:
                continue
            ids[i], ids[j] = piece, -1
            after[i] = after[j]
            if after[i] < n:
                before[after[i]] = i
            for changed in (pair(before[i]), pair(i)):
                if changed:
                    heappush(heap, changed)
        return [i for i in ids if i >= 0]

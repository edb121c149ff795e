"""What a ``tokenizer.json`` of unknown origin may do: make a text a few times as long, and fail in one line.

Its normalizers and pre-tokenizers are programs: a list of replacements doubles the text with each, and a pattern may
take the library's limit of steps, at which it panics.
"""

from __future__ import annotations

import base64
import os
import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

from ..errors import UserError
from ..wording import one_line

USUAL, MOST = 4, 1024
"""A growth that needs no measurement, and one that is refused unmeasured: of GPT-2 it is 2, of Llama 2 12."""
LONGEST = 8
"""Bytes that may be put before each stretch of text; a file has "▁", of 3."""
MEASURED = 8
"""Characters of tokens for each character of a text, at most; four bytes of a character are four."""
SLICE, SLICES = 256, 64
"""Characters of a slice, and slices of a long text, whose growth is measured."""
AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")
"""Texts of a model that are joined with each character; BERT has "##", CLIP "</w>"."""
FIXED = {"ByteLevel": 3, "Metaspace": 4, "BertNormalizer": 3}
"""Growth by steps that may follow themselves; the others change nothing of what they have made."""
BYTE = re.compile(r"<0x[0-9A-F]{2}>")

_lock = threading.RLock()


def growth(content: Mapping[str, Any]) -> int:
    """Return how many times as long a text can become, at most, by the parts of a ``tokenizer.json``.

    Raises
    ------
    ValueError
        If it is more than `MOST`, or a part is not as it should be.
    """
    model = content.get("model")
    for name in AFFIXES:
        affix = str(model.get(name) or "") if isinstance(model, dict) else ""
        if len(affix) > LONGEST:
            raise ValueError(f"{name} has {len(affix)} characters; expected {LONGEST} at most")
    return bounded(_of(content.get("normalizer")) * _of(content.get("pre_tokenizer")))


def bounded(factor: int) -> int:
    """Return a growth that may be measured; raise a `ValueError` for one of more than `MOST`."""
    if factor > MOST:
        raise ValueError(f"its normalizers can make a text more than {MOST} times as long")
    return factor


def _of(part: Any) -> int:
    """Return the growth by a part, or by a sequence of parts."""
    if part is None:
        return 1
    if not isinstance(part, dict):
        raise ValueError(f"a part is {repr(part)[:40]}; expected an object")
    kind = part.get("type")
    if kind == "Sequence":
        steps = part.get("normalizers") or part.get("pretokenizers") or []
        return prod(min(_of(step), MOST + 1) for step in steps[:MOST])
    if kind == "Replace":
        pattern, put = part.get("pattern"), len(str(part.get("content")).encode())
        text = pattern.get("String") if isinstance(pattern, dict) else None
        return max(1, -(-put // len(text.encode()))) if isinstance(text, str) and text else 1 + put
    if kind == "Prepend":
        if (put := len(str(part.get("prepend")).encode())) > LONGEST:
            raise ValueError(f"it puts {put} bytes before each text; expected {LONGEST} at most")
        return 1 + put
    if kind == "Precompiled":
        return growth_of_characters(base64.b64decode(str(part.get("precompiled_charsmap") or "")))
    return FIXED.get(str(kind), 1)


def growth_of_characters(table: bytes) -> int:
    """Return how many times as long a text can become, at most, by SentencePiece's table of characters."""
    texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
    return max(1, *map(len, texts)) if len(texts) > 1 else max(1, len(table))


def require_bounded(text: str, tokens_of: Callable[[str], list[str]], where: str) -> None:
    """Refuse a text that a tokenizer makes too long, by random slices of it.

    Parameters
    ----------
    tokens_of : function from a text to the texts of its tokens.
    where : the tokenizer's file.

    Raises
    ------
    UserError
        With the growth of the slices.
    """
    starts = range(0, len(text), SLICE)
    if len(starts) > SLICES:
        starts = random.sample(starts, SLICES)  # type: ignore[assignment]  # it decides nothing but a refusal
    slices = [text[start : start + SLICE] for start in starts]
    made = sum(1 if BYTE.fullmatch(token) else len(token) for s in slices for token in tokens_of(s))
    if made > MEASURED * (sum(map(len, slices)) + SLICE):
        times = made / sum(map(len, slices))
        raise UserError(f"{where!r} makes the text {times:.0f} times as long; expected {MEASURED} at most")


@contextmanager
def guarded(where: str, what: str) -> Iterator[None]:
    """Run code of the library tokenizers: an error or a panic of Rust, which is no `Exception`, becomes one line.

    Raises
    ------
    UserError
        Naming the tokenizer's file.
    """
    with _lock, _silent():
        try:
            yield
        except (KeyboardInterrupt, MemoryError, UserError):
            raise
        except BaseException as e:
            raise UserError(f"{where!r} {what}: {one_line(repr(str(e)))[:200]}") from e


@contextmanager
def _silent() -> Iterator[None]:
    """Let what Rust writes about a panic, with all functions that it came through, not reach the terminal."""
    try:
        before = os.dup(2)
    except OSError:  # standard error is closed
        yield
        return
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(null)

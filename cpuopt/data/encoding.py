"""A whole text, in parts: to ids, and to a tokenizer that is trained on it.

The memory does not depend on how long its lines are, or on what a tokenizer does.
"""

from __future__ import annotations

import codecs
import json
import re
from array import array
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError, optional
from ..machine import available_bytes
from .stored import Source
from .tokenizers import MOST, Tokenizer, text_of

PART = 1 << 20
"""Characters from which a part of a text ends, before a line."""
LONG = 2 << 20
"""Characters after which it ends before a word, or anywhere, if no line has ended."""
LINE, WORD = re.compile(r"\n(?=\S)"), re.compile(r"(?<=\S)\s(?=\S)")
PER_PART = 600 << 20
"""Bytes that a library needs for a part of `LONG` characters: about 250 for each, and Python's lists."""
READ = 1 << 22
"""Bytes that are decoded at a time."""


def decoded(text: Source) -> Iterator[str]:
    """Yield the UTF-8 text of bytes, a stretch at a time, with U+FFFD for what is invalid."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for start in range(0, text.size, READ):
        yield decoder.decode(text[start : start + READ].tobytes(), start + READ >= text.size)


def parts(stretches: Iterable[str]) -> Iterator[str]:
    """Cut a text before a line from `PART` characters on; if none begins up to `LONG`, before a word."""
    left = ""
    for stretch in stretches:
        left += stretch
        at = 0
        while (end := _end(left, at)) is not None:
            yield left[at:end]
            at = end
        left = left[at:]
    if left:
        yield left


def _end(text: str, at: int) -> int | None:
    """Return the end of the part that begins at a place; None if more of the text may change it."""
    if line := LINE.search(text, at + PART, at + LONG):
        return line.end()
    if len(text) <= at + LONG:
        return None
    words = [m.start() for m in WORD.finditer(text, at + PART, at + LONG)]
    return words[-1] if words else at + LONG


def encode_text(tokenizer: Tokenizer, stretches: Iterable[str], n_bytes: int = 0) -> NDArray[np.integer]:
    """Turn a whole text into ids, the one before it first.

    Parameters
    ----------
    stretches : the text, cut anywhere.
    n_bytes : its size in all, if it is known, to tell early that the memory does not suffice.

    Returns
    -------
    (n,) uint16, or int32 for a vocabulary of more than 65,536.

    Raises
    ------
    UserError
        If there is too little memory for the ids, or the tokenizer fails on the text.
    """
    ids, done = array("H" if tokenizer.vocab_size <= 1 << 16 else "i", [tokenizer.eot]), 0
    if n_bytes > PART:
        _require_memory(PER_PART)
    for part in parts(stretches):
        ids.extend(tokenizer.encode(part))
        done += len(part.encode(errors="replace"))
        if n_bytes > max(done, PART):
            _require_memory(PER_PART + (n_bytes - done) * len(ids) // done * ids.itemsize)
    return np.frombuffer(ids, ids.typecode)


def _require_memory(needed: int) -> None:
    if needed > (there := available_bytes()):
        raise UserError(
            f"to turn the text into tokens needs {needed / 1e9:.2f} GB more, and {there / 1e9:.2f} GB of memory are "
            "available; take a part of the text, or make token files of its parts with 'cpuopt data tokenize'"
        )


END = "<|endoftext|>"
SPECIAL = (END, "<|im_start|>", "<|im_end|>")
"""Special tokens: what ends a text, and the two of ChatML."""
LEAST = 256 + len(SPECIAL)


def train_tokenizer(stretches: Iterable[str], vocab_size: int) -> dict[str, bytes]:
    """Train a tokenizer that cuts text as GPT-2 does; equal texts give equal bytes.

    Parameters
    ----------
    stretches : the text, cut anywhere.
    vocab_size : the tokens to make: the bytes, the special ones, and pairs, the most frequent first.

    Returns
    -------
    The contents of ``tokenizer.json`` and ``tokenizer_config.json``.

    Raises
    ------
    UserError
        If the text has too few pairs, or the library is missing.
    """
    if not LEAST <= vocab_size <= MOST:
        raise UserError(
            f"--vocab-size {vocab_size}: expected {LEAST} (256 bytes and {len(SPECIAL)} special tokens) to {MOST}"
        )
    found = optional("tokenizers", "data train-tokenizer", "hf")
    made, level = found.Tokenizer(found.models.BPE()), found.pre_tokenizers.ByteLevel
    made.pre_tokenizer, made.decoder = level(add_prefix_space=False), found.decoders.ByteLevel()
    how = {"vocab_size": vocab_size, "special_tokens": [*SPECIAL], "initial_alphabet": sorted(level.alphabet())}
    made.train_from_iterator(map(text_of, parts(stretches)), found.trainers.BpeTrainer(**how, show_progress=False))
    if (n := made.get_vocab_size()) < vocab_size:
        raise UserError(f"--vocab-size {vocab_size}: the text has pairs for {n} tokens; take --vocab-size {n} or less")
    marks = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END)
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **marks, "clean_up_tokenization_spaces": False}
    return {"tokenizer.json": made.to_str(pretty=True).encode(), "tokenizer_config.json": json.dumps(about).encode()}

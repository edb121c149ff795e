"""A tokenizer of byte pairs that is trained on a text, by the library tokenizers."""

from __future__ import annotations

import json
from collections.abc import Iterable

from ..errors import UserError
from .encoding import parts
from .tokenizers import MOST, library, text_of

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
    found = library("tokenizers", "data train-tokenizer")
    made, level = found.Tokenizer(found.models.BPE()), found.pre_tokenizers.ByteLevel
    made.pre_tokenizer, made.decoder = level(add_prefix_space=False), found.decoders.ByteLevel()
    how = {"vocab_size": vocab_size, "special_tokens": [*SPECIAL], "initial_alphabet": sorted(level.alphabet())}
    made.train_from_iterator(map(text_of, parts(stretches)), found.trainers.BpeTrainer(**how, show_progress=False))
    if (n := made.get_vocab_size()) < vocab_size:
        raise UserError(f"--vocab-size {vocab_size}: the text has pairs for {n} tokens; take --vocab-size {n} or less")
    marks = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END)
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **marks, "clean_up_tokenization_spaces": False}
    return {"tokenizer.json": made.to_str(pretty=True).encode(), "tokenizer_config.json": json.dumps(about).encode()}

"""The tokenizer inside a GGUF file, as the ``tokenizer.json`` that says the same.

Of the kind ``gpt2`` are byte pairs: tokens in the alphabet of bytes, the merges in their order, and the name of the
patterns that cut a text first. Of the kind ``llama`` are SentencePiece's: pieces with scores, of which the highest is
merged first, and bytes for characters that are no piece.

Source: llama.cpp, ``src/llama-vocab.cpp``; ``transformers``, ``convert_slow_tokenizer.py`` for merges of pieces.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import UserError
from ..files.gguf import Gguf
from .companions import GENERATION, SETTINGS, Marks

NORMAL, UNKNOWN, CONTROL, OWN, UNUSED, BYTE = range(1, 7)
"""The types of tokens; those of type `OWN` are found in any text."""
KEY = "tokenizer.ggml."
MARKS = ("bos", "eos", "eot", "eom", "padding")
NAMES = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}
"""What the special tokens of other files are called there."""
TEMPLATE = "tokenizer.chat_template"
PAD = "[PAD"
"""How a token begins that only fills the vocabulary up."""
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
BEFORE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
BEHIND = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS: Mapping[str, tuple[tuple[str, ...], bool]] = {
    "gpt-2": ((GPT2,), False),
    "llama-bpe": ((rf"{BEFORE}\p{{N}}{{1,3}}{BEHIND}",), True),
    "dbrx": ((rf"{BEFORE}\p{{N}}{{1,3}}{BEHIND}",), False),
    "qwen2": ((rf"{BEFORE}\p{{N}}{BEHIND}",), False),
    "smollm": ((r"\p{N}", GPT2), False),
    "tekken": ((TEKKEN,), True),
    "default": ((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"), False),
}
"""By the name of a cut: its patterns, one after another, and whether a word that is a token is not merged."""
ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}
ALIASES |= dict.fromkeys(("olmo", "phi-2", "mpt"), "gpt-2")
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
SPACE = "\u2581"
"""What stands for a space in pieces."""


def files(file: Gguf) -> dict[str, bytes]:
    """Return the contents of ``tokenizer.json`` and its companions for the tokenizer in a file.

    Raises
    ------
    UserError
        If it is of another kind, or damaged.
    """
    found = file.metadata
    kind, tokens = found.get(f"{KEY}model"), found.get(f"{KEY}tokens")
    if kind not in ("gpt2", "llama"):
        raise UserError(
            f"{str(file.path)!r} has a tokenizer of the kind {repr(kind)[:60]}; expected gpt2 or llama; name another "
            "with --tokenizer"
        )
    if not _texts(tokens) or not tokens:
        raise file.wrong(f"{KEY}tokens is no list of texts")
    types = _array(file, "token_type", len(tokens), "iu")
    types = [NORMAL] * len(tokens) if types is None else types.tolist()
    ids = {what: _id(file, what, len(tokens)) for what in (*MARKS, "unknown")}
    model = _pairs(file, tokens) if kind == "gpt2" else _pieces(file, tokens, types, ids["unknown"])
    pre = found.get(f"{KEY}pre", "default")
    adds_bos = found.get(f"{KEY}add_bos_token", kind == "llama" or ALIASES.get(pre, pre) in ("llama-bpe", "tekken"))
    made = content(tokens, types, model, ids["bos"] if adds_bos is True else None)
    about: dict[str, Any] = {f"{here}_token": tokens[i] for what, here in NAMES.items() if (i := ids[what]) is not None}
    if templates := chat_templates(file):
        listed = [{"name": name, "template": text} for name, text in templates.items()]
        about["chat_template"] = templates["default"] if [*templates] == ["default"] else listed
    return written(made, about, marks_in(file, len(tokens)))


def content(tokens: Sequence[str], types: Sequence[int], model: Mapping[str, Any], first: int | None) -> dict[str, Any]:
    """Return the content of a ``tokenizer.json``.

    Parameters
    ----------
    model : its parts that encode and decode.
    first : the token that is put before a text.
    """
    special = [i for i, kind in enumerate(types) if kind in (UNKNOWN, CONTROL, OWN)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(i, tokens[i], types[i]) for i in special],
        **model,
        "post_processor": None if first is None else _template(tokens[first], first),
    }


def written(content: Mapping[str, Any], about: Mapping[str, Any], marks: Marks) -> dict[str, bytes]:
    """Return ``tokenizer.json`` and its companions: ``tokenizer_config.json`` from `about`, and marks if there are."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **about}
    made = {"tokenizer.json": content, SETTINGS: settings, GENERATION: marks.ids()}
    return {name: json.dumps(x, ensure_ascii=False).encode() for name, x in made.items() if x}


def marks_in(file: Gguf, n: int) -> Marks:
    """Return the marks that a file names, whose ids must be below a number.

    Raises
    ------
    UserError
        For another.
    """
    ids = {what: _id(file, what, n) for what in MARKS}
    ends = (i for what in ("eos", "eot", "eom") if (i := ids[what]) is not None)
    return Marks(ids["bos"], tuple(dict.fromkeys(ends)), ids["padding"])


def chat_templates(file: Gguf) -> dict[str, str]:
    """Return the chat templates of a file by their names; the usual one is ``default``."""
    names = file.metadata.get(f"{TEMPLATE}s", [])
    keys = {"default": TEMPLATE} | {name: f"{TEMPLATE}.{name}" for name in (names if _texts(names) else [])}
    found = {name: file.metadata.get(key) for name, key in keys.items()}
    return {name: text for name, text in found.items() if isinstance(text, str)}


def _texts(x: Any) -> bool:
    return isinstance(x, list) and all(isinstance(text, str) for text in x)


def _array(file: Gguf, name: str, n: int, kinds: str) -> Any:
    """Return an array of numbers, one for each token; None if there is none."""
    x = file.metadata.get(KEY + name)
    if x is not None and not (isinstance(x, np.ndarray) and x.shape == (n,) and x.dtype.kind in kinds):
        raise file.wrong(f"{KEY}{name} is no list of {n} numbers, one for each token")
    return x


def _id(file: Gguf, what: str, n: int) -> int | None:
    i = file.metadata.get(f"{KEY}{what}_token_id")
    if i is not None and (type(i) is not int or not 0 <= i < n):
        raise file.wrong(f"{KEY}{what}_token_id is {str(i)[:60]}; expected an id below {n}")
    return i


def _added(i: int, text: str, kind: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": i, "content": text, **flags, "special": kind != OWN}


def _template(first: str, i: int) -> dict[str, Any]:
    """Return the part of a ``tokenizer.json`` that puts a token before a text."""
    start, a, b = {"SpecialToken": {"id": first, "type_id": 0}}, *({"Sequence": {"id": x, "type_id": 0}} for x in "AB")
    special = {first: {"id": first, "ids": [i], "tokens": [first]}}
    return {"type": "TemplateProcessing", "single": [start, a], "pair": [start, a, b], "special_tokens": special}


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    """Return the id of each token, of two equal ones the first, without those that fill up."""
    return {text: i for i, text in reversed([*enumerate(tokens)]) if not text.startswith(PAD)}


def _model(vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], **more: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
    }
    usual |= {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {"type": "BPE", **usual, **more, "vocab": vocabulary, "merges": merges}


def _pairs(file: Gguf, tokens: Sequence[str]) -> dict[str, Any]:
    """Return the parts of a ``tokenizer.json`` of byte pairs."""
    pre, merges = file.metadata.get(f"{KEY}pre", "default"), file.metadata.get(f"{KEY}merges", [])
    name = ALIASES.get(pre, pre) if isinstance(pre, str) else ""
    if name not in PATTERNS:
        raise UserError(
            f"{str(file.path)!r} cuts text as {repr(pre)[:60]}, which cpuopt does not; known: {', '.join(PATTERNS)}; "
            "name another tokenizer with --tokenizer"
        )
    pairs = [(m[:at], m[at + 1 :]) for m in merges if (at := m.find(" ", 1)) > 0] if _texts(merges) else []
    if len(pairs) != len(merges):
        raise file.wrong(f"{KEY}merges is no list of two tokens and a space")
    patterns, whole = PATTERNS[name]
    cuts = [{"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False} for p in patterns]
    return {
        "normalizer": {"type": "NFC"} if name == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, BYTE_LEVEL]},
        "decoder": BYTE_LEVEL,
        "model": _model(_vocabulary(tokens), pairs, ignore_merges=whole),
    }


def _pieces(file: Gguf, tokens: Sequence[str], types: Sequence[int], unknown: int | None) -> dict[str, Any]:
    """Return the parts of a ``tokenizer.json`` of pieces."""
    scores = _array(file, "scores", len(tokens), "f")
    if scores is None or not np.isfinite(scores).all():
        raise file.wrong(f"{KEY}scores are no numbers")
    unknown = unknown if unknown is not None else next((i for i, kind in enumerate(types) if kind == UNKNOWN), None)
    prefix = file.metadata.get(f"{KEY}add_space_prefix", True) is True
    return merging(tokens, types, scores.tolist(), None if unknown is None else tokens[unknown], prefix)


def merging(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], unknown: str | None, prefix: bool = True
) -> dict[str, Any]:
    """Return the parts of a ``tokenizer.json`` of pieces; two neighbours merge by the score of what they make.

    Parameters
    ----------
    unknown : the token of characters that are no piece, if they are no bytes either.
    prefix : whether a space is put before a text.
    """
    vocabulary = _vocabulary(tokens)
    plain = {text: i for text, i in vocabulary.items() if types[i] == NORMAL}
    merges = [
        (-scores[i], vocabulary[left], vocabulary[right], left, right)
        for text, i in plain.items()
        for at in range(1, len(text))
        if (left := text[:at]) in plain and (right := text[at:]) in plain
    ]
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    steps = [{"type": "Prepend", "prepend": SPACE}, spaces] if prefix else [spaces]
    ends = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    pairs = [(left, right) for *_, left, right in sorted(merges)]
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *ends]},
        "model": _model(vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True),
    }

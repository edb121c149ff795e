"""The metadata of a tokenizer in GGUF; `cpuopt.data.ggml` reads them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..data.ggml import BYTE, CONTROL, GPT2, KEY, NORMAL, OWN, PAD, PATTERNS, SPACE, TEMPLATE, UNKNOWN, UNUSED
from ..data.tokenizers import BYTE as BYTE_PIECE
from ..data.tokenizers import (
    BYTES,
    GPT2Tokenizer,
    Json,
    OfModel,
    SentencePiece,
    Tokenizer,
    get_tokenizer,
)
from ..errors import UserError
from ..files.gguf import Gguf, is_gguf
from ..files.reading import parse_json
from .tensors import Marks

NAMED = "cpuopt.tokenizer"
"""The key of a tokenizer that has a name."""
ALPHABET = {byte[0]: c for c, byte in BYTES.items()}
NAME = re.compile("[^A-Za-z0-9]")
"""What llama.cpp replaces in the name of a template."""
TURN = 0xFF
"""What ends a turn, and so a text, of bytes."""


def metadata_of(tokenizer: str | None, size: int, marks: Marks) -> dict[str, Any]:
    """Return the metadata of a tokenizer.

    Parameters
    ----------
    tokenizer : its name, or the path of its file; None for a model of tokens alone.
    size : rows of the embedding, up to which the vocabulary is filled up.
    marks : the ids that begin and end a text.

    Raises
    ------
    UserError
        If it cannot be read, or GGUF cannot say what it does.
    """
    if tokenizer is None:
        return {f"{KEY}model": "none"}
    if is_gguf(path := Path(tokenizer)):
        return {k: x for k, x in Gguf(path).metadata.items() if k.startswith("tokenizer.")}
    found = get_tokenizer(tokenizer)
    if found.vocab_size > size:
        raise UserError(f"the tokenizer {tokenizer!r} has {found.vocab_size} tokens, and the model's vocabulary {size}")
    if isinstance(found, Json):
        made = _of_json(found)
    elif isinstance(found, SentencePiece):
        made = _of_sentencepiece(found)
    else:
        made = _of_bytes(found) | {NAMED: tokenizer}
    more = size - len(made[f"{KEY}tokens"])
    made[f"{KEY}tokens"] += [f"{PAD}{i}]" for i in range(size - more, size)]
    made[f"{KEY}token_type"] = np.array([*made[f"{KEY}token_type"], *[UNUSED] * more], np.int32)
    if f"{KEY}scores" in made:
        made[f"{KEY}scores"] = np.array([*made[f"{KEY}scores"], *[0.0] * more], "<f4")
    begins = {found.eot} if made[f"{KEY}add_bos_token"] else set()
    all_ends = dict.fromkeys((*marks.eos, *sorted(found.stops - begins)))
    ends = sorted(all_ends, key=lambda i: i != found.end) or [TURN]  # llama.cpp's eos ends a text, eot and eom a turn
    pad = found.pad if marks.pad is None else marks.pad
    made[f"{KEY}bos_token_id"] = found.eot if marks.bos is None else marks.bos
    made |= {f"{KEY}{what}_token_id": i for what, i in zip(("eos", "eot", "eom"), ends, strict=False)}
    return made | ({} if pad is None else {f"{KEY}padding_token_id": pad})


def _of_bytes(found: Tokenizer) -> dict[str, Any]:
    """Return the metadata of bytes without merges, or of GPT-2's byte pairs."""
    tokens = ["".join(ALPHABET[byte] for byte in found.token_bytes(i)) for i in range(found.vocab_size)]
    types, merges = [NORMAL] * len(tokens), []
    if isinstance(found, GPT2Tokenizer):
        ranks = {found.token_bytes(i): i for i in range(found.eot)}
        merges = [" ".join(_halves(token, ranks)) for token in ranks if len(token) > 1]
        tokens[found.eot], types[found.eot] = "<|endoftext|>", CONTROL
    about = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": types, "merges": merges}
    return {KEY + name: x for name, x in about.items()} | {f"{KEY}add_bos_token": False}


def _halves(token: bytes, ranks: Mapping[bytes, int]) -> list[str]:
    """Return the two tokens of which another is made: what merges by lower ranks leave."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        made = [ranks.get(a + b, len(ranks)) for a, b in pairwise(parts)]
        at = made.index(min(made))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return ["".join(ALPHABET[byte] for byte in part) for part in parts]


def _of_sentencepiece(found: SentencePiece) -> dict[str, Any]:
    """Return the metadata of SentencePiece's pieces that merge, with the tokens that are added to them."""
    pieces, more = found.pieces, range(len(found.pieces.texts), found.vocab_size)
    if pieces.kind != "bpe" or pieces.charsmap or pieces.collapses:
        what = f"a model of the kind {pieces.kind!r}" if pieces.kind != "bpe" else "what its normalizer does"
        raise UserError(f"{found.path!r}: GGUF cannot say {what}; write a directory, or name another with --tokenizer")
    about: dict[str, Any] = {"model": "llama", "add_bos_token": bool(found.before), "add_space_prefix": pieces.prefix}
    about |= {"tokens": [*pieces.texts, *(found.texts.get(i, f"{PAD}{i}]") for i in more)]}
    about |= {"token_type": [*pieces.types, *(CONTROL if i in found.texts else UNUSED for i in more)]}
    about |= {"scores": [*pieces.scores, *[0.0] * len(more)]}
    return {KEY + name: x for name, x in (about | _unknown(found)).items()} | _templates(found)


def _unknown(found: OfModel) -> dict[str, Any]:
    i = found.id_of(found.special_tokens.get("unk_token", ""))
    return {} if i is None else {"unknown_token_id": i}


def _templates(found: OfModel) -> dict[str, Any]:
    """Return the metadata of chat templates, as llama.cpp names them."""
    templates = {NAME.sub("_", name): text for name, text in found.chat_templates.items()}
    made: dict[str, Any] = {TEMPLATE: templates.pop("default")} if "default" in templates else {}
    made |= {f"{TEMPLATE}s": [*templates]} if templates else {}
    return made | {f"{TEMPLATE}.{name}": text for name, text in templates.items()}


def _of_json(found: Json) -> dict[str, Any]:
    """Return the metadata of a ``tokenizer.json``."""

    def wrong(what: str) -> UserError:
        return UserError(f"{found.path!r}: GGUF cannot say {what}; write a directory, or name another with --tokenizer")

    content = parse_json(found.files(Path(found.path))[Json.name])
    model, added = content["model"], {token["id"]: token for token in content.get("added_tokens") or []}
    if model.get("type") != "BPE":
        raise wrong(f"a model of the kind {str(model.get('type'))[:60]!r}")
    texts = {i: text for text, i in model["vocab"].items()} | {i: token["content"] for i, token in added.items()}
    tokens = [texts.get(i, f"{PAD}{i}]") for i in range(found.vocab_size)]
    kinds = {i: CONTROL if token.get("special") else OWN for i, token in added.items()}
    types = [kinds.get(i, NORMAL if i in texts else UNUSED) for i in range(len(tokens))]
    merges = [tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in model.get("merges") or []]
    about: dict[str, Any] = {"tokens": tokens, "token_type": types, "add_bos_token": bool(found.before)}
    about |= _unknown(found)
    if model.get("byte_fallback"):
        about |= {"model": "llama", "add_space_prefix": _prefix(content)}
        ranks = {left + right: -float(n) for n, (left, right) in reversed([*enumerate(merges)])}
        about["scores"] = [ranks.get(text, 0.0 if len(text) == 1 else -1e9) for text in tokens]
        for i, text in enumerate(tokens):
            types[i] = BYTE if BYTE_PIECE.fullmatch(text) else UNKNOWN if text == model.get("unk_token") else types[i]
        if about["add_space_prefix"] is None:
            raise wrong("what its normalizer does")
    else:
        cut, known = _cut(content), {cut: name for name, cut in reversed([*PATTERNS.items()])}
        if (content.get("normalizer") or {}).get("type", "NFC") != "NFC" or cut not in known:
            raise wrong("how it cuts text")
        about |= {"model": "gpt2", "pre": known[cut], "merges": [" ".join(pair) for pair in merges]}
    return {KEY + name: x for name, x in about.items()} | _templates(found)


def _steps(part: Any, name: str) -> Sequence[Mapping[str, Any]]:
    """Return the steps of a part of a ``tokenizer.json``, which may be one."""
    if not isinstance(part, dict):
        return []
    return part.get(name, []) if part.get("type") == "Sequence" else [part]


def _cut(content: Mapping[str, Any]) -> tuple[tuple[str, ...], bool] | None:
    """Return the patterns of a ``tokenizer.json`` of byte pairs as `PATTERNS` has them; None for others."""
    patterns = []
    for step in _steps(content.get("pre_tokenizer"), "pretokenizers"):
        kind, pattern = step.get("type"), step.get("pattern")
        if kind == "Split" and isinstance(pattern, dict) and "Regex" in pattern:
            if (step.get("behavior"), step.get("invert", False)) != ("Isolated", False):
                return None
            patterns.append(pattern["Regex"])
        elif kind == "Digits" and step.get("individual_digits"):
            patterns.append(r"\p{N}")
        elif kind == "ByteLevel" and not step.get("add_prefix_space"):
            patterns += [GPT2] if step.get("use_regex", True) else []
        else:
            return None
    return tuple(patterns), bool(content["model"].get("ignore_merges"))


def _prefix(content: Mapping[str, Any]) -> bool | None:
    """Return whether a ``tokenizer.json`` of pieces puts a space before a text; None if it does something else."""
    steps = [*_steps(content.get("normalizer"), "normalizers"), *_steps(content.get("pre_tokenizer"), "pretokenizers")]
    kinds = {str(step.get("type")): step for step in steps}
    if "Replace" in kinds and kinds.get("Split", {}).get("pattern") == {"String": " "}:
        del kinds["Split"]  # which finds no space that is left
    meta, marks = kinds.get("Metaspace"), {"Prepend": "prepend", "Replace": "content", "Metaspace": "replacement"}
    if not kinds or kinds.keys() - marks.keys():
        return None
    if any(step.get(marks[kind], SPACE) != SPACE for kind, step in kinds.items()):
        return None
    return "Prepend" in kinds or (meta is not None and meta.get("prepend_scheme", "always") != "never")

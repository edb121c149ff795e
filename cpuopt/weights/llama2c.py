"""llama2.c's model files, to read: version 0, which ``run.c`` reads too, and version 1.

Version 0 begins with seven int32: width, width of the MLP, layers, heads, key heads, vocabulary (negative where the
head is a weight of its own) and context. Version 1 has 256 bytes with a magic number, the version, these seven and a
byte for a shared head. Then come float32 tensors, grouped by kind, all layers together. Version 0 also has the cosines
and sines of the positions, which readers skip.

Channels of a head rotate in pairs (2i, 2i + 1) there and (i, i + half) here, so the rows of q and k change places.

Source: llama2.c, ``export.py`` (``legacy_export``, ``version1_export``) and ``run.c``.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from .. import models
from ..data.tokenizers import tokenizer_beside
from ..errors import UserError
from ..files.reading import open_file, readable
from ..models.llama import Config
from .tensors import NO_MARKS, Array, Marks, Weights, offsets, read_floats

MAGIC = struct.pack("<I", 0x616B3432)
LAYER = "model.layers.*."
EMBEDDING, TABLES, HEAD = "model.embed_tokens.weight", "tables", "lm_head.weight"
ATTENTION = [f"{LAYER}self_attn.{x}_proj.weight" for x in "qkvo"]
MLP = [f"{LAYER}mlp.{x}_proj.weight" for x in ("gate", "down", "up")]
NORMS = [f"{LAYER}input_layernorm.weight", f"{LAYER}post_attention_layernorm.weight", "model.norm.weight"]
ORDERS = {
    0: (EMBEDDING, NORMS[0], *ATTENTION, NORMS[1], *MLP, NORMS[2], TABLES, HEAD),
    1: (*NORMS, EMBEDDING, *ATTENTION, *MLP, HEAD),
}
"""The tensors of each version; one with a star has all layers."""
STARTS = {0: 7 * 4, 1: 256}
FIXED = {"attention_bias": False, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_type": "default"}
"""What ``run.c`` computes, whatever a model was trained with."""
BYTES = 256
"""A vocabulary of as many tokens, without a tokenizer's file, is that of bytes, none of which ends a text."""
MARKS = Marks(1, (2,))


def places_of(config: Config, version: int) -> dict[str, int]:
    """Return the offset of each tensor, counted in numbers from the first; ``""`` is the end."""
    tables = {TABLES: (config.max_position_embeddings, config.head_dim)}
    return offsets(ORDERS[version], config.num_hidden_layers, config.shapes() | tables)


def _header(path: Path) -> tuple[int, list[int], bool, int]:
    """Read a file's version, its seven sizes, whether the head is shared, and the file's size."""
    with readable(path), open_file(path) as file:
        size, head = os.fstat(file.fileno()).st_size, file.read(STARTS[1])
    if len(head) < STARTS[0]:
        raise UserError(f"{str(path)!r} has {size} bytes; expected a llama2.c model, whose header has {STARTS[0]}")
    if head[:4] != MAGIC:
        return 0, *_first(head), size
    if len(head) < STARTS[1]:
        raise UserError(f"{str(path)!r} has {size} bytes; expected a header of {STARTS[1]}")
    version, *sizes = struct.unpack_from("<8i", head, 4)
    if version != 1:
        known = ", int8 numbers" if version == 2 else ""
        raise UserError(f"{str(path)!r}: byte 4, the version, is {version}{known}; expected 1, float32 numbers")
    if head[36] > 1:
        raise UserError(f"{str(path)!r}: byte 36, whether the head is shared, is {head[36]}; expected 0 or 1")
    return 1, sizes, bool(head[36]), size


def _first(head: bytes) -> tuple[list[int], bool]:
    """Return the seven sizes at the beginning of version 0, and whether the head is shared."""
    *sizes, vocabulary, context = struct.unpack_from("<7i", head)
    return [*sizes, abs(vocabulary), context], vocabulary > 0


def _possible(sizes: list[int]) -> bool:
    """Return whether a model can have these sizes."""
    width, _, layers, heads, key_heads, *_ = sizes
    if not all(1 <= n <= 1 << 20 for n in sizes) or layers > models.MOST_LAYERS:
        return False
    return width % heads == 0 and heads % key_heads == 0 and width // heads % 2 == 0


def recognizes(path: Path) -> bool:
    """Return whether a file begins as one of llama2.c does: version 0 has no magic number."""
    try:
        with open_file(path) as file:
            head = file.read(STARTS[0])
    except OSError:
        return False
    return head[:4] == MAGIC or (len(head) == STARTS[0] and _possible(_first(head)[0]))


def open_model(path: Path) -> Weights:
    """Check a model file.

    Raises
    ------
    UserError
        If version, sizes and length do not agree.
    """
    version, sizes, shared, size = _header(path)
    if not _possible(sizes):
        raise UserError(f"{str(path)!r}: the header has impossible sizes {sizes}; is the file whole?")
    width, ffn, layers, heads, key_heads, vocabulary, context = sizes
    if 4 * layers * width * width > size:  # before a list of that many layers is made
        raise UserError(f"{str(path)!r} has {size} bytes; {layers} layers of {width} need more: it is cut short")
    config = Config(
        *(vocabulary, width, ffn, layers, heads, key_heads, width // heads, context),
        tie_word_embeddings=shared,
        **FIXED,  # type: ignore[arg-type]
    )
    start, places, shapes = STARTS[version], places_of(config, version), config.shapes()
    expected = start + 4 * places[""]
    if size != expected:
        raise UserError(f"{str(path)!r} has {size} bytes; expected {expected}, because of the sizes {sizes}")

    def read(name: str) -> Array:
        x = read_floats(path, "<f4", shapes[name], start + 4 * places[name])
        return halves(x, config.head_dim) if turned(name) else x

    tokenizer = tokenizer_beside(path.parent)
    marks = MARKS if tokenizer or vocabulary > BYTES else NO_MARKS
    return Weights(path, config, "f32", read, tokenizer, marks=marks)


def turned(name: str) -> bool:
    """Return whether a weight's rows are channels that rotate."""
    return name.endswith(("q_proj.weight", "k_proj.weight"))


def halves(x: Array, head_dim: int) -> Array:
    """Sort the rows of each head: pairs (2i, 2i + 1) become (i, i + half)."""
    return x.reshape(-1, head_dim // 2, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def pairs(x: Array, head_dim: int) -> Array:
    """Sort the rows of each head back: (i, i + half) become (2i, 2i + 1)."""
    return x.reshape(-1, 2, head_dim // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)

"""llm.c's model file.

256 int32 (magic 20240326, version 3 for float32, 5 for bfloat16) are followed by 16 tensors, grouped by kind, all
layers together; rows of ``wte`` are added up to a padded vocabulary.

Source: llm.c, ``train_gpt2.py`` (``write_model``) and ``train_gpt2.c``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from .. import models
from ..data.tokenizers import tokenizer_files
from ..data.tokens import OTHER_MAGIC
from ..errors import UserError
from ..files import Content, write_whole
from ..files.reading import open_file, readable
from ..models.gpt2 import Config
from .tensors import IS_PICKLE, STORED, Array, DType, Weights, content_of, offsets, read_floats

MAGIC = 20240326
VERSIONS: dict[int, DType] = {3: "f32", 5: "bf16"}
HEADER_BYTES = 256 * 4
ORDER = (
    *["wte.weight", "wpe.weight"],
    *[
        f"h.*.{layer}.{kind}"
        for layer in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
        for kind in ("weight", "bias")
    ],
    *["ln_f.weight", "ln_f.bias"],
)
"""The 16 tensors of a file; one with a star has all layers."""


def places_of(config: Config, padded_vocab: int) -> dict[str, int]:
    """Return the offset of each parameter in the file, counted in numbers from the first tensor; ``""`` is the end."""
    return offsets(ORDER, config.n_layer, config.shapes() | {"wte.weight": (padded_vocab, config.n_embd)})


def _header(path: Path) -> tuple[list[int], int]:
    """Read the 256 numbers at a file's beginning, and its size."""
    with readable(path), open_file(path) as file:
        size, head = os.fstat(file.fileno()).st_size, file.read(HEADER_BYTES)
    if head[:2] == b"PK" or head[:1] == b"\x80":
        raise UserError(f"{str(path)!r} {IS_PICKLE}")
    if len(head) < HEADER_BYTES:
        raise UserError(
            f"{str(path)!r} has {size} bytes; expected a model of llm.c, whose header alone has {HEADER_BYTES}"
        )
    words = [int(n) for n in np.frombuffer(head, "<i4")]
    if words[0] != MAGIC:
        known = OTHER_MAGIC.get(words[0], "")
        raise UserError(f"{str(path)!r}: byte 0, the magic number, is {words[0]}{known}; expected {MAGIC}, a model")
    return words, size


def open_model(path: Path) -> Weights:
    """Check a model file.

    Raises
    ------
    UserError
        If magic, version, sizes and length do not agree.
    """
    words, size = _header(path)
    _, version, block_size, vocab_size, n_layer, n_head, n_embd, padded = words[:8]
    if version not in VERSIONS:
        raise UserError(f"{str(path)!r}: byte 4, the version, is {version}; expected 3 (float32) or 5 (bfloat16)")
    numbers = (n_layer, n_head, n_embd, vocab_size, block_size)
    if not all(1 <= n <= 1 << 20 for n in numbers) or not vocab_size <= padded <= vocab_size + (1 << 16):
        raise UserError(f"{str(path)!r}: the header has impossible sizes {words[2:8]}; is the file whole?")
    if n_layer * n_embd * n_embd > size:  # before a list of that many layers is made
        raise UserError(f"{str(path)!r} has {size} bytes; {n_layer} layers of {n_embd} need more: it is cut short")
    try:
        config = Config(n_layer, n_head, n_embd, vocab_size, block_size)
    except UserError as e:
        raise UserError(f"{str(path)!r}: {e}") from e
    (width, stored), places, shapes = STORED[VERSIONS[version]], places_of(config, padded), config.shapes()
    expected = HEADER_BYTES + width * places[""]
    if size != expected:
        raise UserError(f"{str(path)!r} has {size} bytes; expected {expected}, because of the sizes {words[2:8]}")

    def read(name: str) -> Array:
        return read_floats(path, stored, shapes[name], HEADER_BYTES + width * places[name])

    return Weights(path, config, VERSIONS[version], read, padded_vocab=padded)


def require(config: models.Config) -> Config:
    """Return the config of a model that llm.c has; raise a `UserError` for another."""
    if not isinstance(config, Config):
        raise UserError(f"llm.c's file cannot hold the model {config.model}; name a directory")
    return config


def write(path: Path, weights: Weights) -> None:
    """Write a file, and the tokenizer's files beside it; the vocabulary is padded, by default to a multiple of 128.

    Raises
    ------
    UserError
        If they cannot be written.
    """
    beside = tokenizer_files(weights.tokenizer)
    write_whole(path, _parts(require(weights.config), weights))
    for name, content in beside.items():
        if not os.path.lexists(there := path.with_name(name)):
            write_whole(there, [content])


def _parts(c: Config, weights: Weights) -> Iterator[Content]:
    dtype, padded = weights.dtype, weights.padded_vocab or -(-c.vocab_size // 128) * 128
    header = np.zeros(256, "<i4")
    version = next(v for v, d in VERSIONS.items() if d == dtype)
    header[:8] = MAGIC, version, c.block_size, c.vocab_size, c.n_layer, c.n_head, c.n_embd, padded
    yield header.data
    for name in list(places_of(c, padded))[:-1]:
        yield content_of(weights.read(name), dtype)
        if name == "wte.weight":
            yield bytes((padded - c.vocab_size) * c.n_embd * STORED[dtype][0])

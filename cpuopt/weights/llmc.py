"""llm.c's model file.

256 int32 (magic 20240326, version 3 for float32, 5 for bfloat16) are followed by 16 tensors, grouped by kind, all
layers together; rows of ``wte`` are added up to a padded vocabulary.

Source: llm.c, ``train_gpt2.py`` (``write_model``) and ``train_gpt2.c``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import prod
from pathlib import Path

import numpy as np

from .. import models
from ..errors import UserError
from ..files import Content
from ..files.reading import open_file
from ..models.gpt2 import Config
from .tensors import IS_PICKLE, STORED, Array, DType, Read, Weights, content_of, read_floats

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
KNOWN = {
    20240520: "llm.c's tokens",
    20240522: "llm.c's evaluation data",
    20240527: "llm.c's optimizer state",
    20240328: "llm.c's tokenizer",
    20240803: "llm.c's Llama 3",
    MAGIC: "a model",
    20240327: "a debug state",
}


def places_of(config: Config, padded_vocab: int) -> dict[str, int]:
    """Return the offset of each parameter in the file, counted in numbers from the first tensor; ``""`` is the end."""
    layers = [str(i) for i in range(config.n_layer)]
    shapes, place, places = config.shapes(), 0, {}
    for name in (o.replace("*", i) for o in ORDER for i in (layers if "*" in o else [""])):
        places[name] = place
        place += (padded_vocab if name == "wte.weight" else shapes[name][0]) * prod(shapes[name][1:])
    return places | {"": place}


def _header(path: Path) -> tuple[list[int], int]:
    """Read the 256 numbers at a file's beginning, and its size."""
    try:
        with open_file(path) as file:
            size, head = os.fstat(file.fileno()).st_size, file.read(HEADER_BYTES)
    except OSError as e:
        raise UserError(f"cannot read {str(path)!r}: {e.strerror or e}") from e
    if head[:2] == b"PK" or head[:1] == b"\x80":
        raise UserError(f"{str(path)!r} {IS_PICKLE}")
    if len(head) < HEADER_BYTES:
        raise UserError(
            f"{str(path)!r} has {size} bytes; expected a model of llm.c, whose header alone has {HEADER_BYTES}"
        )
    words = [int(n) for n in np.frombuffer(head, "<i4")]
    if words[0] != MAGIC:
        known = f", {KNOWN[words[0]]}" if words[0] in KNOWN else ""
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


def model_parts(config: models.Config, read: Read, dtype: DType, padded_vocab: int | None = None) -> Iterator[Content]:
    """Yield the parts of a model file; the vocabulary is padded, by default to a multiple of 128 like llm.c's."""
    c = require(config)
    padded = padded_vocab or -(-c.vocab_size // 128) * 128
    header = np.zeros(256, "<i4")
    version = next(v for v, d in VERSIONS.items() if d == dtype)
    header[:8] = MAGIC, version, c.block_size, c.vocab_size, c.n_layer, c.n_head, c.n_embd, padded
    yield header.data
    for name in list(places_of(c, padded))[:-1]:
        yield content_of(read(name), dtype)
        if name == "wte.weight":
            yield bytes((padded - c.vocab_size) * c.n_embd * STORED[dtype][0])

"""The formats of models, in one list: how a file's is recognized, and which one a target's name stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..files.gguf import ENDING, is_gguf
from ..models import Config
from . import gguf, huggingface, llama2c, llmc
from .tensors import DType, Weights


@dataclass(frozen=True)
class FileFormat:
    """How models lie in files.

    Attributes
    ----------
    name : in messages.
    ending : that of a target's name; ``""`` for a directory, whose name may end in anything else.
    dtypes : the types of numbers that it can hold.
    recognizes : function that tells whether a path is of this format.
    read : function that checks a path, and finds what it holds; it raises a `UserError` for what is damaged.
    require : function that raises a `UserError` for a model that the format cannot hold.
    write : function that writes weights, whole or not at all. Their path is that of the source. By default both are
        those of a directory, which takes the place of a format without an ending.
    beside : whether the tokenizer's files come beside a target that is a file.
    """

    name: str
    ending: str
    dtypes: tuple[DType, ...]
    recognizes: Callable[[Path], bool]
    read: Callable[[Path], Weights]
    require: Callable[[Config], object] = lambda config: config.to_transformers()
    write: Callable[[Path, Weights], None] = huggingface.write
    beside: bool = False


HUGGING_FACE = FileFormat(
    "a Hugging Face directory",
    "",
    ("f32", "f16", "bf16"),
    huggingface.recognizes,
    huggingface.open_model,
)
GGUF = FileFormat(
    "GGUF",
    ENDING,
    ("f32", "f16", "bf16", "q8_0"),
    is_gguf,
    gguf.open_model,
    gguf.require,
    gguf.write,
)
LLAMA2C = FileFormat(
    "llama2.c's file",
    "",
    ("f32",),
    llama2c.recognizes,
    llama2c.open_model,
)
LLMC = FileFormat(
    "llm.c's file",
    ".bin",
    ("f32", "bf16"),
    lambda path: True,  # its errors tell what else a file is
    llmc.open_model,
    llmc.require,
    llmc.write,
    beside=True,
)
FORMATS = (HUGGING_FACE, GGUF, LLAMA2C, LLMC)
"""In the order in which a path is tried."""


def format_of(path: Path) -> FileFormat:
    """Return the format of a file or a directory that is there."""
    return next(f for f in FORMATS if f.recognizes(path))


def target_format(path: Path, config: Config | None = None) -> FileFormat:
    """Return the format that a target's name stands for.

    Raises
    ------
    UserError
        If it cannot hold the model.
    """
    found = next((f for f in FORMATS if f.ending and f.ending == path.suffix), HUGGING_FACE)
    if config is not None:
        found.require(config)
    return found

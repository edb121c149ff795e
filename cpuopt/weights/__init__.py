"""Weights in files: llm.c's, GGUF and directories of Hugging Face, read and written by tensors; llama2.c's, read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import inf
from pathlib import Path

import numpy as np

from ..data.tokenizers import tokenizer_files
from ..errors import UserError
from ..files import temporary
from ..files.reading import read_file
from ..models import Config
from ..ops.storage import WIDE
from ..wording import hub_hint
from .formats import format_of, target_format
from .peft import Adapter, is_adapter, merge, named, open_adapter, require_own, save_adapter
from .tensors import LIMITS, NO_MARKS, Array, DType, Marks, Read, Weights, all_below

__all__ = [
    "NO_MARKS",
    "Adapter",
    "Marks",
    "Weights",
    "check_target",
    "copy_into",
    "is_adapter",
    "merge",
    "open_adapter",
    "open_weights",
    "require_own",
    "save_adapter",
    "save_weights",
    "usual_dtype",
]


def open_weights(path: Path) -> Weights:
    """Find the format of a file or directory, and check it; the numbers are read later.

    Raises
    ------
    UserError
        If it is missing, of no known format, or damaged.
    """
    if not path.exists():
        raise UserError(
            f"there is no {str(path)!r}; expected a model file of llm.c, llama2.c or GGUF, or a Hugging Face directory"
            + hub_hint(str(path))
        )
    if is_adapter(path):
        raise UserError(
            f"{str(path)!r} is an adapter, which needs its base model{named(path)}: name that, and this with "
            "--adapter; 'cpuopt convert --merge' makes one model of both"
        )
    return format_of(path).read(path)


def copy_into(parameters: Mapping[str, Array], weights: Weights) -> None:
    """Fill a model's parameters.

    Raises
    ------
    UserError
        If a weight is missing, has another shape, or is not a finite number in the type of its parameter.
    """
    limits = {"bfloat16": LIMITS["bf16"]}
    for name, array in parameters.items():
        where = f"{str(weights.path)!r}: these are weights of another model"
        try:
            read = weights.read(name)
        except KeyError as e:
            raise UserError(f"{where}, without {name!r}") from e
        if read.shape != array.shape:
            raise UserError(f"{where}, whose {name!r} has the shape {read.shape}; expected {array.shape}")
        require_finite(
            f"{str(weights.path)!r}: {name}", read, getattr(array, "limit", limits.get(array.dtype.name, inf))
        )
        array[...] = read


def require_finite(where: str, array: Array, limit: float) -> None:
    """Refuse weights of which one is not a finite number, or none below the limit of a format."""
    if not all_below(array, limit):
        at = tuple(int(i) for i in np.argwhere(~(np.abs(array) < limit))[0])
        more = f" below {limit:.4g}" * bool(np.isfinite(array[at]))
        raise UserError(f"{where} holds {array[at]} at {at}; expected finite numbers{more}")


def check_target(path: Path, config: Config | None = None, tokenizer: str | None = None) -> None:
    """Refuse a path that weights cannot be written to, before any work.

    Parameters
    ----------
    config : the model's config, once it is known; a file of llm.c holds its own model only.
    tokenizer : the tokenizer, once it is known; its files come beside the weights.

    Raises
    ------
    UserError
        If something is there already, the name is of no known format, or its directory cannot be written.
    """
    if path.suffix in (".safetensors", ".pt", ".pth", ".npz"):
        raise UserError(
            f"{str(path)!r}: expected a file ending in .bin (llm.c) or .gguf, or a directory (Hugging Face)"
        )
    target, parent = target_format(path, config), path
    try:
        folder = path.is_dir() and not path.is_symlink() and not target.ending and path.name not in ("", "..")
        if os.path.lexists(path) and not (folder and not any(path.iterdir())):
            raise UserError(f"{str(path)!r} is there already; move it away or choose another name")
        parent = next(p for p in Path(os.path.abspath(path)).parents if p.exists())
        (probe := temporary(parent / path.name)).mkdir()
        probe.rmdir()
    except (OSError, ValueError) as e:  # a name with a NUL is a ValueError
        why = f" ({e.strerror})" if isinstance(e, OSError) else ""
        raise UserError(f"{str(path)!r}: nothing can be written to {str(parent)!r}{why}; choose another place") from e
    if target.beside:
        for name, content in tokenizer_files(tokenizer).items():
            if os.path.lexists(there := path.with_name(name)) and not _is(there, content):
                raise UserError(f"{str(there)!r} is another tokenizer than the model's; choose another directory")


def _is(path: Path, content: bytes) -> bool:
    try:
        return read_file(path) == content
    except (OSError, ValueError):
        return False


def usual_dtype(path: Path, config: Config, dtype: DType) -> DType:
    """Return the type to write numbers in that are stored in another file: the same, if the new format has it."""
    return dtype if dtype in target_format(path, config).dtypes else "f32"


def save_weights(
    path: Path,
    config: Config,
    read: Read,
    dtype: DType = "f32",
    padded_vocab: int | None = None,
    tokenizer: str | None = None,
    marks: Marks = NO_MARKS,
) -> None:
    """Write a model, whole or not at all.

    If the name ends in ``.bin`` it is a file of llm.c; in ``.gguf``, GGUF; else a Hugging Face directory. A tokenizer's
    files come beside the weights, or into GGUF.

    Parameters
    ----------
    read : function from a parameter's name to its array.
    padded_vocab : rows of ``wte`` in llm.c's file; the next multiple of 128 by default.
    tokenizer : the tokenizer's name or file, if it is known; a file of llm.c cannot hold a name.
    marks : the ids that begin and end a text, for ``config.json``.

    Raises
    ------
    UserError
        If it cannot be written.
    """
    check_target(path, config, tokenizer)
    target = target_format(path, config)
    if dtype not in target.dtypes:
        known = ", ".join(target.dtypes).replace("f32", WIDE)
        raise UserError(f"{target.name} holds {known}; got {dtype}; leave --dtype out, or name a directory")

    def checked(name: str) -> Array:
        array = read(name)
        require_finite(f"{str(path)!r} is not written: {name}", array, LIMITS[dtype])
        return array

    target.write(path, Weights(path, config, dtype, checked, tokenizer, padded_vocab, marks))

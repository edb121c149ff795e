"""Weights in files: llm.c's model files and Hugging Face's directories, read and written a tensor at a time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..errors import UserError
from ..files import temporary, whole_directory, write_synced, write_whole
from ..models import CONFIG, Config
from . import huggingface, llmc
from .tensors import Array, DType, Read, Weights

__all__ = ["Weights", "check_target", "copy_into", "open_weights", "save_weights"]


def open_weights(path: Path) -> Weights:
    """Find the format of a file or directory, and check it; the numbers are read later.

    Raises
    ------
    UserError
        Where it is missing, of no known format, or damaged.
    """
    if not path.exists():
        raise UserError(f"there is no {str(path)!r}; expected an llm.c model file, or a Hugging Face directory")
    if path.is_dir() or path.name.endswith((".safetensors", ".index.json")):
        return huggingface.open_model(path)
    return llmc.open_model(path)


def copy_into(parameters: Mapping[str, Array], weights: Weights) -> None:
    """Fill a model's parameters.

    Raises
    ------
    UserError
        Where a weight is not a finite number.
    """
    for name, array in parameters.items():
        array[...] = weights.read(name)
        if not np.isfinite(array).all():
            at = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
            raise UserError(f"{str(weights.path)!r}: {name} holds {array[at]} at {at}; expected finite numbers")


def check_target(path: Path, config: Config | None = None) -> None:
    """Refuse a path that weights cannot be written to, before any work.

    Parameters
    ----------
    config : the model's config, once it is known; llm.c's file holds its own model only.

    Raises
    ------
    UserError
        Where something is there already, the name is of no known format, or its directory cannot be written.
    """
    if path.suffix in (".safetensors", ".pt", ".pth", ".npz"):
        raise UserError(f"{str(path)!r}: expected a file ending in .bin (llm.c), or a directory (Hugging Face)")
    if path.suffix == ".bin" and config is not None:
        llmc.require(config)
    parent = path
    try:
        real = Path(os.path.realpath(path))
        if os.path.lexists(real) and not (real.is_dir() and path.suffix != ".bin" and not any(real.iterdir())):
            raise UserError(f"{str(path)!r} is there already; move it away or choose another name")
        parent = next(p for p in real.parents if p.exists())
        (probe := temporary(parent / real.name)).mkdir()
        probe.rmdir()
    except (OSError, ValueError) as e:  # a name with a NUL is a ValueError
        why = f" ({e.strerror})" if isinstance(e, OSError) else ""
        raise UserError(f"{str(path)!r}: nothing can be written to {str(parent)!r}{why}; choose another place") from e


def save_weights(
    path: Path,
    config: Config,
    read: Read,
    dtype: DType = "f32",
    padded_vocab: int | None = None,
    tokenizer: str | None = None,
) -> None:
    """Write a model, whole or not at all: llm.c's file where the name ends in ``.bin``, else a Hugging Face directory.

    Parameters
    ----------
    read : function from a parameter's name to its array.
    padded_vocab : rows of ``wte`` in llm.c's file; the next multiple of 128 by default.
    tokenizer : the name of the tokenizer, where it is known; llm.c's file cannot hold it.

    Raises
    ------
    UserError
        Where it cannot be written.
    """
    check_target(path, config)
    real = Path(os.path.realpath(path))  # a link stays, and what it leads to is written
    if path.suffix == ".bin":
        write_whole(real, llmc.model_parts(config, read, dtype, padded_vocab))
        return
    try:
        with whole_directory(real) as folder:
            write_synced(folder / CONFIG, [huggingface.config_json(config, dtype, tokenizer)])
            write_synced(folder / huggingface.WEIGHTS, huggingface.weight_parts(config, read, dtype))
    except OSError as e:
        raise UserError(f"cannot write {str(path)!r}: {e.strerror or e}; free the place or choose another") from e

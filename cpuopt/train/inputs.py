"""The files that a command reads, by its flags: no output may be one of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..data.companions import COMPANIONS
from ..data.corpus import files_of
from ..data.tokenizers import KINDS, TOKENIZERS
from ..errors import UserError
from ..files.outputs import Output
from ..models import CONFIG, is_own
from ..weights.formats import target_format
from . import checkpoint

PACKAGE = Path(__file__).parents[1]
BESIDE = (CONFIG, *KINDS, *COMPANIONS)
"""Files that are read beside a model's weights or its tokenizer."""


def of(given: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the files and folders that flags or settings name, by the names of these; some may be missing."""
    yield from PACKAGE.rglob("*")  # which runs
    for name in ("config", "source", "file", "peer_python", "base"):
        if given.get(name):
            yield Path(given[name])
    yield from map(Path, given.get("adapter") or ())
    for file in given.get("kernels") or ():
        yield from _code(Path(file))
    if isinstance(model := given.get("model"), str):
        yield from _code(Path(model.rpartition(":")[0])) if is_own(model) else [Path(model)]
    if given.get("init") is not None:
        yield from _model(Path(given["init"]))
    if given.get("tokenizer") not in (None, *TOKENIZERS):
        yield from _with_beside(Path(given["tokenizer"]))
    with suppress(UserError, OSError, ValueError):  # the command itself says what is wrong
        if isinstance(data := given.get("data") or given.get("text"), str):
            yield from files_of(data)
        if isinstance(resume := given.get("resume"), str):
            yield checkpoint.find_run(given["runs"], resume)


def saved(flag: str, path: Path) -> list[Output]:
    """Return the places that weights and their tokenizer take."""
    target = target_format(path)
    beside = [path.with_name(name) for name in KINDS] if target.beside else []
    return [Output(flag, path, whole=not target.ending), *(Output(flag, place) for place in beside)]


def _code(file: Path) -> Iterator[Path]:
    """Yield a file of Python, and those beside it, which it may import."""
    yield file
    with suppress(OSError):
        yield from file.absolute().parent.glob("*.py")


def _model(path: Path) -> Iterator[Path]:
    """Yield a folder of weights or a run, or a file of weights, with what is read beside it."""
    yield path
    if not os.path.isdir(path):
        yield from _with_beside(path)
        with suppress(OSError):
            yield from path.absolute().parent.glob("*.safetensors*")


def _with_beside(path: Path) -> Iterator[Path]:
    yield path
    folder = path if path.is_dir() else path.parent
    yield from (folder / name for name in BESIDE if path.name)

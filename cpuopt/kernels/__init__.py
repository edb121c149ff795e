"""The kernels and their registry. Importing this package registers all kernels of cpuopt."""

from __future__ import annotations

import importlib
import importlib.util
import math
import pkgutil
import sys
import time
import traceback
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ..errors import UserError
from . import registry

PARTS = {"compile", "toolkit"}
"""Packages without kernels."""
VARIANTS = [m.name for m in pkgutil.iter_modules(__path__) if m.ispkg and m.name not in PARTS]
VARIANTS.sort(key=lambda name: name != registry.BASE)
"""The packages of kernels, vanilla first; each module in them registers what it defines."""

JUDGES_USE = (np, math, time)
"""Modules whose functions a user's file must not replace."""

for _variant in VARIANTS:
    _package = importlib.import_module(f".{_variant}", __name__)
    for _module in pkgutil.iter_modules(_package.__path__):
        importlib.import_module(f".{_variant}.{_module.name}", __name__)


def load_all(files: Sequence[str | Path]) -> None:
    """Import users' kernel files, which register what they define.

    Raises
    ------
    UserError
        For a file that is missing or raises; the message names the line.
    """
    for file in files:
        load_file(file, f"--kernels {file}", "@kernel functions")


def load_file(file: str | Path, flag: str, of: str) -> ModuleType:
    """Import a user's file, unless it is imported already, and return its module.

    Parameters
    ----------
    flag : the first words of an error.
    of : what the file should define.

    Raises
    ------
    UserError
        For a file that is missing or raises; the message names the line. What it registered is removed.
    """
    path, name = Path(file).resolve(), module_name(file)
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise UserError(f"{flag}: no such file; expected a Python file with {of}")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{flag}: not a Python file; expected a name that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    before, functions = dict(registry.KERNELS), [dict(vars(m)) for m in JUDGES_USE]
    try:
        with blaming(path, flag):
            spec.loader.exec_module(module)
            _require_unpatched(functions)
    except BaseException:
        del sys.modules[name]
        registry.KERNELS.clear()
        registry.KERNELS.update(before)
        raise
    return module


def module_name(file: str | Path) -> str:
    """Return the name of a user's file in ``sys.modules``."""
    path = Path(file).resolve()
    return f"cpuopt_user_kernels.{path.stem}_{zlib.crc32(str(path).encode()):08x}"


def forget(file: str | Path) -> None:
    """Let the next `load_file` of a file run it again."""
    sys.modules.pop(module_name(file), None)


@contextmanager
def blaming(path: Path, flag: str) -> Iterator[None]:
    """Run code of a user's file; an exception becomes a `UserError` that names the line of the file."""
    try:
        yield
    except (KeyboardInterrupt, UserError):
        raise
    except BaseException as e:
        lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == str(path)]
        line = lines[-1] if lines else getattr(e, "lineno", "?")
        raise UserError(f"{flag}: line {line} raised {type(e).__name__}: {e}") from e


def _require_unpatched(before: Sequence[dict[str, Any]]) -> None:
    """Restore functions of references, judges and clocks that a file has replaced, and refuse the file.

    Raises
    ------
    ValueError
        Naming the function.
    """
    found = []
    for module, functions in zip(JUDGES_USE, before, strict=True):
        for name, function in functions.items():
            if vars(module).get(name) is not function:
                setattr(module, name, function)
                found.append(f"{module.__name__}.{name}")
    if found:
        raise ValueError(
            f"it replaces {', '.join(found[:3])}, which kernels are judged and timed with; leave it as it is"
        )

"""The kernels and their registry. Importing this package registers all kernels of cpuopt."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import sys
import traceback
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from .. import ops
from ..errors import CHEATING, COMPILE_ERROR, RefusedError, UserError
from . import compile as _  # noqa: F401  (which looks at the settings of numba before that is imported)
from . import registry
from .watch import Watch

PARTS = {"compile", "toolkit"}
"""Packages without kernels."""
VARIANTS = [m.name for m in pkgutil.iter_modules(__path__) if m.ispkg and m.name not in PARTS]
VARIANTS.sort(key=lambda name: name != registry.BASE)
"""The packages of kernels, vanilla first; each module in them registers what it defines."""


def _register_all() -> None:
    """Import the files of all variants; a package that writes its kernels has a function that registers them."""
    for variant in VARIANTS:
        package = importlib.import_module(f".{variant}", __name__)
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f".{variant}.{module.name}", __name__)
        if variant == registry.GENERATED:
            package.register_all()


_register_all()

UNNAMED = "cpuopt_user_kernels"
"""The package of users' files that cannot be imported by their names, which other modules have."""
LARGEST = 16 << 20
"""Bytes of a user's file."""
ADDED: set[tuple[str, str]] = set()
"""The kernels that users' files registered, by (op name, variant)."""


def load_all(files: Sequence[str | Path]) -> None:
    """Import users' kernel files, which register what they define.

    Raises
    ------
    UserError
        For a file that is missing or raises; the message names the line.
    """
    for file in files:
        load_file(file, f"--kernels {file}", "@kernel functions", word=COMPILE_ERROR)


def load_file(
    file: str | Path, flag: str, of: str, names: Mapping[str, Any] | None = None, word: str = ""
) -> ModuleType:
    """Import a user's file, unless it is imported already, and return its module.

    It can import the files beside it, and these import it by its name; all of them are one module each.

    Parameters
    ----------
    flag : the first words of an error.
    of : what the file should define.
    names : what it has of Python's own names; by default all.
    word : as in `blaming`.

    Raises
    ------
    UserError
        For a file that is missing or raises; the message names the line. What it registered is removed.
    """
    path = Path(os.path.realpath(file))  # which resolves a link to itself too
    if module := imported(path):
        return module
    if not path.is_file():
        raise UserError(f"{flag}: no such file; expected a Python file with {of}")
    if (shown := os.fsencode(path).decode(errors="replace")) != str(path):
        raise UserError(f"{flag}: numba compiles no file whose path is not UTF-8 ({shown}); rename it, or its folder")
    if (size := path.stat().st_size) > LARGEST:
        raise UserError(
            f"{flag}: it has {size >> 20} MB; expected a Python file with {of}, of {LARGEST >> 20} MB at most"
        )
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # after all else, so that no file hides a library
    importlib.invalidate_caches()
    found = importlib.util.find_spec(path.stem) if path.stem.isidentifier() and path.stem not in sys.modules else None
    usual = found is not None and found.origin is not None and Path(found.origin).resolve() == path
    name = path.stem if usual else f"{UNNAMED}.{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{flag}: not a Python file; expected a name that ends in .py")
    module = importlib.util.module_from_spec(spec)
    if names is not None:
        vars(module)["__builtins__"] = names
    modules, kernels, declared = set(sys.modules), dict(registry.KERNELS), dict(ops.ALL)
    sys.modules[name] = module
    watch, writes = Watch(), sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # which a second save in the same second would not make stale
    try:
        with blaming(path, flag, word):
            spec.loader.exec_module(module)
            if changes := watch.changes():
                raise RefusedError(f"{flag}: {'; '.join(changes)}", CHEATING)
    except BaseException:
        for there, before in (registry.KERNELS, kernels), (ops.ALL, declared):
            there.clear()
            there.update(before)  # type: ignore[arg-type]
        for other in [n for n, m in sys.modules.items() if n not in modules and folder_of(m) == path.parent]:
            del sys.modules[other]
        raise
    finally:
        sys.dont_write_bytecode = writes
    ADDED.update(registry.KERNELS.keys() - kernels.keys())
    return module


def imported(path: Path) -> ModuleType | None:
    """Return the module of a file, if it is imported already."""
    there = (m for m in list(sys.modules.values()) if Path(getattr(m, "__file__", None) or "").name == path.name)
    return next((m for m in there if Path(str(m.__file__)).resolve() == path), None)


def forget(file: str | Path) -> None:
    """Let the next `load_file` of a file run it again."""
    if module := imported(Path(file).resolve()):
        del sys.modules[module.__name__]


def folder_of(module: ModuleType) -> Path | None:
    """Return the folder of a module's file; None if it has none."""
    file = getattr(module, "__file__", None)
    return Path(file).parent if file else None


def files_beside(files: Sequence[Path]) -> list[Path]:
    """List the imported files that lie beside some files, and those themselves."""
    folders = {file.resolve().parent for file in files}
    return sorted({Path(str(m.__file__)) for m in list(sys.modules.values()) if folder_of(m) in folders})


@contextmanager
def blaming(path: Path, flag: str, word: str = "") -> Iterator[None]:
    """Run code of a user's file; an exception becomes a `UserError` with the line of the file, or of one beside it.

    Parameters
    ----------
    word : of a file of kernels the word of the `RefusedError` in its place.
    """
    failed = partial(RefusedError, word=word) if word else UserError
    try:
        yield
    except (KeyboardInterrupt, RefusedError):
        raise
    except UserError as e:
        raise failed(str(e)) from e
    except BaseException as e:
        places = [(f.filename, f.lineno) for f in traceback.extract_tb(e.__traceback__)]
        places += [(e.filename, e.lineno)] if isinstance(e, SyntaxError) and e.filename else []
        mine = [(Path(file), line) for file, line in places if Path(file).parent == path.parent]
        file, line = mine[-1] if mine else (path, getattr(e, "lineno", "?"))
        where = f"line {line}" if file == path else f"{file.name}, which it imports, line {line}"
        raise failed(f"{flag}: {where} raised {type(e).__name__}: {e}") from e

"""The kernels, and the loading of users' own. Importing this package registers all that cpuopt brings."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
import traceback
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from .. import registry
from ..errors import UserError
from . import choices

VARIANTS = sorted((m.name for m in pkgutil.iter_modules(__path__) if m.ispkg), key=lambda name: name != registry.BASE)
"""The packages of kernels, vanilla first; each module in them registers what it defines."""

for _variant in VARIANTS:
    _package = importlib.import_module(f".{_variant}", __name__)
    for _module in pkgutil.iter_modules(_package.__path__):
        importlib.import_module(f".{_variant}.{_module.name}", __name__)


def load_all(files: Sequence[str | Path], variants: Iterable[str] = ()) -> None:
    """Import users' kernel files, which register what they define, and the block sizes that some variants name.

    Raises
    ------
    UserError
        For a file that is missing or raises; the message names the line. For a block size that no kernel offers.
    """
    for variant in variants:
        choices.load(variant)
    for file in files:
        path = Path(file).resolve()
        name = f"cpuopt_user_kernels.{path.stem}_{zlib.crc32(str(path).encode()):08x}"
        if name in sys.modules:
            continue
        if not path.is_file():
            raise UserError(f"--kernels {file}: no such file; expected a Python file with @kernel functions")
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise UserError(f"--kernels {file}: not a Python file; expected a name that ends in .py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        before = dict(registry.KERNELS)
        try:
            spec.loader.exec_module(module)
        except BaseException as e:
            del sys.modules[name]
            registry.KERNELS.clear()
            registry.KERNELS.update(before)
            if isinstance(e, UserError | KeyboardInterrupt):
                raise
            lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == str(path)]
            line = lines[-1] if lines else getattr(e, "lineno", "?")
            raise UserError(f"--kernels {file}: line {line} raised {type(e).__name__}: {e}") from e

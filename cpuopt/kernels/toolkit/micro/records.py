"""The records of micro-kernels: all that there are, and those that this machine uses."""

import pkgutil
from importlib import import_module
from types import ModuleType

from ..quads import VECTORS, Quads
from . import MicroKernel, __path__, host


def files() -> list[ModuleType]:
    """List the files of this folder, that of records on vectors first."""
    names = sorted((m.name for m in pkgutil.iter_modules(__path__)), key=lambda name: name != "generic")
    return [import_module(f".{name}", __package__) for name in names if name != "records"]


def found() -> list[MicroKernel]:
    """List the records of all files."""
    return [r for module in files() for r in getattr(module, "RECORDS", ())]


def in_use() -> dict[str, MicroKernel]:
    """Return those in use, by storage type: the last one that can be used, in the requested order if there is one."""
    usable = [r for r in found() if r.allowed and (r.emulated or r.features <= host.features())]
    return {r.storage: r for r in sorted(usable, key=lambda r: r.order == host.order())}


MICRO_KERNELS = in_use()
QUADS: Quads = next((q for module in files() if (q := getattr(module, "QUADS", None))), VECTORS)
"""What multiplies int8 here."""

"""The records of micro-kernels: all that there are, and those that this machine uses."""

import pkgutil
from importlib import import_module

from . import MicroKernel, __path__, host


def found() -> list[MicroKernel]:
    """List the records of all files of this folder, those on vectors first."""
    names = sorted((m.name for m in pkgutil.iter_modules(__path__)), key=lambda name: name != "generic")
    return [r for name in names for r in getattr(import_module(f".{name}", __package__), "RECORDS", ())]


MICRO_KERNELS = {r.storage: r for r in found() if r.allowed and r.features <= host.features()}
"""Those in use, by storage type: one of a file of its own, if there is one that can be used, else that on vectors."""

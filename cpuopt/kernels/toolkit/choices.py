"""Block sizes that a kernel file offers: with each other value, its kernels are variants of their own.

``BLOCK = offer(__name__, "BLOCK", 64, (32, 128))`` in ``optimized/attention.py`` means that there are kernels
``optimized:BLOCK=32`` and ``optimized:BLOCK=128`` too. They are made when somebody names them: the file is executed
once more, in a package of another name, where `offer` gives the other value. So all that follows from it is as if the
file said so: scratch, helpers, the hash, the compile cache. Files beside it that use what follows from the number are
executed once more too; the offer names them. The package's other files are shared with the original.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType

from ...errors import UserError
from ...wording import nearest
from .. import registry


@dataclass(frozen=True)
class Offer:
    """A number in a kernel file, what it may be instead, and all files whose kernels follow from it."""

    package: str
    name: str
    others: tuple[int, ...]
    files: tuple[str, ...]

    @property
    def variants(self) -> list[str]:
        """The names of its variants, without that of the original."""
        return [f"{self.package.rpartition('.')[2]}:{self.name}={value}" for value in self.others]


OFFERS: dict[tuple[str, str], Offer] = {}
"""By the variant and the name of the number."""
CHOSEN = "chosen"
"""The attribute of a package that has another value: (name, value)."""


def offer(module: str, name: str, value: int, others: tuple[int, ...], also: Iterable[str] = ()) -> int:
    """Give the number to use in a kernel file.

    Parameters
    ----------
    module : the file's ``__name__``.
    value, others : the usual one, and those that it may be.
    also : files beside it that use something that follows from the number.

    Raises
    ------
    ValueError
        For a name that another file of the package offers.
    """
    package, _, file = module.rpartition(".")
    chosen = getattr(sys.modules[package], CHOSEN, None)
    if chosen is None:
        key = package.rpartition(".")[2], name
        if key in OFFERS and (OFFERS[key].package, OFFERS[key].files[0]) != (package, file):
            raise ValueError(f"{module} offers {name}, and so does {OFFERS[key].package}.{OFFERS[key].files[0]}")
        OFFERS[key] = Offer(package, name, others, (file, *also))
        return value
    return chosen[1] if chosen[0] == name else value


def variant_in(module: str, variant: str) -> str:
    """Give the name under which a kernel of a module is registered."""
    chosen = getattr(sys.modules.get(module.rpartition(".")[0]), CHOSEN, None)
    return f"{variant}:{chosen[0]}={chosen[1]}" if chosen else variant


def load(variant: str) -> None:
    """Register the kernels of a variant such as ``optimized:BLOCK=32``; other variants are left alone.

    Raises
    ------
    UserError
        For a number that no file offers.
    """
    original, colon, said = variant.partition(":")
    if not colon:
        return
    name, _, value = said.partition("=")
    found = OFFERS.get((original, name))
    if found is None or variant not in found.variants:
        raise UserError(f"variant {variant!r}: no kernel offers it; {nearest(variant, offered())}")
    if variant in {v for _, v in registry.KERNELS}:
        return
    package, source = f"{found.package}_{name}_{value}", sys.modules[found.package]
    module = ModuleType(package)
    module.__path__ = source.__path__
    setattr(module, CHOSEN, (name, int(value)))
    sys.modules[package] = module
    for info in pkgutil.iter_modules(source.__path__):
        sys.modules[f"{package}.{info.name}"] = sys.modules[f"{found.package}.{info.name}"]
    for file in found.files:
        del sys.modules[f"{package}.{file}"]
    for file in found.files:
        importlib.import_module(f"{package}.{file}")


def offered() -> list[str]:
    """List the variants that `load` takes."""
    return [variant for found in OFFERS.values() for variant in found.variants]

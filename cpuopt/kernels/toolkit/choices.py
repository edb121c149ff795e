"""Numbers that a kernel file offers, such as block sizes: each is a variant of its kernels, for `cpuopt tune`.

``CHUNK = offer("CHUNK", 4096, 1024, 16384)`` in a file of ``--kernels`` that registers ``mine`` makes the variants
``mine:CHUNK=1024`` and ``mine:CHUNK=16384`` too. The file is executed once more for each combination, so all that
follows from a number has it: helpers, scratch, the digest. A kernel that does not depend on the number has no such
variant.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from ...errors import UserError
from .. import registry
from ..compile import cache

MOST = 64
"""The largest number of combinations in a file."""
OFFERED: dict[str, dict[str, tuple[int, ...]]] = {}
"""The numbers that each module offers, by name; the usual one is the first."""
CHOSEN: dict[str, Mapping[str, int]] = {}
"""The numbers with which a file was executed once more, by the name of the module that came of it."""


def offer(name: str, usual: int, *others: int) -> int:
    """Return the number to use in a kernel file: the usual one, or another where the file is executed for that.

    Parameters
    ----------
    name : for the variants, such as ``mine:CHUNK=1024``; the name of the number in the file.
    usual, others : the one that the plain variant has, and those that `cpuopt tune` tries instead.

    Raises
    ------
    UserError
        For others than whole numbers that differ, a name that is none, or one that the file offers already.
    """
    module, values = sys._getframe(1).f_globals["__name__"], (usual, *others)
    if module in CHOSEN:
        return CHOSEN[module][name]
    mine = OFFERED.setdefault(module, {})
    if not re.fullmatch(r"[A-Za-z]\w{0,15}", name, re.ASCII) or name in mine:
        raise UserError(f"offer({name!r}, ...): expected a short name that the file offers once, such as 'CHUNK'")
    if not all(type(x) is int for x in values) or len(set(values)) < len(values):
        raise UserError(f"offer({name!r}, ...): the numbers are {values}; expected whole numbers that differ")
    mine[name] = values
    return usual


def forget(module: str) -> None:
    """Forget what a module offered, before its file is executed anew."""
    OFFERED.pop(module, None)
    for again in [m for m in CHOSEN if original(m) == module]:
        del CHOSEN[again]
        sys.modules.pop(again, None)


def variant_in(module: str, variant: str) -> str:
    """Return the name of a variant that a module registers."""
    if module not in CHOSEN:
        return variant
    usual = {name: values[0] for name, values in OFFERED[original(module)].items()}
    return f"{variant}:{'+'.join(f'{n}={x}' for n, x in CHOSEN[module].items() if x != usual[n])}"


def original(module: str) -> str:
    """Return the module that a file was first executed as."""
    return module.partition("@")[0]


def expand(module: ModuleType) -> None:
    """Execute the file of a module once more for each other combination of the numbers that it offers.

    Raises
    ------
    UserError
        For too many combinations.
    """
    name, offered = module.__name__, OFFERED.get(module.__name__, {})
    every = list(itertools.product(*offered.values()))
    if len(every) > MOST:
        raise UserError(
            f"{module.__file__}: it offers {len(every)} combinations of numbers; expected {MOST} at the most"
        )
    for values in every[1:]:
        again = f"{name}@{'+'.join(map(str, values))}"
        if again in sys.modules:
            continue
        spec = importlib.util.spec_from_file_location(again, Path(str(module.__file__)))
        assert spec is not None
        assert spec.loader is not None
        CHOSEN[again] = dict(zip(offered, values, strict=True))
        sys.modules[again] = importlib.util.module_from_spec(spec)
        before = set(registry.KERNELS)
        spec.loader.exec_module(sys.modules[again])
        for op, variant in registry.KERNELS.keys() - before:
            mine, plain = registry.KERNELS[op, variant], variant.partition(":")[0]
            others = [registry.KERNELS[op, v] for v in registry.variants(op) if v.partition(":")[0] == plain]
            if any(k is not mine and same(k, mine) for k in others):
                del registry.KERNELS[op, variant]


def same(a: registry.Kernel, b: registry.Kernel) -> bool:
    """Return whether two kernels have the same code and scratch."""
    return a.scratch == b.scratch and cache.digest(a.function) == cache.digest(b.function) != "unknown"

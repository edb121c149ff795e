"""Machines that code can be generated for on any host, by their names in LLVM.

``CPUOPT_TARGET=neoverse-v2`` in the environment makes kernels with that machine's vectors, in code of this one: LLVM
splits vectors that are too wide for it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ....errors import UserError
from ....wording import nearest

LINUX, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
VARIABLE = "CPUOPT_TARGET"


@dataclass(frozen=True)
class Target:
    """A machine.

    Attributes
    ----------
    triple : LLVM's name of its architecture and system.
    features : those of LLVM's features that choose the tile.
    pipes : the vectors of multiply-adds that a core starts in a cycle, by the vendor's optimization guide.
    model : the scheduling model of LLVM's that `llvm-mca` is to use, where that of the name is none of its own.
    reason : why llvm-mca's cycles are not those of the pipes, if they are not.
    """

    name: str
    triple: str
    features: frozenset[str]
    pipes: int
    model: str = ""
    reason: str = ""


AMX = frozenset({"amx-tile", "amx-bf16"})
AVX2, AVX512, NEON = frozenset({"avx2", "fma"}), frozenset({"avx2", "fma", "avx512f"}), frozenset({"neon"})
TARGETS = {
    t.name: t
    for t in (
        Target("haswell", LINUX, AVX2, 2),
        Target("znver3", LINUX, AVX2, 2),
        Target("znver4", LINUX, AVX512, 1),
        Target("sapphirerapids", LINUX, AVX512, 2),
        Target("graniterapids", LINUX, AVX512 | AMX, 2),
        Target("neoverse-v2", ARM, NEON, 4),
        Target("apple-m1", ARM, NEON, 4),
    )
}


def find(name: str) -> Target:
    """Return a target by its name.

    Raises
    ------
    UserError
        For an unknown name.
    """
    if name not in TARGETS:
        raise UserError(f"target {name!r}: no such machine; {nearest(name, TARGETS)}")
    return TARGETS[name]


def chosen() -> Target | None:
    """Return the target whose tile the environment asks for."""
    name = os.environ.get(VARIABLE, "")
    return find(name) if name else None

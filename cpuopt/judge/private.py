"""Private cases: sizes, values, flags and numbers of threads that the judge draws from a seed no candidate can see."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np

from ..check.cases import ADJOINTS, KINDS, NOT_FINITE, REPEATS, Case, adjoints, case, cases, has_ids
from ..kernels.registry import Kernel
from ..ops.declaration import Op

DRAWN = 4
"""Cases of sizes that no list has."""
HARSH = {*NOT_FINITE, "large", "offset", "thousands", "outliers"}
"""Kinds of values that are tried at the sizes listed: at others, an honest kernel can lose all digits of a result."""
ODD_ONES = (1, 2, 3, 5)


PUBLIC = 0
"""The seed of the public cases."""


def seed() -> int:
    """Draw a seed from the system."""
    return secrets.randbits(62)


def sizes(rng: np.random.Generator) -> dict[str, int]:
    """Draw the sizes of a case: tails of every vector and tile, and rows that are few or many."""
    heads, size = int(rng.choice(ODD_ONES)), int(rng.integers(1, 41))
    groups = [n for n in range(1, heads + 1) if heads % n == 0]
    return {
        "B": int(rng.integers(1, 4)),
        "T": int(rng.integers(1, 90)),
        "C": heads * size,
        "NH": heads,
        "NKV": int(rng.choice(groups)),
        "OC": int(rng.integers(1, 200)),
        "V": int(rng.integers(2, 700)),
    }


def drawn(kernel: Kernel, rng: np.random.Generator) -> list[Case]:
    """List the private cases of a kernel in an order drawn too: all of `check`, and some of sizes drawn."""
    op = kernel.op
    kinds = [
        k
        for k in [*KINDS, *(ADJOINTS if adjoints(op) else ()), *[REPEATS] * has_ids(op)]
        if k not in {*op.unfit, *HARSH}
    ]
    found = [c for c in cases(op, kernel.skips) if kernel.takes_all(c.types)]
    found += [case(op, sizes(rng)) for _ in range(DRAWN)]
    found += [case(op, sizes(rng), str(rng.choice(kinds))) for _ in range(DRAWN)]
    return [found[i] for i in rng.permutation(len(found))]


def seed_of(found: Case, rng: np.random.Generator) -> int:
    """Draw the seed of a case; that of NaN and infinity is fixed: where they stand decides what may be spared."""
    return PUBLIC if found.kind in NOT_FINITE else int(rng.integers(2**62))


def class_of(op: Op, found: Case) -> str:
    """Return what is told of a private case: its class, and neither its sizes nor its values."""
    if found.types:
        return f"other types: {', '.join(sorted(set(found.types.values())))}"
    if found.absent:
        return f"without {', '.join(sorted(found.absent))}"
    return "sizes" if found.kind == "normal" else f"values: {found.kind}"


def threads(rng: np.random.Generator, most: int) -> Sequence[int]:
    """Draw the numbers of threads of a case: one, and another up to `most`, in either order."""
    other = int(rng.integers(2, most + 1)) if most > 1 else 1
    return list(dict.fromkeys([(1, other), (other, 1)][rng.integers(2)]))

"""Kernels as people write them, each with its declaration: `ALL`, by name.

`textbook` keeps to the plain subset. The other modules were written before anybody looked whether they are accepted.
Each kernel reaches a step of the generator that no other one of them does; of some 250 that were tried, the others are
left out.
"""

from . import finance, learning, mixed, physics, signals, textbook
from .table import ALL, Natural

FIRST_WRITTEN = {
    n: k for n, k in ALL.items() if k.home in {m.__name__ for m in (physics, learning, finance, signals, mixed)}
}

__all__ = [
    "ALL",
    "FIRST_WRITTEN",
    "Natural",
    "finance",
    "learning",
    "mixed",
    "physics",
    "signals",
    "textbook",
]

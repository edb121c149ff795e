"""Several verdicts as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import exp, log
from typing import Any

from ..errors import UserError
from .verdict import LEVEL, LOOKS


def looks_up_to(rounds: int) -> list[int]:
    """Give the rounds after which a verdict is looked for, for a number of rounds at the most.

    Raises
    ------
    UserError
        For too few.
    """
    if rounds < 6:
        raise UserError(f"--rounds {rounds}: expected 6 or more, because fewer have no interval to speak of")
    return [*(n for n in LOOKS if n < rounds), rounds]


def summed(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Give one verdict for several sizes and numbers of threads: theirs if they agree, and else that they do not.

    The ratio is the geometric mean of theirs, and of the ends of their intervals.
    """
    level = min(r.get("level", LEVEL) for r in results)
    words = dict.fromkeys(r["verdict"] for r in results)
    ratio = {k: exp(sum(log(r["ratio"][k]) for r in results) / len(results)) for k in ("median", "low", "high")}
    if len(words) == 1:
        return {"verdict": next(iter(words)), "ratio": ratio, "why": results[0]["why"], "level": level}
    each = "; ".join(f"{r['B']}x{r['T']} on {r['threads']}: {r['verdict']}" for r in results)
    return {"verdict": "could not tell", "ratio": ratio, "why": f"it depends: {each}", "level": level}


def marginal(results: Iterable[Mapping[str, Any]]) -> list[str]:
    """Say which kernels are further from the reference than rounding explains, each by its worst check."""
    worst: dict[str, Mapping[str, Any]] = {}
    for c in (c for r in results for c in r.get("checks", ()) if c["status"] == "MARGINAL"):
        if c["ratio"] > worst.get(c["kernel"], {"ratio": 0.0})["ratio"]:
            worst[c["kernel"]] = c
    return [
        f"MARGINAL: {name} is {c['ratio']:.1f} times what rounding explains from the reference ({c['case']})"
        for name, c in worst.items()
    ]

"""The inputs of an op of one's own, scaled until float32 holds all that its formula computes from them.

Random numbers know nothing of a formula's domain: a recurrence ``h = a*h + x`` grows as a power of a, and where that
leaves float32, its reference is no evidence against a kernel. Whether numbers fit is asked of the reference alone, so
a kernel that overflows where its reference does not is still wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..errors import UserError
from ..ops.storage import is_float

Array = np.ndarray[Any, Any]
SCALES = [2.0**k for k in (0, *range(-1, -25, -1), *range(1, 25))]
"""The factors to try: as drawn; halved as often as needed; doubled, for formulas that divide."""
MOST_COMPARED = 1 << 16
"""Elements up to which a formula that overflows on the way is computed in float64 too."""
LARGEST = 2.0**60
"""The largest result, whose square a sum in float32 still holds. A larger one may only be a number that the formula
itself has, as of a maximum over nothing: a sentinel, which no scale of the inputs changes."""
CLOSE = 0.1
"""How near float32 and float64 must be where float32 was not finite on the way, as in 1 / (1 + exp(100)), which is 0.
Rounding is far below, and the result of a number that is lost far above."""
ERRORS = (ArithmeticError, IndexError, ValueError)
"""What a formula in Python raises outside its domain: a division by 0, an index past the end, the integer of NaN."""


class Drawn(dict[str, Any]):
    """Arguments by name; `scale` is the factor of the inputs."""

    scale = 1.0


def drawn(
    name: str, rng: np.random.Generator, fits: Callable[[Any], str], draw: Callable[[float], Mapping[str, Any]]
) -> Drawn:
    """Draw an op's arguments with the first scale that fits.

    Parameters
    ----------
    fits : function from arguments to the reason why they do not fit, or "".
    draw : function from a factor to arguments, which takes its numbers from `rng`.

    Raises
    ------
    UserError
        If none does.
    """
    start, reason = rng.bit_generator.state, ""
    for scale in SCALES:
        rng.bit_generator.state = start
        try:
            found = draw(scale)
            why = fits(found)
        except ERRORS as e:
            why = f"its formula raises {type(e).__name__}: {e}"
        if not why:
            made = Drawn(found)
            made.scale = scale * getattr(found, "scale", 1.0)
            return made
        reason = reason or why
    raise UserError(f"{name}: {reason}, on random inputs of any scale; declare its domain with inputs=")


def scaled_as(given: Mapping[str, Any], made: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of a backward with the scale of those of its forward, from which they were made."""
    if isinstance(given, Drawn):
        found = Drawn(made)
        found.scale = given.scale
        return found
    return made


def beyond(run: Callable[[Any, type], Mapping[str, Array]], given: Mapping[str, Any]) -> str:
    """Return the reason why a formula leaves float32's range, or "".

    An overflow on the way that leaves the results right is none, except in a large call: it takes seconds to tell.

    Parameters
    ----------
    run : the formula: from arguments and the type of all numbers to its results by name.
    """
    large = sum(x.size for x in given.values() if isinstance(x, np.ndarray)) > MOST_COMPARED
    other: Any = "ignore" if large else "raise"
    with np.errstate(over="raise", divide=other, invalid=other, under="ignore"):
        try:
            narrow, left = run(given, np.float32), False
        except (FloatingPointError, OverflowError):
            left = True
    with np.errstate(all="ignore"):
        if left and large:
            return "its formula leaves float32's range"
        if left:
            narrow, over = run(given, np.float32), list[str]()
            with np.errstate(over="call", call=lambda kind, flag: over.append(kind)):
                wide = run(given, np.float64)
            lost = over and not all(np.isfinite(x).all() for x in wide.values())  # in float64 too
            if lost or not all(_close(narrow[n], x) for n, x in wide.items()):
                return "its formula leaves float32's range"
        large_ones = {n: np.isfinite(x) & (np.abs(x) > LARGEST) for n, x in narrow.items()}
        if any(where.any() for where in large_ones.values()):
            half = run({n: x / 2 if is_float(x) else x for n, x in given.items()}, np.float32)
            if any((where & (half[n] != narrow[n])).any() for n, where in large_ones.items()):
                return "its results leave float32's range"
    return ""


def usual(x: Array) -> Array:
    """Return where numbers are finite and no sentinels: those from which the size of a row follows."""
    return np.asarray(np.abs(x) <= LARGEST)


def _finite(x: Array) -> Array:
    return np.where(np.isfinite(x), x, 0)


def _close(a: Array, b: Array) -> bool:
    """Return whether float32 and float64 agree: the same are finite, and these are near, relative to each or to all."""
    size = np.abs(_finite(b))
    near = np.abs(_finite(a) - _finite(b)) <= CLOSE * (size + np.sqrt(np.mean(size**2)))
    same = np.isfinite(a) == np.isfinite(b)
    return bool((near & same).all())


def rounding_of(
    run: Callable[[Any, type], Mapping[str, Array]], given: Mapping[str, Any], want: Mapping[str, Array]
) -> dict[str, Array]:
    """Return how far a formula is from its results in float32, in units of rounding: the root mean square of each row.

    An op of one's own is its formula, so what that loses in float32 is no error of a kernel.
    """
    found = {}
    with np.errstate(all="ignore"):
        for name, x in run(given, np.float32).items():
            apart = np.where(usual(x) & usual(want[name]), x - want[name], 0) / np.finfo(np.float32).eps
            found[name] = np.sqrt(np.mean(np.square(apart), axis=-1, keepdims=True))
    return found

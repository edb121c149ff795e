"""Text in messages: the format of numbers, and text of others made safe for a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

STEERING = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters, but for tab and newline: escape sequences begin with one
    r"\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # turn or hide others
    r"\U000e0000-\U000e0fff\ud800-\udfff]"  # tags, unseen; halves of characters, which cannot be written
)


MANY = 24
"""The most names that a message lists."""
ALIKE = 0.55
"""The least likeness, up to 1, of a name that a message offers in place of another."""


def plain(text: str) -> str:
    """Return a text in which U+FFFD replaces control characters and invisible ones."""
    return STEERING.sub("\ufffd", text)


def one_line(text: str) -> str:
    """Return `plain` text on one line."""
    return " ".join(plain(text).split())


def count(n: int, word: str) -> str:
    """Format a count, as in ``1 thread`` and ``2 threads``."""
    return f"{n} {word}{'' if n == 1 else 's'}"


def parameters(n: int) -> str:
    """Format a number of parameters, as in ``124.4 M parameters``; a small one in full."""
    return f"{n / 1e6:.1f} M parameters" if n >= 10**6 else f"{n:,} parameters"


def text_of(sizes: Mapping[str, int]) -> str:
    """Format sizes by symbol, as in ``BT=256 C=768``."""
    return " ".join(f"{symbol}={n}" for symbol, n in sizes.items())


def size_of(result: Mapping[str, Any]) -> str:
    """Format the size of a result: a model's batch, as in ``4x64``, or sizes by symbol; ``""`` if it has none."""
    if "B" in result:
        return f"{result['B']}x{result['T']}"
    return text_of(result.get("sizes", {}))


def call_count(result: Mapping[str, Any]) -> str:
    """Count the calls whose times a comparison's ms sum, as in ``5 calls``; ``""`` if it is one."""
    layers = [c["layers"] for c in result.get("cases", ())] or [result.get("layers", ())]
    n = sum(map(len, layers))
    return count(n, "call") if n > 1 else ""


def spread(ratio: Mapping[str, float], digits: int = 3) -> str:
    """Format a ratio with its interval, as in ``1.270 [1.251, 1.292]``."""
    return f"{ratio['median']:.{digits}f} [{ratio['low']:.{digits}f}, {ratio['high']:.{digits}f}]"


def four(x: float) -> str:
    """Format a number with about four digits."""
    return f"{x:,.0f}" if x >= 1000 else f"{x:.4g}"


def duration(seconds: float) -> str:
    """Format a time in hours, minutes and seconds, as in ``0:03:20``."""
    minutes, s = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{s:02}"


def guess(word: str, known: Iterable[str]) -> str:
    """Return the end of a message, which asks for the name that the user may have meant; empty if none is close."""
    close = get_close_matches(word, list(known), 1)
    return f"; did you mean '{close[0]}'?" if close else ""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the name that the user may have meant; else all names, or of many, those with the word or like it."""
    known = list(known)
    inside = [name for name in known if len(word) > 2 and word in name] if len(known) > MANY else []
    if not inside and (meant := guess(word, known)):
        return meant.removeprefix("; ")
    if len(known) <= MANY:
        return f"known: {', '.join(known)}"
    if len(inside) == 1:
        return f"did you mean '{inside[0]}'?"
    close = sorted(inside, key=lambda name: not name.startswith(word))[:3] or get_close_matches(word, known, 3, ALIKE)
    return f"the nearest of {len(known)}: {', '.join(close)}" if close else f"none of {len(known)} names is like it"


HUB = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}")


def hub_hint(name: str) -> str:
    """Return what to do if a name that is no path here is one of the Hugging Face Hub; empty for what cannot be."""
    if not HUB.fullmatch(name) or Path(name).parent.exists():
        return ""
    return f"; if it is on the Hugging Face Hub, first run: hf download {name} --local-dir {name.rpartition('/')[2]}"

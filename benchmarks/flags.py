"""Sizes among the flags of a benchmark, which argparse refuses in one line."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection


def size(text: str) -> str:
    """Return a size, rows by tokens, as in ``4x64``."""
    if not re.fullmatch(r"[1-9][0-9]{0,6}x[1-9][0-9]{0,6}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; expected BxT, as in 4x64")
    return text


def sizes(text: str) -> list[str]:
    """Return several sizes, as in ``4x64,1x1024``."""
    return [size(item.strip()) for item in text.split(",")]


def some_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """Return a function that reads some of these names, with commas between them."""

    def read(text: str) -> list[str]:
        found = [item.strip() for item in text.split(",")]
        if wrong := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"{wrong[0]!r}: expected some of {', '.join(known)}")
        return found

    return read

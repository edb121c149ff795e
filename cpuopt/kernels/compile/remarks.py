"""LLVM's remarks on what it vectorized, for a process that may write no file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import llvmlite.binding as llvm

PASSES = "loop-vectorize|slp-vectorizer"
REMARKS = ("-pass-remarks=", "-pass-remarks-missed=", "-pass-remarks-analysis=")
COMMENT = re.compile(r"[ \t]*#(?![^\n]*(@|-byte ))[^\n]*")
"""In a text with comments, those that say neither what was inlined nor that a register was missing."""


def slim(asm: str) -> str:
    """Return a text with comments without those that are not read here; some texts would be 16 MB."""
    return COMMENT.sub("", asm)


@contextmanager
def collected() -> Iterator[list[bytes]]:
    """Collect what LLVM writes to stderr, with remarks from now on; it is whole when the block has ended."""
    for option in REMARKS:
        llvm.set_option("", option + PASSES)
    parts: list[bytes] = []
    source, sink = os.pipe()

    def read() -> None:
        while part := os.read(source, 1 << 16):
            parts.append(part)

    reader, before = Thread(target=read, daemon=True), os.dup(2)
    reader.start()
    os.dup2(sink, 2)
    os.close(sink)
    try:
        yield parts
    finally:
        os.dup2(before, 2)  # closes the pipe, which ends the reader
        os.close(before)
        reader.join()
        os.close(source)

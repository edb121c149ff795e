"""Lines of source for the machine code of an assembly text, with the chain of functions that were inlined there.

A directive of the text says where the code of a line begins, and in a comment the chain: ``mine.py:12:1 @[ mine.py:40:1
]``. Here a label takes its place, and LLVM assembles the text: the symbols of the object have the places of the labels.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import llvmlite.binding as llvm

from . import perf

FILE = re.compile(r'\s*\.file\s+(\d+)\s+(?:"([^"]*)"\s+)?"([^"]*)"')
LOC = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)")
CALLED = re.compile(r"@\[ (.*?):(\d+):\d+")
LABEL = "cpuopt.line."

Place = tuple[str, int]
"""A file and a line."""
Chain = tuple[Place, ...]
"""Where an instruction comes from, and the places of the calls that were inlined around it, the outermost last."""


def labelled(asm: str) -> tuple[str, list[Chain]]:
    """Replace the lines of an assembly text by labels; return it, and the chain of each label by number."""
    files: dict[str, str] = {}
    made, chains = list[str](), list[list[Place]]()
    for line in asm.splitlines():
        if at := LOC.match(line):
            chains.append([(files.get(at[1], ""), int(at[2])), *((f, int(n)) for f, n in CALLED.findall(line))])
            line = f"{LABEL}{len(chains) - 1}:"
        elif at := FILE.match(line):
            files[at[1]] = f"{at[2]}/{at[3]}" if at[2] else at[3]
            continue
        made.append(line)
    by_name = {file.rpartition("/")[2]: file for file in files.values()}
    return "\n".join(made), [(first, *((by_name.get(f, f), n) for f, n in calls)) for first, *calls in chains]


def assembled(text: str, machine: Any) -> bytes:
    """Assemble a text for a target machine; return the object file."""
    llvm.initialize_native_asmparser()
    quoted = re.sub(rb"[^ !#-\[\]-~]", lambda m: b"\\%02X" % m[0][0], text.encode()).decode()
    module = llvm.parse_assembly(f'target triple = "{machine.triple}"\nmodule asm "{quoted}"')
    return bytes(machine.emit_object(module))


def table(content: bytes, chains: Sequence[Chain], home: tuple[str, int, int]) -> dict[str, Any]:
    """Find the chain of each part of each function in an object file with labels; JSON.

    Parameters
    ----------
    home : the file and the lines of the kernel. numba gives the body of a parallel loop no file, but its lines; other
        lines without a file are numba's own.

    Returns
    -------
    ``functions``: by the digest of its bytes, the offsets in a function and the number of the chain that begins there,
    of ``chains``.
    """
    file, first, last = home

    def known(place: Place) -> Place:
        if not place[0].endswith(">"):
            return place
        return (file, place[1]) if first <= place[1] <= last else ("", 0)

    symbols = [(s.section, s.value, s.name.removeprefix(LABEL)) for s in perf.symbols(content) if LABEL in s.name]
    labels = sorted((section, at, int(number)) for section, at, number in symbols)
    found, numbers = dict[str, list[tuple[int, int]]](), dict[Chain, int]()
    for f in perf.functions(content):
        pairs = found.setdefault(f.digest, [])
        for section, at, number in labels:
            here = section == f.section and f.offset <= at < f.offset + f.size
            if here and (chains[number][0][1] or not pairs):  # 0: the compiler merged instructions of several lines
                whole = tuple(p for p in map(known, chains[number]) if p[1])
                pairs.append((at - f.offset, numbers.setdefault(whole, len(numbers))))
    return {"functions": found, "chains": [*numbers]}

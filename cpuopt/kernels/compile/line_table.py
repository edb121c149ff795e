"""Lines of source for each byte of an object file, with the chain of functions that were inlined there.

The object has line tables, which say where the code of a line begins. The assembly text of the same code has the same
rows in the same order, and in its comments the chain: ``mine.py:12:1 @[ mine.py:40:1 ]``.

Source: DWARF 4, section 6.2; the ELF-64 format; the comments of LLVM's ``MCAsmStreamer``.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from . import perf

FILE = re.compile(r'\.file\s+(\d+)\s+(?:"([^"]*)"\s+)?"([^"]*)"')
LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)")
CALLED = re.compile(r"@\[ (.*?):(\d+):\d+")
SECTION = re.compile(r"\.section\s+([^,\s]+)|(\.text)\b")
RELOCATIONS = 4
"""The type of a section of relocations with addends."""
COPY, ADVANCE_PC, ADVANCE_LINE, ADD_PC, FIXED_PC = 1, 2, 3, 8, 9
END_SEQUENCE, SET_ADDRESS = 1, 2

Place = tuple[str, int]
"""A file and a line."""
Chain = tuple[Place, ...]
"""Where an instruction comes from, and the places of the calls that were inlined around it, the outermost last."""


def rows(content: bytes) -> dict[str, list[tuple[int, int]]]:
    """Return where the code of each line begins, in the sections of an object file: offsets, sorted, and lines."""
    heads, known, titles = perf.sections(content), perf.symbols(content), perf.titles(content)
    if ".debug_line" not in titles:
        return {}
    index = titles.index(".debug_line")
    table = heads[index]
    targets: dict[int, tuple[str, int]] = {}
    for head in heads:
        if head.type == RELOCATIONS and head.info == index:
            for at, info, addend in struct.iter_unpack("<QQq", content[head.at : head.at + head.size]):
                symbol = known[info >> 32]
                if symbol.section < len(titles):
                    targets[at] = titles[symbol.section], symbol.value + addend
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for section, offset, line in _programs(content[table.at : table.at + table.size], targets):
        found[section].append((offset, line))
    return {section: sorted(places, key=lambda place: place[0]) for section, places in found.items()}


def _programs(data: bytes, targets: dict[int, tuple[str, int]]) -> Iterator[tuple[str, int, int]]:
    """Run the line programs of all units; yield section, offset and line of each row."""
    unit = 0
    while unit < len(data):
        (length, version) = struct.unpack_from("<IH", data, unit)
        i = unit + (8 if version >= 5 else 6)
        i, start = i + 4, i + 4 + struct.unpack_from("<I", data, i)[0]
        i += 1 + (version >= 4)
        base, span, first = struct.unpack_from("<bBB", data, i + 1)
        lengths = data[i + 4 : i + 3 + first]
        i, unit = start, unit + 4 + length
        section, offset, line = "", 0, 1
        while i < unit:
            code, i = data[i], i + 1
            if code >= first:
                offset, line = offset + (code - first) // span, line + base + (code - first) % span
                yield section, offset, line
            elif code == 0:
                size, i = _number(data, i)
                if data[i] == SET_ADDRESS:
                    section, offset = targets[i + 1]
                elif data[i] == END_SEQUENCE:
                    section, offset, line = "", 0, 1
                i += size
            elif code == COPY:
                yield section, offset, line
            elif code == ADVANCE_LINE:
                more, i = _number(data, i, signed=True)
                line += more
            elif code == ADD_PC:
                offset += (255 - first) // span
            elif code == FIXED_PC:
                offset, i = offset + struct.unpack_from("<H", data, i)[0], i + 2
            else:
                for _ in range(lengths[code - 1]):
                    more, i = _number(data, i)
                    offset += more if code == ADVANCE_PC else 0


def _number(data: bytes, i: int, signed: bool = False) -> tuple[int, int]:
    """Read a number of any length (LEB128); return it and the index behind it."""
    n = shift = 0
    while True:
        byte = data[i]
        n, shift, i = n | (byte & 127) << shift, shift + 7, i + 1
        if byte < 128:
            return n - (1 << shift if signed and byte & 64 else 0), i


def chains(asm: str) -> dict[str, list[tuple[int, Chain]]]:
    """Return the line and the chain of each row in an assembly text with comments, by section."""
    files: dict[str, str] = {}
    found: dict[str, list[tuple[int, Chain]]] = defaultdict(list)
    section, pending = ".text", None
    for raw in asm.splitlines():
        line, code = raw.strip(), raw.partition("#")[0].strip()
        ends = LOC.match(line) or SECTION.match(line)  # where a place has a row even without code
        if pending and (ends or (code and code[0] != "." and code[-1] != ":")):
            found[section].append(pending)
            pending = None
        if at := LOC.match(line):
            calls = [(file, int(n)) for file, n in CALLED.findall(line)]
            pending = int(at[2]), ((files.get(at[1], ""), int(at[2])), *calls)
        elif at := FILE.match(line):
            files[at[1]] = f"{at[2]}/{at[3]}" if at[2] else at[3]
        elif at := SECTION.match(line):
            section = (at[1] or at[2]).strip('"')
    by_name = {file.rpartition("/")[2]: file for file in files.values()}
    return {
        section: [(n, (chain[0], *((by_name.get(f, f), line) for f, line in chain[1:]))) for n, chain in places]
        for section, places in found.items()
    }


def table(content: bytes, asm: str, home: tuple[str, int, int]) -> dict[str, Any]:
    """Join an object file and the text of the same code; JSON.

    Parameters
    ----------
    home : the file and the lines of the kernel. numba gives the body of a parallel loop no file, but its lines; other
        lines without a file are numba's own.

    Returns
    -------
    ``functions``: by the digest of its bytes, the offsets in a function and the number of the chain that begins there,
    of ``chains``. Nothing if the two do not fit.
    """
    file, first, last = home
    by_section, numbers = chains(asm), dict[Chain, int]()

    def known(place: Place) -> Place:
        if not place[0].endswith(">"):
            return place
        return (file, place[1]) if first <= place[1] <= last else ("", 0)

    here, titles = rows(content), perf.titles(content)
    if any([n for _, n in here.get(s, [])] != [n for n, _ in by_section.get(s, [])] for s in {*here, *by_section}):
        return {"functions": {}, "chains": []}
    found: dict[str, list[tuple[int, int]]] = {}
    for f in perf.functions(content):
        pairs, places = found.setdefault(f.digest, []), here.get(titles[f.section], [])
        for i in range(*(bisect_left(places, at, key=lambda place: place[0]) for at in (f.offset, f.offset + f.size))):
            chain = by_section[titles[f.section]][i][1]
            if chain[0][1] or not pairs:  # 0: the compiler merged instructions of several lines
                whole = tuple(p for p in map(known, chain) if p[1])
                pairs.append((places[i][0] - f.offset, numbers.setdefault(whole, len(numbers))))
    return {"functions": found, "chains": [*numbers]}

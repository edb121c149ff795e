"""What an object file of LLVM says of its functions: where each begins, how long it is, and its lines of source.

Source: the ELF-64 format of the System V ABI; DWARF 4 and 5, section 6.2, the line number program.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

SYMTAB, RELA, EXECUTABLE, FUNCTION = 2, 4, 0x4, 2
"""Types of sections, the flag of one with code, and the type of a symbol that is a function."""
UNDEFINED, RESERVED = 0, 0xFF00
"""The section of a symbol from elsewhere, and the first number that is no section."""
ABSOLUTE = {1: "<Q", 10: "<I"}
"""Relocations of x86-64 that write a symbol's value plus an addend."""
LINE_STRINGS = {0x1F: ".debug_line_str", 0x0E: ".debug_str"}
"""Forms of DWARF 5 for a name in another section."""


@dataclass(frozen=True)
class Function:
    """One function.

    Attributes
    ----------
    offset, size : its bytes in the section of code that it lies in.
    lines : the offset of each change of line in the section, with file and line.
    """

    symbol: str
    section: int
    offset: int
    size: int
    lines: list[tuple[int, str, int]] = field(default_factory=list)


@dataclass
class ElfSection:
    """A section: its name, type, flags, content, and two numbers that depend on the type."""

    name: str
    type: int
    flags: int
    content: bytearray
    link: int
    info: int


def sections(content: bytes) -> list[ElfSection]:
    """Read the sections of a little-endian ELF-64 file; none of another file."""
    if content[:6] != b"\x7fELF\x02\x01":
        return []
    start, size, count, names = struct.unpack_from("<Q10xHHH", content, 0x28)
    heads = [struct.unpack_from("<IIQQQQII", content, start + i * size) for i in range(count)]
    texts = content[heads[names][4] : heads[names][4] + heads[names][5]]
    return [
        ElfSection(_text(texts, name), type_, flags, bytearray(content[offset : offset + length]), link, info)
        for name, type_, flags, _, offset, length, link, info in heads
    ]


def functions(content: bytes) -> list[Function]:
    """List the functions that an object defines, by section and offset; with lines, if it has a table of them."""
    parts = sections(content)
    symbols = _symbols(parts)
    found = [
        Function(name, section, value, size)
        for name, info, section, value, size in symbols
        if info & 15 == FUNCTION and UNDEFINED < section < RESERVED and parts[section].flags & EXECUTABLE and size
    ]
    code = {f.section for f in found}
    if len(code) == 1:  # the table has offsets in a section, and does not name it
        table = [*_line_table(parts, symbols)]
        for f in found:
            f.lines.extend(row for row in table if f.offset <= row[0] < f.offset + f.size)
    return sorted(found, key=lambda f: (f.section, f.offset))


def _text(content: bytes | bytearray, at: int) -> str:
    return bytes(content[at : content.index(0, at)]).decode("utf-8", "replace")


def _symbols(parts: list[ElfSection]) -> list[tuple[str, int, int, int, int]]:
    """List name, info, section, value and size of each symbol."""
    for s in parts:
        if s.type == SYMTAB:
            rows = struct.iter_unpack("<IBBHQQ", s.content)
            return [
                (_text(parts[s.link].content, name), info, at, value, size) for name, info, _, at, value, size in rows
            ]
    return []


def _line_table(
    parts: list[ElfSection], symbols: list[tuple[str, int, int, int, int]]
) -> Iterator[tuple[int, str, int]]:
    """Yield the rows of all line programs, as offset, file and line."""
    named = {s.name: i for i, s in enumerate(parts)}
    if (at := named.get(".debug_line")) is None:
        return
    content = parts[at].content
    for s in parts:
        if s.type == RELA and s.info == at:
            for offset, info, addend in struct.iter_unpack("<QQq", s.content):
                if form := ABSOLUTE.get(info & 0xFFFFFFFF):
                    struct.pack_into(form, content, offset, symbols[info >> 32][3] + addend)
    texts = {form: parts[named[name]].content for form, name in LINE_STRINGS.items() if name in named}
    reader = LineReader(content)
    while reader.at < len(content):
        length = reader.number("I")
        end = reader.at + length
        yield from program(reader, end, texts)
        reader.at = end


class LineReader:
    """Reads numbers and texts from bytes, one after the other."""

    def __init__(self, content: bytearray) -> None:
        self.content, self.at = content, 0

    def number(self, form: str) -> int:
        """Read a number of a fixed size."""
        (found,) = struct.unpack_from(f"<{form}", self.content, self.at)
        self.at += struct.calcsize(f"<{form}")
        return int(found)

    def leb(self, signed: bool = False) -> int:
        """Read a number of any size (LEB128)."""
        found = shift = 0
        while True:
            byte = self.number("B")
            found |= (byte & 127) << shift
            shift += 7
            if not byte & 128:
                return found - (1 << shift) if signed and byte & 64 else found

    def text(self) -> str:
        """Read a text that ends with a zero."""
        found = _text(self.content, self.at)
        self.at = self.content.index(0, self.at) + 1
        return found


def program(reader: LineReader, end: int, texts: dict[int, bytearray]) -> Iterator[tuple[int, str, int]]:
    """Run one line program."""
    version = reader.number("H")
    if version >= 5:
        reader.number("H")
    start = reader.number("I") + reader.at
    least, _, _, base, span, opcodes = (reader.number(form) for form in "BBBbBB")
    lengths = [reader.number("B") for _ in range(opcodes - 1)]
    files = _files5(reader, texts) if version >= 5 else _files4(reader)
    reader.at = start
    address, file, line = 0, 1, 1
    while reader.at < end:
        op = reader.number("B")
        if op >= opcodes:  # a special one moves both, and makes a row
            address += (op - opcodes) // span * least
            line += base + (op - opcodes) % span
            yield address, files.get(file, ""), line
        elif op == 0:
            size = reader.leb()
            then, kind = reader.at + size, reader.number("B")
            if kind == 1:
                address, file, line = 0, 1, 1
            elif kind == 2:
                address = reader.number("Q")
            reader.at = then
        elif op == 1:
            yield address, files.get(file, ""), line
        elif op == 2:
            address += reader.leb() * least
        elif op == 3:
            line += reader.leb(signed=True)
        elif op == 4:
            file = reader.leb()
        elif op == 8:
            address += (255 - opcodes) // span * least
        elif op == 9:
            address += reader.number("H")
        else:
            for _ in range(lengths[op - 1]):
                reader.leb()


def _files4(reader: LineReader) -> dict[int, str]:
    """Read the tables of folders and files before version 5."""
    folders = [""]
    while folder := reader.text():
        folders.append(folder)
    files: dict[int, str] = {}
    while name := reader.text():
        folder, _, _ = (reader.leb() for _ in range(3))  # type: ignore[assignment]
        files[len(files) + 1] = os.path.join(folders[int(folder)], name)
    return files


def _files5(reader: LineReader, texts: dict[int, bytearray]) -> dict[int, str]:
    """Read the tables of version 5: formats, then entries; first of folders, then of files."""
    tables: list[list[dict[int, str | int]]] = []
    for _ in range(2):
        formats = [(reader.leb(), reader.leb()) for _ in range(reader.number("B"))]
        tables.append([{kind: _form(reader, form, texts) for kind, form in formats} for _ in range(reader.leb())])
    folders, files = tables
    return {i: os.path.join(str(folders[int(f.get(2, 0))][1]), str(f[1])) for i, f in enumerate(files)}


def _form(reader: LineReader, form: int, texts: dict[int, bytearray]) -> str | int:
    if form == 0x08:
        return reader.text()
    if form in LINE_STRINGS:
        return _text(texts[form], reader.number("I"))
    if form == 0x0F:
        return reader.leb()
    if form == 0x1E:
        reader.at += 16
        return 0
    return reader.number({0x0B: "B", 0x05: "H", 0x06: "I", 0x07: "Q"}[form])

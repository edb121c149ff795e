"""The instructions of a kernel's innermost loops, counted in its machine code (AT&T syntax for x86-64).

A loop is what lies between a label and a jump back to it; it is innermost where no other loop lies inside. Only loops
that compute with floats, or call something, are listed.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

FILE = re.compile(r'^\s*\.file\s+(\d+)\s+(?:"([^"]*)"\s+)?"([^"]*)"', re.M)
LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)")
CALLED = re.compile(r"@\[ (.*?):(\d+):\d+")
"""In a comment on a place: where a function that was inlined is called, the outermost call last."""
COMMENTED = ".commented"
"""The first line of a function of a text with comments."""
SPILL = re.compile(r"-byte (Folded )?(Spill|Reload)")
OURS = re.compile(r"^(?!NRT_|cfunc\.|_ZN7cpython|numba_|\.)")
"""The names of functions that come from a kernel's text, not from numba's wrappers."""
LOCALS = "_3clocals_3e"
"""The part ``<locals>`` of a name, as numba mangles it."""
AROUND = re.compile(
    r"printf|Py|NRT_|numba_|.*parfor_gufunc|get_num_threads|[gs]et_parallel_chunksize|(get|(de)?allocate)_sched|do_sched"
)
"""Calls that numba adds, for errors and to start threads."""
JUMP = re.compile(r"(j[a-z]+|b(\.[a-z]+)?|[ct]bn?z)$")
"""Jumps of x86-64 and of aarch64."""
BRANCH = re.compile(r"\.LBB\w+:|j[a-z]+\s")
FLOAT = re.compile(r"v?(u?comis|add|sub|mul|div|max|min|sqrt|fn?m(add|sub)|rsqrt|rcp|and|or|xor|cvt|cmp|round|dp)\w*$")
WIDE = re.compile(r"[a-z0-9]*(ps|ss)$")
FMA = re.compile(r"vfn?m(add|sub)\w*(ps|ss|pd|sd)$")
DOUBLE = re.compile(
    r"v?(cvtss2sd|cvtps2pd|cvtsd2ss|cvtpd2ps|(add|sub|mul|div|max|min|sqrt|fn?m(add|sub)[0-9]*)[sp]d)\w*$"
)
BITS = (("%zmm", 16), ("%ymm", 8), ("%xmm", 4))


@dataclass
class Loop:
    """One innermost loop.

    Attributes
    ----------
    where : the file and the lines of Python that its instructions come from; the kernel's, if it has any of them.
    width : floats in one of its float instructions, the most; 1 is scalar, 0 if there is none.
    fmas, loads, stores : float instructions; an operand in memory is a load.
    spills : floats or vectors that are written to the stack, or read back, because registers are missing; in a text
        without comments, every access of the stack.
    calls : functions that it calls, by name.
    doubles : conversions to or from double, and double arithmetic.
    """

    function: str
    where: str = ""
    instructions: int = 0
    width: int = 0
    fmas: int = 0
    loads: int = 0
    stores: int = 0
    spills: int = 0
    doubles: int = 0
    calls: list[str] = field(default_factory=list)
    remainder: bool = False
    """True for the remainder of a wider loop of the same lines."""
    code: list[Instruction] = field(default_factory=list, repr=False, compare=False)
    """Its instructions."""
    places: set[tuple[str, int]] = field(default_factory=set, repr=False, compare=False)
    """The files and lines of its instructions, of inlined functions too."""
    branches: bool = field(default=False, compare=False)
    """Whether there is a jump or a label inside."""

    JSON: ClassVar = tuple(
        "function where instructions width fmas loads stores spills doubles calls remainder".split()  # noqa: SIM905
    )

    @property
    def lines(self) -> list[int]:
        """The lines of the kernel's file, sorted."""
        return sorted({i.line for i in self.code if i.line})


def loops(asm: str, file: str = "<string>", line: int = 0, last: int = sys.maxsize) -> list[Loop]:
    """List the innermost loops of all functions, in the order of the text.

    Parameters
    ----------
    file, line, last : where the kernel is written; numba gives the body of a parallel loop no file, but its lines.
    """
    files = {n: f"{folder}/{name}" if folder and name[0] != "<" else name for n, folder, name in FILE.findall(asm)}
    found: list[Loop] = []
    for name, lines in functions(asm):
        if OURS.match(name):
            for start, end in innermost(lines):
                loop = read(name, lines, start, end, files, (file, line, last))
                added = name.startswith("__gufunc__") and not loop.where  # numba's, around the kernel's
                if (loop.width or loop.calls or loop.doubles) and not added:
                    found.append(loop)
    for loop in found:
        alike = [v for v in found if (v.function, v.where) == (loop.function, loop.where)]
        loop.remainder = any(v.width > loop.width for v in alike) and not loop.calls
    for loop in found:
        loop.function = plain(loop.function)
    return found


def plain(symbol: str) -> str:
    """Return the last two names in a mangled symbol: ``gelu.forward``; other symbols stay, but for numba's loops."""
    if "parfor_gufunc" in symbol:
        return "parallel loop"
    names, rest = [], symbol.removeprefix("_ZN")
    while rest != symbol and (m := re.match(r"(\d+)", rest)):
        start, n = len(m[1]), int(m[1])
        names.append(rest[start : start + n])
        rest = rest[start + n :]
    names = [name for name in names if name != LOCALS]
    return ".".join(names[-2:]) or symbol


def functions(asm: str) -> list[tuple[str, list[str]]]:
    """Split a text into functions: their names, and their lines without blanks.

    Comments stay where they say what was inlined, and where a register is missing.
    """
    names = set(re.findall(r"^\s*\.type\s+(\S+?),@function", asm, re.M))
    found: list[tuple[str, list[str]]] = []
    for raw in asm.splitlines():
        line, _, comment = raw.strip().partition("#")
        line = line.strip() + f" #{comment}" * bool(line.startswith(".loc") or ("mm" in line and SPILL.search(comment)))
        label = line[:-1] if line.endswith(":") else ""
        if label.strip('"') in names or label in names:
            found.append((label.strip('"'), [COMMENTED] * ("@" in comment)))
        elif line and found:
            found[-1][1].append(line)
    return found


def innermost(lines: Sequence[str]) -> list[tuple[int, int]]:
    """Find the spans of innermost loops, in the code of any machine."""
    every = spans(lines)
    return [s for s in every if not any(s != t and s[0] <= t[0] and t[1] <= s[1] for t in every)]


def spans(lines: Sequence[str]) -> list[tuple[int, int]]:
    """Find the spans of loops: the index of the label, and that of the last jump back to it."""
    labels = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
    found: dict[int, int] = {}
    for i, line in enumerate(lines):
        opcode, *operands = line.split() or [""]
        if operands and JUMP.match(opcode) and labels.get(operands[-1], i) < i:
            found[labels[operands[-1]]] = i
    return sorted(found.items())


def read(
    name: str, lines: Sequence[str], start: int, end: int, files: dict[str, str], kernel: tuple[str, int, int]
) -> Loop:
    """Count the instructions of a loop."""
    home, first, last = kernel[0].rpartition("/")[2], *kernel[1:]
    loop, others, line = Loop(name), Counter[tuple[str, int]](), 0
    stack = stack_of(lines)
    before = next((i for i in range(start, -1, -1) if LOC.match(lines[i])), start)
    for i in (*range(before, min(before + 1, start)), *range(start, end + 1)):
        loop.branches |= start < i < end and bool(BRANCH.match(lines[i]))
        if LOC.match(lines[i]):
            chain = [p for p in called_at(lines[i], files) if p[1] and (p[0] != "<string>" or first <= p[1] <= last)]
            line = next((n for f, n in chain if f == "<string>" or f.endswith(kernel[0])), 0 if chain else line)
            short = [(home if f == "<string>" else f.rpartition("/")[2], n) for f, n in chain]
            loop.places.update(short)
            if i >= start and chain and not re.search(r"<gufunc>|/site-packages/numba/", chain[0][0]):
                others[short[0]] += 1
        if i < start:
            continue
        if one := instruction(lines, i, stack):
            one.line = line
            loop.code.append(one)
            loop.instructions += 1
            loop.calls += [one.called] if one.called else []
            loop.spills += one.spill
            loop.stores += one.store
            loop.loads += one.load
            loop.fmas += one.fma
            loop.doubles += one.double
            loop.width = max(loop.width, one.width)
    if here := loop.lines or sorted(n for f, n in others if f == others.most_common(1)[0][0][0]):
        file = home if loop.lines else others.most_common(1)[0][0][0]
        loop.where = f"{file}:{here[0]}" + (f"-{here[-1]}" if here[-1] != here[0] else "")
    return loop


def called_at(loc: str, files: Mapping[str, str]) -> list[tuple[str, int]]:
    """Return the file and line of a place, and of the calls that were inlined around it, the outermost last."""
    file, line = LOC.match(loc).groups()  # type: ignore[union-attr]
    paths = [[path for path in files.values() if path.rpartition("/")[2] == f] for f, _ in CALLED.findall(loc)]
    names = [p[0] if len(set(p)) == 1 else "" for p in paths]  # comments have no folders
    chain = [files.get(file, "<gufunc>"), *names], [line, *(n for _, n in CALLED.findall(loc))]
    return [(f, int(n)) for f, n in zip(*chain, strict=True)]


@dataclass
class Instruction:
    """One instruction.

    Attributes
    ----------
    width : floats that it computes with; 0 if it computes with none.
    load, store : whether it reads or writes floats in memory; of the stack, that is a spill.
    double : whether it converts to or from double, or computes with it.
    called : the function that it calls.
    line : the line of the kernel's file that it comes from; 0 if it has none, or in a `LineBlock`.
    """

    text: str
    width: int = 0
    fma: bool = False
    load: bool = False
    store: bool = False
    spill: bool = False
    double: bool = False
    called: str = ""
    line: int = 0

    @property
    def opcode(self) -> str:
        """The first word."""
        return self.text.split(None, 1)[0]

    @property
    def operands(self) -> list[str]:
        """The operands: in AT&T syntax, what is written comes last."""
        return [x.strip() for x in re.split(r",(?![^(]*\))", self.text.partition(self.opcode)[2]) if x.strip()]


def stack_of(lines: Sequence[str]) -> str:
    """Return a pattern of the registers through which a function reaches its stack; with comments, one of nothing."""
    if lines[:1] == [COMMENTED]:
        return r"(?!)"
    framed = any(re.match(r"movq\s+%rsp, %rbp", line) for line in lines)  # else %rbp is like any other register
    return r"%r(sp|bp)\b" if framed else r"%rsp\b"


def instruction(lines: Sequence[str], i: int, stack: str) -> Instruction | None:
    """Read a line of a function, which has its `stack_of`; None for a directive or a label."""
    text, _, comment = lines[i].partition("#")
    opcode, _, operands = text.replace("\t", " ").partition(" ")
    if opcode.startswith(".") or opcode.endswith(":"):
        return None
    one = Instruction(text.strip())
    if opcode.startswith("call"):
        called = target(lines, i, operands.strip())
        one.called = "" if AROUND.match(called) else plain(called)
    elif "mm" in operands:
        memory = re.search(r"\(([^)]*)\)", operands)
        last = operands.rstrip().endswith(")")
        one.spill = bool(comment or (memory and re.match(stack, memory[1])))
        one.store = bool(memory) and not one.spill and last
        one.load = bool(memory) and not one.spill and not last
        one.fma, one.double = bool(FMA.match(opcode)), bool(DOUBLE.match(opcode))
        if FLOAT.match(opcode):
            scalar = opcode.endswith(("ss", "sd"))
            width = 1 if scalar else next(n for register, n in BITS if register in operands)
            one.width = width // 2 if opcode.endswith("pd") else width
    return one


@dataclass
class LineBlock:
    """Instructions of one line of source that follow each other.

    Attributes
    ----------
    file, line : of the source; empty and 0 for what numba and the compiler add.
    depth : the number of loops around it.
    """

    function: str
    file: str
    line: int
    depth: int
    instructions: list[Instruction] = field(default_factory=list)


def blocks(asm: str, file: str, first: int, last: int) -> list[LineBlock]:
    """Split the code of all functions into blocks, in the order of the text.

    Parameters
    ----------
    file, first, last : where the kernel is written. numba gives the body of a parallel loop no file, but its lines; it
        adds lines of its own, which are outside of the kernel's. What the compiler merged from several lines counts at
        the one before it.
    """
    files = {n: f"{folder}/{name}" if folder else name for n, folder, name in FILE.findall(asm)}
    found: list[LineBlock] = []
    for name, lines in functions(asm):
        if not OURS.match(name):
            continue
        around, place, block, stack = spans(lines), ("", 0), None, stack_of(lines)
        for i, text in enumerate(lines):
            if at := LOC.match(text):
                source, line = files.get(at[1], ""), int(at[2])
                inside = source.endswith("<string>")
                if inside or source.endswith(">"):
                    source = file if inside and (first <= line <= last or not line) else ""
                if line or source != place[0]:  # 0: the compiler merged instructions of several lines
                    place = (source, line) if source and line else ("", 0)
            one = instruction(lines, i, stack)
            if one is None:
                block = block if text.startswith((".loc", ".cfi", ".p2align", ".file", ".Ltmp")) else None
                continue
            depth = sum(start <= i <= end for start, end in around)
            if block is None or (block.file, block.line, block.depth) != (*place, depth):
                block = LineBlock(plain(name), *place, depth)
                found.append(block)
            block.instructions.append(one)
    return found


def target(lines: Sequence[str], i: int, operand: str) -> str:
    """Return the target of a call; a register or a stack slot is followed to its last write."""
    for _ in range(3):
        if not operand.startswith("*"):
            return operand.removesuffix("@PLT")
        place = re.escape(operand[1:])
        for j in range(i - 1, -1, -1):
            set_here = re.match(rf"mov(?:abs)?q\s+(\S.*?),\s*{place}$", lines[j])
            if set_here:
                source = set_here[1]
                if source.startswith("$"):
                    return source[1:]
                operand, i = f"*{source}", j
                break
        else:
            return "?"
    return "?"

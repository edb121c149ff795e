"""The instructions of a kernel's innermost loops, counted in its machine code (AT&T syntax for x86-64).

A loop is what lies between a label and a jump back to it; it is innermost where no other loop lies inside. Only loops
that compute with floats, or call something, are listed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

OURS = re.compile(r"^(?!NRT_|cfunc\.|_ZN7cpython|__gufunc__|numba_|\.)")
"""The names of functions that come from a kernel's text, not from numba's wrappers."""
AROUND = re.compile(r"printf|Py|NRT_|numba_(un)?pickle|.*parfor_gufunc")
"""Calls that numba adds, for errors and to start threads."""
JUMP = re.compile(r"j[a-z]+$")
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
    where : the file and the lines of Python that its instructions come from.
    width : floats in one of its float instructions, the most; 1 is scalar, 0 where there is none.
    fmas, loads, stores : float instructions; an operand in memory is a load.
    spills : floats or vectors written to or read back from the stack.
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


def loops(asm: str, file: str = "<string>", line: int = 0) -> list[Loop]:
    """List the innermost loops of all functions, in the order of the text.

    Parameters
    ----------
    file, line : where the kernel begins; numba gives the body of a parallel loop no file, but its lines.
    """
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+(?:"[^"]*"\s+)?"([^"]*)"', asm, re.M))
    found: list[Loop] = []
    for name, lines in functions(asm):
        if OURS.match(name):
            for start, end in innermost(lines):
                loop = read(name, lines, start, end, files, (file, line))
                if loop.width or loop.calls or loop.doubles:
                    found.append(loop)
    for loop in found:
        alike = [v for v in found if (v.function, v.where) == (loop.function, loop.where)]
        loop.remainder = any(v.width > loop.width for v in alike) and not loop.calls
    for loop in found:
        loop.function = plain(loop.function)
    return found


def plain(symbol: str) -> str:
    """Return the last two names in a mangled symbol: ``gelu.forward``; other symbols stay as they are."""
    names, rest = [], symbol.removeprefix("_ZN")
    while rest != symbol and (m := re.match(r"(\d+)", rest)):
        start, n = len(m[1]), int(m[1])
        names.append(rest[start : start + n])
        rest = rest[start + n :]
    return ".".join(names[-2:]) or symbol


def functions(asm: str) -> list[tuple[str, list[str]]]:
    """Split a text into functions: their names, and their lines without blanks and comments."""
    names = set(re.findall(r"^\s*\.type\s+(\S+?),@function", asm, re.M))
    found: list[tuple[str, list[str]]] = []
    for raw in asm.splitlines():
        line = raw.split("#", 1)[0].strip()
        label = line[:-1] if line.endswith(":") else ""
        if label.strip('"') in names or label in names:
            found.append((label.strip('"'), []))
        elif line and found:
            found[-1][1].append(line)
    return found


def innermost(lines: Sequence[str]) -> list[tuple[int, int]]:
    """Find the spans of innermost loops: the index of the label, and that of the last jump back to it."""
    labels = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
    spans: dict[int, int] = {}
    for i, line in enumerate(lines):
        words = line.split()
        if len(words) == 2 and JUMP.match(words[0]) and labels.get(words[1], i) < i:
            spans[labels[words[1]]] = i
    every = sorted(spans.items())
    return [s for s in every if not any(s != t and s[0] <= t[0] and t[1] <= s[1] for t in every)]


def read(name: str, lines: Sequence[str], start: int, end: int, files: dict[str, str], kernel: tuple[str, int]) -> Loop:
    """Count the instructions of a loop."""
    home, first = kernel
    loop, where = Loop(name), Counter[tuple[str, int]]()
    framed = any(re.match(r"movq\s+%rsp, %rbp", line) for line in lines)  # else %rbp is like any other register
    stack = r"%r(sp|bp)\b" if framed else r"%rsp\b"
    for i in range(start, end + 1):
        words = lines[i].replace("\t", " ").split(None, 1)
        opcode, operands = words[0], words[1] if len(words) > 1 else ""
        if opcode == ".loc":
            n, line = operands.split()[:2]
            source = files.get(n, "?").split("/")[-1]
            where[home if source == "<string>" else source, int(line)] += 1
        if opcode.startswith(".") or opcode.endswith(":"):
            continue
        loop.instructions += 1
        if opcode.startswith("call"):
            called = target(lines, i, operands.strip())
            loop.calls += [] if AROUND.match(called) else [plain(called)]
            continue
        if "mm" not in operands:
            continue
        memory = re.search(r"\(([^)]*)\)", operands)
        last = operands.rstrip().endswith(")")
        if memory and re.match(stack, memory[1]):
            loop.spills += 1
        elif memory:
            loop.stores += last
            loop.loads += not last
        loop.fmas += bool(FMA.match(opcode))
        loop.doubles += bool(DOUBLE.match(opcode))
        if FLOAT.match(opcode):
            scalar = opcode.endswith(("ss", "sd"))
            width = 1 if scalar else next(n for register, n in BITS if register in operands)
            loop.width = max(loop.width, width // 2 if opcode.endswith("pd") else width)
    if where:
        file = where.most_common(1)[0][0][0]
        at = sorted(line for f, line in where if f == file and line >= (first if f == home else 1))
        loop.where = f"{file}:{at[0]}" + (f"-{at[-1]}" if at[-1] != at[0] else "") if at else file
    return loop


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

"""The page of ``cpuopt inspect --html``: lines of source beside the machine code that they became."""

from __future__ import annotations

import linecache
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...measure.lines import definitions
from ...wording import count
from ..inspect import ROWS
from .markup import Markup, join, tag
from .page import Section, page

if TYPE_CHECKING:
    from ...lab.asm import Instruction, LineBlock
    from ...lab.inspect import Inspection

SAME = {
    True: "This is the code that runs: it equals the compiled kernel byte for byte.",
    False: "This is not the code that runs: with lines of source, the compiler made other instructions.",
    None: "The kernel was not compiled before, so this was not compared with the code that runs.",
}
OURS = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class FunctionSource:
    """A function's source: the name of its file, its first line, and its text."""

    file: str
    first: int
    lines: Sequence[str]

    @property
    def span(self) -> range:
        """The numbers of its lines."""
        return range(self.first, self.first + len(self.lines))


def machine_code(found: Sequence[Inspection]) -> str:
    """Make the page of one kernel, or of two side by side."""
    title = f"{found[0].op}: {' and '.join(f.variant for f in found)}"
    cells = [[_cell(f.summary[key]) for f in found] for key in ROWS]
    rows = [tag("tr", tag("th", n, scope="row"), c) for n, c in zip(ROWS.values(), cells, strict=True)]
    names = [tag("th", f.variant, scope="col") for f in found]
    first = tag("tr", tag("th", "in the innermost loops", scope="col"), names)
    sums = tag("div", tag("table", tag("thead", first), tag("tbody", rows), class_="sums"), class_="scroll")
    sides = tag("div", [tag("div", _side(f), class_="side") for f in found], class_="sides")
    facts = tag(
        "p",
        f"{found[0].cpu} · AT&T syntax · an instruction of several lines counts at the one before it",
        class_="note",
    )
    return page(
        title, join(tag("h1", title), facts), [Section("sums", "Sums", sums), Section("lines", "Line by line", sides)]
    )


def _cell(value: object) -> Markup:
    return tag("td", ", ".join(value) if isinstance(value, list) else value)


def _side(f: Inspection) -> Markup:
    head = join(tag("h3", f"{f.op}[{f.variant}]"), tag("p", f.where, class_="note"))
    if not f.compiled:
        return join(head, tag("p", "A Python function: nothing is compiled.", class_="note"))
    if not f.blocks:
        return join(head, tag("p", f"Instructions are read on x86-64 only; this is {f.machine}.", class_="note"))
    code: dict[tuple[str, int], list[LineBlock]] = {}
    for block in f.blocks:
        code.setdefault((block.file, block.line), []).append(block)
    advised: dict[tuple[str, int], list[str]] = {}
    for a in f.advice:
        advised.setdefault((f.file, a.line), []).append(a.rule)
    parts = [_part(part, i == 0, code, advised) for i, part in enumerate(sources(f))]
    rest = sorted((b for (_, line), blocks in code.items() if not line for b in blocks), key=lambda b: -b.depth)
    added = [i for b in rest for i in b.instructions]
    name = tag("summary", f"of no line · {count(len(added), 'instruction')}")
    why = tag("p", "numba adds them, to start threads and pass arguments.", class_="note")
    others = tag("details", name, why, _counts(added), tag("div", tag("pre", map(_block, rest)), class_="row whole"))
    same = tag("p", SAME[f.same], class_="warnings" if f.same is False else "note")
    advice = [tag("p", a.said, class_="warnings") for a in f.advice]
    return join(head, same, advice, parts, others if added else None)


def _part(
    part: FunctionSource,
    is_open: bool,
    code: dict[tuple[str, int], list[LineBlock]],
    advised: dict[tuple[str, int], list[str]],
) -> Markup:
    rows = [
        _row(n, text, code.get((part.file, n), []), advised.get((part.file, n), []))
        for n, text in zip(part.span, part.lines, strict=True)
    ]
    n = sum(len(b.instructions) for line in part.span for b in code.get((part.file, line), []))
    name = tag("summary", f"{short_path(part.file)}:{part.first} · {count(n, 'instruction')}")
    return tag("details", name, rows, open="" if is_open or n > 20 else None)


def _row(number: int, text: str, blocks: Sequence[LineBlock], rules: Sequence[str]) -> Markup:
    """Put a line of source on the left, with the rules of advice on it, and what became of it on the right."""
    line = [tag("span", number, class_="number"), tag("span", text.rstrip() or " ", class_="text")]
    deepest = sorted(blocks, key=lambda b: -b.depth)
    chips = tag("div", [tag("span", rule, class_="chip bad") for rule in rules], class_="chips") if rules else None
    source = tag("div", line, chips, _counts([i for b in blocks for i in b.instructions]), class_="source")
    return tag("div", source, tag("pre", [_block(b) for b in deepest]) if blocks else None, class_="row")


def _counts(instructions: Sequence[Instruction]) -> Markup | None:
    if not instructions:
        return None
    called = Counter(i.called for i in instructions if i.called)
    wide, scalar = (sum(i.fma and (i.width > 1) == vector for i in instructions) for vector in (True, False))
    spills = sum(i.spill for i in instructions)
    chips = [(f"{wide} vector FMA", "good", wide), (f"{scalar} scalar FMA", "bad", scalar)]
    chips += [(count(spills, "spill"), "bad", spills)]
    chips += [(f"calls {name}" + (f" {n}x" if n > 1 else ""), "bad", n) for name, n in called.items()]
    chips += [(count(len(instructions), "instruction"), "plain", 1)]
    return tag(
        "div", [tag("span", text, class_=f"chip {kind}") for text, kind, shown in chips if shown], class_="chips"
    )


def _block(block: LineBlock) -> Markup:
    loop = f"in {count(block.depth, 'loop')}" if block.depth else "outside of loops"
    lines = [tag("span", f"{i.text.replace(chr(9), ' ')}\n", class_=_kind(i)) for i in block.instructions]
    return join(tag("span", f"{loop} · {block.function}\n", class_="where"), lines)


def _kind(i: Instruction) -> str | None:
    if i.spill or i.called or (i.fma and i.width == 1):
        return "bad"
    return "good" if i.fma else None


def sources(f: Inspection) -> list[FunctionSource]:
    """List the functions that have instructions: the kernel, then what was inlined into it, by instructions."""
    found = [FunctionSource(f.file, f.first, f.source)]
    counts: Counter[FunctionSource] = Counter()
    for block in f.blocks:
        known = found[0].file == block.file and block.line in found[0].span
        if block.line and not known:
            counts[function_around(block.file, block.line)] += len(block.instructions)
    return [*found, *(part for part, _ in counts.most_common())]


def function_around(file: str, line: int) -> FunctionSource:
    """Return the innermost function that holds a line; the line alone, without its text, if there is none."""
    span = next(((first, last) for first, last, _ in definitions(file) if first <= line <= last), None)
    if span is None:
        return FunctionSource(file, line, ("",))
    return FunctionSource(file, span[0], tuple(linecache.getlines(file)[span[0] - 1 : span[1]]))


def short_path(file: str) -> str:
    """Return a file's path from where it says most: the package, the library, or its name."""
    path = Path(file)
    if path.is_relative_to(OURS):
        return str(path.relative_to(OURS)).rpartition("site-packages/")[2]
    return file.rpartition("site-packages/")[2] if "site-packages/" in file else path.name

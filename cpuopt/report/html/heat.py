"""Heat beside lines of source: their shares of an op's samples, for ``cpuopt profile --lines --html``."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from ...measure.lines import OpLines
from ...wording import count
from .machine_code import FunctionSource, function_around, short_path
from .markup import Markup, join, tag
from .svg import SHADES
from .threads import slow_calls

NOTE = (
    "Percent of the op's samples, on the line and in what was inlined into it; the tip has those of the line alone. "
    "The kernels ran as they train, and were not recompiled."
)


def heat(found: Sequence[OpLines]) -> Markup:
    """Show the source of each op's kernel and of what was inlined into it, hottest function first."""
    return join(tag("p", NOTE, class_="note"), [_op(op, i == 0) for i, op in enumerate(found)])


def _op(op: OpLines, is_open: bool) -> Markup:
    whole, alone = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    for r in op.rows:
        if r.file:
            alone[r.file, r.line] += r.samples
            for place in dict.fromkeys([(r.file, r.line), *map(place_of, r.chain)]):
                whole[place] += r.samples
    parts: dict[FunctionSource, int] = defaultdict(int)
    for (file, line), n in whole.items():
        parts[function_around(file, line)] += n
    head = f"{', '.join(op.kernels)} · {op.share:.1f} % of the samples in ops · {count(op.samples, 'sample')}"
    others = [f"{r.function} {r.share:.1f} %" for r in op.rows if not r.file]
    rest = tag("p", f"Not in a kernel: {', '.join(others)}", class_="note") if others else None
    shown = [_function(p, op.samples, whole, alone) for p in sorted(parts, key=lambda p: -parts[p])]
    return tag("details", tag("summary", head), rest, slow_calls(op), shown, open="" if is_open else None)


def place_of(call: str) -> tuple[str, int]:
    """Read ``file:line function``."""
    file, _, line = call.rpartition(" ")[0].rpartition(":")
    return file, int(line)


def _function(
    part: FunctionSource, samples: int, whole: Counter[tuple[str, int]], alone: Counter[tuple[str, int]]
) -> Markup:
    rows = []
    for n, text in zip(part.span, part.lines, strict=True):
        at = part.file, n
        share = 100 * whole[at] / samples
        mark = {"class_": f"heat s{round(SHADES * share / 100)}", "title": f"{100 * alone[at] / samples:.1f} % alone"}
        shown = tag("span", f"{share:.1f}", **mark) if whole[at] else tag("span", class_="heat")
        line = [shown, tag("span", n, class_="number"), tag("span", text.rstrip() or " ", class_="text")]
        rows.append(tag("div", tag("div", line, class_="source"), class_="row whole"))
    return join(tag("h3", f"{short_path(part.file)}:{part.first}"), rows)

"""Draw the packages and their imports as docs/packages.svg, from the source tree.

    python docs/packages.py

An arrow leads from a package to one that it imports. An arrow that a longer way of arrows implies is left out. Each
package stands one row above the highest that it imports, so every arrow points down.
"""

from __future__ import annotations

import ast
from html import escape
from pathlib import Path
from textwrap import wrap

ROOT = Path(__file__).resolve().parent.parent / "cpuopt"
PICTURE = Path(__file__).with_name("packages.svg")
WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 190, 54, 28, 26, 16
STYLE = """
rect { fill: #f6f8fa; stroke: #57606a } text { font-family: sans-serif; text-anchor: middle; fill: #1f2328 }
.name { font-size: 14px; font-weight: bold } .what { font-size: 10px } path { fill: none; stroke: #0969da }
#tip path { fill: #0969da; stroke: none } svg { background: white }
"""

Graph = dict[str, set[str]]


def parts(root: Path = ROOT) -> dict[str, Path]:
    """Return the packages and root modules by name, each with the file whose docstring describes it."""
    modules = {p.stem: p for p in root.glob("*.py") if not p.stem.startswith("__")}
    return {**modules, **{p.parent.name: p for p in root.glob("*/__init__.py")}}


def imports(root: Path = ROOT) -> Graph:
    """Return which packages and root modules each of them imports, anywhere in its files."""
    names = parts(root)
    graph: Graph = {name: set() for name in names}
    for file in root.rglob("*.py"):
        place = file.relative_to(root).parts
        mine = place[0].removesuffix(".py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if mine in names and isinstance(node, ast.ImportFrom) and node.level:
                home = place[: len(place) - node.level]
                for alias in node.names:
                    target = [*home, *(node.module or "").split("."), alias.name]
                    graph[mine] |= {next(filter(None, target))} & names.keys() - {mine}
    return graph


def draw(root: Path = ROOT) -> str:
    """Return the drawing as SVG."""
    graph = imports(root)
    below: Graph = {}
    row: dict[str, int] = {}
    while waiting := [n for n in graph if n not in row and graph[n] <= row.keys()]:
        for name in waiting:
            below[name] = graph[name].union(*(below[m] for m in graph[name]))
            row[name] = 1 + max((row[m] for m in graph[name]), default=-1)
    rows = [sorted(n for n in row if row[n] == i) for i in range(max(row.values()), -1, -1)]
    widest = max(map(len, rows))
    full = widest * (WIDTH + GAP_X) - GAP_X + 2 * MARGIN
    at = {}
    for i, names in enumerate(rows):
        left = (full - len(names) * (WIDTH + GAP_X) + GAP_X) / 2
        at |= {n: (left + j * (WIDTH + GAP_X), MARGIN + i * (HEIGHT + GAP_Y)) for j, n in enumerate(names)}
    files = parts(root)
    boxes, arrows = [], []
    for name, (x, y) in at.items():
        doc = ast.get_docstring(ast.parse(files[name].read_text(encoding="utf-8"))) or ""
        boxes.append(f'<rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>')
        middle = f"{x + WIDTH / 2:g}"
        boxes.append(f'<text class="name" x="{middle}" y="{y + 18:g}">{escape(name)}</text>')
        for i, line in enumerate(summary(doc)):
            boxes.append(f'<text class="what" x="{middle}" y="{y + 33 + 13 * i:g}">{escape(line)}</text>')
        for other in sorted(graph[name]):
            if not any(other in below[m] for m in graph[name]):
                (x2, y2), y1 = at[other], y + HEIGHT
                ends = f"{x + WIDTH / 2:g},{y1:g} {{}} {x2 + WIDTH / 2:g},{y2 - 4:g}"
                bend = f"C{x + WIDTH / 2:g},{(y1 + y2) / 2:g} {x2 + WIDTH / 2:g},{(y1 + y2) / 2:g}"
                arrows.append(f'<path d="M{ends.format(bend)}" marker-end="url(#tip)"/>')
    size = f'width="{full:g}" height="{MARGIN * 2 + len(rows) * (HEIGHT + GAP_Y) - GAP_Y:g}"'
    tip = '<marker id="tip" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', f"<style>{STYLE}</style>"]
    lines += [f'<defs>{tip}<path d="M0,0 8,4 0,8z"/></marker></defs>', *arrows, *boxes, "</svg>"]
    return "\n".join(lines) + "\n"


def summary(doc: str) -> list[str]:
    """Return the lines in a box: the first line of a docstring up to a colon, semicolon or full stop."""
    text = doc.split("\n")[0]
    for end in ":;.":
        text = text.split(f"{end} ")[0].removesuffix(end)
    return wrap(text, 32)


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")

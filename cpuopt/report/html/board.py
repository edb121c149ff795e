"""The page of ``cpuopt judge --html``: the submissions of some tasks, and the text of the best of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...judge.session import FASTER
from ...wording import count, spread
from .listing import Column, listing
from .markup import Markup, join, tag
from .page import Section, page

COLUMNS = [
    *(Column(name, name) for name in ("place", "kernel")),
    *(Column(name, name, lambda x: f"{x:.3f}") for name in ("score", "ratio")),
    *(Column(name, name) for name in ("interval", "against", "model", "B", "T", "threads", "kept", "machine", "text")),
]


def report(boards: Sequence[Mapping[str, Any]]) -> str:
    """Make the page of the boards that `Desk.board` returned; a task without submissions is left out."""
    kept = [b for b in boards if b["best"]]
    title = f"Board of {kept[0]['op']}" if len(boards) == 1 and kept else "Boards"
    said = [f"{count(sum(b['tries'] for b in kept), 'submission')} of {count(len(kept), 'task')}"]
    said += ["score: how many times as fast as the package's kernel, at least; ratio: this time to that of the package"]
    head = join(tag("h1", title), [tag("p", text, class_="facts") for text in said])
    return page(title, head, [Section(b["op"], b["op"], board(b)) for b in kept])


def board(b: Mapping[str, Any]) -> Markup:
    """Show the submissions of a task as a table, and the text of the best."""
    rows = [_row(i + 1, row) for i, row in enumerate(b["best"])]
    best = b["best"][0]
    text = tag("details", tag("summary", f"text of {best['candidate']}, the best"), tag("pre", best["source"]))
    return join(listing(rows, COLUMNS, f"{b['op']}-table"), text)


def _row(place: int, row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **{k: row["task"][k] for k in ("model", "B", "T", "threads")},
        **{k: row[k] for k in ("score", "against", "machine")},
        "place": place if row["verdict"] == FASTER else None,
        "kernel": row["candidate"],
        "ratio": row["ratio"]["median"],
        "interval": spread(row["ratio"]).partition(" ")[2],
        "kept": row["time"],
        "text": row["text"][:12],
    }

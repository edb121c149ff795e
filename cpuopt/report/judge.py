"""The screen of `cpuopt judge`: the verdict on a candidate, and what it is based on."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from ..judge.session import REFUSED, Ruling
from ..wording import count
from . import style


def tables(r: Ruling) -> list[RenderableType]:
    """Show a verdict."""
    head = Text(f"{r.op}[{r.candidate or '?'}]: ", "bold")
    head.append(r.verdict, "bad" if r.verdict in REFUSED else "good")
    shown: list[RenderableType] = [head]
    if r.reason:
        shown.append(Text(r.reason))
    if r.cases:
        shown.append(Text(f"right in {count(r.cases, 'case')}, most of them private"))
    closed = f"closed by {r.isolation['by']}" if r.isolation else ""
    shown.append(Text(f"{closed}; text {r.text[:12]}; {r.seconds:.1f} s", "dim"))
    missing = r.isolation.get("missing") or []
    return [*shown, *style.warnings([f"this system does not allow: {', '.join(missing)}"] * bool(missing))]

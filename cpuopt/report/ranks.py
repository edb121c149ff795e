"""The table of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType

from ..comm.places import named
from .style import table


def ranks_table(places: Sequence[Sequence[Any]], threads: Sequence[int]) -> list[RenderableType]:
    """Show the host, cores and threads of each rank.

    Parameters
    ----------
    places : a rank's host, followed by its cores.
    threads : of each rank.
    """
    shown = table(">rank", "host", "cores", ">threads")
    for rank, ((host, *cores), n) in enumerate(zip(places, threads, strict=True)):
        shown.add_row(str(rank), host, named(cores).partition(" ")[2], str(n))
    return [shown]

"""The suite of `cpuopt bench --suite`: models and sizes by name, measured in turn, and the mean over all."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import UserError
from . import Bench, Plan, View, parse_sizes, summed, writer

SUITE = {
    "gpt2-nano": "12x64",
    "gpt2-baby": "8x256",
    "stories15M": "4x256",
    "gpt2-124M": "1x16,1x64,4x64,16x64,1x1024",
}
"""The sizes of each model: nanoGPT's recipes for a CPU and for characters, a small Llama, and GPT-2."""


def plans(plan: Plan) -> Iterator[Plan]:
    """Yield the plan of each row of the suite, with the settings of `plan`."""
    for model, sizes in SUITE.items():
        for size in parse_sizes(sizes):
            yield replace(plan, model=model, sizes=(size,))


def run(rows: Sequence[Plan], view: View, out: Path | None = None, **bench: Any) -> dict[str, Any]:
    """Measure each row, and return the record.

    It is the record of a bench whose results name their model too. A row that fails is recorded with the reason, and
    the others are measured.

    Parameters
    ----------
    rows : the plan of each row.
    view : observer of progress.
    out : a file that gets the record, rewritten after each row.
    bench : further parameters of `Bench`.

    Raises
    ------
    UserError
        If the first row fails, or `out` cannot be written.
    """
    write = writer(out)
    records: list[dict[str, Any]] = []
    done = 0.0
    for row in rows:
        part = Bench(row, view, model=row.model, done=done, **bench)
        try:
            part.run()
        except UserError as e:
            if not records:
                raise
            part.refuse(f"no ratio, because of {e}")
        done += row.cost
        records.append(part.record())
        write(joined(records))
    return joined(records)


def joined(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join the records of some rows."""
    results = [result for r in records for result in r["results"]]
    return {
        **records[0],
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "model": {"name": "suite", "models": {r["model"]["name"]: r["model"] for r in records}},
        "sizes": [size for r in records for size in r["sizes"]],
        "results": results,
        **summed(results),
        "left_out": {peer: why for r in records for peer, why in r["left_out"].items()},
    }

"""The suite of `cpuopt bench --suite`: models and sizes by name, measured in turn, and the mean over all."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import UserError
from ...files import write_whole
from ...measure.comparison import geometric_mean
from . import Bench, Plan, View, means, parse_sizes

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


class Part(View):
    """Passes the progress of one row on, as a part of the suite's."""

    def __init__(self, view: View, model: str, done: float) -> None:
        self.view, self.model, self.done = view, model, done

    def stage(self, text: str) -> None:
        """Name the model too."""
        self.view.stage(f"{self.model} {text}")

    def left_out(self, peer: str, why: str) -> None:
        """Pass on which peer does not run."""
        self.view.left_out(peer, why)

    def at(self, cost: float) -> None:
        """Count the rows before."""
        self.view.at(self.done + cost)


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
    if out and not out.absolute().parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {str(out.absolute().parent)!r}; make it first")
    records: list[dict[str, Any]] = []
    done = 0.0
    for row in rows:
        part = Bench(row, Part(view, row.model, done), **bench)
        try:
            part.run()
        except UserError as e:
            if not records:
                raise
            part.refuse(f"no ratio, because of {e}")
        done += row.cost
        records.append(part.record())
        for result in part.results:
            view.result(replace(result, model=row.model))
        if out:
            write_whole(out, [json.dumps(joined(records), indent=1).encode() + b"\n"])
    return joined(records)


def joined(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join the records of some rows."""
    models = [{"model": r["model"]["name"]} for r in records]
    results = [result | model for model, r in zip(models, records, strict=True) for result in r["results"]]
    peers = dict.fromkeys(r["peer"] for r in results)
    ratios = {p: [r["ratio"] for r in results if r["peer"] == p and r["ratio"]] for p in peers}
    faster = [model | found for model, r in zip(models, records, strict=True) for found in r["faster"]]
    return {
        **records[0],
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "model": {"name": "suite", "models": {r["model"]["name"]: r["model"] for r in records}},
        "sizes": [size for r in records for size in r["sizes"]],
        "results": results,
        "faster": faster,
        "faster_mean": means(faster),
        "left_out": {peer: why for r in records for peer, why in r["left_out"].items()},
        "geometric_mean": {peer: geometric_mean(found) for peer, found in ratios.items() if len(found) > 1},
    }

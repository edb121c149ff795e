"""What `cpuopt scale` predicts for many threads from few, beside a record that measured both.

    cpuopt scale -B 4 -T 64 --json > record.json
    python benchmarks/projection.py record.json --known 2

The rows of up to --known threads predict the others, as ``scale --threads 1,2 --project 4,8,16`` would, but for the
bandwidth of memory, which is the record's for each number of threads. The last columns have the ms that the prediction
lacks, by reason.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cpuopt.measure.scaling import REASONS, SHARED, START, Model, Starts

Record = Mapping[str, Any]


def lacking(record: Record, known: int) -> dict[int, dict[str, float]]:
    """Return by each number of threads above `known` the ms that a prediction from the others lacks, by reason."""
    step, counts = record["step"], [n for n in record["threads"] if n > 1]
    starts = {int(n): us / 1e3 for n, us in record["start_us"].items()}
    found = {n: step["predicted_lost_ms"][str(n)] for n in counts}
    # the starts that a step loses are those of its regions, without an n-th of what one thread lost
    lost = [[starts[n], -1 / n] for n in counts], [found[n][START] for n in counts]
    regions = float(np.linalg.lstsq(*map(np.array, lost))[0][0])
    line = Starts({n: ms for n, ms in starts.items() if n <= known})
    work = {n: step["predicted_ms"][str(n)] - regions * starts[n] for n in counts}
    late = step["ms"][str(known)] - work[known] - regions * line(known)
    model = Model(line, {}, missed=max(1.0, 1 + late / work[known]))
    for n in counts:
        more = {START: regions * (line(n) - starts[n]), SHARED: work[n] * (model.stretch(n) - 1)}
        found[n] = {r: step["lost_ms"][str(n)][r] - found[n][r] - more.get(r, 0.0) for r in REASONS}
    return {n: found[n] for n in counts if n > known}


def table(record: Record, known: int) -> Iterator[str]:
    """Yield the lines of a table with a row for each number of threads that is predicted."""
    yield f"| threads | measured, ms | predicted, ms | off by | {' | '.join(REASONS)} |"
    yield f"| ---: | ---: | ---: | ---: |{' ---: |' * len(REASONS)}"
    for n, lost in lacking(record, known).items():
        ms = record["step"]["ms"][str(n)]
        predicted = ms - sum(lost.values())
        cells = f"{ms:.1f} | {predicted:.1f} | {100 * (predicted / ms - 1):+.0f} %"
        yield f"| {n} | {cells} | {' | '.join(f'{lost[r]:+.1f}' for r in REASONS)} |"


def main() -> None:
    """Print the table of a record."""
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("record", type=Path, help="output of cpuopt scale --json")
    p.add_argument("--known", type=int, default=2, help="the most threads that predictions start from (%(default)s)")
    a = p.parse_args()
    record = json.loads(a.record.read_text())
    if not 1 < a.known < max(record["threads"]) or a.known not in record["threads"]:
        p.error(f"--known {a.known}: expected one of {record['threads'][1:-1]}, which the record has")
    print("\n".join(table(record, a.known)))


if __name__ == "__main__":
    main()

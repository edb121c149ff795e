"""Generator of the tables of docs/results.md from the records of `cpuopt bench`.

The text between ``<!-- bench:NAME -->`` and ``<!-- /bench -->`` is made from ``benchmarks/records/NAME.json``, which
``cpuopt bench --out`` wrote::

    python benchmarks/tables.py [--check] [FILE.md ...]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cpuopt.isolate.process import PHASES
from cpuopt.report.bench import at_all_roofs, at_roofs, digits, libraries, of_peak, size_of, types_of
from cpuopt.wording import spread

ROOT = Path(__file__).resolve().parents[1]
MARKED = re.compile(r"(<!-- bench:([\w.-]+) -->\n)(.*?)(<!-- /bench -->)", re.DOTALL)


def fill(text: str, records: Path) -> str:
    """Put the tables of each marked record into a page.

    Raises
    ------
    SystemExit
        For a marker that is not closed, a record that is missing, or a file that is none.
    """
    if text.count("<!-- bench:") != len(MARKED.findall(text)):
        raise SystemExit("tables: a marker '<!-- bench:NAME -->' has no '<!-- /bench -->' after it")

    def made(match: re.Match[str]) -> str:
        if "<!-- bench:" in match[3]:
            raise SystemExit(f"tables: '<!-- bench:{match[2]} -->' has no '<!-- /bench -->' before the next")
        path = records / f"{match[2]}.json"
        try:
            record = json.loads(path.read_text())
            return f"{match[1]}\n{markdown(record)}\n{match[4]}"
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise SystemExit(f"tables: {path}: {type(e).__name__}: {e}; make it with: cpuopt bench --out {path}") from e

    return MARKED.sub(made, text)


def markdown(record: Mapping[str, Any]) -> str:
    """Turn a record into a table for each peer, and a line on the measurement."""
    if record["kind"] != "cpuopt-bench":
        raise ValueError(f"kind is {record['kind']!r}; expected 'cpuopt-bench'")
    lines, bounded = [], any(at_roofs(r) for r in record["results"])  # records of earlier versions have no roofs
    for peer in dict.fromkeys(r["peer"] for r in record["results"]):
        lines += [*peer_lines(peer, [r for r in record["results"] if r["peer"] == peer])]
        if peer in record["geometric_mean"]:
            mean = f"Geometric mean of the ratios: {spread(record['geometric_mean'][peer], 2)}"
            rows = [r for r in record["results"] if r["peer"] == peer]
            lines += [", ".join([mean, *at_all_roofs(rows)]) + ".", ""]
    lines += [*fastest_lines(record), *library_lines(record["results"])]
    machine = record["machine"]
    versions = {**machine["versions"], **{k: v for r in record["results"] for k, v in r["versions"]["peer"].items()}}
    used = ", ".join(f"{name} {versions[name]}" for name in ("cpuopt", "numba", "numpy", "torch") if name in versions)
    level = min((r.get("level", 95) for r in record["results"]), default=95)  # records of earlier versions have none
    kernels = " + ".join(f"`{k}`" for k in (record["variant"], *record["swap"]))
    return "\n".join(
        [
            *lines,
            f"{record['model']['name']}, {kernels}, {', '.join(types_of(record))}, {record['threads']} threads, "
            f"{record['rounds']} alternating rounds; {machine['cpu']}; {used}; {record['time'][:10]}. "
            f"Two figures in a cell: cpuopt / peer. Ratio: peer's time over cpuopt's, and its {level:g} % interval."
            + " At roofs: the ratio if each call of cpuopt's step reached its roof."
            * bounded,
            "",
        ]
    )


def fastest_lines(record: Mapping[str, Any]) -> list[str]:
    """Make the table of the ratios to the fastest peer of each size and type; none for records of earlier versions."""
    rows = [r for r in record.get("faster", ()) if "dtype" in r]
    lines = [
        f"| {size_of(r)} | {r['dtype']} | {r['peer']} | {', '.join(r['of'])} | {spread(r['ratio'], 2)} |" for r in rows
    ]
    head = ["| B x T | cpuopt | fastest peer | of | ratio |", "| --- | --- | --- | --- | ---: |"]
    means = [
        f"Geometric mean to the fastest ({types}): {spread(mean, 2)}."
        for types, mean in record.get("faster_mean", {}).items()
    ]
    return [*head, *lines, "", *(x for mean in means for x in (mean, ""))] if rows else []


def library_lines(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Make the table of what runs a peer's products; none for records of earlier versions."""
    rows = libraries(results)
    head = ["| peer | torch | vectors | F.linear 256x768 -> 3072, GFLOP/s | by |", "| --- | --- | --- | ---: | --- |"]
    lines = [
        f"| {p} | {x['torch']} | {x['capability']} | {x['linear_gflops']:,.0f} | {x['products_by']} |"
        for p, x in rows.items()
    ]
    return [*head, *lines, ""] if rows else []


def peer_lines(peer: str, results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Make the table against one peer; a size without a ratio has the reason."""
    known = any(r.get("of_peak") for r in results)  # records of earlier versions have none
    first = "model, B x T" if any(r.get("model") for r in results) else "B x T"
    bounded = any(at_roofs(r) for r in results)
    of_which = "% of peak" if any(r.get("dtype") == "bf16" for r in results) else "% of FMA peak"
    parts = [*["at roofs"] * bounded, *(f"{p} ms" for p in PHASES), *[of_which] * known, "peak MB"]
    lines = [
        f"| {first} | cpuopt ms | {peer} ms | ratio | {' | '.join(parts)} |",
        f"| --- |{' ---: |' * (3 + len(parts))}",
    ]
    for r in results:
        size = f"| {size_of(r)} |"
        if not r["ratio"]:
            lines.append(f"{size} | | refused |{' |' * (1 + bounded + known + len(PHASES))}")
            continue
        ours, theirs = r["step_ms"]["cpuopt"]["median"], r["step_ms"]["peer"]["median"]
        n = digits(min(ours, theirs))
        phases = [" / ".join(f"{r['phases_ms'][key][p]:.{n}f}" for key in ("cpuopt", "peer")) for p in PHASES]
        shares = [" / ".join(of_peak(r, key) for key in ("cpuopt", "peer"))] if known else []
        peak = " / ".join(f"{r['peak_rss_mb'][key]:.0f}" for key in ("cpuopt", "peer"))
        ratios = [spread(r["ratio"], 2), *[at_roofs(r)] * bounded]
        cells = [f"{ours:.{n}f}", f"{theirs:.{n}f}", *ratios, *phases, *shares, peak]
        lines.append(f"{size} {' | '.join(cells)} |")
    notes = [f"- {size_of(r)}: {note}" for r in results for note in [r["refused"], *r["doubts"]] if note]
    return [*lines, "", *notes, *([""] if notes else [])]


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite pages in place, or with ``--check`` say which are out of date."""
    parser = argparse.ArgumentParser(description="Fill the tables of pages from the records of cpuopt bench.")
    parser.add_argument("--check", action="store_true", help="check only; exit status 1 where a page is out of date")
    parser.add_argument(
        "--records", type=Path, default=ROOT / "benchmarks" / "records", help="folder of the records (%(default)s)"
    )
    parser.add_argument("pages", nargs="*", type=Path, default=[ROOT / "docs" / "results.md"])
    args = parser.parse_args(argv)
    status = 0
    for page in args.pages:
        old = page.read_text()
        new = fill(old, args.records)
        if args.check and new != old:
            print(f"{page} is out of date: python benchmarks/tables.py {page}", file=sys.stderr)
            status = 1
        elif new != old:
            page.write_text(new)
    return status


if __name__ == "__main__":
    sys.exit(main())

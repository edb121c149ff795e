"""The pages of docs/results/, made from the records of each machine in benchmarks/records/MACHINE/.

::

    python benchmarks/results.py                                 # writes the pages, and docs/chart.py's pictures
    python benchmarks/results.py --check                         # exit status 1 if one does not follow from its records
    python benchmarks/results.py --measure --peer-python PYTHON  # measures this machine first; `make results`

``--only front`` measures the record of README's chart alone, and ``--llmc PATH`` adds llm.c's compiled ``train_gpt2``
to it. A folder of records has the name of a processor: ``zen4``, or any other with ``--machine``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs"))

import chart
from llmc import record as llmc_record

from cpuopt import machine
from cpuopt.lab.peers.plan import PEERS, PLAIN, TUNED
from cpuopt.measure.comparison import CHECKED_STEPS, geometric_mean
from cpuopt.measure.scaling import REASONS
from cpuopt.report.bench import digits, libraries, of_all_limits, of_limit, of_peak, size_of, tunings
from cpuopt.wording import spread

ROOT = Path(__file__).resolve().parents[1]
RECORDS, PAGES = ROOT / "benchmarks" / "records", ROOT / "docs" / "results"
NAMES = {"zen3": "Zen 3", "zen4": "Zen 4", "zen5": "Zen 5", "xeon": "Xeon", "xeon-amx": "Xeon with AMX"}
"""Titles of the machines that the overview lists, measured or not."""
NONE = "not measured"
BESIDE_INT8 = ", beside PyTorch's of bf16 ([the loss of both](../precision.md#its-loss))"
UNTUNED = "PyTorch ran as it comes, without the tuning that makes it faster ([how](README.md#pytorch-tuned))."
SIDES = "cpuopt", "peer"
LLAMA = ("--model", "smollm2-135M", "--peer", "torch-best", "--dtype", "float32", "--sizes", "1x16,1x64,4x64,1x512")
RUNS = {
    "front": ("--sizes", "4x64", "--peer", "torch-best", "--peer", "torch-eager", "--peer", "torch-amp"),
    "suite": ("--suite", "--peer", "torch-best"),
    "int8": ("--suite", "--peer", "torch-best", "--dtype", "int8"),
    "llama": LLAMA,
    "scale": ("-B", "4", "-T", "64"),
}
"""The flags of `cpuopt bench`, or for the last of `cpuopt scale`, by the record that they make."""
KINDS = "cpuopt-bench", "cpuopt-scale"
DTYPES = "float32", "bf16"
"""The classes of PyTorch's modes, by what their products read."""
INT8 = "int8"
"""The class of what PyTorch has no mode for: its modes of bf16, which are its fastest, stand beside it."""
MACHINES = re.compile(r"(<!-- machines -->\n).*?(<!-- /machines -->)", re.DOTALL)
SUITE = re.compile(r"(<!-- suite -->\n).*?(<!-- /suite -->)", re.DOTALL)
Record = Mapping[str, Any]
Row = tuple[Mapping[str, Any], list[Mapping[str, Any]]]
"""The result against the fastest peer of a size, and the results against all of them."""


def records_of(folder: Path) -> dict[str, Record]:
    """Read the records of `cpuopt bench` and `cpuopt scale` in a folder by name, those of `RUNS` first.

    Raises
    ------
    SystemExit
        For a file that is no record.
    """
    found = {}
    for path in sorted(folder.glob("*.json"), key=lambda p: ([*RUNS, p.stem].index(p.stem), p.stem)):
        try:
            record = json.loads(path.read_text())
            if record.get("kind") in KINDS:
                found[path.stem] = record
        except (OSError, ValueError, AttributeError) as e:
            raise SystemExit(f"results: {path}: {type(e).__name__}: {e}; remove it, or measure again") from e
    return found


def classes(record: Record) -> Iterator[tuple[str, list[Row]]]:
    """Yield the types of what products read, with the rows of each class: peers of one type."""
    results = [{"dtype": record.get("dtype") or "float32", "peer_dtype": "float32", **r} for r in record["results"]]
    for dtype in dict.fromkeys(r["dtype"] for r in results):
        of = [r for r in results if r["dtype"] == dtype and (dtype == INT8 or r["peer_dtype"] == dtype)]
        rows = []
        for size in dict.fromkeys(map(size_of, of)):
            ran = [r for r in of if size_of(r) == size and r["ratio"]]
            if ran:
                rows.append((min(ran, key=lambda r: r["ratio"]["median"]), ran))
        if rows:
            yield dtype, rows


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of a table with a row for each size; cpuopt's time is of the rounds with the fastest peer."""
    peers = list(dict.fromkeys(r["peer"] for _, ran in rows for r in ran))
    parts = [*(f"{p} ms" for p in peers), "ratio" if len(peers) == 1 else "ratio to the fastest"]
    known = {  # records of earlier versions lack some
        "% of limit": of_limit,
        "% of peak": lambda r: " / ".join(of_peak(r, key) for key in SIDES) if r.get("of_peak") else "",
        "peak MB": lambda r: " / ".join(f"{r['peak_rss_mb'][key]:.0f}" for key in SIDES),
    }
    known = {title: write for title, write in known.items() if any(write(best) for best, _ in rows)}
    yield f"| B x T | cpuopt ms | {' | '.join([*parts, *known])} |"
    yield f"| --- |{' ---: |' * (len(parts) + len(known) + 1)}"
    for best, ran in rows:
        ours = best["step_ms"]["cpuopt"]["median"]
        theirs = {r["peer"]: r["step_ms"]["peer"]["median"] for r in ran}
        n = digits(min(ours, *theirs.values()))
        cells = [f"{ours:.{n}f}", *(f"{theirs[p]:.{n}f}" if p in theirs else "" for p in peers)]
        cells += [spread(best["ratio"], 2), *(write(best) for write in known.values())]
        yield f"| {size_of(best)} | {' | '.join(cells)} |"
    best = [row[0] for row in rows]
    if len(rows) > 1:
        mean = f"Geometric mean: {spread(geometric_mean([r['ratio'] for r in best]), 2)}"
        yield f"\n{', '.join([mean, *of_all_limits(best)])}."


def notes(results: Sequence[Mapping[str, Any]]) -> str:
    """Fold the doubts of all results into one line: those that differ in numbers alone become one, with their range."""
    numbers, places = re.compile(r"\d+(?:\.\d+)?"), dict[str, list[str]]()
    found = dict[str, list[list[str]]]()
    for r in results:
        for doubt in filter(None, [r["refused"], *r["doubts"]]):
            kind = numbers.sub("{}", doubt)
            found.setdefault(kind, []).append(numbers.findall(doubt))
            places.setdefault(kind, []).append(f"{size_of(r)} {r['peer']}")
    texts = []
    for kind, values in found.items():
        ranges = [sorted(set(column), key=float) for column in zip(*values, strict=True)]
        text = kind.format(*(f"{x[0]} to {x[-1]}" if len(x) > 1 else x[0] for x in ranges))
        where = places[kind]
        some = f" ({', '.join(where[:3])}{', ...' * (len(where) > 3)})"
        texts.append(text if len(where) == len(results) else text + some)
    return f"Notes: {'; '.join(texts)}." if texts else ""


def threads(record: Record) -> Iterator[str]:
    """Yield the part of a page on a step by number of threads."""
    step, tokens = record["step"], record["B"] * record["T"]
    yield f"## {record['model']} at {record['B']}x{record['T']} by number of threads"
    lines = [f"| threads | ms | tokens/s | efficiency | {', ms | '.join(REASONS)}, ms |", "| ---: |" + " ---: |" * 7]
    for n, ms in step["ms"].items():
        lost = [f"{x:.1f}" for x in step["lost_ms"][n].values()] if n in step["lost_ms"] else [""] * len(REASONS)
        cells = f"{ms:,.1f} | {1e3 * tokens / ms:,.0f} | {step['efficiency'][n]:.2f} | {' | '.join(lost)}"
        lines.append(f"| {n} | {cells} |")
    yield "\n".join(lines)
    yield "The last columns have what threads lose, by reason ([scaling.md](scaling.md))."
    yield f"Notes: {'; '.join(record['doubts'])}." if record["doubts"] else ""
    yield f"`scale.json`: {record['steps']} steps on each number of threads, float32; {record['time'][:10]}."


def section(name: str, record: Record) -> Iterator[str]:
    """Yield the part of a page that a record makes."""
    if record["kind"] == KINDS[1]:
        yield from threads(record)
        return
    model, peers = record["model"]["name"], dict.fromkeys(r["peer"] for r in record["results"])
    what, kind = "The suite" if model == "suite" else model, " in int8" if name == INT8 else ""
    yield f"## {what}{kind} beside {', '.join(peers) if len(peers) < 3 else 'PyTorch'}"
    for dtype, rows in classes(record):
        yield f"Products of {dtype}{BESIDE_INT8 if dtype == INT8 else ''}:"
        yield "\n".join(table(rows))
    if llmc := record.get("llmc"):
        ms = llmc["step_ms"]
        yield f"llm.c's C program takes {ms['median']:,.0f} ms a step ({ms['min']:,.0f} to {ms['max']:,.0f})."
    found = libraries(record["results"]).items()
    if products := [f"{p}: {x['products_by']}, {x['linear_gflops']:,.0f} GFLOP/s" for p, x in found]:
        yield f"What runs a product of 256x768 -> 3072: {'; '.join(products)}."
    if lines := tunings(record["results"]):
        yield f"Tuned: {'; '.join(lines)}."
    elif any(r["peer"] in PLAIN for r in record["results"]):
        yield UNTUNED
    yield notes(record["results"])
    if left := record.get("left_out"):
        yield f"Left out: {'; '.join(f'{peer} ({why})' for peer, why in left.items())}."
    here = record["machine"]
    versions = {
        **here["versions"],
        **{k: v for r in record["results"] for k, v in r["versions"].get("peer", {}).items()},
    }
    used = ", ".join(f"{name} {versions[name]}" for name in ("cpuopt", "numba", "numpy", "torch") if name in versions)
    yield (
        f"`{name}.json`: {record['threads']} threads, {record['rounds']} alternating rounds, load "
        f"{here['load_average'][0]:.1f} at the start; {used}; {record['time'][:10]}."
    )


def page(name: str, records: Mapping[str, Record]) -> str:
    """Return the page of a machine."""
    newest = max(records.values(), key=lambda r: r["time"])["machine"]
    sizes = {level: int(size.rstrip("K")) for level, size in newest["caches"].items() if level != "L1i"}
    caches = ", ".join(f"{level} {size:,} KB" for level, size in sizes.items())
    parts = [
        f"# {title(name)}",
        f"{newest['cpu']}, {newest['cores']} cores, {caches}, {newest['memory_bytes'] / 1e9:.0f} GB of memory. "
        f"`python benchmarks/results.py` makes this page from `benchmarks/records/{name}/`. "
        "[The overview](README.md) says what the columns are.",
        *(text for key, record in records.items() for text in section(key, record) if text),
    ]
    return "\n\n".join(parts) + "\n"


def title(name: str) -> str:
    """Return the title of a machine: its processor, and its cores if they are more than two."""
    processor, cores = re.fullmatch(r"(.+?)(?:-(\d+))?", name).groups()
    return NAMES.get(processor, processor) + (f", {cores} cores" if cores else "")


def overview(machines: Mapping[str, Mapping[str, Record]]) -> str:
    """Return the table of all machines."""
    types = " | ".join((*DTYPES, INT8))
    lines = [
        f"| processor | measured on | PyTorch | {types} | share of the limit | memory | losses differ by |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in dict.fromkeys([*NAMES, *machines]):
        records = machines.get(name, {})
        key = next((k for k in ("suite", "torch-eager", "front") if k in records), None)
        link = f"[{title(name)}]({name}.md)" if records else title(name)
        if not key:
            lines.append(f"| {link} | {NONE} |{f' {NONE} |' * 7}")
            continue
        found = dict(classes(records[key]))
        what = "the suite" if key == "suite" else f"{records[key]['model']['name']}, {len(found['float32'])} sizes"
        cells = [fastest(found.get(dtype)) for dtype in DTYPES]
        cells.append(fastest(dict(classes(records["int8"])).get(INT8)) if INT8 in records else NONE)
        best = [[row[0] for row in rows] for rows in found.values()]
        limits = [x.removesuffix(" of the limit") for results in best for x in of_all_limits(results)]
        memory = [geometric_mean([share(r["peak_rss_mb"]) for r in results])["median"] for results in best]
        cells += [", ".join(limits) or NONE, ", ".join(f"{m:.2f}" for m in memory), f"{apart(found['float32']):.0e}"]
        how = "tuned" if is_tuned(records[key]) else "as it comes"
        lines.append(f"| {link} | {what} | {how} | {' | '.join(cells)} |")
    return "\n".join(lines)


def is_tuned(record: Record) -> bool:
    """Return whether a record has PyTorch as those who know it run it."""
    return any(r["peer"] in TUNED for r in record["results"])


def share(of: Mapping[str, float]) -> dict[str, float]:
    """Return cpuopt's part of both sides' numbers, as a ratio without an interval."""
    return dict.fromkeys(("median", "low", "high"), of["cpuopt"] / of["peer"])


def fastest(rows: Sequence[Row] | None) -> str:
    """Write the geometric mean of the ratios to the fastest peer; a single peer is named."""
    if not rows:
        return NONE
    mean = f"{geometric_mean([row[0]['ratio'] for row in rows])['median']:.2f}"
    of = {r["peer"] for _, ran in rows for r in ran}
    return mean if len(of) > 1 else f"{mean} ({', '.join(of).removeprefix('torch-')} only)"


def apart(rows: Sequence[Row]) -> float:
    """Return the largest relative difference of the losses of both sides in the first steps."""
    pairs = [
        pair
        for _, ran in rows
        for r in ran
        if r["peer"] in PEERS
        for pair in zip(*(r["losses"][key][:CHECKED_STEPS] for key in SIDES), strict=True)
    ]
    return max(abs(a - b) / abs(b) for a, b in pairs)


def written(records: Path = RECORDS, pages: Path = PAGES) -> dict[Path, str]:
    """Return the text of every page and picture, by its file."""
    machines = {folder.name: found for folder in sorted(records.iterdir()) if (found := records_of(folder))}
    readme = pages / "README.md"
    made = {pages / f"{name}.md": page(name, found) for name, found in machines.items()}
    made[readme] = MACHINES.sub(lambda m: f"{m[1]}\n{overview(machines)}\n\n{m[2]}", readme.read_text())
    made |= chart.pictures(records, pages.parent)
    front = pages.parents[1] / "README.md"
    return made | {front: SUITE.sub(lambda m: f"{m[1]}{sentence(machines)}\n{m[2]}", made[front])}


def sentence(machines: Mapping[str, Mapping[str, Record]]) -> str:
    """Return README's sentence on the suites beside a tuned PyTorch, with the figures of `overview`."""
    sizes, parts = set[int](), list[str]()
    for name in reversed(NAMES):
        record = machines.get(name, {}).get("suite", {"results": []})
        found = dict(classes(record))
        if len(found) == len(DTYPES) and is_tuned(record):
            sizes |= {len(rows) for rows in found.values()}
            words = ("", "") if parts else (" times as long in float32", " times in bf16")
            times = [fastest(found[dtype]) + text for dtype, text in zip(DTYPES, words, strict=True)]
            parts.append(f"{' and '.join(times)} on {'a ' * name.startswith('xeon')}{NAMES[name]}")
    *most, last = parts
    text = (
        f"On {' to '.join(map(str, sorted(sizes)))} model and batch sizes, PyTorch's fastest mode, with MKL's AVX-512 "
        f"code and an allocator that keeps memory, takes on average {', '.join(most)}, and {last} (a step, two cores)."
    )
    return textwrap.fill(text, 120)


def name_of_this_machine() -> str:
    """Return the usual name of a folder for this processor."""
    import llvmlite.binding

    cpu, target = machine.describe()["cpu"], llvmlite.binding.get_host_cpu_name()
    xeon = "xeon-amx" if llvmlite.binding.get_host_cpu_features().get("amx-bf16") else "xeon"
    processor = target.replace("znver", "zen") if "znver" in target else xeon if "Xeon" in cpu else target
    return processor + (f"-{machine.cores()}" if machine.cores() > 2 else "")


def measure(args: argparse.Namespace, run: Callable[..., Any] = subprocess.run) -> None:
    """Measure this machine, and write its records.

    Raises
    ------
    SystemExit
        If something is missing, or a measurement fails.
    """
    python = Path(args.peer_python)
    found = run([str(python), "-c", "import torch"], capture_output=True, check=False) if python.exists() else None
    if found is None or found.returncode:
        raise SystemExit(
            f"results: {str(python)!r} has no PyTorch. 'make {os.path.relpath(python)}' installs it, or name a Python "
            "that has it: make results PEERS=/path/to/python"
        )
    if args.llmc and not args.llmc.is_file():
        raise SystemExit(f"results: --llmc {args.llmc}: there is no such program; {__doc__.splitlines()[0]}")
    folder = RECORDS / (args.machine or name_of_this_machine())
    folder.mkdir(parents=True, exist_ok=True)
    verb = [sys.executable, "-m", "cpuopt"]
    run([*verb, "machine"], check=False, stdout=subprocess.DEVNULL)  # which says what the machine lacks
    for name in args.only:
        out = folder / f"{name}.json"
        if name == "scale":
            done = run([*verb, "scale", *RUNS[name], "--json"], check=False, stdout=subprocess.PIPE)
            if done.returncode:
                raise SystemExit(f"results: the measurement of {name!r} failed, see above")
            about = {"kind": KINDS[1], **machine.origin(), "machine": machine.describe()}
            out.write_text(json.dumps(about | json.loads(done.stdout), indent=1) + "\n")
            continue
        command = [*verb, "bench", *RUNS[name], "--rounds", str(args.rounds)]
        done = run([*command, "--peer-python", str(python), "--out", str(out)], check=False, stdout=subprocess.DEVNULL)
        if done.returncode not in (0, 1):  # 1: a peer was refused, and the record has the reason
            raise SystemExit(f"results: the measurement of {name!r} failed, see above; {out} has what was measured")
        if name == "front" and args.llmc:
            record = json.loads(out.read_text())
            out.write_text(json.dumps(record | {"llmc": llmc_record(args.llmc, record["threads"])}, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pages, or with ``--check`` name those that are out of date."""
    p = argparse.ArgumentParser(description="Make docs/results/ from benchmarks/records/.")
    p.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a page is out of date")
    p.add_argument("--measure", action="store_true", help="measure this machine first, for about an hour")
    p.add_argument("--machine", help="name of its folder; the processor's by default")
    p.add_argument("--only", type=lambda text: text.split(","), default=list(RUNS), help=f"records: {','.join(RUNS)}")
    p.add_argument("--rounds", type=int, default=8, help="rounds of each comparison (%(default)s)")
    p.add_argument("--peer-python", default=sys.executable, help="a Python that has PyTorch; this one by default")
    p.add_argument("--llmc", type=Path, help="llm.c's compiled train_gpt2, for the record 'front'")
    args = p.parse_args(argv)
    if unknown := set(args.only) - set(RUNS):
        p.error(f"--only {', '.join(unknown)}: expected some of {', '.join(RUNS)}")
    if args.measure:
        measure(args)
    status, made = 0, written()
    for file, text in made.items():
        if file.exists() and file.read_text() == text:
            continue
        if args.check:
            print(f"{file} is out of date: python benchmarks/results.py", file=sys.stderr)
            status = 1
        else:
            file.write_text(text)
    for stray in (page for page in PAGES.glob("*.md") if page.stem.partition("-")[0] in NAMES and page not in made):
        print(f"{stray} has no records: remove it", file=sys.stderr)
        status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())

"""A race to a validation loss: cpuopt and PyTorch's fastest mode, same model, data order and schedule; docs/race.md.

::

    python benchmarks/race.py --peer-python PATH --out benchmarks/records/race-zen4.json
    python benchmarks/race.py --check       # or --write: docs/race.md from the records

Each run is a process of its own, and the sides take turns, A B B A over the seeds. A seed fixes the initial
weights and the order of the text. The clock of training does not run during validations. The first run of each
side, with empty caches of compiled code, is only started, to measure what compiling takes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from math import log
from pathlib import Path
from typing import Any

import numpy as np
from curves import LONGEST_S, T_95, interval, request_of, settings_of, text_of, trained
from flags import begun, keep

from cpuopt.isolate.process import Side, Worker
from cpuopt.isolate.serve import serve
from cpuopt.machine import describe
from cpuopt.train.job import Job, prepare

HERE = Path(__file__).resolve()
PAGE, RECORDS = HERE.parents[1] / "docs" / "race.md", HERE.with_name("records")
BEGIN, END = "<!-- race -->", "<!-- /race -->"
BATCHES = 20
"""The batches of a validation."""
LLAMA = {
    "model": "llama", "vocab_size": 256, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6,
    "num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 64, "max_position_embeddings": 256,
}  # fmt: skip
RECIPES: dict[str, dict[str, Any]] = {
    "nano": {"model": "gpt2-nano", "B": 12, "T": 64, "steps": 2000, "lr": 1e-3, "bits": 2.6, "limit_s": 1e9},
    "llama": {"model": json.dumps(LLAMA), "B": 8, "T": 256, "steps": 600, "lr": 1e-3, "bits": None, "limit_s": 300.0},
}
"""The runs: a model, a batch, a schedule, the loss in bits per byte, and the seconds of training at which one ends."""


def job_of(recipe: Mapping[str, Any], seed: int, threads: int | None) -> Job:
    """Make the job of cpuopt's run."""
    own = {k: recipe[k] for k in ("model", "B", "T", "steps", "lr", "dtype")}
    return prepare(settings_of(seed, threads, **own))


def own(request: Mapping[str, Any], say: object) -> dict[str, Any]:
    """Train with cpuopt; return what `race_worker.run` does."""
    job = job_of(request, request["seed"], request["threads"])
    text, ready = text_of(job, BATCHES), time.time() - request["began"]
    points = trained(job, text, request["every"], request["limit_s"])
    return {"ready_s": ready, "points": points, "waiting": describe()["waiting"]}


def ask(command: Sequence[str], do: str, request: Mapping[str, Any], caches: str | None = None) -> dict[str, Any]:
    """Run a side in a process; with a folder for `caches`, as on a machine that has compiled nothing yet."""
    new = {"CPUOPT_CACHE_DIR": f"{caches}/cpuopt", "TORCHINDUCTOR_CACHE_DIR": f"{caches}/torch"} if caches else {}
    threads = {"OMP_NUM_THREADS": str(request["threads"]), "NUMBA_NUM_THREADS": str(request["threads"])}
    began = time.time()
    with Worker(Side(command[0], tuple(command), {}, threads | new), limit_s=LONGEST_S) as worker:
        return worker.ask(do, **request, began=began)


def race(
    recipe: dict[str, Any], python: str, seeds: int, threads: int | None, out: Path | None, peer: str | None = None
) -> dict[str, Any]:
    """Run all seeds of both sides, and return the record, which `out` gets after each run.

    Parameters
    ----------
    peer : PyTorch's mode; None: the fastest here.
    """
    commands = {
        "cpuopt": [sys.executable, str(HERE), "--serve"],
        "PyTorch": [python, str(HERE.with_name("race_worker.py"))],
    }
    record = begun("race", format=1)
    with tempfile.TemporaryDirectory(prefix="cpuopt-race-") as folder:
        jobs = (job_of(recipe, seed, threads) for seed in range(seeds))
        asked = [request_of(job, text_of(job, BATCHES), folder) for job in jobs]
        common = {k: recipe[k] for k in ("every", "limit_s")}
        ours = {**recipe, "threads": asked[0]["threads"]}
        found = ask(commands["PyTorch"], "probe", {**asked[0], **common, "modes": [peer] if peer else None})
        peer = min(found["modes"], key=found["modes"].__getitem__)
        record |= {"recipe": ours, "text": asked[0]["text"], "torch": found["version"], "modes_s": found["modes"]}
        record |= {"peer": peer, "tuning": found["tuning"], "cold_s": {}, "runs": []}

        def run(side: str, seed: int, **more: Any) -> dict[str, Any]:
            theirs = {**asked[seed], **common, "peer": peer}
            request = {**(ours if side == "cpuopt" else theirs), "seed": seed, **more}
            return ask(commands[side], "run", request, more.get("caches"))

        for side in commands:
            short = {"caches": f"{folder}/{side}", "limit_s": 0.0}
            record["cold_s"][side] = run(side, 0, **short)["ready_s"]
        for seed in range(seeds):
            for side in [*commands][:: -1 if seed % 2 else 1]:
                record["runs"].append({"side": side, "seed": seed, **run(side, seed)})
                print(f"{side}, seed {seed}: {record['runs'][-1]['points'][-1]}", file=sys.stderr, flush=True)
                keep(record, out)
    return record


def seconds_to(points: Sequence[Sequence[float]], bits: float) -> float | None:
    """Return the seconds of training until the first validation at or below a loss in bits per byte."""
    return next((seconds for _, seconds, loss in points if loss / log(2) <= bits), None)


def spread(values: Sequence[float | None], digits: int = 1) -> str:
    """Write a mean with its 95 % interval; a seed that did not get there is counted."""
    known = [v for v in values if v is not None]
    if len(known) < len(values):
        return f"{len(values) - len(known)} of {len(values)} not there"
    if len(known) not in T_95:
        return f"{np.mean(known):.{digits}f}"
    mean, half = interval(known)
    return f"{mean:.{digits}f} ± {half:.{digits}f}"


def table(record: Mapping[str, Any]) -> list[str]:
    """Write a record as a table of docs/race.md."""
    recipe, sides = record["recipe"], [*record["cold_s"]]
    by = {side: sorted((r for r in record["runs"] if r["side"] == side), key=lambda r: r["seed"]) for side in sides}
    last = {side: [r["points"][-1][2] / log(2) for r in runs] for side, runs in by.items()}
    bits = recipe["bits"] or max(max(ended) for ended in last.values())
    found = {side: [seconds_to(r["points"], bits) for r in runs] for side, runs in by.items()}
    head = f"seconds to {bits:.3f} bits a byte"
    lines = [f"| | {head} | with compiling, caches empty | ms a step | bits a byte at the end | steps |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: |")
    for side, runs in by.items():
        cold = [None if s is None else s + record["cold_s"][side] for s in found[side]]
        ms = [1e3 * r["points"][-1][1] / r["points"][-1][0] for r in runs]
        steps = f"{np.mean([r['points'][-1][0] for r in runs]):,.0f}"
        how = "tuned" if record.get("tuning") else "as it comes"  # of records of earlier versions
        name = side if side == "cpuopt" else f"{side} {how}, {record['peer']}"
        cells = [spread(found[side]), spread(cold), spread(ms), spread(last[side], 3), steps]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    if all(None not in f for f in found.values()):
        ratios = [b / a for a, b in zip(found["cpuopt"], found["PyTorch"], strict=True)]
        lines += ["", f"PyTorch's seconds over cpuopt's, by seed: {spread(ratios, 2)}."]
    versions = f"cpuopt {record['machine']['versions']['cpuopt']}, torch {record['torch']}"
    load = record["machine"]["load_average"][0]
    lines += [
        "",
        f"{recipe['B']}x{recipe['T']}, {recipe['steps']:,} steps, {len(by['cpuopt'])} seeds, {recipe['dtype']}, "
        f"{recipe['threads']} threads; {record['machine']['cpu']}, load average {load:.1f}; {versions}; text "
        f"{str(record['text'])[:16]}; {record['time'][:10]}.",
    ]
    return lines


def page(text: str, records: Sequence[Path]) -> str:
    """Put the tables of some records into the page."""
    parts = []
    for path in records:
        record = json.loads(path.read_text())
        parts += [f"### {path.stem}", "", *table(record), ""]
    before, _, rest = text.partition(BEGIN)
    shown = parts or ["No record yet: the command above makes one.", ""]
    return "\n".join([before + BEGIN, "", *shown, END]) + rest.partition(END)[2]


def main() -> int:
    """Race, or make the page."""
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--recipe", choices=list(RECIPES), default="nano")
    p.add_argument("--peer-python", help="a Python that has torch")
    p.add_argument("--peer", metavar="MODE", help="PyTorch's mode, as in eager; default: all are tried")
    p.add_argument("--out", type=Path, help="write the record to this file")
    p.add_argument("--seeds", type=int, default=5, choices=sorted(T_95))
    p.add_argument("--steps", type=int, help="fewer steps, to try it")
    p.add_argument("--dtype", default="bf16", choices=["float32", "bf16"], help="of cpuopt's side (%(default)s)")
    p.add_argument("--threads", type=int)
    p.add_argument("--every", type=int, default=50, help="steps between validations (%(default)s)")
    p.add_argument("--write", action="store_true", help="write the tables of docs/race.md, and measure nothing")
    p.add_argument("--check", action="store_true", help="exit with status 1 if docs/race.md is out of date")
    p.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.serve:
        serve({"run": own})
        return 0
    if a.write or a.check:
        old = PAGE.read_text()
        new = page(old, sorted(RECORDS.glob("race-*.json")))
        if a.write:
            PAGE.write_text(new)
        return int(a.check and old != new)
    if not a.peer_python:
        p.error("--peer-python: name a Python that has torch")
    recipe = {**RECIPES[a.recipe], "dtype": a.dtype, "every": a.every}
    recipe["steps"] = a.steps or recipe["steps"]
    print("\n".join(table(race(recipe, a.peer_python, a.seeds, a.threads, a.out, a.peer))))
    return 0


if __name__ == "__main__":
    sys.exit(main())

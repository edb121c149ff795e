"""The plan of ``cpuopt train --dry-run`` beside the run: whole time from start to end of the process, and peak memory.

::

    python benchmarks/plans.py --out benchmarks/records/zen4/plans.json [--rounds 3] [--threads 1]
    python benchmarks/plans.py --show benchmarks/records/zen4/plans.json     # the table of docs/finetune.md

Plan and run take turns, because a busy machine is slower at one time than at another.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from flags import begun, keep, known, recorded, some_of

QUESTIONS = Path(__file__).parents[1] / "examples" / "questions.jsonl"
JOBS = {
    "lora": f"--model smollm2-135M --data {QUESTIONS} -B 1 -T 112 --dtype bf16 --lora r=8 --steps 48 --val-every 12 "
    "--save adapter",
    "full": "--model gpt2-124M -B 1 -T 64 --dtype bf16 --steps 60 --val-every 20 --save-every 20 --save tuned",
    "packed": f"--model stories15M --data {QUESTIONS} -B 1 -T 256 --pack --steps 100 --val-every 10",
}
"""Flags of each job."""
TITLES = {
    "lora": "smollm2-135M 1x112, LoRA in bf16, 48 steps, 5 validations",
    "full": "gpt2-124M 1x64, all weights in bf16, 60 steps, 4 validations, 3 checkpoints",
    "packed": "stories15M 1x256, packed chats, 100 steps, 11 validations",
}


def ran(flags: list[str]) -> dict[str, Any]:
    """Run ``cpuopt train`` in a folder of its own; return what it says, and the seconds of its process."""
    with TemporaryDirectory(prefix="cpuopt-plans-") as folder:
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "cpuopt", "train", *flags, "--json"], cwd=folder, stdout=subprocess.PIPE, check=True
        )
        return {**json.loads(done.stdout), "took": time.perf_counter() - start}


def measured(job: str, rounds: int, threads: int | None) -> dict[str, Any]:
    """Plan and run a job some times."""
    flags = JOBS[job].split() + ([] if threads is None else ["--threads", str(threads)])
    ran([*flags, "--dry-run"])  # which compiles, and measures the machine's roofs
    pairs = []
    for _ in range(rounds):
        plan, run = ran([*flags, "--dry-run"]), ran(flags)
        parts = ("seconds", "start_s", "step_ms", "validation_s", "saving_s", "peak")
        pairs.append({
            "planned": {name: plan[name] for name in parts}, "took": run["took"], "peak": run["peak_rss_bytes"],
            "step_ms": run["step_ms_median"], "load": os.getloadavg()[0],
        })  # fmt: skip
        print(f"# {job}: {pairs[-1]}", file=sys.stderr)
    return {"job": job, "flags": JOBS[job].replace(f"{QUESTIONS}", QUESTIONS.name), "rounds": pairs}


def table(record: Mapping[str, Any]) -> Iterator[str]:
    """Write a record as the table of docs/finetune.md."""
    yield "| run | planned, s | took, s | off, % | planned peak, GB | peak, GB | off, % |"
    yield f"| --- |{' ---: |' * 6}"
    for row in record["rows"]:
        rounds = row["rounds"]
        times = [(r["planned"]["seconds"], r["took"]) for r in rounds]
        peaks = [(r["planned"]["peak"] / 1e9, r["peak"] / 1e9) for r in rounds]
        cells = []
        for pairs, form in ((times, ",.0f"), (peaks, ",.2f")):
            cells += [", ".join(f"{x[i]:{form}}" for x in pairs) for i in (0, 1)]
            cells += [", ".join(f"{round(100 * (plan / real - 1)):+d}" for plan, real in pairs)]
        yield f"| {TITLES[row['job']]} | {' | '.join(cells)} |"
    loads = median(r["load"] for row in record["rows"] for r in row["rounds"])
    how = "all cores" if record["threads"] is None else f"{record['threads']} thread"
    yield ""
    yield f"{record['machine']['cpu']}, {how}, load average {loads:.1f}; {record['time'][:10]}."


def main() -> None:
    """Measure, or show a record."""
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--only", type=some_of([*JOBS]), default=[*JOBS], help="jobs, with commas between")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--threads", type=int)
    a = recorded(p, table, "kept if they are of other jobs")
    rows = known(a.out).get("rows", [])
    for job in a.only:
        rows = [row for row in rows if row["job"] != job] + [measured(job, a.rounds, a.threads)]
        rows.sort(key=lambda row: [*JOBS].index(row["job"]))
        record = begun("plans", threads=a.threads, rows=rows)
        keep(record, a.out)
    print("\n".join(table(record)))


if __name__ == "__main__":
    main()

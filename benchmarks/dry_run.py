"""How far a dry run's time and memory are from the run: three jobs, each planned and run in processes of their own.

::

    python benchmarks/dry_run.py [--busy] [--only 0,1,2]

With ``--busy`` each process has one thread, and its processor time counts: for a machine that others use.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

QUESTIONS = str(Path(__file__).parents[1] / "examples" / "questions.jsonl")
CHATS = {"data": QUESTIONS, "B": 4, "dtype": "bf16", "lr": 1e-4}
JOBS: list[dict[str, Any]] = [
    {"model": "smollm2-135M", **CHATS, "T": 64, "lora": "r=8", "steps": 24, "val_every": 12},
    {"model": "gpt2-124M", "B": 2, "T": 64, "steps": 24, "val_every": 0},
    {"model": "llama-tiny", **CHATS, "T": 60, "steps": 2000, "val_every": 100},
]
TIME, MEMORY = 0.15, 0.05
"""How far the plan of a run may be off."""


def serve(what: str) -> dict[str, float]:
    """Plan or run the job that is in the input; return its seconds and the peak of this process, in GB."""
    from cpuopt.measure import rates
    from cpuopt.report.console import TrainingView
    from cpuopt.train.forecast import forecast, measured
    from cpuopt.train.job import Settings, prepare
    from cpuopt.train.trainer import train

    request = json.loads(sys.stdin.readline())
    clock = time.process_time if request["busy"] else time.perf_counter
    settings = Settings(**request["job"], threads=1 if request["busy"] else None)
    if what == "plan":
        job = prepare(settings)  # first, as the command does
        roofs = rates.roofs(job.engine.threads)
        found = measured(forecast(settings, roofs), job, clock)
        assert found.peak is not None
        return {"seconds": found.seconds, "gb": found.peak / 1e9}
    job = prepare(settings)
    start = clock()
    with tempfile.TemporaryDirectory() as runs, TrainingView(job, quiet=True) as view:
        train(job, Path(runs), view)
    seconds = clock() - start
    return {"seconds": seconds, "gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6}


def main() -> int:
    """Compare the jobs; return the exit status."""
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--busy", action="store_true", help="count the processor time of one thread")
    p.add_argument("--only", default="0,1,2", help="the numbers of the jobs")
    p.add_argument("--side", choices=["plan", "run"], help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.side:
        print(json.dumps(serve(a.side)))
        return 0
    print("| job | planned, s | took, s | off | planned, GB | peak, GB | off |")
    print(f"| --- |{' ---: |' * 6}")
    good = True
    for number in map(int, a.only.split(",")):
        job, found = JOBS[number], {}
        for side in ("plan", "run"):
            asked = json.dumps({"job": job, "busy": a.busy}) + "\n"
            command = [sys.executable, __file__, "--side", side]
            done = subprocess.run(command, input=asked, stdout=subprocess.PIPE, text=True, check=True)
            found[side] = json.loads(done.stdout.splitlines()[-1])
        off = {x: found["plan"][x] / found["run"][x] - 1 for x in ("seconds", "gb")}
        good &= abs(off["seconds"]) <= TIME and abs(off["gb"]) <= MEMORY
        name = (
            f"{job['model']} {job['B']}x{job['T']}, {'LoRA' if 'lora' in job else 'all weights'}, {job['steps']} steps"
        )
        cells = [f"{found[side][x]:.{n}f}" for x, n in (("seconds", 1), ("gb", 3)) for side in ("plan", "run")]
        cells[2:2], cells[6:6] = [f"{100 * off['seconds']:+.0f} %"], [f"{100 * off['gb']:+.1f} %"]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

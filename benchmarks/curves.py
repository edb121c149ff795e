"""Does it train as well: validation loss over steps with float32, and by what is bfloat16, here and in PyTorch.

::

    python benchmarks/curves.py --out benchmarks/records/curves.json [--peer-python PATH] [--seeds 5] [--steps 1000]
    python benchmarks/curves.py --show benchmarks/records/curves.json

All train GPT-2 with 4 layers of 128 on the bytes of Python's standard library, 12 rows of 64 tokens a step, with AdamW,
a warm-up of 100 steps and a cosine to a tenth of the peak. A seed fixes the initial weights and the order of the text,
which PyTorch's side reads from files. Validation is on the same 50 batches, in the types of the training. A difference
between schemes is taken seed by seed, so that what the seeds do is not in its interval.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from cpuopt.files import write_whole
from cpuopt.lab.peers.plan import OPTIMIZER
from cpuopt.machine import describe
from cpuopt.train.job import Job, Settings, named, prepare
from cpuopt.train.schedule import rate

Array = np.ndarray[Any, Any]
EVERY, BATCHES = 100, 50
"""The steps between validations, and the batches of one."""
SCHEMES: dict[str, dict[str, str]] = {
    "float32": {},
    "bf16": {"dtype": "bf16"},
    "bf16, bf16 moments": {"dtype": "bf16", "moments": "bf16"},
    "bf16, bf16 weights and moments": {"dtype": "bf16", "moments": "bf16", "weights": "bf16"},
}
KERNELS = (str(Path(__file__).with_name("int8_kernels.py")),)
INT8: dict[str, dict[str, Any]] = {
    name: {"fuse": "none", "kernels": KERNELS, "swap": (f"matmul@{layers}={variant}",)}
    for name, layers, variant in (
        ("int8", "h.*", "int8"),
        ("int8, gradients to nearest", "h.*", "int8-nearest"),
        ("int8, a scale for each 64", "h.*", "int8-blocks"),
        ("int8, the head too", "*", "int8"),
    )
}
"""The schemes whose products are in int8, by the NumPy kernels of ``int8_kernels.py``, which take minutes a seed."""
UNJUDGED = {"require_right": lambda *args, **more: [], "judge_first_step": lambda job: []}
PEERS = {"PyTorch, autocast to bf16": "autocast", "PyTorch, all in bf16": "all"}
"""What is bfloat16 in PyTorch, as `peer_worker.py` has it."""
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t of a 95 % interval, by the number of values."""


def settings_of(seed: int, steps: int, threads: int | None, **scheme: Any) -> Settings:
    """Return the settings of a run."""
    how = {"lr": 1e-3, "schedule": "cosine", "warmup_steps": min(100, steps // 2), "lr_end": 0.1, "guard": "off"}
    sizes = {"B": 12, "T": 64, "steps": steps, "seed": seed, "threads": threads}
    return Settings(model="gpt2-nano", val_every=0, **sizes, **how, **scheme)


def ours(job: Job, text: list[dict[str, Array]]) -> list[float]:
    """Train, and return the validation losses."""
    found = []
    while True:
        if job.done % EVERY == 0:
            found.append(float(np.mean([job.engine.forward(**batch) for batch in text])))
        if job.done == job.settings.steps:
            return found
        job.take_step()


def theirs(python: str, bf16: str, jobs: list[Job], text: list[dict[str, Array]]) -> tuple[list[list[float]], str]:
    """Train PyTorch's model on what some jobs begin with and read; return validation losses, and torch's version."""
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/val.npy", np.array([[b["tokens"], b["targets"]] for b in text]))
        asked = []
        for job in jobs:
            s = job.settings
            read = [named(job.batches.at(n)) for n in range(s.steps)]
            np.save(f"{folder}/batches-{s.seed}.npy", np.array([[b["tokens"], b["targets"]] for b in read]))
            np.savez(f"{folder}/params-{s.seed}.npz", **job.engine.parameters())
            end = s.lr * s.lr_end
            lrs = [
                rate(s.schedule, n + 1, steps=s.steps, warmup=s.warmup_steps, peak=s.lr, end=end)
                for n in range(s.steps)
            ]
            files = {"batches": f"{folder}/batches-{s.seed}.npy", "params": f"{folder}/params-{s.seed}.npz"}
            asked.append({**files, "lrs": lrs})
        request = {
            "bf16": bf16,
            "sizes": asdict(jobs[0].config),
            "threads": jobs[0].engine.threads,
            "optimizer": OPTIMIZER,
            "val": f"{folder}/val.npy",
            "every": EVERY,
            "jobs": asked,
        }
        worker = Path(__file__).with_name("curve_worker.py")
        done = subprocess.run([python, str(worker)], input=json.dumps(request), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"PyTorch's side ended with status {done.returncode}: {done.stderr[-2000:]}")
    answer = json.loads(done.stdout)
    return answer["losses"], answer["version"]


def measure(
    seeds: int, steps: int, schemes: list[str], python: str | None, known: dict[str, Any], threads: int | None
) -> dict[str, Any]:
    """Train each scheme with each seed, but those that a record already has; return the record."""
    record = {"kind": "cpuopt-curves", "machine": describe(), "every": EVERY, "steps": steps, "curves": {}} | known
    curves: dict[str, list[list[float]]] = record["curves"]
    for name in schemes:
        if name in curves:
            continue
        for seed in range(seeds):
            # the judge would refuse products in int8, since they are not those of float32
            with patch.multiple("cpuopt.train.job", **UNJUDGED) if name in INT8 else nullcontext():
                job = prepare(settings_of(seed, steps, threads, **(SCHEMES | INT8)[name]))
            val = job.corpus.batches("val", job.settings.B, job.settings.T)
            text = [named(val.at(n)) for n in range(BATCHES)]
            curves.setdefault(name, []).append(ours(job, text))
            print(f"{name}, seed {seed}: {curves[name][-1][-1]:.4f}", file=sys.stderr, flush=True)
    for name, bf16 in PEERS.items() if python else ():
        if name in curves:
            continue
        jobs = [prepare(settings_of(seed, steps, threads)) for seed in range(seeds)]
        val = jobs[0].corpus.batches("val", jobs[0].settings.B, jobs[0].settings.T)
        text = [named(val.at(n)) for n in range(BATCHES)]
        curves[name], record["torch"] = theirs(python or "", bf16, jobs, text)
        print(f"{name}: {curves[name][-1][-1]:.4f}", file=sys.stderr, flush=True)
    return record


def interval(values: list[float]) -> tuple[float, float]:
    """Return the mean, and half the width of its 95 % interval."""
    return float(np.mean(values)), T_95[len(values)] * float(np.std(values, ddof=1)) / len(values) ** 0.5


def table(record: dict[str, Any]) -> list[str]:
    """Write the record as tables of docs/precision.md."""
    curves, every = record["curves"], record["every"]
    at = range(0, record["steps"] + 1, 5 * every)
    lines = ["| steps | " + " | ".join(curves) + " |", "| ---: |" + " ---: |" * len(curves)]
    for step in at:
        means = [f"{np.mean([run[step // every] for run in runs]):.4f}" for runs in curves.values()]
        lines.append(f"| {step:,} | " + " | ".join(means) + " |")
    seeds = len(next(iter(curves.values())))
    lines += [
        "",
        f"| after {record['steps']:,} steps | loss, mean of {seeds} seeds | lowest, highest | minus float32, by seed |",
    ]
    lines.append("| --- | ---: | ---: | ---: |")
    usual = [run[-1] for run in curves["float32"]]
    for name, runs in curves.items():
        last = [run[-1] for run in runs]
        mean, half = interval([a - b for a, b in zip(last, usual, strict=True)])
        apart = "" if name == "float32" else f"{mean:+.4f} ± {half:.4f}"
        lines.append(f"| {name} | {np.mean(last):.4f} | {min(last):.4f}, {max(last):.4f} | {apart} |")
    return lines


def main() -> None:
    """Measure, or show a record."""
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--out", type=Path, help="write the record to this file; schemes that it has are not trained again")
    p.add_argument("--show", type=Path, help="print the tables of this record, and measure nothing")
    p.add_argument("--peer-python", help="a Python that has torch; without one, PyTorch is left out")
    p.add_argument("--seeds", type=int, default=5, choices=sorted(T_95))
    p.add_argument("--steps", type=int, default=1000)
    p.add_argument("--threads", type=int)
    p.add_argument("--scheme", action="append", choices=[*SCHEMES, *INT8], help="default: all but int8")
    a = p.parse_args()
    if a.show:
        record = json.loads(a.show.read_text())
    else:
        known = json.loads(a.out.read_text()) if a.out and a.out.exists() else {}
        record = measure(a.seeds, a.steps, a.scheme or list(SCHEMES), a.peer_python, known, a.threads)
        if a.out:
            write_whole(a.out, [json.dumps(record, indent=1).encode() + b"\n"])
    print("\n".join(table(record)))


if __name__ == "__main__":
    main()

"""Does it train as well: validation loss over steps with float32, and by what is bfloat16, here and in PyTorch.

::

    python benchmarks/curves.py --out benchmarks/records/curves.json [--peer-python PATH] [--seeds 5] [--steps 1000]
    python benchmarks/curves.py --show benchmarks/records/curves.json

All train GPT-2 with 4 layers of 128, or another of `MODELS`, on the bytes of Python's standard library, 12 rows of 64
tokens a step, with AdamW, a warm-up of 100 steps and a cosine to a tenth of the peak. A seed fixes the initial weights
and the order of the text, which PyTorch's side reads from files. Validation is on the same 50 batches, in the types of
the training. A difference between schemes is taken seed by seed, so that what the seeds do is not in its interval.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from flags import begun, keep, known, recorded

from cpuopt.isolate.process import Side, Worker
from cpuopt.lab.peers.plan import OPTIMIZER
from cpuopt.train.job import Job, Settings, prepare
from cpuopt.train.schedule import rate
from cpuopt.train.steps import named

Array = np.ndarray[Any, Any]
EVERY, BATCHES = 100, 50
"""The steps between validations, and the batches of one."""
SCHEMES: dict[str, dict[str, str]] = {
    "float32": {},
    "bf16": {"dtype": "bf16"},
    "int8": {"dtype": "int8"},
    "bf16, bf16 moments": {"dtype": "bf16", "moments": "bf16"},
    "bf16, bf16 weights and moments": {"dtype": "bf16", "moments": "bf16", "weights": "bf16"},
}
KERNELS = (str(Path(__file__).with_name("int8_kernels.py")),)
INT8: dict[str, dict[str, Any]] = {
    name: {"fuse": "none", "kernels": KERNELS, "swap": (f"matmul@{layers}={variant}",)}
    for name, layers, variant in (
        ("int8, gradients to nearest", "h.*", "int8-nearest"),
        ("int8, a scale for each 64", "h.*", "int8-blocks"),
        ("int8, the head too", "*", "int8"),
    )
}
"""Other schemes of products in int8, by the NumPy kernels of ``int8_kernels.py``, which take minutes a seed."""
LLAMA = {
    "model": "llama", "vocab_size": 256, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}  # fmt: skip
MODELS = {"gpt2-nano": "gpt2-nano", "llama-10M": json.dumps(LLAMA)}
"""The models by name: GPT-2 with 4 layers of 128, and a Llama with 6 layers of 384, of 9.5 million parameters."""
UNJUDGED = {"require_right": lambda *args, **more: [], "judge_first_step": lambda job: []}
PEERS = {"PyTorch, autocast to bf16": "autocast", "PyTorch, all in bf16": "all in bf16"}
"""The modes of PyTorch, as `race_worker.py` has them."""
LONGEST_S = 24 * 3600.0
"""Seconds that a run may take."""
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t of a 95 % interval, by the number of values."""


def settings_of(seed: int, threads: int | None, *, steps: int, lr: float = 1e-3, **more: Any) -> Settings:
    """Return the settings of a run."""
    how = {"schedule": "cosine", "warmup_steps": min(100, steps // 2), "lr_end": 0.1, "guard": "off", "val_every": 0}
    return Settings(steps=steps, lr=lr, seed=seed, threads=threads, **how, **more)


def text_of(job: Job, batches: int) -> list[dict[str, Array]]:
    """Return the batches of a validation."""
    val = job.corpus.batches("val", job.settings.B, job.settings.T)
    return [named(val.at(n)) for n in range(batches)]


def trained(job: Job, text: list[dict[str, Array]], every: int, limit_s: float = inf) -> list[list[float]]:
    """Train; return steps, seconds of training and loss at each validation, the first before any step."""
    seconds, points = 0.0, list[list[float]]()
    while True:
        over = seconds > limit_s or job.done == job.settings.steps
        if job.done % every == 0 or over:
            points.append([job.done, seconds, float(np.mean([job.engine.forward(**batch) for batch in text]))])
        if over:
            return points
        start = time.perf_counter()
        job.take_step()
        seconds += time.perf_counter() - start


def request_of(job: Job, text: list[dict[str, Array]], folder: str) -> dict[str, Any]:
    """Write what PyTorch's side of a job begins with and reads; return its request for `race_worker.py`."""
    s = job.settings
    files = {name: f"{folder}/{s.seed}-{name}" for name in ("batches.npy", "val.npy", "params.npz")}
    for name, read in ("batches.npy", [named(job.batches.at(n)) for n in range(s.steps)]), ("val.npy", text):
        np.save(files[name], np.array([[b["tokens"], b["targets"]] for b in read]))
    np.savez(files["params.npz"], **job.engine.parameters())
    how = {"steps": s.steps, "warmup": s.warmup_steps, "peak": s.lr, "end": s.lr * s.lr_end}
    return {
        **{name.partition(".")[0]: file for name, file in files.items()},
        "model": job.config.model,
        "sizes": asdict(job.config),
        "T": s.T,
        "threads": job.engine.threads,
        "optimizer": OPTIMIZER,
        "lrs": [rate(s.schedule, n + 1, **how) for n in range(s.steps)],
        "text": job.corpus.fingerprint,
    }


def measure(
    model: str,
    seeds: int,
    steps: int,
    schemes: list[str],
    python: str | None,
    before: dict[str, Any],
    threads: int | None,
) -> dict[str, Any]:
    """Train each scheme with each seed, but those that a record already has; return the record."""
    record = begun("curves", model=model, every=EVERY, steps=steps, curves={}) | before
    curves: dict[str, list[list[float]]] = record["curves"]
    known_ones = {*curves}

    def note(name: str, seed: int, points: list[list[float]]) -> None:
        curves.setdefault(name, []).append([loss for _, _, loss in points])
        print(f"{name}, seed {seed}: {points[-1][2]:.4f}", file=sys.stderr, flush=True)

    def job_of(name: str, seed: int) -> Job:
        scheme = {"model": MODELS[model], "B": 12, "T": 64, "steps": steps, **(SCHEMES | INT8)[name]}
        # the judge would refuse products in int8, since they are not those of float32
        with patch.multiple("cpuopt.train.job", **UNJUDGED) if name in INT8 else nullcontext():
            return prepare(settings_of(seed, threads, **scheme))

    for name, seed in ((name, seed) for name in schemes if name not in known_ones for seed in range(seeds)):
        job = job_of(name, seed)
        note(name, seed, trained(job, text_of(job, BATCHES), EVERY))
    for name in (name for name in PEERS if python and name not in known_ones):
        side = Side("PyTorch", (python or "", str(Path(__file__).with_name("race_worker.py"))))
        with tempfile.TemporaryDirectory() as folder, Worker(side, limit_s=LONGEST_S) as worker:
            for seed in range(seeds):
                job = job_of("float32", seed)
                asked = request_of(job, text_of(job, BATCHES), folder)
                found = worker.ask("run", **asked, peer=PEERS[name], every=EVERY, limit_s=LONGEST_S, began=time.time())
                record["torch"] = found["version"]
                note(name, seed, found["points"])
    return record


def interval(values: list[float]) -> tuple[float, float]:
    """Return the mean, and half the width of its 95 % interval."""
    return float(np.mean(values)), T_95[len(values)] * float(np.std(values, ddof=1)) / len(values) ** 0.5


def table(record: Mapping[str, Any]) -> list[str]:
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
    p.add_argument("--peer-python", help="a Python that has torch; without one, PyTorch is left out")
    p.add_argument("--model", default="gpt2-nano", choices=MODELS)
    p.add_argument("--seeds", type=int, default=5, choices=sorted(T_95))
    p.add_argument("--steps", type=int, default=1000)
    p.add_argument("--threads", type=int)
    p.add_argument("--scheme", action="append", choices=[*SCHEMES, *INT8], help="default: all but those of NumPy")
    a = recorded(p, table, "kept")
    record = measure(a.model, a.seeds, a.steps, a.scheme or list(SCHEMES), a.peer_python, known(a.out), a.threads)
    keep(record, a.out)
    print("\n".join(table(record)))


if __name__ == "__main__":
    main()

"""How exact are gradients in bfloat16: those of a whole step beside PyTorch's autocast, both judged in float64.

::

    python benchmarks/gradients.py --peer-python PATH [--models gpt2-nano:12x64,gpt2-124M:1x64]

Weights are those after a few steps of training. The reference is PyTorch's model in float64 with the same weights
rounded to bfloat16 where a product reads them, and nothing else rounded. The error of a gradient is the root of its
squared differences over that of the reference's squares: of all parameters together, and of the worst one.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from cpuopt.isolate.process import Side, Worker
from cpuopt.train.job import Settings, prepare

TRAINED = 20
"""The steps in float32 before the one whose gradients are compared."""


def row(model: str, size: str, python: str) -> str:
    """Compare the gradients of one model and size."""
    B, T = map(int, size.split("x"))
    settings = Settings(model=model, B=B, T=T, steps=TRAINED + 1, lr=1e-3, clip=1e9)  # which keeps all gradients
    trained = prepare(settings)
    for _ in range(TRAINED):
        trained.take_step()
    job = prepare(replace(settings, dtype="bf16"))
    for name, x in job.engine.parameters().items():
        x[...] = trained.engine.parameters()[name]
    batch = trained.micro_batches(TRAINED + 1)[0]
    job.engine.step(lr=0.0, weight_decay=0.0, clip=1e9, **batch)
    with tempfile.TemporaryDirectory() as folder:
        arrays = {"params": trained.engine.parameters(), "batch": batch, "gradients": job.engine.gradients()}
        for name, content in arrays.items():
            np.savez(f"{folder}/{name}.npz", **content)
        sizes = {"sizes": asdict(job.config), "model": job.config.model, "threads": job.engine.threads}
        with Worker(Side("PyTorch", (python, str(Path(__file__).with_name("gradient_worker.py"))))) as worker:
            ours, other = worker.ask("errors", folder=folder, T=T, mode="eager", **sizes)["errors"]
    better = sum(ours[n] <= other[n] for n in ours if n)
    worst = [max((e, n) for n, e in found.items() if n) for found in (ours, other)]
    cells = [f"{e[''] * 100:.3f} %" for e in (ours, other)] + [f"{e * 100:.2f} % {n}" for e, n in worst]
    return f"| {model} {size} | {' | '.join(cells)} | {better} of {len(ours) - 1} |"


def main() -> None:
    """Measure and print a table."""
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--peer-python", required=True, help="a Python that has torch")
    p.add_argument("--models", default="gpt2-nano:12x64,stories15M:4x64,gpt2-124M:1x64")
    a = p.parse_args()
    print(
        "| model | cpuopt bf16, all | PyTorch autocast, all | cpuopt, worst | autocast, worst | not above autocast's |"
    )
    print("| --- | ---: | ---: | --- | --- | ---: |")
    for item in a.models.split(","):
        print(row(*item.split(":"), a.peer_python), flush=True)


if __name__ == "__main__":
    main()

"""Compare GPT-2 124M with PyTorch: logits, loss, every gradient by name, and ten AdamW losses, on random tokens.

PyTorch computes in a process of its own, because two OpenMP runtimes must not share one; it hands over its values in
a temporary ``.npz`` of 0.6 GB. This process imports cpuopt and no PyTorch::

    python tests/golden/compare_124m.py [--torch-python PATH] [--variant VARIANT | torch-float64]

``torch-float64`` puts PyTorch in float64 in the place of cpuopt, which shows what float32 alone costs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from params import GPT2_124M, deviation, make_batch, make_params

SEED, BATCH, TIME, STEPS = 124, 4, 64, 10
ADAMW = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
TOLERANCE = 1e-4

Row = tuple[str, float, bool]


def make_inputs() -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Draw parameters, tokens and targets, the same in each process."""
    tokens, targets = make_batch(BATCH, TIME, GPT2_124M["vocab_size"], seed=SEED + 1, ignored=3)
    return make_params(**GPT2_124M, seed=SEED), tokens, targets


def compute_with_torch(path: Path, dtype_name: str) -> None:
    """Write PyTorch's values to `path`: ``logits``, ``loss``, ``grad/<name>``, ``losses``. Runs in the subprocess."""
    import torch
    from peer_gpt2 import GPT2, load, loss_of

    params, tokens, targets = make_inputs()
    x, y = torch.tensor(tokens, dtype=torch.int64), torch.tensor(targets, dtype=torch.int64)
    model = GPT2(**GPT2_124M).to(getattr(torch, dtype_name))
    load(model, params)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, fused=True)
    values: dict[str, np.ndarray] = {}
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        logits = model(x)
        loss = loss_of(logits, y)
        loss.backward()
        if step == 0:
            values |= {"logits": logits.detach().numpy(), "loss": np.float64(loss.item())}
            values |= {f"grad/{name}": p.grad.numpy().copy() for name, p in model.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    np.savez(path, **values, losses=np.array(losses))


@contextmanager
def cpuopt_values(variant: str) -> Iterator[Mapping[str, np.ndarray]]:
    """Give cpuopt's values, by the same names. The gradients come from a program without rewrites."""
    from cpuopt import Choice
    from cpuopt.engine import Engine
    from cpuopt.models import specs
    from cpuopt.models.gpt2 import GPT2, Config
    from cpuopt.train.job import Settings, fusions

    params, tokens, targets = make_inputs()
    batch = {"tokens": tokens, "targets": targets}
    beta1, beta2 = ADAMW["betas"]
    hyper = {"lr": ADAMW["lr"], "beta1": beta1, "beta2": beta2, "eps": ADAMW["eps"], "weight_decay": 0.0}

    def engine(fuse: tuple[str, ...]) -> Engine:
        made = Engine(GPT2(Config(**GPT2_124M)), specs(BATCH, TIME), choice=Choice(variant), fuse=fuse)
        for name, array in made.parameters().items():
            array[...] = params[name]
        return made

    plain = engine(())
    values = {"loss": np.float64(plain.forward(**batch)), "logits": plain.array("lm_head.matmul.out").copy()}
    plain.run("backward")
    values |= {f"grad/{name}": g.copy() for name, g in plain.gradients().items()}
    del plain
    trained = engine(fusions(Settings(variant=variant)))
    values["losses"] = np.array([trained.step(**hyper, **batch).loss for _ in range(STEPS)])
    yield values


@contextmanager
def torch_values(python: str = sys.executable, dtype: str = "float32") -> Iterator[Mapping[str, np.ndarray]]:
    """Run PyTorch under `python` in a subprocess and give its values, read from disk as they are asked for."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "torch.npz"
        subprocess.run([python, __file__, "--child", str(path), dtype], check=True)
        with np.load(path, allow_pickle=False) as values:
            yield values


def compare(golden: Mapping[str, np.ndarray], engine_values: Mapping[str, np.ndarray]) -> list[Row]:
    """Give each quantity's largest relative deviation, max|a - b| / max|b|, and whether it is within the tolerance.

    Quantities are matched by name; one that either side lacks deviates infinitely.
    """
    rows = []
    for name in sorted(golden.keys() | engine_values.keys()):
        both = name in golden and name in engine_values
        d = deviation(engine_values[name], golden[name]) if both else float("inf")
        rows.append((name, d, d <= TOLERANCE))
    return rows


def main() -> int:
    """Compare, print a row for each quantity, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--torch-python", metavar="PATH", default=sys.executable, help="a Python that has PyTorch")
    parser.add_argument("--variant", default="vanilla", help="of cpuopt's kernels, or torch-float64 (%(default)s)")
    parser.add_argument("--child", nargs=2, metavar=("FILE", "DTYPE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        compute_with_torch(Path(args.child[0]), args.child[1])
        return 0
    start = time.perf_counter()
    in_float64 = args.variant == "torch-float64"
    ours = torch_values(args.torch_python, "float64") if in_float64 else cpuopt_values(args.variant)
    with torch_values(args.torch_python) as golden, ours as values:
        rows = compare(golden, values)
    for name, d, ok in rows:
        print(f"{'PASS' if ok else 'FAIL'}  {d:8.1e}  {name}")
    print(f"{sum(ok for _, _, ok in rows)} of {len(rows)} within {TOLERANCE:g}; {time.perf_counter() - start:.0f} s")
    return 0 if all(ok for _, _, ok in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Make the golden values with PyTorch: ``gpt2-2l`` (a whole small model) and ``ops`` (each op alone).

Run with PyTorch 2.13 on a CPU, from anywhere, with any Python that has it; it takes seconds::

    python tests/golden/make_golden.py

For each case it writes ``<case>.npz`` (values computed in float64) and ``<case>.json`` (configuration, digests of the
generated inputs, and for each quantity how far PyTorch's own float32 lies from its float64: the basis of tolerances).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from params import GPT2_2L, deviation, digest, make_batch, make_params, norms_of, summarize, wte_rows
from peer_gpt2 import GPT2, load, loss_of
from torch_ops import op_values

HERE = Path(__file__).resolve().parent
SEED, BATCH, TIME, STEPS = 1337, 2, 13, 10
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
CLIP = 1.0
ROUNDING = 1e-10
"""Between the last bits of float64 and the differences that tests allow."""

Values = dict[str, np.ndarray]


def model_values(params: Values, tokens: np.ndarray, targets: np.ndarray, dtype: torch.dtype) -> Values:
    """Compute logits, loss, gradients and the two series of ten updates in `dtype`."""
    x, y = torch.tensor(tokens, dtype=torch.int64), torch.tensor(targets, dtype=torch.int64)
    model = GPT2(**GPT2_2L).to(dtype)
    load(model, params)
    logits = model(x)
    loss = loss_of(logits, y)
    loss.backward()
    grads = {name: p.grad.numpy() for name, p in model.named_parameters()}
    values = summarize(logits.detach().numpy(), loss.item(), grads, tokens, targets)
    for series, clip in (("adamw", None), ("adamw_clipped", CLIP)):
        load(model, params)
        values |= {f"{series}/{name}": np.asarray(v) for name, v in train(model, x, y, clip).items()}
    return values


def train(model: GPT2, x: torch.Tensor, y: torch.Tensor, clip: float | None) -> dict[str, Any]:
    """Update ten times on one batch; return losses, the norms before clipping, and each parameter's norm at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, foreach=False)
    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf") if clip is None else clip)
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    with torch.no_grad():
        after = {"losses": losses, "loss_after": loss_of(model(x), y).item(), "grad_norms": norms}
    return after | norms_of({name: p.detach().numpy() for name, p in model.named_parameters()})


def deviations(float32: Values, float64: Values) -> dict[str, float]:
    """Measure each quantity of PyTorch in float32 against float64, rounded for the record."""
    return {name: float(f"{deviation(float32[name], want):.2e}") for name, want in float64.items()}


def write(case: str, values: Values, meta: dict[str, Any]) -> None:
    """Write one case and print how far float32 is from float64.

    A value that the file has already stays as it is where another processor changes its last bits only.
    """
    if (HERE / f"{case}.npz").exists():
        before = dict(np.load(HERE / f"{case}.npz"))
        same = {n: x for n, x in before.items() if n in values and deviation(values[n], x) < ROUNDING}
        measured = json.loads((HERE / f"{case}.json").read_text())["torch_float32_deviation"]
        values = values | same
        meta["torch_float32_deviation"] |= {n: d for n, d in measured.items() if n in same}
    np.savez_compressed(HERE / f"{case}.npz", **values)
    (HERE / f"{case}.json").write_text(json.dumps(meta, indent=1) + "\n")
    print(f"{case}: {len(values)} arrays, {(HERE / f'{case}.npz').stat().st_size / 1000:.0f} kB")
    print("  max|float32 - float64| / max|float64| of PyTorch itself")
    for name, d in meta["torch_float32_deviation"].items():
        print(f"  {d:8.1e}  {name}")


def make_gpt2_2l() -> None:
    """Make the case of a whole model."""
    params = make_params(**GPT2_2L, seed=SEED)
    tokens, targets = make_batch(BATCH, TIME, GPT2_2L["vocab_size"], seed=SEED + 1)
    values = model_values(params, tokens, targets, torch.float64)
    clipping = deviation(values["adamw_clipped/losses"], values["adamw/losses"])
    meta = {
        "torch": torch.__version__,
        "config": GPT2_2L,
        "params_seed": SEED,
        "params_sha256": digest(params),
        "batch": {"batch": BATCH, "time": TIME, "vocab_size": GPT2_2L["vocab_size"], "seed": SEED + 1},
        "batch_sha256": digest({"tokens": tokens, "targets": targets}),
        "adamw": ADAMW,
        "clip": CLIP,
        "clip_moves_losses_by": float(f"{clipping:.2e}"),  # a loss tolerance at or above this would not notice it
        "torch_float32_deviation": deviations(model_values(params, tokens, targets, torch.float32), values),
    }
    batch, other = wte_rows(tokens, targets, GPT2_2L["vocab_size"])
    values |= {"wte_batch_ids": batch, "wte_other_ids": other}
    # whole tensors are kept in float32, whose rounding is far below any tolerance; scalars, sums and series in float64
    big = ("logits", "_rows", ".weight", ".bias")
    write("gpt2-2l", {k: v.astype(np.float32) if v.ndim and k.endswith(big) else v for k, v in values.items()}, meta)


def make_ops() -> None:
    """Make the case of each op alone; a loss without any target that counts is NaN and is not kept."""
    float64, float32 = op_values(torch.float64), op_values(torch.float32)
    nan = "cross_entropy_forward/all_ignored/out/loss"
    assert np.isnan(float64.pop(nan)).all()
    made = {name: want for name, want in float64.items() if "/out/" in name}
    write("ops", float64, {"torch": torch.__version__, "torch_float32_deviation": deviations(float32, made)})


if __name__ == "__main__":
    torch.set_num_threads(1)  # one order of summation, however many cores there are
    make_gpt2_2l()
    make_ops()

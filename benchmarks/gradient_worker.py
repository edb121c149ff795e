"""PyTorch's side of `gradients.py`. It imports nothing of cpuopt."""

from __future__ import annotations

from typing import Any

import numpy as np
import peer_gpt2
import peer_llama
import torch
from peer_worker import LLAMAS, model_of, serve
from torch.nn import functional

plain = functional.linear


def rounded(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply by the weight as bfloat16 has it; its gradient is passed on."""
    near = weight.float().to(torch.bfloat16).to(weight.dtype)
    return plain(x, weight + (near - weight).detach(), bias)


def gradients(request: dict[str, Any], exact: bool) -> dict[str, Any]:
    """Return the gradients of one batch: exact ones of rounded weights, or those of autocast."""
    with np.load(f"{request['folder']}/params.npz") as params:
        model = model_of(request, dict(params))
    with np.load(f"{request['folder']}/batch.npz") as batch:
        tokens, targets = (torch.from_numpy(batch[name].astype(np.int64)) for name in ("tokens", "targets"))
    functional.linear = rounded if exact else plain
    if exact:
        model = model.double()
    with torch.autocast("cpu", torch.bfloat16, enabled=not exact):
        logits = model(tokens)
        loss = peer_gpt2.loss_of(logits, targets)
    loss.backward()
    return {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}


def errors(got: dict[str, Any], want: dict[str, Any]) -> dict[str, float]:
    """Return the error of each parameter's gradient, and under an empty name that of all."""
    squares = {n: float(np.sum((got[n].reshape(w.shape).astype(np.float64) - w) ** 2)) for n, w in want.items()}
    sizes = {n: float(np.sum(w**2)) for n, w in want.items()}
    found = {n: (squares[n] / sizes[n]) ** 0.5 for n in want if sizes[n]}
    return {"": (sum(squares.values()) / sum(sizes.values())) ** 0.5, **found}


def answer(request: dict[str, Any], say: Any) -> dict[str, Any]:
    """Return the errors of the gradients that are given, and of those of autocast."""
    torch.set_num_threads(request["threads"])
    want, autocast = (gradients(request, exact) for exact in (True, False))
    with np.load(f"{request['folder']}/gradients.npz") as given:
        ours = dict(given)
    if request["model"] in LLAMAS:
        ours = {name: x.numpy() for name, x in peer_llama.joined(ours).items()}
    return {"errors": [errors(ours, want), errors(autocast, want)]}


if __name__ == "__main__":
    serve({"errors": answer})

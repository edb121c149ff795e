"""PyTorch's side of `curves.py`: trains in bfloat16; a request on stdin, the answer on stdout.

Forward and loss run under autocast, or weights and moments are bfloat16 too and the loss is float32.

It imports nothing of cpuopt, so that only one OpenMP runtime is in the process.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import peer_gpt2
import torch


def train(request: dict[str, Any], job: dict[str, Any]) -> list[float]:
    """Train one model, and return its validation losses."""
    model, o = peer_gpt2.GPT2(**request["sizes"]), request["optimizer"]
    with np.load(job["params"], allow_pickle=False) as params:
        peer_gpt2.load(model, dict(params))
    whole = request["bf16"] == "all"
    if whole:
        model.to(torch.bfloat16)
    betas = o["beta1"], o["beta2"]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=o["lr"], betas=betas, eps=o["eps"], weight_decay=o["weight_decay"], fused=True
    )
    batches, val = (torch.from_numpy(np.load(f).astype(np.int64)) for f in (job["batches"], request["val"]))

    def loss(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=not whole):
            logits = model(tokens)
            return peer_gpt2.loss_of(logits.float() if whole else logits, targets)

    def validate() -> float:
        with torch.no_grad():
            return float(np.mean([loss(*batch).item() for batch in val]))

    found = [validate()]
    for n, (batch, lr) in enumerate(zip(batches, job["lrs"], strict=True), 1):
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad(set_to_none=True)
        loss(*batch).backward()
        optimizer.step()
        if n % request["every"] == 0:
            found.append(validate())
    return found


def main() -> None:
    """Answer the request."""
    request = json.load(sys.stdin)
    torch.set_num_threads(request["threads"])
    losses = [train(request, job) for job in request["jobs"]]
    json.dump({"losses": losses, "version": torch.__version__}, sys.stdout)


if __name__ == "__main__":
    main()

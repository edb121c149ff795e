"""Make ``frozen.json`` with PyTorch: losses of ten steps in which some parameters have ``requires_grad=False``.

Run with PyTorch 2.13 on a CPU, from anywhere, with any Python that has it; it takes seconds::

    python tests/golden/make_frozen.py
"""

from __future__ import annotations

import json
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from params import make_batch, make_params
from peer_gpt2 import GPT2, load, loss_of

HERE = Path(__file__).resolve().parent
SIZES = {"n_layer": 2, "n_head": 4, "n_embd": 48, "vocab_size": 301, "block_size": 32}
SEED, BATCH, TIME, STEPS = 7, 2, 13, 10
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
CASES = {
    "gpt2": [[], ["wte.*"], ["wpe.*"], ["h.0.*"], ["h.1.*", "ln_f.*"], ["w*", "h.0.*"], ["*.weight"], ["*.bias"]],
    "untied": [[], ["wte.*"], ["fc.*"], ["head.*"], ["wte.*", "fc.*"], ["fc.weight"]],
}
"""The patterns of the parameters that are frozen, by model."""


class Untied(nn.Module):
    """An embedding, a layer and a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        V, C = SIZES["vocab_size"], SIZES["n_embd"]
        self.wte, self.fc, self.head = nn.Embedding(V, C), nn.Linear(C, 2 * C), nn.Linear(2 * C, V, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens to logits."""
        return self.head(nn.functional.gelu(self.fc(self.wte(tokens)), approximate="tanh"))


def start(name: str) -> nn.Module:
    """Make a model with its seeded parameters, in float64."""
    if name == "gpt2":
        model: nn.Module = GPT2(**SIZES).double()
        load(model, make_params(**SIZES, seed=SEED))
        return model
    model, rng = Untied().double(), np.random.Generator(np.random.PCG64(SEED))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.tensor(rng.standard_normal(tuple(p.shape), dtype=np.float32) * np.float32(0.1)))
    return model


def losses(name: str, frozen: list[str]) -> list[float]:
    """Train for ten steps on one batch."""
    model = start(name)
    x, y = (torch.tensor(a, dtype=torch.int64) for a in make_batch(BATCH, TIME, SIZES["vocab_size"], seed=SEED + 1))
    for n, p in model.named_parameters():
        p.requires_grad = not any(fnmatchcase(n, pattern) for pattern in frozen)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAMW, foreach=False)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    about = {"torch": torch.__version__, "sizes": SIZES, "seed": SEED, "batch": BATCH, "time": TIME, "adamw": ADAMW}
    made = [{"model": n, "freeze": f, "losses": [round(x, 12) for x in losses(n, f)]} for n in CASES for f in CASES[n]]
    (HERE / "frozen.json").write_text(json.dumps({**about, "cases": made}, indent=1) + "\n")

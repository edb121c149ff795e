"""Make ``values.npz`` with PyTorch, in float64: loss, gradients and ten losses of AdamW of the model of values.

Run with PyTorch 2.13 on a CPU, from anywhere, with any Python that has it; it takes a second::

    python tests/golden/make_values.py
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from values_model import LR, STEPS, draw, forward


def main() -> None:
    """Write the file."""
    parameters, inputs = ({n: torch.tensor(x, dtype=torch.float64) for n, x in xs.items()} for xs in draw())
    for p in parameters.values():
        p.requires_grad_()
    model = SimpleNamespace(**parameters)
    optimizer = torch.optim.AdamW(parameters.values(), LR, weight_decay=0.0)
    made, losses = {}, []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = forward(torch.nn.functional, model, **inputs)
        loss.backward()
        losses.append(loss.item())
        if not step:
            made = {f"d{n}": p.grad.numpy().copy() for n, p in parameters.items()}
        optimizer.step()
    np.savez(Path(__file__).with_name("values.npz"), losses=losses, **made)
    print(losses)


if __name__ == "__main__":
    main()

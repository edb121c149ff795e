"""A model with all operators and functions of values, in words that cpuopt and PyTorch share."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

SHAPES = {"w1": (12, 6), "b1": (12,), "gain": (12,), "one": (1,), "w2": (8, 6), "column": (3, 1), "row": (8,)}
LR, STEPS = 0.01, 10


def draw() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return parameters and inputs."""
    rng = np.random.default_rng(5)
    parameters = {n: rng.standard_normal(shape).astype(np.float32) for n, shape in SHAPES.items()}
    return parameters, {n: rng.standard_normal(s).astype(np.float32) for n, s in {"x": (3, 4, 6), "y": (3, 8)}.items()}


def forward(F: ModuleType, p: Any, x: Any, y: Any) -> Any:
    """Return the loss, with the functions of F and the parameters p."""
    h = F.tanh(F.linear(x, p.w1, p.b1)) * p.gain + p.gain / 2 - 0.25  # a vector is broadcast
    h = h.reshape(3, 4, 3, 4).transpose(1, 2).transpose(0, -1)
    h = F.relu(h) / (1 + F.sigmoid(h)) + 2 / (h * h + 1.5)
    h = 0.5 + h - h.mean(-1, keepdim=True)  # an axis of size 1 is broadcast
    h = 1 - p.one * F.silu(h.transpose(3, 0).reshape(12, -1))  # so is a single number
    z = F.linear(h.reshape(24, 6), p.w2).reshape((3, 8, 8)).sum(1)
    z = -z / 4 + z.sum((0, 1)) * 0.01 + z.mean().reshape(1, 1).expand(3, -1)
    d = (p.column - z) * p.row - y
    return (d * d).mean()

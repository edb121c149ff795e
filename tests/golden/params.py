"""What the golden values are made from and compared by: seeded parameters, a seeded batch, compact summaries.

Needs NumPy only. The scripts that make golden values and the tests that read them both call these functions.
"""

from __future__ import annotations

import numpy as np

IGNORE = -100


def param_shapes(n_layer: int, n_embd: int, vocab_size: int, block_size: int) -> dict[str, tuple[int, ...]]:
    """Name every parameter of a GPT-2 checkpoint and give its shape."""
    C = n_embd
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (vocab_size, C), "wpe.weight": (block_size, C)}
    for i in range(n_layer):
        for ln in (f"h.{i}.ln_1", f"h.{i}.ln_2"):
            shapes |= {f"{ln}.weight": (C,), f"{ln}.bias": (C,)}
        linears = {"attn.c_attn": (3 * C, C), "attn.c_proj": (C, C), "mlp.c_fc": (4 * C, C), "mlp.c_proj": (C, 4 * C)}
        for name, shape in linears.items():
            shapes |= {f"h.{i}.{name}.weight": shape, f"h.{i}.{name}.bias": shape[:1]}
    return shapes | {"ln_f.weight": (C,), "ln_f.bias": (C,)}


def make_params(
    n_layer: int, n_head: int, n_embd: int, vocab_size: int, block_size: int, seed: int
) -> dict[str, np.ndarray]:
    """Draw float32 parameters by name, with LayerNorms off 1 and biases off 0 so that no gradient is trivial.

    Matrices have GPT-2's deviation of 0.02 at its width of 768, and more at a lesser width, so that activations spread
    as far: with small ones GELU is all but linear and attention even, and mistakes in them would not show.
    """
    assert n_embd % n_head == 0
    std, rng, params = np.float32(0.02 * (768 / n_embd) ** 0.5), np.random.Generator(np.random.PCG64(seed)), {}
    for name, shape in param_shapes(n_layer, n_embd, vocab_size, block_size).items():
        x = rng.standard_normal(shape, dtype=np.float32)
        if name.endswith("bias"):
            x *= np.float32(0.05)
        elif len(shape) == 1:
            x *= np.float32(0.1)
            x += np.float32(1)
        else:
            x *= std
        params[name] = x
    return params


def make_batch(batch: int, time: int, vocab_size: int, seed: int, ignored: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Draw int32 tokens and targets (batch, time); the first `ignored` targets of the last row are -100.

    The first row starts with the last id of the vocabulary and has one token twice.
    """
    ids = np.random.Generator(np.random.PCG64(seed)).integers(0, vocab_size, (batch, time + 1), dtype=np.int32)
    ids[0, :4] = vocab_size - 1, ids[0, 1], ids[0, 1], vocab_size - 1
    tokens, targets = ids[:, :-1].copy(), ids[:, 1:].copy()
    targets[-1, :ignored] = IGNORE
    return tokens, targets


def deviation(got: np.ndarray | float, want: np.ndarray | float) -> float:
    """Return max|got - want| / max|want|; infinite for a NaN, another shape, or anything but 0 against all 0."""
    a, b = np.asarray(got, dtype=np.float64), np.asarray(want, dtype=np.float64)
    if a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    far, scale = np.abs(a - b).max(initial=0.0), np.abs(b).max(initial=0.0)
    if far == 0:
        return 0.0
    return float(far / scale) if scale > 0 else float("inf")

"""llama2.c's forward and files of its kind, from the bytes alone: what the tests hold the package's against.

Needs NumPy only, and imports nothing of the package.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

import numpy as np


def draw(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """Draw float32 parameters by name: normalizations off 1, matrices that keep the size of a row."""
    rng = np.random.Generator(np.random.PCG64(seed))
    params = {}
    for name, shape in shapes.items():
        x = rng.standard_normal(shape, dtype=np.float32)
        params[name] = x * np.float32(shape[-1] ** -0.5) if len(shape) > 1 else 1 + x * np.float32(0.1)
    return params


def logits_of(content: bytes, tokens: np.ndarray) -> np.ndarray:
    """Return the logits (T, V) that ``run.c`` computes from a file of version 0, here in float64."""
    dim, hidden, layers, heads, key_heads, vocab, context = struct.unpack("<7i", content[:28])
    words, at = np.frombuffer(content[28:], "<f4").astype(np.float64), 0
    size, T, tied = dim // heads, len(tokens), vocab > 0
    keys = key_heads * size

    def take(*shape: int) -> np.ndarray:
        nonlocal at
        at += (n := int(np.prod(shape)))
        return words[at - n : at].reshape(shape)

    table, norm1 = take(abs(vocab), dim), take(layers, dim)
    wq, wk, wv = take(layers, dim, dim), take(layers, keys, dim), take(layers, keys, dim)
    wo, norm2 = take(layers, dim, dim), take(layers, dim)
    w1, w2, w3 = take(layers, hidden, dim), take(layers, dim, hidden), take(layers, hidden, dim)
    last, _ = take(dim), take(2, context, size // 2)
    head = table if tied else take(abs(vocab), dim)
    assert at == words.size

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)

    angle = np.arange(T)[:, None] * 10000.0 ** (-np.arange(0, size, 2) / size)
    turn = np.exp(1j * angle)[:, None, :]  # (T, 1, size / 2)

    def rotate(x: np.ndarray) -> np.ndarray:
        pairs = x.reshape(T, -1, size // 2, 2)
        turned = (pairs[..., 0] + 1j * pairs[..., 1]) * turn
        return np.stack([turned.real, turned.imag], -1).reshape(T, -1, size)

    x = table[tokens]
    for i in range(layers):
        y = norm(x, norm1[i])
        q, k, v = rotate(y @ wq[i].T), rotate(y @ wk[i].T), (y @ wv[i].T).reshape(T, -1, size)
        for h in range(heads):
            g = h // (heads // key_heads)
            scores = np.where(np.tri(T, dtype=bool), q[:, h] @ k[:, g].T / np.sqrt(size), -np.inf)
            p = np.exp(scores - scores.max(-1, keepdims=True))
            q[:, h] = p / p.sum(-1, keepdims=True) @ v[:, g]  # no longer needed
        x = x + q.reshape(T, dim) @ wo[i].T
        y = norm(x, norm2[i])
        gate = y @ w1[i].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w3[i].T)) @ w2[i].T
    return norm(x, last) @ head.T


def tokenizer_bin(size: int, more: Iterable[tuple[bytes, float]] | None = None) -> bytes:
    """Make a ``tokenizer.bin`` of `size` pieces, or with some after the bytes: letters, then pairs that come often."""
    pieces = [(b"<unk>", 0.0), (b"\n<s>\n", 0.0), (b"\n</s>\n", 0.0), *((b"<0x%02X>" % b, 0.0) for b in range(256))]
    letters = [bytes([b]) for b in b" etaoinshrdlucmfwypvbgkjqxzTHEA.,\n"]
    pairs = [a + b for a in letters[:16] for b in letters[:16]]
    made = [(p, -float(n)) for n, p in enumerate([*letters, *pairs])]
    pieces = [*pieces, *(made if more is None else more)][:size]
    longest = max(len(p) for p, _ in pieces)
    return struct.pack("<I", longest) + b"".join(struct.pack("<fi", score, len(p)) + p for p, score in pieces)

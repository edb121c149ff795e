"""llama2.c's forward and files of its kind, from the bytes alone: what the tests hold the package's against.

Needs NumPy only, and imports nothing of the package.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np


def draw(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """Draw float32 parameters by name: normalizations off 1, matrices that keep the size of a row."""
    rng, params = np.random.Generator(np.random.PCG64(seed)), {}
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


def model_bin(config: Any, params: Mapping[str, np.ndarray], version: int = 0) -> bytes:
    """Make a model file of parameters, by their names in a Llama of Hugging Face."""
    dim, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
    vocab, context = config.vocab_size, config.max_position_embeddings
    sizes = dim, config.intermediate_size, layers, heads, config.num_key_value_heads
    size, tied = dim // heads, "lm_head.weight" not in params

    def each(name: str, turned: bool = False) -> list[np.ndarray]:
        found = [params[f"model.layers.{i}.{name}.weight"] for i in range(layers)]
        return [x.reshape(-1, 2, size // 2, dim).swapaxes(1, 2) for x in found] if turned else found

    angles = np.arange(context)[:, None] * 10000.0 ** (-np.arange(0, size, 2) / size)
    table, head = [params["model.embed_tokens.weight"]], [] if tied else [params["lm_head.weight"]]
    first, second, last = each("input_layernorm"), each("post_attention_layernorm"), [params["model.norm.weight"]]
    q, k, v, o = (each(f"self_attn.{x}_proj", x in "qk") for x in "qkvo")
    mlp = [x for name in ("gate", "down", "up") for x in each(f"mlp.{name}_proj")]
    if version == 0:
        start = struct.pack("<7i", *sizes, vocab if tied else -vocab, context)
        parts = [*table, *first, *q, *k, *v, *o, *second, *mlp, *last, np.cos(angles), np.sin(angles), *head]
    else:
        start = struct.pack("<Ii7iB", 0x616B3432, 1, *sizes, vocab, context, tied).ljust(256, b"\0")
        parts = [*first, *second, *last, *table, *q, *k, *v, *o, *mlp, *head]
    return start + b"".join(x.astype("<f4").tobytes() for x in parts)


def tokenizer_bin(size: int, more: Iterable[tuple[bytes, float]] | None = None) -> bytes:
    """Make a ``tokenizer.bin`` of `size` pieces, or with some after the bytes: letters, then pairs that come often."""
    pieces = [(b"<unk>", 0.0), (b"\n<s>\n", 0.0), (b"\n</s>\n", 0.0), *((b"<0x%02X>" % b, 0.0) for b in range(256))]
    letters = [bytes([b]) for b in b" etaoinshrdlucmfwypvbgkjqxzTHEA.,\n"]
    made = [(p, -float(n)) for n, p in enumerate([*letters, *[a + b for a in letters[:16] for b in letters[:16]]])]
    pieces = [*pieces, *(made if more is None else more)][:size]
    longest = max(len(p) for p, _ in pieces)
    return struct.pack("<I", longest) + b"".join(struct.pack("<fi", score, len(p)) + p for p, score in pieces)

"""Four odd models of the Llama family: their sizes, seeded parameters and batches, and what is compared of each.

Needs NumPy only. The scripts that compute with ``transformers`` and the tests that read their values both use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from params import make_batch

Values = dict[str, np.ndarray]
STEPS = 10
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
TOLERANCE = 1e-5
"""Largest difference of a quantity, relative to the quantity's size."""


@dataclass(frozen=True)
class Case:
    """A model and a batch.

    Parameters
    ----------
    kind : ``llama``, ``qwen2`` or ``qwen3``.
    sizes : under the names of ``config.json``, but for those of the rotary positions.
    rope : ``rope_parameters`` of ``config.json``.
    """

    kind: str
    sizes: Mapping[str, Any]
    rope: Mapping[str, Any]
    batch: int
    time: int
    seed: int

    def config(self) -> dict[str, Any]:
        """Return what describes the model to cpuopt: the model's name, and the sizes under one level of names."""
        names = {
            "rope_theta": "rope_theta",
            "rope_type": "rope_type",
            "factor": "rope_factor",
            "low_freq_factor": "rope_low_freq_factor",
            "high_freq_factor": "rope_high_freq_factor",
            "original_max_position_embeddings": "rope_original_positions",
        }
        return {"model": self.kind, **self.sizes, **{names[n]: v for n, v in self.rope.items()}}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name every parameter of the checkpoint and give its shape."""
        s = self.sizes
        C, F, HS = s["hidden_size"], s["intermediate_size"], s["head_dim"]
        Q, K = s["num_attention_heads"] * HS, s["num_key_value_heads"] * HS
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (s["vocab_size"], C)}
        for i in range(s["num_hidden_layers"]):
            block = {"self_attn.q_proj.weight": (Q, C), "self_attn.k_proj.weight": (K, C)}
            block |= {"self_attn.v_proj.weight": (K, C), "self_attn.o_proj.weight": (C, Q)}
            if self.kind == "qwen2":
                block |= {f"self_attn.{n}_proj.bias": (width,) for n, width in (("q", Q), ("k", K), ("v", K))}
            if self.kind == "qwen3":
                block |= {f"self_attn.{n}_norm.weight": (HS,) for n in "qk"}
            block |= {"mlp.gate_proj.weight": (F, C), "mlp.up_proj.weight": (F, C), "mlp.down_proj.weight": (C, F)}
            block |= {"input_layernorm.weight": (C,), "post_attention_layernorm.weight": (C,)}
            shapes |= {f"model.layers.{i}.{name}": shape for name, shape in block.items()}
        shapes["model.norm.weight"] = (C,)
        return shapes if s["tie_word_embeddings"] else {**shapes, "lm_head.weight": (s["vocab_size"], C)}

    def params(self) -> Values:
        """Draw float32 parameters by name, with norms off 1 and biases off 0, so that no gradient is trivial.

        Matrices spread as far as their rows are long: attention is peaked and SiLU bent, so mistakes in them show.
        """
        rng = np.random.Generator(np.random.PCG64(self.seed))
        made = {}
        for name, shape in self.shapes().items():
            x = rng.standard_normal(shape, dtype=np.float32)
            if len(shape) == 1:
                made[name] = x * np.float32(0.3) + np.float32(name.endswith("weight"))
            else:
                made[name] = x * np.float32((0.5 if "embed" in name else 1.2) * shape[1] ** -0.5)
        return made

    def tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Draw tokens and targets (B, T), of which three do not count."""
        return make_batch(self.batch, self.time, self.sizes["vocab_size"], seed=self.seed + 1, ignored=3)


def sized(C: int, F: int, layers: int, heads: tuple[int, int, int], V: int, T: int, **more: Any) -> dict[str, Any]:
    """Name the sizes of a model as ``config.json`` does."""
    NH, NKV, HS = heads
    return {
        "vocab_size": V,
        "hidden_size": C,
        "intermediate_size": F,
        "num_hidden_layers": layers,
        "num_attention_heads": NH,
        "num_key_value_heads": NKV,
        "head_dim": HS,
        "max_position_embeddings": T,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        **more,
    }


DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
"""With heads of 32 channels, wavelengths of 6 and less stay, 11 and 20 lie between, and longer ones are stretched."""
CASES = {
    "nine_heads": Case("llama", sized(72, 100, 2, (9, 3, 8), 1013, 128), DEFAULT, 2, 113, seed=1),
    "head_size_128": Case(
        "qwen3",
        sized(1024, 96, 1, (4, 2, 128), 257, 64, rms_norm_eps=1e-6),
        {"rope_type": "default", "rope_theta": 1e6},
        *(1, 19),
        seed=2,
    ),
    "biases": Case("qwen2", sized(60, 132, 2, (6, 2, 10), 211, 40, tie_word_embeddings=False), DEFAULT, 3, 33, seed=3),
    "llama3_scaling": Case("llama", sized(64, 92, 2, (4, 1, 32), 131, 128), LLAMA3, 1, 97, seed=4),
}


def summarize(values: Mapping[str, np.ndarray]) -> Values:
    """Reduce arrays to what a golden file keeps: of a large one, its norm and four projections on random directions.

    A projection is divided by the norm of its array, so that an error of each is relative to the whole array.
    """
    kept = {}
    for name, x in values.items():
        if x.size <= STEPS:
            kept[name] = np.asarray(x, dtype=np.float64)
            continue
        wide = np.asarray(x, dtype=np.float64).ravel()
        directions = np.random.Generator(np.random.PCG64(x.size)).standard_normal((4, x.size))
        kept[name] = np.array([np.sqrt(wide @ wide), *(directions @ wide)])
    return kept


def norms_after(params: Mapping[str, np.ndarray]) -> Values:
    """Return the norm of each weight as ``after/<name>``: AdamW makes whole steps of a gradient's rounding."""
    return {f"after/{name}": np.array([np.sqrt(np.square(p, dtype=np.float64).sum())]) for name, p in params.items()}


def packed(found: Values) -> Values:
    """Join the quantities of one length, whose names follow from the case: a file of many small arrays is large."""
    kinds = {"losses": 10, "rows": 5, "norms": 1}
    return {kind: np.array([x for x in found.values() if x.size == n]) for kind, n in kinds.items()}


def unpacked(case: Case, kept: Values) -> Values:
    """Undo `packed`."""
    names = {"losses": ["losses"], "rows": ["logits", *(f"grad/{n}" for n in case.shapes())]}
    names["norms"] = ["loss", *(f"after/{n}" for n in case.shapes())]
    return {n: x for kind, found in names.items() for n, x in zip(found, kept[kind], strict=True)}


def distance(got: np.ndarray, want: np.ndarray) -> float:
    """Return the largest difference of a summary, relative to the array's norm or the largest number."""
    if got.shape != want.shape or not np.isfinite(got).all():
        return float("inf")
    return float(np.abs(got - want).max() / np.abs(want[:1] if want.size == 5 else want).max())

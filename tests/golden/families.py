"""Two odd models of each family: what their ``config.json`` says, their parameters, and what is compared of each.

Needs NumPy only. The script that computes with ``transformers`` and the tests that read its values both use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from llama_cases import Values
from params import make_batch

TEXT = 24
"""Tokens of a greedy text."""
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 40}
YARN |= {"beta_fast": 2.0, "beta_slow": 0.5}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 40}
LONG |= {"short_factor": [1.0, 1.5, 2.5], "long_factor": [1.0, 4.0, 8.0]}


@dataclass(frozen=True)
class Family:
    """A model and a batch.

    Parameters
    ----------
    kind : ``model_type`` of ``config.json``.
    keys : keys of ``config.json``, beside the usual ones.
    """

    kind: str
    keys: Mapping[str, Any]
    batch: int
    time: int
    seed: int

    @property
    def center(self) -> int:
        """The usual weight of a normalization."""
        return 0 if self.kind.startswith("gemma") else 1  # where it is kept as the distance from 1

    def params(self, shapes: Mapping[str, tuple[int, ...]]) -> Values:
        """Draw float32 parameters by name, with norms off their usual weight and biases off 0."""
        made = {}
        for i, (name, shape) in enumerate(sorted(shapes.items())):
            x = np.random.Generator(np.random.PCG64([self.seed, i])).standard_normal(shape, dtype=np.float32)
            if len(shape) == 1:
                made[name] = x * np.float32(0.3) + np.float32(self.center * name.endswith("weight"))
            else:
                made[name] = x * np.float32((0.5 if "embed" in name else 1.2) * shape[1] ** -0.5)
        return made

    def tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Draw tokens and targets (B, T), of which three do not count."""
        return make_batch(self.batch, self.time, self.keys["vocab_size"], seed=self.seed + 1, ignored=3)

    def prompt(self) -> list[int]:
        """Return the ids that a greedy text begins with."""
        return [int(n) for n in self.tokens()[0][0, :5]]


def sized(V: int, C: int, ffn: int, layers: int, NH: int, NKV: int, **more: Any) -> dict[str, Any]:
    """Name sizes as ``config.json`` does."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = dict(zip((*names, "num_key_value_heads"), (V, C, ffn, layers, NH, NKV), strict=True))
    return sizes | {"max_position_embeddings": 48, "pad_token_id": None, **more}


FAMILIES = {
    "llama": Family("llama", sized(61, 36, 52, 2, 6, 2, tie_word_embeddings=True), 2, 19, 1),
    "llama, yarn": Family("llama", sized(67, 40, 44, 1, 4, 1, rope_parameters=YARN, head_dim=20), 1, 37, 2),
    "qwen2": Family("qwen2", sized(53, 44, 36, 2, 2, 1, use_sliding_window=False), 3, 13, 3),
    "qwen3": Family("qwen3", sized(59, 28, 60, 1, 4, 2, head_dim=10, tie_word_embeddings=True), 2, 21, 4),
    "mistral": Family("mistral", sized(71, 36, 44, 2, 6, 3, sliding_window=None), 2, 17, 5),
    "mistral, window": Family("mistral", sized(47, 40, 28, 2, 5, 1, sliding_window=9), 1, 33, 6),
    "smollm3": Family("smollm3", sized(61, 24, 36, 4, 4, 2), 2, 15, 7),
    "smollm3, other layers": Family("smollm3", sized(43, 30, 20, 2, 3, 3, no_rope_layers=[0, 1]), 1, 29, 8),
    "olmo2": Family("olmo2", sized(73, 36, 28, 2, 6, 2), 2, 19, 9),
    "olmo2, linear": Family(
        "olmo2",
        sized(
            41,
            20,
            52,
            1,
            2,
            2,
            attention_bias=True,
            rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
        ),
        *(1, 31, 10),
    ),
    "phi3": Family("phi3", sized(79, 36, 44, 2, 6, 2), 2, 17, 11),
    "phi3, in part": Family(
        "phi3",
        sized(37, 40, 28, 1, 4, 2, partial_rotary_factor=0.6, rope_parameters=LONG, sliding_window=40)
        | {"original_max_position_embeddings": 40},
        *(1, 35, 12),
    ),
    "mistral, dynamic": Family(
        "mistral",
        sized(53, 24, 36, 1, 3, 1, sliding_window=None)
        | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        *(1, 23, 13),
    ),
    "gemma2": Family(
        "gemma2",
        sized(61, 36, 28, 2, 3, 1, head_dim=14, sliding_window=7)
        | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0},
        *(2, 19, 14),
    ),
    "gemma2, no caps": Family(
        "gemma2",
        sized(53, 24, 44, 1, 4, 2, head_dim=6, sliding_window=13, query_pre_attn_scalar=10)
        | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        *(1, 29, 15),
    ),
    "gemma3": Family("gemma3_text", sized(67, 40, 36, 7, 4, 1, head_dim=10, sliding_window=5), 1, 17, 16),
    "gemma3, other layers": Family(
        "gemma3_text",
        sized(43, 28, 20, 3, 2, 2, head_dim=12, sliding_window=11, final_logit_softcapping=3.0)
        | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "query_pre_attn_scalar": 20}
        | {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 2e5}}},
        *(2, 23, 17),
    ),
}

"""Odd models of each family, their parameters and adapters, and what the golden files keep of each.

Needs NumPy only. ``make.py`` computes them with ``transformers``; the tests and ``compare.py`` with cpuopt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from params import make_batch

HERE = Path(__file__).resolve().parent
Values = dict[str, np.ndarray]
STEPS, TEXT = 10, 24
"""Steps of AdamW, and tokens of a greedy text."""
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
TOLERANCE = 1e-5
"""Largest difference of a quantity, relative to the quantity's size."""
LINEAR = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
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
    clip : the largest norm of a step's gradient.
    """

    kind: str
    keys: Mapping[str, Any]
    batch: int
    time: int
    seed: int
    clip: float | None = None

    def params(self, shapes: Mapping[str, tuple[int, ...]]) -> Values:
        """Draw float32 parameters by name, with norms off their usual weight and biases off 0.

        Matrices spread as far as their rows are long: attention is peaked and SiLU bent, so mistakes in them show.
        """
        center, made = 0 if self.kind.startswith("gemma") else 1, {}  # Gemma keeps the distance from 1
        for i, (name, shape) in enumerate(sorted(shapes.items())):
            x = np.random.Generator(np.random.PCG64([self.seed, i])).standard_normal(shape, dtype=np.float32)
            if len(shape) == 1:
                made[name] = x * np.float32(0.3) + np.float32(center * name.endswith("weight"))
            else:
                fan_in = shape[0] if ".c_" in name else shape[1]
                made[name] = x * np.float32((0.5 if "embed" in name or self.kind == "gpt2" else 1.2) * fan_in**-0.5)
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


def gpt2(V: int, C: int, layers: int, NH: int, T: int) -> dict[str, int]:
    """Name sizes of GPT-2 as ``config.json`` does."""
    return dict(zip(("vocab_size", "n_embd", "n_layer", "n_head", "n_positions"), (V, C, layers, NH, T), strict=True))


def caps(attention: float | None, final: float | None) -> dict[str, float | None]:
    """Name caps of logits as ``config.json`` does."""
    return {"attn_logit_softcapping": attention, "final_logit_softcapping": final}


CUT = {"sliding_window": 40, "original_max_position_embeddings": 40}
FAMILIES = {
    "llama": Family("llama", sized(61, 36, 52, 2, 6, 2, tie_word_embeddings=True), 2, 19, 1),
    "llama, llama3": Family("llama", sized(31, 64, 92, 2, 4, 1, rope_parameters=LLAMA3, head_dim=32), 1, 47, 18),
    "llama, yarn": Family("llama", sized(67, 40, 44, 1, 4, 1, rope_parameters=YARN, head_dim=20), 1, 37, 2),
    "qwen2": Family("qwen2", sized(53, 44, 36, 2, 2, 1, use_sliding_window=False), 3, 13, 3),
    "qwen3": Family("qwen3", sized(59, 28, 60, 1, 4, 2, head_dim=10, tie_word_embeddings=True), 2, 21, 4),
    "mistral": Family("mistral", sized(71, 36, 44, 2, 6, 3, sliding_window=None), 2, 17, 5),
    "mistral, window": Family("mistral", sized(47, 40, 28, 2, 5, 1, sliding_window=9), 1, 33, 6),
    "smollm3": Family("smollm3", sized(61, 24, 36, 4, 4, 2), 2, 15, 7),
    "smollm3, other layers": Family("smollm3", sized(43, 30, 20, 2, 3, 3, no_rope_layers=[0, 1]), 1, 29, 8),
    "olmo2": Family("olmo2", sized(73, 36, 28, 2, 6, 2), 2, 19, 9),
    "olmo2, linear": Family("olmo2", sized(41, 20, 52, 1, 2, 2, attention_bias=True, rope_parameters=LINEAR),
                            1, 31, 10),
    "phi3": Family("phi3", sized(79, 36, 44, 2, 6, 2), 2, 17, 11),
    "phi3, in part": Family("phi3", sized(37, 40, 28, 1, 4, 2, partial_rotary_factor=0.6, rope_parameters=LONG, **CUT),
                            1, 35, 12),
    "mistral, dynamic": Family("mistral", sized(53, 24, 36, 1, 3, 1, sliding_window=None,
                                                rope_parameters=LINEAR | DYNAMIC), 1, 23, 13),
    "gemma2": Family("gemma2", sized(61, 36, 28, 2, 3, 1, head_dim=14, sliding_window=7, **caps(1.5, 2.0)), 2, 19, 14),
    "gemma2, no caps": Family("gemma2", sized(53, 24, 44, 1, 4, 2, head_dim=6, sliding_window=13,
                                              query_pre_attn_scalar=10, **caps(None, None)), 1, 29, 15),
    "gemma3": Family("gemma3_text", sized(67, 40, 36, 7, 4, 1, head_dim=10, sliding_window=5), 1, 17, 16),
    "gemma3, other layers": Family(
        "gemma3_text", sized(43, 28, 20, 3, 2, 2, head_dim=12, sliding_window=11, final_logit_softcapping=3.0)
        | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "query_pre_attn_scalar": 20}
        | {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 2e5}}},
        2, 23, 17),
    "gpt2": Family("gpt2", gpt2(1013, 48, 2, 4, 32), 2, 13, 19, clip=1.0),
}  # fmt: skip
LARGE = {"gpt2-124M": Family("gpt2", gpt2(50257, 768, 12, 12, 1024), 4, 64, 20)}
"""The model that ``compare.py`` adds."""
QWEN2 = Family("qwen2", sized(131, 36, 52, 2, 6, 2, max_position_embeddings=24), 3, 17, 3)
SMALL_GPT2 = Family("gpt2", gpt2(131, 48, 2, 3, 24), 2, 19, 11)
ADAPTERS: dict[str, tuple[Family, dict[str, Any]]] = {
    "llama": (QWEN2, {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}),
    "llama, all": (QWEN2, {"r": 3, "lora_alpha": 5, "use_rslora": True, "target_modules": "all-linear"}),
    "gpt2": (SMALL_GPT2, {"r": 5, "lora_alpha": 10, "target_modules": ["c_attn", "mlp.c_proj"]}),
}
"""Models with adapters, in the words of ``peft``."""
ADAPTER_STEPS, ADAPTER_ADAMW = 20, {"lr": 2e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
CHATS = {
    "llama": Family("llama", sized(256, 36, 52, 2, 6, 2, max_position_embeddings=96), 4, 96, 7),
    "qwen3": Family("qwen3", sized(256, 40, 56, 2, 4, 2, head_dim=10, max_position_embeddings=96), 4, 96, 6),
    "gpt2": Family("gpt2", gpt2(256, 48, 2, 3, 96), 4, 96, 11),
}
"""Models of which all weights are trained, on ``examples/questions.jsonl`` as bytes, four examples a step."""


def first_adapters(shapes: Mapping[str, tuple[int, ...]]) -> Values:
    """Draw the first A of each adapter, in the given order; B is zero."""
    rng = np.random.Generator(np.random.PCG64(11))
    drawn = {n: rng.standard_normal(s, dtype=np.float32) * np.float32(s[-1] ** -0.5) for n, s in shapes.items()}
    return {n: x * np.float32("lora_A" in n) for n, x in drawn.items()}


def summarize(values: Mapping[str, np.ndarray]) -> Values:
    """Reduce arrays to what a golden file keeps: of a large one, its norm and four projections on random directions.

    A projection is divided by the norm of its array, so that an error of each is relative to the whole array.
    """
    kept = {}
    for name, x in values.items():
        wide = np.asarray(x, dtype=np.float64)
        if x.size > STEPS:
            directions = np.random.Generator(np.random.PCG64(x.size)).standard_normal((4, x.size))
            wide = np.array([np.sqrt(np.square(wide).sum()), *(directions @ wide.ravel())])
        kept[name] = wide
    return kept


def norms_after(params: Mapping[str, np.ndarray]) -> Values:
    """Return the norm of each weight as ``after/<name>``: AdamW makes whole steps of a gradient's rounding.

    Of GPT-2's ``c_attn.bias``, the part of k does not count: its gradient is 0, and all of its steps are rounding.
    """
    counted = {
        n: np.delete(p, slice(len(p) // 3, len(p) // 3 * 2)) if n.endswith("attn.bias") else p
        for n, p in params.items()
    }
    return {f"after/{n}": np.array([np.sqrt(np.square(p, dtype=np.float64).sum())]) for n, p in counted.items()}


def distance(got: np.ndarray, want: np.ndarray) -> float:
    """Return the largest difference of a summary, relative to the array's norm or the largest number."""
    if got.shape != want.shape or not np.isfinite(got).all():
        return float("inf")
    return float(np.abs(got - want).max() / np.abs(want[:1] if want.size == 5 else want).max())


def quantities(shapes: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of the summaries of a model's values."""
    large = {f"grad/{name}": int(np.prod(shape)) for name, shape in shapes.items()}
    sizes = {name: 5 if n > STEPS else n for name, n in large.items()} | {f"after/{name}": 1 for name in shapes}
    return {"logits": 5, "loss": 1, "losses": STEPS, **sizes}


def kept() -> dict[str, tuple[dict[str, Any], Values]]:
    """Read the golden files: of each model what describes it, and its values, which lie in one array."""
    about = json.loads((HERE / "families.json").read_text())
    sizes = {(name, key): n for name in about for key, n in quantities(about[name]["shapes"]).items()}
    values: dict[str, Values] = {name: {} for name in about}
    with np.load(HERE / "families.npz") as found:
        parts = np.split(found["all"], np.cumsum([n for _, n in sorted(sizes.items())]))
    assert not parts.pop().size
    for (name, key), part in zip(sorted(sizes), parts, strict=True):
        values[name][key] = part
    return {name: (about[name], values[name]) for name in about}

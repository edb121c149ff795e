"""The Llama family, with the parameter and layer names of Hugging Face's checkpoints: Llama, Qwen2 and Qwen3.

Blocks of grouped-query attention with rotary positions and a SwiGLU, each behind an RMS normalization. Qwen2 has biases
on q, k and v; Qwen3 normalizes each head of q and k.

Source: Touvron et al. 2023 (arXiv 2302.13971), Grattafiori et al. 2024 (arXiv 2407.21783) for the scaling of positions;
``transformers``, whose sizes' names these are. The initial weights are normal with standard deviation 0.02.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import pi
from typing import Any, ClassVar

import numpy as np

from .. import functional as F
from .. import models, nn, ops
from ..errors import UserError
from ..program.program import Value

SCALINGS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "linear": {"factor": "rope_factor"},
    "llama3": {
        "factor": "rope_factor",
        "low_freq_factor": "rope_low_freq_factor",
        "high_freq_factor": "rope_high_freq_factor",
        "original_max_position_embeddings": "rope_original_positions",
    },
}
"""The numbers of each scaling of positions: their keys in ``config.json``, and the fields here."""
EXPECTED: Mapping[str, tuple[Any, ...]] = {
    # the values that this family computes; the first is the default of config.json
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0.0, None),
    "mlp_bias": (False,),
    "pretraining_tp": (1, None),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1.0, None),
    "quantization_config": (None,),
    "add_cross_attention": (False,),
}
START = nn.normal(0.02)


@dataclass(frozen=True)
class Config(models.Config):
    """Sizes of a Llama, named as in ``config.json``; the scaling of its positions is in the fields from `rope_type` on.

    Attributes
    ----------
    head_dim : the channels of a head.
    rope_type : ``default``; ``linear``, with `rope_factor`; ``llama3``, with all four of the numbers.
    """

    vocab_size: int = 32000
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 22
    num_attention_heads: int = 32
    num_key_value_heads: int = 4
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    rope_theta: float = 10000.0
    rope_type: str = "default"
    rope_factor: float = 1.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_positions: int = 8192

    model: ClassVar = "llama"
    qkv_bias: ClassVar[bool | None] = None
    """Whether q, k and v have biases and o has none; None: `attention_bias` decides for all four."""
    qk_norm: ClassVar = False
    """Whether each head of q and k is normalized."""
    missing: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "rope_theta": 10000.0,
    }
    """The values that ``transformers`` takes where a ``config.json`` lacks them."""
    cached: ClassVar = {
        ops.gqa_forward: ops.gqa_decode,
        ops.rope_forward: ops.rope_decode,
        ops.embedding_forward: ops.embedding_decode,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"model: num_attention_heads = {self.num_attention_heads} is not a multiple of num_key_value_heads = "
                f"{self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise UserError(
                f"model: head_dim = {self.head_dim}; expected an even number, since channels rotate in pairs"
            )
        if self.rope_type not in SCALINGS:
            raise UserError(f"model: rope_type is {self.rope_type[:60]!r}; expected {', '.join(SCALINGS)}")
        for f in fields(self):
            given, unread = getattr(self, f.name), f.name in SCALINGS["llama3"].values()
            if unread and f.name not in SCALINGS[self.rope_type].values() and given != f.default:
                raise UserError(
                    f"model: {f.name} is {given}; rope_type = {self.rope_type!r} does not read it, so leave it out or "
                    "name the rope_type"
                )
        if self.rope_low_freq_factor >= self.rope_high_freq_factor:
            raise UserError(
                f"model: rope_low_freq_factor = {self.rope_low_freq_factor}; expected less than "
                f"rope_high_freq_factor = {self.rope_high_freq_factor}"
            )

    @property
    def block_size(self) -> int:
        """The longest context."""
        return self.max_position_embeddings

    def module(self) -> nn.Module:
        """Make the module."""
        return Llama(self)

    @property
    def cache_sizes(self) -> dict[str, int]:
        """The sizes of the cache: heads of keys and values, and their channels."""
        return {"NKV": self.num_key_value_heads, "HS": self.head_dim}

    def scaled(self, frequencies: np.ndarray) -> np.ndarray:
        """Scale the inverse frequencies of the rotary positions (head_dim / 2,), in float32."""
        if self.rope_type == "linear":
            return frequencies / np.float32(self.rope_factor)
        if self.rope_type == "llama3":
            low, high = self.rope_low_freq_factor, self.rope_high_freq_factor
            wavelength = np.float32(2 * pi) / frequencies
            long, short = self.rope_original_positions / low, self.rope_original_positions / high
            slow = frequencies / np.float32(self.rope_factor)
            smooth = (np.float32(self.rope_original_positions) / wavelength - np.float32(low)) / np.float32(high - low)
            between = (np.float32(1) - smooth) * slow + smooth * frequencies
            return np.where(wavelength > long, slow, np.where(wavelength < short, frequencies, between))
        return frequencies

    @classmethod
    def from_transformers(cls, given: Mapping[str, Any]) -> Config:
        """Read the sizes; refuse what this model does not compute."""
        for name, allowed in EXPECTED.items():
            if given.get(name, allowed[0]) not in allowed:
                raise UserError(f"{name} is {repr(given[name])[:60]}; cpuopt's {cls.model} has {allowed[0]!r} only")
        layers = given.get("layer_types") or []
        if not isinstance(layers, list) or any(kind != "full_attention" for kind in layers):
            raise UserError(f"layer_types is {repr(layers)[:60]}; cpuopt's {cls.model} has 'full_attention' only")
        if cls is Config and given.get("sliding_window") is not None:  # other models have a switch for it
            raise UserError(f"sliding_window is {repr(given['sliding_window'])[:60]}; cpuopt's llama has none")
        sizes = {name: given.get(name, n) for name, n in cls.missing.items()}
        heads, head_dim = (given.get(n, sizes.pop(n, None)) for n in ("num_key_value_heads", "head_dim"))
        if cls.qkv_bias is not None:
            sizes.pop("attention_bias")  # which this model does not read
        c = cls(**sizes, num_key_value_heads=1, head_dim=2)  # so that these numbers are right before they are divided
        return replace(
            c,
            num_key_value_heads=c.num_attention_heads if heads is None else heads,
            head_dim=c.hidden_size // c.num_attention_heads if head_dim is None else head_dim,
            **rope_of(given, c),
        )

    def to_transformers(self) -> dict[str, Any]:
        """Return the content of ``config.json``, with the rotary positions in the new place and in the old ones."""
        if self.model == Config.model and self.hidden_size % self.num_attention_heads:
            raise UserError(
                f"hidden_size = {self.hidden_size} is not a multiple of num_attention_heads = "
                f"{self.num_attention_heads}: transformers refuses such a {self.model}"
            )
        rope = {"rope_type": self.rope_type}
        rope |= {there: getattr(self, here) for there, here in SCALINGS[self.rope_type].items()}
        switch = {} if self.model == Config.model else {"use_sliding_window": False}
        return {
            "architectures": [f"{self.model.capitalize()}ForCausalLM"],
            "model_type": self.model,
            "hidden_act": "silu",
            **{f.name: getattr(self, f.name) for f in fields(self) if f.name == "rope_theta" or "rope" not in f.name},
            **switch,
            "rope_parameters": rope | {"rope_theta": self.rope_theta},
            "rope_scaling": None if self.rope_type == "default" else rope,
            "bos_token_id": None,
            "eos_token_id": None,
        }


@dataclass(frozen=True)
class Qwen2(Config):
    """Sizes of a Qwen2: a Llama with biases on q, k and v."""

    model: ClassVar = "qwen2"
    qkv_bias: ClassVar = True
    missing: ClassVar = {
        **Config.missing,
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
    }


@dataclass(frozen=True)
class Qwen3(Config):
    """Sizes of a Qwen3: a Llama that normalizes each head of q and k."""

    model: ClassVar = "qwen3"
    qk_norm: ClassVar = True
    missing: ClassVar = {**Qwen2.missing, "head_dim": 128}


def rope_of(given: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Read the scaling of positions from ``rope_parameters``, or from ``rope_scaling`` of earlier versions.

    Raises
    ------
    UserError
        For a scaling that is not computed, one that lacks a number, and two that differ.
    """
    found = {key: given[key] for key in ("rope_parameters", "rope_scaling") if given.get(key)}
    read = [_rope(key, rope, given, config) for key, rope in found.items()] or [{}]
    if read[0] != read[-1]:
        raise UserError("rope_parameters and rope_scaling differ; remove the one that is wrong")
    return read[0]


def _rope(key: str, rope: Any, given: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Read the scaling of positions under a key."""
    if not isinstance(rope, dict):
        raise UserError(f"{key} is {repr(rope)[:60]}; expected an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in tuple(SCALINGS):
        raise UserError(f"{key} has the rope_type {repr(kind)[:60]}; expected {', '.join(SCALINGS)}")
    if rope.get("partial_rotary_factor") not in EXPECTED["partial_rotary_factor"]:
        raise UserError(f"{key}: partial_rotary_factor is {repr(rope['partial_rotary_factor'])[:60]}; expected 1.0")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *SCALINGS["llama3"]}
    if other := sorted(name for name in rope.keys() - known if rope[name] is not None):
        raise UserError(f"{key} has {other[0][:60]!r}, which cpuopt does not compute; leave it out")
    usual = {"original_max_position_embeddings": config.max_position_embeddings}
    first = {n: given[n] for n in usual if n in given}  # at the top level it precedes
    there = {**usual, **rope, **first}
    if lacking := [name for name in SCALINGS[kind] if name not in there]:
        raise UserError(f"{key} has the rope_type {kind!r} and lacks {lacking[0]!r}")
    theta = rope.get("rope_theta", config.rope_theta)
    return {"rope_type": kind, "rope_theta": theta} | {here: there[name] for name, here in SCALINGS[kind].items()}


def sized(
    model: type[Config], vocab: int, width: int, ffn: int, layers: int, heads: tuple[int, int, int], **kw: Any
) -> Config:
    """Make the sizes of a model; `heads` are those of queries, those of keys, and the channels of one."""
    NH, NKV, HS = heads
    return model(vocab, width, ffn, layers, NH, NKV, HS, **kw)


LLAMA3: Mapping[str, Any] = {"rope_type": "llama3", "rope_factor": 32.0, "rope_theta": 500000.0}
PRESETS: Mapping[str, Config] = {
    "llama-tiny": sized(Config, 256, 64, 160, 2, (4, 2, 16), max_position_embeddings=64, tie_word_embeddings=True),
    "stories260K": sized(Config, 512, 64, 172, 5, (8, 4, 8), max_position_embeddings=512, tie_word_embeddings=True),
    "stories15M": sized(Config, 32000, 288, 768, 6, (6, 6, 48), max_position_embeddings=256, tie_word_embeddings=True),
    "smollm2-135M": sized(
        Config, 49152, 576, 1536, 30, (9, 3, 64), max_position_embeddings=8192, tie_word_embeddings=True, rope_theta=1e5
    ),
    "smollm2-360M": sized(
        Config,
        49152,
        960,
        2560,
        32,
        (15, 5, 64),
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        rope_theta=1e5,
    ),
    "qwen3-0.6B": sized(
        Qwen3,
        *(151936, 1024, 3072, 28, (16, 8, 128)),
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        rope_theta=1e6,
    ),
    "tinyllama-1.1B": Config(),
    "llama3.2-1B": sized(
        Config,
        *(128256, 2048, 8192, 16, (32, 8, 64)),
        max_position_embeddings=131072,
        tie_word_embeddings=True,
        **LLAMA3,
    ),
}
"""Sizes by name; ``llama-tiny`` reads bytes and trains in seconds."""
for _model in (Config, Qwen2, Qwen3):
    models.register(_model, {name: c for name, c in PRESETS.items() if type(c) is _model})


class LlamaAttention(nn.Module):
    """Causal grouped-query attention with rotary positions, between projections."""

    def __init__(self, c: Config) -> None:
        width, biased = c.num_attention_heads * c.head_dim, c.attention_bias if c.qkv_bias is None else c.qkv_bias
        keys = c.num_key_value_heads * c.head_dim
        self.head_dim = c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, width, bias=biased, init=START)
        self.k_proj = nn.Linear(c.hidden_size, keys, bias=biased, init=START)
        self.v_proj = nn.Linear(c.hidden_size, keys, bias=biased, init=START)
        self.o_proj = nn.Linear(width, c.hidden_size, bias=c.attention_bias and c.qkv_bias is None, init=START)
        if c.qk_norm:
            self.q_norm, self.k_norm = (nn.RMSNorm(c.head_dim, c.rms_norm_eps) for _ in "qk")
        self.qk_norm = c.qk_norm

    def forward(self, x: Value, rotary: nn.RotaryEmbedding) -> Value:
        """Keep the shape (B, T, C)."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotary.forward(q), rotary.forward(k)  # in this layer
        y: Value = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, head_size=self.head_dim)
        y = self.o_proj(y)
        return y


class LlamaMLP(nn.Module):
    """Two projections, one gated by the SiLU of the other, and one back."""

    def __init__(self, c: Config) -> None:
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False, init=START)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False, init=START)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False, init=START)

    def forward(self, x: Value) -> Value:
        """Keep the shape (B, T, C)."""
        y: Value = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class LlamaBlock(nn.Module):
    """Attention and MLP, each on a normalized residual stream that it adds to."""

    def __init__(self, c: Config) -> None:
        self.self_attn = LlamaAttention(c)
        self.mlp = LlamaMLP(c)
        self.input_layernorm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x: Value, rotary: nn.RotaryEmbedding) -> Value:
        """Keep the shape (B, T, C)."""
        x = x + self.self_attn(self.input_layernorm(x), rotary)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class LlamaDecoder(nn.Module):
    """Embedding, blocks and the last normalization."""

    def __init__(self, c: Config) -> None:
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size, init=START)
        self.layers = [LlamaBlock(c) for _ in range(c.num_hidden_layers)]
        self.norm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.rotary_emb = nn.RotaryEmbedding(c.head_dim, c.max_position_embeddings, c.rope_theta, c.scaled)

    def forward(self, tokens: Value) -> Value:
        """Map ids (B, T) to hidden states (B, T, C)."""
        x: Value = self.embed_tokens(tokens)
        for block in self.layers:
            x = block(x, self.rotary_emb)
        normalized: Value = self.norm(x)
        return normalized


class Llama(nn.Module):
    """The whole model with its loss; the head may share the token embedding's weight."""

    def __init__(self, c: Config) -> None:
        self.config = c
        self.model = LlamaDecoder(c)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False, init=START)
        if c.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.loss = nn.CrossEntropyLoss()

    def forward(self, tokens: Value, targets: Value) -> tuple[Value, Value]:
        """Map ids (B, T) and the ids that follow them to (loss (1,), logits (B, T, V))."""
        logits = self.lm_head(self.model(tokens))
        return self.loss(logits, targets), logits

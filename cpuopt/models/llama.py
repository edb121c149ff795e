"""The Llama family, with the parameter and layer names of Hugging Face's checkpoints: Llama, Qwen2 and Qwen3.

Blocks of grouped-query attention with rotary positions and a SwiGLU, each behind an RMS normalization. Qwen2 has biases
on q, k and v; Qwen3 normalizes each head of q and k.

Source: Touvron et al. 2023 (arXiv 2302.13971), Grattafiori et al. 2024 (arXiv 2407.21783) for the scaling of positions;
``transformers``, whose sizes' names these are. The initial weights are normal with standard deviation 0.02.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import pi
from typing import Any, ClassVar

import numpy as np

from .. import functional as F
from .. import models, nn, ops
from ..errors import UserError
from ..program.program import Value

SCALINGS = ("default", "linear", "llama3")
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


@dataclass(frozen=True)
class Qwen2(Config):
    """Sizes of a Qwen2: a Llama with biases on q, k and v."""

    model: ClassVar = "qwen2"
    qkv_bias: ClassVar = True


@dataclass(frozen=True)
class Qwen3(Config):
    """Sizes of a Qwen3: a Llama that normalizes each head of q and k."""

    model: ClassVar = "qwen3"
    qk_norm: ClassVar = True


def sized(
    model: type[Config], vocab: int, width: int, ffn: int, layers: int, heads: tuple[int, int, int], **kw: Any
) -> Config:
    """Make the sizes of a model; `heads` are those of queries, those of keys, and the channels of one."""
    NH, NKV, HS = heads
    return model(vocab, width, ffn, layers, NH, NKV, HS, **kw)


LLAMA3: dict[str, Any] = {"rope_type": "llama3", "rope_factor": 32.0, "rope_theta": 500000.0}
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


class Attention(nn.Module):
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


class MLP(nn.Module):
    """Two projections, one gated by the SiLU of the other, and one back."""

    def __init__(self, c: Config) -> None:
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False, init=START)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False, init=START)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False, init=START)

    def forward(self, x: Value) -> Value:
        """Keep the shape (B, T, C)."""
        y: Value = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Block(nn.Module):
    """Attention and MLP, each on a normalized residual stream that it adds to."""

    def __init__(self, c: Config) -> None:
        self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.input_layernorm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x: Value, rotary: nn.RotaryEmbedding) -> Value:
        """Keep the shape (B, T, C)."""
        x = x + self.self_attn(self.input_layernorm(x), rotary)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class Decoder(nn.Module):
    """Embedding, blocks and the last normalization."""

    def __init__(self, c: Config) -> None:
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size, init=START)
        self.layers = [Block(c) for _ in range(c.num_hidden_layers)]
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
        self.model = Decoder(c)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False, init=START)
        if c.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.loss = nn.CrossEntropyLoss()

    def forward(self, tokens: Value, targets: Value) -> tuple[Value, Value]:
        """Map ids (B, T) and the ids that follow them to (loss (1,), logits (B, T, V))."""
        logits = self.lm_head(self.model(tokens))
        return self.loss(logits, targets), logits

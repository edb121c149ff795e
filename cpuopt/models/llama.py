"""The Llama family, with the parameter and layer names of Hugging Face's checkpoints, and Llama itself.

Blocks of grouped-query attention with rotary positions and a gated MLP, with RMS normalizations around them. A member
of the family is a config: its sizes, where its norms stand, and what its layers do otherwise (`families`).

Source: Touvron et al. 2023 (arXiv 2302.13971); ``transformers``, whose sizes' names these are. The initial weights are
normal with standard deviation 0.02.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import sqrt
from typing import Any, ClassVar

import numpy as np

from .. import functional as F
from .. import models, nn, ops
from ..errors import UserError
from ..program.program import Value
from . import positions
from .config import later

EXPECTED: dict[str, tuple[Any, ...]] = {
    # the values that this family computes; the first is the default of config.json
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0.0, None),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1.0, None),
    "quantization_config": (None,),
    "add_cross_attention": (False,),
}
ACTIVATIONS = {"silu": "silu", "gelu": "gelu_pytorch_tanh"}
"""The names of activations in ``config.json``."""
KINDS = ("full_attention", "sliding_attention")
"""The entries of ``layer_types``."""
LISTS = ("layer_types", "no_rope_layers")  # null: the usual ones
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
)
START = nn.normal(0.02)


def usual(*sizes: int | None, **more: Any) -> dict[str, Any]:
    """Name what ``transformers`` takes where a ``config.json`` lacks it: the numbers of `SIZES`, and other keys."""
    others = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False, "rope_theta": 10000.0}
    return dict(zip(SIZES, sizes, strict=True)) | others | more


@dataclass(frozen=True)
class Config(models.Config):
    """Sizes of a Llama, named as in ``config.json``; the scaling of its positions is in the fields from `rope_type` on.

    Attributes
    ----------
    head_dim : the channels of a head.
    rope_type : ``default``, or a scaling of `positions`, which reads some of the fields behind it.
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
    rope_beta_fast: float = later(32.0)
    rope_beta_slow: float = later(1.0)
    rope_attention_factor: float | None = later(None)
    rope_short_factor: tuple[float, ...] = later(())
    rope_long_factor: tuple[float, ...] = later(())

    model: ClassVar = "llama"
    architecture: ClassVar = "LlamaForCausalLM"
    missing: ClassVar[Mapping[str, Any]] = usual(32000, 4096, 11008, 32, 32, None, 2048)
    """The values that ``transformers`` takes where a ``config.json`` lacks them."""
    expected: ClassVar = EXPECTED | {"sliding_window": (None,)}
    """The values of keys that are no sizes; the first is written."""
    written: ClassVar[Mapping[str, Any]] = {}
    """Keys that are no sizes, and that a ``config.json`` gets."""
    norms: ClassVar = ("input_layernorm", "", "post_attention_layernorm", "")
    """The normalizations before and after attention, and before and after the MLP; an empty name is none."""
    norm_shift: ClassVar = 0
    """What is added to the weight of a normalization."""
    qk_norm: ClassVar = ""
    """Whether q and k are normalized: each ``head``, the whole ``row``, or not."""
    qkv_bias: ClassVar[bool | None] = None
    """Whether q, k and v have biases and o has none; None: `attention_bias` decides for all four."""
    gate: ClassVar = "silu"
    """The activation that gates the MLP, by its name in `functional`."""
    scaled_embeddings: ClassVar = False
    """Whether embeddings are multiplied by the root of the width."""
    query_pre_attn_scalar: ClassVar[float | None] = None
    """Scores are divided by its root; None: by that of `head_dim`."""
    attn_logit_softcapping: ClassVar[float | None] = None
    final_logit_softcapping: ClassVar[float | None] = None
    """Scores and logits x become ``cap * tanh(x / cap)``; None: they stay."""
    sliding_window: ClassVar[int | None] = None
    """The tokens that a token of a layer with a window reads, itself among them; None: all up to it."""
    layer_types: ClassVar[tuple[str, ...]] = ()
    """Which layers have a window; if it is empty, all but the last of `full_every`."""
    full_every: ClassVar = 0
    no_rope_layers: ClassVar[tuple[int, ...]] = (1,)
    """Whether a layer has positions, 1 or 0; if it is empty, each fourth has none."""
    partial_rotary_factor: ClassVar[float] = 1.0
    rope_local_base_freq: ClassVar[float | None] = None
    """The base of the positions of layers with a window, if they have positions of their own."""
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
            raise UserError(f"model: head_dim = {self.head_dim}; expected an even number, as channels rotate in pairs")
        positions.check(self)
        for name, entries in {"layer_types": KINDS, "no_rope_layers": (0, 1)}.items():
            given = vars(self).get(name, ())
            if given and len(given) != self.num_hidden_layers:
                raise UserError(f"model: {name} has {len(given)} entries; expected one for each layer, or none")
            if wrong := [x for x in given if x not in entries]:
                raise UserError(f"model: {name} has {repr(wrong[0])[:60]}; expected {' or '.join(map(repr, entries))}")
            if given and given == self.per_layer[name]:
                object.__setattr__(self, name, ())

    @property
    def per_layer(self) -> dict[str, tuple[Any, ...]]:
        """What the sizes that list something for each layer stand for if they are empty."""
        layers = range(1, self.num_hidden_layers + 1)
        kinds = tuple(KINDS[not self.full_every or i % self.full_every > 0] for i in layers)
        found = {"layer_types": kinds, "no_rope_layers": tuple(int(i % 4 > 0) for i in layers)}
        return {name: usual for name, usual in found.items() if name in vars(self)}

    def window(self, layer: int) -> int | None:
        """Return the tokens that a token of a layer reads, itself among them; None: all up to it."""
        kinds = self.layer_types or self.per_layer.get("layer_types", (KINDS[1],) * self.num_hidden_layers)
        return self.sliding_window if kinds[layer] == KINDS[1] else None

    def rotary(self, layer: int) -> str:
        """Return the name of a layer's rotary positions; it is empty if the layer has none."""
        rotates = self.no_rope_layers or self.per_layer["no_rope_layers"]
        if not rotates[layer % len(rotates)]:
            return ""
        return "rotary_emb_local" if self.rope_local_base_freq and self.window(layer) else "rotary_emb"

    def scaled(self, frequencies: np.ndarray) -> np.ndarray:
        """Scale the inverse frequencies of the rotary positions (rotary_dim / 2,), in float32."""
        return positions.scaled(self, frequencies)

    @property
    def rotary_dim(self) -> int:
        """The channels of a head that rotate."""
        return int(self.head_dim * self.partial_rotary_factor)

    def rows(self, name: str) -> list[int] | None:
        """Return the order of the rows of q and k: in a head of the files, all channels that rotate come first."""
        if not name.endswith(("q_proj.weight", "k_proj.weight")) or self.rotary_dim == self.head_dim:
            return None
        heads = self.num_attention_heads if name.endswith("q_proj.weight") else self.num_key_value_heads
        first, still, rest = self.rotary_dim // 2, self.rotary_dim, (self.head_dim - self.rotary_dim) // 2
        head = [*range(first), *range(still, still + rest), *range(first, still), *range(still + rest, self.head_dim)]
        return [h * self.head_dim + row for h in range(heads) for row in head]

    @property
    def block_size(self) -> int:
        """The longest context."""
        most = self.max_position_embeddings
        return min(most, self.rope_original_positions) if self.rope_type == "longrope" else most

    def module(self) -> nn.Module:
        """Make the module."""
        return Llama(self)

    @property
    def cache_sizes(self) -> dict[str, int]:
        """The sizes of the cache: heads of keys and values, and their channels."""
        return {"NKV": self.num_key_value_heads, "HS": self.head_dim}

    @classmethod
    def own_keys(cls) -> list[str]:
        """Return the sizes that are keys of ``config.json``; `positions` has the others."""
        return [f.name for f in fields(cls) if f.name not in ("rope_type", *positions.KEYS.values())]

    @classmethod
    def from_transformers(cls, given: Mapping[str, Any]) -> Config:
        """Read the sizes; refuse what this model does not compute."""
        for name, allowed in cls.expected.items():
            if given.get(name, allowed[0]) not in allowed:
                raise UserError(f"{name} is {repr(given[name])[:60]}; cpuopt has {allowed[0]!r}, transformers others")
        names = cls.own_keys()
        if empty := next((name for name in LISTS if name in names and given.get(name) == []), ""):
            raise UserError(f"{empty} is []; expected an entry for each layer, or null")
        layers = given.get("layer_types") or []
        if "layer_types" not in names and (
            not isinstance(layers, list) or any(kind != "full_attention" for kind in layers)
        ):
            raise UserError(f"layer_types is {repr(layers)[:60]}; cpuopt's {cls.model} has 'full_attention' only")
        given = {**cls.missing, **{n: x for n, x in given.items() if x is not None or n not in LISTS}}
        sizes = {name: given[name] for name in names if name in given}
        heads, head_dim = (sizes.pop(n, None) for n in ("num_key_value_heads", "head_dim"))
        if cls.qkv_bias is not None:
            sizes.pop("attention_bias", None)  # which this model does not read
        c = cls(**sizes, num_key_value_heads=1, head_dim=2)  # so that these numbers are right before they are divided
        return replace(
            c,
            num_key_value_heads=c.num_attention_heads if heads is None else heads,
            head_dim=c.hidden_size // c.num_attention_heads if head_dim is None else head_dim,
            **positions.rope_of(given, c),
        )

    def to_transformers(self) -> dict[str, Any]:
        """Return the content of ``config.json``, with the rotary positions in the new place and in the old ones."""
        if type(self) is Config and self.hidden_size % self.num_attention_heads:
            raise UserError(
                f"hidden_size = {self.hidden_size} is not a multiple of num_attention_heads = "
                f"{self.num_attention_heads}: transformers refuses such a {self.model}"
            )
        rope = positions.rope_json(self)
        sizes = {name: getattr(self, name) for name in self.own_keys()}
        return {
            "architectures": [self.architecture],
            "model_type": self.model,
            "hidden_act": ACTIVATIONS[self.gate],
            **sizes,
            **{name: list(getattr(self, name) or usual) for name, usual in self.per_layer.items()},
            **self.written,
            **({positions.ORIGINAL: rope[positions.ORIGINAL]} if self.rope_type == "longrope" else {}),
            "rope_parameters": rope | {"rope_theta": self.rope_theta},
            "rope_scaling": None if self.rope_type == "default" else rope,
            "bos_token_id": None,
            "eos_token_id": None,
        }


def normalization(c: Config, features: int) -> nn.RMSNorm:
    """Make a normalization of a model."""
    return nn.RMSNorm(features, c.rms_norm_eps, c.norm_shift)


class LlamaAttention(nn.Module):
    """Causal grouped-query attention with rotary positions, or none, between projections."""

    def __init__(self, c: Config, layer: int) -> None:
        width, biased = c.num_attention_heads * c.head_dim, c.attention_bias if c.qkv_bias is None else c.qkv_bias
        keys = c.num_key_value_heads * c.head_dim
        self.head_dim = c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, width, bias=biased, init=START)
        self.k_proj = nn.Linear(c.hidden_size, keys, bias=biased, init=START)
        self.v_proj = nn.Linear(c.hidden_size, keys, bias=biased, init=START)
        self.o_proj = nn.Linear(width, c.hidden_size, bias=c.attention_bias and c.qkv_bias is None, init=START)
        if c.qk_norm:
            sizes = (c.head_dim, c.head_dim) if c.qk_norm == "head" else (width, keys)
            self.q_norm, self.k_norm = (normalization(c, size) for size in sizes)
        self.qk_norm, self.query_scale = c.qk_norm, sqrt(c.head_dim / (c.query_pre_attn_scalar or c.head_dim))
        self.limits = {"window": c.window(layer) or 0, "cap": c.attn_logit_softcapping or 0}

    def forward(self, x: Value, rotary: nn.RotaryEmbedding | None, starts: Value | None = None) -> Value:
        """Keep the shape (B, T, C)."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary:
            q, k = rotary.forward(q, starts), rotary.forward(k, starts)  # in this layer
        if self.query_scale != 1:
            q = F.scale(q, self.query_scale)
        how: Any = {"is_causal": True, "enable_gqa": True, "head_size": self.head_dim, **self.limits}
        y: Value = self.o_proj(F.scaled_dot_product_attention(q, k, v, starts=starts, **how))
        return y


class LlamaMLP(nn.Module):
    """Two projections, one gated by an activation of the other, and one back."""

    def __init__(self, c: Config) -> None:
        self.gate = getattr(F, c.gate)
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False, init=START)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False, init=START)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False, init=START)

    def forward(self, x: Value) -> Value:
        """Keep the shape (B, T, C)."""
        y: Value = self.down_proj(self.gate(self.gate_proj(x)) * self.up_proj(x))
        return y


class LlamaBlock(nn.Module):
    """Attention and MLP, each between the normalizations that the model has, on a stream that it adds to."""

    def __init__(self, c: Config, layer: int) -> None:
        self.norms, self.rotary = c.norms, c.rotary(layer)
        self.self_attn = LlamaAttention(c, layer)
        self.mlp = LlamaMLP(c)
        for name in filter(None, c.norms):
            setattr(self, name, normalization(c, c.hidden_size))

    def normalized(self, place: int, x: Value) -> Value:
        """Normalize, if the model does it at a place of `Config.norms`."""
        y: Value = getattr(self, self.norms[place])(x) if self.norms[place] else x
        return y

    def forward(self, x: Value, rotary: nn.RotaryEmbedding | None, starts: Value | None = None) -> Value:
        """Keep the shape (B, T, C)."""
        x = x + self.normalized(1, self.self_attn(self.normalized(0, x), rotary, starts))
        x = x + self.normalized(3, self.mlp(self.normalized(2, x)))
        return x


class LlamaDecoder(nn.Module):
    """Embedding, blocks and the last normalization."""

    def __init__(self, c: Config) -> None:
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size, init=START)
        self.layers = [LlamaBlock(c, i) for i in range(c.num_hidden_layers)]
        self.norm = normalization(c, c.hidden_size)
        self.rotary_emb = nn.RotaryEmbedding(
            c.head_dim, c.block_size, c.rope_theta, c.scaled, c.rotary_dim, positions.amplitude(c)
        )
        if c.rope_local_base_freq:
            self.rotary_emb_local = nn.RotaryEmbedding(c.head_dim, c.block_size, c.rope_local_base_freq)
        self.scale = sqrt(c.hidden_size) if c.scaled_embeddings else 1

    def forward(self, tokens: Value, starts: Value | None = None) -> Value:
        """Map ids (B, T) to hidden states (B, T, C)."""
        x: Value = self.embed_tokens(tokens)
        if self.scale != 1:
            x = F.scale(x, self.scale)
        for block in self.layers:
            x = block(x, getattr(self, block.rotary) if block.rotary else None, starts)
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

    def forward(self, tokens: Value, targets: Value, starts: Value | None = None) -> tuple[Value, Value]:
        """Map ids (B, T) and the ids that follow them to (loss (1,), logits (B, T, V))."""
        logits = self.lm_head(self.model(tokens, starts))
        if cap := self.config.final_logit_softcapping:
            logits = F.scale(F.tanh(F.scale(logits, 1 / cap)), cap)
        return self.loss(logits, targets), logits

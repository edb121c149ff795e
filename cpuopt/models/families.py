"""Members of the Llama family, each a table of what differs from a Llama; and presets of all sizes.

A field is a key of ``config.json`` that a Llama does not have. What else a member computes otherwise is a constant of
the class, as `llama.Config` describes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any, ClassVar

from .. import models
from ..errors import UserError
from .llama import EXPECTED, Config

FULL = ("full_attention",)
"""The layers without a window."""


@dataclass(frozen=True)
class Qwen2(Config):
    """Sizes of a Qwen2: a Llama with biases on q, k and v."""

    model: ClassVar = "qwen2"
    architecture: ClassVar = "Qwen2ForCausalLM"
    qkv_bias: ClassVar = True
    expected: ClassVar = EXPECTED  # a window may be named beside the switch that turns it off
    written: ClassVar = {"use_sliding_window": False}
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
    architecture: ClassVar = "Qwen3ForCausalLM"
    qk_norm: ClassVar = "head"
    expected: ClassVar = EXPECTED
    written: ClassVar = Qwen2.written
    missing: ClassVar = {**Qwen2.missing, "head_dim": 128}


@dataclass(frozen=True)
class Mistral(Config):
    """Sizes of a Mistral: a Llama whose tokens may read no more than a window of those before them."""

    sliding_window: int | None = None

    model: ClassVar = "mistral"
    architecture: ClassVar = "MistralForCausalLM"
    qkv_bias: ClassVar = False
    expected: ClassVar = EXPECTED
    missing: ClassVar = {
        **Config.missing,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    }

    def window(self, layer: int) -> int | None:
        """Return the window of every layer."""
        return self.sliding_window


@dataclass(frozen=True)
class SmolLM3(Config):
    """Sizes of a SmolLM3: a Llama in which some layers have no positions, every fourth by default."""

    no_rope_layers: tuple[int, ...] = ()

    model: ClassVar = "smollm3"
    entries: ClassVar = (0, 1)
    architecture: ClassVar = "SmolLM3ForCausalLM"
    expected: ClassVar = EXPECTED | {"no_rope_layer_interval": (4,)}
    written: ClassVar = {"use_sliding_window": False, "pad_token_id": None}
    missing: ClassVar = {
        **Config.missing,
        "vocab_size": 128256,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "rope_theta": 2e6,
    }

    @property
    def per_layer(self) -> dict[str, list[Any]]:
        """Whether a layer has positions, 1 or 0."""
        return {"no_rope_layers": [int(i % 4 != 3) for i in range(self.num_hidden_layers)]}

    def rotary(self, layer: int) -> str:
        """Return no positions where the list has 0."""
        return "rotary_emb" if self.at("no_rope_layers", layer) else ""


@dataclass(frozen=True)
class Olmo2(Config):
    """Sizes of an OLMo-2: normalizations behind attention and MLP, and of the whole rows of q and k."""

    model: ClassVar = "olmo2"
    architecture: ClassVar = "Olmo2ForCausalLM"
    norms: ClassVar = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")
    qk_norm: ClassVar = "row"
    written: ClassVar = {"pad_token_id": None}
    missing: ClassVar = {**Config.missing, "vocab_size": 50304, "rms_norm_eps": 1e-5}


@dataclass(frozen=True)
class Phi3(Mistral):
    """Sizes of a Phi-3 or Phi-4: a Mistral whose files have fused projections, and whose heads may rotate in part."""

    partial_rotary_factor: float = 1.0

    model: ClassVar = "phi3"
    architecture: ClassVar = "Phi3ForCausalLM"
    fused: ClassVar = {
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    }
    expected: ClassVar = {n: x for n, x in EXPECTED.items() if n != "partial_rotary_factor"} | {
        "resid_pdrop": (0.0,),
        "embd_pdrop": (0.0,),
    }
    written: ClassVar = {"pad_token_id": None}
    missing: ClassVar = {
        **Config.missing,
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }

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


@dataclass(frozen=True)
class Gemma2(Config):
    """Sizes of a Gemma 2: four normalizations in a block, GeGLU, caps, and a window in every other layer."""

    tie_word_embeddings: bool = True
    sliding_window: int | None = 4096
    layer_types: tuple[str, ...] = ()
    query_pre_attn_scalar: float = 256
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0

    model: ClassVar = "gemma2"
    architecture: ClassVar = "Gemma2ForCausalLM"
    norms: ClassVar = (
        *("input_layernorm", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    )
    norm_shift: ClassVar = 1
    gate: ClassVar = "gelu"
    entries: ClassVar = (*FULL, "sliding_attention")
    full: ClassVar = 2
    """One layer of so many reads all tokens, the last of them."""
    expected: ClassVar = EXPECTED | {
        "hidden_act": ("gelu_pytorch_tanh",),
        "hidden_activation": ("gelu_pytorch_tanh",),
        "use_bidirectional_attention": (None, False),
    }
    written: ClassVar = {"hidden_activation": "gelu_pytorch_tanh", "pad_token_id": None}
    missing: ClassVar = {
        **Config.missing,
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }

    @property
    def per_layer(self) -> dict[str, list[Any]]:
        """Which layers have a window."""
        return {"layer_types": [self.entries[(i + 1) % self.full > 0] for i in range(self.num_hidden_layers)]}

    def window(self, layer: int) -> int | None:
        """Return the window of a layer that has one."""
        return None if self.at("layer_types", layer) in FULL else self.sliding_window

    @property
    def embedding_scale(self) -> float:  # type: ignore[override]
        """The root of the width."""
        return sqrt(self.hidden_size)

    @property
    def query_scale(self) -> float:  # type: ignore[override]
        """What makes the scale of scores 1 / sqrt(query_pre_attn_scalar)."""
        return sqrt(self.head_dim / self.query_pre_attn_scalar)

    @property
    def score_cap(self) -> float:  # type: ignore[override]
        """The cap of scores."""
        return self.attn_logit_softcapping or 0

    @property
    def logit_cap(self) -> float:  # type: ignore[override]
        """The cap of logits."""
        return self.final_logit_softcapping or 0


@dataclass(frozen=True)
class Gemma3(Gemma2):
    """Sizes of a Gemma 3 for text: heads of q and k are normalized, and windows have positions of their own."""

    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    rope_local_base_freq: float = 10000.0

    model: ClassVar = "gemma3_text"
    architecture: ClassVar = "Gemma3ForCausalLM"
    qk_norm: ClassVar = "head"
    full: ClassVar = 6
    missing: ClassVar = {
        **Gemma2.missing,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
    }

    @property
    def local_base(self) -> float:  # type: ignore[override]
        """The base of the positions of layers with a window."""
        return self.rope_local_base_freq

    def rotary(self, layer: int) -> str:
        """Return the positions of a layer: those of windows are not scaled."""
        return "rotary_emb" if self.at("layer_types", layer) in FULL else "rotary_emb_local"

    @classmethod
    def from_transformers(cls, given: Mapping[str, Any]) -> Config:
        """Read the sizes; positions may lie under the kinds of layers, and these follow from a number in old files."""
        rope, every = given.get("rope_parameters"), given.get("sliding_window_pattern")
        if isinstance(rope, dict) and rope.keys() & set(cls.entries):
            full, local = (rope.get(kind) or {} for kind in cls.entries)
            if other := sorted(local.keys() - {"rope_type", "rope_theta"}) or local.get("rope_type") not in (
                None,
                "default",
            ):
                raise UserError(f"rope_parameters of sliding_attention: {other} is not computed; expected the default")
            base = {"rope_local_base_freq": local["rope_theta"]} if "rope_theta" in local else {}
            given = {**given, "rope_parameters": full, **base}
        if not given.get("layer_types") and type(every) is int and every > 0:
            n = given.get("num_hidden_layers", cls.missing["num_hidden_layers"])
            given = {**given, "layer_types": [cls.entries[(i + 1) % every > 0] for i in range(n)]}
        return super().from_transformers(given)

    def to_transformers(self) -> dict[str, Any]:
        """Return the content of ``config.json``."""
        found = super().to_transformers()
        kinds = (found["rope_parameters"], {"rope_type": "default", "rope_theta": self.rope_local_base_freq})
        return found | {"rope_parameters": dict(zip(self.entries, kinds, strict=True))}


def sized(
    model: type[Config], vocab: int, width: int, ffn: int, layers: int, heads: tuple[int, int, int], **kw: Any
) -> Config:
    """Make the sizes of a model; `heads` are those of queries, those of keys, and the channels of one."""
    NH, NKV, HS = heads
    return model(vocab, width, ffn, layers, NH, NKV, HS, **kw)


LLAMA3: Mapping[str, Any] = {"rope_type": "llama3", "rope_factor": 32.0, "rope_theta": 500000.0}
TINY = (256, 64, 160, 2, (4, 2, 16))
PRESETS: Mapping[str, Config] = {
    "llama-tiny": sized(Config, *TINY, max_position_embeddings=64, tie_word_embeddings=True),
    "stories260K": sized(Config, 512, 64, 172, 5, (8, 4, 8), max_position_embeddings=512, tie_word_embeddings=True),
    "stories15M": sized(Config, 32000, 288, 768, 6, (6, 6, 48), max_position_embeddings=256, tie_word_embeddings=True),
    "smollm2-135M": sized(
        Config, 49152, 576, 1536, 30, (9, 3, 64), max_position_embeddings=8192, tie_word_embeddings=True, rope_theta=1e5
    ),
    "smollm2-360M": sized(
        Config,
        *(49152, 960, 2560, 32, (15, 5, 64)),
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        rope_theta=1e5,
    ),
    "qwen2.5-0.5B": sized(
        Qwen2,
        *(151936, 896, 4864, 24, (14, 2, 64)),
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        rope_theta=1e6,
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
    "olmo2-1B": sized(
        Olmo2,
        *(100352, 2048, 8192, 16, (16, 16, 128)),
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        rope_theta=5e5,
    ),
    "gemma3-270M": sized(
        Gemma3,
        *(262144, 640, 2048, 18, (4, 1, 256)),
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        sliding_window=512,
        rope_theta=1e6,
    ),
    "gemma3-1B": sized(
        Gemma3,
        *(262144, 1152, 6912, 26, (4, 1, 256)),
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        sliding_window=512,
        rope_theta=1e6,
    ),
    "gemma2-tiny": sized(Gemma2, *TINY, max_position_embeddings=64, sliding_window=16, query_pre_attn_scalar=16),
    "gemma3-tiny": sized(Gemma3, *TINY, max_position_embeddings=64, sliding_window=16, query_pre_attn_scalar=16),
    "mistral-tiny": sized(Mistral, *TINY, max_position_embeddings=64, sliding_window=16),
    "smollm3-tiny": sized(SmolLM3, *TINY, max_position_embeddings=64, no_rope_layers=(1, 0)),
    "olmo2-tiny": sized(Olmo2, *TINY, max_position_embeddings=64),
    "phi3-tiny": sized(Phi3, *TINY, max_position_embeddings=64, partial_rotary_factor=0.75),
}
"""Sizes by name; the ``tiny`` ones read bytes and train in seconds."""
for _model in (Config, Qwen2, Qwen3, Mistral, SmolLM3, Olmo2, Phi3, Gemma2, Gemma3):
    models.register(_model, {name: c for name, c in PRESETS.items() if type(c) is _model})

"""Members of the Llama family, each a table of what differs from a Llama; and presets of all sizes.

A field is a key of ``config.json`` that a Llama does not have. What else a member computes otherwise is a constant of
the class, as `llama.Config` describes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .. import models
from .llama import EXPECTED, Config


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

    def rotates(self, layer: int) -> bool:
        """Return whether a layer has positions, which its name in ``config.json`` turns round."""
        return bool(self.at("no_rope_layers", layer))


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
    "mistral-tiny": sized(Mistral, *TINY, max_position_embeddings=64),
    "smollm3-tiny": sized(SmolLM3, *TINY, max_position_embeddings=64, no_rope_layers=(1, 0)),
    "olmo2-tiny": sized(Olmo2, *TINY, max_position_embeddings=64),
    "phi3-tiny": sized(Phi3, *TINY, max_position_embeddings=64, partial_rotary_factor=0.75),
}
"""Sizes by name; the ``tiny`` ones read bytes and train in seconds."""
for _model in (Config, Qwen2, Qwen3, Mistral, SmolLM3, Olmo2, Phi3):
    models.register(_model, {name: c for name, c in PRESETS.items() if type(c) is _model})

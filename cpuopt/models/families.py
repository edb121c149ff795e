"""Members of the Llama family, each a table of what differs from a Llama; and presets of all sizes.

A field is a key of ``config.json`` that a Llama does not have. What else a member computes otherwise is a constant of
the class, as `llama.Config` describes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .. import models
from ..errors import UserError
from .config import MOST_LAYERS
from .llama import EXPECTED, KINDS, SIZES, Config, usual
from .positions import ORIGINAL

AROUND = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
SCORE_CAP = "attn_logit_softcapping"
IGNORED_CAP = "which transformers and llama.cpp ignore in a Gemma 3; expected null, which computes what they do"
DROPOUT = {"resid_pdrop": (0.0,), "embd_pdrop": (0.0,)}


@dataclass(frozen=True)
class Qwen2(Config):
    """Sizes of a Qwen2: a Llama with biases on q, k and v."""

    model: ClassVar = "qwen2"
    architecture: ClassVar = "Qwen2ForCausalLM"
    qkv_bias: ClassVar = True
    expected: ClassVar = EXPECTED  # a window may be named beside the switch that turns it off
    written: ClassVar = {"use_sliding_window": False}
    missing: ClassVar = usual(151936, 4096, 22016, 32, 32, 32, 32768)


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

    sliding_window: int | None = None  # type: ignore[misc]

    model: ClassVar = "mistral"
    architecture: ClassVar = "MistralForCausalLM"
    qkv_bias: ClassVar = False
    expected: ClassVar = EXPECTED
    missing: ClassVar = usual(32000, 4096, 14336, 32, 32, 8, 131072, sliding_window=4096)


@dataclass(frozen=True)
class SmolLM3(Config):
    """Sizes of a SmolLM3: a Llama in which some layers have no positions, every fourth by default."""

    no_rope_layers: tuple[int, ...] = ()  # type: ignore[misc]

    model: ClassVar = "smollm3"
    architecture: ClassVar = "SmolLM3ForCausalLM"
    expected: ClassVar = EXPECTED | {"no_rope_layer_interval": (4,)}
    written: ClassVar = {"use_sliding_window": False, "pad_token_id": None}
    missing: ClassVar = usual(128256, 2048, 11008, 36, 16, 4, 32768, tie_word_embeddings=True, rope_theta=2e6)


@dataclass(frozen=True)
class Olmo2(Config):
    """Sizes of an OLMo-2: normalizations behind attention and MLP, and of the whole rows of q and k."""

    model: ClassVar = "olmo2"
    architecture: ClassVar = "Olmo2ForCausalLM"
    norms: ClassVar = ("", "post_attention_layernorm", "", AROUND[1])
    qk_norm: ClassVar = "row"
    written: ClassVar = {"pad_token_id": None}
    missing: ClassVar = usual(50304, 4096, 11008, 32, 32, None, 2048, rms_norm_eps=1e-5)


@dataclass(frozen=True)
class Phi3(Mistral):
    """Sizes of a Phi-3 or Phi-4: a Mistral whose files have fused projections, and whose heads may rotate in part."""

    partial_rotary_factor: float = 1.0  # type: ignore[misc]

    model: ClassVar = "phi3"
    architecture: ClassVar = "Phi3ForCausalLM"
    fused: ClassVar = {
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    }
    expected: ClassVar = {n: x for n, x in EXPECTED.items() if n != "partial_rotary_factor"} | DROPOUT
    written: ClassVar = {"pad_token_id": None}
    missing: ClassVar = usual(32064, 3072, 8192, 32, 32, None, 4096, rms_norm_eps=1e-5) | {ORIGINAL: 4096}


@dataclass(frozen=True)
class Gemma2(Config):
    """Sizes of a Gemma 2: four normalizations in a block, GeGLU, caps, and a window in every other layer."""

    tie_word_embeddings: bool = True
    sliding_window: int | None = 4096  # type: ignore[misc]
    layer_types: tuple[str, ...] = ()  # type: ignore[misc]
    query_pre_attn_scalar: float = 256  # type: ignore[misc]
    attn_logit_softcapping: float | None = 50.0  # type: ignore[misc]
    final_logit_softcapping: float | None = 30.0  # type: ignore[misc]

    model: ClassVar = "gemma2"
    architecture: ClassVar = "Gemma2ForCausalLM"
    norms: ClassVar = (*("input_layernorm", "post_attention_layernorm"), *AROUND)
    norm_shift: ClassVar = 1
    gate: ClassVar = "gelu"
    scaled_embeddings: ClassVar = True
    full_every: ClassVar = 2
    expected: ClassVar = EXPECTED | {
        **dict.fromkeys(("hidden_act", "hidden_activation"), ("gelu_pytorch_tanh",)),
        "use_bidirectional_attention": (None, False),
    }
    written: ClassVar = {"hidden_activation": "gelu_pytorch_tanh", "pad_token_id": None}
    missing: ClassVar = usual(256000, 2304, 9216, 26, 8, 4, 8192, head_dim=256, tie_word_embeddings=True)


@dataclass(frozen=True)
class Gemma3(Gemma2):
    """Sizes of a Gemma 3 for text: heads of q and k are normalized, and windows have positions of their own."""

    attn_logit_softcapping: float | None = None  # type: ignore[misc]
    final_logit_softcapping: float | None = None  # type: ignore[misc]
    rope_local_base_freq: float = 10000.0  # type: ignore[misc]

    model: ClassVar = "gemma3_text"
    architecture: ClassVar = "Gemma3ForCausalLM"
    qk_norm: ClassVar = "head"
    full_every: ClassVar = 6
    missing: ClassVar = Gemma2.missing | {"vocab_size": 262208, SIZES[-1]: 131072, "rope_theta": 1e6}

    @classmethod
    def from_transformers(cls, given: Mapping[str, Any]) -> Config:
        """Read the sizes; positions may lie under the kinds of layers, and these follow from a number in old files."""
        if given.get(SCORE_CAP) is not None:
            raise UserError(f"{SCORE_CAP} is {repr(given[SCORE_CAP])[:60]}, {IGNORED_CAP}")
        rope, every = given.get("rope_parameters"), given.get("sliding_window_pattern")
        if isinstance(rope, dict) and rope.keys() & set(KINDS):
            full, local = (rope.get(kind) or {} for kind in KINDS)
            if local.keys() - {"rope_type", "rope_theta"} or local.get("rope_type", "default") != "default":
                raise UserError(f"rope_parameters of {KINDS[1]} are {repr(local)[:60]}; expected the default, unscaled")
            base = {"rope_local_base_freq": local["rope_theta"]} if "rope_theta" in local else {}
            given = {**given, "rope_parameters": full, **base}
        if every is not None and not (type(every) is int and every > 0):
            raise UserError(f"sliding_window_pattern is {repr(every)[:60]}; expected a whole number of 1 or more")
        n = given.get("num_hidden_layers", cls.missing["num_hidden_layers"])
        if every and given.get("layer_types") is None and type(n) is int and n <= MOST_LAYERS:  # others are refused
            given = {**given, "layer_types": [KINDS[(i + 1) % every > 0] for i in range(n)]}
        return super().from_transformers(given)

    def to_transformers(self) -> dict[str, Any]:
        """Return the content of ``config.json``."""
        if self.attn_logit_softcapping is not None:
            raise UserError(f"{SCORE_CAP} is {self.attn_logit_softcapping}, {IGNORED_CAP}")
        found = super().to_transformers()
        kinds = (found["rope_parameters"], {"rope_type": "default", "rope_theta": self.rope_local_base_freq})
        return found | {"rope_parameters": dict(zip(KINDS, kinds, strict=True))}


def sized(
    model: type[Config], vocab: int, width: int, ffn: int, layers: int, heads: tuple[int, int, int], T: int, **kw: Any
) -> Config:
    """Make the sizes of a model; `heads` are those of queries, those of keys, and the channels of one."""
    return model(vocab, width, ffn, layers, *heads, T, **kw)


TINY = (256, 64, 160, 2, (4, 2, 16), 64)
LLAMA3: Mapping[str, Any] = {"rope_type": "llama3", "rope_factor": 32.0, "rope_theta": 500000.0}
TIED: Mapping[str, Any] = {"tie_word_embeddings": True}
QWEN: Mapping[str, Any] = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, **TIED}
GEMMA: Mapping[str, Any] = {"sliding_window": 512, **QWEN}
SHORT: Mapping[str, Any] = {"sliding_window": 16, "query_pre_attn_scalar": 16}
PRESETS: Mapping[str, Config] = {
    "llama-tiny": sized(Config, *TINY, **TIED),
    "stories260K": sized(Config, 512, 64, 172, 5, (8, 4, 8), 512, **TIED),
    "stories15M": sized(Config, 32000, 288, 768, 6, (6, 6, 48), 256, **TIED),
    "smollm2-135M": sized(Config, 49152, 576, 1536, 30, (9, 3, 64), 8192, rope_theta=1e5, **TIED),
    "smollm2-360M": sized(Config, 49152, 960, 2560, 32, (15, 5, 64), 8192, rope_theta=1e5, **TIED),
    "qwen2.5-0.5B": sized(Qwen2, 151936, 896, 4864, 24, (14, 2, 64), 32768, **QWEN),
    "qwen3-0.6B": sized(Qwen3, 151936, 1024, 3072, 28, (16, 8, 128), 40960, **QWEN),
    "tinyllama-1.1B": Config(),
    "llama3.2-1B": sized(Config, 128256, 2048, 8192, 16, (32, 8, 64), 131072, **TIED, **LLAMA3),
    "olmo2-1B": sized(Olmo2, 100352, 2048, 8192, 16, (16, 16, 128), 4096, rms_norm_eps=1e-6, rope_theta=5e5),
    "gemma3-270M": sized(Gemma3, 262144, 640, 2048, 18, (4, 1, 256), 32768, **GEMMA),
    "gemma3-1B": sized(Gemma3, 262144, 1152, 6912, 26, (4, 1, 256), 32768, **GEMMA),
    "gemma2-tiny": sized(Gemma2, *TINY, **SHORT),
    "gemma3-tiny": sized(Gemma3, *TINY, **SHORT),
    "mistral-tiny": sized(Mistral, *TINY, sliding_window=16),
    "smollm3-tiny": sized(SmolLM3, *TINY, no_rope_layers=(1, 0)),
    "olmo2-tiny": sized(Olmo2, *TINY),
    "phi3-tiny": sized(Phi3, *TINY, partial_rotary_factor=0.75),
}
"""Sizes by name; the ``tiny`` ones read bytes and train in seconds."""
for _model in (Config, Qwen2, Qwen3, Mistral, SmolLM3, Olmo2, Phi3, Gemma2, Gemma3):
    models.register(_model, {name: c for name, c in PRESETS.items() if type(c) is _model})

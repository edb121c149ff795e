"""GPT-2, with the parameter and layer names of its checkpoint.

Source: Radford et al. 2019; the initial weights follow OpenAI's code: normal with standard deviation 0.02, the
projections into the residual stream scaled by 1/sqrt(2 * n_layer).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .. import functional as F
from .. import models, nn, ops
from ..errors import UserError
from ..program.program import Value

END_OF_TEXT = 50256
EXPECTED: dict[str, tuple[Any, ...]] = {
    # the values that this GPT-2 computes; the first is the default of config.json
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}


@dataclass(frozen=True)
class Config(models.Config):
    """Sizes of a GPT-2."""

    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    vocab_size: int = 50257
    block_size: int = 1024

    model: ClassVar = "gpt2"
    cached: ClassVar = {ops.attention_forward: ops.attention_decode, ops.embedding_forward: ops.embedding_decode}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_embd % self.n_head:
            raise UserError(f"model: n_embd = {self.n_embd} is not a multiple of n_head = {self.n_head}")

    def module(self) -> nn.Module:
        """Make the module."""
        return GPT2(self)

    @property
    def cache_sizes(self) -> dict[str, int]:
        """The sizes of the cache: heads of keys and values, and their channels."""
        return {"NH": self.n_head, "HS": self.n_embd // self.n_head}

    @classmethod
    def from_transformers(cls, given: Mapping[str, Any]) -> Config:
        """Read the sizes; refuse other variants of the model."""
        for name, allowed in EXPECTED.items():
            if given.get(name, allowed[0]) not in allowed:
                raise UserError(f"{name} is {str(given[name])[:60]!r}; cpuopt's GPT-2 has {allowed[0]!r} only")
        sizes = {name: given[name] for name in ("n_layer", "n_head", "n_embd", "vocab_size") if name in given}
        if context := given.get("n_positions", given.get("n_ctx")):
            sizes["block_size"] = context
        config = cls(**sizes)
        if given.get("n_inner") not in (None, 4 * config.n_embd):
            raise UserError(f"n_inner is {str(given['n_inner'])[:60]}; expected 4 * n_embd = {4 * config.n_embd}")
        return config

    def to_transformers(self) -> dict[str, Any]:
        """Return the content of ``config.json`` as ``save_pretrained`` writes it."""
        end = END_OF_TEXT if self.vocab_size > END_OF_TEXT else None
        return {
            "architectures": ["GPT2LMHeadModel"],
            **{name: allowed[0] for name, allowed in EXPECTED.items()},
            **{name: getattr(self, name) for name in ("n_layer", "n_head", "n_embd", "vocab_size")},
            "bos_token_id": end,
            "eos_token_id": end,
            "n_positions": self.block_size,
            "n_ctx": self.block_size,
        }


PRESETS = {
    "gpt2-tiny": Config(2, 2, 64, 256, 64),
    "gpt2-nano": Config(4, 4, 128, 256, 64),
    "gpt2-baby": Config(6, 6, 384, 256, 256),
    "gpt2-6L": Config(6, 8, 256, 50257, 1024),
    "gpt2-124M": Config(),
    "gpt2-355M": Config(24, 16, 1024),
    "gpt2-774M": Config(36, 20, 1280),
    "gpt2-1558M": Config(48, 25, 1600),
}
"""Sizes by name; the first three read bytes. nanoGPT trains the sizes of ``nano`` on a CPU, ``baby`` on characters."""
models.register(Config, PRESETS)


class GPT2Attention(nn.Module):
    """Causal self-attention between two projections."""

    def __init__(self, c: Config) -> None:
        self.n_head = c.n_head
        self.c_attn = nn.Linear(c.n_embd, 3 * c.n_embd, init=nn.normal(0.02))
        self.c_proj = nn.Linear(c.n_embd, c.n_embd, init=nn.normal(0.02 * (2 * c.n_layer) ** -0.5))

    def forward(self, x: Value, starts: Value | None = None) -> Value:
        """Keep the shape (B, T, C)."""
        y: Value = self.c_proj(F.attention(self.c_attn(x), self.n_head, starts=starts))
        return y


class GPT2MLP(nn.Module):
    """Four times wider, GELU, and back."""

    def __init__(self, c: Config) -> None:
        self.c_fc = nn.Linear(c.n_embd, 4 * c.n_embd, init=nn.normal(0.02))
        self.c_proj = nn.Linear(4 * c.n_embd, c.n_embd, init=nn.normal(0.02 * (2 * c.n_layer) ** -0.5))

    def forward(self, x: Value) -> Value:
        """Keep the shape (B, T, C)."""
        y: Value = self.c_proj(F.gelu(self.c_fc(x)))
        return y


class GPT2Block(nn.Module):
    """Attention and MLP, each on a normalized residual stream that it adds to."""

    def __init__(self, c: Config) -> None:
        self.ln_1 = nn.LayerNorm(c.n_embd)
        self.attn = GPT2Attention(c)
        self.ln_2 = nn.LayerNorm(c.n_embd)
        self.mlp = GPT2MLP(c)

    def forward(self, x: Value, starts: Value | None = None) -> Value:
        """Keep the shape (B, T, C)."""
        x = x + self.attn(self.ln_1(x), starts)
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT2(nn.Module):
    """The whole model with its loss; the head shares the token embedding's weight."""

    def __init__(self, c: Config) -> None:
        self.config = c
        self.wte = nn.Embedding(c.vocab_size, c.n_embd, init=nn.normal(0.02))
        self.wpe = nn.Embedding(c.block_size, c.n_embd, init=nn.normal(0.02))
        self.h = [GPT2Block(c) for _ in range(c.n_layer)]
        self.ln_f = nn.LayerNorm(c.n_embd)
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        self.loss = nn.CrossEntropyLoss()

    def forward(self, tokens: Value, targets: Value, starts: Value | None = None) -> tuple[Value, Value]:
        """Map ids (B, T) and the ids that follow them to (loss (1,), logits (B, T, V))."""
        x = self.wte(tokens, self.wpe.weight, starts)
        for block in self.h:
            x = block(x, starts)
        logits = self.lm_head(self.ln_f(x))
        return self.loss(logits, targets), logits

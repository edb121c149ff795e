"""Llama, Qwen2 and Qwen3 in plain PyTorch and in transformers: the peers that cpuopt is measured against.

The parameters have the names and shapes of a cpuopt checkpoint, which are those of Hugging Face's. The plain model
joins the weights of q, k and v, and those of gate and up, each to one product, as fast models do.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import pi
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

Params = Mapping[str, np.ndarray]


def tables(c: Mapping[str, Any], positions: int) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines (positions, HS), in float32, of both halves of a head."""
    HS, factor = c["head_dim"], c["rope_factor"]
    f = 1.0 / (c["rope_theta"] ** (torch.arange(0, HS, 2, dtype=torch.float32) / HS))
    if c["rope_type"] == "linear":
        f = f / factor
    elif c["rope_type"] == "llama3":
        low, high, original = (c[f"rope_{n}"] for n in ("low_freq_factor", "high_freq_factor", "original_positions"))
        turns = original * f / (2 * pi)
        share = ((turns - low) / (high - low)).clamp(0, 1)
        f = (1 - share) * f / factor + share * f
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), f)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads (B, NH, T, HS) by the angles of their positions."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class RMSNorm(nn.Module):
    """Rows normalized by their root mean square, and scaled."""

    def __init__(self, features: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight  # F.rms_norm takes 10 % longer


class Attention(nn.Module):
    """Causal grouped-query attention from a fused qkv."""

    def __init__(self, c: Mapping[str, Any], biased: bool, out_biased: bool, normed: bool) -> None:
        super().__init__()
        self.HS, self.NH, self.NKV = c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"]
        self.qkv_proj = nn.Linear(c["hidden_size"], (self.NH + 2 * self.NKV) * self.HS, bias=biased)
        self.o_proj = nn.Linear(self.NH * self.HS, c["hidden_size"], bias=out_biased)
        self.q_norm, self.k_norm = (RMSNorm(self.HS, c["rms_norm_eps"]) if normed else nn.Identity() for _ in "qk")

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map (B, T, C) to (B, T, C)."""
        B, T, _ = x.shape
        heads = self.qkv_proj(x).view(B, T, self.NH + 2 * self.NKV, self.HS).transpose(1, 2)
        q, k, v = heads.split((self.NH, self.NKV, self.NKV), dim=1)
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.NH != self.NKV)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, self.NH * self.HS))


class MLP(nn.Module):
    """Gate and up as one product, SwiGLU, and back."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(width, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape (B, T, C)."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Block(nn.Module):
    """Attention, then the MLP, each on normalized rows and added to its input."""

    def __init__(self, c: Mapping[str, Any], biased: bool, out_biased: bool, normed: bool) -> None:
        super().__init__()
        self.self_attn = Attention(c, biased, out_biased, normed)
        self.mlp = MLP(c["hidden_size"], c["intermediate_size"])
        self.input_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.post_attention_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Keep the shape (B, T, C)."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """The whole model, for up to `positions` tokens of a row."""

    def __init__(self, model: str, c: Mapping[str, Any], positions: int) -> None:
        super().__init__()
        biased = model == "qwen2" or (model == "llama" and c["attention_bias"])
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        normed, out_biased = model == "qwen3", biased and model == "llama"
        self.layers = nn.ModuleList(Block(c, biased, out_biased, normed) for _ in range(c["num_hidden_layers"]))
        self.norm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.lm_head = nn.Linear(c["hidden_size"], c["vocab_size"], bias=False)
        if c["tie_word_embeddings"]:
            self.lm_head.weight = self.embed_tokens.weight
        cos, sin = tables(c, positions)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map ids (B, T) to logits (B, T, V)."""
        T = tokens.shape[1]
        x, cos, sin = self.embed_tokens(tokens), self.cos[:T], self.sin[:T]
        for block in self.layers:
            x = block(x, cos, sin)
        return self.lm_head(self.norm(x))


def joined(params: Params) -> dict[str, Tensor]:
    """Join the weights of q, k and v, and of gate and up, and leave out the first word of the names."""
    found: dict[str, Tensor] = {}
    for name, array in params.items():
        name = name.removeprefix("model.")
        for whole, parts in ("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj")):
            if (first := f".{parts[0]}.") in name:
                every = [torch.from_numpy(params[f"model.{name}".replace(first, f".{part}.")]) for part in parts]
                found[name.replace(first, f".{whole}.")] = torch.cat(every)
        if not any(f".{part}_proj." in name for part in ("q", "k", "v", "gate", "up")):
            found[name] = torch.from_numpy(array)
    return found


def plain(model: str, sizes: Mapping[str, Any], params: Params, positions: int) -> nn.Module:
    """Make the plain model with some weights; a missing, surplus or misshapen one is an error."""
    made, weights = Llama(model, sizes, positions), joined(params)
    if sizes["tie_word_embeddings"]:
        weights["lm_head.weight"] = weights["embed_tokens.weight"]
    made.load_state_dict(weights, strict=True)
    return made


def transformers_own(model: str, sizes: Mapping[str, Any], params: Params) -> nn.Module:
    """Make transformers' own model with some weights, in float32 and with PyTorch's fused attention."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = dict(sizes)
    rope = {"rope_type": sizes.pop("rope_type"), "rope_theta": sizes.pop("rope_theta")}
    numbers = {n: sizes.pop(f"rope_{n}") for n in ("factor", "low_freq_factor", "high_freq_factor")}
    numbers["original_max_position_embeddings"] = sizes.pop("rope_original_positions")
    takes = {"default": [], "linear": ["factor"], "llama3": [*numbers]}[rope["rope_type"]]
    rope |= {n: numbers[n] for n in takes}
    if model == "qwen2":
        del sizes["attention_bias"]  # which it always has, for q, k and v
    config = AutoConfig.for_model(model, **sizes, rope_parameters=rope, use_cache=False)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    weights = {name: torch.from_numpy(array) for name, array in params.items()}
    if sizes["tie_word_embeddings"]:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    made.load_state_dict(weights, strict=True)
    made.train()
    return made

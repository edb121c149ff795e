"""GPT-2 in plain PyTorch: the peer that cpuopt is measured and checked against.

The parameters have the names and shapes of a cpuopt checkpoint: ``wte.weight`` (V, C), ``wpe.weight`` (maxT, C),
``h.{i}.attn.c_attn.weight`` (3C, C) with the rows of q, then k, then v. The head is tied to ``wte.weight``.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Causal self-attention from a fused qkv."""

    def __init__(self, n_head: int, n_embd: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, C) to (B, T, C)."""
        B, T, C = x.shape
        q, k, v = (y.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for y in self.c_attn(x).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    """Two linear layers with a GELU between, four times as wide."""

    def __init__(self, n_embd: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(n_embd, 4 * n_embd)
        self.c_proj = nn.Linear(4 * n_embd, n_embd)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, C) to (B, T, C)."""
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """Attention, then the MLP, each on normalized rows and added to its input."""

    def __init__(self, n_head: int, n_embd: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd, eps=1e-5)
        self.attn = Attention(n_head, n_embd)
        self.ln_2 = nn.LayerNorm(n_embd, eps=1e-5)
        self.mlp = MLP(n_embd)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, C) to (B, T, C)."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """GPT-2 without dropout; the vocabulary is not padded."""

    def __init__(self, n_layer: int, n_head: int, n_embd: int, vocab_size: int, block_size: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(Block(n_head, n_embd) for _ in range(n_layer))
        self.ln_f = nn.LayerNorm(n_embd, eps=1e-5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map ids (B, T) to logits (B, T, V)."""
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of logits (B, T, V) over the int64 targets (B, T) that are not -100."""
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1), ignore_index=-100)


def load(model: GPT2, params: Mapping[str, np.ndarray]) -> None:
    """Copy `params` into the model, in the model's dtype; a missing, surplus or misshapen one is an error."""
    model.load_state_dict({name: torch.from_numpy(array) for name, array in params.items()}, strict=True)

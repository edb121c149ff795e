"""GPT-2, with the parameter and layer names of its checkpoint.

Source: Radford et al. 2019; the initial weights follow OpenAI's code: normal with standard deviation 0.02, the
projections into the residual stream scaled by 1/sqrt(2 * n_layer).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace

from .. import functional as F
from .. import nn
from ..errors import UserError
from ..files.reading import parse_json
from ..ops.declaration import Shape
from ..program.program import Value
from ..wording import nearest

MOST_LAYERS = 4096
"""Each layer has names and shapes, which are listed before any memory is counted."""


@dataclass(frozen=True)
class Config:
    """Sizes of a GPT-2."""

    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    vocab_size: int = 50257
    block_size: int = 1024

    def __post_init__(self) -> None:
        for name, n in asdict(self).items():
            most = MOST_LAYERS if name == "n_layer" else 2**31 - 1
            if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= most:
                raise UserError(f"model: {name} is {repr(n)[:60]}; expected a whole number from 1 to {most}")
        if self.n_embd % self.n_head:
            raise UserError(f"model: n_embd = {self.n_embd} is not a multiple of n_head = {self.n_head}")

    @property
    def n_params(self) -> int:
        """Count of trained numbers; the tied head counts once."""
        C, L = self.n_embd, self.n_layer
        return (self.vocab_size + self.block_size + 2) * C + L * (12 * C * C + 13 * C)

    def shapes(self) -> dict[str, Shape]:
        """Give the shape of every parameter, by its name."""
        return {name: p.shape for name, p in GPT2(self).named_parameters()}


PRESETS = {
    "gpt2-tiny": Config(2, 2, 64, 256, 64),
    "gpt2-6L": Config(6, 8, 256, 50257, 1024),
    "gpt2-124M": Config(),
    "gpt2-355M": Config(24, 16, 1024),
    "gpt2-774M": Config(36, 20, 1280),
    "gpt2-1558M": Config(48, 25, 1600),
}
"""Model sizes by name; ``gpt2-tiny`` reads bytes and trains in seconds."""


def parse_config(text: str) -> tuple[str, Config]:
    """Read a preset's name, or a JSON object of sizes over those of 124M.

    Raises
    ------
    UserError
        For an unknown preset, a text that is not JSON, an unknown or impossible size.
    """
    if text in PRESETS:
        return text, PRESETS[text]
    if not text.lstrip().startswith("{"):
        known = nearest(text, PRESETS)
        raise UserError(f"--model {repr(text)[:80]}: no such preset; {known} or sizes as in '{{\"n_layer\": 4}}'")
    try:
        sizes = parse_json(text)
    except ValueError as e:
        raise UserError(f"--model {repr(text)[:80]}: not JSON ({e}); expected sizes as in '{{\"n_layer\": 4}}'") from e
    names = [f.name for f in fields(Config)]
    for name in sizes:
        if name not in names:
            raise UserError(f"--model: unknown size {name[:50]!r}; known: {', '.join(names)}")
    return "gpt2-custom", replace(Config(), **sizes)


class Attention(nn.Module):
    """Causal self-attention between two projections."""

    def __init__(self, c: Config) -> None:
        self.n_head = c.n_head
        self.c_attn = nn.Linear(c.n_embd, 3 * c.n_embd, init=nn.normal(0.02))
        self.c_proj = nn.Linear(c.n_embd, c.n_embd, init=nn.normal(0.02 * (2 * c.n_layer) ** -0.5))

    def forward(self, x: Value) -> Value:
        """Keep the shape (B, T, C)."""
        y: Value = self.c_proj(F.attention(self.c_attn(x), self.n_head))
        return y


class MLP(nn.Module):
    """Four times wider, GELU, and back."""

    def __init__(self, c: Config) -> None:
        self.c_fc = nn.Linear(c.n_embd, 4 * c.n_embd, init=nn.normal(0.02))
        self.c_proj = nn.Linear(4 * c.n_embd, c.n_embd, init=nn.normal(0.02 * (2 * c.n_layer) ** -0.5))

    def forward(self, x: Value) -> Value:
        """Keep the shape (B, T, C)."""
        y: Value = self.c_proj(F.gelu(self.c_fc(x)))
        return y


class Block(nn.Module):
    """Attention and MLP, each on a normalized residual stream that it adds to."""

    def __init__(self, c: Config) -> None:
        self.ln_1 = nn.LayerNorm(c.n_embd)
        self.attn = Attention(c)
        self.ln_2 = nn.LayerNorm(c.n_embd)
        self.mlp = MLP(c)

    def forward(self, x: Value) -> Value:
        """Keep the shape (B, T, C)."""
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT2(nn.Module):
    """The whole model with its loss; the head shares the token embedding's weight."""

    def __init__(self, c: Config) -> None:
        self.config = c
        self.wte = nn.Embedding(c.vocab_size, c.n_embd, init=nn.normal(0.02))
        self.wpe = nn.Embedding(c.block_size, c.n_embd, init=nn.normal(0.02))
        self.h = [Block(c) for _ in range(c.n_layer)]
        self.ln_f = nn.LayerNorm(c.n_embd)
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        self.loss = nn.CrossEntropyLoss()

    def forward(self, tokens: Value, targets: Value) -> tuple[Value, Value]:
        """Map ids (B, T) and the ids that follow them to (loss (1,), logits (B, T, V))."""
        x = self.wte(tokens, self.wpe.weight)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return self.loss(logits, targets), logits

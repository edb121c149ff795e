"""LoRA: pairs of small matrices beside the linear layers of a model, whose own parameters stay as they are.

A layer with an adapter computes ``x W' + scale * (x A') B'``, where A (r, in) and B (out, r) are trained. B starts at
zero, so the first step sees the model as it was.

Source: Hu et al. 2021 (arXiv 2106.09685); Kalajdzievski 2023 (arXiv 2312.03732) for the scale of rsLoRA. Names and
initial numbers are those of PEFT.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

from ..errors import UserError
from ..program.program import Value
from ..wording import nearest
from . import functional as F
from .modules import Linear, Module, constant

A, B = "lora_A", "lora_B"
"""The names of an adapter's two matrices, below that of their layer."""
ALL = "all"
"""The targets that stand for every linear layer but the head."""
MOST = 1 << 16
"""A rank beyond is a slip."""
LARGEST = 2.0**128
"""The numbers of float32 are below."""


@dataclass(frozen=True)
class Lora:
    """What adapters a model gets.

    Attributes
    ----------
    r : the rank of an adapter's product.
    alpha : the product is scaled by ``alpha / r``, or by ``alpha / sqrt(r)`` with `rslora`.
    dropout : the probability with which a training step zeroes an element of the adapter's input.
    targets : ends of the names of layers, such as ``q_proj``; ``all`` is every linear layer but the head.
    """

    r: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    rslora: bool = False
    targets: tuple[str, ...] = (ALL,)

    def __post_init__(self) -> None:
        for name, right, want in (
            ("r", 1 <= self.r <= MOST, f"a whole number from 1 to {MOST:,}"),
            ("alpha", 0 < self.alpha < LARGEST, f"a number above 0 that float32 holds, below {LARGEST:.2g}"),
            ("dropout", 0 <= self.dropout < 1, "a probability, 0 or more and below 1"),
            ("targets", self.targets and all(self.targets), f"names of layers, such as q_proj,v_proj, or {ALL}"),
        ):
            if not right:
                x = getattr(self, name)
                given = repr(x) if name != "targets" else ",".join(x) or "empty"
                raise UserError(f"--lora: {name} is {given}; expected {want}")

    @property
    def scale(self) -> float:
        """What the product of the two matrices is multiplied by."""
        return self.alpha / (sqrt(self.r) if self.rslora else self.r)

    @classmethod
    def parse(cls, text: str) -> Lora:
        """Read ``r=8,alpha=16,dropout=0.05,rslora,targets=q_proj,v_proj``: what is missing has its default.

        Raises
        ------
        UserError
            For no text, an unknown name, one that comes twice, or an impossible value.
        """
        if not text.strip():
            raise UserError("--lora: it is empty; expected the rank at least, as in r=8")
        found: dict[str, Any] = {}
        for part in filter(None, map(str.strip, text.split(","))):
            name, _, value = part.partition("=")
            if "=" not in part and "targets" in found and part not in READ:
                found["targets"] += (part,)
                continue
            if name not in READ:
                raise UserError(f"--lora: {part!r}; {nearest(name, READ)}, as in r=8,alpha=16,targets=q_proj,v_proj")
            if name in found:
                raise UserError(f"--lora: {name!r} comes twice")
            read, wanted = READ[name]
            try:
                found[name] = read(value)
            except (ValueError, KeyError) as e:
                raise UserError(f"--lora: {part!r}; expected {name} to be {wanted}") from e
        return cls(**found)

    def is_target(self, name: str, head: str) -> bool:
        """Return whether a linear layer gets an adapter.

        Parameters
        ----------
        head : the layer that makes logits, which ``all`` leaves out.
        """
        return any(
            name != head if target == ALL else name == target or name.endswith(f".{target}") for target in self.targets
        )


READ: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "r": (int, "a whole number"),
    "alpha": (float, "a number"),
    "dropout": (float, "a number"),
    "rslora": ({"": True, "true": True, "false": False}.__getitem__, "true or false"),
    "targets": (lambda value: (value,), "names"),
}
"""How `Lora.parse` reads each value."""


class LoraLinear(Module):
    """A linear layer with an adapter; the parameters of the layer are not trained.

    Parameters
    ----------
    layer : the layer, which keeps its parameters and their names.
    """

    def __init__(self, layer: Linear, lora: Lora) -> None:
        (OC, C), self.weight, self.bias = layer.weight.shape, layer.weight, layer.bias
        self.lora_A = Linear(C, lora.r, bias=False)
        self.lora_B = Linear(lora.r, OC, bias=False, init=constant(0))
        self.scale, self.dropout = lora.scale, lora.dropout

    def forward(self, x: Value) -> Value:
        """Map (..., in) to (..., out)."""
        low = self.lora_A(F.dropout(x, self.dropout))
        low = low if self.scale == 1 else F.scale(low, self.scale)
        return F.residual(F.linear(x, self.weight, self.bias), self.lora_B(low))


def add_adapters(model: Module, lora: Lora, head: str = "") -> list[str]:
    """Add adapters to layers of a model, and let nothing else of it be trained; return the names of the layers.

    Parameters
    ----------
    head : the layer that makes logits, for the targets ``all``.

    Raises
    ------
    UserError
        If a target is no linear layer of the model, or one whose weight is that of another layer.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, Linear)}
    chosen = {name: m for name, m in layers.items() if lora.is_target(name, head)}
    for target in lora.targets:
        if target != ALL and not any(Lora(targets=(target,)).is_target(name, head) for name in layers):
            ends = dict.fromkeys(name.rpartition(".")[2] for name in layers)
            raise UserError(f"--lora: no linear layer is named {target!r}; {nearest(target, [ALL, *ends])}")
    if not chosen:
        raise UserError("--lora: the model has no linear layer but its head")
    own = {name for name, _ in model.named_parameters()}
    if tied := [name for name in chosen if f"{name}.weight" not in own]:
        raise UserError(
            f"--lora: the weight of {tied[0]!r} is that of another layer, so no file could hold the model with this "
            "adapter; leave the layer out of targets"
        )
    for p in model.parameters():
        p.trained = False
    adapted = {m: LoraLinear(m, lora) for m in dict.fromkeys(chosen.values())}
    for _, module in [*model.named_modules()]:
        for name, v in vars(module).items():
            if isinstance(v, Linear) and v in adapted:
                setattr(module, name, adapted[v])
            elif isinstance(v, (list, tuple)):
                setattr(module, name, type(v)(adapted.get(m, m) if isinstance(m, Linear) else m for m in v))
    return [*chosen]


def adapted_layers(names: Iterable[str]) -> list[str]:
    """List the layers that have an adapter among the names of parameters."""
    return [name.removesuffix(f".{A}.weight") for name in names if name.endswith(f".{A}.weight")]


def adapter_of(layer: str) -> tuple[str, str]:
    """Return the names of the parameters of a layer's adapter."""
    return f"{layer}.{A}.weight", f"{layer}.{B}.weight"

"""Rewrites of a training program that remove work; each is verified, can be switched off, and keeps the results.

``gate`` makes an activation and the value that it gates one call, in the forward, so that the backward is that of one.
``residual`` shares the gradient of a sum instead of copying it. ``layernorm`` normalizes a sum as it is made.
``adapter`` makes a linear layer and the adapter beside it one call, which writes their sum. ``gelu``
fuses an activation into the product that makes its operand, and its slope into the product that makes its gradient.
``classifier`` makes head and loss one call over blocks of tokens. ``update`` applies a weight's optimizer step as its
gradient is made, where nothing else needs that gradient. ``recompute`` recomputes the results of activations and
normalizations in the backward.

A rewrite is named after its effect on GPT-2, and works by roles: the declaration of an op names its role, and the ops
that it fuses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...errors import UserError
from ...kernels import registry
from ...kernels.registry import Choice, op_matches
from ...ops.declaration import Op
from ...wording import nearest
from ..program import Call, Program
from .adapter import add_adapters
from .edit import Draft, Rewrite
from .pairs import activate_products, gate_activations, head_with_loss, normalize_sums
from .recompute import recompute
from .residual import share_residual
from .update import update_in_backward

FUSIONS: dict[str, Rewrite] = {
    "gate": gate_activations,
    "residual": share_residual,
    "layernorm": normalize_sums,
    "adapter": add_adapters,
    "gelu": activate_products,
    "classifier": head_with_loss,
    "update": update_in_backward,
    "recompute": recompute,
}
"""The rewrites by name, in the order in which they are applied."""
BEFORE = ("gate",)
"""Those of the forward alone, which come before the backward is generated."""
NAMED = 4
"""The largest number of layers that a note names one by one."""


def fuse(program: Program, names: Sequence[str], choice: Choice) -> list[str]:
    """Apply rewrites in place; return a note for each swap that keeps layers from being fused.

    Parameters
    ----------
    names : the names of rewrites, out of ``FUSIONS``.
    choice : a swap that names an op inside a fusion keeps the layers that it names from being fused.

    Raises
    ------
    UserError
        For a rewrite that does not exist.
    """
    kept: dict[str, dict[str, list[str]]] = {}

    def allowed(fused: Op, parts: Sequence[Call]) -> bool:
        for rule in choice.swaps:
            if op_matches(fused.name, rule.op) and fused.fuses and (fused.name, rule.variant) in registry.KERNELS:
                continue
            concerned = [
                (op.name, c.layer) for c in parts for op in (c.op, *(() if program.adjoint else c.op.backwards))
            ]
            for name, layer in dict.fromkeys(concerned):
                if op_matches(name, rule.op) and rule.covers(layer) and (name, rule.variant) in registry.KERNELS:
                    layers = kept.setdefault(str(rule), {}).setdefault(name, [])
                    layers += [repr(layer)] * (repr(layer) not in layers)
                    return False
        return True

    for name in names:
        if name not in FUSIONS:
            known = nearest(name, FUSIONS)
            alone = ", all, none" if known.startswith("known") else ""  # which are no names beside others
            raise UserError(f"fuse {name!r}: no such rewrite; {known}{alone}")
    for name, rewrite in FUSIONS.items():
        if name in names:
            draft = Draft(program)
            rewrite(draft, allowed)
            draft.close()
            program.verify()
    where = {rule: " and ".join(map(in_layers, ops.items())) for rule, ops in kept.items()}
    return [f"--swap '{rule}' keeps {text} from being rewritten" for rule, text in where.items()]


def in_layers(kept: tuple[str, list[str]]) -> str:
    """Name an op and its layers, as in ``gelu_forward in 12 layers, 'h.0.mlp' to 'h.11.mlp'``."""
    name, layers = kept
    if len(layers) > NAMED:
        return f"{name} in {len(layers)} layers, {layers[0]} to {layers[-1]}"
    return f"{name} in layer{'s' * (len(layers) > 1)} {', '.join(layers)}"


def usual(variant: str, two_pass: bool) -> tuple[str, ...]:
    """Choose the rewrites by default: all for ``optimized`` and ``auto``, none for other variants.

    Parameters
    ----------
    two_pass : whether all gradients must be known before the first update, so that ``update`` stays off.
    """
    names = FUSIONS if variant in (registry.DEFAULT, registry.AUTO) else ()
    return tuple(name for name in names if not (two_pass and name == "update"))


def chosen(fuse: str | Iterable[str], variant: str, two_pass: str = "") -> tuple[str, ...]:
    """Return the names of the rewrites that ``--fuse``, or the keyword `fuse`, asks for.

    Parameters
    ----------
    fuse : ``"auto"``, the usual ones of the variant; ``"all"``, ``"none"``, or names.
    two_pass : what needs all gradients before the first update, such as a flag, so that ``update`` stays off.

    Raises
    ------
    UserError
        For ``update`` among the names if it must stay off, and for what is none of these.
    """
    if fuse == "auto":
        return usual(variant, bool(two_pass))
    if not isinstance(fuse, Iterable):
        raise UserError(f"fuse {fuse!r}: expected 'auto', 'all', 'none', or names of rewrites")
    names = parse(fuse) if isinstance(fuse, str) else tuple(fuse)
    if two_pass and "update" in names:
        raise UserError(
            f"{two_pass} with --fuse {','.join(names) if names != tuple(FUSIONS) else 'all'}: 'update' applies updates "
            "in the backward, before the norm is known; fuse without 'update'"
        )
    return names


def parse(text: str) -> tuple[str, ...]:
    """Read ``all``, ``none`` or a list such as ``residual,update``; a `UserError` for a list with one of both."""
    if text == "all":
        return tuple(FUSIONS)
    names = () if text == "none" else tuple(text.split(","))
    for word in ("all", "none"):
        if word in names:
            raise UserError(f"fuse {text!r}: {word!r} stands alone; leave it or the other names out")
    return names

"""The update on a program: each gradient's share of the norm, and the step of each parameter."""

from __future__ import annotations

from .. import ops
from .program import Call, Program, Scalar, Value


def add_update(program: Program) -> None:
    """Append, for each parameter that has a gradient, its share of the global norm and its AdamW step.

    The weight decay of biases and of layer normalization is a number of its own, ``vector_decay``.
    """
    trained = [(p, program.adjoint[p]) for p in program.parameters if p in program.adjoint]
    for parameter, gradient in trained:
        out = program.value(f"{gradient}.sumsq", (1,))
        program.norm_terms.append(out)
        program.calls.append(Call(ops.sumsq, _layer(parameter), {"out": out, "inp": gradient}, "norm"))
    for parameter, gradient in trained:
        args: dict[str, object] = {"param": parameter, "grad": gradient}
        for name in ("m", "v"):
            args[name] = program.value(f"{parameter}.{name}", parameter.shape, "moment")
            program.moments.append(args[name])  # type: ignore[arg-type]
        args.update({a.name: Scalar(a.name) for a in ops.adamw.args if a.role == "scalar"})
        if len(parameter.shape) == 1:
            args["weight_decay"] = Scalar("vector_decay")
        program.calls.append(Call(ops.adamw, _layer(parameter), args, "update"))
    program.verify()


def _layer(parameter: Value) -> str:
    """Name the layer that owns a parameter: its path without the last word."""
    return parameter.name.rpartition(".")[0] or "model"

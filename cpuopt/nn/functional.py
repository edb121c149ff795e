"""Functions on values, named as in ``torch.nn.functional``; each adds one call to the open trace."""

from __future__ import annotations

from .. import ops
from ..errors import UserError
from ..program.program import Value
from .trace import Array, current


def linear(x: Array, weight: Array, bias: Array | None = None) -> Value:
    """Multiply rows (..., C) by a weight (OC, C) and add a bias (OC,): (..., OC)."""
    return current().emit(ops.matmul_forward, {"inp": x, "weight": weight, "bias": bias})


def layer_norm(x: Array, weight: Array, bias: Array, eps: float = 1e-5) -> Value:
    """Normalize rows (..., C); scale and shift by weight (C,) and bias (C,)."""
    return current().emit(ops.layernorm_forward, {"inp": x, "weight": weight, "bias": bias, "eps": eps})


def embedding(tokens: Array, weight: Array, positions: Array | None = None) -> Value:
    """Look up tokens (B, T) in weight (V, C), and add rows of positions (maxT, C) if given: (B, T, C)."""
    if positions is not None and len(tokens.shape) == 2 and tokens.shape[1] > positions.shape[0]:
        raise UserError(f"T = {tokens.shape[1]} is beyond the model's context of {positions.shape[0]} positions")
    return current().emit(ops.embedding_forward, {"tokens": tokens, "wte": weight, "wpe": positions})


def attention(qkv: Array, n_head: int) -> Value:
    """Causal attention of n_head heads over a fused qkv (B, T, 3C): (B, T, C)."""
    if qkv.shape[-1] % (3 * n_head):
        raise UserError(
            f"attention: qkv has {qkv.shape[-1]} channels; expected a multiple of 3 * n_head = {3 * n_head}"
        )
    return current().emit(ops.attention_forward, {"qkv": qkv}, NH=n_head)


def gelu(x: Array) -> Value:
    """GELU in its tanh form, element by element."""
    return current().emit(ops.gelu_forward, {"inp": x})


def residual(x: Array, y: Array) -> Value:
    """Sum of two values of one shape; ``x + y`` is the same."""
    if x.shape != y.shape:
        raise UserError(f"residual: shapes {x.shape} and {y.shape} differ; there is no broadcasting")
    if x is y:
        raise UserError(f"residual: {x} is added to itself; the two must be distinct values")
    return current().emit(ops.residual_forward, {"inp1": x, "inp2": y})


def softmax(x: Array) -> Value:
    """Softmax over the last axis."""
    return current().emit(ops.softmax_forward, {"inp": x})


def cross_entropy(logits: Array, targets: Array, ignore_index: int = -100) -> Value:
    """Mean cross-entropy of logits (..., V) against targets (...): shape (1,)."""
    args = {"logits": logits, "targets": targets, "ignore_index": ignore_index}
    return current().emit(ops.cross_entropy_forward, args)


Value.__add__ = residual

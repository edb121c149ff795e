"""Functions on values, named as in ``torch.nn.functional``; each adds one call to the open trace."""

from __future__ import annotations

from numbers import Real
from typing import Any

from .. import errors, ops, wording
from ..errors import UserError
from ..program.program import DRAWS, Value
from .trace import Array, current

LARGEST = (2 - 2**-23) * 2.0**127
"""The largest float32."""


@errors.told
def linear(x: Array, weight: Array, bias: Array | None = None) -> Value:
    """Multiply rows (..., C) by a weight (OC, C) and add a bias (OC,): (..., OC)."""
    return current().emit(ops.matmul_forward, {"inp": x, "weight": weight, "bias": bias})


@errors.told
def layer_norm(x: Array, weight: Array, bias: Array, eps: float = 1e-5) -> Value:
    """Normalize rows (..., C); scale and shift by weight (C,) and bias (C,)."""
    return current().emit(ops.layernorm_forward, {"inp": x, "weight": weight, "bias": bias, "eps": eps})


@errors.told
def rms_norm(x: Array, weight: Array, eps: float = 1e-5) -> Value:
    """Normalize by the root mean square, and scale by weight (C,), the rows of (..., C), or groups of (..., G*C)."""
    if x.shape[-1] % weight.shape[0]:
        raise UserError(f"rms_norm: rows of {x.shape[-1]} channels; expected a multiple of weight's {weight.shape[0]}")
    args = {"inp": x, "weight": weight, "eps": eps}
    return current().emit(ops.rmsnorm_forward, args, G=x.shape[-1] // weight.shape[0])


@errors.told
def embedding(tokens: Array, weight: Array, positions: Array | None = None, starts: Array | None = None) -> Value:
    """Look up tokens (B, T) in weight (V, C), and add rows of positions (maxT, C) if given: (B, T, C).

    With `starts` (B, T), as in `attention`, the position of a token is counted from where its example starts.
    """
    if positions is not None and len(tokens.shape) == 2 and tokens.shape[1] > positions.shape[0]:
        raise UserError(f"T = {tokens.shape[1]} is beyond the model's context of {positions.shape[0]} positions")
    return current().emit(ops.embedding_forward, {"tokens": tokens, "wte": weight, "wpe": positions, "starts": starts})


@errors.told
def attention(qkv: Array, n_head: int, *, starts: Array | None = None, window: int = 0, cap: float = 0) -> Value:
    """Causal attention of n_head heads over a fused qkv (B, T, 3C): (B, T, C).

    Parameters
    ----------
    starts : for each token (B, T), where its example starts in the row; it reads none before. Absent: at 0.
    window : the number of tokens that a token reads, itself included; 0: all up to it.
    cap : scores s become cap * tanh(s / cap); 0: they stay.
    """
    limits = _limits("attention", starts, window, cap)
    if qkv.shape[-1] % (3 * n_head):
        raise UserError(
            f"attention: qkv has {qkv.shape[-1]} channels; expected a multiple of 3 * n_head = {3 * n_head}"
        )
    return current().emit(ops.attention_forward, {"qkv": qkv, **limits}, NH=n_head)


def _limits(where: str, starts: Array | None, window: int, cap: float) -> dict[str, Any]:
    """Check what limits attention, and return it by the ops' names."""
    if not isinstance(window, int) or window < 0:
        raise UserError(f"{where}: window = {window!r}; expected a number of tokens, or 0 for all")
    if not (isinstance(cap, Real) and 0 <= float(cap) <= LARGEST):
        raise UserError(f"{where}: cap = {cap!r}; expected a positive number, or 0 for none")
    return {"starts": starts, "window": window, "cap": float(cap)}


@errors.told
def scaled_dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    is_causal: bool = False,
    enable_gqa: bool = False,
    head_size: int,
    starts: Array | None = None,
    window: int = 0,
    cap: float = 0,
) -> Value:
    """Causal attention of query (B, T, NH*HS) over key and value (B, T, NKV*HS): (B, T, NH*HS).

    The heads lie side by side in the last axis, where PyTorch has an axis of its own for them. With `enable_gqa`, query
    head h reads head h // (NH / NKV) of key and value. `starts`, `window` and `cap` are those of `attention`.
    """
    where = "scaled_dot_product_attention"
    limits = _limits(where, starts, window, cap)
    if not is_causal:
        raise UserError(f"{where}: is_causal=False; only is_causal=True is supported")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.shape[-1] % head_size:
            raise UserError(
                f"{where}: {name} has {x.shape[-1]} channels; expected a multiple of head_size = {head_size}"
            )
    NH, NKV = query.shape[-1] // head_size, key.shape[-1] // head_size
    if NH % NKV:
        raise UserError(f"{where}: {NH} query heads and {NKV} key heads; expected a multiple of these")
    if NH != NKV and not enable_gqa:
        raise UserError(f"{where}: {NH} query heads and {NKV} key heads; expected as many, or enable_gqa=True")
    return current().emit(ops.gqa_forward, {"q": query, "k": key, "v": value, **limits}, NH=NH, NKV=NKV, HS=head_size)


@errors.told
def rotary_embedding(x: Array, cos: Array, sin: Array, starts: Array | None = None) -> Value:
    """Rotate the heads of x (B, T, NH*HS), side by side in the last axis, by tables (positions, HS/2), rotate-half.

    With `starts` (B, T), as in `attention`, the position of a token is counted from where its example starts.
    """
    positions, pairs = cos.shape
    if x.shape[-1] % (2 * pairs):
        raise UserError(f"rotary_embedding: {x.shape[-1]} channels; expected a multiple of the head size {2 * pairs}")
    if len(x.shape) == 3 and x.shape[1] > positions:
        raise UserError(f"T = {x.shape[1]} is beyond the model's context of {positions} positions")
    args = {"inp": x, "cos": cos, "sin": sin, "starts": starts}
    return current().emit(ops.rope_forward, args, NH=x.shape[-1] // (2 * pairs))


@errors.told
def gelu(x: Array) -> Value:
    """GELU in its tanh form, element by element."""
    return current().emit(ops.gelu_forward, {"inp": x})


@errors.told
def silu(x: Array) -> Value:
    """SiLU (swish), element by element."""
    return current().emit(ops.silu_forward, {"inp": x})


@errors.told
def relu(x: Array) -> Value:
    """Positive part, element by element."""
    return current().emit(ops.relu_forward, {"inp": x})


@errors.told
def tanh(x: Array) -> Value:
    """Hyperbolic tangent, element by element."""
    return current().emit(ops.tanh_forward, {"inp": x})


@errors.told
def sigmoid(x: Array) -> Value:
    """Logistic function, element by element."""
    return current().emit(ops.sigmoid_forward, {"inp": x})


@errors.told
def reciprocal(x: Array) -> Value:
    """One over each element; ``y / x`` is the product of this and y."""
    return current().emit(ops.reciprocal_forward, {"inp": x})


@errors.told
def dropout(x: Array, p: float = 0.5) -> Value:
    """Zero each element with probability p, and scale the others by 1 / (1 - p); in a training step alone.

    The random numbers depend on the run's seed, the step, the micro-batch, and the place of call and element in the
    model. So any number of threads and ranks drops the same elements, and a resumed run drops those of one that was
    never interrupted.
    """
    if not (isinstance(p, Real) and 0 <= float(p) < 1):
        raise UserError(f"dropout: p = {p!r}; expected a probability, 0 or more and below 1")
    if not p:
        return current().value(x)
    trace = current()
    number = sum(c.op is ops.dropout_forward for c in trace.program.calls)
    args = {"inp": x, "p": float(p), "stream": number, "seed": DRAWS[0], "counter": DRAWS[1]}
    return trace.emit(ops.dropout_forward, args)


@errors.told
def residual(x: Array, y: Array) -> Value:
    """Sum of two values of one shape; ``x + y`` broadcasts."""
    if x.shape != y.shape:
        raise UserError(f"residual: shapes {x.shape} and {y.shape} differ; x + y broadcasts")
    return scale(x, 2) if current().is_one(x, y) else current().emit(ops.residual_forward, {"inp1": x, "inp2": y})


@errors.told
def scale(x: Array, factor: float, shift: float = 0) -> Value:
    """Product of a value and a number, plus another number; ``factor * x + shift`` is the same in two calls."""
    for name, number in (("factor", factor), ("shift", shift)):
        if not abs(number) <= LARGEST:  # nor a NaN
            raise UserError(f"scale: the {name} is {number}; expected a finite number of float32")
    return current().emit(ops.scale_forward, {"inp": x, "factor": float(factor), "shift": float(shift)})


@errors.told
def softmax(x: Array) -> Value:
    """Softmax over the last axis."""
    return current().emit(ops.softmax_forward, {"inp": x})


@errors.told
def cross_entropy(logits: Array, targets: Array, ignore_index: int = -100) -> Value:
    """Mean cross-entropy of logits (..., V) against targets (...): shape (1,)."""
    args = {"logits": logits, "targets": targets, "ignore_index": ignore_index}
    return current().emit(ops.cross_entropy_forward, args)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    known = [n for n, f in globals().items() if getattr(f, "__module__", "") == __name__ and not n.startswith("_")]
    raise AttributeError(
        f"cpuopt.functional has no {name!r}; {wording.nearest(name, known)}; @differentiable makes an op of your own"
    )

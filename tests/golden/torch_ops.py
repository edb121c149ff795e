"""Each op by PyTorch and its autograd in float64, on small awkward shapes, under the argument names of the declaration.

``op_values()`` gives one flat dict: ``<op>/<case>/in/<argument>`` and ``<op>/<case>/out/<argument>``. An argument that
is in neither (a bias that is absent) was not given; one that is only in ``out`` was not known before the call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

Given = Mapping[str, Any]
NONE: Given = {}


def const(x: np.ndarray) -> Tensor:
    """Make a tensor without a gradient."""
    return torch.tensor(x, dtype=torch.float64)


class Ops:
    """Computes ops and records what went in and came out."""

    def __init__(self) -> None:
        self.rng = np.random.Generator(np.random.PCG64(7))
        self.values: dict[str, np.ndarray] = {}

    def normal(self, *shape: int, scale: float = 1.0) -> np.ndarray:
        """Draw float32 numbers."""
        return self.rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)

    def put(self, op: str, case: str, given: Mapping[str, Any], made: Mapping[str, Any]) -> None:
        """Record one call; what is None was absent."""
        for kind, args in (("in", given), ("out", made)):
            for name, x in args.items():
                if x is not None:
                    array = x.detach().numpy() if isinstance(x, Tensor) else np.asarray(x)
                    self.values[f"{op}/{case}/{kind}/{name}"] = array.copy()

    def record(
        self, op: str, case: str, function: Any, given: Given, reads: Any = "", fixed: Given = NONE, dout: Any = None
    ) -> None:
        """Record the forward and the backward of an op.

        Parameters
        ----------
        function : of the given arrays, to the result or to a dict that begins with it.
        reads : the arguments that the backward reads beside the result's gradient; or for each of several backwards,
            the arguments that it reads, and those whose gradients it makes.
        fixed : arguments without a gradient.
        """
        leaves = {n: const(x).requires_grad_() for n, x in given.items() if x is not None}
        made = function(**leaves)
        made = {"out": made} if isinstance(made, Tensor) else made
        first = next(iter(made))
        dout = self.normal(*made[first].shape) if dout is None else dout
        made[first].backward(const(dout))
        self.put(f"{op}_forward", case, {**given, **fixed}, made)
        known, d = {**given, **fixed, **made}, {f"d{first}": dout}
        backwards = {f"{op}_backward": (reads, " ".join(given))} if isinstance(reads, str) else reads
        for back, (read, wanted) in backwards.items():
            grads = {f"d{n}": leaves[n].grad for n in wanted.split() if n in leaves}
            self.put(back, case, {**d, **{n: known[n] for n in read.split()}}, grads)

    def layernorm(self, case: str, inp: np.ndarray, eps: float) -> None:
        """Normalize rows."""
        C = inp.shape[1]

        def norm(inp: Tensor, weight: Tensor, bias: Tensor) -> Mapping[str, Tensor]:
            out, mean, rstd = torch.native_layer_norm(inp, [C], weight, bias, eps)
            return {"out": out, "mean": mean.view(-1), "rstd": rstd.view(-1)}

        given = {"inp": inp, "weight": 1 + self.normal(C, scale=0.1), "bias": self.normal(C, scale=0.05)}
        self.record("layernorm", case, norm, given, "inp weight mean rstd", {"eps": eps})

    def rmsnorm(self, case: str, inp: np.ndarray, G: int, eps: float) -> None:
        """Normalize groups of rows."""
        BT, C = inp.shape[0], inp.shape[1] // G

        def norm(inp: Tensor, weight: Tensor) -> Mapping[str, Tensor]:
            groups = inp.view(BT, G, C)
            out = F.rms_norm(groups, [C], weight, eps).view(BT, G * C)
            return {"out": out, "rstd": (groups.square().mean(dim=-1) + eps).rsqrt()}

        given = {"inp": inp, "weight": 1 + self.normal(C, scale=0.1)}
        self.record("rmsnorm", case, norm, given, "inp weight rstd", {"eps": eps})

    def matmul(self, case: str, BT: int, C: int, OC: int, with_bias: bool) -> None:
        """Multiply, with two backwards."""
        given, dout = {"inp": self.normal(BT, C), "weight": self.normal(OC, C)}, self.normal(BT, OC)
        given["bias"] = self.normal(OC) if with_bias else None
        reads = {"matmul_backward_input": ("weight", "inp"), "matmul_backward_weight": ("inp", "weight bias")}
        self.record("matmul", case, lambda inp, weight, bias=None: F.linear(inp, weight, bias), given, reads, dout=dout)

    def attention(
        self, kind: str, case: str, B: int, T: int, NH: int, NKV: int, HS: int, scale: float = 1.0, **limits: Any
    ) -> None:
        """Attend; with limits as eager code of ``transformers`` does, by a cap and a mask of window and starts."""
        t, t2 = torch.arange(T)[:, None], torch.arange(T)
        seen = (t2 <= t)[None]
        if limits:
            example = torch.tensor(limits["starts"])
            seen = seen & (t2 > t - limits["window"]) & (example[:, :, None] == example[:, None, :])

        def attend(**given: Tensor) -> Mapping[str, Tensor]:
            parts = given["qkv"].split(NH * HS, dim=2) if "qkv" in given else given.values()
            q, k, v = (x.view(B, T, -1, HS).transpose(1, 2) for x in parts)
            k, v = (x.repeat_interleave(NH // NKV, dim=1) for x in (k, v))
            scores = q @ k.transpose(2, 3) / math.sqrt(HS)
            scores = torch.tanh(scores / limits["cap"]) * limits["cap"] if limits else scores
            scores = scores.masked_fill(~seen[:, None], -math.inf)
            whole = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            out = torch.softmax(scores, dim=-1) @ v if limits else whole
            return {"out": out.transpose(1, 2).reshape(B, T, -1), "lse": scores.logsumexp(dim=-1)}

        widths = {"qkv": 3 * NH} if kind == "attention" else {"q": NH, "k": NKV, "v": NKV}
        given = {n: self.normal(B, T, w * HS, scale=1.0 if n == "v" else scale) for n, w in widths.items()}
        self.record(kind, case, attend, given, " ".join((*widths, "out lse", *limits)), limits)

    def rope(self, case: str, B: int, T: int, NH: int, P: int, maxT: int) -> None:
        """As ``transformers`` computes it: ``x * cos + rotate_half(x) * sin``, with tables of both halves of a head."""
        inp, angles = self.normal(B, T, NH * 2 * P), self.normal(maxT, P, scale=3)
        tables = {"cos": np.cos(angles), "sin": np.sin(angles)}
        c, s = (torch.cat((y, y), dim=-1)[:T, None] for y in map(const, tables.values()))

        def rotate(inp: Tensor) -> Tensor:
            heads = inp.view(B, T, NH, 2 * P)
            return (heads * c + torch.cat((-heads[..., P:], heads[..., :P]), dim=-1) * s).reshape(B, T, -1)

        self.record("rope", case, rotate, {"inp": inp}, "cos sin", tables)

    def cross_entropy(self, case: str, logits: np.ndarray, targets: np.ndarray, ignore: int) -> None:
        """Take the loss, with that of each row."""
        how = {"target": torch.tensor(targets, dtype=torch.int64), "ignore_index": ignore}

        def loss(logits: Tensor) -> Mapping[str, Tensor]:
            mean, each = (F.cross_entropy(logits, **how, reduction=kind) for kind in ("mean", "none"))
            return {"loss": mean.view(1), "losses": each, "lse": logits.logsumexp(dim=-1)}

        fixed, dloss = {"targets": targets, "ignore_index": ignore}, np.array([0.7], dtype=np.float32)
        self.record("cross_entropy", case, loss, {"logits": logits}, "lse logits targets ignore_index", fixed, dloss)

    def embedding(self, case: str, tokens: np.ndarray, V: int, C: int, maxT: int | None) -> None:
        """Look rows up, with those of positions."""
        given, dout = {"wte": self.normal(V, C)}, self.normal(*tokens.shape, C)
        given["wpe"] = None if maxT is None else self.normal(maxT, C)

        def look_up(wte: Tensor, wpe: Tensor | None = None) -> Tensor:
            out = F.embedding(torch.tensor(tokens, dtype=torch.int64), wte)
            return out if wpe is None else out + F.embedding(torch.arange(tokens.shape[1]), wpe)

        self.record("embedding", case, look_up, given, "tokens", {"tokens": tokens}, dout)

    def adamw(self, N: int, steps: int) -> None:
        """Update a parameter."""
        hyper = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
        p = const(self.normal(N)).requires_grad_()
        betas = (hyper["beta1"], hyper["beta2"])
        optimizer = torch.optim.AdamW([p], hyper["lr"], betas, hyper["eps"], hyper["weight_decay"], foreach=False)
        m, v = torch.zeros_like(p), torch.zeros_like(p)
        for step in range(1, steps + 1):
            grad = self.normal(N)
            grad[:3] = 0, 1e-9, 1e-20  # nothing to divide; a root near eps; a square below float32's range
            given = {"param": p.detach().clone(), "m": m.clone(), "v": v.clone(), "grad": grad, **hyper}
            p.grad = const(grad) * 0.5
            optimizer.step()
            m, v = optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]
            self.put("adamw", f"step{step}", given | {"grad_scale": 0.5, "step": step}, {"param": p, "m": m, "v": v})


def op_values() -> dict[str, np.ndarray]:
    """Compute every case."""
    ops = Ops()
    normal, record = ops.normal, ops.record
    sizes = np.concatenate([np.linspace(-30, 30, 61), np.linspace(-6, 6, 49), [-1e-8, 1e-8, -1e-30]]).astype(np.float32)
    """Numbers of every size that an activation tells apart."""
    ops.layernorm("odd", normal(7, 13, scale=2) + np.float32(0.5), 1e-5)
    rows = normal(3, 9)
    rows[0] = 2  # no variance: only eps keeps rstd finite
    rows[1] += 1000  # a mean far above the deviation
    ops.layernorm("constant_and_offset_rows", rows, 1e-5)
    ops.matmul("bias", 5, 7, 11, with_bias=True)
    ops.matmul("no_bias", 13, 9, 3, with_bias=False)
    ops.matmul("one_row", 1, 17, 5, with_bias=True)
    ops.attention("attention", "odd", 2, 7, 3, 3, 5)
    ops.attention("attention", "one_token", 3, 1, 2, 2, 3)
    ops.attention("attention", "peaked", 1, 11, 1, 1, 8, scale=6)
    record("gelu", "extreme", lambda inp: F.gelu(inp, approximate="tanh"), {"inp": sizes}, "inp")
    pair = {"inp1": normal(23), "inp2": normal(23)}
    record("residual", "odd", lambda inp1, inp2: inp1 + inp2, pair)
    inp = normal(5, 13)
    inp[1] *= 100
    inp[2] += 10000
    inp[3, 0] = -10000
    inp[4] = 3
    record("softmax", "extreme", lambda inp: F.softmax(inp, dim=-1), {"inp": inp}, "out")
    targets, logits = np.array([3, 0, -100, 12, 5, -100, 5], dtype=np.int32), normal(7, 13)
    logits[1] *= 30
    logits[3] += 5000
    ops.cross_entropy("some_ignored", logits, targets, -100)
    ops.cross_entropy("ignored_class", logits, np.maximum(targets, 0), 0)
    ops.cross_entropy("all_ignored", logits[:3], np.full(3, -100, dtype=np.int32), -100)
    tokens = np.array([[4, 0, 4, 10, 4], [10, 2, 2, 0, 10]], dtype=np.int32)
    ops.embedding("positions", tokens, V=11, C=5, maxT=8)
    ops.embedding("no_positions", tokens, V=11, C=3, maxT=None)
    squared = normal(131)
    ops.put("sumsq", "odd", {"inp": squared}, {"out": torch.linalg.vector_norm(const(squared)).square().view(1)})
    ops.adamw(N=37, steps=3)
    ops.attention("gqa", "groups_of_two", 2, 7, 6, 3, 5)
    ops.attention("gqa", "one_key_head", 1, 5, 3, 1, 4)
    ops.attention("gqa", "as_many", 2, 3, 2, 2, 3)
    ops.attention("gqa", "one_token", 3, 1, 4, 2, 2)
    ops.attention("gqa", "peaked", 1, 11, 4, 2, 4, scale=6)
    ops.rope("longer_table", B=2, T=5, NH=3, P=4, maxT=9)
    ops.rope("one_pair", B=1, T=3, NH=1, P=1, maxT=3)
    ops.rmsnorm("odd", normal(7, 13, scale=2) + np.float32(0.5), 1, 1e-5)
    ops.rmsnorm("groups", normal(5, 21), 3, 1e-6)
    rows = normal(4, 9)
    rows[0] = 0  # only eps keeps rstd finite
    rows[1] *= 1e-4  # eps decides
    rows[2] += 1000
    ops.rmsnorm("zero_and_tiny_rows", rows, 1, 1e-5)
    record("silu", "extreme", lambda inp: F.silu(inp), {"inp": sizes}, "inp")
    record("swiglu", "extreme", lambda inp, up: F.silu(inp) * up, {"inp": sizes, "up": normal(*sizes.shape)}, "inp up")
    pair = {"inp1": normal(23), "inp2": normal(23)}
    record("mul", "odd", lambda inp1, inp2: inp1 * inp2, pair, "inp1 inp2")
    for case, factor, shift in (("odd", -2.5, 0.0), ("shifted", 0.3, 1.7)):
        fixed = {"factor": factor, "shift": shift}
        record("scale", case, lambda inp, a=factor, b=shift: inp * a + b, {"inp": normal(19)}, "factor", fixed)
    for op, case, function, inp, reads in (
        ("relu", "extreme", torch.relu, sizes, "inp"),
        ("tanh", "extreme", torch.tanh, sizes, "out"),
        ("sigmoid", "extreme", torch.sigmoid, sizes, "inp"),
        ("reciprocal", "both_signs", torch.reciprocal, np.linspace(-3, 3, 30, dtype=np.float32), "inp"),
        ("sum", "odd", lambda x: x.sum(1), (3, 7, 5), ""),
        ("expand", "odd", lambda x: x[:, None].expand(3, 7, 5), (3, 5), ""),
        ("transpose", "odd", lambda x: x.transpose(1, 2), (3, 7, 2, 5), ""),
    ):
        x = normal(*inp) if isinstance(inp, tuple) else inp
        record(op, case, lambda inp, function=function: function(inp), {"inp": x}, reads)
    starts = np.array([[0] * 4 + [4] * 5, [0, 1] + [2] * 7], dtype=np.int32)
    ops.attention("attention", "limited", 2, 9, 3, 3, 4, starts=starts, window=4, cap=1.5)
    ops.attention("gqa", "limited", 2, 9, 4, 2, 3, starts=starts, window=4, cap=1.5)
    return ops.values

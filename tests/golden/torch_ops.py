"""Each op by PyTorch and its autograd, on small awkward shapes, under the argument names of the op's declaration.

``op_values(dtype)`` gives one flat dict: ``<op>/<case>/in/<argument>`` and ``<op>/<case>/out/<argument>``. An argument
that is in neither (a bias that is absent) was not given; one that is only in ``out`` was not known before the call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

Values = dict[str, np.ndarray]


class Ops:
    """Computes ops in one dtype and records what went in and came out."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.rng = np.random.Generator(np.random.PCG64(7))
        self.values: Values = {}

    def normal(self, *shape: int, scale: float = 1.0) -> np.ndarray:
        """Draw float32 numbers, the same in each dtype of computation."""
        return self.rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)

    def leaf(self, x: np.ndarray) -> Tensor:
        """Make a tensor that collects a gradient."""
        return torch.tensor(x, dtype=self.dtype, requires_grad=True)

    def const(self, x: np.ndarray) -> Tensor:
        """Make a tensor without a gradient."""
        return torch.tensor(x, dtype=self.dtype)

    def put(self, op: str, case: str, given: Mapping[str, Any], made: Mapping[str, Any]) -> None:
        """Record one call; what is None was absent."""
        for kind, args in (("in", given), ("out", made)):
            for name, x in args.items():
                if x is not None:
                    array = x.detach().numpy() if isinstance(x, Tensor) else np.asarray(x)
                    self.values[f"{op}/{case}/{kind}/{name}"] = array.copy()

    def layernorm(self, case: str, inp: np.ndarray, eps: float) -> None:
        BT, C = inp.shape
        weight, bias, dout = 1 + self.normal(C, scale=0.1), self.normal(C, scale=0.05), self.normal(BT, C)
        x, w, b = self.leaf(inp), self.leaf(weight), self.leaf(bias)
        out, mean, rstd = torch.native_layer_norm(x, [C], w, b, eps)
        mean, rstd = mean.view(BT), rstd.view(BT)
        out.backward(self.const(dout))
        given = {"inp": inp, "weight": weight, "bias": bias, "eps": eps}
        self.put("layernorm_forward", case, given, {"out": out, "mean": mean, "rstd": rstd})
        given = {"dout": dout, "inp": inp, "weight": weight, "mean": mean, "rstd": rstd}
        self.put("layernorm_backward", case, given, {"dinp": x.grad, "dweight": w.grad, "dbias": b.grad})

    def matmul(self, case: str, BT: int, C: int, OC: int, with_bias: bool) -> None:
        inp, weight, dout = self.normal(BT, C), self.normal(OC, C), self.normal(BT, OC)
        bias = self.normal(OC) if with_bias else None
        x, w, b = self.leaf(inp), self.leaf(weight), None if bias is None else self.leaf(bias)
        out = F.linear(x, w, b)
        out.backward(self.const(dout))
        self.put("matmul_forward", case, {"inp": inp, "weight": weight, "bias": bias}, {"out": out})
        self.put("matmul_backward_input", case, {"dout": dout, "weight": weight}, {"dinp": x.grad})
        grads = {"dweight": w.grad, "dbias": None if b is None else b.grad}
        self.put("matmul_backward_weight", case, {"dout": dout, "inp": inp}, grads)

    def limited(self, kind: str, B: int, T: int, NH: int, NKV: int, HS: int, limits: Mapping[str, Any]) -> None:
        """Attention as eager code of ``transformers`` computes it, with a cap, and with a mask of window and starts."""
        given = {"q": self.normal(B, T, NH * HS), "k": self.normal(B, T, NKV * HS), "v": self.normal(B, T, NKV * HS)}
        dout, leaves = self.normal(B, T, NH * HS), {name: self.leaf(x) for name, x in given.items()}
        q, k, v = (x.view(B, T, -1, HS).transpose(1, 2) for x in leaves.values())
        k, v = (x.repeat_interleave(NH // NKV, dim=1) for x in (k, v))
        scores = q @ k.transpose(2, 3) / math.sqrt(HS)
        scores = torch.tanh(scores / limits["cap"]) * limits["cap"]
        t, t2 = torch.arange(T)[:, None], torch.arange(T)
        example = torch.tensor(limits["starts"])
        seen = (t2 <= t) & (t2 > t - limits["window"]) & (example[:, :, None] == example[:, None, :])
        scores = scores.masked_fill(~seen[:, None], -math.inf)
        out = (torch.softmax(scores, dim=-1) @ v).transpose(1, 2).reshape(B, T, -1)
        out.backward(self.const(dout))
        saved, grads = {"out": out, "lse": scores.logsumexp(dim=-1)}, {f"d{n}": x.grad for n, x in leaves.items()}
        if kind == "attention":
            given = {"qkv": np.concatenate(list(given.values()), axis=-1)}
            grads = {"dqkv": torch.cat(list(grads.values()), dim=-1)}
        self.put(f"{kind}_forward", "limited", {**given, **limits}, saved)
        self.put(f"{kind}_backward", "limited", {"dout": dout, **given, **saved, **limits}, grads)

    def attention(self, case: str, B: int, T: int, C: int, NH: int, scale: float = 1.0) -> None:
        qkv, dout = self.normal(B, T, 3 * C, scale=scale), self.normal(B, T, C)
        x = self.leaf(qkv)
        q, k, v = (y.view(B, T, NH, C // NH).transpose(1, 2) for y in x.split(C, dim=2))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C)
        out.backward(self.const(dout))
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        lse = (q @ k.transpose(2, 3) / math.sqrt(C // NH)).masked_fill(future, -math.inf).logsumexp(dim=-1)
        self.put("attention_forward", case, {"qkv": qkv}, {"out": out, "lse": lse})
        self.put("attention_backward", case, {"dout": dout, "qkv": qkv, "out": out, "lse": lse}, {"dqkv": x.grad})

    def gqa(self, case: str, B: int, T: int, NH: int, NKV: int, HS: int, scale: float = 1.0) -> None:
        given = {"q": self.normal(B, T, NH * HS, scale=scale), "k": self.normal(B, T, NKV * HS, scale=scale)}
        given["v"], dout = self.normal(B, T, NKV * HS), self.normal(B, T, NH * HS)
        leaves = {name: self.leaf(x) for name, x in given.items()}
        q, k, v = (x.view(B, T, -1, HS).transpose(1, 2) for x in leaves.values())
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).reshape(B, T, -1)
        out.backward(self.const(dout))
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        scores = q @ k.repeat_interleave(NH // NKV, dim=1).transpose(2, 3) / math.sqrt(HS)
        saved = {"out": out, "lse": scores.masked_fill(future, -math.inf).logsumexp(dim=-1)}
        self.put("gqa_forward", case, given, saved)
        self.put("gqa_backward", case, {"dout": dout, **given, **saved}, {f"d{n}": x.grad for n, x in leaves.items()})

    def rope(self, case: str, B: int, T: int, NH: int, P: int, maxT: int) -> None:
        """As ``transformers`` computes it: ``x * cos + rotate_half(x) * sin``, with tables of both halves of a head."""
        inp, angles, dout = self.normal(B, T, NH * 2 * P), self.normal(maxT, P, scale=3), self.normal(B, T, NH * 2 * P)
        cos, sin = np.cos(angles), np.sin(angles)
        x = self.leaf(inp)
        heads = x.view(B, T, NH, 2 * P)
        turned = torch.cat((-heads[..., P:], heads[..., :P]), dim=-1)
        c, s = (torch.cat((y, y), dim=-1)[:T, None] for y in (self.const(cos), self.const(sin)))
        out = (heads * c + turned * s).reshape(B, T, -1)
        out.backward(self.const(dout))
        self.put("rope_forward", case, {"inp": inp, "cos": cos, "sin": sin}, {"out": out})
        self.put("rope_backward", case, {"dout": dout, "cos": cos, "sin": sin}, {"dinp": x.grad})

    def rmsnorm(self, case: str, inp: np.ndarray, G: int, eps: float) -> None:
        BT, C = inp.shape[0], inp.shape[1] // G
        weight, dout = 1 + self.normal(C, scale=0.1), self.normal(BT, G * C)
        x, w = self.leaf(inp), self.leaf(weight)
        groups = x.view(BT, G, C)
        out = F.rms_norm(groups, [C], w, eps).view(BT, G * C)
        rstd = (groups.square().mean(dim=-1) + eps).rsqrt()
        out.backward(self.const(dout))
        self.put("rmsnorm_forward", case, {"inp": inp, "weight": weight, "eps": eps}, {"out": out, "rstd": rstd})
        given = {"dout": dout, "inp": inp, "weight": weight, "rstd": rstd}
        self.put("rmsnorm_backward", case, given, {"dinp": x.grad, "dweight": w.grad})

    def silu(self, case: str, inp: np.ndarray) -> None:
        dout = self.normal(*inp.shape)
        x = self.leaf(inp)
        out = F.silu(x)
        out.backward(self.const(dout))
        self.put("silu_forward", case, {"inp": inp}, {"out": out})
        self.put("silu_backward", case, {"dout": dout, "inp": inp}, {"dinp": x.grad})

    def swiglu(self, case: str, inp: np.ndarray) -> None:
        up, dout = self.normal(*inp.shape), self.normal(*inp.shape)
        x, u = self.leaf(inp), self.leaf(up)
        out = F.silu(x) * u
        out.backward(self.const(dout))
        self.put("swiglu_forward", case, {"inp": inp, "up": up}, {"out": out})
        self.put("swiglu_backward", case, {"dout": dout, "inp": inp, "up": up}, {"dinp": x.grad, "dup": u.grad})

    def mul(self, case: str, N: int) -> None:
        inp1, inp2, dout = self.normal(N), self.normal(N), self.normal(N)
        x, y = self.leaf(inp1), self.leaf(inp2)
        out = torch.mul(x, y)
        out.backward(self.const(dout))
        given = {"inp1": inp1, "inp2": inp2}
        self.put("mul_forward", case, given, {"out": out})
        self.put("mul_backward", case, {"dout": dout, **given}, {"dinp1": x.grad, "dinp2": y.grad})

    def scale(self, case: str, N: int, factor: float, shift: float = 0.0) -> None:
        inp, dout = self.normal(N), self.normal(N)
        x = self.leaf(inp)
        out = torch.add(torch.mul(x, factor), shift)
        out.backward(self.const(dout))
        self.put("scale_forward", case, {"inp": inp, "factor": factor, "shift": shift}, {"out": out})
        self.put("scale_backward", case, {"dout": dout, "factor": factor}, {"dinp": x.grad})

    def unary(self, op: str, case: str, function: Callable[[Tensor], Tensor], inp: np.ndarray, reads: str = "") -> None:
        """An op of one array, whose backward reads the argument of that name too."""
        x = self.leaf(inp)
        out = function(x)
        dout = self.normal(*out.shape)
        out.backward(self.const(dout))
        self.put(f"{op}_forward", case, {"inp": inp}, {"out": out})
        saved = {"inp": inp, "out": out}
        given = {"dout": dout} | ({reads: saved[reads]} if reads else {})
        self.put(f"{op}_backward", case, given, {"dinp": x.grad})

    def gelu(self, case: str, inp: np.ndarray) -> None:
        dout = self.normal(*inp.shape)
        x = self.leaf(inp)
        out = F.gelu(x, approximate="tanh")
        out.backward(self.const(dout))
        self.put("gelu_forward", case, {"inp": inp}, {"out": out})
        self.put("gelu_backward", case, {"dout": dout, "inp": inp}, {"dinp": x.grad})

    def residual(self, case: str, N: int) -> None:
        inp1, inp2, dout = self.normal(N), self.normal(N), self.normal(N)
        x, y = self.leaf(inp1), self.leaf(inp2)
        out = torch.add(x, y)
        out.backward(self.const(dout))
        self.put("residual_forward", case, {"inp1": inp1, "inp2": inp2}, {"out": out})
        self.put("residual_backward", case, {"dout": dout}, {"dinp1": x.grad, "dinp2": y.grad})

    def softmax(self, case: str, inp: np.ndarray) -> None:
        dout = self.normal(*inp.shape)
        x = self.leaf(inp)
        out = F.softmax(x, dim=-1)
        out.backward(self.const(dout))
        self.put("softmax_forward", case, {"inp": inp}, {"out": out})
        self.put("softmax_backward", case, {"dout": dout, "out": out}, {"dinp": x.grad})

    def cross_entropy(self, case: str, logits: np.ndarray, targets: np.ndarray, ignore_index: int) -> None:
        dloss = np.array([0.7], dtype=np.float32)
        x, t = self.leaf(logits), torch.tensor(targets, dtype=torch.int64)
        loss = F.cross_entropy(x, t, ignore_index=ignore_index).view(1)
        losses = F.cross_entropy(x, t, ignore_index=ignore_index, reduction="none")
        lse = x.logsumexp(dim=-1)
        loss.backward(self.const(dloss))
        fixed = {"logits": logits, "targets": targets, "ignore_index": ignore_index}
        self.put("cross_entropy_forward", case, fixed, {"loss": loss, "losses": losses, "lse": lse})
        self.put("cross_entropy_backward", case, {"dloss": dloss, "lse": lse, **fixed}, {"dlogits": x.grad})

    def embedding(self, case: str, tokens: np.ndarray, V: int, C: int, maxT: int | None) -> None:
        wte, dout = self.normal(V, C), self.normal(*tokens.shape, C)
        wpe = None if maxT is None else self.normal(maxT, C)
        w, p = self.leaf(wte), None if wpe is None else self.leaf(wpe)
        out = F.embedding(torch.tensor(tokens, dtype=torch.int64), w)
        if p is not None:
            out = out + F.embedding(torch.arange(tokens.shape[1]), p)
        out.backward(self.const(dout))
        self.put("embedding_forward", case, {"tokens": tokens, "wte": wte, "wpe": wpe}, {"out": out})
        grads = {"dwte": w.grad, "dwpe": None if p is None else p.grad}
        self.put("embedding_backward", case, {"dout": dout, "tokens": tokens}, grads)

    def sumsq(self, case: str, N: int) -> None:
        inp = self.normal(N)
        self.put("sumsq", case, {"inp": inp}, {"out": torch.linalg.vector_norm(self.const(inp)).square().view(1)})

    def adamw(self, N: int, steps: int) -> None:
        hyper = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
        p = self.leaf(self.normal(N))
        betas = (hyper["beta1"], hyper["beta2"])
        optimizer = torch.optim.AdamW([p], hyper["lr"], betas, hyper["eps"], hyper["weight_decay"], foreach=False)
        m, v = torch.zeros_like(p), torch.zeros_like(p)
        for step in range(1, steps + 1):
            grad = self.normal(N)
            grad[:3] = 0, 1e-9, 1e-20  # nothing to divide; a root near eps; a square below float32's range
            given = {"param": p.detach().clone(), "m": m.clone(), "v": v.clone(), "grad": grad, **hyper}
            p.grad = self.const(grad) * 0.5
            optimizer.step()
            m, v = optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]
            self.put("adamw", f"step{step}", given | {"grad_scale": 0.5, "step": step}, {"param": p, "m": m, "v": v})


def inp_of_activations() -> np.ndarray:
    """Numbers of every size that an activation tells apart."""
    return np.concatenate([np.linspace(-30, 30, 61), np.linspace(-6, 6, 49), [-1e-8, 1e-8, -1e-30]]).astype(np.float32)


def op_values(dtype: torch.dtype) -> Values:
    """Compute every case in `dtype`."""
    ops = Ops(dtype)
    ops.layernorm("odd", ops.normal(7, 13, scale=2) + np.float32(0.5), 1e-5)
    rows = ops.normal(3, 9)
    rows[0] = 2  # no variance: only eps keeps rstd finite
    rows[1] += 1000  # a mean far above the deviation
    ops.layernorm("constant_and_offset_rows", rows, 1e-5)
    ops.matmul("bias", 5, 7, 11, with_bias=True)
    ops.matmul("no_bias", 13, 9, 3, with_bias=False)
    ops.matmul("one_row", 1, 17, 5, with_bias=True)
    ops.attention("odd", B=2, T=7, C=15, NH=3)
    ops.attention("one_token", B=3, T=1, C=6, NH=2)
    ops.attention("peaked", B=1, T=11, C=8, NH=1, scale=6)
    ops.gelu("extreme", inp_of_activations())
    ops.residual("odd", 23)
    inp = ops.normal(5, 13)
    inp[1] *= 100
    inp[2] += 10000
    inp[3, 0] = -10000
    inp[4] = 3
    ops.softmax("extreme", inp)
    targets = np.array([3, 0, -100, 12, 5, -100, 5], dtype=np.int32)
    logits = ops.normal(7, 13)
    logits[1] *= 30
    logits[3] += 5000
    ops.cross_entropy("some_ignored", logits, targets, -100)
    ops.cross_entropy("ignored_class", logits, np.maximum(targets, 0), 0)
    ops.cross_entropy("all_ignored", logits[:3], np.full(3, -100, dtype=np.int32), -100)
    tokens = np.array([[4, 0, 4, 10, 4], [10, 2, 2, 0, 10]], dtype=np.int32)
    ops.embedding("positions", tokens, V=11, C=5, maxT=8)
    ops.embedding("no_positions", tokens, V=11, C=3, maxT=None)
    ops.sumsq("odd", 131)
    ops.adamw(N=37, steps=3)
    ops.gqa("groups_of_two", B=2, T=7, NH=6, NKV=3, HS=5)
    ops.gqa("one_key_head", B=1, T=5, NH=3, NKV=1, HS=4)
    ops.gqa("as_many", B=2, T=3, NH=2, NKV=2, HS=3)
    ops.gqa("one_token", B=3, T=1, NH=4, NKV=2, HS=2)
    ops.gqa("peaked", B=1, T=11, NH=4, NKV=2, HS=4, scale=6)
    ops.rope("longer_table", B=2, T=5, NH=3, P=4, maxT=9)
    ops.rope("one_pair", B=1, T=3, NH=1, P=1, maxT=3)
    ops.rmsnorm("odd", ops.normal(7, 13, scale=2) + np.float32(0.5), 1, 1e-5)
    ops.rmsnorm("groups", ops.normal(5, 21), 3, 1e-6)
    rows = ops.normal(4, 9)
    rows[0] = 0  # only eps keeps rstd finite
    rows[1] *= 1e-4  # eps decides
    rows[2] += 1000
    ops.rmsnorm("zero_and_tiny_rows", rows, 1, 1e-5)
    ops.silu("extreme", inp_of_activations())
    ops.swiglu("extreme", inp_of_activations())
    ops.mul("odd", 23)
    ops.scale("odd", 19, -2.5)
    ops.scale("shifted", 19, 0.3, 1.7)
    ops.unary("relu", "extreme", torch.relu, inp_of_activations(), "inp")
    ops.unary("tanh", "extreme", torch.tanh, inp_of_activations(), "out")
    ops.unary("sigmoid", "extreme", torch.sigmoid, inp_of_activations(), "inp")
    ops.unary("reciprocal", "both_signs", torch.reciprocal, np.linspace(-3, 3, 30, dtype=np.float32), "inp")
    ops.unary("sum", "odd", lambda x: x.sum(1), ops.normal(3, 7, 5))
    ops.unary("expand", "odd", lambda x: x[:, None].expand(3, 7, 5), ops.normal(3, 5))
    ops.unary("transpose", "odd", lambda x: x.transpose(1, 2), ops.normal(3, 7, 2, 5))
    starts = np.array([[0] * 4 + [4] * 5, [0, 1] + [2] * 7], dtype=np.int32)
    limits = {"starts": starts, "window": 4, "cap": 1.5}
    ops.limited("attention", 2, 9, 3, 3, 4, limits)
    ops.limited("gqa", 2, 9, 4, 2, 3, limits)
    return ops.values

"""Generation: one token after the other, with keys and values kept.

The model is traced twice, for one token and for a block of the prompt. In both, attention and embedding become their
ops behind a cache, the loss goes, and parameters and cache lie at the same place of one arena.
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import arena, nn, ops, registry
from .engine import Array, Bound, bind, run_calls, set_threads
from .errors import UserError
from .fuse import fuse
from .kernels import jit, threads
from .lab.check import check_all
from .models.gpt2 import GPT2, Config
from .program import Call, Program, Scalar, Value
from .tokenizers import Tokenizer

BLOCK = 64
"""Tokens of a prompt that are computed at a time."""


def behind_cache(program: Program, room: int) -> Value:
    """Turn a traced forward into one whose tokens follow others; give the logits.

    Parameters
    ----------
    room : positions of the cache.
    """
    position, caches = Scalar("position"), list[Value]()
    for i, call in enumerate(program.calls):
        if call.op is ops.attention_forward:
            shape = call.sizes["B"], call.sizes["NH"], room, call.sizes["C"] // call.sizes["NH"]
            kept = [program.value(f"{call.layer}.{name}", shape, "input") for name in ("keys", "values")]
            caches += kept
            args = {"out": call.args["out"], "keys": kept[0], "values": kept[1], "qkv": call.args["qkv"]}
            args["position"] = position
            program.calls[i] = Call(ops.attention_decode, call.layer, args)
        elif call.op is ops.embedding_forward:
            program.calls[i] = Call(ops.embedding_decode, call.layer, {**call.args, "position": position})
    loss = next(c for c in program.calls if c.op is ops.cross_entropy_forward)
    logits: Value = loss.args["logits"]
    program.calls.remove(loss)
    program.inputs = [*caches, *(v for v in program.inputs if v is not loss.args["targets"])]
    program.outputs = [logits]
    program.verify()
    return logits


class Decoder:
    """A model that reads tokens and gives the logits of what may follow.

    Parameters
    ----------
    choice : which variant computes what. For one token the linear layers default to ``rows``, which reads a weight
        once; in a block of a prompt they are `choice`'s.
    check : whether the kernels must first agree with their references.

    Attributes
    ----------
    position : how many tokens it has read.
    """

    def __init__(
        self,
        config: Config,
        *,
        variant: str = "optimized",
        swaps: Sequence[str] = (),
        threads: int | None = None,
        processes: int = 1,
        kernel_files: Sequence[str] = (),
        check: bool = True,
        progress: Callable[[int, int, str], None] = lambda done, total, name: None,
    ) -> None:
        self.config, self.position = config, 0
        block = min(BLOCK, config.block_size)
        built: dict[int, tuple[Program, Value, list[registry.Kernel]]] = {}
        for T in dict.fromkeys((1, block)):
            program = nn.trace_model(GPT2(config), dict.fromkeys(("tokens", "targets"), ((1, T), "int32")))
            logits = behind_cache(program, config.block_size + block)
            fast = ["matmul_forward=rows"] if T == 1 and variant == "optimized" else []
            choice = registry.Choice(variant, [*fast, *swaps])
            fuse(program, ("layernorm",) if variant == "optimized" else (), choice)
            built[T] = program, logits, [choice.resolve(c.op.name, c.layer) for c in program.calls]
        kernels = list(dict.fromkeys(k for *_, chosen in built.values() for k in chosen))
        self.threads = set_threads(threads, kernels)
        plans = {
            T: arena.plan(
                p, [{s.name: s.floats(c.sizes) for s in k.scratch} for c, k in zip(p.calls, chosen, strict=True)]
            )
            for T, (p, _, chosen) in built.items()
        }
        self.arena_bytes = max(plan.total_bytes for plan in plans.values())
        arena.check_fits(self.arena_bytes, lambda there: "take a smaller model")
        jit.compile_kernels(kernels, processes=processes, files=kernel_files, progress=progress)
        if check:
            for r in check_all(kernels, quick=True, threads=(self.threads,)):
                if r.verdict == "FAIL":
                    raise UserError(f"{r.kernel} is wrong, so nothing is run with it: {r.reason} ({r.case})")
        memory = arena.Arena(self.arena_bytes)
        self._scalars: dict[str, list[tuple[list[Any], int]]] = {}
        self._bound: dict[int, list[Bound]] = {}
        self._tokens: dict[int, Array] = {}
        self._logits: dict[int, Array] = {}
        for T, (program, logits, chosen) in built.items():
            plan, pairs = plans[T], zip(program.calls, chosen, strict=True)
            self._bound[T] = [bind(c, k, plan, memory, self._scalars) for c, k in pairs]
            tokens = next(v for v in program.inputs if v.name == "tokens")
            self._tokens[T] = memory.view(tokens, plan.offsets[tokens], tokens.shape)
            self._logits[T] = memory.view(logits, plan.offsets[logits], (T, config.vocab_size))
            self._parameters = {p.name: memory.view(p, plan.offsets[p], p.shape) for p in program.parameters}
            shared = {v.name: plan.offsets[v] for v in [*program.parameters, *program.inputs] if v is not tokens}
            assert shared == {n: plans[1].offsets[v] for v in plans[1].offsets if (n := v.name) in shared}
        self.weight_bytes = 4 * (config.n_params - config.block_size * config.n_embd)

    def parameters(self) -> dict[str, Array]:
        """Return every parameter by name: views, so writing to them changes the model."""
        return self._parameters

    def restart(self) -> None:
        """Forget all tokens."""
        self.position = 0

    def read(self, tokens: Sequence[int]) -> Array:
        """Read tokens; give the logits (V,) of what may follow the last.

        Raises
        ------
        UserError
            For no token, one that the vocabulary does not have, or more than fit in the context.
        """
        ids, c = np.asarray(tokens, dtype=np.int64), self.config
        if not ids.size or ids.min() < 0 or ids.max() >= c.vocab_size:
            raise UserError(f"tokens {list(tokens)[:8]}: expected at least one, from 0 to {c.vocab_size - 1}")
        if self.position + ids.size > c.block_size:
            raise UserError(f"{self.position + ids.size} tokens do not fit in the context of {c.block_size}")
        threads.set_threads(self.threads)
        block = max(self._bound)
        while True:
            now, ids = ids[:block], ids[block:]
            T = 1 if now.size == 1 else block
            self._tokens[T][0, : now.size] = now
            self._tokens[T][0, now.size :] = 0  # behind the last: what they leave in the cache is overwritten later
            for args, i in self._scalars["position"]:
                args[i] = self.position
            run_calls(self._bound[T])
            self.position += now.size
            if not ids.size:
                logits: Array = self._logits[T][now.size - 1]
                return logits


@dataclass
class Sampler:
    """Chooses a token from logits.

    Parameters
    ----------
    temperature : 0 takes the likeliest, 1 the model's own distribution.
    top_k : how many of the likeliest may be chosen; 0: all.
    top_p : the likeliest that together have this probability may be chosen.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    rng: np.random.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for flag, x, good, want in (
            ("--temperature", self.temperature, 0 <= self.temperature < float("inf"), "0 or more"),
            ("--top-k", self.top_k, self.top_k >= 0, "0 or more"),
            ("--top-p", self.top_p, 0 < self.top_p <= 1, "more than 0, and 1 at most"),
            ("--seed", self.seed, self.seed >= 0, "0 or more"),
        ):
            if not good:
                raise UserError(f"{flag} {x}: expected {want}")
        self.rng = np.random.Generator(np.random.PCG64(self.seed))

    def choose(self, logits: Array) -> int:
        """Choose one of logits (V,).

        Raises
        ------
        UserError
            Where they are not finite.
        """
        x = logits.astype(np.float64)
        if not np.isfinite(x).all():
            raise UserError("the logits are not finite: the weights are damaged, or were never trained")
        if self.temperature == 0:
            return int(x.argmax())
        order = np.argsort(-x, kind="stable")[: self.top_k or None]
        p = np.exp((x[order] - x[order[0]]) / self.temperature)
        p /= p.sum()
        p = p[: int(np.searchsorted(np.cumsum(p), self.top_p)) + 1]
        place = int(np.searchsorted(np.cumsum(p), self.rng.random() * p.sum(), side="right"))
        return int(order[min(place, len(p) - 1)])


def generate(
    decoder: Decoder, prompt: Sequence[int], sampler: Sampler, max_tokens: int, stop: int | None = None
) -> Iterator[int]:
    """Give token after token: `max_tokens` at most, until `stop` comes, or the context is full."""
    logits = decoder.read(prompt)
    for left in range(max_tokens - 1, -1, -1):
        token = sampler.choose(logits)
        if token == stop:
            return
        yield token
        if not left or decoder.position == decoder.config.block_size:
            return
        logits = decoder.read([token])


def text_of(tokens: Iterable[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Give the text of tokens as it becomes known: a character that spans tokens comes whole."""
    decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
    for t in tokens:
        yield decode(tokenizer.token_bytes(t) if t < tokenizer.vocab_size else b"\xff")
    yield decode(b"", True)


def read_bandwidth(decoder: Decoder, rounds: int = 7) -> float:
    """Measure how fast memory can be read, in bytes per second: the largest weight's squares summed, the best of some.

    The kernel is that of the gradient's norm, which has no part in generation.
    """
    kernel = registry.KERNELS["sumsq", "optimized"]
    jit.compile_kernels([kernel])
    x = max(decoder.parameters().values(), key=lambda p: p.size).reshape(-1)
    scratch = [np.empty(s.floats({"N": x.size}), np.float32) for s in kernel.scratch]
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        kernel.function(np.empty(1, np.float32), x, *scratch)
        best = min(best, time.perf_counter() - start)
    return float(x.nbytes / best)

"""Generation: one token after the other, with keys and values kept.

The model is traced for one token and for blocks of a prompt. In each program, the ops that the model names become those
behind a cache, head and loss go, and parameters and cache lie at the same place of one arena. The head is a call of its
own, for one token: of a prompt, only the last token's logits are of use.

In bfloat16 the weights that products read, and the cache, are bfloat16 alone: two bytes each. With a base of int8 the
weights of layers in blocks take one byte; if int8 are multiplied as integers, the head reads a copy in int8.
"""

from __future__ import annotations

import codecs
import time
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from .. import ops
from ..building import Array, BuildOptions, Built, Loaded, Progress, build, load, run_calls
from ..check.gate import judging, require_right
from ..data.tokenizers import Tokenizer
from ..errors import UserError
from ..kernels import registry, roofs
from ..kernels.toolkit.threads import set_threads
from ..models import Config
from ..ops.storage import WIDE
from ..program.fuse import fuse
from ..program.precision import NARROW
from ..program.program import Call, Program, Scalar, Value
from ..program.quantize import INT8

BLOCKS = (1, 8, 64)
"""Numbers of tokens computed at a time: the smallest that holds the remaining prompt, or else the largest."""
FEW = 8
"""The largest number of tokens for which the kernels of `rows` are faster."""
IN_CACHE = 64 << 20
"""Bytes of weights that may lie in a cache, so that the speed of memory does not apply."""


class Reader(ABC):
    """A model that reads tokens and computes the logits of the next: a `Decoder`, or an `Uncached`.

    Parameters
    ----------
    context : the most tokens that it can read; None: the model's context.
    trained_length : the tokens of a row in the run that trained the weights, if it is known.
    variant, swaps : the variants of the ops.
    dtype : "bfloat16" to store in it the weights that products read, the cache, and what else products and attention
        read.
    base : the name of blocks of int8, of `ops.dequantize.BLOCKS`, to store in them the weights of layers in blocks.
    check : whether the kernels must first agree with their references.

    Raises
    ------
    UserError
        For a context that the model does not have, a rule that matches nothing, too little memory, or a kernel that
        fails its check.

    Attributes
    ----------
    position : the number of tokens read.
    context : the most that it can read.
    weight_bytes : the bytes of weights that one token reads, if it reads each once.
    """

    weight_bytes: int | None = None
    _changed = True  # whether weights may have changed since their copies were written

    def __init__(
        self,
        config: Config,
        *,
        context: int | None = None,
        trained_length: int | None = None,
        variant: str = registry.DEFAULT,
        swaps: Sequence[str] = (),
        dtype: str = WIDE,
        base: str = "",
        threads: int | None = None,
        processes: int | None = None,
        kernel_files: Sequence[str] = (),
        check: bool = True,
        progress: Progress = lambda done, total, name: None,
    ) -> None:
        self.config, self.position, self.trained_length = config, 0, trained_length
        self.context = self._context(context)
        how = BuildOptions.from_words(
            variant,
            swaps,
            train=False,
            dtype=dtype,
            weights=WIDE if dtype == WIDE else NARROW,
            freeze=["*"] if base or dtype == INT8 else [],
            base=base,
            threads=threads,
            processes=processes,
            kernel_files=[*kernel_files, *config.files],
        )
        builts = self._builts(how)
        how.choice.check_used((c.op.name, c.layer) for b in builts for c in b.program.calls)
        self.kernels = list(dict.fromkeys(k for b in builts for k in b.kernels))

        def ready(loaded: Loaded) -> None:
            if check:
                with judging(how.kernel_files, loaded.threads) as child:
                    require_right(self.kernels, threads=loaded.threads, child=child)

        advice = "take a shorter --context or a smaller model"
        loaded = load(builts, hint=lambda there: advice, progress=progress, ready=ready)
        self.threads = loaded[0].threads
        self._parameters = {p.name: loaded[0].weight(p) for p in builts[0].program.parameters}
        self._copies = loaded[0].of("convert")
        for one in loaded:
            one.calls = one.of("forward")
        self._begin(loaded)

    @abstractmethod
    def _context(self, asked: int | None) -> int:
        """Return the most tokens that it can read, of which a number may have been asked for."""

    @abstractmethod
    def _builts(self, how: BuildOptions) -> list[Built]:
        """Build its programs, which have the same parameters."""

    @abstractmethod
    def _begin(self, loaded: list[Loaded]) -> None:
        """Take over its programs in memory."""

    @abstractmethod
    def _read(self, ids: Array) -> Array:
        """Read tokens that have been checked; return the logits (V,) of the next token."""

    def parameters(self) -> dict[str, Array]:
        """Return every parameter by name: views, so writing to them before the next tokens changes the model."""
        self._changed = True
        return self._parameters

    def restart(self) -> None:
        """Forget all tokens. The next follow what was written to the weights."""
        self.position, self._changed = 0, True

    def read(self, tokens: Sequence[int]) -> Array:
        """Read tokens; return the logits (V,) of the next token.

        Raises
        ------
        UserError
            For no token, one that the vocabulary does not have, more than fit in the context, or without a cache a
            model whose logits depend on later tokens.
        """
        ids = check_tokens(tokens, self.config, self.context, self.position)
        set_threads(self.threads)
        if self._changed:
            run_calls(self._copies)
            self._changed = False
        return self._read(ids)


def behind_cache(config: Config, program: Program, positions: int, with_head: bool) -> None:
    """Rewrite a model's traced forward for tokens behind a cache. It ends with the head, or with what the head reads.

    Parameters
    ----------
    positions : the length of the cache.
    """
    position, cache = Scalar("position"), list[Value]()
    for i, call in enumerate(program.calls):
        if op := config.cached.get(call.op):
            sizes = {**call.sizes, **config.cache_sizes, "S": positions}
            args = {**call.args, "position": position}
            for a in (a for a in op.arrays if a.kind == "state"):
                args[a.name] = program.value(f"{call.layer}.{a.name}", tuple(d(sizes) for d in a.shape), "input")
                cache.append(args[a.name])
            own = {a.name: args[a.name] for a in op.args}
            program.calls[i] = Call(op, call.layer, own, given=call.given, views=call.views)
    at = next(i for i, call in enumerate(program.calls) if call.layer == config.head)
    logits = next(i for i, call in enumerate(program.calls) if program.outputs[1] in call.writes)
    head, program.calls = program.calls[at : logits + 1], program.calls[: logits + 1 if with_head else at]
    program.heads = [call.args["weight"] for call in head if call.op is ops.matmul_forward]
    read = {v for call in program.calls for v in call.reads}
    program.inputs = [*cache, *(v for v in program.inputs if v in read)]
    program.outputs = [program.outputs[1]] * with_head + [head[0].args["inp"]]
    program.verify()


@dataclass
class Block:
    """The program for a number of tokens at a time, in memory.

    Attributes
    ----------
    tokens, hidden : its input (1, T), and what the head reads of each token (T, C).
    """

    loaded: Loaded
    tokens: Array = field(init=False)
    hidden: Array = field(init=False)

    def __post_init__(self) -> None:
        program = self.loaded.built.program
        self.tokens = self.loaded.array(next(v for v in program.inputs if v.name == "tokens"))
        self.hidden = self.loaded.array(program.outputs[-1])[0]


class Decoder(Reader):
    """A `Reader` with a cache. With ``optimized``, few tokens use the kernels of ``rows``.

    These read a weight once, at the speed of memory. A swap may name another variant.

    Attributes
    ----------
    weights : the memory of all parameters, in their order, as float32.
    """

    def _context(self, asked: int | None) -> int:
        return context_of(self.config, asked)

    def _builts(self, how: BuildOptions) -> list[Built]:
        config, usual = self.config, how.choice.base == registry.DEFAULT
        self._sizes = [T for T in BLOCKS if config.block_size >= T]

        def built(T: int) -> Built:
            few = ["*=rows"] * (usual and T <= FEW)
            choice = registry.Choice(how.choice.variant, [*few, *map(str, how.choice.swaps)])

            def rewrite(program: Program) -> None:
                behind_cache(config, program, self.context + self._sizes[-1], T == 1)
                fuse(program, ("gate", "layernorm", "gelu") if usual else (), choice)

            return build(config.module(), config.specs(1, T), how, choice=choice, rewrite=rewrite)

        return [built(T) for T in self._sizes]

    def _begin(self, loaded: list[Loaded]) -> None:
        self._blocks = {T: Block(one) for T, one in zip(self._sizes, loaded, strict=True)}
        one, first = loaded[0], loaded[0].built.program
        at = next(i for i, b in enumerate(one.calls) if b.call.layer == self.config.head)
        self._head = one.calls[at:]
        del one.calls[-len(self._head) :]
        self._logits = one.array(first.outputs[0], (self.config.vocab_size,))
        ends = [one.plan.offsets[p] + p.nbytes for p in first.parameters]
        self.weights = one.memory.view(Value("weights", (max(ends) // 4,)), 0, (max(ends) // 4,))
        calls = [c for c in first.phase("forward") if not any(a.kind == "index" for a in c.op.args)]
        whole = {v for c in calls for v in c.reads}
        self.weight_bytes = sum(v.nbytes for v in {*first.parameters, *first.kept} & whole)

    def _read(self, ids: Array) -> Array:
        while ids.size:
            T = next((T for T in self._blocks if ids.size <= T), max(self._blocks))
            block, now, ids = self._blocks[T], ids[:T], ids[T:]
            block.tokens[0, : now.size] = now
            block.tokens[0, now.size :] = 0  # padding behind the last: its part of the cache is overwritten later
            block.loaded.set(Scalar("position"), self.position)
            run_calls(block.loaded.calls)
            self.position += now.size
        self._blocks[1].hidden[0] = block.hidden[now.size - 1]
        run_calls(self._head)
        return self._logits


def context_of(config: Config, asked: int | None) -> int:
    """Return the number of tokens that a cache must hold: those asked for, or by default the model's context.

    Raises
    ------
    UserError
        If the model does not read as many.
    """
    if asked is not None and not 1 <= asked <= config.block_size:
        raise UserError(f"--context {asked}: expected 1 to {config.block_size}, the model's context")
    return asked or config.block_size


def check_tokens(tokens: Sequence[int], config: Config, context: int, position: int = 0) -> Array:
    """Return tokens as an array, after checking that a model can read them behind `position` others.

    Raises
    ------
    UserError
        For no token, one that the vocabulary does not have, or more than fit in the context.
    """
    ids = np.asarray(tokens, dtype=np.int64)
    if not ids.size or ids.min() < 0 or ids.max() >= config.vocab_size:
        raise UserError(f"tokens {list(tokens)[:8]}: expected at least one, from 0 to {config.vocab_size - 1}")
    if position + ids.size > context:
        longer = " or a longer --context" if context < config.block_size else ""
        raise UserError(
            f"{position + ids.size} tokens do not fit in the context of {context}; take a shorter prompt{longer}"
        )
    return ids


@dataclass
class Sampler:
    """Sampler of a token from logits.

    Parameters
    ----------
    temperature : 0 takes the likeliest, 1 the model's own distribution.
    top_k : the number of likeliest tokens to choose from; 0: all.
    top_p : the least total probability of the likeliest tokens to choose from.
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
            If they are not finite.
        """
        x = logits.astype(np.float64)
        if not np.isfinite(x).all():
            raise UserError("the logits are not finite: the weights are damaged, or were never trained")
        if self.temperature == 0:
            return int(x.argmax())
        ids = np.argpartition(-x, self.top_k - 1)[: self.top_k] if 0 < self.top_k < len(x) else np.arange(len(x))
        p = np.exp((x[ids] - x.max()) / self.temperature)
        p /= p.sum()
        if self.top_p < 1:
            some = p >= (1 - self.top_p) / len(p)  # all others together have less than 1 - top_p
            order = np.argsort(-p[some], kind="stable")
            ids, p = ids[some][order], p[some][order]
            p = p[: int(np.searchsorted(np.cumsum(p), self.top_p)) + 1]
        sums = np.cumsum(p)
        place = int(np.searchsorted(sums, self.rng.random() * sums[-1], side="right"))
        return int(ids[min(place, len(p) - 1)])


def generate(
    decoder: Reader, prompt: Sequence[int], sampler: Sampler, max_tokens: int, stops: Container[int] = ()
) -> Iterator[int]:
    """Yield one token after the other, until there are `max_tokens`, one of `stops` comes, or the context is full."""
    logits = decoder.read(prompt)
    for left in range(max_tokens - 1, -1, -1):
        token = sampler.choose(logits)
        if token in stops:
            return
        yield token
        if not left or decoder.position == decoder.context:
            return
        logits = decoder.read([token])


def text_of(tokens: Iterable[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the text of tokens as they come; a character that spans tokens comes whole."""
    decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
    for t in tokens:
        yield decode(tokenizer.token_bytes(t) if t < tokenizer.vocab_size else b"\xff")
    yield decode(b"", True)


def read_bandwidth(decoder: Decoder, samples: int = 7, in_cache: int = IN_CACHE) -> float | None:
    """Measure how fast the weights can be read, in bytes per second: the best of some samples.

    The weights are summed in place, on the decoder's threads. None if they may lie in a cache.
    """
    n = decoder.weights.size // decoder.threads // roofs.UNIT * roofs.UNIT
    if decoder.weights.nbytes <= in_cache or not n:
        return None
    set_threads(decoder.threads)
    sums, seconds = np.zeros(decoder.threads, np.float32), list[float]()
    for _ in range(samples + 1):  # the first compiles
        start = time.perf_counter()
        roofs.read(decoder.weights, sums, decoder.threads, n, 1)
        seconds.append(time.perf_counter() - start)
    return 4 * n * decoder.threads / min(seconds[1:])

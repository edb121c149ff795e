"""Generation without a cache: the whole text is computed again for each token.

This is for a model that does not say how its ops work behind a cache, such as a module in a user's file. The model is
traced for one row of tokens, and what the logits do not need goes, such as the loss. Behind the text the row is padded;
the first read verifies that the logits do not depend on the padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from .. import nn, ops
from ..check.gate import require_right
from ..engine import Array, Built, bind, run_calls, set_threads
from ..errors import UserError
from ..kernels import registry
from ..kernels.compile import jit
from ..kernels.toolkit import threads
from ..models import Config
from ..program import arena
from ..program.program import Program, Scalar, Value
from ..program.tables import cut_tables
from .decoder import Decoder, Reader, check_tokens, context_of

USUAL_ROW = 64
"""The tokens of a row where neither the caller nor the model names a number."""
SAME = 1e-3
"""The largest difference between logits that counts as rounding, as a share of the largest logit."""


def reader_of(config: Config, *, trained_length: int | None = None, **how: Any) -> Reader:
    """Return a `Decoder` if the model has a cache, else an `Uncached`, which takes the same arguments.

    Parameters
    ----------
    trained_length : the tokens of a row in the run that trained the weights, if it is known.
    """
    return Decoder(config, **how) if config.cached else Uncached(config, trained_length=trained_length, **how)


def text_program(config: Config, T: int) -> tuple[Program, Value, Value]:
    """Trace a model for a row of T tokens; return the program of its logits, its tokens, and its logits.

    Raises
    ------
    UserError
        For a model that does not compute logits of the next token from tokens alone.
    """
    program = nn.trace_model(*config.sized(1, T))
    logits = next((v for v in program.outputs[1:] if prod(v.shape[:-1]) == T and v.dtype == "float32"), None)
    for call in program.calls:
        if logits is None and call.op is ops.cross_entropy_forward and call.sizes["BT"] == T:
            logits = call.args["logits"]
    refused = f"{config.title} cannot generate text: "
    if logits is None:
        raise UserError(f"{refused}expected a forward that returns (loss, logits), or a loss by nn.CrossEntropyLoss")
    kept, needed = [], {logits}
    for call in reversed(program.calls):
        if needed.intersection(call.writes):
            kept.append(call)
            needed.update(call.reads)
    program.calls, program.outputs = kept[::-1], [logits]
    read = [v for v in program.inputs if v in needed]
    if [(prod(v.shape), v.dtype) for v in read] != [(T, "int32")]:
        names = ", ".join(f"{v.name} {list(v.shape)}" for v in read) or "no input"
        raise UserError(f"{refused}its logits are computed from {names}; expected one row of {T} tokens alone")
    program.inputs = read
    cut_tables(program)
    program.verify()
    return program, read[0], logits


class Uncached:
    """A model that reads tokens and computes the logits of the next token, each time from all tokens so far.

    Parameters
    ----------
    context : the most tokens that it can read; None: the model's context.
    trained_length : the tokens of a row in the run that trained the weights; a row here has as many at least.
    variant, swaps : the variants of the ops.
    check : whether the kernels must first agree with their references.

    Raises
    ------
    UserError
        For a model that computes no logits from tokens alone, a context that it does not have, a rule that matches
        nothing, too little memory, or a kernel that fails its check.

    Attributes
    ----------
    position : the number of tokens read.
    context : the most that it can read.
    """

    weight_bytes = None

    def __init__(
        self,
        config: Config,
        *,
        context: int | None = None,
        trained_length: int | None = None,
        variant: str = registry.DEFAULT,
        swaps: Sequence[str] = (),
        threads: int | None = None,
        processes: int | None = None,
        kernel_files: Sequence[str] = (),
        check: bool = True,
        progress: Callable[[int, int, str], None] = lambda done, total, name: None,
    ) -> None:
        longest = config.longest(trained_length)
        self.config, self.position = config, 0
        self.context = context_of(config, context or min(longest, trained_length or USUAL_ROW))
        if self.context > longest:
            raise UserError(f"--context {context}: {config.title} was trained with {longest} tokens, and reads no more")
        self.T = max(self.context, trained_length or 0)
        variant = registry.DEFAULT if variant == registry.AUTO else variant  # a plan is for a training step
        choice = registry.Choice(variant, [*swaps])
        program, tokens, logits = text_program(config, self.T)
        choice.check_used((c.op.name, c.layer) for c in program.calls)
        chosen = [choice.resolve(c.op.name, c.layer).of(c.types) for c in program.calls]
        self.kernels = list(dict.fromkeys(chosen))
        self.threads = set_threads(threads, self.kernels)
        plan = Built(program, chosen, []).plan()
        arena.check_fits(plan.total_bytes, lambda there: "take a shorter --context or a smaller model")
        files = [*kernel_files, *config.files]
        jit.compile_kernels(self.kernels, processes=processes, files=files, progress=progress)
        if check:
            require_right(self.kernels, threads=self.threads)
        memory, scalars = arena.Arena(plan.total_bytes), dict[Scalar, list[tuple[list[Any], int]]]()
        self._calls = [bind(c, k, plan, memory, scalars) for c, k in zip(program.calls, chosen, strict=True)]
        for v, make in program.constants.items():
            np.copyto(memory.view(v, plan.offsets[v], v.shape), make())
        self._tokens = memory.view(tokens, plan.offsets[tokens], (self.T,))
        self._logits = memory.view(logits, plan.offsets[logits], (self.T, prod(logits.shape) // self.T))
        self._parameters = {p.name: memory.view(p, plan.offsets[p], p.shape) for p in program.parameters}
        self._looks_back = False  # whether it was seen that padding changes nothing

    def parameters(self) -> dict[str, Array]:
        """Return every parameter by name: views, so writing to them changes the model."""
        return self._parameters

    def restart(self) -> None:
        """Forget all tokens."""
        self.position = 0

    def read(self, tokens: Sequence[int]) -> Array:
        """Read tokens; return the logits (V,) of the next token.

        Raises
        ------
        UserError
            For no token, one that the vocabulary does not have, more than fit in the context, or a model whose logits
            depend on later tokens.
        """
        ids = check_tokens(tokens, self.config, self.context, self.position)
        threads.set_threads(self.threads)
        end = self.position + ids.size
        self._tokens[self.position : end] = ids
        logits = self._padded(end, 0)
        if end < self.T and not self._looks_back:
            other = self._padded(end, self.config.vocab_size - 1)
            if np.abs(other - logits).max() > SAME * np.abs(logits).max():
                raise UserError(
                    f"{self.config.title} cannot generate text: its logits depend on later tokens, which are not there "
                    "yet; expected a causal model"
                )
            self._looks_back = True
        self.position = end
        return logits

    def _padded(self, end: int, padding: int) -> Array:
        """Compute the row with a padding behind `end` tokens; return a copy of the logits of the last of these."""
        self._tokens[end:] = padding
        run_calls(self._calls)
        return np.array(self._logits[end - 1])

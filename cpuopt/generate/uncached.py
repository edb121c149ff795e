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

from .. import ops
from ..building import Array, BuildOptions, Built, build, run_calls
from ..errors import UserError
from ..kernels import registry
from ..kernels.toolkit import threads
from ..models import Config
from ..ops.storage import WIDE
from ..program.program import Program
from .decoder import Decoder, Reader, check_tokens, context_of, load_readers

USUAL_ROW = 64
"""The tokens of a row where neither the caller nor the model names a number."""
LOGITS = BuildOptions(train=False)
SAME = 1e-3
"""The largest difference between logits that counts as rounding, as a share of the largest logit."""


def reader_of(config: Config, *, trained_length: int | None = None, **how: Any) -> Reader:
    """Return a `Decoder` if the model has a cache, else an `Uncached`, which takes the same arguments.

    Parameters
    ----------
    trained_length : the tokens of a row in the run that trained the weights, if it is known.
    """
    return Decoder(config, **how) if config.cached else Uncached(config, trained_length=trained_length, **how)


def only_logits(config: Config, program: Program, T: int) -> None:
    """Rewrite a model's traced forward for a row of T tokens: its one input are the tokens, its one output the logits.

    Raises
    ------
    UserError
        For a model that does not compute logits of the next token from tokens alone.
    """
    logits = next((v for v in program.outputs[1:] if prod(v.shape[:-1]) == T and v.dtype == WIDE), None)
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
    program.verify()


def text_program(config: Config, T: int, how: BuildOptions = LOGITS) -> Built:
    """Build the forward of a model for a row of T tokens; see `only_logits`."""
    return build(*config.sized(1, T), how, rewrite=lambda program: only_logits(config, program, T))


class Uncached:
    """A model that reads tokens and computes the logits of the next token, each time from all tokens so far.

    Parameters
    ----------
    context : the most tokens that it can read; None: the model's context.
    trained_length : the tokens of a row in the run that trained the weights; a row here has as many at least.
    variant, swaps : the variants of the ops.
    dtype : "bfloat16" to store in it the weights that products read, and what else products and attention read.
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
        dtype: str = WIDE,
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
        files = [*kernel_files, *config.files]
        how = BuildOptions(
            choice,
            train=False,
            dtype=dtype,
            weights=dtype,
            threads=threads,
            processes=processes,
            kernel_files=files,
        )
        built = text_program(config, self.T, how)
        program = built.program
        choice.check_used((c.op.name, c.layer) for c in program.calls)
        self.kernels = list(dict.fromkeys(built.kernels))

        (loaded,) = load_readers([built], check, progress)
        self.threads, self._calls = loaded.threads, loaded.calls
        (tokens,), (logits,) = program.inputs, program.outputs
        self._tokens = loaded.array(tokens, (self.T,))
        self._logits = loaded.array(logits, (self.T, prod(logits.shape) // self.T))
        self._parameters = {p.name: loaded.array(p) for p in program.parameters}
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

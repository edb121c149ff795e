"""Generation without a cache: the whole text is computed again for each token.

This is for a model that does not say how its ops work behind a cache, such as a module in a user's file. The model is
traced for one row of tokens, and what the logits do not need goes, such as the loss. Behind the text the row is padded;
the first read verifies that the logits do not depend on the padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from .. import nn, ops
from ..building import Array, BuildOptions, Built, Loaded, build, run_calls
from ..errors import UserError
from ..models import Config
from ..ops.declaration import Shape, Spec
from ..ops.storage import WIDE
from ..program.program import Program
from .decoder import Decoder, Reader, context_of

USUAL_ROW = 64
"""The tokens of a row where neither the caller nor the model names a number."""
LOGITS = BuildOptions(train=False)
SAME = 1e-3
"""The largest difference between logits that counts as rounding, as a share of the largest logit."""


def reader_of(config: Config, **how: Any) -> Reader:
    """Return a `Decoder` if the model has a cache, else an `Uncached`."""
    return (Decoder if config.cached else Uncached)(config, **how)


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
    program.heads = [c.args["weight"] for c in kept if c.op is ops.matmul_forward and logits in c.writes]
    read = [v for v in program.inputs if v in needed]
    if [(prod(v.shape), v.dtype) for v in read] != [(T, "int32")]:
        names = ", ".join(f"{v.name} {list(v.shape)}" for v in read) or "no input"
        raise UserError(f"{refused}its logits are computed from {names}; expected one row of {T} tokens alone")
    program.inputs = read
    program.verify()


def text_program(config: Config, T: int, how: BuildOptions = LOGITS) -> Built:
    """Build the forward of a model for a row of T tokens; see `only_logits`."""
    return build(*config.sized(1, T), how, rewrite=lambda program: only_logits(config, program, T))


class ModuleConfig(Config):
    """A module as a language model: its context is a row of the engine's inputs.

    Parameters
    ----------
    inputs : shape and dtype of each input of the engine, the rows of the batch on the first axis.
    """

    model = "module"

    def __init__(self, module: nn.Module, inputs: Mapping[str, Spec]) -> None:
        self._module = module
        self._inputs = {
            n: ((1, *shape[1:]) if len(shape) > 1 else shape, dtype) for n, (shape, dtype) in inputs.items()
        }

    @property
    def title(self) -> str:
        """The name of the module's class."""
        return type(self._module).__name__

    @cached_property
    def block_size(self) -> int:
        """The tokens of a row."""
        shapes = (shape for shape, dtype in self._inputs.values() if dtype == "int32")
        return max((shape[-1] for shape in shapes if shape), default=1)

    @cached_property
    def vocab_size(self) -> int:
        """The ids that the module takes."""
        return text_program(self, self.block_size).program.inputs[0].below or 1

    def sized(self, B: int, T: int) -> tuple[nn.Module, dict[str, tuple[Shape, str]]]:
        """Return the module and its inputs, for one row."""
        return self._module, dict(self._inputs)


class Uncached(Reader):
    """A `Reader` that computes all tokens so far again for each token.

    A row has as many tokens as the context, and as `trained_length` at least. It refuses a model that computes no
    logits from tokens alone.
    """

    def _context(self, asked: int | None) -> int:
        longest = self.config.longest(self.trained_length)
        found = context_of(self.config, asked or min(longest, self.trained_length or USUAL_ROW))
        if found > longest:
            raise UserError(
                f"--context {asked}: {self.config.title} was trained with {longest} tokens, and reads no more"
            )
        return found

    def _builts(self, how: BuildOptions) -> list[Built]:
        self.T = max(self.context, self.trained_length or 0)
        return [text_program(self.config, self.T, how)]

    def _begin(self, loaded: list[Loaded]) -> None:
        (one,) = loaded
        (tokens,), (logits,) = one.built.program.inputs, one.built.program.outputs
        self._calls = one.calls
        self._tokens = one.array(tokens, (self.T,))
        self._logits = one.array(logits, (self.T, prod(logits.shape) // self.T))
        self._looks_back = False  # whether it was seen that padding changes nothing

    def _read(self, ids: Array) -> Array:
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

"""Text from the model of an engine: tokens that follow a prompt, each computed from all before it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from ..generate.uncached import Uncached, text_program
from ..models.config import Config
from ..ops.declaration import Shape, Spec

if TYPE_CHECKING:
    from .. import nn
    from ..kernels.registry import Choice


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


def reader_of(module: nn.Module, inputs: Mapping[str, Spec], choice: Choice, threads: int, dtype: str) -> Uncached:
    """Return a module as a model that reads tokens, with an engine's rules, threads and type; its weights are zeros."""
    swaps = [*map(str, choice.swaps)]
    return Uncached(ModuleConfig(module, inputs), variant=choice.variant, swaps=swaps, threads=threads, dtype=dtype)

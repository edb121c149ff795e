"""The sizes of a language model: what every model has, whether it is the package's or stands in a user's file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import inf, prod
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import UserError

if TYPE_CHECKING:  # a command's help comes without ops
    from .. import nn
    from ..data.given import Given
    from ..ops.declaration import Op, Shape

FIRST = "gpt2"
"""The model of files of earlier versions, which name none."""
MOST_LAYERS = 4096
"""The largest number of layers: their names and shapes are listed before memory is checked."""
LAYERS = ("n_layer", "num_hidden_layers")


def later(default: Any) -> Any:
    """Declare a size that models had not at first: files leave it out where it has its default, as they did before."""
    return field(default=default, metadata={"later": True})


def fits(kind: str, x: Any, most: int) -> tuple[bool, str]:
    """Return whether a size is of the kind that its annotation says, and what that is in words."""
    if kind.endswith(" | None"):
        right, expected = fits(kind.removesuffix(" | None"), x, most)
        return x is None or right, f"{expected}, or null"
    if kind.startswith("tuple"):
        one = kind.removeprefix("tuple[").removesuffix(", ...]")
        right = type(x) is tuple and len(x) <= MOST_LAYERS and all(n == 0 or fits(one, n, most)[0] for n in x)
        return right, f"a list, each 0 or {fits(one, None, most)[1]}"
    return {
        "int": (type(x) is int and 1 <= x <= most, f"a whole number from 1 to {most}"),
        "float": (type(x) in (int, float) and 0 < x < inf, "a positive number"),
        "bool": (type(x) is bool, "true or false"),
        "str": (type(x) is str, "a text"),
    }[kind]


def specs(B: int, T: int) -> dict[str, tuple[Shape, str]]:
    """Return shape and dtype of the inputs of a language model."""
    return {"tokens": ((B, T), "int32"), "targets": ((B, T), "int32")}


@dataclass(frozen=True)
class Config:
    """Sizes of a language model. Each model has a subclass: a frozen dataclass in which every size has a default.

    Attributes
    ----------
    model : its name.
    head : the layer from hidden states to logits; of a prompt, only the last token needs it.
    cached : for each op that depends on positions, the op that computes the same for tokens behind a cache. Its states
        are the cache. If it is empty, text is generated without a cache.
    fused : the layers whose weights Hugging Face's files hold as one, by the end of that one's name.
    """

    model: ClassVar[str]
    head: ClassVar[str] = "lm_head"
    cached: ClassVar[Mapping[Op, Op]] = {}
    fused: ClassVar[Mapping[str, Sequence[str]]] = {}
    if TYPE_CHECKING:

        @property
        def vocab_size(self) -> int: ...  # noqa: D102
        @property
        def block_size(self) -> int: ...  # noqa: D102

    def __post_init__(self) -> None:
        for name, kind in ((f.name, f.type if isinstance(f.type, str) else f.type.__name__) for f in fields(self)):
            if isinstance(x := getattr(self, name), list):
                object.__setattr__(self, name, x := tuple(x))
            right, expected = fits(kind, x, MOST_LAYERS if name in LAYERS else 2**31 - 1)
            if not right:
                raise UserError(f"model: {name} is {repr(x)[:60]}; expected {expected}")

    def module(self) -> nn.Module:
        """Make the module, whose ``forward`` maps `specs` to (loss (1,), logits (B, T, V))."""
        raise NotImplementedError

    @property
    def cache_sizes(self) -> dict[str, int]:
        """The sizes of the cache by their symbols, without the length S."""
        return {}

    def specs(self, B: int, T: int) -> dict[str, tuple[Shape, str]]:
        """Return shape and dtype of the inputs."""
        return specs(B, T)

    def sized(self, B: int, T: int) -> tuple[nn.Module, dict[str, tuple[Shape, str]]]:
        """Return the module and its inputs for a batch."""
        return self.module(), self.specs(B, T)

    @property
    def title(self) -> str:
        """The model's name in a sentence."""
        return self.model

    def batch_size(self, B: int, T: int) -> tuple[int, int]:
        """Return B and T as the model has them: those that were asked for, unless it brings its own inputs."""
        return B, T

    def longest(self, trained_length: int | None = None) -> int:
        """Return the most tokens that it reads at a time.

        Parameters
        ----------
        trained_length : the tokens of a row in the run that trained its weights, if it is known.
        """
        return self.block_size

    def inputs(self, B: int, T: int) -> Given | None:
        """Return the inputs that the model brings; None if they come from a text."""
        return None

    @property
    def files(self) -> tuple[str, ...]:
        """The users' files that hold the model."""
        return ()

    def shapes(self) -> dict[str, Shape]:
        """Return the shape of every parameter, by its name."""
        return {name: p.shape for name, p in self.module().named_parameters()}

    @property
    def n_params(self) -> int:
        """The number of trained numbers; a tied weight counts once."""
        return sum(map(prod, self.shapes().values()))

    def to_json(self) -> dict[str, Any]:
        """Return the sizes in the form of ``--model``, with the model's name if it is not `FIRST`."""
        new = {f.name for f in fields(self) if f.metadata.get("later") and getattr(self, f.name) == f.default}
        sizes = {n: list(x) if isinstance(x, tuple) else x for n, x in asdict(self).items() if n not in new}
        return ({} if self.model == FIRST else {"model": self.model}) | sizes

    @classmethod
    def from_transformers(cls, given: Mapping[str, Any]) -> Config:
        """Read the sizes in a ``config.json`` of Hugging Face; refuse options that this model does not have."""
        return cls(**{f.name: given[f.name] for f in fields(cls) if f.name in given})

    def rows(self, name: str) -> list[int] | None:
        """Return which row of a parameter in Hugging Face's files is each row here; None: the same."""
        return None

    def to_transformers(self) -> dict[str, Any]:
        """Return the content of a ``config.json`` of Hugging Face for the model."""
        return {"model_type": self.model, **asdict(self)}

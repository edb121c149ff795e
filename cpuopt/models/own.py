"""A model in a user's file, ``--model FILE.py:NAME``: the class of a module, a function that makes one, or a config.

A function gets ``B`` and ``T`` if it takes them, and may return the inputs too, as ``(module, inputs)``. These are
arrays by name, which every step trains on; or shape and dtype of each, as an `Engine` takes them, which are then drawn
at random; or a function from a step's number, counted from 0, to arrays. Without inputs, the module maps ``tokens`` and
``targets`` (B, T) to the loss, and ``--data`` has them.

Such a file is code, as trusted as a file of ``--kernels``. It runs where a command or a script names it. A checkpoint
keeps its name and its digest, and nothing that reads one runs it.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ..errors import UserError
from ..wording import nearest
from .config import Config, specs

if TYPE_CHECKING:  # a command's help comes without ops and NumPy
    from .. import nn
    from ..data.given import Batch, Given
    from ..ops.declaration import Op, Shape, Spec

FORM = re.compile(r"(?s)(.+\.py):(\w+)")
ENDLESS = 2**31 - 1
"""The context of a module that names none."""
SIZE = 4, 64
"""B and T with which a function is called where only the module counts."""


class Made(NamedTuple):
    """A module, shape and dtype of its inputs, and its batches, if it brings any."""

    module: nn.Module
    specs: dict[str, Spec]
    batch: Callable[[int], Batch] | None


OPENED: dict[OwnModel, tuple[Path, Any]] = {}
"""The models that this process was told to open: the file of each, and what has the name there."""


@dataclass(frozen=True)
class OwnModel(Config):
    """A model in a user's file.

    Attributes
    ----------
    file, symbol : the file, without its folder, and the name in it.
    digest : of the file's content.
    """

    file: str = ""
    symbol: str = ""
    digest: str = ""
    model: ClassVar = "file"

    def __str__(self) -> str:
        return f"{self.file}:{self.symbol}"

    @property
    def title(self) -> str:
        """File and name."""
        return str(self)

    @property
    def opened(self) -> tuple[Path, Any]:
        """The file, and what has the name in it.

        Raises
        ------
        UserError
            If nobody told this process to run the file, or it had another content.
        """
        if self in OPENED:
            return OPENED[self]
        if any(str(other) == str(self) for other in OPENED):
            raise UserError(f"the model {self}: the file is not what it was when these weights were kept; restore it")
        raise UserError(
            f"the model is {self}, in a file of code, which nothing starts by itself; if you trust it, name it: "
            f"--model {self}"
        )

    @property
    def own(self) -> Config | None:
        """The user's own config, if the name is one."""
        found = self.opened[1]
        return found if isinstance(found, Config) else None

    def sized(self, B: int, T: int) -> tuple[nn.Module, dict[str, Spec]]:
        """Return the module and its inputs for a batch."""
        made = _made(self, B, T)
        return made.module, made.specs

    def module(self) -> nn.Module:
        """Return the module."""
        return _made(self, *SIZE).module

    def specs(self, B: int, T: int) -> dict[str, Spec]:
        """Return shape and dtype of the inputs."""
        return _made(self, B, T).specs

    def batch_size(self, B: int, T: int) -> tuple[int, int]:
        """Return B and T as its function takes them; one that it does not take follows from the inputs it brings."""
        made = _made(self, B, T)
        if made.batch is None:
            return B, T
        takes = inspect.signature(self.opened[1]).parameters
        rows, tokens = rows_of(made.specs)
        return B if "B" in takes else rows, T if "T" in takes else tokens

    def longest(self, trained_length: int | None = None) -> int:
        """As in `Config`; what a function makes for some T has weights for that T alone."""
        takes = () if self.own else inspect.signature(self.opened[1]).parameters
        return trained_length if trained_length and "T" in takes else self.block_size

    def inputs(self, B: int, T: int) -> Given | None:
        """Return the inputs that the model brings; None if they come from a text."""
        from ..data.given import Given

        batch = _made(self, B, T).batch
        return Given(batch, f"inputs of {self}") if batch else None

    @property
    def files(self) -> tuple[str, ...]:
        """The user's file."""
        return (str(self.opened[0]),)

    @property
    def vocab_size(self) -> int:
        """The number of ids that the module takes: as it says, or as its trace allows."""
        if (known := getattr(self.own or self.module(), "vocab_size", None)) is not None:
            return int(known)
        from ..nn import trace_model

        B, T = SIZE
        traced = trace_model(*self.sized(B, min(T, self.block_size)))
        bounds = [v.below for v in traced.inputs if v.below is not None]
        return min(bounds, default=ENDLESS)

    @property
    def block_size(self) -> int:
        """The longest context, as the module says it; else as long as memory allows."""
        return int(getattr(self.own or self.module(), "block_size", ENDLESS))

    @property
    def head(self) -> str:  # type: ignore[override]
        """As in `Config`."""
        return self.own.head if self.own else Config.head

    @property
    def cached(self) -> Mapping[Op, Op]:  # type: ignore[override]
        """As in `Config`; a module alone does not say how its ops work behind a cache."""
        return self.own.cached if self.own else {}

    @property
    def cache_sizes(self) -> dict[str, int]:
        """As in `Config`."""
        return self.own.cache_sizes if self.own else {}

    def to_transformers(self) -> dict[str, Any]:
        """Refuse: other programs' formats hold models that they know."""
        raise UserError(
            f"{self} is a model of your own, which neither Hugging Face's files nor llm.c's can hold; "
            "keep checkpoints with --save-every"
        )


def rows_of(inputs: Mapping[str, Spec]) -> tuple[int, int]:
    """Return what a report shows as B and T: the first axes of the first input, 1 as T if it does not hold ids."""
    shape, dtype = next(iter(inputs.values()), ((1,), ""))
    return shape[0], shape[1] if dtype == "int32" and len(shape) > 1 else 1


def is_own(text: str) -> bool:
    """Return whether a text has the form ``FILE.py:NAME``."""
    return bool(FORM.fullmatch(text))


def open_own(text: str) -> OwnModel:
    """Run a user's file, and return the model in it.

    Parameters
    ----------
    text : ``FILE.py:NAME``.

    Raises
    ------
    UserError
        For a file that is missing or raises, and a name that is no model.
    """
    from ..kernels import load_file  # late: numba comes with it
    from ..nn import Module

    form = FORM.fullmatch(text)
    assert form
    file, name = form.groups()
    module = load_file(file, f"--model {text}", "the class of a module, or a function that makes one")
    here = {n for n, x in vars(module).items() if callable(x) and getattr(x, "__module__", "") == module.__name__}
    found = getattr(module, name, None)
    if isinstance(found, type) and issubclass(found, Config):
        found = found()
    if isinstance(found, Module):
        raise UserError(f"--model {text}: {name} is a module; name its class, or a function that makes it")
    if not (isinstance(found, Config) or callable(found)):
        raise UserError(f"--model {text}: {file} has no class or function {name!r}; {nearest(name, sorted(here))}")
    path = Path(file).resolve()
    ran = {p: known.digest for known, (p, _) in OPENED.items()}  # a file runs once a process, whatever it holds later
    own = OwnModel(path.name, name, ran.get(path) or hashlib.sha256(path.read_bytes()).hexdigest()[:16])
    OPENED[own] = path, found
    return own


@cache
def _made(own: OwnModel, B: int, T: int) -> Made:
    """Make the module and its inputs."""
    import numpy as np

    from ..kernels import blaming
    from ..nn import Module

    path, found = own.opened
    if isinstance(found, Config):
        return Made(_blamed(own, found.module()), found.specs(B, T), None)
    with blaming(path, f"--model {own}"):
        takes = inspect.signature(found).parameters
        made = found(**{n: size for n, size in (("B", B), ("T", T)) if n in takes})
    module, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, Module):
        raise UserError(
            f"--model {own}: it made {type(module).__name__}; expected an nn.Module, alone or as (module, inputs)"
        )
    _blamed(own, module)
    if inputs is None:
        _require_tokens(own, module)
        return Made(module, specs(B, T), None)
    if callable(inputs):
        batch = _checked(own, inputs)
        return Made(module, _specs_of(own, batch(0)), batch)
    if not isinstance(inputs, Mapping) or not inputs:
        raise UserError(
            f"--model {own}: its inputs are {type(inputs).__name__}; expected arrays by name, or a function"
        )
    if not all(isinstance(x, tuple) for x in inputs.values()):
        fixed = {name: np.asarray(x) for name, x in inputs.items()}
        return Made(module, _specs_of(own, fixed), lambda n: fixed)
    given = {name: (tuple(shape), dtype) for name, (shape, dtype) in inputs.items()}
    if given == specs(B, T):
        return Made(module, given, None)
    return Made(module, given, partial(_drawn, module, given))


def _blamed(own: OwnModel, module: nn.Module) -> nn.Module:
    """Let a mistake in the module's forward be told by its line, as one in the rest of the file is."""
    from ..kernels import blaming

    inner = module.forward

    @wraps(inner)
    def forward(*args: Any, **given: Any) -> Any:
        with blaming(own.opened[0], f"--model {own}"):
            return inner(*args, **given)

    module.forward = forward  # type: ignore[method-assign]
    return module


def _require_tokens(own: OwnModel, module: nn.Module) -> None:
    try:
        inspect.signature(module.forward).bind(tokens=0, targets=0)
    except TypeError:
        takes = ", ".join(inspect.signature(module.forward).parameters)
        raise UserError(
            f"--model {own}: its forward takes ({takes}), and a text has (tokens, targets); name a function that "
            "returns the module and its inputs, as in return Net(), {'x': x, 'y': y}"
        ) from None


def _specs_of(own: OwnModel, batch: Batch) -> dict[str, Spec]:
    """Return shape and dtype of some arrays: integers are ids, all else is float32."""
    found: dict[str, tuple[Shape, str]] = {}
    for name, x in batch.items():
        if x.dtype.kind not in "iuf":
            raise UserError(f"--model {own}: input {name!r} has type {x.dtype}; expected numbers")
        found[name] = x.shape, "float32" if x.dtype.kind == "f" else "int32"
    return found


def _checked(own: OwnModel, batch: Callable[[int], Any]) -> Callable[[int], Batch]:
    def checked(n: int) -> Batch:
        import numpy as np

        from ..kernels import blaming

        with blaming(own.opened[0], f"--model {own}"):
            found = batch(n)
            return {name: np.asarray(x) for name, x in found.items()}

    return checked


@cache
def _bounds(module: nn.Module, given: tuple[tuple[str, Spec], ...]) -> dict[str, int | None]:
    from ..nn import trace_model

    return {v.name: v.below for v in trace_model(module, dict(given)).inputs}


def _drawn(module: nn.Module, given: dict[str, Spec], n: int) -> Batch:
    """Draw inputs: normally distributed numbers, and ids that the module takes; the same in every step."""
    import numpy as np

    rng, below = np.random.default_rng(0), _bounds(module, tuple(given.items()))
    return {
        name: rng.integers(0, below[name] or 2, shape).astype(np.int32)
        if dtype == "int32"
        else rng.standard_normal(shape).astype(np.float32)
        for name, (shape, dtype) in given.items()
    }

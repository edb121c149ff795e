"""Modules, after PyTorch: parameters by name, ``forward`` traced with the module's path as its layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any, TypeVar

import numpy as np

from ..errors import UserError, told
from ..ops.declaration import Shape, Spec
from ..ops.storage import TYPES
from ..program.arithmetic import ValueArithmetic
from ..program.program import Program, ReshapedValue, Value
from . import functional as F
from .trace import current, tracing
from .values import MEANING

T = TypeVar("T")
Init = Callable[[np.random.Generator, np.ndarray], None]


def normal(std: float) -> Init:
    """Fill with a normal distribution around 0."""

    def init(rng: np.random.Generator, array: np.ndarray) -> None:
        rng.standard_normal(out=array, dtype=np.float32)
        array *= np.float32(std)

    return init


def uniform(bound: float) -> Init:
    """Fill evenly between -bound and bound."""

    def init(rng: np.random.Generator, array: np.ndarray) -> None:
        rng.random(out=array, dtype=np.float32)
        array *= np.float32(2 * bound)
        array -= np.float32(bound)

    return init


def constant(value: float) -> Init:
    """Fill with one value."""

    def init(rng: np.random.Generator, array: np.ndarray) -> None:
        array.fill(value)

    return init


@dataclass(eq=False)
class Parameter(ValueArithmetic[Value]):
    """An array of weights: its shape and its initial values. The numbers live in an engine's arena.

    Parameters
    ----------
    init : function that fills a float32 array, whatever the dtype, such as `constant(1.0)`.
    trained : whether steps change it; it is an attribute, to be set before an engine is built.

    Raises
    ------
    UserError
        If init is no function, or a size is no whole number of 1 or more.
    """

    shape: Shape
    init: Init
    dtype: str = "float32"
    trained: bool = True

    def __post_init__(self) -> None:
        if not callable(self.init):
            raise UserError(f"Parameter: init is {self.init!r}; expected a function, such as nn.constant(1.0)")
        require_sizes("Parameter", *self.shape)


def require_sizes(name: str, *sizes: int) -> None:
    """Refuse sizes that are no whole numbers of 1 or more."""
    for n in sizes:
        if not isinstance(n, int | np.integer) or n < 1:
            raise UserError(f"{name}: size {n!r}; expected a whole number of 1 or more")


@dataclass(eq=False)
class Buffer(ValueArithmetic[Value]):
    """A constant array of a module, such as a table: not trained, and in no checkpoint.

    Parameters
    ----------
    make : function that computes the array, float32; called once for each engine.
    """

    shape: Shape
    make: Callable[[], np.ndarray]


class Module:
    """A part of a model: parameters, buffers and submodules as attributes, and ``forward``."""

    def __init_subclass__(cls) -> None:
        cls.__init__ = told(cls.__init__, cls.__name__)  # type: ignore[method-assign]

    def __init__(self) -> None:
        pass

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute from values; called while tracing."""
        raise UserError(f"{type(self).__name__} has no forward method: write def forward(self, x): ...")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Trace ``forward`` in this module's layer."""
        with current().inside(self):
            return told(self.forward, f"{type(self).__name__}.forward")(*args, **kwargs)

    def children(self) -> Iterator[tuple[str, Module]]:
        """Iterate over the direct submodules with their paths; those of a list are numbered."""
        for name, v in vars(self).items():
            if isinstance(v, Module):
                yield name, v
            elif isinstance(v, (list, tuple)):
                yield from ((f"{name}.{i}", m) for i, m in enumerate(v) if isinstance(m, Module))

    def named_modules(self, path: str = "") -> Iterator[tuple[str, Module]]:
        """Iterate over this module and all below it."""
        yield path, self
        for name, child in self.children():
            yield from child.named_modules(f"{path}.{name}" if path else name)

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Iterate over the parameters; a tied one comes once, under its first name."""
        return self._named(Parameter)

    def named_buffers(self) -> Iterator[tuple[str, Buffer]]:
        """Iterate over the buffers, each once."""
        return self._named(Buffer)

    def _named(self, kind: type[T]) -> Iterator[tuple[str, T]]:
        seen: set[T] = set()
        for path, module in self.named_modules():
            for name, v in vars(module).items():
                if isinstance(v, kind) and v not in seen:
                    seen.add(v)
                    yield f"{path}.{name}" if path else name, v

    def parameters(self) -> Iterator[Parameter]:
        """Iterate over the parameters, each once."""
        return (p for _, p in self.named_parameters())


class Linear(Module):
    """Rows times a weight (out, in), plus a bias. Starts as in PyTorch, unless `init` is given."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, init: Init | None = None) -> None:
        require_sizes("Linear", in_features, out_features)
        start = uniform(in_features**-0.5)
        self.weight = Parameter((out_features, in_features), init or start)
        self.bias = Parameter((out_features,), constant(0) if init else start) if bias else None

    def forward(self, x: Value) -> Value:
        """Map (..., in_features) to (..., out_features)."""
        return F.linear(x, self.weight, self.bias)


class LayerNorm(Module):
    """Normalized rows, scaled and shifted."""

    def __init__(self, features: int, eps: float = 1e-5) -> None:
        self.weight = Parameter((features,), constant(1))
        self.bias = Parameter((features,), constant(0))
        self.eps = eps

    def forward(self, x: Value) -> Value:
        """Keep the shape (..., features)."""
        return F.layer_norm(x, self.weight, self.bias, self.eps)


class RMSNorm(Module):
    """Rows normalized by their root mean square, and scaled; or each group of `features` channels of a row.

    Parameters
    ----------
    shift : what is added to the weight, which starts at ``1 - shift``: 1 for a weight that is kept as its distance
        from 1, as in Gemma.
    """

    def __init__(self, features: int, eps: float = 1e-6, shift: float = 0) -> None:
        self.weight = Parameter((features,), constant(1 - shift))
        self.eps, self.shift = eps, shift

    def forward(self, x: Value) -> Value:
        """Keep the shape (..., G * features)."""
        return F.rms_norm(x, self.weight + self.shift if self.shift else self.weight, self.eps)


class RotaryEmbedding(Module):
    """Rotary positions for heads of `head_size` channels, rotate-half; the angles are computed in float32.

    Parameters
    ----------
    positions : the longest context.
    scaling : function that changes the inverse frequencies (rotary_size / 2,), float32, before the angles are computed.
    rotary_size : how many channels of a head rotate; by default all. Channel i rotates with channel head_size / 2 + i,
        for i below rotary_size / 2.
    amplitude : what the cosines and sines are multiplied by.
    """

    def __init__(
        self,
        head_size: int,
        positions: int,
        base: float = 10000.0,
        scaling: Callable[[np.ndarray], np.ndarray] = lambda frequencies: frequencies,
        rotary_size: int | None = None,
        amplitude: float = 1.0,
    ) -> None:
        size = head_size if rotary_size is None else rotary_size
        if head_size % 2 or size % 2 or not 2 <= size <= head_size:
            raise UserError(
                f"RotaryEmbedding: head_size = {head_size}, of which {size} rotate; expected even numbers, 2 or more"
            )

        def angles() -> np.ndarray:
            exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
            frequencies = scaling(np.float32(1) / np.float32(base) ** exponents)
            found: np.ndarray = np.arange(positions, dtype=np.float32)[:, None] * frequencies
            return found

        def table(function: Callable[[np.ndarray], np.ndarray], still: float) -> Buffer:
            def make() -> np.ndarray:
                found: np.ndarray = function(angles()) * np.float32(amplitude)
                return np.pad(found, ((0, 0), (0, (head_size - size) // 2)), constant_values=still)

            return Buffer((positions, head_size // 2), make)

        self.cos, self.sin = table(np.cos, 1), table(np.sin, 0)

    def forward(self, x: Value, starts: Value | None = None) -> Value:
        """Rotate the heads of x (B, T, NH * head_size); `starts` are those of `F.rotary_embedding`."""
        return F.rotary_embedding(x, self.cos, self.sin, starts)


class Embedding(Module):
    """A row for each id."""

    def __init__(self, num: int, features: int, init: Init | None = None) -> None:
        self.weight = Parameter((num, features), init or normal(1))

    def forward(self, tokens: Value, positions: Value | None = None, starts: Value | None = None) -> Value:
        """Map ids (B, T) to rows (B, T, features), plus rows of `positions` if given, counted from `starts`."""
        return F.embedding(tokens, self.weight, positions, starts)


class GELU(Module):
    """GELU in its tanh form."""

    def forward(self, x: Value) -> Value:
        """Keep the shape."""
        return F.gelu(x)


class SiLU(Module):
    """SiLU, also called swish."""

    def forward(self, x: Value) -> Value:
        """Keep the shape."""
        return F.silu(x)


class ReLU(Module):
    """The positive part."""

    def forward(self, x: Value) -> Value:
        """Keep the shape."""
        return F.relu(x)


class Tanh(Module):
    """Hyperbolic tangent."""

    def forward(self, x: Value) -> Value:
        """Keep the shape."""
        return F.tanh(x)


class Sigmoid(Module):
    """Logistic function."""

    def forward(self, x: Value) -> Value:
        """Keep the shape."""
        return F.sigmoid(x)


class Dropout(Module):
    """Elements that a training step zeroes at random, with probability p; an evaluation keeps all."""

    def __init__(self, p: float = 0.5) -> None:
        self.p = p

    def forward(self, x: Value) -> Value:
        """Keep the shape."""
        return F.dropout(x, self.p)


class CrossEntropyLoss(Module):
    """Mean cross-entropy, softmax included."""

    def __init__(self, ignore_index: int = -100) -> None:
        self.ignore_index = ignore_index

    def forward(self, logits: Value, targets: Value) -> Value:
        """Map logits (..., V) and ids (...) to a loss (1,)."""
        return F.cross_entropy(logits, targets, self.ignore_index)


class Sequential(Module):
    """Modules one after the other."""

    def __init__(self, *modules: Module) -> None:
        self.layers = list(modules)

    def forward(self, x: Any) -> Any:
        """Pass x through each module in turn."""
        for layer in self.layers:
            x = layer(x)
        return x


def trace_model(model: Module, inputs: Mapping[str, Spec]) -> Program:
    """Trace a model's forward, which must return the loss, alone or first in a tuple.

    Parameters
    ----------
    inputs : for each of forward's arguments by name, its shape and its dtype.
    """
    with tracing(MEANING) as trace:
        program = trace.program
        for path, module in model.named_modules():
            trace.paths.setdefault(module, path)
        for name, parameter in model.named_parameters():
            about = {"dtype": parameter.dtype, "trained": parameter.trained}
            value = program.value(name, parameter.shape, "parameter", **about)
            program.parameters.append(value)
            trace.values[parameter] = value
        for name, buffer in model.named_buffers():
            value = trace.values[buffer] = program.value(name, buffer.shape, "constant")
            program.constants[value] = buffer.make
        taken = {p.name for p in program.parameters}
        for name, (sizes, dtype) in inputs.items():
            if dtype not in TYPES:
                raise UserError(f"input '{name}' is declared {dtype}; expected {', '.join(TYPES)}")
            if name in taken:
                raise UserError(f"input '{name}' has the name of a parameter; give it another")
            program.inputs.append(program.value(name, tuple(sizes), "input", dtype=dtype))
        try:
            signature(model.forward).bind(**inputs)
        except TypeError as e:
            raise UserError(
                f"{type(model).__name__}.forward does not take the inputs ({', '.join(inputs)}): {e}"
            ) from e
        result = model(**{v.name: v for v in program.inputs})
        outputs = result if isinstance(result, tuple) else (result,)
        whole = [F.scale(v, 1) if isinstance(v, ReshapedValue) else v for v in outputs]
    program.outputs = [v for v in whole if isinstance(v, Value)]
    loss = outputs[0] if outputs else None
    if not isinstance(loss, Value) or loss.shape != (1,):
        shape = loss.shape if isinstance(loss, Value) else type(loss).__name__
        raise UserError(f"{type(model).__name__}.forward returned {shape}; expected the loss, a value of shape (1,)")
    program.verify()
    return program

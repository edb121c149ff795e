"""The operators and methods of a value, as PyTorch has them: each asks the open trace to add its calls.

A value lies below the front end and knows no op. What it computes is a row of the table with which the front end opens
a trace (`nn.values.MEANING`). An operator that a value does not have says here what to write instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, Generic, NoReturn, ParamSpec, Protocol, TypeVar

from ..errors import UserError, told

P = ParamSpec("P")
R = TypeVar("R")
V = TypeVar("V")


class Tracing(Protocol):
    """What a value knows of a trace."""

    meaning: Mapping[str, Callable[..., Any]]
    """The function behind each operator and method, by name."""


OPEN: ContextVar[Tracing | None] = ContextVar("trace", default=None)
"""The open trace."""


def open_trace() -> Any:
    """Return the open trace.

    Raises
    ------
    UserError
        If no model is being traced.
    """
    trace = OPEN.get()
    if trace is None:
        raise UserError("a functional was called outside a model: build an Engine(model, inputs), which traces forward")
    return trace


def _method(f: Callable[P, R]) -> Callable[P, R]:
    """Refuse wrong arguments in one line that calls the value x."""
    return told(f, f"x.{f.__name__}")


def _refused(text: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any) -> NoReturn:
        raise UserError(text)

    return refuse


KNOWN_LATER = "the model is traced once, before its values are known"


class ValueArithmetic(Generic[V]):
    """What a value, a parameter and a buffer have in common; what they compute is a V."""

    def _ask(self, name: str, *args: Any) -> V:
        made: V = open_trace().meaning[name](self, *args)
        return made

    def __add__(self, y: Any) -> V:
        return self._ask("add", y)

    def __sub__(self, y: Any) -> V:
        return self._ask("sub", y)

    def __rsub__(self, y: Any) -> V:
        return self._ask("rsub", y)

    def __mul__(self, y: Any) -> V:
        return self._ask("mul", y)

    def __truediv__(self, y: Any) -> V:
        return self._ask("truediv", y)

    def __rtruediv__(self, y: Any) -> V:
        return self._ask("rtruediv", y)

    def __neg__(self) -> V:
        return self._ask("neg")

    __radd__, __rmul__ = __add__, __mul__

    @_method
    def sum(self, dim: int | Iterable[int] | None = None, keepdim: bool = False) -> V:
        """See `functional.sum`."""
        return self._ask("sum", dim, keepdim)

    @_method
    def mean(self, dim: int | Iterable[int] | None = None, keepdim: bool = False) -> V:
        """See `functional.mean`."""
        return self._ask("mean", dim, keepdim)

    @_method
    def reshape(self, *shape: Any) -> V:
        """See `functional.reshape`."""
        return self._ask("reshape", *shape)

    @_method
    def view(self, *shape: Any) -> V:
        """See `functional.reshape`."""
        return self._ask("reshape", *shape)

    @_method
    def transpose(self, dim0: int, dim1: int) -> V:
        """See `functional.transpose`."""
        return self._ask("transpose", dim0, dim1)

    @_method
    def expand(self, *shape: Any) -> V:
        """See `functional.expand`."""
        return self._ask("expand", *shape)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **more: Any) -> Any:
        return self._ask("array_ufunc", ufunc, method, *inputs)

    def __array_function__(self, function: Any, *more: Any) -> Any:
        return self._ask("array_function", function)

    # What is compared and asked while no model is traced is whether two values are one.

    def __eq__(self, y: object) -> bool:
        if OPEN.get():
            raise UserError(
                f"x == y: {KNOWN_LATER}; write 'x is None' or 'x is y', or an op of your own with @differentiable"
            )
        return self is y or NotImplemented

    def __bool__(self) -> bool:
        if OPEN.get():
            raise UserError(
                f"if x: {KNOWN_LATER}, so no branch depends on one; write 'x is not None' for an argument that may be "
                "absent, F.relu, or a product with a mask that is an input"
            )
        return True

    __hash__ = object.__hash__

    # What a value does not have.

    __matmul__ = __rmatmul__ = _refused("x @ y: write F.linear(x, weight) for a weight (out, in)")
    __pow__ = _refused("x ** n: write products, as in x * x")
    __abs__ = _refused("abs(x): write F.relu(x) + F.relu(-x)")
    __rpow__ = __mod__ = __floordiv__ = _refused(
        "a ** x, x % n and x // n: write an op of your own with @differentiable"
    )
    __float__ = __int__ = __index__ = __len__ = _refused(
        "a value of a model is no number: it has none while the model is traced; x.shape has its sizes"
    )
    __array__ = _refused("np.array(x): a value of a model has no elements while the model is traced")
    __getitem__ = _refused(
        "x[i]: a value has no elements while a model is traced; reshape, sum and transpose select axes"
    )
    __lt__ = __le__ = __gt__ = __ge__ = _refused(
        "a comparison of values: a model has no branches; write F.relu, or an op of your own with @differentiable"
    )

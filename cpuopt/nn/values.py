"""What arithmetic on the values of a model computes: operators, sums and means, shapes, broadcasting.

`program.arithmetic` has the operators themselves. Each is one call or two. A shape is part of a call, so ``reshape``
costs nothing. What is broadcast is copied along the axes that it lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import zip_longest
from math import inf, prod
from numbers import Integral, Real
from typing import Any, NoReturn

from .. import ops
from ..errors import UserError, told
from ..ops.declaration import Shape
from ..program.arithmetic import ValueArithmetic
from ..program.program import ReshapedValue, Value
from ..wording import nearest
from . import functional as F
from .trace import Array, current


@told
def add(x: Array, y: Any) -> Value:
    """Sum of a value and a value or a number."""
    return F.scale(x, 1, _number(y)) if isinstance(y, Real) else F.residual(*together("+", x, y))


@told
def sub(x: Array, y: Any) -> Value:
    """Difference of a value and a value or a number."""
    return add(x, -y if isinstance(y, Real) else F.scale(_array("-", y), -1))


@told
def mul(x: Array, y: Any) -> Value:
    """Product of a value and a value or a number."""
    if isinstance(y, Real):
        return F.scale(x, _number(y))
    x, y = together("*", x, y)
    return current().emit(ops.mul_forward, {"inp1": x, "inp2": F.scale(y, 1) if current().is_one(x, y) else y})


@told
def div(x: Array, y: Any) -> Value:
    """Quotient of a value and a value or a number."""
    if isinstance(y, Real):
        if not y:
            raise UserError("x / 0: expected another number")
        return F.scale(x, 1 / _number(y))
    return mul(x, F.reciprocal(_array("/", y)))


@told
def sum(x: Array, dim: int | Iterable[int] | None = None, keepdim: bool = False) -> Value:
    """Sum over an axis or several, counted from 0 or from the end by -1; over all by default: shape (1,)."""
    if dim is None:
        return current().emit(ops.sum_forward, {"inp": view(x, (1, prod(x.shape), 1))}, (1,))
    axes = sorted((_axis("sum", x, d) for d in (dim if isinstance(dim, Iterable) else [dim])), reverse=True)
    if len(set(axes)) < len(axes) or not axes:
        raise UserError(f"sum: dim={dim} of the shape {x.shape}; expected axes, each once")
    for d in axes:
        front, n, behind = x.shape[:d], x.shape[d], x.shape[d + 1 :]
        whole = view(x, (prod(front), n, prod(behind)))
        x = current().emit(ops.sum_forward, {"inp": whole}, (*front, *[1] * keepdim, *behind) or (1,))
    return x  # type: ignore[return-value]  # at least one axis


@told
def mean(x: Array, dim: int | Iterable[int] | None = None, keepdim: bool = False) -> Value:
    """Mean over an axis or several; over all by default: shape (1,)."""
    total = sum(x, dim, keepdim)
    return F.scale(total, prod(total.shape) / prod(x.shape))


@told
def reshape(x: Array, *shape: int | Shape) -> Value:
    """The same elements in another shape, of which one size may be -1; nothing is computed or copied."""
    sizes = _sizes(shape)
    if sizes.count(-1) == 1:
        rest = prod(n for n in sizes if n != -1)
        sizes = tuple(prod(x.shape) // rest if n == -1 and rest else n for n in sizes)
    if prod(sizes) != prod(x.shape) or min(sizes, default=1) < 1:
        raise UserError(f"reshape: a value of shape {x.shape} cannot have the shape {_sizes(shape)}")
    return view(x, sizes)


@told
def transpose(x: Array, dim0: int, dim1: int) -> Value:
    """Copy with two axes exchanged."""
    i, j = sorted((_axis("transpose", x, dim0), _axis("transpose", x, dim1)))
    if i == j:
        return view(x, x.shape)
    made = _swap(x, i, j, j + 1)  # the last comes to the front
    return made if j == i + 1 else _swap(made, i + 1, i + 2, j + 1)  # the first goes behind those between


@told
def expand(x: Array, *shape: int | Shape) -> Value:
    """Copy along axes of size 1, and along new ones in front; -1 keeps a size."""
    sizes = _sizes(shape)
    have = (1,) * (len(sizes) - len(x.shape)) + x.shape
    want = tuple(h if n == -1 else n for h, n in zip(have, sizes, strict=False))
    if (
        len(have) != len(sizes)
        or min(want, default=1) < 1
        or any(h not in (1, n) for h, n in zip(have, want, strict=True))
    ):
        raise UserError(f"expand: a value of shape {x.shape} cannot have the shape {sizes}")
    made, i = view(x, have), 0
    while i < len(want):
        j = i
        while j < len(want) and made.shape[j] == 1:
            j += 1
        if (n := prod(want[i:j])) > 1:
            shown = view(made, (prod(want[:i]), prod(made.shape[j:])))
            made = current().emit(ops.expand_forward, {"inp": shown}, (*want[:j], *made.shape[j:]), T=n)
        i = max(i + 1, j)
    return made


def view(x: Array, shape: Shape) -> Value:
    """Return a view of a value, or itself if that has the shape."""
    value: Value = current().value(x)
    if not isinstance(value, Value):
        raise UserError("a parameter is used that is none of the model's; make its module in __init__")
    return value if value.shape == shape else ReshapedValue(value, shape)


def together(sign: str, x: Array, y: Array) -> tuple[Array, Array]:
    """Expand two values to one shape, by the rules of NumPy."""
    if x.shape == _array(sign, y).shape:
        return x, y
    pairs = list(zip_longest(reversed(x.shape), reversed(y.shape), fillvalue=1))
    if any(m != n and 1 not in (m, n) for m, n in pairs):
        raise UserError(
            f"x {sign} y: shapes {x.shape} and {y.shape}; expected sizes that are equal or 1, from the last axis on"
        )
    shape = tuple(max(pair) for pair in reversed(pairs))
    return tuple(v if v.shape == shape else expand(v, shape) for v in (x, y))  # type: ignore[return-value]


def _swap(x: Array, i: int, j: int, k: int) -> Value:
    """Exchange the axes from i to j with those from j to k."""
    front, first, second, behind = (x.shape[a:b] for a, b in ((0, i), (i, j), (j, k), (k, None)))
    shown = view(x, tuple(map(prod, (front, first, second, behind))))
    return current().emit(ops.transpose_forward, {"inp": shown}, (*front, *second, *first, *behind))


def _array(sign: str, y: Any) -> Array:
    if isinstance(getattr(y, "shape", None), tuple) and not hasattr(y, "tobytes"):
        return y  # type: ignore[no-any-return]
    raise UserError(
        f"x {sign} y: y is {type(y).__name__}; expected a value, a parameter or a number; "
        "an array of NumPy is an input of the model, or nn.Buffer(shape, make)"
    )


def _number(y: Real) -> float:
    """Return a float, which is infinite for a whole number beyond all floats."""
    try:
        return float(y)
    except OverflowError:
        return inf


def _axis(name: str, x: Array, dim: int) -> int:
    if not (isinstance(dim, Integral) and -len(x.shape) <= dim < len(x.shape)):
        raise UserError(f"{name}: dim={dim!r} of the shape {x.shape}; expected {-len(x.shape)} to {len(x.shape) - 1}")
    return int(dim) % len(x.shape)


def _sizes(shape: tuple[Any, ...]) -> Shape:
    """Return sizes that are given one by one or as a tuple."""
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Iterable) else shape
    if wrong := [n for n in sizes if not isinstance(n, Integral)]:
        raise UserError(f"a shape has the size {wrong[0]!r}; expected whole numbers")
    return tuple(map(int, sizes))


NUMPY = {"add": "add", "subtract": "sub", "multiply": "mul", "divide": "truediv", "matmul": "matmul", "power": "pow"}
NUMPY |= {"negative": "neg", "absolute": "abs"}
"""NumPy's names of operators, which it calls where one side is an array or a number of its own."""


def _ufunc(self: Any, ufunc: Any, method: str, *inputs: Any) -> Any:
    """Apply an operator to a value and a number of NumPy; refuse every other function of NumPy."""
    if method != "__call__" or ufunc.__name__ not in NUMPY:
        return _numpy_function(self, ufunc)
    name, (x, *y) = NUMPY[ufunc.__name__], inputs
    if isinstance(x, ValueArithmetic):
        return getattr(x, f"__{name}__")(*y)
    return getattr(self, f"__r{name}__")(x)


def _numpy_function(self: Any, function: Any) -> NoReturn:
    name = function.__name__
    own = f"F.{name}(x)" if name in vars(F) else f"x.{name}(...)" if name in METHODS else ""
    raise UserError(
        f"np.{name}(x): a value of a model is no array of NumPy; "
        f"{f'write {own}' if own else 'take one of cpuopt.functional, or write an op of your own with @differentiable'}"
    )


def _missing(x: Value, name: str) -> NoReturn:
    if hasattr(F, name):
        raise AttributeError(f"x.{name}: write F.{name}(x)")
    raise AttributeError(f"a value of a model has no {name!r}; {nearest(name, [*METHODS, 'view'])}")


METHODS = {f.__name__: f for f in (sum, mean, reshape, transpose, expand)}
MEANING: dict[str, Callable[..., Any]] = METHODS | {
    "add": add,
    "sub": sub,
    "rsub": lambda x, y: F.scale(x, -1, _number(y)) if isinstance(y, Real) else sub(_array("-", y), x),
    "mul": mul,
    "truediv": div,
    "rtruediv": lambda x, y: mul(F.reciprocal(x), y),
    "neg": lambda x: F.scale(x, -1),
    "array_ufunc": _ufunc,
    "array_function": _numpy_function,
    "missing": _missing,
}
"""What the operators and methods of a value do while a model is traced (`program.arithmetic`)."""

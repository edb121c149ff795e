"""The slope of a kernel by dual numbers: its own text as plain Python in float64, each value with its slope beside it.

It shares nothing with the generator of backwards, and takes no differences: there is no step that bends or rounds, and
at a kink, as where both arguments of max are equal, it takes the branch that the kernel takes. Integers are of 64 bits,
as in compiled code, and none wraps around unseen.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable, Mapping
from types import CellType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from ..ad.lower.scope import PYTHON, outside

Array = np.ndarray[Any, Any]
Function = Callable[..., Any]


class IntegerOverflowError(OverflowError):
    """An integer of a kernel that int64 does not hold."""


class Whole(int):
    """An integer of Python's that raises an error where compiled code would wrap around."""

    __array_ufunc__ = None  # NumPy's scalars leave arithmetic to it
    __hash__ = int.__hash__


def watched(x: Any) -> Any:
    """Return an integer as a `Whole`; anything else as it is."""
    if type(x) is not int:
        return x
    if not -(2**63) <= x < 2**63:
        raise IntegerOverflowError(f"an integer is {x:.3g}, beyond int64")
    return Whole(x)


def integers(x: Any) -> Any:
    """Return an array of integers as int64, in which compiled code computes with them; any other as it is."""
    return x.astype(np.int64) if isinstance(x, np.ndarray) and x.dtype.kind == "i" else x


def _bare(x: Any) -> Any:
    return int(x) if isinstance(x, Whole | np.signedinteger) else x


def _watch(name: str, reflected: bool) -> None:
    """Let an operator of a `Whole` return what that of an integer does."""
    work, word = getattr(operator, name), name.rstrip("_")
    setattr(Whole, f"__{word}__", lambda self, *other: watched(work(int(self), *map(_bare, other))))
    if reflected:
        setattr(Whole, f"__r{word}__", lambda self, other: watched(work(_bare(other), int(self))))


for _name in ("neg", "pos", "abs", "invert", "lt", "le", "gt", "ge", "eq", "ne"):
    _watch(_name, reflected=False)
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and_", "or_", "xor"):
    _watch(_name, reflected=True)


SLOPES: dict[str, Function] = {
    "exp": np.exp,
    "expm1": np.exp,
    "log": lambda x: 1 / x,
    "log1p": lambda x: 1 / (1 + x),
    "sqrt": lambda x: 0.5 / np.sqrt(x),
    "tanh": lambda x: 1 / np.cosh(x) ** 2,
    "sin": np.cos,
    "cos": lambda x: -np.sin(x),
    "abs": np.sign,
    "fabs": np.sign,
    "tan": lambda x: 1 / np.cos(x) ** 2,
    "sinh": np.cosh,
    "cosh": np.sinh,
    "erf": lambda x: 2 / math.sqrt(math.pi) * np.exp(-x * x),
    "erfc": lambda x: -2 / math.sqrt(math.pi) * np.exp(-x * x),
    "log2": lambda x: 1 / (x * math.log(2)),
    "log10": lambda x: 1 / (x * math.log(10)),
    "exp2": lambda x: np.exp2(x) * math.log(2),
    "square": lambda x: 2 * x,
    "asin": lambda x: 1 / np.sqrt(1 - x * x),
    "acos": lambda x: -1 / np.sqrt(1 - x * x),
    "atan": lambda x: 1 / (1 + x * x),
    "asinh": lambda x: 1 / np.hypot(x, 1),
    "acosh": lambda x: 1 / np.sqrt((x - 1) * (x + 1)),
    "atanh": lambda x: 1 / ((1 - x) * (1 + x)),
}
SLOPES |= {f"arc{name[1:]}": SLOPES[name] for name in ("asin", "acos", "atan", "asinh", "acosh", "atanh")}
SLOPES["absolute"] = SLOPES["abs"]
"""The derivatives of functions of one argument."""


class Dual:
    """A number, its slope along a direction, and the size of the slope's terms, by which its rounding is measured."""

    __slots__ = ("size", "slope", "value")
    __array_ufunc__ = None  # NumPy's scalars leave arithmetic to it
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any, slope: float = 0.0, size: float = 0.0) -> None:
        self.value, self.slope, self.size = np.float64(value), slope, size

    def __neg__(self) -> Dual:
        return _chain(-self.value, (-1.0, self))

    def __abs__(self) -> Dual:
        return _chain(abs(self.value), (np.sign(self.value), self))

    def __pos__(self) -> Dual:
        return self

    def __bool__(self) -> bool:
        return bool(self.value)


def _chain(value: Any, *terms: tuple[Any, Any]) -> Dual:
    """Make a value with its slope from its operands, each with the derivative; 0 times an infinite slope is 0."""
    parts = [(d * x.slope, abs(d) * x.size) for d, x in terms if isinstance(x, Dual) and d != 0]
    return Dual(value, sum(p[0] for p in parts), sum(p[1] for p in parts))


PAIRS: dict[str, tuple[Function, Function]] = {
    "add": (operator.add, lambda x, y: (1.0, 1.0)),
    "sub": (operator.sub, lambda x, y: (1.0, -1.0)),
    "mul": (operator.mul, lambda x, y: (y, x)),
    "truediv": (operator.truediv, lambda x, y: (1 / y, -x / y / y)),
    "mod": (operator.mod, lambda x, y: (1.0, -(x // y))),
    "pow": (operator.pow, lambda x, n: (n * x ** (n - 1) if n else 0.0, x**n * np.log(x) if x > 0 else 0.0)),
    "hypot": (np.hypot, lambda x, y: (x / h, y / h) if (h := np.hypot(x, y)) else (0.0, 0.0)),
    "atan2": (np.arctan2, lambda x, y: (y / (x * x + y * y), -x / (x * x + y * y))),
}
"""Functions of two arguments, each with that of both derivatives."""


def _pair(name: str) -> Function:
    value, slopes = PAIRS[name]

    def function(a: Any, b: Any) -> Any:
        if not isinstance(a, Dual) and not isinstance(b, Dual):
            return value(plain(a), plain(b))
        x, y = np.float64(plain(a)), np.float64(plain(b))
        return _chain(value(x, y), *zip(slopes(x, y), (a, b), strict=True))

    return function


def _define(name: str) -> None:
    """Make an operator of dual numbers, on both sides."""
    work = _pair(name)
    setattr(Dual, f"__{name}__", work)
    setattr(Dual, f"__r{name}__", lambda self, other: work(other, self))


for _name in ("add", "sub", "mul", "truediv", "mod", "pow"):
    _define(_name)


def _without_slope(name: str) -> None:
    """Make an operator work on values alone: comparisons, and operators that the generator refuses on active values."""
    work = getattr(operator, name)
    setattr(Dual, f"__{name}__", lambda self, other: work(self.value, plain(other)))
    if name == "floordiv":
        setattr(Dual, f"__r{name}__", lambda self, other: work(other, self.value))


for _name in ("lt", "le", "gt", "ge", "eq", "ne", "floordiv"):
    _without_slope(_name)


def plain(x: Any) -> Any:
    """Return a number without its slope, and an integer that nobody watches."""
    return x.value if isinstance(x, Dual) else int(x) if isinstance(x, Whole) else x


def _smooth(name: str) -> Function:
    value, slope = getattr(np, name, None) or getattr(math, name), SLOPES[name]

    def function(x: Any) -> Any:
        if not isinstance(x, Dual):
            return value(plain(x))
        made = _chain(value(x.value), (slope(x.value), x))
        if name == "tanh" and made.size:  # 1 - y², from its terms
            made.size = (1 + made.value**2) * x.size
        return made

    return function


def _flat(name: str) -> Function:
    """A function without a slope; the result is an integer where Python's is one."""
    own: dict[str, Function] = {"int": int, "bool": bool, "round": round, "sign": np.sign, "rint": np.rint}
    own["trunc"] = lambda x: math.trunc(float(x))  # which float32 does not define
    of = own.get(name) or getattr(math, name)
    return lambda x: of(plain(x))


def _array(name: str) -> Function:
    """A function that makes an array; one of floats holds any numbers, so also dual ones."""
    make = getattr(np, name)

    def function(*args: Any, dtype: Any = None) -> Any:
        count = 3 if name.startswith("full") else 2
        dtype = args[count - 1] if len(args) == count else dtype
        made = make(*args[: count - 1]) if not name.endswith("_like") else make(args[0], *args[1 : count - 1])
        if dtype is not None and not isinstance(dtype, type | np.dtype | str):
            dtype = np.asarray(dtype(0)).dtype  # a stand for a type
        kind = made.dtype if dtype is None else np.dtype(dtype)
        if kind.kind in "iub":
            return made.astype(kind)
        wide = np.empty(made.shape, object)
        wide[...] = np.float64(0)
        for i in np.ndindex(made.shape):
            wide[i] = args[1] if name.startswith("full") else np.float64(name.startswith("ones"))
        return wide

    return function


@functools.cache
def _stands(dtype: Any) -> dict[int, Function]:
    """Make the replacements of the functions that a kernel may call, by the identity of each."""
    stand: dict[str, Function] = {name: _smooth(name) for name in SLOPES}
    stand |= dict.fromkeys(("float", "float32", "float64"), lambda x: x if isinstance(x, Dual) else dtype(plain(x)))
    stand |= dict.fromkeys(("max", "maximum", "fmax"), max) | dict.fromkeys(("min", "minimum", "fmin"), min)
    stand |= {name: _flat(name) for name in ("int", "bool", "floor", "ceil", "trunc", "round", "rint", "sign")}
    stand |= dict.fromkeys(("int32", "int64"), stand["int"])
    stand |= {"hypot": _pair("hypot")} | dict.fromkeys(("atan2", "arctan2"), _pair("atan2"))
    stand |= dict.fromkeys(("pow", "power"), operator.pow) | {"clip": lambda x, lo, hi: min(max(x, lo), hi)}
    stand |= {name: _array(name) for name in ARRAYS}
    found: dict[int, Function] = {}
    for home in (np, math, sys.modules.get("numba"), PYTHON):
        for name, function in stand.items():
            if hasattr(home, name) and (home is not np or name not in ("max", "min")):
                found[id(getattr(home, name))] = function
    for work in (np.floor, np.ceil, np.trunc):  # NumPy's are floats, also of what is not finite
        found[id(work)] = lambda x, work=work: work(plain(x))
    return found


ARRAYS = ("zeros", "ones", "empty", "full", "zeros_like", "ones_like", "empty_like", "full_like")
"""The functions of NumPy that make an array."""


def wide(function: Function, dtype: Any = np.float64, watch: bool = False) -> Function:
    """Return a kernel as plain Python that computes in one type throughout, in float64 also on `Dual` numbers.

    A cast to float32, or a float32 number from around it, would round what is compared. Its own numbers have that type
    too: Python's raise an error if they overflow or divide by 0.

    Parameters
    ----------
    watch : whether integers beyond int64 raise `IntegerOverflowError`.
    """
    stand = _stands(dtype)
    if watch:
        stand = {key: lambda *x, work=work: watched(work(*x)) for key, work in stand.items()}
        for ranges in (range, getattr(sys.modules.get("numba"), "prange", range)):
            stand[id(ranges)] = lambda *ends: list(map(Whole, range(*ends)))
    return _widened(function, stand, {}, dtype, watch)


def _widened(
    function: Function, stand: dict[int, Function], done: dict[int, Function], dtype: Any, watch: bool
) -> Function:
    """Return one function as plain Python, and those that it calls; a function may call itself."""

    def widen(value: Any) -> Any:
        if watch and type(value) is int and abs(value) < 2**63:
            return Whole(value)
        if isinstance(value, float | np.floating):
            return dtype(value)
        if isinstance(value, tuple):
            return tuple(map(widen, value))
        if isinstance(value, np.ndarray):
            return value.astype(dtype) if value.dtype.kind == "f" else value
        inner = getattr(value, "py_func", value)
        if isinstance(inner, FunctionType) and (inner.__module__ or "").split(".")[0] not in ("numpy", "numba"):
            return done.get(id(inner)) or _widened(inner, stand, done, dtype, watch)
        if isinstance(value, ModuleType):
            return SimpleNamespace(**{n: stand.get(id(v), v) for n, v in vars(value).items()})
        return stand.get(id(value), value)

    code = function.__code__
    code = code.replace(co_consts=tuple(map(widen, code.co_consts)))
    names: dict[str, Any] = {"__builtins__": getattr(function, "__builtins__")}  # noqa: B009  (unknown to some mypy)
    if not function.__closure__:
        done[id(function)] = FunctionType(code, names, function.__name__, function.__defaults__)
    names |= {n: widen(v) for n, v in outside(function).items() if n in code.co_names}
    cells = tuple(CellType(widen(c.cell_contents)) for c in function.__closure__ or ())
    return done.get(id(function)) or FunctionType(code, names, function.__name__, function.__defaults__, cells)


def slope(
    function: Function, given: Mapping[str, Any], along: Mapping[str, Array], adjoints: Mapping[str, Array]
) -> tuple[float, float]:
    """Return the slope of the sum of a kernel's outputs, each times its adjoint, and the size of the slope's terms.

    Both are NaN if an output has no finite value or slope. A number that no output is made of, or that a branch leaves
    out, need not have one.

    Parameters
    ----------
    given : the kernel's arguments in their order; arrays that it writes are not changed.
    along : the direction in which inputs change.
    adjoints : of the outputs, by their names.
    """
    floats = {n for n, x in given.items() if getattr(x, "dtype", None) == np.float64}
    made = {n: np.array(x, object) if n in floats else integers(x) for n, x in given.items()}
    for name, direction in along.items():
        made[name] = np.empty(direction.shape, object)
        for i in np.ndindex(direction.shape):
            made[name][i] = Dual(given[name][i], float(direction[i]), abs(float(direction[i])))
    with np.errstate(all="ignore"):
        wide(function)(*made.values())
        ends = _chain(0.0)
        for name, adjoint in adjoints.items():
            for y, d in zip(made[name].flat, adjoint.flat, strict=True):
                ends = ends + y * d
    known = all(map(math.isfinite, (ends.value, ends.slope, ends.size)))
    return (float(ends.slope), float(ends.size)) if known else (math.nan, math.nan)

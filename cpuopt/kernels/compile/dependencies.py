"""The dependencies of a function's machine code: a walk over all that its bytecode reaches, as one digest.

`Walk` follows bytecode to the constants, functions, intrinsics and plain-Python code emitters that it reaches, wherever
they are defined. Only Python, NumPy, numba and llvmlite are not walked; their versions are hashed instead. For an
object that it cannot describe, the walk raises `UncacheableError`, with the reason.

The walk follows names. It cannot see things without a name: implementations registered with ``@overload`` (banned in
kernels), files that a code emitter reads, options set inside LLVM.
"""

from __future__ import annotations

import contextlib
import dis
import enum
import functools
import hashlib
import os
import re
import sys
import types as python
from inspect import CO_OPTIMIZED
from operator import attrgetter
from typing import Any

import llvmlite
import numba
import numpy as np
from llvmlite import ir
from numba import types

SCHEME = 5  # raise it when the walk or the layout of an entry changes


class UncacheableError(Exception):
    """A function that the walk cannot describe, or numba cannot store."""


def sha(data: bytes) -> str:
    """Return the SHA-256 of some bytes, in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


_IRRELEVANT = re.compile("CACHE|CUDA|NUM_THREADS|THREADING_LAYER|COLOR_SCHEME|CHROME_TRACE|HTML|GDB")  # to machine code
_PLAIN = (type(None), type(...), bool, int, float, complex, str, bytes)
_UNITS = ("numba.core.registry.CPUDispatcher", "numba.core.extending._Intrinsic")  # compiled once, with globals frozen
_PARTS = {  # type: the attributes that say all about an instance
    "numba.core.registry.CPUDispatcher": "py_func targetoptions locals _compiler.pipeline_class",
    "numba.core.extending._Intrinsic": "_defn _ctor_kwargs _prefer_literal",
    "numba.core.typing.templates.Signature": "return_type args recvr",
    "llvmlite.ir.values._Undefined": "__class__",
    "_collections._tuplegetter": "__class__",
    "collections._tuplegetter": "__class__",
    "functools._lru_cache_wrapper": "__wrapped__",
    "functools.cached_property": "func",
    "functools.partial": "func args keywords",
    "builtins.builtin_function_or_method": "__self__ __name__",
    "builtins.classmethod": "__func__",
    "builtins.getset_descriptor": "__name__",
    "builtins.member_descriptor": "__name__",
    "builtins.method": "__func__ __self__",
    "builtins.property": "fget fset fdel",
    "builtins.range": "start stop step",
    "builtins.slice": "start stop step",
    "builtins.staticmethod": "__func__",
}
_BLIND = {"eval", "exec", "globals", "__import__", "import_module", ".import_module", ".environ", "getenv", ".getenv"}
_COMPUTED = {"getattr", "vars", "__dict__"}
_NOTES = re.compile(  # in a class
    "__(doc|annot.*|dataclass_.*|orig_bases|parameters|type_params|slotnames|firstlineno|static_.*)__|_abc_impl"
)


def settings() -> tuple[Any, ...]:
    """Versions, and every setting of numba but those known to leave machine code alone.

    A name with an underscore is no setting: ``_HAVE_YAML`` changes if another package brings PyYAML.
    """
    names = [k for k in vars(numba.config) if k[:1].isupper() and k.isupper() and not _IRRELEVANT.search(k)]
    config = {k: repr(getattr(numba.config, k)) for k in names}
    return SCHEME, sys.version, np.__version__, numba.__version__, llvmlite.__version__, sorted(config.items())


def _is_outside(module: python.ModuleType | None) -> bool:
    """Return whether the versions in `settings` cover a module's content."""
    name = getattr(module, "__name__", "")
    if name.partition(".")[0] in ("numba", "llvmlite", "numpy"):
        return sys.modules.get(name) is module
    file = getattr(module, "__file__", None) or os.__file__  # a built-in module has none
    return name.partition(".")[0] in sys.stdlib_module_names and file.startswith(os.path.dirname(os.__file__) + os.sep)


def _outside_name(value: Any) -> str | None:
    """Return the full name of a class or function that can be imported from outside."""
    home, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if isinstance(home, str) and isinstance(name, str) and _is_outside(module := sys.modules.get(home)):
        with contextlib.suppress(AttributeError):
            return f"{home}.{name}" if attrgetter(name)(module) is value else None
    return None


@functools.cache
def _names(code: python.CodeType) -> frozenset[str]:
    """Return all global names in a function, including functions defined inside it."""
    return frozenset(code.co_names).union(*(_names(c) for c in code.co_consts if isinstance(c, python.CodeType)))


@functools.cache
def _consts(code: python.CodeType) -> tuple[Any, ...]:
    """Return the constants that a piece of code loads; its docstring is none of them."""
    loaded = set()
    for step in dis.get_instructions(code):
        name = "." * ("ATTR" in step.opname or "METHOD" in step.opname) + str(step.argval)
        if step.opcode in dis.hasconst:
            loaded.add(step.arg)
        elif step.opname == "IMPORT_NAME":
            raise UncacheableError(f"{code.co_qualname} has an import inside; move it to the top of the file")
        elif step.opcode in dis.hasname and name in _BLIND:
            raise UncacheableError(f"{code.co_qualname} uses {step.argval}, which the cache cannot look through")
    return tuple(c for i, c in enumerate(code.co_consts) if i in loaded or type(c) is not str)


class Walk:
    """A walk over all that an object's meaning depends on, described as nested tuples whose ``repr`` is hashed.

    It may follow more than is used (the global that has an attribute's name), never less.
    """

    def __init__(self, root: Any) -> None:
        self.units: list[Any] = []  # dispatchers and intrinsics reached
        self.modules: list[Any] = []  # modules reached, without those outside
        self.names: set[str] = set()  # global names in all functions reached; their modules are not known
        self.seen: dict[int, tuple[int, Any]] = {}  # id: position, and the object, which so keeps its id
        self.place = "the signature"
        tree, done = [self.describe(root)], set[tuple[int, str]]()
        while pending := {(i, n) for i in range(len(self.modules)) for n in self.names} - done:
            done |= pending  # a.b.K is found in two rounds: b in a, then K in a.b
            for i, name in sorted(pending):
                if hasattr(self.modules[i], name):
                    tree.append((i, *self.named(self.modules[i].__name__, name, getattr(self.modules[i], name))))
        read = [(k, repr(v)) for k, v in vars(numba.config).items() if k.isupper() and k in self.names]
        self.digest = sha(repr((tree, read)).encode())

    def describe(self, value: Any) -> tuple[Any, ...]:
        """Describe any value."""
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if kind in _PLAIN:
            return name, repr(value)
        if kind in (tuple, list):
            return name, *map(self.describe, value)
        if kind in (set, frozenset) and all(type(v) in _PLAIN for v in value):
            return name, *sorted(repr(self.describe(v)) for v in value)
        if kind in (dict, python.MappingProxyType):
            return name, *map(self.describe, value.items())
        if kind is python.CodeType:
            return self.code(value)
        if isinstance(value, np.dtype):
            return name, repr(value)
        if (kind is np.ndarray or isinstance(value, np.generic)) and not value.dtype.hasobject:
            return name, repr(value.dtype), value.shape, repr(value.flags), sha(value.tobytes())
        if isinstance(value, types.Type):
            return self.describe(kind), self.describe(value.key)
        if isinstance(value, ir.Type | ir.Constant):
            return self.describe(kind), *((k, self.describe(v)) for k, v in vars(value).items() if "__cached_" not in k)
        if outside := _outside_name(value):
            return "outside", outside
        # What follows may be reached twice, or from itself.
        if id(value) in self.seen:
            return "seen", self.seen[id(value)][0]
        self.seen[id(value)] = len(self.seen), value
        if name in _UNITS:
            self.units.append(value)
        if name in _PARTS:
            return name, *(self.describe(attrgetter(part)(value)) for part in _PARTS[name].split())
        if kind is python.FunctionType:
            return self.function(value)
        if isinstance(value, python.ModuleType):
            if not _is_outside(value):
                self.modules.append(value)
            return name, value.__name__
        if isinstance(value, type):
            return self.cls(value)
        if isinstance(value, enum.Enum):
            return self.describe(kind), value.name
        return self.instance(value, name)

    def named(self, owner: str, name: str, value: Any) -> tuple[Any, ...]:
        """Describe what a name means, and remember the place for an error."""
        self.place = f"'{name}' in {owner}"
        return name, self.describe(value)

    def code(self, code: python.CodeType) -> tuple[Any, ...]:
        """Describe bytecode and the constants that it loads."""
        consts = _consts(code)
        self.names.update(code.co_names, (c for c in consts if type(c) is str))
        flags = code.co_flags | CO_OPTIMIZED  # which numba takes away while a profiler of Python watches a call
        sizes = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, flags
        names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
        return "code", code.co_code, code.co_exceptiontable, sizes, names, *map(self.describe, consts)

    def function(self, f: python.FunctionType) -> tuple[Any, ...]:
        """Describe a function with the globals and cells that it looks up."""
        here, names = f"{f.__module__}.{f.__qualname__}", _names(f.__code__)
        cells = zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)
        reached = [(name, f.__globals__[name]) for name in sorted(names & f.__globals__.keys())]
        reached += [(name, cell.cell_contents) for name, cell in cells]
        for name, value in reached:
            if isinstance(value, python.ModuleType) and names & _COMPUTED and not _is_outside(value):
                raise UncacheableError(f"{here} uses {min(names & _COMPUTED)}: what it takes of {name} cannot be seen")
        looked_up = [self.named(here, *item) for item in reached]
        return "function", self.code(f.__code__), *looked_up, self.describe((f.__defaults__, f.__kwdefaults__, vars(f)))

    def cls(self, cls: type) -> tuple[Any, ...]:
        """Describe a class by its bases and members."""
        members = {k: v for k, v in vars(cls).items() if not _NOTES.fullmatch(k)}
        if issubclass(cls, enum.Enum):
            behaviour = python.FunctionType, property, classmethod, staticmethod
            members = {k: v for k, v in members.items() if isinstance(v, behaviour)}
            members |= {k: member.value for k, member in cls.__members__.items()}
        here, kin = f"{cls.__module__}.{cls.__qualname__}", self.describe((type(cls), *cls.__bases__))
        return "class", here, kin, *(self.named(here, k, v) for k, v in members.items())

    def instance(self, value: Any, name: str) -> tuple[Any, ...]:
        """Describe an instance of a class written in Python by its ``__dict__`` and ``__slots__``, and no other."""
        kind = type(value)
        outside = [c for c in kind.__mro__ if _is_outside(sys.modules.get(c.__module__))]
        if outside == [tuple, object]:
            return self.describe(kind), *map(self.describe, value)
        pickled = kind.__reduce_ex__, kind.__reduce__
        if outside != [object] or pickled != (object.__reduce_ex__, object.__reduce__):
            raise UncacheableError(f"{self.place} is a {name}, which the cache cannot look into")
        object.__reduce_ex__(value, 2)  # raises if there is more
        return self.describe(kind), self.describe(object.__getstate__(value))

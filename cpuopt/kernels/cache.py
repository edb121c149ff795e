"""A compile cache for numba that is never stale: an entry is named by a hash of all that its machine code depends on.

numba's own ``cache=True`` looks at one source file. It runs stale code after an edit of a callee, an intrinsic or a
constant in another file, and it recompiles a whole file for a comment. Here `_Walk` follows a kernel's bytecode to the
constants, functions, intrinsics and plain-Python code emitters that it reaches, wherever they are defined. Only Python,
NumPy, numba and llvmlite are not walked: their versions stand for their code. What the walk cannot describe is never
left out: that kernel is then not cached, and one `CacheWarning` names the reason.

The walk follows names. It cannot see what has none: implementations registered with ``@overload`` (banned in kernels),
files that a code emitter reads, options set inside LLVM.
"""

from __future__ import annotations

import collections
import contextlib
import dis
import enum
import functools
import hashlib
import inspect
import os
import pickle
import pkgutil
import re
import secrets
import sys
import tempfile
import time
import types as python
import warnings
import weakref
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from llvmlite import ir
from numba import types

from ..files import cache_folder

with contextlib.suppress(ImportError):  # `unsupported` reports it
    from numba.core import bytecode, compiler, serialize, sigutils

SCHEME = 1  # raise it when the walk or the layout of an entry changes
DAY = 24 * 3600.0
UNUSED = 30 * DAY  # after which an entry is removed

_counts = collections.Counter(hits=0, misses=0, saved=0)
_warned: set[str] = set()
_made_from: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""The digest of each dispatcher and intrinsic when this process compiled it: numba froze its globals then."""


class CacheWarning(UserWarning):
    """Something is compiled anew in each process; the message says why."""


class _Uncacheable(Exception):  # noqa: N818  (a decision, not an error)
    pass


def attach(dispatcher: Any) -> None:
    """Give a dispatcher this cache instead of numba's.

    Nothing is hashed before the first compilation, so the globals of the function may be defined after it.

    Parameters
    ----------
    dispatcher : what ``numba.njit`` returned, without ``cache=True`` and without explicit signatures.
    """
    if reason := unsupported():
        _warn(f"kernels are not cached: {reason}")
    elif not numba.config.DISABLE_JIT:
        dispatcher._cache = _KernelCache(dispatcher)


def is_cached(dispatcher: Any, signature: Any) -> bool:
    """Tell whether a compilation for `signature` would be loaded, without compiling.

    Parameters
    ----------
    dispatcher : as given to `attach`.
    signature : a tuple of numba types, or a signature such as ``types.void(types.float32[::1])``.
    """
    cache = getattr(dispatcher, "_cache", None)
    if isinstance(cache, _KernelCache) and (folder := _folder()):
        with contextlib.suppress(Exception):  # the compilation will say why
            return _read(folder, cache.key(signature, _Walk(dispatcher))) is not None
    return False


def digest(function: Any) -> str:
    """Name what a kernel's machine code is made from: 12 hexadecimal digits that change when any of it changes.

    Parameters
    ----------
    function : a dispatcher, or a plain function. ``unknown`` is returned for what the walk cannot describe.
    """
    try:
        return _Walk(function).digest[:12]
    except Exception:  # whatever it is, it is not cached either
        return "unknown"


def stats() -> dict[str, int]:
    """Count this process's compilations: ``hits`` loaded, ``misses`` compiled, and how many of those were ``saved``."""
    return dict(_counts)


# What is used of numba ------------------------------------------------------------------------------------------------

_INTERNALS = {  # function: its parameters, and names that its code must use
    "bytecode:FunctionIdentity.from_function": ("pyfunc", "_unique_ids"),
    "caching:_Cache.load_overload": ("self sig target_context", ""),
    "caching:_Cache.save_overload": ("self sig data", ""),
    "codegen:CPUCodegen.magic_tuple": ("self", "_tm_features"),
    "codegen:CodeLibrary.has_dynamic_globals": ("self", ""),
    "compiler:CompileResult._reduce": ("self", "serialize_using_object_code reload_init"),
    "compiler:CompileResult._rebuild": (
        "target_context libdata fndesc env signature objectmode lifted typeann reload_init referenced_envs",
        "unserialize_library",
    ),
    "dispatcher:Dispatcher.__init__": (
        "self py_func locals targetoptions pipeline_class",
        "locals targetoptions targetctx _cache _compiler",
    ),
    "dispatcher:Dispatcher.compile": ("self sig", "_cache load_overload save_overload"),
    "dispatcher:_FunctionCompiler.__init__": (
        "self py_func targetdescr targetoptions locals pipeline_class",
        "pipeline_class",
    ),
    "extending:_Intrinsic.__init__": ("self name defn prefer_literal kwargs", "_defn _ctor_kwargs _prefer_literal"),
    "serialize:dumps": ("obj", ""),
    "sigutils:normalize_signature": ("sig", ""),
    "typing.templates:Signature.__init__": ("self return_type args recvr pysig", "_return_type _args _recvr"),
}


@functools.cache
def unsupported() -> str | None:
    """Say what this module needs of numba and this version lacks, or None. Nothing is cached with such a numba."""
    for path, (parameters, names) in _INTERNALS.items():
        try:
            found = pkgutil.resolve_name(f"numba.core.{path}")
            found = inspect.unwrap(getattr(found, "fget", found))
            same = " ".join(inspect.signature(found).parameters) == parameters
            used = set(names.split()) <= set(found.__code__.co_names)
        except (ImportError, AttributeError, TypeError) as error:
            return f"numba {numba.__version__}: {error}"
        if not (same and used):
            return f"numba {numba.__version__} changed numba.core.{path}"
    return None


if not unsupported():
    # A symbol's name ends in a number that numba counts from 1 in each process. So two processes can write entries that
    # hold different functions under one name, and a process that loads both entries would run one for the other.
    bytecode.FunctionIdentity._unique_ids = iter(lambda: secrets.randbits(63), None)


class _KernelCache:
    """One dispatcher's cache, as numba wants to see it (``numba.core.caching._Cache``)."""

    cache_path = property(lambda self: str(_folder()))

    def __init__(self, dispatcher: Any) -> None:
        function = dispatcher.py_func
        room = function.__module__.split(".")[-2:][0]  # "vanilla" in cpuopt.kernels.vanilla.matmul
        self.dispatcher = dispatcher
        self.label = re.sub(r"[^.\w]+", "_", function.__qualname__)[-80:] + "-" + room
        self.home = function.__module__, function.__qualname__
        self.compiling: dict[Any, str] = {}

    def enable(self) -> None:
        """Do nothing: the cache is always on."""

    disable = enable

    def flush(self) -> None:
        """Forget what the dispatcher's code was made from: ``recompile()`` makes it anew. No entry on disk is wrong."""
        _made_from.pop(self.dispatcher, None)

    def key(self, signature: Any, walk: _Walk) -> str:
        args, result = sigutils.normalize_signature(signature)
        typed = _Walk((args, None if result == types.void else result)).digest
        target = self.dispatcher.targetctx.codegen().magic_tuple()
        return f"{self.label}-{_sha(repr((self.home, typed, target, _settings(), walk.digest)).encode())[:32]}"

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        result = None
        target_context.refresh()
        with self.or_else_a_warning():
            if folder := _folder():
                walk = _Walk(self.dispatcher)
                self.compiling[sig] = key = self.key(sig, walk)
                if payload := _read(folder, key):
                    result = compiler.CompileResult._rebuild(target_context, *pickle.loads(payload))
                    _made_from.setdefault(self.dispatcher, walk.digest)
        _counts["hits" if result else "misses"] += 1
        return result

    def save_overload(self, sig: Any, result: Any) -> None:
        key, folder = self.compiling.pop(sig, None), _folder()
        if not (key and folder):
            return
        with self.or_else_a_warning():
            if result.library.has_dynamic_globals or any(result.lifted):
                raise _Uncacheable("it uses a ctypes pointer (get_num_threads is one), an array above 1 MB or objmode")
            walk = _Walk(self.dispatcher)
            if self.key(sig, walk) != key:
                raise _Uncacheable("something that it depends on changed while it was compiled")
            for unit in walk.units:
                digest = _Walk(unit).digest
                if _made_from.setdefault(unit, digest) != digest:
                    raise _Uncacheable(f"something that {unit.__name__} depends on changed since that was compiled")
            _write(folder, key, serialize.dumps(result._reduce()))
            _counts["saved"] += 1

    @contextlib.contextmanager
    def or_else_a_warning(self) -> Iterator[None]:
        """Let numba compile as if there were no cache when anything goes wrong, foreseen or not."""
        try:
            yield
        except _Uncacheable as reason:
            _warn(f"{self.label} is not cached: {reason}")
        except OSError as error:
            _warn(f"kernels are not cached: {_folder()}: {error.strerror or error}")
        except Exception as error:
            _warn(f"{self.label} is not cached: {type(error).__name__}: {error}")


def _warn(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, CacheWarning, stacklevel=2)


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# The files ------------------------------------------------------------------------------------------------------------


def _folder() -> Path | None:
    return _prepared(cache_folder("kernels"))


@functools.cache
def _prepared(folder: Path) -> Path | None:
    """Make the directory and check that only this user can write to it, because entries are unpickled."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
            problem = "it belongs to another user; set CPUOPT_CACHE_DIR to a directory of your own"
        elif os.name == "posix" and status.st_mode & 0o022:
            problem = f"other users can write to it; run: chmod go-w {folder}"
        elif not os.access(folder, os.W_OK | os.X_OK):
            problem = "not writable"
        else:
            _prune(folder)
            return folder
    except OSError as error:
        problem = error.strerror or str(error)
    _warn(f"kernels are not cached: {folder}: {problem}")
    return None


def _prune(folder: Path) -> None:
    """Remove, once a day, what no process has used for a month."""
    marker, now = folder / "pruned", time.time()
    if not marker.exists() or now - marker.stat().st_mtime > DAY:
        marker.touch()
        for file in folder.glob("*.nbc*"):
            with contextlib.suppress(OSError):  # another process was faster
                if now - file.stat().st_mtime > UNUSED:
                    file.unlink()


def _read(folder: Path, key: str) -> bytes | None:
    """Return the payload of an entry that is whole, and mark it as used."""
    with contextlib.suppress(OSError):
        content = (folder / f"{key}.nbc").read_bytes()
        checksum, payload = content[:64], content[64:]
        if checksum == _sha(key.encode() + payload).encode():
            os.utime(folder / f"{key}.nbc")
            return payload
    return None


def _write(folder: Path, key: str, payload: bytes) -> None:
    handle, temporary = tempfile.mkstemp(prefix=f"{key}.nbc.", dir=folder)
    try:
        with open(handle, "wb") as file:
            file.write(_sha(key.encode() + payload).encode() + payload)
        os.replace(temporary, folder / f"{key}.nbc")
    except BaseException:
        os.unlink(temporary)
        raise


# What machine code depends on -----------------------------------------------------------------------------------------

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


def _settings() -> tuple[Any, ...]:
    """Versions, and every setting of numba but those known to leave machine code alone."""
    config = {k: repr(v) for k, v in vars(numba.config).items() if k.isupper() and not _IRRELEVANT.search(k)}
    return SCHEME, sys.version, np.__version__, numba.__version__, llvmlite.__version__, sorted(config.items())


def _is_outside(module: python.ModuleType | None) -> bool:
    """Tell whether the versions in `_settings` stand for a module's content."""
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
    """Return all names that a function looks up, functions defined inside it included."""
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
            raise _Uncacheable(f"{code.co_qualname} has an import inside; move it to the top of the file")
        elif step.opcode in dis.hasname and name in _BLIND:
            raise _Uncacheable(f"{code.co_qualname} uses {step.argval}, which the cache cannot look through")
    return tuple(c for i, c in enumerate(code.co_consts) if i in loaded or type(c) is not str)


class _Walk:
    """A walk over all that an object's meaning depends on, described as nested tuples whose ``repr`` is hashed.

    It may follow more than is used (the global that has an attribute's name), never less.
    """

    def __init__(self, root: Any) -> None:
        self.units: list[Any] = []  # dispatchers and intrinsics reached
        self.modules: list[Any] = []  # modules reached, without those outside
        self.names: set[str] = set()  # names that any function reached looks up; in which modules is not known
        self.seen: dict[int, tuple[int, Any]] = {}  # id: position, and the object, which so keeps its id
        self.place = "the signature"
        tree, done = [self.describe(root)], set[tuple[int, str]]()
        while pending := {(i, n) for i in range(len(self.modules)) for n in self.names} - done:
            done |= pending  # a.b.K is found in two rounds: b in a, then K in a.b
            for i, name in sorted(pending):
                if hasattr(self.modules[i], name):
                    tree.append((i, *self.named(self.modules[i].__name__, name, getattr(self.modules[i], name))))
        read = [(k, repr(v)) for k, v in vars(numba.config).items() if k.isupper() and k in self.names]
        self.digest = _sha(repr((tree, read)).encode())

    def describe(self, value: Any) -> tuple[Any, ...]:
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
            return name, repr(value.dtype), value.shape, repr(value.flags), _sha(value.tobytes())
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
        self.place = f"'{name}' in {owner}"
        return name, self.describe(value)

    def code(self, code: python.CodeType) -> tuple[Any, ...]:
        consts = _consts(code)
        self.names.update(code.co_names, (c for c in consts if type(c) is str))
        sizes = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
        names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
        return "code", code.co_code, code.co_exceptiontable, sizes, names, *map(self.describe, consts)

    def function(self, f: python.FunctionType) -> tuple[Any, ...]:
        here, names = f"{f.__module__}.{f.__qualname__}", _names(f.__code__)
        cells = zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)
        reached = [(name, f.__globals__[name]) for name in sorted(names & f.__globals__.keys())]
        reached += [(name, cell.cell_contents) for name, cell in cells]
        for name, value in reached:
            if isinstance(value, python.ModuleType) and names & _COMPUTED and not _is_outside(value):
                raise _Uncacheable(f"{here} uses {min(names & _COMPUTED)}: what it takes of {name} cannot be seen")
        looked_up = [self.named(here, *item) for item in reached]
        return "function", self.code(f.__code__), *looked_up, self.describe((f.__defaults__, f.__kwdefaults__, vars(f)))

    def cls(self, cls: type) -> tuple[Any, ...]:
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
            raise _Uncacheable(f"{self.place} is a {name}, which the cache cannot look into")
        object.__reduce_ex__(value, 2)  # raises where there is more
        return self.describe(kind), self.describe(object.__getstate__(value))

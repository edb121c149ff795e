"""A compile cache for numba: never stale, and only its entries run.

An entry is named by a hash of all that its machine code depends on (`dependencies.Walk`). numba's own ``cache=True``
checks one source file. It runs stale code after an edit of a callee, an intrinsic or a constant in another file, and
it recompiles a whole file for a comment.

A function is compiled in an LLVM engine that is thrown away, and loaded from its entry into an engine of its own. In
one engine for all, as numba has it, a symbol that several objects define is bound to the copy that came first. So a
process that compiled a parallel kernel ran other machine code, and computed other bits, than one that loaded it.

What a function calls is compiled into it. So a callee gets an entry without machine code, and no wrapper for Python;
where Python calls it, it is compiled as any other. The body of a parallel loop is a callee too.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import inspect
import itertools
import os
import pickle
import pkgutil
import re
import secrets
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from numba import types

from ...files import CacheWarning, cache_folder, private
from .dependencies import UncacheableError, Walk, settings, sha

with contextlib.suppress(ImportError):  # `unsupported` reports it
    from numba.core import bytecode, caching, codegen, compiler, serialize, sigutils
    from numba.parfors import parfor_lowering

DAY = 24 * 3600.0
UNUSED = 30 * DAY  # after which an entry is removed
ENTRY, MARKER = ".nbc", "pruned"
"""The ending of an entry's name, and the file whose time is that of the last removal."""

_counts = collections.Counter(hits=0, misses=0, saved=0)
_warned: set[str] = set()
_made_from: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""The digest of each dispatcher and intrinsic when this process compiled it: numba froze its globals then."""
_loaded: weakref.WeakKeyDictionary[Any, dict[Any, str]] = weakref.WeakKeyDictionary()
"""The digest of the object code that each dispatcher runs, by the types of its arguments."""


def attach(dispatcher: Any) -> None:
    """Make a dispatcher use this cache instead of numba's.

    Nothing is hashed before the first compilation, so the globals of the function may be defined after it.

    Parameters
    ----------
    dispatcher : what ``numba.njit`` returned, without ``cache=True`` and without explicit signatures.
    """
    if reason := unsupported():
        _warn(f"kernels are not cached: {reason}")
    elif not numba.config.DISABLE_JIT:
        dispatcher._cache = cache = _KernelCache(dispatcher)
        dispatcher.compile = functools.partial(cache.ready, dispatcher.compile)
        dispatcher.add_overload = functools.partial(cache.add, dispatcher.add_overload)
        dispatcher._compiler.compile = functools.partial(cache.compile, dispatcher._compiler.compile)
        dispatcher._compiler._customize_flags = _customize


def is_cached(dispatcher: Any, signature: Any) -> bool:
    """Return whether a compilation for `signature` would be loaded, without compiling.

    Parameters
    ----------
    dispatcher : as given to `attach`.
    signature : a tuple of numba types, or a signature such as ``types.void(types.float32[::1])``.
    """
    cache = getattr(dispatcher, "_cache", None)
    if isinstance(cache, _KernelCache) and (folder := _folder()):
        with contextlib.suppress(Exception):  # the compilation will say why
            return _read(folder, cache.key(signature, Walk(dispatcher))) is not None
    return False


def digest(function: Any) -> str:
    """Hash the sources of a kernel's machine code: 12 hexadecimal digits that change with any of them.

    Parameters
    ----------
    function : a dispatcher, or a plain function. ``unknown`` is returned for what the walk cannot describe.
    """
    try:
        return Walk(function).digest[:12]
    except Exception:  # whatever it is, it is not cached either
        return "unknown"


def fingerprint(function: Any) -> str:
    """Hash a kernel to compare it between processes: its `digest`, else its code and the simple values around it."""
    if (known := digest(function)) != "unknown":
        return known
    plain = getattr(function, "py_func", function)
    code, around = getattr(plain, "__code__", None), getattr(plain, "__globals__", {})
    if code is None:
        return "unknown"
    simple = int, float, complex, str, bytes, tuple, np.generic
    values = {n: repr(around[n]) for n in code.co_names if isinstance(around.get(n), simple)}
    values |= {n: repr(around[n].tolist()) for n in code.co_names if isinstance(around.get(n), np.ndarray)}
    numbers = [x for x in code.co_consts if isinstance(x, simple)]
    return hashlib.sha256(repr((code.co_code, numbers, sorted(values.items()))).encode()).hexdigest()[:12]


def code_digest(dispatcher: Any, signature: Any) -> str:
    """Hash the machine code that a dispatcher runs for a signature: 12 hexadecimal digits; empty where none is loaded.

    It covers the instructions and constants of the loaded object, and none of the symbols' names.
    """
    args, _ = sigutils.normalize_signature(signature)
    return _loaded.get(dispatcher, {}).get(tuple(args), "")


def stats() -> dict[str, int]:
    """Count this process's compilations: ``hits`` loaded, ``misses`` compiled, and how many of those were ``saved``."""
    return dict(_counts)


# What is used of numba ------------------------------------------------------------------------------------------------

_INTERNALS = {  # function: its parameters, and names that its code must use
    "core.bytecode:FunctionIdentity.from_function": ("pyfunc", "_unique_ids"),
    "core.caching:_Cache.load_overload": ("self sig target_context", ""),
    "core.caching:_Cache.save_overload": ("self sig data", ""),
    "core.codegen:CPUCodegen.magic_tuple": ("self", "_tm_features"),
    "core.codegen:CodeLibrary.has_dynamic_globals": ("self", ""),
    "core.codegen:CPUCodeLibrary._finalize_final_module": ("self", "_finalize_specific _finalized"),
    "core.codegen:CPUCodeLibrary._get_module_for_linking": ("self", "_shared_module"),
    "core.codegen:CPUCodeLibrary._unserialize": (
        "codegen state",
        "_set_compiled_object _shared_module _finalize_final_module _load_defined_symbols",
    ),
    "core.codegen:CPUCodeLibrary.serialize_using_object_code": ("self", "_get_compiled_object _get_module_for_linking"),
    "core.codegen:JitEngine._load_defined_symbols": ("self mod", "functions global_variables _defined_symbols"),
    "core.codegen:JITCodeLibrary.get_pointer_to_function": ("self name", "is_symbol_defined get_function_address"),
    "core.codegen:JITCPUCodegen.set_env": ("self env_name env", "_engine"),
    "core.compiler:CompileResult._reduce": ("self", "serialize_using_object_code reload_init"),
    "core.compiler:CompileResult._rebuild": (
        "target_context libdata fndesc env signature objectmode lifted typeann reload_init referenced_envs",
        "codegen unserialize_library get_executable",
    ),
    "core.cpu:CPUContext.codegen": ("self", "_internal_codegen"),
    "core.cpu:CPUContext.get_executable": ("self library fndesc env", "codegen set_env"),
    "core.cpu_options:FastMathOptions.encode": ("self", "flags"),
    "core.dispatcher:Dispatcher.__init__": (
        "self py_func locals targetoptions pipeline_class",
        "locals targetoptions targetctx _cache _compiler",
    ),
    "core.dispatcher:Dispatcher.compile": (
        "self sig",
        "_cache load_overload _compiler compile insert_user_function add_overload",
    ),
    "core.dispatcher:_FunctionCompiler.__init__": (
        "self py_func targetdescr targetoptions locals pipeline_class",
        "pipeline_class",
    ),
    "core.dispatcher:_FunctionCompiler._compile_core": ("self args return_type", "_customize_flags"),
    "core.dispatcher:_FunctionCompiler.compile": ("self args return_type", ""),
    "core.dispatcher:_DispatcherBase.add_overload": ("self cres", "_insert overloads"),
    "core.extending:_Intrinsic.__init__": (
        "self name defn prefer_literal kwargs",
        "_defn _ctor_kwargs _prefer_literal",
    ),
    "core.serialize:dumps": ("obj", ""),
    "core.sigutils:normalize_signature": ("sig", ""),
    "core.typing.templates:Signature.__init__": ("self return_type args recvr pysig", "_return_type _args _recvr"),
    "parfors.parfor_lowering:_create_gufunc_for_parfor_body": (
        "lowerer parfor typemap typingctx targetctx flags locals has_aliases index_var_typ races",
        "compile_ir",
    ),
}


@functools.cache
def unsupported() -> str | None:
    """Return a feature that this module needs and this numba lacks, or None. Without it nothing is cached."""
    for path, (parameters, names) in _INTERNALS.items():
        try:
            found = pkgutil.resolve_name(f"numba.{path}")
            found = inspect.unwrap(getattr(found, "fget", found))
            same = " ".join(inspect.signature(found).parameters) == parameters
            used = set(names.split()) <= set(found.__code__.co_names)
        except (ImportError, AttributeError, TypeError) as error:
            return f"numba {numba.__version__}: {error}"
        if not (same and used):
            return f"numba {numba.__version__} changed numba.{path}"
    return None


class _Numbers:
    """The numbers that symbols end in, which numba counts from 1 in each process.

    Two processes would write entries that hold different functions under one name, and a kernel that calls both would
    run one for the other. So the numbers of an entry follow from its key: other entries have other ones, and who
    compiles it anew gives the same. That of its function is even. What numba compiles besides, as its ``max``, is odd:
    it has the numbers of the entry that called it first.
    """

    def __init__(self) -> None:
        self.keys: list[tuple[str, Iterator[int]]] = []

    def __next__(self) -> int:
        if not self.keys:
            return secrets.randbits(63)
        key, count = self.keys[-1]
        n = next(count)
        return int(sha(f"{key} {n}".encode())[:15], 16) // 2 * 2 + (n > 0)

    @contextlib.contextmanager
    def of(self, key: str) -> Iterator[None]:
        self.keys.append((key, itertools.count()))
        try:
            yield
        finally:
            self.keys.pop()


_ODD = re.compile(r"B\d+v\d*[13579]B")
"""An odd number in a symbol, as numba writes it there."""

_numbers = _Numbers()
if not unsupported():
    bytecode.FunctionIdentity._unique_ids = _numbers

    class _Library(codegen.JITCodeLibrary):
        """A library that is optimized and compiled where an address in it is asked for; in a callee, none is.

        One that is loaded with machine code keeps its bitcode as it was read, until a function compiled later links it.
        Parsed, the kernels of a training step of SmolLM2 135M would take 47 MB and 0.3 s.
        """

        _made = False
        _bitcode = b""
        _defined: Sequence[str] = ()  # what the machine code that was loaded defines

        def _optimize_final_module(self) -> None:
            pass

        def _finalize_final_module(self) -> None:
            self._finalize_dynamic_globals()
            self._finalized = True

        def get_pointer_to_function(self, name: str) -> int:
            self._ensure_finalized()
            if not self._made and (name in self._defined or any(f.name == name for f in self._final_module.functions)):
                self._made = True
                if not self._disable_inspection:  # which is what numba notes of loaded machine code
                    super()._optimize_final_module()
                super()._finalize_final_module()
            return super().get_pointer_to_function(name)

        def serialize_using_object_code(self) -> Any:
            self._ensure_finalized()
            if self._made:
                return super().serialize_using_object_code()
            for f in self._final_module.functions:  # copies of its own, whatever this process compiled before
                if f.linkage == llvm.Linkage.linkonce_odr and _ODD.search(f.name):
                    f.linkage = llvm.Linkage.internal
            return self.serialize_using_bitcode()

        @classmethod
        def _unserialize(cls, codegen: Any, state: Any) -> Any:
            name, kind, data = state
            if kind == "bitcode":
                return super()._unserialize(codegen, state)
            self = codegen.create_library(name)
            self.enable_object_caching()
            machine_code, self._bitcode, *names = data  # an entry of numba's own cache has no names
            self._defined = names[0] if names else _defined(llvm.parse_bitcode(self._bitcode))
            self._set_compiled_object(machine_code)
            self._finalize_final_module()
            codegen._engine._defined_symbols.update(self._defined)
            return self

        def _get_module_for_linking(self) -> Any:
            if self._bitcode and not self._shared_module:
                self._shared_module = llvm.parse_bitcode(self._bitcode)
            return super()._get_module_for_linking()

    def _defined(module: Any) -> list[str]:
        """List the names that a module defines."""
        every = itertools.chain(module.functions, module.global_variables)
        return sorted(value.name for value in every if not value.is_declaration)

    class _Codegen(codegen.JITCPUCodegen):
        _library_class = _Library

        def set_env(self, env_name: str, env: Any) -> None:
            if self._engine.is_symbol_defined(env_name):
                super().set_env(env_name, env)

    _create_body = parfor_lowering._create_gufunc_for_parfor_body

    @functools.wraps(_create_body)
    def _create_callee(
        lowerer: Any, parfor: Any, typemap: Any, typing: Any, target: Any, flags: Any, *rest: Any
    ) -> Any:
        if _numbers.keys:
            _as_callee(flags)
        return _create_body(lowerer, parfor, typemap, typing, target, flags, *rest)

    parfor_lowering._create_gufunc_for_parfor_body = _create_callee


@contextlib.contextmanager
def _own_engine(target: Any) -> Iterator[None]:
    """Compile or load code in an LLVM engine of its own, which lives as long as the code."""
    before, target._internal_codegen = target._internal_codegen, _Codegen("cpuopt")
    try:
        yield
    finally:
        target._internal_codegen = before


@contextlib.contextmanager
def as_kept(dispatcher: Any) -> Iterator[None]:
    """Let a dispatcher that was not attached compile the code that an entry would have."""
    dispatcher._compiler._customize_flags = _customize
    with _own_engine(dispatcher.targetctx), _numbers.of(secrets.token_hex()):
        yield


class _Callee:
    """What stands for a function that has no machine code of its own: numba finds its code by this object."""


class _KernelCache:
    """One dispatcher's cache, with the interface of numba's (``numba.core.caching._Cache``), and its compiler."""

    cache_path = property(lambda self: str(_folder()))

    def __init__(self, dispatcher: Any) -> None:
        function = dispatcher.py_func
        package = function.__module__.split(".")[-2:][0]  # "vanilla" in cpuopt.kernels.vanilla.matmul
        self.dispatcher = dispatcher
        self.label = re.sub(r"[^.\w]+", "_", function.__qualname__)[-80:] + "-" + package
        self.home = function.__module__, function.__qualname__
        self.missing: dict[Any, tuple[str, Any]] = {}

    def enable(self) -> None:
        """Do nothing: the cache is always on."""

    disable = enable

    def flush(self) -> None:
        """Forget the sources of the dispatcher's code: ``recompile()`` makes it anew. No entry on disk is wrong."""
        _made_from.pop(self.dispatcher, None)

    def key(self, signature: Any, walk: Walk, callee: bool = False) -> str:
        args, result = sigutils.normalize_signature(signature)
        typed = Walk((args, None if result == types.void else result)).digest
        target = self.dispatcher.targetctx.codegen().magic_tuple()
        name = sha(repr((self.home, typed, target, settings(), walk.digest, callee)).encode())
        return f"{self.label}-{name[:32]}"

    def ready(self, compile_: Callable[..., Any], sig: Any) -> Any:
        """Compile a function for Python that was a callee until now, or the other way round.

        Python goes on calling the code that it has called: numba keeps another table for it. A callee whose sources
        have changed since then is that code, as numba promises.
        """
        args = tuple(sigutils.normalize_signature(sig)[0])
        known, callee = self.dispatcher.overloads.get(args), bool(_numbers.keys)
        if known and isinstance(known.entry_point, _Callee) != callee and (not callee or self.is_unchanged()):
            del self.dispatcher.overloads[args]
        return compile_(sig)

    def is_unchanged(self) -> bool:
        """Return whether the dispatcher's code is known to be that of its sources now."""
        with contextlib.suppress(Exception):
            return _made_from.get(self.dispatcher) == Walk(self.dispatcher).digest
        return False

    def add(self, add_: Callable[..., None], result: Any) -> None:
        """Let Python call what has machine code, and other functions the rest."""
        if isinstance(result.entry_point, _Callee):
            self.dispatcher.overloads[tuple(result.signature.args)] = result
        else:
            add_(result)

    def load_overload(self, sig: Any, target: Any) -> Any:
        """Load the entry, if there is one; `compile` is next if not."""
        result = None
        target.refresh()
        with self.or_else_a_warning():
            if folder := _folder():
                walk = Walk(self.dispatcher)
                key = self.key(sig, walk, bool(_numbers.keys))
                if payload := _read(folder, key):
                    result = self.load(payload, target)
                    _made_from.setdefault(self.dispatcher, walk.digest)
                else:
                    self.missing[sigutils.normalize_signature(sig)] = key, sig
        _counts["hits" if result else "misses"] += 1
        return result

    def load(self, payload: bytes, target: Any) -> Any:
        """Bring an entry into memory, and its machine code if it has one."""
        libdata, *rest = pickle.loads(payload)
        with _own_engine(target):
            result = compiler.CompileResult._rebuild(target, libdata, *rest)
        result.library._reload_init.update(result.reload_init)  # for those that it is linked into
        if libdata[1] == "bitcode":
            return result._replace(entry_point=_Callee())
        _loaded.setdefault(self.dispatcher, {})[tuple(result.signature.args)] = machine_code(libdata[2][0])
        return result

    def compile(self, compile_: Callable[..., Any], args: Any, result: Any) -> Any:
        """Compile in an engine that nothing runs in, keep the entry, and load it."""
        callee = bool(_numbers.keys)
        target, (key, sig) = self.dispatcher.targetctx, self.missing.pop((args, result), ("", None))
        with _own_engine(target), _without_numbas_cache(self.dispatcher), _numbers.of(key or secrets.token_hex()):
            made = compile_(args, result)
        loaded = None
        with self.or_else_a_warning():
            if made.library.has_dynamic_globals or any(made.lifted):
                raise UncacheableError(
                    "it uses a ctypes pointer (get_num_threads is one), an array above 1 MB or objmode"
                )
            (name, kind, data), *rest = made._reduce()
            if kind == "object":
                data = *data, _defined(made.library._shared_module)
            payload = serialize.dumps(((name, kind, data), *rest))
            loaded = self.load(payload, target)
            if key and (folder := _folder()):
                self.require_unchanged(sig, key, callee)
                _write(folder, key, payload)
                _counts["saved"] += 1
        found = loaded or (made._replace(entry_point=_Callee()) if callee else made)
        if found is not made:
            target.insert_user_function(found.entry_point, found.fndesc, [found.library])
        return found

    def save_overload(self, sig: Any, result: Any) -> None:
        """Do nothing: `compile` has saved it."""

    def require_unchanged(self, sig: Any, key: str, callee: bool) -> None:
        """Raise where the entry's name does not describe the compiled code."""
        walk = Walk(self.dispatcher)
        if self.key(sig, walk, callee) != key:
            raise UncacheableError("something that it depends on changed while it was compiled")
        for unit in walk.units:
            digest = Walk(unit).digest
            if _made_from.setdefault(unit, digest) != digest:
                raise UncacheableError(f"something that {unit.__name__} depends on changed since that was compiled")

    @contextlib.contextmanager
    def or_else_a_warning(self) -> Iterator[None]:
        """Fall back to numba without a cache after any error."""
        try:
            yield
        except UncacheableError as reason:
            _warn(f"{self.label} is not cached: {reason}")
        except OSError as error:
            _warn(f"kernels are not cached: {_folder()}: {error.strerror or error}")
        except Exception as error:
            _warn(f"{self.label} is not cached: {type(error).__name__}: {error}")


@contextlib.contextmanager
def _without_numbas_cache(dispatcher: Any) -> Iterator[None]:
    """Compile functions under numba's own ``cache=True`` anew, since that cache may hold old code."""
    before = caching.FunctionCache.load_overload
    caching.FunctionCache.load_overload = lambda self, sig, target: None
    try:
        with contextlib.suppress(UncacheableError):
            for unit in Walk(dispatcher).units:
                if isinstance(getattr(unit, "_cache", None), caching.FunctionCache) and any(unit._cache_hits.values()):
                    unit._cache_hits.clear()
                    unit.recompile()
        yield
    finally:
        caching.FunctionCache.load_overload = before


def machine_code(content: bytes) -> str:
    """Digest the sections of an object file that a processor reads."""
    sections = [(s.is_text(), s.name() or b"", s.data()) for s in llvm.ObjectFileRef.from_data(content).sections()]
    code = [(name, data) for text, name, data in sections if text or name.startswith((b".rodata", b"__const"))]
    return sha(repr(code).encode())[:12]


class _Ordered(set[str]):
    """A set whose text is the same in each process: numba writes that of the flags into symbols."""

    def __repr__(self) -> str:
        return repr(sorted(self))

    __str__ = __repr__

    def copy(self) -> _Ordered:
        return _Ordered(self)


def _customize(flags: Any) -> Any:
    """Let symbols be the same in each process, and a callee be one."""
    flags.fastmath.flags = _Ordered(flags.fastmath.flags)
    if len(_numbers.keys) > 1:
        _as_callee(flags)
    return flags


def _as_callee(flags: Any) -> None:
    """Let a function have no wrapper, and no machine code of its own."""
    flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True


def _warn(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, CacheWarning, stacklevel=2)


# The files ------------------------------------------------------------------------------------------------------------


def _folder() -> Path | None:
    return _prepared(cache_folder("kernels"))


@functools.cache
def _prepared(folder: Path) -> Path | None:
    """Make the folder, and say once if others can write to it; each access checks that again."""
    try:
        _prune(folder)
    except OSError as error:
        _warn(f"kernels are not cached: {folder}: {error.strerror or error}")
        return None
    return folder


def _prune(folder: Path) -> None:
    """Remove, once a day, entries that no process has used for a month."""
    now = time.time()
    with private.opened(folder) as at:
        with contextlib.suppress(FileNotFoundError):
            if now - os.stat(MARKER, dir_fd=at, follow_symlinks=False).st_mtime < DAY:
                return
        with contextlib.suppress(OSError):  # a disk that is read-only, or another process was faster
            os.close(os.open(MARKER, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=at))
            os.utime(MARKER, dir_fd=at, follow_symlinks=False)
            for name in os.listdir(at):
                if ENTRY in name and now - os.stat(name, dir_fd=at, follow_symlinks=False).st_mtime > UNUSED:
                    os.unlink(name, dir_fd=at)


def _read(folder: Path, key: str) -> bytes | None:
    """Return the payload of an entry that this user wrote and that is whole, and mark it as used."""
    try:
        content = private.read(folder / f"{key}{ENTRY}")
    except private.UnsafeError as error:
        _warn(f"kernels are not loaded from the cache: {folder}: {error.strerror}")
    except OSError:  # most often there is none
        pass
    else:
        checksum, payload = content[:64], content[64:]
        if checksum == sha(key.encode() + payload).encode():
            return payload
    return None


def _write(folder: Path, key: str, payload: bytes) -> None:
    private.write(folder / f"{key}{ENTRY}", [sha(key.encode() + payload).encode(), payload], durable=False)

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
import pickle
import re
import secrets
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from numba import types

from . import entries, perf
from .dependencies import UncacheableError, Walk, settings, sha
from .numba_internals import unsupported

if not unsupported():
    from . import libraries
    from .numba_internals import caching, compiler, parallel, serialize, sigutils

PARALLEL = b"numba_parallel_for"
"""The function of numba's threads that machine code calls, which an engine must know when it loads the code."""
_counts = collections.Counter(hits=0, misses=0, saved=0)
_made_from: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""The digest of each dispatcher and intrinsic when this process compiled it: numba froze its globals then."""
_verified: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""The digest of each dispatcher and intrinsic when all that it reaches was last found to be what was compiled."""
_loaded: weakref.WeakKeyDictionary[Any, dict[Any, tuple[str, list[perf.Function]]]] = weakref.WeakKeyDictionary()
"""The digest and the functions of the object code that each dispatcher runs, by the types of its arguments."""


def attach(dispatcher: Any) -> None:
    """Make a dispatcher use this cache instead of numba's.

    Nothing is hashed before the first compilation, so the globals of the function may be defined after it.

    Parameters
    ----------
    dispatcher : what ``numba.njit`` returned, without ``cache=True`` and without explicit signatures.
    """
    if reason := unsupported():
        entries.warn(f"kernels are not cached: {reason}")
    elif not numba.config.DISABLE_JIT:
        dispatcher._cache = cache = _KernelCache(dispatcher)
        dispatcher.compile = functools.partial(cache.ready, dispatcher.compile)
        dispatcher.add_overload = functools.partial(cache.add, dispatcher.add_overload)
        dispatcher._compiler.compile = functools.partial(cache.compile, dispatcher._compiler.compile)
        dispatcher._compiler._customize_flags = libraries.customize


def entitle(dispatcher: Any, title: str) -> None:
    """Set the name by which a profiler shows a dispatcher's code."""
    if isinstance(cache := getattr(dispatcher, "_cache", None), _KernelCache):
        cache.title = title


def is_cached(dispatcher: Any, signature: Any) -> bool:
    """Return whether a compilation for `signature` would be loaded, without compiling.

    Parameters
    ----------
    dispatcher : as given to `attach`.
    signature : a tuple of numba types, or a signature such as ``types.void(types.float32[::1])``.
    """
    cache = getattr(dispatcher, "_cache", None)
    if isinstance(cache, _KernelCache) and (folder := entries.folder_in_use()):
        with contextlib.suppress(Exception):  # the compilation will say why
            return entries.read(folder, cache.key(signature, Walk(dispatcher))) is not None
    return False


def is_callee(result: Any) -> bool:
    """Return whether other functions alone can call what a dispatcher has for some types."""
    return not unsupported() and isinstance(result.entry_point, libraries.Callee)


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
    """Hash the machine code that a dispatcher runs for a signature: 12 hexadecimal digits; empty if none is loaded.

    It covers the instructions and constants of the loaded object, and none of the symbols' names.
    """
    return _code(dispatcher, signature)[0]


def code_in_memory(dispatcher: Any, signature: Any) -> list[tuple[int, perf.Function]]:
    """List the functions of the machine code that a dispatcher runs for a signature, with their addresses."""
    if not (found := _code(dispatcher, signature)[1]):
        return []
    result = dispatcher.overloads[tuple(sigutils.normalize_signature(signature)[0])]
    return perf.placed(found, result.library.get_pointer_to_function)


def _code(dispatcher: Any, signature: Any) -> tuple[str, list[perf.Function]]:
    known = _loaded.get(dispatcher, {})
    return known.get(tuple(sigutils.normalize_signature(signature)[0]), ("", [])) if known else ("", [])


def stats() -> dict[str, int]:
    """Count this process's compilations: ``hits`` loaded, ``misses`` compiled, and how many of those were ``saved``."""
    return dict(_counts)


@contextlib.contextmanager
def as_kept(dispatcher: Any) -> Iterator[None]:
    """Let a dispatcher that was not attached compile the code that an entry would have."""
    if unsupported():
        yield
        return
    dispatcher._compiler._customize_flags = libraries.customize
    with libraries.own_engine(dispatcher.targetctx), libraries.numbers.of(secrets.token_hex()):
        yield


class _KernelCache:
    """One dispatcher's cache, with the interface of numba's (``numba.core.caching._Cache``), and its compiler."""

    cache_path = property(lambda self: str(entries.folder_in_use()))

    def __init__(self, dispatcher: Any) -> None:
        function = dispatcher.py_func
        package = function.__module__.split(".")[-2:][0]  # "vanilla" in cpuopt.kernels.vanilla.matmul
        self.dispatcher = dispatcher
        self.label = re.sub(r"[^.\w]+", "_", function.__qualname__)[-80:] + "-" + package
        self.home = function.__module__, function.__qualname__
        self.title = function.__name__
        self.missing: dict[Any, tuple[str, Any, list[Any] | None]] = {}

    def enable(self) -> None:
        """Do nothing: the cache is always on."""

    disable = enable

    def flush(self) -> None:
        """Forget the sources of the dispatcher's code: ``recompile()`` rebuilds it. No entry on disk is wrong."""
        _made_from.pop(self.dispatcher, None)
        _verified.clear()

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
        known, callee = self.dispatcher.overloads.get(args), bool(libraries.numbers.keys)
        if known and isinstance(known.entry_point, libraries.Callee) != callee and (not callee or self.is_unchanged()):
            del self.dispatcher.overloads[args]
        return compile_(sig)

    def is_unchanged(self) -> bool:
        """Return whether the dispatcher's code is known to be that of its sources now."""
        with contextlib.suppress(Exception):
            return _made_from.get(self.dispatcher) == Walk(self.dispatcher).digest
        return False

    def add(self, add_: Callable[..., None], result: Any) -> None:
        """Let Python call what has machine code, and other functions the rest."""
        if isinstance(result.entry_point, libraries.Callee):
            self.dispatcher.overloads[tuple(result.signature.args)] = result
        else:
            add_(result)

    def load_overload(self, sig: Any, target: Any) -> Any:
        """Load the entry, if there is one; `compile` is next if not."""
        result = None
        target.refresh()
        with self.or_else_a_warning():
            if folder := entries.folder_in_use():
                walk = Walk(self.dispatcher)
                key = self.key(sig, walk, bool(libraries.numbers.keys))
                if (payload := entries.read(folder, key)) and (content := unpickled(payload)):
                    result = self.load(content, target)
                    _made_from.setdefault(self.dispatcher, walk.digest)
                else:
                    self.missing[sigutils.normalize_signature(sig)] = key, sig, walk.units
        _counts["hits" if result else "misses"] += 1
        return result

    def load(self, content: Any, target: Any) -> Any:
        """Bring an entry into memory, and its machine code if it has one."""
        libdata, *rest = content
        if libdata[1] == "object" and PARALLEL in libdata[2][0]:
            parallel._launch_threads()  # defines it; numba does so for a parallel function, not for its callers
        with libraries.own_engine(target):
            result = compiler.CompileResult._rebuild(target, libdata, *rest)
        result.library._reload_init.update(result.reload_init)  # for those that it is linked into
        if libdata[1] == "bitcode":
            return result._replace(entry_point=libraries.Callee())
        ran = machine_code(libdata[2][0]), perf.functions(libdata[2][0])
        _loaded.setdefault(self.dispatcher, {})[tuple(result.signature.args)] = ran
        perf.loaded(self.title, libdata[2][0], result.library.get_pointer_to_function)
        return result

    def compile(self, compile_: Callable[..., Any], args: Any, result: Any) -> Any:
        """Compile in an engine that nothing runs in, keep the entry, and load it."""
        callee = bool(libraries.numbers.keys)
        target, (key, sig, units) = self.dispatcher.targetctx, self.missing.pop((args, result), ("", None, None))
        named = libraries.numbers.of(key or secrets.token_hex())
        with libraries.own_engine(target), _without_numbas_cache(self.dispatcher, units), named:
            made = compile_(args, result)
        loaded = None
        with self.or_else_a_warning():
            if made.library.has_dynamic_globals or any(made.lifted):
                raise UncacheableError(
                    "it uses a ctypes pointer (get_num_threads is one), an array above 1 MB or objmode"
                )
            (name, kind, data), *rest = made._reduce()
            if kind == "object":
                data = *data, libraries.defined(made.library._shared_module)
            payload = serialize.dumps(((name, kind, data), *rest))
            loaded = self.load(pickle.loads(payload), target)
            if key and (folder := entries.folder_in_use()):
                self.require_unchanged(sig, key, callee)
                entries.write(folder, key, payload)
                _counts["saved"] += 1
        found = loaded or (made._replace(entry_point=libraries.Callee()) if callee else made)
        if found is not made:
            target.insert_user_function(found.entry_point, found.fndesc, [found.library])
        return found

    def save_overload(self, sig: Any, result: Any) -> None:
        """Do nothing: `compile` has saved it."""

    def require_unchanged(self, sig: Any, key: str, callee: bool) -> None:
        """Raise if the entry's name does not describe the compiled code.

        What a unit reaches is part of its digest, so below one that is as it was when verified, all is verified.
        """
        walk = Walk(self.dispatcher)
        if self.key(sig, walk, callee) != key:
            raise UncacheableError("something that it depends on changed while it was compiled")
        done, found = set[Any](), dict[Any, str]()
        for unit in walk.units:
            if unit in done:
                continue
            below = walk if unit is self.dispatcher else Walk(unit)
            if _made_from.setdefault(unit, below.digest) != below.digest:
                raise UncacheableError(f"something that {unit.__name__} depends on changed since that was compiled")
            if _verified.get(unit) == below.digest:
                done.update(below.units)
            found[unit] = below.digest
        _verified.update(found)

    @contextlib.contextmanager
    def or_else_a_warning(self) -> Iterator[None]:
        """Fall back to numba without a cache after any error."""
        try:
            yield
        except UncacheableError as reason:
            entries.warn(f"{self.label} is not cached: {reason}")
        except OSError as error:
            entries.warn(f"kernels are not cached: {entries.folder_in_use()}: {error.strerror or error}")
        except Exception as error:
            entries.warn(f"{self.label} is not cached: {type(error).__name__}: {error}")


@contextlib.contextmanager
def _without_numbas_cache(dispatcher: Any, units: list[Any] | None) -> Iterator[None]:
    """Compile functions under numba's own ``cache=True`` again, since that cache may hold old code."""
    before = caching.FunctionCache.load_overload
    caching.FunctionCache.load_overload = lambda self, sig, target: None
    try:
        with contextlib.suppress(UncacheableError):
            for unit in Walk(dispatcher).units if units is None else units:
                if isinstance(getattr(unit, "_cache", None), caching.FunctionCache) and any(unit._cache_hits.values()):
                    unit._cache_hits.clear()
                    unit.recompile()
        yield
    finally:
        caching.FunctionCache.load_overload = before


def unpickled(payload: bytes) -> Any:
    """Return the content of an entry; None if it names a module or a function that this version has elsewhere."""
    try:
        return pickle.loads(payload)
    except (ImportError, AttributeError):
        return None


def machine_code(content: bytes) -> str:
    """Digest the sections of an object file that a processor reads."""
    sections = [(s.is_text(), s.name() or b"", s.data()) for s in llvm.ObjectFileRef.from_data(content).sections()]
    code = [(name, data) for text, name, data in sections if text or name.startswith((b".rodata", b"__const"))]
    return sha(repr(code).encode())[:12]

"""How kernels are compiled: the options, the signature that a declaration implies, the cache, the warm-up.

This is the only module that calls ``numba.njit``.
"""

from __future__ import annotations

import gc
import inspect
import linecache
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from numbers import Integral
from queue import SimpleQueue
from typing import Any

import numba
from numba import types

from ...errors import COMPILE_ERROR, RefusedError, UserError
from ...ops.declaration import Op
from ...ops.storage import WIDE
from .. import registry
from ..registry import Kernel, Scratch
from ..toolkit.threads import cores
from . import cache
from .integers import PythonIntegers
from .numba_internals import unsupported
from .progress import Compiling
from .storage import NUMBA

FASTMATH = {"reassoc", "contract", "nsz", "arcp", "afn"}
"""Sums may be reordered and multiply-adds fused; NaN and infinity keep their meaning, so a guard can see them."""

OPTIONS: dict[str, Any] = {"parallel": True, "fastmath": FASTMATH, "error_model": "numpy", "boundscheck": False}
"""``error_model="numpy"``: a division that checks for zero would keep its loop scalar."""

PYTHON_INTEGERS: dict[str, Any] = {"pipeline_class": PythonIntegers}
"""The option with which the variable of a parallel loop is signed (`integers.py`)."""

ANSI = re.compile(r"\x1b\[[0-9;]*m")
PLACE = re.compile(r'File "([^"]*)", line (\d+)')
UNKNOWN = re.compile(r"name '(\w+)' is not defined")


def signature(
    op: Op, scratch: Sequence[Scratch] = (), dtypes: Mapping[str, str] | None = None
) -> tuple[types.Type, ...]:
    """Derive the numba types of a kernel's parameters.

    Parameters
    ----------
    dtypes : the types of the arguments that do not have their usual one.
    """
    sig: list[types.Type] = []
    for arg in op.args:
        dtype = NUMBA[(dtypes or {}).get(arg.name, arg.dtype)]
        sig.append(dtype if arg.kind == "scalar" else types.Array(dtype, len(arg.shape), "C"))
        if arg.kind == "acc":
            sig.append(types.boolean)
    return (*sig, *(types.Array(NUMBA[s.dtype], 1, "C") for s in scratch))


def integers(function: Callable[..., None]) -> dict[str, Any]:
    """Return the options with which the integers of a user's function are Python's; none for one of the package."""
    return {} if (function.__module__ or "").startswith(("cpuopt.", "cpuopt_generated.")) else PYTHON_INTEGERS


def takes_all(function: Callable[..., None]) -> bool:
    """Return whether a function has the one parameter ``*args``, which numba compiles for one tuple."""
    return bool(function.__code__.co_flags & inspect.CO_VARARGS)


def signature_of(kernel: Kernel) -> tuple[types.Type, ...]:
    """Derive the types for which a kernel is compiled."""
    sig = signature(kernel.op, kernel.scratch, kernel.types)
    return (types.Tuple(sig),) if takes_all(kernel.function.py_func) else sig  # type: ignore[attr-defined]


def kernel(
    op: Op,
    variant: str,
    *,
    scratch: Sequence[tuple[Any, ...]] = (),
    jit: bool = True,
    same_bits: bool = True,
    skips: Sequence[str] = (),
    narrow: bool | None = None,
    of: str = WIDE,
    shown: Callable[..., None] | None = None,
    **options: Any,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a way to compute an op.

    Parameters
    ----------
    op : the declaration. The function's parameters must be exactly ``op.params``, then the names in `scratch`; or it
        takes all of them as ``*args``.
    variant : the name that ``--variant`` and ``--swap`` use.
    scratch : ``(name, size)`` of float32 working memory, or ``(name, size, dtype)``; a size is a number, an expression
        of symbols such as ``BT * C``, which is no text, or a function of the sizes.
    jit : False for a plain Python function.
    same_bits : whether it promises identical bits for any number of threads.
    skips : gradients that it does not compute if their array has length zero, since what they are of is frozen; the
        declaration says of which that may be (``needed``).
    narrow : whether it takes the types that the op allows besides the usual ones, and sums in float32 all the same; by
        default, whether it is one of the package's.
    of : the type of arguments that it takes; of another than the usual one, such as ``bfloat16``, it takes the place of
        the variant's kernel.
    shown : the function whose file and line stand for the kernel; by default the decorated one.
    options : for ``numba.njit``, over the options that all kernels share.

    Raises
    ------
    UserError
        For parameters that are not the declared ones, or a second registration.
    """
    if not isinstance(op, Op):
        raise UserError(
            f"@kernel({op!r}, ...): expected an op from cpuopt.ops, as in @kernel(ops.gelu_forward, 'mine')"
        )

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        here = shown or function
        parts = tuple(Scratch(*of) for of in scratch)
        all_types = function.__module__.startswith("cpuopt.") if narrow is None else narrow
        where = f"{here.__code__.co_filename}:{here.__code__.co_firstlineno}"
        if unknown := next((s for s in parts if s.dtype not in NUMBA), None):
            raise UserError(
                f"{op.name}[{variant}]: scratch '{unknown.name}' has the type {unknown.dtype!r}; expected one of "
                f"{', '.join(NUMBA)}  [{where}]"
            )
        if odd := next((s for s in parts if not (isinstance(s.size, Integral) or callable(s.size))), None):
            raise UserError(
                f"{op.name}[{variant}]: scratch '{odd.name}' has the size {odd.size!r}; write a number, a function as "
                "in lambda sizes: sizes['N'] + 1, or N + 1 without quotes, with N from cpuopt.ops.declaration  "
                f"[{where}]"
            )
        params = list(inspect.signature(function).parameters)
        if takes_all(function):
            params = [*op.params, *(s.name for s in parts)]
        more = {"where": where, "same_bits": same_bits, "narrow": all_types, "skips": tuple(skips)}
        if not jit:
            registry.register(Kernel(op, variant, function, parts, **more), params, of)
            return function
        label = f"{op.name}[{variant}] at {where}"
        compiled = helper(**{**OPTIONS, **integers(here), **options})(function)
        cache.entitle(compiled, f"{op.name}[{variant}]")

        def types_of(dtypes: Mapping[str, str]) -> tuple[types.Type, ...]:
            sig = signature(op, parts, dtypes)
            return (types.Tuple(sig),) if takes_all(function) else sig

        def make(dtypes: Mapping[str, str]) -> None:
            _compile(compiled, types_of(dtypes), label)

        def made(dtypes: Mapping[str, str]) -> bool:
            sig = types_of(dtypes)
            return sig in compiled.overloads or cache.is_cached(compiled, sig)

        def entry(dtypes: Mapping[str, str]) -> Callable[..., None] | None:
            found = compiled.overloads.get(types_of(dtypes))
            if found and cache.is_callee(found):  # a kernel that was compiled since calls it
                make(dtypes)
                found = compiled.overloads[types_of(dtypes)]
            code = found.entry_point if found else None
            return (lambda *args: code(args)) if code and takes_all(function) else code

        registry.register(Kernel(op, variant, compiled, parts, make, made, entry, **more), params, of)
        return compiled

    return decorate


def _compile(dispatcher: Any, sig: tuple[types.Type, ...], name: str) -> None:
    """Compile or load; numba's report becomes one line.

    Meanwhile Python collects no garbage: it would look again and again at what numba keeps, for a tenth of the time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        dispatcher.compile(sig)
    except UserError:
        raise
    except Exception as e:  # numba's, or what it lets through: that a library is missing, or a fault of its own
        lines = [s for line in str(e).splitlines() if (s := ANSI.sub("", line).strip())]
        said = [s for s in lines if not s.startswith(("Failed in", "During:", "File "))] or [type(e).__name__]
        text = f"{name} does not compile: {' '.join(said[:2])}{_line(dispatcher, lines)}"
        raise RefusedError(text, COMPILE_ERROR) from e
    finally:
        if collects:
            gc.enable()
            gc.collect(0)


def _line(dispatcher: Any, said: Sequence[str]) -> str:
    """Return the line of a kernel that numba's report names last, or of the kernel that it was written from; or ""."""
    file = dispatcher.py_func.__code__.co_filename
    found = [m[2] for s in said if (m := PLACE.search(s)) and os.path.basename(m[1]) == os.path.basename(file)]
    for name in (m[1] for s in said if not found and (m := UNKNOWN.search(s))):
        written, first = inspect.getsourcelines(dispatcher.py_func)
        found = [str(first + i) for i, code in enumerate(written) if re.search(rf"\b{name}\b", code)][:1]
    if not found:
        return ""
    lines = [line.strip() for line in linecache.getlines(file)[: int(found[-1])]]
    if dispatcher.py_func.__module__.startswith("cpuopt_generated."):  # the line that a person wrote stands above
        quoted = next((line for line in reversed(lines) if re.match(r"# \d+: ", line)), "")
        return quoted.replace("# ", " (line ", 1) + ")" if quoted else ""
    return f" (line {found[-1]}: {lines[-1]})"


def afresh(kernel: Kernel) -> tuple[Any, tuple[types.Type, ...]]:
    """Compile a kernel again, without the cache, and return the dispatcher and the signature.

    Raises
    ------
    UserError
        If it does not compile.
    """
    known, sig = kernel.function, signature_of(kernel)
    options = {k: v for k, v in known.targetoptions.items() if k not in ("nopython", "nogil")}  # type: ignore[attr-defined]
    pipeline = known._compiler.pipeline_class  # type: ignore[attr-defined]
    dispatcher = numba.njit(pipeline_class=pipeline, **options)(known.py_func)  # type: ignore[attr-defined]
    with cache.as_kept(dispatcher):
        _compile(dispatcher, sig, f"{kernel.name} at {kernel.where}")
    return dispatcher, sig


def helper(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function that kernels call; serial by default.

    Parameters
    ----------
    options : of numba's ``njit``, in place of those that kernels have.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        compiled = numba.njit(**{**OPTIONS, "parallel": False, **integers(function), **options})(function)
        cache.attach(compiled)
        return compiled

    return decorate


def code_digest(kernel: Kernel) -> str:
    """Hash the machine code that a kernel runs; empty for a plain Python function, and before it is compiled."""
    compiled = hasattr(kernel.function, "py_func")
    return cache.code_digest(kernel.function, signature_of(kernel)) if compiled else ""


def compile_kernels(
    kernels: Sequence[Kernel],
    *,
    processes: int | None = None,
    files: Sequence[str] = (),
    progress: Callable[[int, int, str], None] | None = None,
) -> int:
    """Make kernels ready to run: compile what the cache lacks, load the rest.

    Parameters
    ----------
    processes : the number of processes that compile, one a core by default; each writes to the shared cache. A kernel
        that is in neither the package nor `files`, as one of a script is, is compiled in this one.
    files : users' kernel files that a process of its own has to load first.
    progress : called with (compiled so far, to compile, name) as it goes, and once at the end without a name; by
        default a line on stderr.

    Returns
    -------
    The number of kernels compiled.
    """
    missing = [k for k in kernels if not k.is_compiled()]
    processes, progress = min(processes or cores(), len(missing)), progress or Compiling()
    if processes > 1 and not unsupported():  # else nothing that they compile reaches this one
        for done, k in enumerate(_compile_elsewhere(missing, processes, files)):
            progress(done, len(missing), k.name)
    left = [k for k in missing if not k.is_compiled()]
    for k in kernels:
        if k in left:
            progress(len(missing) - len(left), len(missing), k.name)
            left.remove(k)
        k.compile()
    if missing:
        progress(len(missing), len(missing), "")
    return len(missing)


def _compile_elsewhere(kernels: Sequence[Kernel], processes: int, files: Sequence[str]) -> Iterator[Kernel]:
    """Compile in processes of the package's own, which end with this one; yield each kernel when it is done.

    Raises
    ------
    UserError
        For a kernel that does not compile.
    """
    from ...isolate.process import Side, Worker

    side = Side.module("compiler", "cpuopt.kernels.compile.worker", *files, PYTHONHASHSEED="0")  # see `places`
    idle: SimpleQueue[Worker] = SimpleQueue()

    def compile_one(k: Kernel) -> None:
        worker = idle.get()
        try:
            worker.ask("compile", op=k.op.name, variant=k.variant, types=dict(k.types))
        except UserError as e:
            e.args = (str(e).replace("compiler: ", "" if k.name in str(e) else f"compiling {k.name}: ", 1),)
            raise
        finally:
            idle.put(worker)

    with ExitStack() as stack:
        workers = [Worker(side) for _ in range(processes)]
        for worker in workers:
            stack.callback(worker.close, 0)
            idle.put(worker)
        pool = stack.enter_context(ThreadPoolExecutor(processes))  # whose threads must end before a pipe is closed

        def end() -> None:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in workers:
                worker.kill()

        stack.callback(end)
        jobs = {pool.submit(compile_one, k): k for k in kernels}
        for job in as_completed(jobs):
            job.result()
            yield jobs[job]

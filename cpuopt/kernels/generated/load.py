"""The backward of a declared op from one of its forward kernels: roles, names and shapes come from the declaration."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from ... import __version__, ad
from ...ad import Backward, Interface, differentiate, emit
from ...ad.kernel import CHUNKS
from ...ad.lower.scope import own
from ...ad.subset import outside, source_of
from ...ops.declaration import Op
from ..registry import Kernel


def backward(op: Op, forward: Kernel) -> Backward:
    """Generate the backward `op` from a kernel of the forward that it inverts.

    Raises
    ------
    UnsupportedError
        If the forward lies outside the subset, or the declared backward lacks an argument that its adjoint reads.
    """
    first = op.inverts
    assert first is not None
    adjoints = [a.name for a in op.args if a.kind == "acc"]
    known = [a for a in op.args if a.name in first.by_name]
    given = [a.name for a in op.arrays if a.kind != "acc" and a.name not in first.by_name]
    sizes = {a.name: tuple(map(str, a.shape)) for a in first.arrays} | {s.name: (s.name,) for s in forward.scratch}
    interface = Interface(op.params, sizes, {a.name for a in op.args if a.optional}, own_memory=False)
    return differentiate(
        forward.function,
        [name[1:] for name in adjoints],
        [name[1:] for name in given],
        name=op.name,
        interface=interface,
        saved=[a.name for a in known if first.by_name[a.name].kind == "out"],
        fresh=[a.name for a in first.args if a.kind == "out"],
        hidden=[a.name for a in first.arrays if a.name not in op.by_name] + [s.name for s in forward.scratch],
    )


def load(op: Op, forward: Kernel) -> ModuleType:
    """Load the module of a generated backward from the cache; write it first if the forward or the generator is new."""
    said = _sources(source_of(forward.function)[0])
    declared = [(a.name, a.kind, str(a.shape), a.optional) for o in (op, forward.op) for a in o.args]
    key = hashlib.sha256(repr((said, declared, forward.scratch, CHUNKS, _generator())).encode()).hexdigest()[:32]
    return emit.load(op.name, key, lambda: backward(op, forward).text)


def _sources(function: FunctionType) -> list[Any]:
    """List the sources of a forward and of the functions that it calls, with places and the values around them."""
    found, every = list[Any](), [function]
    for f in every:
        code, seen = f.__code__, outside(f)
        around = {n: seen.get(n) for n in (*code.co_names, *code.co_freevars)}
        called = {n: inspect.unwrap(getattr(v, "py_func", v)) for n, v in around.items() if own(v)}
        every += [g for g in dict.fromkeys(called.values()) if g not in every]
        values = {n: repr(v) for n, v in around.items() if n not in called}
        with contextlib.suppress(OSError):  # one without a source is refused when it is read
            values[""] = inspect.getsource(f)
        found.append((code.co_filename, code.co_firstlineno, values))
    return found


@cache
def _generator() -> str:
    """Return a digest of the generator's own source."""
    files = sorted(Path(ad.__file__).parent.rglob("*.py"))
    return __version__ + hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()

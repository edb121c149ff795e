"""How functions are compiled for the cache: in an LLVM engine of their own, under symbols that follow from keys.

To import it changes numba: symbols get other numbers, the body of a parallel loop is a callee, and signals wait while
LLVM makes or reads machine code.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import llvmlite.binding as llvm

from ...signals import deferred
from .dependencies import sha
from .numba_internals import bytecode, codegen, parfor_lowering


class Numbers:
    """The numbers that symbols end in, which numba counts from 1 in each process.

    Two processes would write entries that hold different functions under one name, and a kernel that calls both would
    run one for the other. So the numbers of an entry follow from its key: other entries have other ones, and who
    compiles it again gives the same. That of its function is even. What numba compiles besides, as its ``max``, is odd:
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
        """Take the numbers from a key."""
        self.keys.append((key, itertools.count()))
        try:
            yield
        finally:
            self.keys.pop()


ODD = re.compile(r"B\d+v\d*[13579]B")
"""An odd number in a symbol, as numba writes it there."""

numbers = Numbers()
bytecode.FunctionIdentity._unique_ids = numbers


class Library(codegen.JITCodeLibrary):
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
        """Compile, if that is left to do, and return the address of a function; 0 if there is no such function."""
        self._ensure_finalized()
        if not self._made and (name in self._defined or any(f.name == name for f in self._final_module.functions)):
            self._made = True
            if not self._disable_inspection:  # which is what numba notes of loaded machine code
                super()._optimize_final_module()
            super()._finalize_final_module()
        return super().get_pointer_to_function(name)

    def serialize_using_object_code(self) -> Any:
        """Return what an entry holds: machine code if there is some, else LLVM's code."""
        self._ensure_finalized()
        if self._made:
            return super().serialize_using_object_code()
        for f in self._final_module.functions:  # copies of its own, whatever this process compiled before
            if f.linkage == llvm.Linkage.linkonce_odr and ODD.search(f.name):
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
        self._defined = names[0] if names else defined(llvm.parse_bitcode(self._bitcode))
        self._set_compiled_object(machine_code)
        self._finalize_final_module()
        codegen._engine._defined_symbols.update(self._defined)
        return self

    def _get_module_for_linking(self) -> Any:
        if self._bitcode and not self._shared_module:
            self._shared_module = llvm.parse_bitcode(self._bitcode)
        return super()._get_module_for_linking()


def defined(module: Any) -> list[str]:
    """List the names that a module defines."""
    every = itertools.chain(module.functions, module.global_variables)
    return sorted(value.name for value in every if not value.is_declaration)


class Codegen(codegen.JITCPUCodegen):
    """An LLVM engine, and what makes its libraries."""

    _library_class = Library

    def set_env(self, env_name: str, env: Any) -> None:
        """Hand a function its environment, which a callee without machine code does not have."""
        if self._engine.is_symbol_defined(env_name):
            super().set_env(env_name, env)


@contextlib.contextmanager
def own_engine(target: Any) -> Iterator[None]:
    """Compile or load code in an LLVM engine of its own, which lives as long as the code."""
    before, target._internal_codegen = target._internal_codegen, Codegen("cpuopt")
    try:
        yield
    finally:
        target._internal_codegen = before


class Callee:
    """What stands for a function that has no machine code of its own: numba finds its code by this object."""


class Ordered(set[str]):
    """A set whose text is the same in each process: numba writes that of the flags into symbols."""

    def __repr__(self) -> str:
        return repr(sorted(self))

    __str__ = __repr__

    def copy(self) -> Ordered:
        """Copy it, as numba does with flags."""
        return Ordered(self)


def customize(flags: Any) -> Any:
    """Let symbols be the same in each process, and a callee be one."""
    flags.fastmath.flags = Ordered(flags.fastmath.flags)
    if len(numbers.keys) > 1:
        as_callee(flags)
    return flags


def as_callee(flags: Any) -> None:
    """Let a function have no wrapper, and no machine code of its own."""
    flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True


_create_body = parfor_lowering._create_gufunc_for_parfor_body


@functools.wraps(_create_body)
def _create_callee(lowerer: Any, parfor: Any, typemap: Any, typing: Any, target: Any, flags: Any, *rest: Any) -> Any:
    if numbers.keys:
        as_callee(flags)
    return _create_body(lowerer, parfor, typemap, typing, target, flags, *rest)


parfor_lowering._create_gufunc_for_parfor_body = _create_callee

# LLVM calls numba back for its object cache; what a handler raises there, as for Ctrl-C, ctypes would drop.
codegen.JITCodeLibrary._finalize_specific = deferred()(codegen.JITCodeLibrary._finalize_specific)

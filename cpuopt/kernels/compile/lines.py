"""Line tables for machine code that stays as it is: for a process that compiles only to look at it.

numba's ``debug=True`` keeps variables alive and in memory, which changes the code. Here only places are added: LLVM
then emits the same instructions, and ``.loc`` directives between them.

What a process runs is the first code that LLVM makes of a module. A second one may use other registers, since the first
one changed the module, and so may that of a copy, whose lists have another order.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from llvmlite import ir

from . import cache
from .numba_internals import BaseLower, codegen, compiler, debuginfo, errors

libraries: list[Any] = []
"""What was compiled to machine code since `mark`, with copies of its module; first a kernel, then its loaded entry."""
_first: list[bool] = []
"""Not empty if the text shall be the first code that is made of a module, in place of the code that runs."""


def mark(comments: bool = False) -> None:
    """Make numba mark lines in all that this process compiles from now on, and copy each module for `text`.

    Parameters
    ----------
    comments : whether the text says what was inlined where.
    """
    warnings.simplefilter("ignore", errors.NumbaDebugInfoWarning)
    init, add = compiler.CompilerBase.__init__, codegen.CPUCodeLibrary.add_ir_module
    finalize, begins = codegen.CPUCodeLibrary._finalize_final_module, BaseLower._compute_def_location

    def init_with_lines(
        self: Any, typing: Any, target: Any, library: Any, args: Any, result: Any, flags: Any, *rest: Any
    ):
        flags.debuginfo, flags.dbg_directives_only, flags.dbg_extend_lifetimes = True, True, False
        init(self, typing, target, library, args, result, flags, *rest)

    def add_ir_module(self: Any, module: Any) -> None:
        if module.name == "_gufunc_wrapper":
            _describe(module)
        add(self, module)

    def finalize_and_copy(self: Any) -> None:
        self._codegen._tm.set_asm_verbosity(comments)
        if _first:
            self.text = self._codegen._tm.emit_assembly(self._final_module)
        self.copies = [self._final_module.clone() for _ in range(2)]
        libraries.append(self)
        finalize(self)

    def begins_somewhere(self: Any) -> Any:
        try:
            return begins(self)
        except IndexError:  # numba's, for a function with a docstring and nothing else
            return self.func_ir.loc

    compiler.CompilerBase.__init__ = init_with_lines
    BaseLower._compute_def_location = begins_somewhere
    codegen.CPUCodeLibrary.add_ir_module = add_ir_module
    codegen.CPUCodeLibrary._finalize_final_module = finalize_and_copy


def _describe(module: Any) -> None:
    """Describe the function that numba writes around a parallel loop; one without a description loses all lines."""
    di = debuginfo.DIBuilder(module, "<gufunc>", None, True)
    for function in module.functions:
        if function.blocks:
            kind = module.add_debug_info("DISubroutineType", {"types": module.add_metadata([None])})
            about = {"name": function.name, "scope": di.difile, "file": di.difile, "type": kind}
            about |= {"unit": di.dicompileunit, "isDefinition": True}
            program = module.add_debug_info("DISubprogram", about, is_distinct=True)
            place = module.add_debug_info("DILocation", {"line": 0, "column": 0, "scope": program})
            function.set_metadata("dbg", program)
            for block in function.blocks:
                for instruction in block.instructions:
                    if isinstance(instruction, ir.CallInstr):
                        instruction.set_metadata("dbg", place)
    di.finalize()


def text(compile_: Callable[[], Any]) -> tuple[str, str, bytes]:
    """Return the assembly text of the code that a library runs, the digest of that code, and its object file.

    Parameters
    ----------
    compile_ : compiles the library, after `mark`; called again where copies of its module make other code than it.
    """
    library = compile_()
    made, (one, other) = library._get_compiled_object(), library.copies
    ran = cache.machine_code(made)
    if cache.machine_code(library.codegen._tm.emit_object(one)) == ran:
        return library.codegen._tm.emit_assembly(other), ran, made
    _first.append(True)
    try:
        return compile_().text, ran, made
    finally:
        _first.clear()

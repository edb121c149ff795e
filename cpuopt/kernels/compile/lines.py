"""Line tables for machine code that stays as it is: for a process that compiles only to look at it.

numba's ``debug=True`` keeps variables alive and in memory, which changes the code. Here only places are added: LLVM
then emits the same instructions, and ``.loc`` directives between them.

What a process runs is the first code that LLVM makes of a module; a second one may use other registers, because the
first one changed the module. So the text comes first, and the machine code is assembled from it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from . import line_table, remarks
from .numba_internals import BaseLower, codegen, compiler, debuginfo, errors

texts: list[tuple[Any, str]] = []
"""The libraries that were compiled to machine code since `mark`, each with its text; those of loaded code have none."""


def mark() -> None:
    """Make numba mark lines in all that this process compiles from now on, and keep the text of each library."""
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

    def finalize_and_write(self: Any) -> None:
        self._codegen._tm.set_asm_verbosity(True)  # comments say what was inlined where
        texts.append((self, self._codegen._tm.emit_assembly(self._final_module)))
        finalize(self)

    def begins_somewhere(self: Any) -> Any:
        try:
            return begins(self)
        except IndexError:  # numba's, for a function with a docstring and nothing else
            return self.func_ir.loc

    compiler.CompilerBase.__init__ = init_with_lines
    BaseLower._compute_def_location = begins_somewhere
    codegen.CPUCodeLibrary.add_ir_module = add_ir_module
    codegen.CPUCodeLibrary._finalize_final_module = finalize_and_write


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


def code(name: str) -> tuple[str, bytes, Sequence[line_table.Chain]]:
    """Return the text of the first function of a name, the object file of that text, and the chains of its labels."""
    library, asm = next((made, text) for made, text in texts if made.name == name)
    labelled, chains = line_table.labelled(asm)
    return remarks.slim(asm), line_table.assembled(labelled, library.codegen._tm), chains

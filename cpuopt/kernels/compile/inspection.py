"""A process that compiles a kernel to look at its code: as a run does, but with lines, or for another machine.

``python -m cpuopt.kernels.compile.inspection``. `places` starts it with an empty cache, for the compiler's output and a
line table: a process of its own, since LLVM's options cannot be reset, and since other code may follow from callees
that are compiled. `lab.targets` starts it with the machine in ``CPUOPT_TARGET``. numba then compiles for this machine,
with the tile of the other, but leaves out LLVM's passes. The module that it links goes through the same passes once
more, for the other machine.
"""

from __future__ import annotations

import contextlib
import inspect as source
import io
from collections.abc import Iterator, Mapping
from typing import Any

import llvmlite.binding as llvm

from ...errors import UserError
from ...isolate.serve import Say, serve
from ..toolkit.micro import targets
from . import remarks
from .numba_internals import codegen


def inspect(request: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Compile, and return the assembly text and its lines, its digest, the remarks, diagnostics, source and machine."""
    from .. import load_all, registry
    from . import cache, jit, line_table, lines

    lines.mark()
    load_all(request["kernels"])
    if (found := registry.KERNELS.get((request["op"], request["variant"]))) is None:
        raise UserError("it is in no file that can be loaded again")
    kernel, function = found.of(request["types"]), getattr(found.function, "py_func", None)
    made = {"asm": "", "code": "", "source": {}, "remarks": "", "diagnostics": "", "compiled": bool(function)}
    if function:
        lines.texts.clear()  # of what was compiled to load the package
        with _refusing(), remarks.collected() as said:
            kernel.compile()
        made["remarks"] = b"".join(said).decode(errors="replace")
        asm, content, chains = lines.code(function.__qualname__)
        if request["level"]:
            dispatcher, sig = jit.afresh(kernel)
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                dispatcher.parallel_diagnostics(sig, level=request["level"])
            made["diagnostics"] = printed.getvalue()
        written, first = source.getsourcelines(function)
        file, code = function.__code__.co_filename, cache.machine_code(content)
        made |= {"asm": asm, "code": code, "source": {"file": file, "first": first, "lines": written}}
        made |= line_table.table(content, chains, (file, first, first + len(written) - 1))
    return made | {"where": kernel.where, "machine": llvm.get_process_triple(), "cpu": llvm.get_host_cpu_name()}


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Compile; any error is a `UserError` of one line."""
    try:
        yield
    except Exception as e:
        raise UserError(f"cannot be compiled: {type(e).__name__}: {str(e).strip().splitlines()[-1]}") from e


def build(request: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Compile for another machine, and return the assembly text."""
    from .. import load_all, registry
    from . import jit

    target = targets.chosen()
    assert target is not None
    with unoptimized():
        load_all(request["kernels"])
        kernel = registry.KERNELS[request["op"], request["variant"]]
        if not hasattr(kernel.function, "py_func"):
            raise UserError("a Python function: nothing is compiled")
        with _refusing():
            dispatcher, sig = jit.afresh(kernel)
    return {"asm": assembly(dispatcher.overloads[sig].library, target), "where": kernel.where}


@contextlib.contextmanager
def unoptimized() -> Iterator[None]:
    """Leave out LLVM's passes; what numba links is then the same for each machine, but for its layout of data."""
    library, names = codegen.CPUCodeLibrary, ("_optimize_functions", "_optimize_final_module")
    before = [getattr(library, name) for name in names]
    for name in names:
        setattr(library, name, lambda self, *module: None)
    try:
        yield
    finally:
        for name, method in zip(names, before, strict=True):
            setattr(library, name, method)


def assembly(library: Any, target: targets.Target) -> str:
    """Optimize a linked module for a machine as numba does for its own, and generate the code."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(target.triple).create_target_machine(cpu=target.name, opt=3)
    module = llvm.parse_assembly(library.get_llvm_str())
    module.triple, module.data_layout = target.triple, str(machine.target_data)
    engine = library.codegen
    engine._tm = machine
    for cheap in ({"loop_vectorize": False, "slp_vectorize": False, "opt": 0, "cost": "cheap"}, {}):
        passes, builder = engine._module_pass_manager(**cheap)
        passes.run(module, builder)
    return str(machine.emit_assembly(module))


if __name__ == "__main__":
    serve({"inspect": inspect, "build": build})

"""A process that compiles a kernel for another machine, and reports its assembly text.

``python -m cpuopt.kernels.compile.retarget``, which `lab.targets` starts, with the machine in ``CPUOPT_TARGET``. numba
compiles for this machine, with the tile of the other, but leaves out LLVM's passes. The module that it links goes
through the same passes once more, for the other machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import llvmlite.binding as llvm

from ...errors import UserError
from ...isolate.serve import Say, serve
from ..toolkit.micro import targets
from .numba_internals import codegen


def build(request: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Compile, and return the assembly text."""
    from .. import load_all, registry
    from . import jit

    target = targets.chosen()
    assert target is not None
    with unoptimized():
        load_all(request["kernels"])
        kernel = registry.KERNELS[request["op"], request["variant"]]
        if not hasattr(kernel.function, "py_func"):
            raise UserError("a Python function: nothing is compiled")
        try:
            dispatcher, sig = jit.afresh(kernel)
        except Exception as e:
            raise UserError(f"cannot be compiled: {type(e).__name__}: {str(e).strip().splitlines()[-1]}") from e
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
    serve({"build": build})

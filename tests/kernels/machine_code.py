"""The machine code of kernels, as text."""

import importlib.util
from functools import cache
from pathlib import Path

from cpuopt.kernels.compile import jit
from cpuopt.kernels.registry import KERNELS

PAGE = Path(__file__).parents[2] / "benchmarks" / "targets.py"
SPEC = importlib.util.spec_from_file_location("foreign", PAGE)
SPEC.loader.exec_module(foreign := importlib.util.module_from_spec(SPEC))
"""What makes the code of any machine's micro-kernel."""


@cache
def assembly(op: str, variant: str = "optimized") -> str:
    """From the optimized module that the kernel's entry in the cache holds beside the code."""
    kernel = KERNELS[op, variant]
    kernel.compile()
    library = kernel.function.overloads[jit.signature_of(kernel)].library
    return str(library.codegen._tm.emit_assembly(library._get_module_for_linking()))

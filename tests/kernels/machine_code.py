"""The machine code of kernels, as text."""

from functools import cache

from cpuopt.kernels.compile import jit
from cpuopt.kernels.registry import KERNELS


@cache
def assembly(op: str, variant: str = "optimized") -> str:
    """From the optimized module that the kernel's entry in the cache holds beside the code."""
    kernel = KERNELS[op, variant]
    kernel.compile()
    library = kernel.function.overloads[jit.signature_of(kernel)].library
    return str(library.codegen._tm.emit_assembly(library._get_module_for_linking()))

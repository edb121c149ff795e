"""The machine code of kernels, as text."""

import importlib.util
import pickle
import re
from functools import cache
from pathlib import Path

import llvmlite.binding as llvm

from cpuopt.kernels.compile import entries, jit
from cpuopt.kernels.compile.dependencies import Walk
from cpuopt.kernels.registry import KERNELS

SPEC = importlib.util.spec_from_file_location("foreign", Path(__file__).parents[2] / "benchmarks" / "targets.py")
SPEC.loader.exec_module(foreign := importlib.util.module_from_spec(SPEC))
"""What makes the code of any machine's micro-kernel."""


@cache
def assembly(op: str, variant: str = "optimized") -> str:
    """From the optimized module that the kernel's entry in the cache holds beside the code."""
    kernel = KERNELS[op, variant]
    kernel.compile()
    library = kernel.function.overloads[jit.signature_of(kernel)].library
    return str(library.codegen._tm.emit_assembly(library._get_module_for_linking()))


def symbols(op: str, variant: str) -> str:
    """The names that the object code in the kernel's entry defines and calls, one a line."""
    kernel = KERNELS[op, variant]
    kernel.compile()
    key = kernel.function._cache.key(jit.signature_of(kernel), Walk(kernel.function))
    (_, _, (code, *_)), *_ = pickle.loads(entries.read(entries.folder_in_use(), key))
    sections = llvm.ObjectFileRef.from_data(code).sections()
    return b"".join(s.data() for s in sections if s.name() == b".strtab").replace(b"\0", b"\n").decode()


def innermost_loops(text):
    """From a label to a jump back to it, with no such jump between."""
    lines = text.splitlines()
    labels = {line[:-1]: i for i, line in enumerate(lines) if re.fullmatch(r"\.L\w+:", line)}
    targets = [(re.match(r"\s+j\w+\s+(\.L\w+)$", line), i) for i, line in enumerate(lines)]
    jumps = [(labels[m[1]], i) for m, i in targets if m and m[1] in labels]
    back = [(start, end) for start, end in jumps if start < end]
    for start, end in back:
        if not any(start <= s and e < end for s, e in back):
            yield "\n".join(lines[start : end + 1])

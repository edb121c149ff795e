"""Compiles one kernel afresh, with its source lines, and writes what the compiler made of it and said about it.

``python -m cpuopt.kernels.compile.inspection FILE OP VARIANT LEVEL [KERNELS.py ...]``: a process of its own, because
LLVM's options cannot be taken back. Remarks come on stderr. FILE gets one JSON object.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

import llvmlite.binding as llvm

PASSES = "loop-vectorize|slp-vectorizer"
REMARKS = ("-pass-remarks=", "-pass-remarks-missed=", "-pass-remarks-analysis=")


def main(file: str, op: str, variant: str, level: str, *kernels: str) -> None:
    """Compile, and write the assembly text, the parallel diagnostics, the signature and the machine."""
    for option in REMARKS:
        llvm.set_option("", option + PASSES)
    from .. import load_all, registry
    from . import jit

    load_all(kernels)
    kernel = registry.KERNELS[op, variant]
    if not hasattr(kernel.function, "py_func"):
        content = {"asm": "", "diagnostics": "", "compiled": False}
    else:
        dispatcher, sig = jit.afresh(kernel)
        said = io.StringIO()
        if int(level):
            with contextlib.redirect_stdout(said):
                dispatcher.parallel_diagnostics(sig, level=int(level))
        content = {"asm": dispatcher.inspect_asm(sig), "diagnostics": said.getvalue(), "compiled": True}
    content |= {"where": kernel.where, "machine": llvm.get_process_triple(), "cpu": llvm.get_host_cpu_name()}
    Path(file).write_text(json.dumps(content))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A process that compiles a kernel as a run does, but with lines, and reports the compiler's output and a line table.

``python -m cpuopt.kernels.compile.inspection``, which `places` starts with an empty cache: a process of its own, since
LLVM's options cannot be reset, and since other code may follow from callees that are compiled.
"""

from __future__ import annotations

import contextlib
import inspect as source
import io
import os
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import llvmlite.binding as llvm

from ...errors import UserError
from ...isolate.serve import Say, serve
from .remarks import PASSES, REMARKS


def inspect(request: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Compile, and return the assembly text and its lines, its digest, the remarks, diagnostics, source and machine."""
    for option in REMARKS:
        llvm.set_option("", option + PASSES)
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
        with tempfile.TemporaryFile() as remarks:
            try:
                with _stderr_to(remarks):
                    kernel.compile()
            except Exception as e:
                raise UserError(f"cannot be compiled: {type(e).__name__}: {str(e).strip().splitlines()[-1]}") from e
            remarks.seek(0)
            made["remarks"] = remarks.read().decode(errors="replace")
        asm, content, chains = lines.code(function.__qualname__)
        if request["level"]:
            dispatcher, sig = jit.afresh(kernel)
            with contextlib.redirect_stdout(io.StringIO()) as said:
                dispatcher.parallel_diagnostics(sig, level=request["level"])
            made["diagnostics"] = said.getvalue()
        written, first = source.getsourcelines(function)
        file, code = function.__code__.co_filename, cache.machine_code(content)
        made |= {"asm": asm, "code": code, "source": {"file": file, "first": first, "lines": written}}
        made |= line_table.table(content, chains, (file, first, first + len(written) - 1))
    return made | {"where": kernel.where, "machine": llvm.get_process_triple(), "cpu": llvm.get_host_cpu_name()}


@contextlib.contextmanager
def _stderr_to(file: BinaryIO) -> Iterator[None]:
    """Redirect stderr at the descriptor, to which the compiler writes, to a file."""
    before = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


if __name__ == "__main__":
    serve({"inspect": inspect})

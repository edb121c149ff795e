"""A process that compiles a kernel afresh, with its source lines, and reports the compiler's output, or a line table.

``python -m cpuopt.kernels.compile.inspection``, which `lab.inspect` starts: a process of its own, because LLVM's
options cannot be reset.
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

PASSES = "loop-vectorize|slp-vectorizer"
REMARKS = ("-pass-remarks=", "-pass-remarks-missed=", "-pass-remarks-analysis=")


def inspect(request: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Compile, and return the assembly text, its digest, the remarks, diagnostics, source and machine."""
    for option in REMARKS:
        llvm.set_option("", option + PASSES)
    from .. import load_all, registry
    from . import jit, lines

    lines.mark()
    load_all(request["kernels"])
    kernel, level = registry.KERNELS[request["op"], request["variant"]], request["level"]
    found = {
        "asm": "",
        "code": "",
        "source": {},
        "remarks": "",
        "diagnostics": "",
        "compiled": hasattr(kernel.function, "py_func"),
    }
    if found["compiled"]:
        said = io.StringIO()
        with tempfile.TemporaryFile() as remarks:
            made: list[tuple[Any, Any, int]] = []

            def compiled() -> Any:
                dispatcher, sig = jit.afresh(kernel)
                made.append((dispatcher, sig, os.fstat(remarks.fileno()).st_size))
                return dispatcher.overloads[sig].library

            try:
                with _stderr_to(remarks):
                    found["asm"], found["code"], _ = lines.text(compiled)
            except Exception as e:
                raise UserError(f"cannot be compiled: {type(e).__name__}: {str(e).strip().splitlines()[-1]}") from e
            dispatcher, sig, size = made[0]  # a second compilation repeats the remarks
            remarks.seek(0)
            found["remarks"] = remarks.read(size).decode(errors="replace")
        if level:
            with contextlib.redirect_stdout(said):
                dispatcher.parallel_diagnostics(sig, level=level)
        found["diagnostics"] = said.getvalue()
        written, first = source.getsourcelines(kernel.function.py_func)
        found["source"] = {"file": kernel.function.py_func.__code__.co_filename, "first": first, "lines": written}
    return found | {"where": kernel.where, "machine": llvm.get_process_triple(), "cpu": llvm.get_host_cpu_name()}


def table(request: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Compile, and return the lines of the code (`line_table.table`), and the file of the kernel."""
    from .. import load_all, registry
    from . import jit, line_table, lines

    lines.mark(comments=True)
    load_all(request["files"])
    if (found := registry.KERNELS.get((request["op"], request["variant"]))) is None:
        return {}
    kernel = found.of(request["types"])
    function = kernel.function.py_func  # type: ignore[attr-defined]

    def compiled() -> Any:
        """Compile as a process without entries does: with callees that are compiled already, code may be different."""
        if not lines.libraries:
            kernel.compile()
            return next(library for library in lines.libraries if library.name == function.__qualname__)
        dispatcher, sig = jit.afresh(kernel)
        return dispatcher.overloads[sig].library

    lines.libraries.clear()  # of what was compiled to load the package
    asm, _, made = lines.text(compiled)
    written, first = source.getsourcelines(function)
    home = function.__code__.co_filename, first, first + len(written) - 1
    return {"home": home[0], **line_table.table(made, asm, home)}


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
    serve({"inspect": inspect, "table": table})

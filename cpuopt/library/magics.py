"""``%load_ext cpuopt`` in a notebook: ``%%kernel OP VARIANT`` tries a kernel, ``%cpuopt VERB ...`` runs a verb.

Both start a process of their own, so that each run sees the files as they are, and a crash ends that process alone.
"""

from __future__ import annotations

import ast
import linecache
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import kernels, ops
from ..errors import UserError
from ..files import write_whole
from ..files.outputs import check
from ..files.reading import read_file
from ..kernels import UNNAMED, folder_of, registry
from ..lab.starter import flags_of, home
from ..report.rendered import echo
from ..wording import nearest

HEADER = '"""Written by %%kernel {op} {variant}."""\n'
IMPORTS = "import numpy as np\nfrom numba import prange\n\nfrom cpuopt import kernel, ops\n\n"


def load_ipython_extension(ipython: Any) -> None:
    """Add the magics to a notebook; ``%load_ext cpuopt`` calls it."""
    ipython.register_magic_function(run_verb, "line", "cpuopt")
    ipython.register_magic_function(try_kernel, "cell", "kernel")


def run_verb(line: str) -> None:
    """Run ``cpuopt`` with the flags of a line, as in ``%cpuopt profile --model FILE.py:NAME``."""
    _run(shlex.split(line))


def try_kernel(line: str, cell: str) -> None:
    """Write a cell to a file of kernels, and check, time, place under the roof and inspect its kernel.

    The file is ``VARIANT_OP.py`` in the working directory; for an op of one's own, beside the file that defines it,
    which the notebook has imported. A kernel that passes is registered here too, in place of
    that of an earlier run, for ``Engine(swap=...)`` and `Engine.ab`.

    Parameters
    ----------
    line : ``OP VARIANT``, then flags of ``cpuopt lab``: ``--against``, ``--model``, ``-B``, ``-T``, ``--no-step``, ...
    cell : the function OP with its constants; ``np``, ``prange``, ``kernel`` and ``ops`` are imported for it.

    Raises
    ------
    UserError
        For a line without op and variant, an op that is not there or in no file, a cell without the function, a file
        of that name from elsewhere, or a kernel that does not pass.
    """
    words = shlex.split(line)
    if len(words) < 2 or words[1].startswith("-"):
        raise UserError(f"%%kernel {line}: expected OP VARIANT, as in %%kernel gelu_forward mine")
    op, variant, *flags = words
    if op not in ops.ALL:
        more = "an op of your own comes with its file: import it, or cpuopt.load_kernels([FILE])"
        raise UserError(f"%%kernel {op!r}: no such op; {nearest(op, ops.ALL)}; {more}")
    path, header = file_of(op, variant), HEADER.format(op=op, variant=variant)
    check(path, "%%kernel")
    if path.exists() and not read_file(path).startswith(header.encode()):
        raise UserError(f"%%kernel: {str(path)!r} is there, and no %%kernel wrote it; move it away")
    own = home(ops.ALL[op])
    imports = IMPORTS + (f"import {own.__name__}  # registers the op\n\n" if own else "")
    write_whole(path, [(header + imports + decorated(cell, op, variant)).encode()])
    where = [] if any(f.startswith(("--model", "--sizes")) for f in flags) else flags_of(ops.ALL[op])
    if status := _run(["lab", str(path), "--once", *flags, *where]):
        raise UserError(
            f"%%kernel {op} {variant}: it did not pass (status {status}), so {op}[{variant}] is not registered; the "
            "lines above say why"
        )
    _register(path, op, variant)


def file_of(op: str, variant: str) -> Path:
    """Return the file of a cell's kernel: in the working directory, or beside the file of an op of one's own.

    Raises
    ------
    UserError
        For an op of one's own that is in no file, or in one that cannot be imported by its name.
    """
    name, own = f"{variant}_{op}.py", home(ops.ALL[op])
    if own is None:
        return Path(name)
    file = folder_of(own)
    if file is None or own.__name__ == "__main__" or own.__name__.startswith(UNNAMED):
        raise UserError(
            f"%%kernel {op}: {op} is defined in {own.__name__}, which another process cannot import; write it to a "
            "file of its own with %%writefile OP.py, and import it from there"
        )
    return Path(name) if file.resolve() == Path.cwd() else file / name


def decorated(cell: str, op: str, variant: str) -> str:
    """Return the text of a cell, whose function of an op is registered under a variant.

    Raises
    ------
    UserError
        If the cell has no such function, or is no Python.
    """
    try:
        found = [f for f in ast.parse(cell).body if isinstance(f, ast.FunctionDef) and f.name == op]
    except SyntaxError as e:
        raise UserError(f"%%kernel {op}: line {e.lineno} of the cell: {e.msg}") from e
    if not found:
        raise UserError(
            f"%%kernel {op}: the cell has no function {op}; %cpuopt new-kernel {op} {variant} writes one to start from"
        )
    if found[0].decorator_list:
        return cell
    lines = cell.splitlines(keepends=True)
    lines.insert(found[0].lineno - 1, f'@kernel(ops.ALL["{op}"], "{variant}")\n')
    return "".join(lines)


def _register(path: Path, op: str, variant: str) -> None:
    """Load a file whose kernel may be registered already, from an earlier content of the file."""
    there = f"{path.resolve()}:"
    if (known := registry.KERNELS.get((op, variant))) and known.where.startswith(there):
        del registry.KERNELS[op, variant]
    kernels.forget(path)
    linecache.checkcache(str(path.resolve()))
    kernels.load_all([path])


def _run(flags: Sequence[str]) -> int:
    """Run the command line in a process of its own, whose output comes here; return its exit status."""
    command = [sys.executable, "-m", "cpuopt", *flags]
    environment = {name: x for name, x in os.environ.items() if name != "FORCE_COLOR"}  # a notebook moves no cursor
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "encoding": "utf-8"}
    with subprocess.Popen(command, **streams, env={**environment, "PYTHONUNBUFFERED": "1"}) as process:
        assert process.stdout
        try:
            for line in process.stdout:
                echo(line)
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            echo(process.stdout.read())
    return process.returncode

"""A file to start a kernel from: the op's declaration as comments, and its vanilla kernel as the body."""

from __future__ import annotations

import ast
import inspect
import sys
from textwrap import fill, indent, wrap

from ..kernels.compile.jit import takes_all
from ..kernels.registry import BASE, KERNELS
from ..ops.declaration import Arg, Op

ROLES = {
    "out": "overwritten; it holds anything before",
    "acc": "a gradient: add to it where {name}_add is true, else overwrite it without reading",
    "state": "updated in place",
    "in": "read",
    "index": "read; int32",
    "scalar": "one number",
}
IMPORTS = {
    "np": "import numpy as np",
    "prange": "from numba import prange",
    "kernel": "from cpuopt import kernel, ops",
    "ops": "from cpuopt import kernel, ops",
}
COMMENTS = """\
{formula}

Arguments, in call order:
{arguments}

FLOPs: {op.flops}. Sizes are read from the arrays.
The same bits for any number of threads: sum over fixed chunks in a fixed order.
float32 constants are np.float32(...): a bare 0.5 makes the loop compute in double.
Working memory: @kernel(..., scratch=[("tile", 64 * C)]) gives one more parameter, a 1-D float32 array.

Next:  cpuopt lab THIS_FILE      checks, times and inspects it on every save
       cpuopt train --kernels THIS_FILE --swap {op.name}={variant}"""
FILE = '''\
"""{op.name}, {variant}: a copy of the {of} kernel, to be made fast."""

{imports}

{comments}


{kernel}'''


def starter(op: Op, variant: str, of: str = BASE) -> str:
    """Write the text of a file that registers a copy of a kernel: a correct, slow start for a fast kernel.

    Parameters
    ----------
    variant : the name that the copy registers under.
    of : the variant that is copied.
    """
    function = KERNELS[op.name, of].function
    function = getattr(function, "py_func", function)
    imports, kernel = caller(op, variant, of) if takes_all(function) else copied(op, variant, of)
    formula = inspect.getdoc(sys.modules[op.reference.__module__]) or ""
    if "Source:" not in formula:
        formula += "\n\n" + fill(f"Source: {op.source}", 118, subsequent_indent="  ")
    arguments = "\n".join(f"  {describe(a)}" for a in op.args)
    comments = COMMENTS.format(formula=formula, arguments=arguments, op=op, variant=variant)
    comments = indent(comments, "# ", lambda line: True).replace("# \n", "#\n")
    unique = "\n".join(dict.fromkeys(imports))
    return FILE.format(op=op, variant=variant, of=of, imports=unique, comments=comments, kernel=kernel)


def copied(op: Op, variant: str, of: str) -> tuple[list[str], str]:
    """Copy the text of a kernel, and find what it imports."""
    function = KERNELS[op.name, of].function
    function = getattr(function, "py_func", function)
    kernel = inspect.getsource(function).replace(f'"{of}"', f'"{variant}"', 1)
    names = {n.id for n in ast.walk(ast.parse(kernel)) if isinstance(n, ast.Name)}
    imports = [line for name, line in IMPORTS.items() if name in names]
    if others := sorted(names & vars(sys.modules[function.__module__]).keys() - IMPORTS.keys()):
        imports.append(f"from {function.__module__} import {', '.join(others)}")
    return imports, kernel


def describe(a: Arg) -> str:
    """Describe an argument on one line."""
    shape = f" ({', '.join(map(str, a.shape))})" if a.shape else ""
    optional = "; may be absent, and is then of length zero" if a.optional else ""
    return f"{a.name}{shape}: {ROLES[a.role].format(name=a.name)}{optional}"


def caller(op: Op, variant: str, of: str) -> tuple[list[str], str]:
    """Write a kernel that calls the one made from an optimizer's rule, which has no text of its own."""
    params = ", ".join([*op.params, *(s.name for s in KERNELS[op.name, of].scratch)])
    scratch = "[(s.name, s.size, s.dtype) for s in MADE.scratch]"
    kernel = [
        f'MADE = KERNELS["{op.name}", "{of}"]',
        "made = MADE.function",
        "",
        "",
        f'@kernel(ops.{op.name}, "{variant}", scratch={scratch}, parallel=False)',
        *wrap(f"def {op.name}({params}):", 118, subsequent_indent="    " * 2),
        *wrap(f"    made({params})", 118, subsequent_indent="    " * 2),
        "",
    ]
    return ["from cpuopt import kernel, ops", "from cpuopt.kernels.registry import KERNELS"], "\n".join(kernel)

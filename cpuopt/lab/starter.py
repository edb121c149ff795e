"""A file to start a kernel from: the op's declaration as comments, and its vanilla kernel as the body."""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path
from textwrap import fill, wrap
from types import ModuleType
from typing import Any

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


def starter(op: Op, variant: str) -> str:
    """Write the text of a file that registers a kernel, right and slow, to be made fast.

    Parameters
    ----------
    variant : the name it registers under.
    """
    function = KERNELS[op.name, BASE].function
    function = getattr(function, "py_func", function)
    module = sys.modules[function.__module__]
    own = sys.modules[op.reference.__module__]
    formula = inspect.getdoc(own) or ""
    lines = ["# " + line if line else "#" for line in formula.splitlines()]
    if "Source:" not in formula:
        lines += ["#", fill(f"Source: {op.source}", 118, initial_indent="# ", subsequent_indent="#   ")]
    lines += [
        "#",
        "# Arguments, in call order:",
    ]
    lines += ["#   " + describe(a) for a in op.args]
    lines += [
        "#",
        f"# FLOPs: {op.flops}. Sizes are read from the arrays.",
        "# The same bits for any number of threads: sum over fixed chunks in a fixed order.",
        "# float32 constants are np.float32(...): a bare 0.5 makes the loop compute in double.",
        '# Working memory: @kernel(..., scratch=[("tile", 64 * C)]) gives one more parameter, a 1-D float32 array.',
        "#",
        "# Next:  cpuopt lab THIS_FILE      checks, times and inspects it on every save",
        f"#        cpuopt train --kernels THIS_FILE --swap {op.name}={variant}",
    ]
    if takes_all(function):
        return f'"""{op.name}, {variant}: the naive kernel, to be made fast."""\n\n' + call(op, variant, lines)
    return f'"""{op.name}, {variant}: a copy of the naive kernel, to be made fast."""\n\n' + body(
        module, op, variant, lines
    )


def describe(a: Arg) -> str:
    """Say what an argument is, on one line."""
    shape = f" ({', '.join(map(str, a.shape))})" if a.shape else ""
    optional = "; may be absent, and is then of length zero" if a.optional else ""
    return f"{a.name}{shape}: {ROLES[a.role].format(name=a.name)}{optional}"


def call(op: Op, variant: str, comments: list[str]) -> str:
    """Write a kernel that calls the naive one, which is made from a rule of an optimizer and has no text of its own."""
    naive = KERNELS[op.name, BASE]
    params = ", ".join([*op.params, *(s.name for s in naive.scratch)])
    return "\n".join(
        [
            "from cpuopt import kernel, ops",
            "from cpuopt.kernels.registry import KERNELS",
            "",
            f'NAIVE = KERNELS["{op.name}", "{BASE}"]',
            "naive = NAIVE.function",
            "",
            *comments,
            "",
            "",
            f'@kernel(ops.{op.name}, "{variant}", scratch=[(s.name, s.size) for s in NAIVE.scratch], parallel=False)',
            *wrap(f"def {op.name}({params}):", 118, subsequent_indent="    " * 2),
            f'    """The loops are in cpuopt/kernels/{BASE}/{Path(naive.where.rpartition(":")[0]).name}."""',
            *wrap(f"    naive({params})", 118, subsequent_indent="    " * 2),
            "",
        ]
    )


def body(module: ModuleType, op: Op, variant: str, comments: list[str]) -> str:
    """Copy what the op's vanilla kernel needs of its module, with absolute imports."""
    text = Path(inspect.getfile(module)).read_text()
    lines = text.splitlines()
    imports, rest, target = [], [], ""
    for node in ast.parse(text).body:
        start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        source = "\n".join(lines[start - 1 : node.end_lineno])
        if isinstance(node, ast.ImportFrom) and node.level:
            package = module.__name__.split(".")[: -node.level]
            imports.append(f"from {'.'.join([*package, *filter(None, [node.module])])} import {_names(node)}")
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            imports.append(source)
        elif isinstance(node, ast.FunctionDef) and node.name == op.name:
            target = source.replace(f'"{BASE}"', f'"{variant}"', 1)
        elif isinstance(node, ast.FunctionDef) and any(
            word in ast.unparse(d) for d in node.decorator_list for word in ("kernel(", "by_rule(")
        ):
            continue
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            rest.append(source)
    needed = _needed(target, rest)
    words = _words("\n".join([target, *needed]))
    head = [line for line in (_used(line, words) for line in imports) if line]
    return "\n".join([*head, "", *needed, "", *comments, "", "", target, ""])


def _needed(target: str, rest: list[str]) -> list[str]:
    """Keep the constants and helpers that the kernel names, or that they name."""
    kept: set[int] = set()
    words = _words(target)
    while True:
        more = {i for i, source in enumerate(rest) if i not in kept and _defined(source) & words}
        if not more:
            return [source for i, source in enumerate(rest) if i in kept]
        kept |= more
        words |= set().union(*(_words(rest[i]) for i in more))


def _words(text: str) -> set[str]:
    return {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)}


def _defined(text: str) -> set[str]:
    tree: Any = ast.parse(text)
    functions = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    return functions | {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _used(line: str, words: set[str]) -> str:
    """Keep the names of an import that are used; nothing where none is."""
    node: Any = ast.parse(line).body[0]
    node.names = [a for a in node.names if (a.asname or a.name).split(".")[0] in words]
    return ast.unparse(node) if node.names else ""


def _names(node: ast.ImportFrom) -> str:
    return ", ".join(a.name + (f" as {a.asname}" if a.asname else "") for a in node.names)

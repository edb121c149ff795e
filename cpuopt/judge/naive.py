"""The package's kernels as texts that the judge takes: a start for who writes a faster one."""

from __future__ import annotations

import ast
from pathlib import Path

from ..errors import UserError
from ..kernels.registry import BASE, KERNELS
from ..ops.declaration import Op
from . import rules

HOMES = {
    (3, ""): "cpuopt",
    (2, "compile.jit"): "cpuopt",
    (3, "ops.declaration"): "cpuopt.ops.declaration",
}
"""Where a candidate imports what a kernel's file of the package imports, by the level and the module."""


def text_of(op: Op, variant: str = BASE, name: str = "mine") -> str:
    """Write one of the package's kernels as a candidate, with what it needs of its file, registered under a name.

    Raises
    ------
    UserError
        For a kernel that does not stand alone: it is made by a rule, or imports another.
    """
    kernel = KERNELS[op.name, variant]
    tree = ast.parse(Path(kernel.where.rpartition(":")[0]).read_text(encoding="utf-8"))
    named = {name: node for node in tree.body for name in _defined(node)}
    wanted, todo = dict[str, ast.stmt](), [op.name]
    while todo:
        one = todo.pop()
        if one in named and one not in wanted:
            wanted[one] = named[one]
            todo += [n.id for n in ast.walk(named[one]) if isinstance(n, ast.Name)]
    kept = [node for node in tree.body if node in wanted.values()]
    lines = []
    for node in kept:
        if isinstance(node, ast.ImportFrom) and node.level:
            inner = (node.module or "").removeprefix("toolkit.")
            home = HOMES.get((node.level, node.module or ""), f"cpuopt.kernels.toolkit.{inner}")
            names = [ast.alias(a.name, a.asname) for a in node.names if (a.asname or a.name) in wanted]
            lines.append(ast.unparse(ast.ImportFrom(home, names, 0)))
        else:
            gap = "\n\n" if isinstance(node, ast.FunctionDef) else ""
            lines.append(gap + ast.unparse(node).replace(f"'{variant}'", f"'{name}'", 1))
    text = "\n".join(lines) + "\n"
    try:
        found = rules.read(text).kernels
    except rules.RefusedError as e:
        raise UserError(f"{kernel.name} does not stand alone: {e}") from e
    if (op.name, name) not in found:
        raise UserError(f"{kernel.name} has no text of its own: a rule makes it")
    return text


def _defined(node: ast.stmt) -> list[str]:
    match node:
        case ast.FunctionDef():
            return [node.name]
        case ast.Import() | ast.ImportFrom():
            return [a.asname or a.name for a in node.names]
        case ast.Assign():
            return [n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)]
    return []

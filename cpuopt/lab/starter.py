"""A file to start a kernel from: the op's declaration as comments, and its vanilla kernel as the body."""

from __future__ import annotations

import ast
import inspect
import shlex
import sys
from importlib.util import resolve_name
from itertools import chain
from pathlib import Path
from textwrap import dedent, fill, indent, wrap
from types import ModuleType

from .. import models
from ..ad.emit import number
from ..ad.kernel import NUMBER
from ..errors import UserError
from ..kernels import UNNAMED
from ..kernels.compile.jit import takes_all
from ..kernels.registry import BASE, KERNELS
from ..ops import ALL, OPTIMIZERS
from ..ops.declaration import Arg, Dim, Op, as_dim
from .ab import where_it_runs

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
HOMES = {"...": "cpuopt", "..compile.jit": "cpuopt"}
"""Where a kernel imports what a file of the package's kernels imports from there."""
COMMENTS = """\
{formula}

Arguments, in call order:
{arguments}

FLOPs: {op.flops}. Sizes are read from the arrays.
The same bits for any number of threads: sum over fixed chunks in a fixed order.
float32 constants are np.float32(...): a bare 0.5 makes the loop compute in double.
Working memory: @kernel(..., scratch=[("tile", 64 * C)]) gives one more parameter, a 1-D float32 array.

Next:  {lab}
           checks, times and inspects it on every save{use}"""
FILE = '''\
"""{op.name}, {variant}: a copy of the {of} kernel, to be made fast."""

{imports}

{comments}


{kernel}'''


def starter(op: Op, variant: str) -> str:
    """Write the text of a file that registers a copy of a kernel: a correct, slow start for a fast kernel.

    Parameters
    ----------
    variant : the name that the copy registers under.
    """
    source, own = KERNELS[op.name, BASE], home(op)
    function = getattr(source.function, "py_func", source.function)
    write = of_own if own or source.written else caller if takes_all(function) else copied
    imports, kernel = write(op, variant)
    formula = inspect.getdoc(own or sys.modules[op.reference.__module__]) or f"Source: {op.source}"
    if "Source:" not in formula:
        formula += "\n\n" + fill(f"Source: {op.source}", 118, subsequent_indent="  ")
    arguments = "\n".join(f"  {describe(a)}" for a in op.args)
    comments = COMMENTS.format(
        formula=formula, arguments=arguments, op=op, variant=variant, lab=next_step(op), use=in_use(op, variant)
    )
    comments = indent(comments, "# ", lambda line: True).replace("# \n", "#\n")
    unique = "\n".join(dict.fromkeys(imports))
    return FILE.format(op=op, variant=variant, of=BASE, imports=unique, comments=comments, kernel=kernel)


def copied(op: Op, variant: str, of: str = BASE) -> tuple[list[str], str]:
    """Copy the text of a kernel and what it needs of its file, and find what both import."""
    function = KERNELS[op.name, of].function
    function = getattr(function, "py_func", function)
    text = Path(function.__code__.co_filename).read_text(encoding="utf-8")
    tree, lines = ast.parse(text), text.splitlines()
    named = {name: node for node in tree.body for name in _defined(node)}
    wanted, todo = dict[str, ast.stmt](), [function.__name__]
    while todo:
        one = todo.pop()
        if one in named and one not in wanted:
            wanted[one] = node = named[one]
            if isinstance(node, ast.FunctionDef):  # what derives others from the package's kernel has done so
                node.decorator_list = [d for d in node.decorator_list if isinstance(d, ast.Call)]
            todo += _needed(node)
    imports, parts, home_of = list[str](), list[str](), dict[str, list[str]]()
    for node in tree.body:
        if node not in wanted.values():
            continue
        if isinstance(node, ast.ImportFrom) and node.level:
            package = "." * node.level + (node.module or "")
            home = HOMES.get(package) or resolve_name(package, function.__module__.rpartition(".")[0])
            names = [a.asname or a.name for a in node.names if (a.asname or a.name) in wanted]
            home_of.setdefault(home, []).extend(names)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            imports.append(ast.unparse(node))
        else:
            decorated = [lines[d.lineno - 1 : d.end_lineno] for d in getattr(node, "decorator_list", ())]
            whole = "\n".join([*chain(*decorated), *lines[node.lineno - 1 : node.end_lineno]])
            parts.append(f"\n\n{whole}\n" if isinstance(node, ast.FunctionDef) else whole)
    imports += [f"from {home} import {', '.join(sorted(names))}" for home, names in home_of.items()]
    kernel = "\n".join(parts).replace(f'"{of}"', f'"{variant}"', 1)
    return imports, f"{kernel.strip()}\n"


def _needed(node: ast.stmt) -> set[str]:
    """List the names that a statement of a module has from elsewhere."""
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
    own = {n.id for n in names if isinstance(n.ctx, ast.Store)}
    decorators = getattr(node, "decorator_list", ())
    return {n.id for n in names} - own | {n.id for d in decorators for n in ast.walk(d) if isinstance(n, ast.Name)}


def _defined(node: ast.stmt) -> list[str]:
    """List the names that a statement of a module defines."""
    match node:
        case ast.FunctionDef():
            return [node.name]
        case ast.Import() | ast.ImportFrom():
            return [a.asname or a.name for a in node.names]
        case ast.Assign():
            return [n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)]
    return []


def home(op: Op) -> ModuleType | None:
    """Return the module that defines an op of one's own; None for the package's."""
    forward = getattr((op.inverts or op).reference, "kernel", None)
    return sys.modules.get(forward.__module__) if forward else None


def next_step(op: Op, file: str = "THIS_FILE") -> str:
    """Return the command that follows a new kernel, with the flag without which there is nothing to measure."""
    return shlex.join(["cpuopt", "lab", file, *flags_of(op)])


def flags_of(op: Op) -> list[str]:
    """Return the flags of ``cpuopt lab`` without which there is nothing to measure."""
    where = shlex.split(where_it_runs(op))
    return [] if where == ["--model", models.DEFAULT] else where


def in_use(op: Op, variant: str) -> str:
    """Return a line with a command that uses a kernel, with the flag of a model that calls its op; ``""`` for none.

    ``FILE.py:NAME`` stands for a model of the user's own, if no preset calls the op.
    """
    swap, flags = f"--kernels THIS_FILE --swap {op.name}={variant}", flags_of(op)
    if found := next((name for name, c in models.PRESETS.items() if op in c.cached.values()), None):
        return f"\n       cpuopt generate --model {found} {swap}"
    if flags and flags[0] != "--model":
        if updates := next((name for name in OPTIMIZERS if op.name == name or op.name.endswith(f"_{name}")), None):
            flags = ["--optimizer", updates]
        elif op.inverts or any(other.inverts is op for other in ALL.values()):
            flags = ["--model", "FILE.py:NAME"]
        else:
            return ""  # ranks and micro-batches call it
    return f"\n       cpuopt train {' '.join([swap, *flags])}"


def of_own(op: Op, variant: str) -> tuple[list[str], str]:
    """Copy a kernel of an op of one's own, whose file the new one lies beside, or a backward that was generated.

    Raises
    ------
    UserError
        If the op's file cannot be imported by its name.
    """
    kernel, module = KERNELS[op.name, BASE], home(op)
    members = vars(module).items() if module else ()
    name = next((n for n, x in members if op in (getattr(x, "forward", 0), getattr(x, "backward", 0))), "")
    if module and (module.__name__.startswith(UNNAMED) or not name):
        raise UserError(f"{module.__file__}: a kernel file cannot import {op.name} from it; give the file another name")
    handle = f"{name}.{'backward' if op.inverts else 'forward'}" if module else f"ops.{op.name}"
    function = getattr(kernel.function, "py_func", kernel.function)
    used = {n: x for n, x in function.__globals__.items() if n in function.__code__.co_names}
    others = {n: x for n, x in used.items() if n not in IMPORTS}
    if module and function.__module__ == module.__name__:
        from_home, constants = sorted({name, *others}), []
    else:  # generated: its module has constants and functions of math
        from_home, constants = [name], [f"{n} = {number(x)}" for n, x in others.items() if isinstance(x, NUMBER)]
        constants += [f"from {x.__module__} import {n}" for n, x in others.items() if not isinstance(x, NUMBER)]
    sizes = {s.name: as_dim(s.size) for s in kernel.scratch if not callable(s.size) or isinstance(s.size, Dim)}
    if symbols := sorted({symbol for size in sizes.values() for symbol in size.symbols}):
        constants.append(f"[{', '.join(symbols)}] = declaration.symbols({' '.join(symbols)!r})")
    needs_numpy = "np" in used or any("np." in c for c in constants)
    imports = [IMPORTS["np"]] * needs_numpy + [IMPORTS["prange"]] * ("prange" in used)
    imports += ["from cpuopt import kernel" if module else IMPORTS["ops"]]
    imports += ["from cpuopt.ops import declaration"] * bool(symbols)
    imports += [f"from {module.__name__} import {', '.join(from_home)}"] if module else []
    scratch = f", scratch=[{', '.join(f'({n!r}, {size})' for n, size in sizes.items())}]" if sizes else ""
    serial = "" if "prange" in used else ", parallel=False"
    source = dedent(inspect.getsource(function))
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.FunctionDef)
    first, *rest = source.splitlines()[tree.lineno - 1 :]
    first = first.replace(f"def {tree.name}(", f"def {op.name}(", 1)  # its own name is imported
    lines = [f'@kernel({handle}, "{variant}"{scratch}{serial})', first, *rest]
    return [*imports, *([""] if constants else []), *constants], "\n".join(lines).rstrip() + "\n"


def describe(a: Arg) -> str:
    """Describe an argument on one line."""
    shape = f" ({', '.join(map(str, a.shape))})" if a.shape else ""
    optional = "; may be absent, and is then of length zero" if a.optional else ""
    return f"{a.name}{shape}: {ROLES[a.kind].format(name=a.name)}{optional}"


def caller(op: Op, variant: str) -> tuple[list[str], str]:
    """Write a kernel that calls the one made from an optimizer's rule, which has no text of its own."""
    params = ", ".join([*op.params, *(s.name for s in KERNELS[op.name, BASE].scratch)])
    scratch = "[(s.name, s.size, s.dtype) for s in MADE.scratch]"
    kernel = [
        f'MADE = KERNELS["{op.name}", "{BASE}"]',
        "made = MADE.function",
        "",
        "",
        f'@kernel(ops.{op.name}, "{variant}", scratch={scratch}, parallel=False)',
        *wrap(f"def {op.name}({params}):", 118, subsequent_indent="    " * 2),
        *wrap(f"    made({params})", 118, subsequent_indent="    " * 2),
        "",
    ]
    return ["from cpuopt import kernel, ops", "from cpuopt.kernels.registry import KERNELS"], "\n".join(kernel)

"""``cpuopt new-kernel``: write a commented file to start a kernel from, or print a generated backward.

The file has the op's formula, its arguments and the naive kernel, which is right as it stands.

With --backward, the backward is derived from the source of the forward. A comment above each group of lines has the
forward's line, and --plan lists which values are kept, computed again or recorded:

    # 21: out[i] = x * inp[i]
    dinp[i] += dout[i] * x

Examples::

    cpuopt new-kernel gelu_forward --out mygelu.py
    cpuopt new-kernel layernorm_forward --variant rows2
    cpuopt new-kernel gelu_forward --backward --plan
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from ..errors import UserError
from ..files import write_text
from ..files.outputs import check
from ..train import settings
from ..wording import nearest, plain
from .common import Parser, check_targets, known_op, start_numba


def flags(p: Parser) -> None:
    """Add the verb's flags."""
    p.shared("op")
    settings.flags(p, "kernels")
    p.option("--variant", "Register the kernel under this variant.", "mine")
    p.option("--out", "Write this new file. Default: OP.py.", metavar="FILE", type=Path)
    p.option("--backward", "Print the generated backward OP, or those of a forward OP.", False)
    p.option("--from", "Start --backward from this variant of the forward.", "vanilla", "VARIANT", dest="forward")
    p.option("--plan", "List what --backward keeps, recomputes or records, and why.", False)
    p.shared("--html", help="Write both sources of --backward side by side, linked line by line, to this file.")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    if args.backward:
        return _backward(args)
    for flag in ("plan", "html"):
        if getattr(args, flag):
            raise UserError(f"--{flag}: add --backward, which prints the backward that is generated for {args.op}")
    from .. import kernels, ops
    from ..kernels import registry
    from ..lab.starter import home, next_step, starter

    if args.out:
        check(args.out, "--out", new=True)
    kernels.load_all(args.kernels)
    known_op("new-kernel", args.op)
    if not re.fullmatch(r"[A-Za-z][\w-]*", args.variant) or (args.op, args.variant) in registry.KERNELS:
        raise UserError(
            f"--variant {args.variant!r}: expected a new variant name for {args.op}, in letters, digits, - and _"
        )
    own = home(ops.ALL[args.op])
    folder = Path(str(own.__file__)).parent if own else Path()
    path = args.out or (Path(f"{args.op}.py") if folder.resolve() == Path.cwd() else folder / f"{args.op}.py")
    if own and path.resolve().parent != folder.resolve():
        raise UserError(f"--out {path}: it imports {args.op} from {own.__file__}, so it must lie beside that file")
    check(path, "--out", new=True)
    write_text(path, starter(ops.ALL[args.op], args.variant))
    print(f"{path}\nnext: {next_step(ops.ALL[args.op], str(path))}")
    return 0


def _backward(args: argparse.Namespace) -> int:
    """Print the backwards that are generated for an op."""
    start_numba(None)
    from .. import kernels, ops
    from ..kernels import doubles, registry
    from ..kernels.generated import REFUSED
    from ..kernels.generated.load import backward
    from ..report import backward as show
    from ..report.console import note

    if args.out:
        raise UserError(f"--out {args.out}: --backward prints, and writes no file but that of --html; leave --out out")
    check_targets(args)
    kernels.load_all(args.kernels)
    every = [(op, op.inverts) for op in ops.ALL.values() if op.inverts]
    chosen = [(op, of) for op, of in every if args.op in (op.name, of.name, of.name.removesuffix("_forward"))]
    if not chosen:
        if args.op in REFUSED:
            raise UserError(f"new-kernel {REFUSED[args.op]}")
        known = [op.name for op, _ in every]
        raise UserError(f"new-kernel {args.op} --backward: no op with a backward; {nearest(args.op, known)}")
    forwards = [registry.find(of.name, args.forward, "new-kernel --from: ") for _, of in chosen]
    made = [backward(op, forward) for (op, _), forward in zip(chosen, forwards, strict=True)]
    for text in filter(None, dict.fromkeys(map(doubles.note, forwards))):
        note(text)
    for one in made:
        print(plain(one.text))
        if args.plan:
            print(plain("\n".join(show.plan(one))) + "\n")
    if args.html:
        write_text(args.html, show.html(made))
        print(plain(f"wrote {args.html}"))
    return 0

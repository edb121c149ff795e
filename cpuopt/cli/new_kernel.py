"""``cpuopt new-kernel``: write a commented file to start a kernel from.

The file has the op's formula, its arguments and the naive kernel, which is right as it stands.

Examples::

    cpuopt new-kernel gelu_forward --out mygelu.py
    cpuopt new-kernel layernorm_forward --variant rows2
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from ..errors import UserError
from ..files import write_whole
from ..files.outputs import check
from ..train import settings
from .common import known_op, shared


def flags(p: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    shared(p, "op")
    settings.flags(p, "kernels")
    p.add_argument("--variant", default="mine", help="Register the kernel under this variant. Default: %(default)s.")
    p.add_argument("--out", type=Path, metavar="FILE", help="Write this new file. Default: OP.py.")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
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
    write_whole(path, [starter(ops.ALL[args.op], args.variant).encode()])
    print(f"{path}\nnext: {next_step(ops.ALL[args.op], str(path))}")
    return 0

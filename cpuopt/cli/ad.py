"""``cpuopt ad``: print the backward kernel generated from a forward kernel, and the reasons of its plan.

The backward is derived from the source of the forward. A comment above each group of lines has the forward's line:

    # 21: out[i] = x * inp[i]
    dinp[i] += dout[i] * x

--plan lists which values are kept, computed again or recorded.

Examples::

    cpuopt ad gelu_forward --plan
    cpuopt ad layernorm_backward --against optimized
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserError
from ..files import write_whole
from ..train import settings
from ..wording import nearest, plain
from . import common

SIZES = {"B": 4, "T": 64, "C": 768, "NH": 12, "OC": 3072, "V": 50257, "maxT": 1024}
ANALYSES = (12, 24)
"""Rounds after which the interim analyses of a comparison take place."""
if TYPE_CHECKING:
    from ..ops.declaration import Op


def flags(p: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    p.add_argument("op", metavar="OP", help="Print this backward op, or a forward op for all its backwards.")
    p.add_argument(
        "--from",
        dest="variant",
        default="vanilla",
        help="Start from this variant of the forward. Default: %(default)s.",
    )
    p.add_argument(
        "--plan", action="store_true", help="List the values that are kept, recomputed or recorded, and why."
    )
    p.add_argument(
        "--against",
        metavar="VARIANT",
        help="Check this variant and compare with it, on the same arrays, at --sizes or at the default model's with "
        "4 x 64 tokens, and exit with status 1 if either is wrong.",
    )
    common.shared(p, "--sizes")
    p.add_argument(
        "--html", type=Path, metavar="FILE", help="Write both sources side by side, linked line by line, to this file."
    )
    settings.flags(p, "kernels")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    common.start_numba(None)
    from .. import kernels, ops
    from ..kernels import doubles, registry
    from ..kernels.generated import REFUSED
    from ..kernels.generated.load import backward
    from ..report import backward as show
    from ..report.console import note

    common.check_targets(args)
    kernels.load_all(args.kernels)
    every = [op for op in ops.ALL.values() if op.inverts]
    chosen = [op for op in every if args.op in (op.name, op.inverts.name, op.inverts.name.removesuffix("_forward"))]  # type: ignore[union-attr]
    if not chosen:
        if args.op in REFUSED:
            raise UserError(f"ad {REFUSED[args.op]}")
        known = [op.name for op in every]
        raise UserError(f"ad {args.op}: no op with a backward; {nearest(args.op, known)}")
    made, notes = [], dict[str, None]()
    for op in chosen:
        assert op.inverts is not None
        forward = registry.find(op.inverts.name, args.variant, "ad --from: ")
        made.append(backward(op, forward))
        notes |= {doubles.note(forward): None}
        if args.against:
            registry.find(op.name, args.against, "ad --against: ")
    status = 0
    for text in filter(None, notes):
        note(text)
    for one in made:
        print(plain(one.text))
        if args.plan:
            print(plain("\n".join(show.plan(one))) + "\n")
        if args.against:
            status |= compare(ops.ALL[one.name], args.against, args.sizes)
    if args.html:
        write_whole(args.html, [show.html(made).encode("utf-8", "replace")])
        print(plain(f"wrote {args.html}"))
    return status


def compare(op: Op, variant: str, sizes: str = "") -> int:
    """Check a variant and the generated kernel of the vanilla forward, and time the one against the other."""
    from ..check.cases import case
    from ..check.check import check_all
    from ..kernels import registry
    from ..lab.ab import alone, case_at
    from ..wording import spread

    shape = case_at(op, case(op, SIZES).sizes)
    if sizes:
        shape = case_at(op, common.sizes_by_symbol(sizes)[0])
    pair = registry.KERNELS[op.name, variant], registry.KERNELS[op.name, "generated"]
    worst = [max(check_all([k], quick=True), key=lambda r: r.ratio) for k in pair]
    for result in worst:
        print(plain(str(result)))
    if any(r.refused for r in worst):
        return 1  # no time is reported for a wrong kernel
    found = alone(pair, [shape], analyses=ANALYSES)
    said = f"{found['verdict']}{found['why'] and ', ' + found['why']}"
    print(f"generated takes {spread(found['ratio'])} times as long as {variant}: {said}")
    print(f"{found['b_ms']:.3g} and {found['a_ms']:.3g} ms; {shape}")
    return 0

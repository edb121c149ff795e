"""Attention in a window beside full attention: the share of its time, and of its pairs of a token and a key.

    python benchmarks/windows.py [--tokens 2048] [--window 512] [--dtypes float32,bf16] [--rounds 12] [--cpu]

Both calls have the same arrays and take turns; their results are checked before, during and after the timing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

from flags import some_of

from cpuopt import kernels as _registered  # noqa: F401
from cpuopt import ops
from cpuopt.check.cases import Case
from cpuopt.kernels.registry import KERNELS
from cpuopt.kernels.toolkit import threads
from cpuopt.lab.ab import Alone
from cpuopt.machine import describe
from cpuopt.measure.comparison import compare
from cpuopt.ops.declaration import Op
from cpuopt.wording import spread

OPS = (ops.attention_forward, ops.attention_backward, ops.gqa_forward, ops.gqa_backward)
SIZES = {"B": 1, "C": 128, "NH": 2, "NKV": 1, "HS": 64}
NARROW = {"float32": (), "bf16": ("qkv", "q", "k", "v", "dout", "dqkv", "dq", "dk", "dv")}
"""The arguments that are bfloat16."""


def shape(op: Op, tokens: int, window: int, dtype: str) -> Case:
    """Return the shape of a call; the window 0 is none."""
    known = {**SIZES, "T": tokens}
    sizes = {s: known[s] for s in op.symbols} | {"window": window}
    types = {a.name: "bfloat16" for a in op.arrays if a.name in NARROW[dtype]}
    adds = {a.name: False for a in op.args if a.kind == "acc"}
    return Case(sizes, absent=frozenset(["starts"]), types=types, adds=adds)


def rows(args: argparse.Namespace) -> Iterator[str]:
    """Measure each op in each type."""
    clock = time.process_time_ns if args.cpu else time.perf_counter_ns
    yield "| attention | type | pairs | time in the window, of the full time |"
    yield "| --- | --- | ---: | ---: |"
    for op in OPS:
        for dtype in args.dtypes:
            shapes = [shape(op, args.tokens, window, dtype) for window in (0, args.window)]
            full, some = (Alone([KERNELS[op.name, "optimized"]], s, 0, clock=clock) for s in shapes)
            found = compare(lambda a=full: a.trial("A"), lambda a=some: a.trial("A"), analyses=[args.rounds])
            for one in (full, some):
                one.finish()
            share = op.work(shapes[1].sizes) / op.work(shapes[0].sizes)
            yield f"| `{op.name}` | {dtype} | {share:.3f} | {spread(found.verdict().ratio)} |"


def main() -> None:
    """Measure, and print the rows."""
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--tokens", type=int, default=2048, help="tokens of a row (%(default)s)")
    p.add_argument("--window", type=int, default=512, help="tokens that a token reads (%(default)s)")
    p.add_argument("--dtypes", type=some_of(NARROW), default=",".join(NARROW), help="of %(default)s")
    p.add_argument("--rounds", type=int, default=12, help="rounds of a comparison (%(default)s)")
    p.add_argument("--cpu", action="store_true", help="CPU time of one thread, where other processes use the cores")
    args = p.parse_args()
    threads.set_threads(1)
    for row in rows(args):
        print(row, flush=True)
    print(f"\n{describe()['cpu']}, one thread, {args.tokens} tokens, a window of {args.window}, {args.rounds} rounds.")


if __name__ == "__main__":
    main()

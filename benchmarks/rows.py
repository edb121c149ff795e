"""Every op but the matrix product at the sizes of GPT-2 124M: `vanilla` beside `optimized`.

::

    python benchmarks/rows.py [--threads N] [--sizes 4x64,1x1024] [--ops 'attention*']

Each is compared as by `cpuopt ab`: in pairs on the same arrays, on which both are judged. GB/s counts each array once
(twice where it is read and written), so it shows the distance of an op from memory's speed, not the real traffic.
"""

from __future__ import annotations

import argparse
from fnmatch import fnmatchcase

from cpuopt import kernels, ops  # noqa: F401  (importing kernels registers them)
from cpuopt.check.cases import Case
from cpuopt.errors import UserError
from cpuopt.kernels.registry import KERNELS
from cpuopt.kernels.toolkit.threads import set_threads
from cpuopt.lab.ab import Shape, alone
from cpuopt.ops.declaration import Op
from cpuopt.wording import spread

MODEL = {"C": 768, "NH": 12, "V": 50257, "maxT": 1024}
ADDS = {("embedding_backward", "dwte")}
"""Gradients that are added to: the head has written that of the tied weight already. The others are overwritten."""
ANALYSES = (12, 24)


def sizes(op: Op, b: int, t: int) -> dict[str, int]:
    """Return an op's sizes in GPT-2: GELU on 4C channels, AdamW and the norm on the largest weight."""
    tokens = b * t
    n = {"gelu": tokens * 4 * 768, "residual": tokens * 768}.get(op.name.split("_")[0], 50257 * 768)
    rows = min(tokens, 256) if "V" in op.symbols else tokens  # logits of more would take gigabytes to check
    known = {**MODEL, "B": b, "T": t, "BT": rows, "N": n}
    return {s: known[s] for s in op.symbols}


def row(op: Op, on: dict[str, int], size: str) -> str:
    """Measure an op at one size."""
    adds = {a.name: (op.name, a.name) in ADDS for a in op.args if a.role == "acc"}
    pair = KERNELS[op.name, "optimized"], KERNELS[op.name, "vanilla"]
    try:
        found = alone(pair, [Shape(Case(on), adds, (op.name,))], analyses=ANALYSES)
    except UserError as e:
        return f"| {op.name} | {size} | {e} | | | |"
    rate = op.bytes(on, adds) / found["a_ms"] / 1e6
    ms = f"{found['b_ms']:.3f} | {found['a_ms']:.3f}"
    return f"| {op.name} | {size} | {ms} | {spread(found['ratio'], 2)} | {rate:.1f} |"


def main() -> None:
    """Measure each op once a size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--sizes", default="4x64,1x1024")
    parser.add_argument("--ops", default="*")
    asked = parser.parse_args()
    threads = set_threads(asked.threads)
    print(f"{threads} threads\n\n| op | B x T | vanilla, ms | optimized, ms | ratio | GB/s |")
    print("|---|---|---:|---:|---:|---:|")
    chosen = [op for name, op in ops.ALL.items() if not name.startswith("matmul") and fnmatchcase(name, asked.ops)]
    done = []
    for size in asked.sizes.split(","):
        for op in chosen:
            on = sizes(op, *map(int, size.split("x")))
            if (op, on) not in done:
                done.append((op, on))
                print(row(op, on, size), flush=True)


if __name__ == "__main__":
    main()

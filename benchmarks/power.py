"""How often the gate and the judge err: comparisons of a kernel with its copy, and with one that is slower.

    python benchmarks/power.py gate --same 200 --slower 20 [--percent 3] [--threads N] [--elements N]
    python benchmarks/power.py judge --same 200 --slower 60 [--percent 3] [--model gpt2-124M]

Both take ``--json FILE``, to go on where an earlier command stopped, and ``--seconds S``. All kernels compute GELU. For
the gate they are of files: the copy has another name for a constant, so another digest of its source and the same
machine code; each comparison has new processes. The judge rules in one session; its copies have the text of the
package's kernel, each in another file. The slower ones compute a share of the elements twice.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from cpuopt import ops
from cpuopt.cli.common import cores, start_numba
from cpuopt.judge import naive
from cpuopt.judge.session import Judge, ModelSizes
from cpuopt.lab import gate
from cpuopt.lab.ab import case_at
from cpuopt.machine import Others

OP = ops.gelu_forward
FILE = """
import numpy as np
from numba import prange
from cpuopt import kernel, ops
from cpuopt.kernels.toolkit.fastmath import tanh

S, CUBIC, HALF, ONE = np.float32(np.sqrt(2 / np.pi)), np.float32(0.044715), np.float32(0.5), np.float32(1)
CHUNK, TWICE = 4096, {twice}

@kernel(ops.gelu_forward, "mine")
def gelu_forward(out, inp):
    n = inp.shape[0]
    for c in prange((n + CHUNK - 1) // CHUNK):
        x, y = inp[c * CHUNK : (c + 1) * CHUNK], out[c * CHUNK : (c + 1) * CHUNK]
        for part in range(2 if TWICE else 1):
            for i in range(min(TWICE, len(x)) if part else len(x)):
                y[i] = HALF * x[i] * (ONE + tanh(S * (x[i] + CUBIC * x[i] * x[i] * x[i])))
"""
LOOP = "forward((out,), SET, (inp,), *bounds(chunk, out))"
Compare = Callable[[int, float], dict[str, Any]]
"""Compare the i-th time with a kernel that is so many percent slower; return the verdict."""


@contextmanager
def by_gate(a: argparse.Namespace) -> Iterator[Compare]:
    """Compare as `cpuopt gate` does."""
    start_numba(a.threads)
    shape = case_at(OP, {"N": a.elements})
    with tempfile.TemporaryDirectory() as folder:

        def compare(i: int, percent: float) -> dict[str, Any]:
            trees, base = {}, FILE.format(twice=0)
            new = FILE.format(twice=int(4096 * percent / 100)) if percent else base.replace("CUBIC", "CUBED")
            for name, text in ("base", base), ("head", new):
                trees[name] = Path(folder) / f"{name}{percent:g}"
                trees[name].mkdir(exist_ok=True)
                (trees[name] / "mine.py").write_text(text)
            plan = gate.GatePlan("base", threads=a.threads, seed=1000 * i)
            row = gate.compared(
                plan, partial(gate.measured, op=OP, variant="mine.py", shape=shape, folders=trees, say=print)
            )
            return {**row, "fails": gate.is_slower(row, plan.percent)}

        yield compare


@contextmanager
def by_judge(a: argparse.Namespace) -> Iterator[Compare]:
    """Compare as `cpuopt judge` does."""
    with Judge(a.threads) as judge:
        judge.controls(OP)

        def compare(i: int, percent: float) -> dict[str, Any]:
            text = naive.text_of(OP, "optimized", f"try_{i}")
            if percent:
                assert text.count(LOOP) == 1
                again = f"forward((out,), SET, (inp,), lo, lo + int((hi - lo) * {percent / 100}))"
                whole = "lo, hi = bounds(chunk, out)", "forward((out,), SET, (inp,), lo, hi)", again
                text = text.replace(LOOP, "\n        ".join(whole))
            r = judge.time(text, OP.name, ModelSizes(a.model, a.B, a.T))
            timed = {"timed": r.timed.get("cases", [])} | ({"ratio": r.timed["ratio"]} if "ratio" in r.timed else {})
            return {"verdict": r.verdict, "reason": r.reason, **timed}

        yield compare


def kind_of(percent: float) -> str:
    """Name a kind of kernels."""
    return f"{percent:g} % slower" if percent else "copies"


def summary(percent: float, rows: list[dict[str, Any]]) -> str:
    """Sum up the verdicts on one kind of kernels."""
    words = Counter(r["verdict"] for r in rows).most_common()
    parts = [f"{', '.join(f'{n} {word}' for word, n in words)} of {len(rows)}"]
    if ratios := [r["ratio"] for r in rows if "ratio" in r]:
        medians, widths = [r["median"] for r in ratios], [100 * (r["high"] - r["low"]) for r in ratios]
        parts.append(f"medians {min(medians):.4f} to {max(medians):.4f}")
        parts.append(f"intervals {np.median(widths):.1f} % wide, at most {max(widths):.1f} %")
    seconds = [r["seconds"] for r in rows]
    parts.append(f"{np.median(seconds):.1f} s a verdict, at most {max(seconds):.1f} s")
    if "fails" in rows[0]:
        parts.append(f"{sum(r['fails'] for r in rows)} fail the gate")
    return f"{kind_of(percent)}: {'; '.join(parts)}"


def main() -> None:
    """Compare in an order that mixes both kinds, and print what became of them."""
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("of", choices=("gate", "judge"))
    p.add_argument("--same", type=int, default=200, help="comparisons with a copy (200)")
    p.add_argument("--slower", type=int, default=20, help="comparisons with a slower kernel (20)")
    p.add_argument("--percent", type=float, default=3, help="how much slower it is (3)")
    p.add_argument("--threads", type=int, default=cores())
    p.add_argument("--elements", type=int, default=98304, help="of a call of the gate, a multiple of 4096 (98304)")
    p.add_argument("--model", default="gpt2-124M", help="whose calls the judge times (%(default)s)")
    p.add_argument("-B", type=int, default=4)
    p.add_argument("-T", type=int, default=64)
    p.add_argument("--json", type=Path, help="write each result to this file; go on where an earlier command stopped")
    p.add_argument("--seconds", type=float, default=inf, help="stop after so many seconds")
    a = p.parse_args()
    kinds = np.random.default_rng(0).permutation([0.0] * a.same + [a.percent] * a.slower)
    found = json.loads(a.json.read_text()) if a.json and a.json.exists() else []
    others, start = Others(), time.perf_counter()
    with (by_gate if a.of == "gate" else by_judge)(a) as compare:
        for i, percent in enumerate(map(float, kinds[len(found) :]), len(found)):
            if (began := time.perf_counter()) - start > a.seconds:
                break
            row = compare(i, percent)
            found.append({"percent": percent, "seconds": time.perf_counter() - began, **row})
            print(f"{i + 1:4} {kind_of(percent):12} {row['verdict']:20} {row.get('ratio')} {row['reason']}", flush=True)
            if a.json:
                a.json.write_text(json.dumps(found))
    for percent in sorted({r["percent"] for r in found}):
        print(summary(percent, [r for r in found if r["percent"] == percent]))
    print(f"{time.perf_counter() - start:.0f} s in all, in which other processes used {others.cores():.2f} cores")


if __name__ == "__main__":
    main()

"""How often the judge errs: verdicts on copies of the package's kernel, and on ones that are some percent slower.

    python benchmarks/judge_power.py --same 200 --slower 60 [--percent 3] [--model gpt2-124M] [--json FILE]
        [--seconds S]

All verdicts are on `gelu_forward`, in one session. The copies have the text of the package's kernel. The slower ones
compute a share of each chunk twice, in another file each, so that nothing is kept from one to the next.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from math import inf
from pathlib import Path

import numpy as np

from cpuopt import ops
from cpuopt.judge import naive
from cpuopt.judge.session import Judge, ModelSizes
from cpuopt.machine import Others

OP = ops.gelu_forward
LOOP = "forward((out,), SET, (inp,), *bounds(chunk, out))"


def text_of(i: int, percent: float) -> str:
    """Write a candidate: a copy of the package's kernel, or one that computes a share of each chunk once more."""
    text = naive.text_of(OP, "optimized", f"try_{i}")
    if percent:
        twice = f"lo + int((hi - lo) * {percent / 100})"
        assert text.count(LOOP) == 1
        text = text.replace(
            LOOP,
            "lo, hi = bounds(chunk, out)\n"
            "        forward((out,), SET, (inp,), lo, hi)\n"
            f"        forward((out,), SET, (inp,), lo, {twice})",
        )
    return text


def main() -> None:
    """Ask for the verdicts, in an order that mixes both kinds, and print what became of them."""
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("--same", type=int, default=200, help="verdicts on copies (200)")
    p.add_argument("--slower", type=int, default=60, help="verdicts on slower kernels (60)")
    p.add_argument("--percent", type=float, default=3, help="how much slower these are (3)")
    p.add_argument("--model", default="gpt2-124M")
    p.add_argument("-B", type=int, default=4)
    p.add_argument("-T", type=int, default=64)
    p.add_argument("--threads", type=int)
    p.add_argument("--json", type=Path, help="write each verdict to this file; go on where an earlier command stopped")
    p.add_argument("--seconds", type=float, default=inf, help="stop after so many seconds")
    a = p.parse_args()
    kinds = np.random.default_rng(0).permutation([0.0] * a.same + [a.percent] * a.slower)
    found = json.loads(a.json.read_text()) if a.json and a.json.exists() else []
    others, start = Others(), time.perf_counter()
    with Judge(a.threads) as judge:
        judge.controls(OP)
        for i, percent in enumerate(map(float, kinds[len(found) :]), len(found)):
            if time.perf_counter() - start > a.seconds:
                break
            r = judge.time(text_of(i, percent), OP.name, ModelSizes(a.model, a.B, a.T))
            ratio = r.timed.get("ratio", {"median": 0.0, "low": 0.0, "high": 0.0})
            row = {"percent": percent, "verdict": r.verdict, "reason": r.reason, "ratio": ratio, "seconds": r.seconds}
            row["timed"] = r.timed.get("cases", [])
            found.append(row)
            kind = f"{percent:g} % slower" if percent else "copy"
            interval = f"{ratio['median']:.4f} ({ratio['low']:.4f} to {ratio['high']:.4f})"
            print(f"{i + 1:4} {kind:12} {r.verdict:12} {interval} {r.seconds:5.1f} s  {r.reason}", flush=True)
    for percent in sorted({r["percent"] for r in found}):
        rows = [r for r in found if r["percent"] == percent]
        words = Counter(r["verdict"] for r in rows)
        widths = [r["ratio"]["high"] - r["ratio"]["low"] for r in rows]
        seconds = [r["seconds"] for r in rows]
        print(
            f"{f'{percent:g} % slower' if percent else 'copies'}: "
            f"{', '.join(f'{n} {word}' for word, n in words.most_common())} of {len(rows)}; "
            f"medians {min(r['ratio']['median'] for r in rows):.4f} to {max(r['ratio']['median'] for r in rows):.4f}; "
            f"intervals {100 * np.median(widths):.1f} % wide, at most {100 * max(widths):.1f} %; "
            f"{np.median(seconds):.1f} s a verdict, at most {max(seconds):.1f} s"
        )
    print(f"{time.perf_counter() - start:.0f} s in all, in which other processes used {others.cores():.2f} cores")
    if a.json:
        a.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()

"""How often the gate errs: comparisons of a kernel with its copy, and with one that is some percent slower.

    python benchmarks/gate_power.py --same 200 --slower 20 [--percent 3] [--threads N] [--elements N]
        [--json FILE] [--seconds S]

All are GELU kernels of files. The copy has another name for a constant: another digest of its source, and the same
machine code. The slower one computes a share of the elements twice. Each comparison has new processes, as in the gate.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from math import inf
from pathlib import Path

import numpy as np

from cpuopt import ops
from cpuopt.cli.common import cores, start_numba
from cpuopt.lab import gate
from cpuopt.lab.ab import case_at
from cpuopt.machine import Others

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


def main() -> None:
    """Compare in an order that mixes both kinds, and print the verdicts of the gate."""
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("--same", type=int, default=200, help="comparisons with a copy (200)")
    p.add_argument("--slower", type=int, default=20, help="comparisons with a slower kernel (20)")
    p.add_argument("--percent", type=float, default=3, help="how much slower it is (3)")
    p.add_argument("--threads", type=int, default=cores())
    p.add_argument("--elements", type=int, default=98304, help="the elements of a call, a multiple of 4096 (98304)")
    p.add_argument("--json", type=Path, help="write each result to this file; go on where an earlier command stopped")
    p.add_argument("--seconds", type=float, default=inf, help="stop after so many seconds")
    a = p.parse_args()
    start_numba(a.threads)
    kinds = np.random.default_rng(0).permutation([0.0] * a.same + [a.percent] * a.slower)
    found = json.loads(a.json.read_text()) if a.json and a.json.exists() else []
    shape, others, start = case_at(ops.gelu_forward, {"N": a.elements}), Others(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for i, percent in enumerate(map(float, kinds[len(found) :]), len(found)):
            if time.perf_counter() - start > a.seconds:
                break
            trees, base = {}, FILE.format(twice=0)
            new = FILE.format(twice=int(4096 * percent / 100)) if percent else base.replace("CUBIC", "CUBED")
            for name, text in ("base", base), ("head", new):
                trees[name] = Path(folder) / f"{name}{percent:g}"
                trees[name].mkdir(exist_ok=True)
                (trees[name] / "mine.py").write_text(text)
            began = time.perf_counter()
            plan = gate.GatePlan("base", threads=a.threads, seed=1000 * i)
            row = gate.compared(plan, ops.gelu_forward, "mine.py", shape, trees)
            found.append({"percent": percent, "seconds": time.perf_counter() - began, **row})
            kind = f"{percent:g} % slower" if percent else "copy"
            print(f"{i + 1:4} {kind:12} {row['verdict']:20} {row.get('ratio')} {row['reason']}", flush=True)
            if a.json:
                a.json.write_text(json.dumps(found))
    for percent in sorted({r["percent"] for r in found}):
        rows = [r for r in found if r["percent"] == percent]
        words = dict(Counter(r["verdict"] for r in rows))
        failed = sum(gate.is_slower(r, gate.GatePlan("").percent) for r in rows)
        print(f"{percent:g} %: {len(rows)} comparisons, {words}; {failed} fail the gate")
    print("; ".join(others.warnings()) or "a quiet machine")


if __name__ == "__main__":
    main()

"""How good the verdicts of `cpuopt ab` are: kernels against themselves, and against themselves made 3 % slower.

Each run is what the verb does with one kernel on one shape. The kernel against itself should give neither ``faster``
nor ``slower``; the slowed one does the first 3 % of its work twice, so that its extra time is disturbed like all else.

    python benchmarks/verdicts.py --runs 200 --load      # with another process that keeps a core busy
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
SPIN = "while True: pass"


def main() -> None:
    """Measure, print a table, and write every verdict."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--runs", type=int, default=200, help="of each kind (%(default)s)")
    p.add_argument("--seed", type=int, default=0, help="of the first run; the next have the next (%(default)s)")
    p.add_argument("--threads", type=int, default=1, help="(%(default)s)")
    p.add_argument("--slower", type=float, default=0.03, help="how much (%(default)s)")
    p.add_argument("--elements", type=int, default=50_000, help="of the GELU that is timed (%(default)s)")
    p.add_argument("--load", action="store_true", help="keep one core busy meanwhile")
    p.add_argument("--out", type=Path, help="write the verdicts there, as JSON")
    args = p.parse_args()
    os.environ["NUMBA_NUM_THREADS"] = str(args.threads)
    from cpuopt import kernels, record, registry
    from cpuopt.kernels import threads
    from cpuopt.lab import machine
    from cpuopt.lab.ab import Alone, Shape
    from cpuopt.lab.cases import Case
    from cpuopt.lab.verdict import Contest

    kernels.load_all([])
    threads.set_threads(args.threads)
    kernel = registry.KERNELS["gelu_forward", "optimized"]
    kernel.compile()
    gelu, more = kernel.function, int(args.elements * args.slower)

    def same(out, inp):
        gelu(out, inp)
        gelu(out[:1], inp[:1])

    def slower(out, inp):
        gelu(out, inp)
        gelu(out[:more], inp[:more])

    a = replace(kernel, function=same, variant="A")
    shape = Shape(Case({"N": args.elements}), {}, ("h.0.mlp",))
    load = subprocess.Popen([sys.executable, "-c", SPIN]) if args.load else None
    found: dict[str, list[dict]] = {"same": [], "slower": []}
    others, start = machine.Others(), time.perf_counter()
    try:
        for i in range(args.seed, args.seed + args.runs):
            for kind, function in ("same", same), ("slower", slower):
                b = replace(kernel, function=function, variant="B")
                pair = Alone((a, b), shape, seed=i)
                contest = Contest(pair.turn, seed=i)
                found[kind].append({**contest.run().to_json(), "rounds": len(contest.times["A"])})
            print(f"\r{i + 1 - args.seed}/{args.runs}", end="", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("\nended early", file=sys.stderr)
    finally:
        if load:
            load.kill()
            load.wait()
    busy = others.cores()
    took = (time.perf_counter() - start) / max(1, len(found["same"]) + len(found["slower"]))
    print(f"\n{args.threads} threads, other processes used {busy:.2f} cores, {took:.2f} s a run")
    for kind, verdicts in found.items():
        counts = Counter(v["verdict"] for v in verdicts)
        rounds = sum(v["rounds"] for v in verdicts) / max(1, len(verdicts))
        print(f"{kind:7}", ", ".join(f"{n} {word}" for word, n in counts.most_common()), f"({rounds:.0f} rounds)")
    if args.out:
        content = {**vars(args), "out": None, "others_cores": busy, "verdicts": found}
        args.out.write_text(json.dumps({**content, "machine": record.machine()}, indent=1) + "\n")


if __name__ == "__main__":
    main()

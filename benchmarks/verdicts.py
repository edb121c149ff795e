"""The quality of the verdicts of `cpuopt ab`: kernels against themselves, against copies, and 3 % slower.

Each run is the work of the verb on one kernel and one shape. The kernel against itself (``same``) and against a copy of
its text in a user's file (``copy``) should give neither ``faster`` nor ``slower``; the ``slower`` one does the first
3 % of its work twice, so that its extra time is disturbed like all else.

    python benchmarks/verdicts.py --kinds same --runs 200                # false verdicts on one thread
    python benchmarks/verdicts.py --kinds same --runs 60 --threads 2     # and on two
    python benchmarks/verdicts.py --kinds slower --runs 100              # a difference of 3 % that is found
    python benchmarks/verdicts.py --kinds copy --runs 50                 # a copy of attention, which has scratch
    python benchmarks/verdicts.py --load                                 # with another process that keeps a core busy

A kernel is loaded from the cache of compiled kernels, its copy too: the first command on a machine only fills it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
SPIN = "while True: pass"
KINDS = ("same", "copy", "slower")
FALSE, FOUND = 2.0, 95.0
"""The promises: the largest percentage of false verdicts, and the least of planted differences that are found."""


def main() -> int:
    """Measure, print a table, and write every verdict; status 1 where there were more false verdicts than promised."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--kinds", default=",".join(KINDS), help="kinds of runs (%(default)s)")
    p.add_argument("--runs", type=int, default=50, help="number of runs of each kind (%(default)s)")
    p.add_argument("--seed", type=int, default=0, help="random seed of the first run (%(default)s)")
    p.add_argument("--threads", type=int, default=1, help="number of threads (%(default)s)")
    p.add_argument("--slower", type=float, default=0.03, help="planted difference (%(default)s)")
    p.add_argument("--elements", type=int, default=50_000, help="size of the GELU of 'same' and 'slower' (%(default)s)")
    p.add_argument("--op", default="attention_forward", help="op whose text is copied (%(default)s)")
    p.add_argument("--tokens", type=int, default=64, help="tokens of the row of GPT-2 that times 'copy' (%(default)s)")
    p.add_argument("--rounds", type=int, default=96, help="largest number of rounds (%(default)s)")
    p.add_argument("--load", action="store_true", help="another process that keeps one core busy")
    p.add_argument("--out", type=Path, help="file for the verdicts, as JSON")
    p.add_argument("--json", action="store_true", help="one JSON object in place of text")
    args = p.parse_args()
    os.environ["NUMBA_NUM_THREADS"] = str(args.threads)

    from cpuopt import kernels
    from cpuopt.kernels.toolkit import threads
    from cpuopt.lab.ab import Alone
    from cpuopt.measure import rates as machine
    from cpuopt.measure.comparison import analyses_up_to, compare

    kernels.load_all([])
    threads.set_threads(args.threads)
    kinds, analyses = args.kinds.split(","), analyses_up_to(args.rounds)
    pairs = {k: pair(k, args) for k in kinds}
    load = subprocess.Popen([sys.executable, "-c", SPIN]) if args.load else None
    found: dict[str, list[dict]] = {k: [] for k in kinds}
    others, start = machine.Others(), time.perf_counter()
    try:
        for i in range(args.seed, args.seed + args.runs):
            for kind, (both, shape) in pairs.items():
                timed = Alone(both, shape, seed=i)
                done = compare(*timed.trials, seed=i, analyses=analyses)
                found[kind].append({**done.verdict().to_json(), "rounds": done.rounds})
                timed.finish()
            so_far = "; ".join(f"{k}: {counts(v)}" for k, v in found.items())
            print(f"\r\033[K{i + 1 - args.seed}/{args.runs} {so_far}", end="", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("\nended early", file=sys.stderr)
    finally:
        if load:
            load.kill()
            load.wait()
    busy = others.cores()
    took = (time.perf_counter() - start) / max(1, sum(map(len, found.values())))
    print(file=sys.stderr)
    kinds = {k: {"runs": len(v), "percent": share(k, v), "kept": kept(k, v)} for k, v in found.items()}
    content = {**vars(args), "out": None, "others_cores": busy, "run_s": took, "kinds": kinds, "verdicts": found}
    content |= {"machine": machine.describe()}
    if args.out:
        args.out.write_text(json.dumps(content, indent=1) + "\n")
    if args.json:
        print(json.dumps(content))
    else:
        print(f"{args.threads} threads, other processes used {busy:.2f} cores, {took:.2f} s a run")
        for kind, verdicts in found.items():
            rounds = sum(v["rounds"] for v in verdicts) / max(1, len(verdicts))
            word = "found" if kind == "slower" else "false"
            print(f"{kind:7}{counts(verdicts)} ({rounds:.0f} rounds): {word} {share(kind, verdicts):.1f} %")
    return 0 if all(kept(k, v) for k, v in found.items()) else 1


def counts(verdicts: list[dict]) -> str:
    """Count the verdicts by word."""
    return ", ".join(f"{n} {word}" for word, n in Counter(v["verdict"] for v in verdicts).most_common())


def share(kind: str, verdicts: list[dict]) -> float:
    """Return the percent of false verdicts, or of those that found the planted difference."""
    words = ("slower",) if kind == "slower" else ("faster", "slower")
    return 100 * sum(v["verdict"] in words for v in verdicts) / max(1, len(verdicts))


def kept(kind: str, verdicts: list[dict]) -> bool:
    """Return whether the promise is kept."""
    return share(kind, verdicts) >= FOUND if kind == "slower" else share(kind, verdicts) <= FALSE


def pair(kind: str, args: argparse.Namespace):
    """Return two kernels and the shape to time them on."""
    from cpuopt import ops
    from cpuopt.check.cases import Case
    from cpuopt.kernels import registry
    from cpuopt.lab.ab import Shape, calls_of, shapes_of
    from cpuopt.train.job import Settings

    if kind == "copy":
        original, again = registry.KERNELS[args.op, "optimized"], copied(args.op)
        shape = shapes_of(calls_of(ops.ALL[args.op], Settings(model="gpt2-124M", B=1, T=args.tokens)))[0]
        for k in (original, again):
            k.compile()
        return (original, again), shape
    kernel = registry.KERNELS["gelu_forward", "optimized"]
    kernel.compile()
    gelu, more = kernel.function, int(args.elements * args.slower)

    def same(out, inp):
        gelu(out, inp)
        gelu(out[:1], inp[:1])

    def slower(out, inp):
        gelu(out, inp)
        gelu(out[:more], inp[:more])

    a, b = (
        replace(kernel, function=f, variant=v) for f, v in ((same, "A"), (slower if kind == "slower" else same, "B"))
    )
    return (a, b), Shape(Case({"N": args.elements}), {}, ("h.0.mlp",))


def copied(op: str):
    """Load a copy of the optimized kernel's text as a user's file, and return its kernel."""
    from cpuopt import kernels, ops
    from cpuopt.kernels import registry
    from cpuopt.lab.starter import starter

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{op}.py"
        file.write_text(starter(ops.ALL[op], "copy", "optimized"))
        kernels.load_all([file])
    return registry.KERNELS[op, "copy"]


if __name__ == "__main__":
    raise SystemExit(main())

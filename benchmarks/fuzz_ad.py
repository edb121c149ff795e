"""Random programs against the generator of backward kernels, in plain Python: programs, refused, wrong.

Run: python benchmarks/fuzz_ad.py 20000 [--first SEED] [--log FILE]. A wrong program is printed with its seed at once;
the count goes to the log every hundred programs, so that Ctrl-C loses nothing.
"""

import argparse
import collections
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "ad"))

import programs

warnings.simplefilter("ignore")  # overflow in a program that is then left out

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("count", type=int)
parser.add_argument("--first", type=int, default=0)
parser.add_argument("--log", type=Path)
args = parser.parse_args()

found, start = collections.Counter(), time.perf_counter()
for k in range(args.count):
    seed = args.first + k
    code = programs.Writer(seed).program()
    try:
        verdict = programs.examine(code, seed)
    except Exception as e:
        verdict = programs.Verdict("wrong", f"the generator raised {type(e).__name__}: {e}")
    found[verdict.kind] += 1
    if verdict.kind == "wrong":
        print(f"seed {seed}: {verdict.detail}\n{code}", flush=True)
    if args.log and (k + 1) % 100 == 0:
        spent = time.perf_counter() - start
        args.log.write_text(f"{k + 1} programs, {dict(found)}, {spent:.0f} s\n", encoding="utf-8")
print(f"{args.count} programs, {dict(found)}, {time.perf_counter() - start:.0f} s")
sys.exit(1 if found["wrong"] else 0)

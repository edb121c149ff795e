"""What a change does to machine code and programs: ``make replay REV=main`` compares two commits kernel by kernel.

A kernel whose sources are the same, as the compile cache sees them, has the same machine code. The others are compiled
in both trees, and their code is compared: instructions and constants, without symbols, so that paths, lines, names and
the order of files do not count. Each kernel is taken in every type, for this processor and two others. So are the
programs of some models, as text. Whatever differs is listed, with the sources that changed.

``python tests/replay.py REV`` compares REV with the working tree; it exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cpuopt.lab.commits import commit_of, differences, extract

HERE, OTHER = Path(__file__).parents[1], {"NUMBA_CPU_FEATURES": ""}
TARGETS = {
    "this processor": {},
    "AVX2": OTHER | {"NUMBA_CPU_NAME": "znver3"},
    "AVX-512 without BF16": OTHER | {"NUMBA_CPU_NAME": "icelake-server"},
}
"""The environment by which numba compiles for each; the code for others is made and not run."""
PROGRAMS = {
    "GPT-2": "--model gpt2-tiny -B 2 -T 16",
    "GPT-2 in bf16, in micro-batches": "--model gpt2-tiny -B 2 -T 16 --dtype bf16 --moments bf16 --total-batch 128",
    "GPT-2 of two ranks": "--model gpt2-tiny -B 2 -T 16 --ranks 2 --total-batch 64",
    "GPT-2 without rewrites": "--model gpt2-tiny -B 2 -T 16 --fuse none --variant vanilla --dtype bf16 --weights bf16",
    "Llama": "--model llama-tiny -B 2 -T 16",
    "Llama with adapters on a base in int8": "--model llama-tiny -B 2 -T 16 --lora r=4 --base int8 --recompute all",
}


def program(tree: Path, words: str) -> str:
    """The text of a program that the package of a tree makes."""
    verb = ["program"] if (tree / "cpuopt/cli/program.py").exists() else ["profile", "--program"]  # of older commits
    command = [sys.executable, "-P", "-m", "cpuopt", *verb, *words.split()]
    env = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tempfile.gettempdir())
    if done.returncode:
        raise SystemExit(f"replay: cpuopt profile --program {words} in {tree}:\n{done.stderr[-2000:]}")
    return done.stdout


def compare(trees: dict[str, Path], targets: list[str], only: str) -> list[str]:
    """Return a line for each difference, in the code for some targets, of kernels whose names match a glob."""
    pool, said = ThreadPoolExecutor(os.cpu_count() or 1), list[str]()
    texts = [[pool.submit(program, t, words) for t in trees.values()] for words in PROGRAMS.values()]
    for target in targets:
        found = differences(trees, only, TARGETS[target])
        print(f"{target}: {found.count} kernels, {len(found.sources)} with other sources", flush=True)
        said += [f"{target}: {name} is gone" for name in found.gone]
        said += [f"{target}: {name} is new" for name in found.new]
        said += [f"{target}: {name}: {found.sources[name]}" for name in found.codes]
    for name, (old, new) in zip(PROGRAMS, texts, strict=True):
        if old.result() != new.result():
            said.append(f"program {name}: cpuopt profile --program {PROGRAMS[name]}")
    print(f"programs: {len(PROGRAMS)}")
    return said


def main() -> int:
    """Compare a commit with the working tree."""
    p = argparse.ArgumentParser(description="Compare machine code and programs of a commit with the working tree.")
    p.add_argument("rev", nargs="?", default="main")
    p.add_argument("--target", action="append", choices=TARGETS, help="Compare the code for this one alone; repeats.")
    p.add_argument("--only", default="*", metavar="GLOB", help="Compare kernels with such names, as in 'gelu*'.")
    args = p.parse_args()
    os.chdir(HERE)
    with tempfile.TemporaryDirectory() as folder:
        other = extract(commit_of(args.rev, "replay"), Path(folder), "replay")
        said = compare({args.rev: other, "working tree": HERE}, args.target or [*TARGETS], args.only)
    print("\n".join(said) or f"equal to {args.rev}")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())

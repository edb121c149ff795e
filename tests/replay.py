"""What a change does to machine code and programs: ``make replay REV=main`` compares two commits kernel by kernel.

A kernel whose sources are the same, as the compile cache sees them, has the same machine code. The others are compiled
in both trees, and their code is compared: instructions and constants, without symbols, so that paths, lines, names and
the order of files do not count. Each kernel is taken in every type, for this processor and two others. So are the
programs of some models, as text. Whatever differs is listed, with the sources that changed.

``python tests/replay.py REV`` compares REV with the working tree; it exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path

HERE = Path(__file__).parents[1]
OTHER = {"NUMBA_CPU_FEATURES": ""}
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
JOBS = os.cpu_count() or 1


# What runs in a tree -------------------------------------------------------------------------------------------------


def kernels() -> dict[str, object]:
    """Every kernel of the package in every type, by its name."""
    from cpuopt import kernels, ops  # noqa: F401  (it registers them)
    from cpuopt.check.cases import other_types
    from cpuopt.kernels import registry

    found = {}
    for (op, _), k in registry.KERNELS.items():
        for types in [{}, *other_types(ops.ALL[op])]:
            if hasattr(k.function, "py_func") and k.takes_all(types):
                found[" ".join([k.name, *(f"{n}:{t}" for n, t in types.items())])] = k.of(types)
    return found


def sources() -> dict[str, dict[str, str]]:
    """The digests of what each kernel is made from: all, its own text, its options, and each helper that it reaches."""
    from cpuopt.kernels.compile import cache, dependencies, jit

    known: dict[int, tuple[object, str]] = {}

    def digest(unit: object) -> str:
        if id(unit) not in known:
            known[id(unit)] = unit, cache.digest(unit)
        return known[id(unit)][1]

    found = {}
    for name, k in kernels().items():
        plain = k.function.py_func
        options = {n: sorted(x) if isinstance(x, set) else x for n, x in k.function.targetoptions.items()}
        parts = {"all": f"{digest(k.function)} {jit.signature_of(k)}", "options": repr(sorted(options.items()))}
        parts["text"] = dependencies.Walk(plain.__code__).digest
        for unit in dependencies.Walk(k.function).units:
            if unit is not k.function:
                home = getattr(unit, "py_func", getattr(unit, "_defn", unit))
                parts[f"helper {home.__qualname__}"] = digest(unit)
        found[name] = parts
    return found


def code(names: list[str]) -> dict[str, str]:
    """The digest of the machine code of some kernels, which are compiled if the cache lacks them."""
    from cpuopt.kernels.compile import jit

    every = kernels()
    for name in names:
        every[name].compile()
    return {name: jit.code_digest(every[name]) for name in names}


# What compares two trees ---------------------------------------------------------------------------------------------


def run(tree: Path, target: dict[str, str], command: list[str], given: str = "") -> str:
    """Run a command on the package of a tree, for a processor."""
    env = {**os.environ, **target, "PYTHONPATH": str(tree)}
    done = subprocess.run(
        [sys.executable, "-P", *command],
        input=given,
        capture_output=True,
        text=True,
        env=env,
        cwd=tempfile.gettempdir(),
    )
    if done.returncode:
        raise SystemExit(f"replay: {' '.join(command)} in {tree}:\n{done.stderr[-2000:]}")
    return done.stdout


def reasons(old: dict[str, str], new: dict[str, str]) -> str:
    """Name the sources in which two versions of a kernel differ."""
    apart = [part for part in {**old, **new} if part != "all" and old.get(part) != new.get(part)]
    return ", ".join(apart) or "constants"


def compare(trees: list[Path], targets: list[str], only: str) -> list[str]:
    """Return a line for each difference, in the code for some targets, of kernels whose names match a glob."""
    pool, said = ThreadPoolExecutor(JOBS), list[str]()
    texts = [
        [pool.submit(run, t, {}, ["-m", "cpuopt", "program", *words.split()]) for t in trees]
        for words in PROGRAMS.values()
    ]
    listed = {name: [pool.submit(run, t, TARGETS[name], [__file__, "--sources"]) for t in trees] for name in targets}
    for target, pair in listed.items():
        old, new = ({n: x for n, x in json.loads(job.result()).items() if fnmatch(n, only)} for job in pair)
        both = [name for name in new if name in old]
        said += [f"{target}: {name} is gone" for name in old if name not in new]
        said += [f"{target}: {name} is new" for name in new if name not in old]
        apart = [name for name in both if old[name]["all"] != new[name]["all"]]
        print(f"{target}: {len(both)} kernels, {len(apart)} with other sources", flush=True)
        shares = [apart[i::JOBS] for i in range(JOBS) if apart[i::JOBS]]
        made = [
            pool.submit(run, t, TARGETS[target], [__file__, "--code"], json.dumps(s)) for t in trees for s in shares
        ]
        found = [json.loads(job.result()) for job in made]
        before = {k: v for part in found[: len(shares)] for k, v in part.items()}
        after = {k: v for part in found[len(shares) :] for k, v in part.items()}
        said += [f"{target}: {n}: {reasons(old[n], new[n])}" for n in apart if before[n] != after[n]]
    for name, (old, new) in zip(PROGRAMS, texts, strict=True):
        if old.result() != new.result():
            said.append(f"program {name}: cpuopt program {PROGRAMS[name]}")
    print(f"programs: {len(PROGRAMS)}")
    return said


def main() -> int:
    """Compare a commit with the working tree."""
    p = argparse.ArgumentParser(description="Compare machine code and programs of a commit with the working tree.")
    p.add_argument("rev", nargs="?", default="main")
    p.add_argument("--target", action="append", choices=TARGETS, help="Compare the code for this one alone; repeats.")
    p.add_argument("--only", default="*", metavar="GLOB", help="Compare kernels with such names, as in 'gelu*'.")
    p.add_argument("--sources", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--code", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.sources or args.code:
        print(json.dumps(code(json.load(sys.stdin)) if args.code else sources()))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", other, args.rev], cwd=HERE, check=True)
        try:
            said = compare([other, HERE], args.target or [*TARGETS], args.only)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", other], cwd=HERE, check=True)
    print("\n".join(said) or f"equal to {args.rev}")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())

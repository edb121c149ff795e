"""The gate before a kernel is run or timed: it refuses those that fail any check.

`require_right` stands before a program that is trained, profiled or generated with: each kernel on small awkward sizes
and at each size that the program has. What passed is remembered on disk by all that it depends on: what the kernel's
machine code is made of, the sizes, the number of threads, the versions, the machine, and the judge itself. Plain Python
is judged each time, since it has no such hash. `require_quick` stands before and after two kernels are compared, and
`timed` judges the arrays that they are compared on. `planned` lists all awkward cases of an op and those of a model,
and `run` takes a kernel through a plan, in this process or in another.

A kernel of a user's file is judged in a process of its own (`judging`), which it may end or hang. The file is loaded
there first: what it does to that process is known before it is loaded here.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache as once
from functools import partial
from math import inf, nan, prod
from pathlib import Path
from time import perf_counter
from typing import Any

from ..errors import UNCHECKED, WRONG, RefusedError, UserError
from ..files import cache_folder, read_entry, write_entry
from ..files.reading import to_json
from ..isolate.child import Child
from ..kernels import ADDED, load_all
from ..kernels.compile import cache
from ..kernels.registry import Kernel
from ..machine import describe, peak_rss_bytes
from ..measure.rates import machine_id
from ..ops.declaration import Op
from ..program.arena import gb
from ..program.program import Call
from ..wording import count
from . import worker
from .cases import INTERPRETED, Case, calls_alike, cases, elements, quick_cases, run_of
from .check import check, check_quick
from .judge import PACKAGE, ours
from .result import MARGINAL, TOO_LARGE, WORDS, Result, refuse
from .sized import most_sized

MOST_FLOATS = 1 << 26
"""Larger cases, in elements, are left out: the reference would take a gigabyte for each of several copies."""
DEAR_FLOPS = 2e9
"""FLOPs from which a program's call is compared with the formula in float32, as before a run."""


def require_right(
    kernels: Iterable[Kernel], calls: Sequence[tuple[Kernel, Case]] = (), *, threads: int, child: Child | None = None
) -> list[Result]:
    """Judge kernels on the quick cases, and at the sizes of their calls, as far as no judgement is remembered.

    Parameters
    ----------
    calls : the calls of a program that are judged at their size, each with its kernel.
    child : the process that has users' files of kernels loaded and judges them; without it they are judged here.

    Returns
    -------
    The results; ``unchecked`` for calls that are too large to be judged at their size.

    Raises
    ------
    RefusedError
        Naming the kernel, the element that is wrong, and both values.
    """
    found: list[Result] = []
    for kernel in dict.fromkeys(kernels):
        digest = cache.digest(kernel.function)
        cases = quick_cases(kernel.op, kernel.types, kernel.skips) + [c for k, c in calls if k == kernel]
        for case in {f"{c} {c.sized}": c for c in cases}.values():
            if case.sized and elements(kernel.op, case) > most_sized(kernel.op):
                found.append(Result(kernel.name, case, nan, reason=TOO_LARGE))
                continue
            key = key_of(kernel, digest, case, threads)
            result = recall(key, case)
            if result is None:
                there = child if in_file(kernel, child) else None
                if there:
                    require_same_text(kernel, there)
                asked = in_child(there, kernel, (threads,)) if there else partial(check, kernel, threads=(threads,))
                result = asked(case)
                assert result is not None
                refuse(result, "nothing is run with it")
                remember(key, result)
            found.append(result)
    return found


def notes(results: Sequence[Result]) -> list[str]:
    """Return notes on the time and memory that judging took, and on the calls that were not judged."""
    found, now = [], [r for r in results if r.seconds]
    if now:
        seconds = sum(r.seconds for r in now)
        found.append(
            f"kernels judged on {count(len(now), 'case')} in {seconds:.1f} s and {gb(peak_rss_bytes())}, and the "
            "results are kept"
        )
    if marginal := sorted({r.kernel for r in results if r.verdict == MARGINAL}):
        found.append(f"{MARGINAL}: {', '.join(marginal)}: {WORDS[MARGINAL]}")
    if large := [f"{r.kernel}  {r.case}" for r in results if r.reason == TOO_LARGE]:
        found.append(f"too large to be judged at their size: {', '.join(large)}")
    return found


Judging = Callable[[Case], Result | None]
"""A function that judges a kernel on a case, here or elsewhere; None for types that the kernel does not take."""


def in_child(child: Child, kernel: Kernel | tuple[str, str], threads: Sequence[int], seed: int = 0) -> Judging:
    """Return the function that judges a kernel, or one of an op and a variant, in the process that has its file."""
    op, variant = (kernel.op.name, kernel.variant) if isinstance(kernel, Kernel) else kernel

    def judge(case: Case) -> Result | None:
        start, asked = perf_counter(), {"op": op, "variant": variant, "case": to_json(case)}
        try:
            answer = child.ask("check", **asked, threads=list(threads), seed=seed)["result"]
        except UserError as e:  # it ended the process, or gave no answer in time
            word, took = getattr(e, "word", WRONG), perf_counter() - start
            lost = nan if word == UNCHECKED else inf
            return Result(f"{op}[{variant}]", case, lost, reason=str(e), fault=word, ended=True, seconds=took)
        return answer and replace(Result.from_json(answer, case), seconds=perf_counter() - start)

    return judge


def run(
    cases: Iterable[Case],
    judge: Judging,
    *,
    tick: Callable[[Case], None] = lambda case: None,
    until_refused: bool = False,
) -> list[Result]:
    """Judge a kernel on the cases of a plan. One that ended its process, or gave no answer, is not tried again.

    Parameters
    ----------
    tick : called before each case.
    until_refused : whether the other cases are left out after the first that refuses the kernel.
    """
    found: list[Result] = []
    for case in cases:
        tick(case)
        if (result := judge(case)) is not None:
            found.append(result)
            if result.ended or (until_refused and result.refused):
                break
    return found


def in_file(kernel: Kernel, child: Child | None) -> bool:
    """Return whether a kernel came with the files that a process has loaded; a caller's own is only here."""
    if child is None:
        return False
    return (kernel.op.name, kernel.variant) in ADDED or kernel.file in child.kernels


def require_same_text(kernel: Kernel, child: Child) -> None:
    """Require that the process which judges a kernel has the same one, constants of its module included.

    Raises
    ------
    RefusedError
        For a file that is another one each time that it is imported.
    """
    there = [k["text"] for k in child.start() if (k["op"], k["variant"]) == (kernel.op.name, kernel.variant)]
    if there and there[0] != cache.fingerprint(kernel.function):
        raise RefusedError(
            f"{kernel.name} is not the same in the process that judges it and in this one, so nothing is run with it: "
            f"its file computes something at import that differs, such as a random number  [{kernel.where}]"
        )


def judging(files: Sequence[str], threads: int) -> Child:
    """Return a process that loads users' files and judges their kernels, once it is asked."""
    return Child(worker.__name__, files, threads)


def load_files(files: Sequence[str], threads: int) -> None:
    """Load users' files of kernels here, once they are known to load in a process of their own.

    Raises
    ------
    UserError
        For a file that cannot be loaded, changes the process, or ends it.
    """
    with judging(files, threads) as child:
        require_loadable(child)
    load_all(files)


def require_loadable(child: Child) -> None:
    """Load users' files in a process of their own, unless they are known to load.

    Raises
    ------
    UserError
        For a file that cannot be loaded, or that ends the process.
    """
    keys = [hashlib.sha256(os.fsencode(file) + judge_itself().encode()).hexdigest() for file in child.kernels]
    folder = cache_folder("judged")
    if all(unchanged(folder / f"{key}.files", file) for key, file in zip(keys, child.kernels, strict=True)):
        return
    child.start()
    with suppress(OSError):
        text = json.dumps({file: digest_of(file) for file in {*child.files, *child.kernels}}).encode()
        for key in keys:
            write_entry(folder / f"{key}.files", text)


def unchanged(entry: Path, file: str) -> bool:
    """Return whether a file, and all that it imported from beside it, are as when an entry was written."""
    with suppress(OSError, ValueError, AttributeError):
        known = json.loads(read_entry(entry) or b"{}")
        return file in known and all(digest_of(f) == digest for f, digest in known.items())
    return False


def digest_of(file: str) -> str:
    """Return a digest of a file's content."""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def require_quick(kernels: Sequence[Kernel], threads: int) -> list[dict[str, Any]]:
    """Check kernels on the quick cases, without earlier judgements; no time is reported for a wrong one."""
    results = check_quick(dict.fromkeys(kernels), threads=(threads,))
    for r in results:
        refuse(r, "it is not timed")
    return [r.describe() for r in results]


@once
def judge_itself() -> str:
    """Return a digest of the dependencies of a judgement besides the kernel: judge, declarations, versions, machine."""
    files = sorted((PACKAGE / "ops").glob("*.py"))
    names = ("cases", "check", "fit", "judge", "memory", "result", "scalars", "sized")
    files += [PACKAGE / "check" / f"{name}.py" for name in names]
    text = b"".join(f.read_bytes() for f in files) + json.dumps(describe()["versions"], sort_keys=True).encode()
    return hashlib.sha256(text + machine_id().encode()).hexdigest()


def key_of(kernel: Kernel, digest: str, case: Case, threads: int, on: str = "") -> str:
    """Return the name of a judgement of a kernel with a `cache.digest`; empty if it cannot be remembered."""
    if digest == "unknown" or not (ours(kernel) or hasattr(kernel.function, "py_func")):
        return ""
    with suppress(Exception):
        what = [kernel.name, digest, kernel.work(case.sizes), kernel.same_bits, case.sized, str(case), threads, on]
        what.append(declared(kernel.op))
        return hashlib.sha256(json.dumps([judge_itself(), *what]).encode()).hexdigest()
    return ""


def declared(op: Op) -> str:
    """Return a digest of a user's declaration and reference; empty for the package's, which `judge_itself` covers.

    Raises
    ------
    ValueError
        For a reference that cannot be hashed.
    """
    if op.reference.__module__.startswith("cpuopt.ops."):
        return ""
    forward = (op.inverts or op).reference
    digest = cache.digest(getattr(forward, "kernel", op.reference))
    if digest == "unknown":
        raise ValueError(f"the reference of {op.name} cannot be hashed")
    return f"{op.args} {digest}"


def recall(key: str, case: Case) -> Result | None:
    """Return a remembered judgement; None if there is none, or its file is damaged."""
    with suppress(ValueError, KeyError, TypeError):
        content = json.loads((read_entry(cache_folder("judged") / f"{key}.result") if key else None) or b"{}")
        found = Result.from_json(content["result"], case)
        return found if content["key"] == key and not found.refused else None
    return None


def remember(key: str, result: Result) -> None:
    """Keep a judgement, if the disk allows it."""
    if key:
        text = json.dumps({"key": key, "result": to_json(result.to_json())})
        write_entry(cache_folder("judged") / f"{key}.result", text.encode(), durable=False)


def is_large(op: Op, case: Case) -> bool:
    """Return whether the float64 reference of a call takes too long, or too much memory."""
    return not fits(op, case) or op.flops(case.sizes) > DEAR_FLOPS


def fits(op: Op, case: Case) -> bool:
    """Return whether the float64 reference of a call can be called as often as `check` does."""
    return elements(op, case) <= MOST_FLOATS and not (run_of(op) and prod(case.sizes.values()) > INTERPRETED)


def planned(
    op: Op, calls: Iterable[Call] = (), more: Iterable[Case] = (), quick: bool = False
) -> tuple[list[Case], int]:
    """List the cases of an op that a kernel has to pass: the awkward ones, those of a program's calls, and given ones.

    Each call is judged at its size, as before a run, and with all flags by the float64 reference if it is small enough.

    Returns
    -------
    The cases, and the number of those that are left out: too large for either, or for a reference in plain Python.
    """
    alike = calls_alike(c for c in calls if c.op is op)
    sized = [c for c in alike if elements(op, c) <= most_sized(op)]
    rest = [*(quick_cases(op) if quick else cases(op)), *(c.plain() for c in alike if not is_large(op, c)), *more]
    rest = list({str(c): c for c in rest}.values())
    fit = [c for c in rest if fits(op, c)]
    return fit + sized, len(rest) - len(fit) + len(alike) - len(sized)

"""The gate before every measurement of speed: it refuses kernels that fail any check.

`require_right` stands before a program that is trained, profiled or generated with: each kernel on small awkward sizes
(`check`) and at each size that the program has (`sized`). What passed is remembered on disk by all that it depends on:
what the kernel's machine code is made of, the sizes, the number of threads, the versions, the machine, and the judge
itself. Plain Python is judged each time, since it has no such hash. `require_quick` stands
before and after two kernels are compared, and `timed` judges the arrays that they are compared on. `conform` takes
kernels through all awkward cases; it refuses nothing, and reports.

A kernel of a user's file is judged in a process of its own (`judging`), which it may end or hang. The file is loaded
there first: what it does to that process is known before it is loaded here.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache as once
from math import inf, nan, prod
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import cache_folder, read_entry, write_entry
from ..files.reading import to_json
from ..isolate.child import Asked, Child
from ..isolate.process import LateError
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
from .cases import INTERPRETED, Case, cases, elements, quick_cases, run_of
from .check import check, check_all
from .judge import MARGIN, PACKAGE, CheckResult, ours, worst
from .sized import Sized, check_sized, most_sized

MOST_FLOATS = 1 << 26
"""Larger cases, in elements, are left out: the reference would take a gigabyte for each of several copies."""
DEAR_FLOPS = 2e9
"""FLOPs from which a program's call is compared with the formula in float32, as before a run."""


@dataclass
class Judged:
    """The results of judging.

    Attributes
    ----------
    judged : the number of cases judged now; the others were remembered.
    peak_bytes : the most memory that this process had held when they were judged.
    left_out : calls that are too large to be judged at their size.
    """

    results: list[CheckResult] = field(default_factory=list)
    judged: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0
    left_out: list[str] = field(default_factory=list)

    def notes(self) -> list[str]:
        """Return notes on the time that it took, and on the calls that were not judged."""
        found = []
        if self.judged:
            found.append(
                f"kernels judged on {count(self.judged, 'case')} in {self.seconds:.1f} s and {gb(self.peak_bytes)}, "
                "and the results are kept"
            )
        if marginal := sorted({r.kernel for r in self.results if r.verdict == "MARGINAL"}):
            found.append(
                f"MARGINAL: {', '.join(marginal)}: farther off than rounding explains, by no more than {MARGIN:g} times"
            )
        if self.left_out:
            found.append(f"too large to be judged at their size: {', '.join(self.left_out)}")
        return found


def sized_of(calls: Iterable[Call], kernels: Iterable[Kernel]) -> list[Sized]:
    """List the distinct calls of a program's kernels."""
    found = {}
    for call, kernel in zip(calls, kernels, strict=True):
        sized = Sized(kernel, Case.of(call), dict(call.adds))
        found[str(sized)] = sized
    return list(found.values())


def require_right(
    kernels: Iterable[Kernel],
    sizes: Sequence[Sized] = (),
    *,
    threads: int,
    child: Child | None = None,
) -> Judged:
    """Judge kernels on the quick cases, and at the sizes given, as far as no earlier judgement is remembered.

    Parameters
    ----------
    child : the process that has users' files of kernels loaded and judges them; without it they are judged here.

    Raises
    ------
    UserError
        Naming the kernel, the element that is wrong, and both values.
    """
    start, found = time.perf_counter(), Judged()
    for kernel in dict.fromkeys(kernels):
        digest = cache.digest(kernel.function)
        mine: list[Case | Sized] = [*quick_cases(kernel.op, kernel.types, kernel.skips)]
        mine += [s for s in sizes if s.kernel == kernel]
        for case in mine:
            if isinstance(case, Sized) and case.elements > most_sized(kernel.op):
                found.left_out.append(str(case))
                continue
            key = key_of(kernel, digest, case, threads)
            result = recall(key, case)
            if result is None:
                if child and in_file(kernel, child):
                    require_same_text(kernel, child)
                result = judge(kernel, case, threads, child if in_file(kernel, child) else None)
                found.judged += 1
                refuse(result, "nothing is run with it")
                remember(key, result)
            found.results.append(result)
    found.seconds = time.perf_counter() - start
    if found.judged:
        found.peak_bytes = peak_rss_bytes()
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
    UserError
        For a file that is another one each time that it is imported.
    """
    there = [k["text"] for k in child.start() if (k["op"], k["variant"]) == (kernel.op.name, kernel.variant)]
    if there and there[0] != cache.fingerprint(kernel.function):
        raise UserError(
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


def judge(kernel: Kernel, case: Case | Sized, threads: int, child: Child | None) -> CheckResult:
    """Judge a kernel on one case, in a process of its own if one is given."""
    if child is None:
        return check_sized(case, threads) if isinstance(case, Sized) else check(kernel, case, threads=(threads,))
    plain, adds = (case.case, case.adds) if isinstance(case, Sized) else (case, None)
    try:
        result = ask(child, kernel.op.name, kernel.variant, plain, (threads,), adds=adds)
        assert result
        return result
    except UserError as e:
        return unanswered(kernel.name, plain, e)


def unanswered(kernel: str, case: Case, e: UserError) -> CheckResult:
    """Return the result of a kernel that ended its process, or UNCHECKED if there was no answer in time."""
    return CheckResult(kernel, case, nan if isinstance(e, LateError) else inf, reason=str(e))


def ask(
    child: Asked,
    op: str,
    variant: str,
    case: Case,
    threads: Sequence[int],
    seed: int = 0,
    adds: Mapping[str, bool] | None = None,
) -> CheckResult | None:
    """Check a kernel in another process, at its size if the flags of gradients are given.

    Returns
    -------
    None if the kernel does not take the types of the case.

    Raises
    ------
    UserError
        For a kernel that ends the process, or hangs.
    """
    asked = case.to_json() | ({} if adds is None else {"adds": dict(adds)})
    answer = child.ask("check", op=op, variant=variant, case=asked, threads=list(threads), seed=seed)
    return CheckResult.from_json(answer["result"], case) if answer["result"] else None


def refuse(result: CheckResult, so: str) -> None:
    """Raise for a kernel that is wrong, or was not judged.

    Raises
    ------
    UserError
        Naming the kernel, the element that is wrong, and both values.
    """
    if result.refused:
        found = "is wrong" if result.verdict == "FAIL" else "was not judged"
        raise UserError(f"{result.kernel} {found}, so {so}: {result.reason} ({result.case})")


def require_quick(kernels: Sequence[Kernel], threads: int) -> list[dict[str, Any]]:
    """Check kernels on the quick cases, without earlier judgements; no time is reported for a wrong one."""
    results = check_all(dict.fromkeys(kernels), quick=True, threads=(threads,))
    for r in results:
        refuse(r, "it is not timed")
    return [r.describe() for r in results]


@once
def judge_itself() -> str:
    """Return a digest of the dependencies of a judgement besides the kernel: judge, declarations, versions, machine."""
    files = sorted((PACKAGE / "ops").glob("*.py"))
    names = ("cases", "check", "fit", "judge", "memory", "scalars", "sized")
    files += [PACKAGE / "check" / f"{name}.py" for name in names]
    text = b"".join(f.read_bytes() for f in files) + json.dumps(describe()["versions"], sort_keys=True).encode()
    return hashlib.sha256(text + machine_id().encode()).hexdigest()


def key_of(kernel: Kernel, digest: str, case: Case | Sized, threads: int, on: str = "") -> str:
    """Return the name of a judgement of a kernel with a `cache.digest`; empty if it cannot be remembered."""
    if digest == "unknown" or not (ours(kernel) or hasattr(kernel.function, "py_func")):
        return ""
    sizes = case.case.sizes if isinstance(case, Sized) else case.sizes
    with suppress(Exception):
        what = [kernel.name, digest, kernel.work(sizes), kernel.same_bits, type(case).__name__, str(case), threads, on]
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


def recall(key: str, case: Case | Sized) -> CheckResult | None:
    """Return a remembered judgement; None if there is none, or its file is damaged."""
    with suppress(ValueError, KeyError, TypeError):
        content = json.loads((read_entry(cache_folder("judged") / f"{key}.result") if key else None) or b"{}")
        found = CheckResult.from_json(content["result"], case.case if isinstance(case, Sized) else case)
        return found if content["key"] == key and found.ratio < inf else None
    return None


def remember(key: str, result: CheckResult) -> None:
    """Keep a judgement, if the disk allows it."""
    if key:
        text = json.dumps({"key": key, "result": to_json(result.to_json())})
        write_entry(cache_folder("judged") / f"{key}.result", text.encode(), durable=False)


@dataclass
class GateVerdict:
    """The results of all checks of one kernel.

    Attributes
    ----------
    worst : the result with the largest ratio.
    skipped : cases that are too large for the float64 reference.
    """

    op: str
    variant: str
    results: list[CheckResult] = field(default_factory=list)
    skipped: int = 0

    @property
    def worst(self) -> CheckResult:
        """The result with the largest ratio."""
        return worst(self.results)

    @property
    def scratch(self) -> float:
        """The most elements of scratch for each element of the arrays."""
        return max((r.scratch for r in self.results), default=0.0)

    def to_json(self) -> dict[str, Any]:
        """Return the results for ``--json``."""
        worst = self.worst.to_json()
        return {
            "op": self.op,
            "variant": self.variant,
            "verdict": self.worst.verdict,
            "ratio": worst["ratio"],
            "worst": worst,
            "cases": [r.to_json() for r in self.results],
            "skipped": self.skipped,
            "scratch": self.scratch,
        }


def is_large(op: Op, case: Case) -> bool:
    """Return whether the float64 reference of a call takes too long, or too much memory."""
    return not fits(op, case) or op.flops(case.sizes) > DEAR_FLOPS


def fits(op: Op, case: Case) -> bool:
    """Return whether the float64 reference of a call can be called as often as `check` does."""
    return elements(op, case) <= MOST_FLOATS and not (run_of(op) and prod(case.sizes.values()) > INTERPRETED)


def model_cases(op: Op, calls: Iterable[Call]) -> list[Case]:
    """List the sizes at which a program calls an op, each once."""
    found = [Case.of(c) for c in calls if c.op is op]
    return list({str(case): case for case in found}.values())


@dataclass(frozen=True)
class Planned:
    """The cases of an op, the calls that are too large for the float64 reference, and the number of those left out.

    Attributes
    ----------
    sized : such a call's case with the flags of its gradients, for `check_sized`.
    """

    cases: list[Case]
    skipped: int = 0
    sized: list[tuple[Case, dict[str, bool]]] = field(default_factory=list)

    @staticmethod
    def of(op: Op, calls: Iterable[Call] = (), sizes: Iterable[Case] = (), quick: bool = False) -> Planned:
        """Plan the cases of an op, including those of a program's calls and at given sizes."""
        calls = list(calls)
        every = [*(quick_cases(op) if quick else cases(op)), *model_cases(op, calls), *sizes]
        mine = {f"{Case.of(c)} {c.adds}": (Case.of(c), dict(c.adds)) for c in calls if c.op is op}
        sized = [(c, adds) for c, adds in mine.values() if is_large(op, c) and elements(op, c) <= most_sized(op)]
        rest = [c for c in every if all(str(c) != str(s) for s, _ in sized)]
        fit = [c for c in rest if fits(op, c)]
        return Planned(fit, len(rest) - len(fit), sized)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON."""
        sized = [{"case": c.to_json(), "adds": adds} for c, adds in self.sized]
        return {"cases": [c.to_json() for c in self.cases], "skipped": self.skipped, "sized": sized}

    @staticmethod
    def from_json(d: Mapping[str, Any]) -> Planned:
        """Build a plan from the result of `to_json`."""
        sized = [(Case.from_json(s["case"]), dict(s["adds"])) for s in d["sized"]]
        return Planned([Case.from_json(c) for c in d["cases"]], d["skipped"], sized)


def conform(
    child: Asked,
    wanted: Sequence[tuple[str, str]],
    planned: Mapping[str, Planned],
    *,
    threads: Sequence[int] = (1, 2),
    seed: int = 0,
    tick: Callable[[str], None] = lambda text: None,
    stop_at_failure: bool = False,
) -> list[GateVerdict]:
    """Check kernels; one that crashes fails, one that hangs is UNCHECKED, and the others are checked all the same.

    Parameters
    ----------
    child : the process that has their files loaded.
    wanted : op and variant of each, by name.
    planned : the cases of each op, by its name.
    tick : called before each case.
    stop_at_failure : whether a kernel's other cases are left out after the first that fails.
    """
    found = []
    for op, variant in wanted:
        verdict = GateVerdict(op, variant, skipped=planned[op].skipped)
        small: list[tuple[Case, dict[str, bool] | None]] = [(case, None) for case in planned[op].cases]
        for case, adds in [*small, *planned[op].sized]:
            tick(f"{op}[{variant}]  {case}")
            try:
                if (result := ask(child, op, variant, case, threads, seed, adds)) is None:
                    continue
                verdict.results.append(result)
            except UserError as e:  # it crashed or hung, and would do so in every other case
                verdict.results.append(unanswered(f"{op}[{variant}]", case, e))
                break
            if stop_at_failure and verdict.results[-1].refused:
                break
        found.append(verdict)
    return found

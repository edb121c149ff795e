"""The gate of a pull request: each kernel whose machine code differs between two commits is checked and compared.

Whole training steps can be compared beside them.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from ..check.cases import Case, calls_alike, elements
from ..check.gate import judge_itself
from ..check.memory import rooms
from ..check.result import RIGHT, exit_status
from ..errors import UNCHECKED, RefusedError, UserError
from ..files import cache_folder, read_entry, write_entry
from ..files.reading import to_json
from ..kernels.registry import BASE
from ..measure.comparison import analyses_up_to
from ..ops.declaration import Op
from ..ops.storage import WIDE
from ..program.program import Call
from ..train.job import Settings, build_only
from ..wording import count
from . import commit_worker
from .ab import case_at, compare_steps, op_named, usual_sizes
from .commits import PACKAGE, CommitPair, FarSteps, Say, Tree, commit_of, differences, extract, git, repository
from .peers.plan import parse_sizes
from .peers.suite import SUITE

USUAL = "4x64"
"""The size of steps, if none is given."""
WORKTREE = "working tree"
"""The name of the files as they lie in the working directory's repository."""
MOST_FLOPS, MOST_NAIVE = 2e9, 5e7
"""FLOPs of the largest call that is compared, and of a vanilla kernel's, which may take a hundred times as long."""
MOST_FLOATS = 1 << 26
"""Elements of the arrays of the largest call that is compared."""
STEP = "step"
"""What stands in place of an op in the row of a whole training step; its variant is the model."""
SLOWER, INCONCLUSIVE = "slower", "inconclusive"
DIFFERENT = (SLOWER, "faster")
Row = dict[str, Any]


@dataclass(frozen=True)
class GatePlan:
    """What the gate compares.

    Attributes
    ----------
    base, head : the commits; an empty head is the working tree.
    percent : how much slower a kernel or a step may be.
    only : a glob of the names of kernels.
    steps, sizes : a model whose whole training steps are compared, too, and their sizes, rows by tokens.
    rounds : the largest number of rounds of a comparison.
    limit_s : seconds for one answer of a process.
    """

    base: str
    head: str = ""
    percent: float = 1.0
    threads: int = 1
    only: str = "*"
    steps: str = ""
    sizes: str = USUAL
    rounds: int = 48
    limit_s: float = 600.0
    seed: int = 0


def run(plan: GatePlan, say: Say = lambda text: None) -> dict[str, Any]:
    """Compare two commits, and return the record: ``rows``, and the exit ``status``.

    Raises
    ------
    UserError
        If git or a commit is missing, a commit is too old, no kernel has a name to compare, or this is no checkout.
    """
    if not ((top := repository("gate")) / PACKAGE / "kernels").is_dir():
        raise UserError(f"gate: {top} is no checkout of {PACKAGE}: it has no folder {PACKAGE}/kernels; run it in one")
    if not commit_worker.typed(plan.only):
        raise UserError(f"--only {plan.only!r}: no kernel has such a name; expected a glob, as in 'gelu*'")
    jobs: list[dict[str, Any]] = []
    if plan.steps:
        jobs = [{"model": plan.steps, "B": B, "T": T} for B, T in parse_sizes(plan.sizes)]
    for job in jobs:
        Settings(**job).sized()  # a model that is not known is refused before anything is compiled
    say("reading commits")
    names = {plan.base: commit_of(plan.base, f"--base {plan.base!r}")}
    head = plan.head or WORKTREE
    names[head] = commit_of(plan.head, f"--head {plan.head!r}") if plan.head else ""
    found: dict[str, Any] = {**to_json(plan), "head": head, "commits": names}
    found |= {"kernels": 0, "gone": [], "new": [], "rows": []}
    if changed(names[plan.base], names[head]):
        with tempfile.TemporaryDirectory(prefix="cpuopt-gate-") as folder:
            folders = {
                name: extract(commit, Path(folder) / str(i), name, PACKAGE) if commit else repository("--head")
                for i, (name, commit) in enumerate(names.items())
            }
            differ = differences(folders, plan.only, say=say, limit_s=plan.limit_s)
            found |= {"kernels": differ.count, "gone": list(differ.gone), "new": list(differ.new)}
            for i, (name, codes) in enumerate(differ.codes.items(), 1):

                def told(text: str, at: str = f"{i} of {len(differ.codes)}: {name}") -> None:
                    say(f"{at}, {text}")

                for row in rows_of(plan, name, codes, folders, told):
                    found["rows"].append({**row, "why": differ.sources[name], "codes": list(codes)})
            why = count(len(differ.codes), "kernel")
            found["rows"] += [{**step_row(plan, job, folders, say), "why": why} for job in jobs]
    return found | {"status": status(found["rows"], plan.percent)}


def changed(base: str, head: str) -> list[str]:
    """List the files of the package's Python that differ; an empty head is the working tree."""
    top = ["-C", str(repository("gate"))]
    found = git(*top, "diff", "--name-only", base, *([head] if head else []), "--", PACKAGE, what="gate")
    if not head:
        found += git(*top, "ls-files", "--others", "--exclude-standard", "--", PACKAGE, what="gate")
    return [name for name in found.decode().splitlines() if name.strip('"').endswith(".py")]


def rows_of(plan: GatePlan, name: str, codes: Sequence[str], folders: Mapping[str, Path], say: Say) -> list[Row]:
    """Check a kernel, and compare both versions of it at each size whose result is not kept."""
    full, *typed = name.split(" ")
    op_name, _, variant = full.rstrip("]").partition("[")
    op, types = op_named(op_name), dict(word.split(":") for word in typed)
    rows, how = list[Row](), Row(op=op, variant=variant, folders=folders, say=say)
    for shape in shapes_of(op, types, variant):
        head = {"op": op_name, "variant": variant, "types": types, "sizes": dict(shape.sizes)}
        row = result(plan, head, codes, str(shape), partial(measured, **how, shape=shape))
        rows.append(head | row)
        if "ratio" not in row and row["verdict"] != RIGHT:
            break
    return rows


def step_row(plan: GatePlan, job: Mapping[str, Any], folders: Mapping[str, Path], say: Say) -> Row:
    """Compare whole training steps of both trees, unless the result is kept."""
    sizes = {name: job[name] for name in "BT"}
    head = {"op": STEP, "variant": job["model"], "types": {}, "sizes": sizes}
    return head | result(plan, head, digests(folders), "", partial(measured_steps, job=job, folders=folders, say=say))


def digests(folders: Mapping[str, Path]) -> list[str]:
    """Return the digest of the package's Python files in each folder."""
    found = []
    for top in folders.values():
        files = sorted((top / PACKAGE).rglob("*.py"))
        each = [(str(file.relative_to(top)), hashlib.sha256(file.read_bytes()).hexdigest()) for file in files]
        found.append(hashlib.sha256(json.dumps(each).encode()).hexdigest())
    return found


def result(plan: GatePlan, head: Row, codes: Sequence[str], shape: str, measure: Callable[[GatePlan], Row]) -> Row:
    """Return a result that is kept, or measure and keep it."""
    key = key_of(plan, head, codes, shape)
    if (row := recall(key)) is not None:
        return row
    row = compared(plan, measure)
    if "ratio" in row and row.pop("codes", [*codes]) != [*codes]:
        row = {"verdict": UNCHECKED, "reason": "a file changed while the gate ran; run it again"}
    if row["verdict"] != INCONCLUSIVE and "ratio" in row:
        write_entry(cache_folder("gate") / f"{key}.json", json.dumps(to_json(row)).encode(), durable=False)
    return row


def compared(plan: GatePlan, measure: Callable[[GatePlan], Row]) -> Row:
    """Compare both versions; a difference is measured again by new processes, and must be the same."""
    row = measure(plan)
    if (first := row["verdict"]) in DIFFERENT:
        row = measure(replace(plan, seed=plan.seed + 1))
        if row["verdict"] in DIFFERENT and row["verdict"] != first:
            row |= {"verdict": INCONCLUSIVE, "reason": f"{first}, and {row['verdict']} when measured again"}
    return row


def measured(plan: GatePlan, op: Op, variant: str, shape: Case, folders: Mapping[str, Path], say: Say) -> Row:
    """Check the newer kernel, then compare it with the older one, in new processes."""
    a, b = (f"{name}:{variant}" for name in folders)
    try:
        with CommitPair(op.name, (a, b), plan.threads, plan.limit_s, say, folders) as pair:
            with rooms(pair.shared.room):
                pair.require([pair.both[1].typed(shape.types)], plan.threads)
            settings = {"B": 1, "T": 1, "threads": plan.threads}
            asked = {"op": op.name, "variants": [a, b], "layer": "*", "in_step": False, "flush": False}
            more = {"seed": plan.seed, "analyses": analyses_up_to(plan.rounds), "shapes": [to_json(shape)]}
            found = pair.ask("ab", settings=settings, **asked, **more)
    except RefusedError as e:
        if f"[{a}]" in str(e):
            return {"verdict": RIGHT, "reason": f"not compared, because the older kernel is refused: {e}"}
        return {"verdict": e.word, "reason": str(e)}
    return row_of(found, found["cases"][0], found["doubts"]) | {"codes": [*found["codes"].values()]}  # of one call


def measured_steps(plan: GatePlan, job: Mapping[str, Any], folders: Mapping[str, Path], say: Say) -> Row:
    """Compare whole training steps in new processes; other losses than those of the base are wrong."""
    try:
        with ExitStack() as stack:
            trees = [Tree(name, folder, plan.threads, None, plan.limit_s, say) for name, folder in folders.items()]
            for tree in trees:
                stack.enter_context(tree.worker)
            pair = FarSteps(trees, {**job, "threads": plan.threads, "seed": plan.seed}, say=say)
            a, b = folders
            found, _ = compare_steps(pair, (a, b), plan.seed, analyses_up_to(plan.rounds), say)
    except RefusedError as e:
        return {"verdict": e.word, "reason": str(e)}
    return row_of(found["step"], found["step"], found["doubts"]) | {"codes": digests(folders)}


def row_of(verdict: Mapping[str, Any], times: Mapping[str, Any], doubts: Sequence[str]) -> Row:
    """Return the part of a row that was measured; a difference with doubts is none."""
    row = {name: verdict[name] for name in ("verdict", "ratio", "control", "level")}
    row |= {f"{side}_ms": times[f"{side}_ns"] / 1e6 for side in "ab"}
    if doubts and row["verdict"] in DIFFERENT:
        return {**row, "verdict": INCONCLUSIVE, "reason": f"the machine is busy: {doubts[0]}"}
    return {**row, "reason": verdict["why"]}


def key_of(plan: GatePlan, head: Mapping[str, Any], codes: Sequence[str], shape: str) -> str:
    """Return the name of a result: by both digests of the code, the call or the step, the machine and the judge."""
    what = [judge_itself(), head, codes, shape, plan.threads, plan.rounds]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def recall(key: str) -> Row | None:
    """Return a result that is kept; None if it is missing."""
    with suppress(ValueError):
        found = json.loads(read_entry(cache_folder("gate") / f"{key}.json") or b"null")
        return {**found, "kept": True} if isinstance(found, dict) else None
    return None


def shapes_of(op: Op, types: Mapping[str, str], variant: str) -> list[Case]:
    """List the smallest and the largest call of an op in the suite's models; without any, one at GPT-2's widths."""
    calls = [c for c in suite_calls("bf16" if types else WIDE) if c.op is op and dict(c.types) == dict(types)]
    most = MOST_NAIVE if variant == BASE else MOST_FLOPS
    every = calls_alike(calls) or [replace(case_at(op, usual_sizes(op, 1, 16)), types=types)]
    every.sort(key=lambda c: (op.flops(c.sizes), elements(op, c)))
    fit = [c for c in every if op.flops(c.sizes) <= most and elements(op, c) <= MOST_FLOATS] or every[:1]
    return [fit[0], *([fit[-1]] if len(fit) > 1 else [])]


@cache
def suite_calls(dtype: str) -> list[Call]:
    """List the calls of the suite's models, with rewrites and without."""
    jobs = [Settings(model=m, B=B, T=T, dtype=dtype) for m, sizes in SUITE.items() for B, T in parse_sizes(sizes)]
    built = [build_only(replace(job, fuse=fuse)) for job in jobs for fuse in ("none", "all")]
    return [c for b in built for c in b.program.calls]


def is_slower(row: Row, percent: float) -> bool:
    """Return whether a kernel is slower by more than some percent, with confidence."""
    return bool(row["verdict"] == SLOWER and row["ratio"]["low"] > 1 + percent / 100)


def is_noisy(row: Row, percent: float) -> bool:
    """Return whether the machine was too noisy to tell."""
    return bool(row["verdict"] == INCONCLUSIVE and row["ratio"]["high"] > 1 + percent / 100)


def status(rows: Iterable[Row], percent: float) -> int:
    """Return the exit status: 1 if a kernel is refused or slower, 3 if one is unchecked or the machine too noisy."""
    rows = list(rows)
    words = [UNCHECKED if is_noisy(row, percent) else row["verdict"] for row in rows]
    return 1 if any(is_slower(row, percent) for row in rows) else exit_status(words)

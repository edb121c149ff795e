"""Kernels of commits of a git repository, each compiled by the package of its commit, in a process of its own.

No checkout is touched: git writes the files of a commit into a temporary folder. The processes call their kernels on
arrays in shared memory, and this one checks and compares them by the declarations and references of its own package.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

from ..check import gate
from ..check.cases import cases, quick_cases
from ..check.check import check
from ..check.memory import rooms
from ..check.result import Result, refuse
from ..errors import UNCHECKED, RefusedError, UserError
from ..isolate.process import ROOT, EndedError, Side, Worker
from ..kernels.registry import Kernel
from ..machine import OTHERS, Others, cores
from ..ops.declaration import Op
from ..train.job import Settings
from . import commit_worker
from .ab import InStep, of_op, op_named
from .remote import ROOM, AloneRemote, Far, KernelProcess, Shared
from .worker import compared

PACKAGE = "cpuopt"
OLDEST = "25 November 2026"
"""The day of the oldest commits whose package has all names that `commit_worker` uses."""
Say = Callable[[str], None]


def git(*words: str, what: str) -> bytes:
    """Run git in the working directory, and return what it prints.

    Parameters
    ----------
    what : the first words of an error.

    Raises
    ------
    UserError
        If git is not installed, or fails.
    """
    try:
        done = subprocess.run(["git", *words], capture_output=True, timeout=120)
    except OSError as e:
        raise UserError(f"{what}: git cannot be started ({e.strerror}); install it") from e
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise UserError(f"{what}: {(lines or ['git failed'])[0]}")
    return done.stdout


def repository(what: str) -> Path:
    """Return the top folder of the repository of the working directory; raise `UserError` outside of one."""
    return Path(os.fsdecode(git("rev-parse", "--show-toplevel", what=what)).strip())


def commit_of(rev: str, what: str) -> str:
    """Return the id of a commit; raise `UserError` if git does not know it."""
    repository(what)

    def known(name: str) -> str:
        return git("rev-parse", "--verify", "--quiet", "--end-of-options", name, what=what).decode().strip()

    try:
        return known(f"{known(rev)}^{{commit}}")  # a revision such as :/text takes all that follows for its text
    except UserError as e:
        raise UserError(f"{what}: git knows no commit {rev!r}; fetch it, or give a branch, a tag or an id") from e


def is_commit(rev: str) -> bool:
    """Return whether git knows a commit by this name."""
    with suppress(UserError):
        return bool(commit_of(rev, rev))
    return False


def extract(commit: str, folder: Path, what: str, *paths: str) -> Path:
    """Write the files of a commit into a folder, and return it; with paths, those files alone."""
    content = git("-C", str(repository(what)), "archive", "--format=tar", commit, *paths, what=what)
    try:
        with tarfile.open(fileobj=BytesIO(content)) as files:
            files.extractall(folder, filter="data")
    except tarfile.TarError as e:
        raise UserError(f"{what}: the files of commit {commit[:12]} cannot be written to a folder: {e}") from e
    return folder


@dataclass(frozen=True)
class KernelSource:
    """Where a kernel comes from: ``VARIANT``, ``FILE.py`` or ``FILE.py:VARIANT``; for a commit, ``REV:`` is before it.

    `commit` is the id of that commit.
    """

    text: str
    rev: str = ""
    file: str = ""
    variant: str = ""
    commit: str = ""

    @staticmethod
    def of(text: str, known: Container[str] = ()) -> KernelSource:
        """Read it; of several colons, the last one whose left side is a commit ends the revision.

        Parameters
        ----------
        known : revisions that git need not know.

        Raises
        ------
        UserError
            If git knows no such commit, or the text is none of these.
        """
        wrong = UserError(f"{text!r}: expected REV:VARIANT or REV:FILE.py, as in main:optimized")
        rev, rest, commit = "", text, ""
        if ":" in text and not re.match(r"[^:]+\.py:", text):
            parts = text.split(":")
            pairs = [(":".join(parts[:i]), ":".join(parts[i:])) for i in range(len(parts) - 1, 0, -1)]
            pairs = [(rev, rest) for rev, rest in pairs if rev.strip(":") and rest]
            if not pairs:
                raise wrong
            rev, rest = next((pair for pair in pairs if pair[0] in known or is_commit(pair[0])), pairs[-1])
            commit = "" if rev in known else commit_of(rev, repr(text))
        file, dot, variant = rest.partition(".py")
        if not dot:
            return KernelSource(text, rev, variant=rest, commit=commit)
        if variant[:1] not in ("", ":"):
            raise wrong
        if rev and (Path(file).is_absolute() or ".." in Path(file).parts):
            raise UserError(f"{text!r}: expected a file of the commit, by its path from the top of the repository")
        return KernelSource(text, rev, file + dot, variant[1:], commit)


class Tree(KernelProcess):
    """The package in a folder, in a process of its own.

    Parameters
    ----------
    name : the first words of its errors.
    shared : the memory for the arrays of calls; without it, its kernels are compiled only.
    environment : variables of the process, such as numba's target.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        threads: int = 1,
        shared: Shared | None = None,
        limit_s: float = 1800.0,
        say: Say = lambda text: None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.folder, self.ready = folder, False
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        more = {**(environment or {}), "PYTHONPATH": path, "NUMBA_NUM_THREADS": str(threads)}
        if shared:
            self.shared = shared
            more[commit_worker.MEMORY] = f"{shared.descriptor} {ROOM}"
        command = (sys.executable, "-P", str(Path(commit_worker.__file__).resolve()))
        side = Side(name, command, {}, more, (shared.descriptor,) if shared else ())
        self.worker = Worker(side, say, limit_s, rests=True)

    def ask(self, do: str, function: Far | None = None, **more: Any) -> dict[str, Any]:
        """Send a request, about a kernel or all.

        Raises
        ------
        UserError
            If the process cannot load the package; a `RefusedError` if it ends later, or is too late.
        """
        try:
            if not self.ready:
                package = self.worker.ask("ready")["package"]
                if not os.path.samefile(package, self.folder / PACKAGE):
                    raise UserError(f"{self.worker.side.name}: expected the package in {self.folder}, not {package}")
            self.ready = True
            about = {"side": function.side, "types": dict(function.types)} if function else {}
            return self.worker.ask(do, **about, **more)
        except EndedError as e:
            if not self.ready:
                old = "" if e.word == UNCHECKED else f"; a commit from before {OLDEST} cannot be compared"
                raise UserError(f"{e}{old}") from e
            raise RefusedError(str(e), e.word) from e

    def codes(self, names: Sequence[str]) -> list[tuple[str, str]]:
        """Return the digests of the machine code and the declaration of some kernels, as `Difference` names them."""
        return [(name, str(self.ask("code", name=name)["code"])) for name in names]

    def load(self, source: KernelSource, folder: Path, op: Op) -> Kernel:
        """Find the tree's kernel; its variant is the text of its source.

        Parameters
        ----------
        folder : of the file that the source names, if it names one.

        Raises
        ------
        UserError
            If the tree lacks it, its file has several, or its op is declared otherwise than here.
        """
        file = os.path.realpath(folder / source.file) if source.file else ""
        about = self.ask("open", op=op.name, variant=source.variant, file=file)
        if "variants" in about:
            known = ", ".join(f"{source.text}:{v}" for v in about["variants"]) or "none"
            raise UserError(f"{source.text}: expected one kernel of {op.name} in the file; it has {known}")
        require_declared(op, source, about["declared"])
        return self.kernel(op, "", {**about, "variant": source.text})


def require_declared(op: Op, source: KernelSource, there: Mapping[str, Any]) -> None:
    """Refuse a commit that declares an op otherwise than the package that compares.

    Raises
    ------
    UserError
        Naming the first argument that differs.
    """
    here = {a.name: [str(getattr(a, name)) for name in commit_worker.DECLARED] for a in op.args}
    if [*here.items()] != [*there.items()]:
        name = next((n for n in [*there, *here] if there.get(n) != here.get(n)), "")
        what = f"its argument {name!r}" if name else "the order of its arguments"
        raise UserError(
            f"{op.name}: {source.text} declares {what} otherwise than the package that compares, so one check cannot "
            "judge both; compare commits with one declaration, from a checkout of either"
        )


@dataclass(frozen=True)
class Difference:
    """The kernels that differ between two trees, by name, as in ``gelu_forward[optimized] inp:bfloat16``.

    Attributes
    ----------
    count : the number of kernels that both have.
    sources : for each whose sources differ, which ones do.
    codes : for each whose machine code or declaration differs, its digests.
    gone, new : those of one tree alone.
    """

    count: int
    sources: Mapping[str, str]
    codes: Mapping[str, tuple[str, str]]
    gone: Sequence[str]
    new: Sequence[str]


def differences(
    folders: Mapping[str, Path],
    only: str = "*",
    environment: Mapping[str, str] | None = None,
    say: Say = lambda text: None,
    limit_s: float = 1800.0,
) -> Difference:
    """Compare the machine code of all kernels of two trees; those whose sources differ are compiled.

    Parameters
    ----------
    folders : of both trees, by a name for errors.
    only : a glob of the names of kernels.
    environment, limit_s : as `Tree` takes them.
    """
    with ExitStack() as stack:
        count = max(1, cores() // 2)
        more: dict[str, Any] = {"limit_s": limit_s, "say": say, "environment": environment}
        trees = [[Tree(n, f, **more) for _ in range(count)] for n, f in folders.items()]
        for tree in chain(*trees):
            stack.callback(tree.worker.close, 0)
        pool = stack.enter_context(ThreadPoolExecutor(2 * count))  # whose threads must end before a pipe is closed
        for tree in chain(*trees):
            stack.callback(tree.worker.kill)
        say("comparing sources")
        old, new = pool.map(lambda of: of[0].ask("sources", only=only), trees)
        both = [n for n in new if n in old]
        sources = {n: _which(old[n], new[n]) for n in both if old[n]["all"] != new[n]["all"]}
        jobs = [[pool.submit(t.codes, [*sources][i::count]) for i, t in enumerate(of)] for of in trees]
        before, after = (dict(chain(*(job.result() for job in of))) for of in jobs)
    codes = {n: (before[n], after[n]) for n in sources if before[n] != after[n]}
    return Difference(len(both), sources, codes, [n for n in old if n not in new], [n for n in new if n not in old])


def _which(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """Name the sources in which two versions of a kernel differ."""
    apart = [part for part in {**old, **new} if part != "all" and old.get(part) != new.get(part)]
    return ", ".join(apart) or "constants"


class CommitPair:
    """Two kernels of one op from commits, with their processes; it answers ``ab`` as the `Child` of ``cpuopt ab`` does.

    Parameters
    ----------
    texts : the sources of A and B, as `KernelSource.of` reads them.
    folders : the trees of commits that are extracted already, by revision.
    """

    def __init__(
        self,
        op: str,
        texts: Sequence[str],
        threads: int,
        limit_s: float = 1800.0,
        say: Say = lambda text: None,
        folders: Mapping[str, Path] | None = None,
    ) -> None:
        if not hasattr(os, "memfd_create"):
            raise UserError(f"{' '.join(texts)}: kernels of commits are compared on Linux only")
        self.op, self.say = op_named(op), say
        self.checked, self.kernels, self.trees = set[Kernel](), list[str](), list[Tree]()
        self.loads: list[Callable[[], Kernel]] = []
        folders = folders or {}
        sources = [KernelSource.of(text, folders) for text in texts]
        self.commits = {s.text: s.commit for s in sources if s.commit}
        with ExitStack() as stack:
            self.shared = Shared()
            stack.callback(os.close, self.shared.descriptor)
            for source in sources:
                folder = folders.get(source.rev, ROOT if source.variant and not source.file else Path())
                if commit := self.commits.get(source.text):
                    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cpuopt-commit-")))
                    extract(commit, folder, repr(source.text), *([] if source.file else [PACKAGE]))
                package = folder if source.rev and (folder / PACKAGE).is_dir() else ROOT  # or files of kernels alone
                tree = Tree(source.text, package, threads, self.shared, limit_s, lambda text: self.say(text))
                stack.enter_context(tree.worker)
                self.trees.append(tree)
                self.loads.append(partial(tree.load, source, folder, self.op))
            self.stack = stack.pop_all()

    def start(self) -> list[dict[str, str]]:
        """Return the kernels that users' files registered here: none."""
        return []

    def __enter__(self) -> CommitPair:
        return self

    def __exit__(self, *why: Any) -> None:
        vars(self).pop("both", None)  # whose kernels hold arrays, and their tree
        self.checked.clear()
        self.stack.__exit__(*why)

    @cached_property
    def both(self) -> tuple[Kernel, Kernel]:
        """Both kernels."""
        return self.loads[0](), self.loads[1]()

    def require(self, kernels: Sequence[Kernel], threads: int) -> list[dict[str, Any]]:
        """Check kernels: at first on all cases with their types, then on the quick ones.

        Raises
        ------
        RefusedError
            For one that is wrong.
        """
        found = []
        for k in kernels:
            plan = quick_cases(self.op, k.types, k.skips)
            plan += [c for c in cases(self.op, k.skips) if c.types == k.types] * (k not in self.checked)
            found += gate.run(plan, partial(check, k, threads=sorted({1, threads})), until_refused=True)
            refuse(found[-1], "it is not timed")
            self.checked.add(k)
        return [r.describe() for r in found]

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Compare both, as the worker of ``cpuopt ab`` does on request."""
        others = Others([t.worker for t in self.trees])
        with rooms(self.shared.room):
            more = self.require, AloneRemote, partial(self.in_step, request["settings"])
            found = compared(request, self.both, lambda text: self.say(text), *more)
        doubts = [d for d in found["doubts"] if not d.startswith(OTHERS)] + others.warnings()
        if any(c["busy"] for c in found.get("cases", ())):
            doubts.append("threads waited for a core in more than half of all rounds")
        return {**found, "doubts": doubts, "commits": self.commits}

    def in_step(
        self, job: Mapping[str, Any], settings: Settings, op: Op, variants: tuple[str, str], **more: Any
    ) -> dict[str, Any]:
        """Compare both in training steps of their packages, as `ab.in_step` does; `job` has the settings for these."""
        pair = FarSteps(self.trees, job, more.pop("layer"), more["say"])
        return of_op(pair, variants, more["seed"], more["analyses"], more["say"])


class FarSteps(InStep):
    """Training steps of two trees, each by its own package in its process.

    Each step that is timed follows one that is not, since the other process has used the caches meanwhile.

    Parameters
    ----------
    trees : with the kernels whose calls are timed, if any are.
    job : the settings of the steps that are given.
    layer : a glob of the layers in which calls go to these kernels.
    """

    def __init__(
        self, trees: Sequence[Tree], job: Mapping[str, Any], layer: str = "*", say: Say = lambda text: None
    ) -> None:
        self.trees, self.workers = trees, [t.worker for t in trees]
        self.judged, self.found = [], dict[str, list[dict[str, Any]]]()
        say("building the steps")
        built = [t.ask("build", settings=dict(job), layer=layer) for t in trees]
        self.layers, self.sides = built[0]["layers"], dict(zip("AB", trees, strict=True))
        self.first = {side: one["losses"] for side, one in zip("AB", built, strict=True)}
        both = {*built[0]["notes"]} & {*built[1]["notes"]}
        told = [(t.worker.side.name, n) for t, one in zip(trees, built, strict=True) for n in one["notes"]]
        self.notes = [*dict.fromkeys(n if n in both else f"{name}: {n}" for name, n in told)]

    def trial(self, side: str) -> tuple[float, ...]:
        """Return the ns of a whole step, then of the kernel's calls in it."""
        return tuple(map(float, self.sides[side].ask("train")["ns"]))

    def audit(self, when: str) -> list[Result]:
        """Let each process judge a step of its own, of which it refuses a wrong kernel; it keeps the results."""
        for t in self.trees:
            name = t.worker.side.name
            found = t.ask("audit", when=when)["checks"]
            self.found[name] = [{**c, "kernel": f"{c['kernel'].partition('[')[0]}[{name}]"} for c in found]
        return []

    def checks(self) -> list[dict[str, Any]]:
        """Describe what was found so far in steps that were judged."""
        return [c for found in self.found.values() for c in found]

    def losses(self) -> dict[str, list[float]]:
        """Return the losses of the first steps."""
        return self.first

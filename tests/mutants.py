"""Versions of cpuopt that are each broken in one place: ``make mutants`` shows that tests of CI find every one.

`mutants.toml` lists them. Each is planted in a copy of the tree, and a test that it names must fail there: by what it
asserts, and not because something does not run. One that survives is a hole in the tests.

``python tests/mutants.py -k WORD`` tries those in whose text a word stands; it exits with 1 if one survives. The copy
has a cache of its own, since a broken version may leave something wrong there. Compiled kernels are shared with it:
their names are digests of all that they are made of.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).parents[1]
NOT_QUICK = re.compile(r"mark\.(slow|drawn|peers|mpi|arm)\b")
LONGEST_S = 300
SAID = re.compile(r"assert|AssertionError|Failed|(\w+\.)*UserError\b")
"""What a test that finds something says: its own assertion, or an error that cpuopt raises for it."""


@dataclass(frozen=True)
class Mutant:
    """One place that is broken: `what` says how, `old` is replaced by `new` in `file`, and one of `tests` fails."""

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def planted(self, text: str) -> str:
        """Return the broken text of the file."""
        return text.replace(self.old, self.new)

    def faults(self) -> Iterator[str]:
        """Say why it cannot be tried."""
        text = (HERE / self.file).read_text()
        if (n := text.count(self.old)) != 1:
            yield f"{self.file} has {self.old!r} {n} times; expected once"
        try:
            if ast.dump(ast.parse(self.planted(text))) == ast.dump(ast.parse(text)):
                yield f"{self.new!r} changes nothing"
        except SyntaxError as e:
            yield f"{self.new!r} is no Python: {e}"
        if self.file.startswith("cpuopt/kernels/compile/"):
            yield f"{self.file} may leave something wrong in the cache of compiled kernels, which is shared"
        for asked in self.tests:
            file, name = re.match(r"([^:]+)::(\w+)", asked).groups()
            found = [n for n in ast.parse((HERE / file).read_text()).body if getattr(n, "name", "") == name]
            if not found:
                yield f"{asked}: there is no such test"
            elif any(NOT_QUICK.search(ast.unparse(d)) for d in found[0].decorator_list):
                yield f"{asked}: CI does not run all its cases"


def read() -> list[Mutant]:
    """Return all mutants."""
    rows = tomllib.loads((HERE / "tests" / "mutants.toml").read_text())["mutant"]
    return [Mutant(**row | {"tests": tuple(row["tests"])}) for row in rows]


def copied(folder: Path) -> Path:
    """Copy what git knows or could know, as it is now."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=HERE, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in dict.fromkeys(filter(None, names)):
        if (HERE / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(HERE / name, folder / name)  # with its time, by which Python knows that bytecode is its own
    return folder


class Tree:
    """A copy in which tests run."""

    def __init__(self, folder: Path) -> None:
        self.path, cache, self.report = copied(folder / "tree"), folder / "cache", folder / "report.xml"
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        self.env |= {"PYTHONPATH": str(self.path)}
        ask = "import cpuopt; from cpuopt.files import cache_folder as of; print(cpuopt.__file__); print(of('kernels'))"
        said = subprocess.run([sys.executable, "-c", ask], cwd=folder, env=self.env, capture_output=True, text=True)
        package, kernels = map(Path, said.stdout.splitlines() or sys.exit(said.stderr))
        if self.path not in package.parents:
            sys.exit(f"mutants: Python imports {package}, and not the copy")
        kernels.mkdir(parents=True, exist_ok=True, mode=0o700)
        cache.mkdir(mode=0o700)
        (cache / "kernels").symlink_to(kernels)
        if (machine := kernels.with_name("machine")).is_dir():
            shutil.copytree(machine, cache / "machine")  # rates, which take a while to measure
        self.env["CPUOPT_CACHE_DIR"] = str(cache)

    def run(self, asked: Sequence[str], limit_s: float | None = None, **more: str) -> tuple[int, str]:
        """Run tests until one fails; return pytest's status and its output."""
        how = ["-x", "-m", "not slow", "--tb=short", "-p", "no:cacheprovider", f"--junit-xml={self.report}"]
        command = [sys.executable, "-m", "pytest", *how, *asked]
        env = self.env | more
        try:
            done = subprocess.run(command, cwd=self.path, env=env, capture_output=True, text=True, timeout=limit_s)
        except subprocess.TimeoutExpired:
            return -1, f"no end within {limit_s} s"
        return done.returncode, done.stdout + done.stderr

    def failure(self) -> tuple[str, str]:
        """Return the name of the test that failed in the last run, and what it said; empty if none ran to its end."""
        for case in ElementTree.parse(self.report).iter("testcase"):
            if (found := case.find("failure")) is not None:
                return case.get("name", ""), found.get("message", "")
        return "", ""

    def kills(self, mutant: Mutant) -> tuple[bool, str]:
        """Plant a mutant and run its tests; return whether one finds it, and which, or why none does."""
        file = self.path / mutant.file
        text, times = file.read_text(), file.stat()
        file.write_text(mutant.planted(text))
        said = "its tests pass"
        try:
            for asked in mutant.tests:
                status, output = self.run(words_of(asked), LONGEST_S, PYTHONDONTWRITEBYTECODE="1")
                name, reason = self.failure() if status == 1 else ("", "")
                if SAID.match(reason):
                    return True, name
                if status:
                    said = f"{asked}: status {status}: {reason or output.strip()[-500:]}"
            return False, said
        finally:
            file.write_text(text)
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def words_of(asked: str) -> list[str]:
    """Return the arguments of pytest for a test as the list names it."""
    test, _, words = asked.partition(" -k ")
    return [test, *(["-k", words] if words else [])]


def calls_of(mutants: Iterable[Mutant]) -> list[list[str]]:
    """Return the arguments of the few calls of pytest that run all tests of some mutants."""
    plain, chosen = list[str](), dict[str, list[str]]()
    for asked in dict.fromkeys(asked for m in mutants for asked in m.tests):
        test, *words = words_of(asked)
        if words:
            chosen.setdefault(test, []).append(words[1])
        else:
            plain.append(test)
    return [*([plain] if plain else []), *([test, "-k", " or ".join(words)] for test, words in chosen.items())]


def main() -> int:
    """Try the mutants that are asked for."""
    p = argparse.ArgumentParser(description="Break cpuopt in one place after another; a quick test must find each.")
    p.add_argument("-k", default="", metavar="WORD", help="Try those with this word in what is broken, file or tests.")
    p.add_argument("--list", action="store_true", help="List them, and try none.")
    args = p.parse_args()
    mutants = [m for m in read() if args.k.lower() in f"{m.what} {m.file} {m.tests}".lower()]
    if args.list:
        print("\n".join(f"{m.file}: {m.what}" for m in mutants))
        return 0
    if faults := [f"{m.what}: {fault}" for m in mutants for fault in m.faults()]:
        sys.exit("\n".join(faults))
    start, survived = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder))
        for asked in calls_of(mutants):
            status, output = tree.run(asked)
            if status:
                sys.exit(f"{output}\nmutants: without any of them, the tests must pass")
        print(f"their tests pass without them: {time.monotonic() - start:.0f} s", flush=True)
        for m in mutants:
            at = time.monotonic()
            killed, said = tree.kills(m)
            survived += not killed
            took = f"{time.monotonic() - at:5.1f} s"
            print(f"{'killed  ' if killed else 'SURVIVED'} {took}  {m.file}: {m.what} ({said})", flush=True)
    print(f"{len(mutants) - survived} of {len(mutants)} killed in {(time.monotonic() - start) / 60:.1f} minutes")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())

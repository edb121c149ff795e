"""A kernel's code for another machine: the innermost loops that multiply and add, and their cycles by llvm-mca.

llvm-mca (Debian's package ``llvm``) simulates a loop on LLVM's model of a processor, with every load in the first-level
cache. It is optional.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from ..errors import UserError
from ..isolate.process import Side, Worker
from ..kernels.toolkit.micro.targets import VARIABLE, Target, find
from . import asm

LIMIT_S = 600.0
MCA = "llvm-mca"
ROUNDS = 1000


@dataclass(frozen=True)
class Syntax:
    """An architecture's way to write what is counted: patterns of a line."""

    fma: str
    vector: str
    stack: str
    load: str
    widths: tuple[tuple[str, int], ...]


X86 = Syntax(
    fma=r"vfn?m(?:add|sub)\d+[ps]s\s",
    vector=r"%[xyz]mm",
    stack=r"\(%rsp\b",
    load=r"\(.*,",
    widths=((r"ss\s", 1), (r"%zmm", 16), (r"%ymm", 8), (r"%xmm", 4)),
)
ARM = Syntax(
    fma=r"(?:fmla|fmls|fn?madd|fn?msub)\b",
    vector=r"\b[vqs]\d+",
    stack=r"\[sp\b",
    load=r"ld",
    widths=((r"\.4s", 4), (r"\bs\d", 1)),
)


@dataclass
class ForeignLoop:
    """One innermost loop.

    Attributes
    ----------
    width : floats in one of its multiply-adds, the most.
    fmas : its multiply-adds.
    loads : instructions that read floats from memory, but for the stack.
    spills : instructions that move floats to or from the stack.
    cycles : those of one round by llvm-mca; None without it, and where it does not know the machine.
    limit : cycles that the machine's pipes need for the multiply-adds.
    """

    JSON: ClassVar = ("function", "instructions", "width", "fmas", "loads", "spills", "cycles", "limit")
    function: str
    lines: list[str] = field(repr=False)
    width: int = 0
    fmas: int = 0
    loads: int = 0
    spills: int = 0
    limit: float = 0.0
    cycles: float | None = None

    @property
    def instructions(self) -> int:
        """Count all of its instructions."""
        return len(self.lines)


@dataclass
class ForeignInspection:
    """The loops of one kernel, as another machine would run them."""

    JSON: ClassVar = ("op", "variant", "where", "target", "loops")
    op: str
    variant: str
    where: str
    target: str
    loops: list[ForeignLoop]
    asm: str = field(default="", repr=False)


def inspect(op: str, variant: str, target: str, kernels: Sequence[str] = ()) -> ForeignInspection:
    """Compile a kernel for another machine in a process of its own, and analyse its code.

    Parameters
    ----------
    kernels : users' files to load.

    Raises
    ------
    UserError
        For an unknown machine, or a kernel that does not compile.
    """
    machine = find(target)
    with tempfile.TemporaryDirectory(prefix="cpuopt-inspect-") as folder:
        settings = {"CPUOPT_CACHE_DIR": folder, VARIABLE: target}
        side = Side.module("compiler", "cpuopt.kernels.compile.inspection", **settings)
        try:
            with Worker(side, limit_s=LIMIT_S) as worker:
                found = worker.ask("build", op=op, variant=variant, kernels=[str(k) for k in kernels])
        except UserError as e:
            e.args = (f"{op}[{variant}]: {str(e).removeprefix('compiler: ')}",)
            raise
    made = loops(found["asm"], machine)
    for loop in made:
        loop.cycles = cycles(loop, machine)
    return ForeignInspection(op, variant, found["where"], target, made, found["asm"])


def loops(text: str, target: Target) -> list[ForeignLoop]:
    """List the innermost loops that multiply and add."""
    syntax, found = X86, []
    if not target.triple.startswith("x86_64"):
        syntax, text = ARM, text.replace("#", "").replace("//", "#")  # of numbers; of comments
    for name, lines in asm.functions(text):
        if not asm.OURS.match(name):
            continue
        for start, end in asm.innermost(lines):
            inside = [line for line in lines[start : end + 1] if not re.match(r"\.|\w+:|#", line)]
            loop = read(asm.plain(name), inside, syntax)
            loop.limit = loop.fmas / target.pipes
            found += [loop] if loop.fmas else []
    return found


def read(function: str, lines: list[str], syntax: Syntax) -> ForeignLoop:
    """Count the instructions of a loop."""
    floats = [line for line in lines if re.search(syntax.vector, line)]
    fmas = [line for line in lines if re.match(syntax.fma, line)]
    spills = [line for line in floats if re.search(syntax.stack, line)]
    loads = [line for line in floats if re.search(syntax.load, line) and line not in spills]
    width = max((next(n for sign, n in syntax.widths if re.search(sign, line)) for line in fmas), default=0)
    return ForeignLoop(function, lines, width, len(fmas), len(loads), len(spills))


def cycles(loop: ForeignLoop, target: Target, tool: str = MCA) -> float | None:
    """Simulate rounds of a loop, without the jump, which runs fused with the comparison before it."""
    if not shutil.which(tool):
        return None
    command = [tool, f"-mtriple={target.triple}", f"-mcpu={target.model or target.name}", f"-iterations={ROUNDS}"]
    made = subprocess.run(command, input="\n".join(loop.lines[:-1]), text=True, capture_output=True, timeout=60)
    total = re.search(r"^Total Cycles:\s+(\d+)", made.stdout, re.M)
    return int(total[1]) / ROUNDS if total and "recognized processor" not in made.stderr else None

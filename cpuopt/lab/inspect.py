"""The compiler's output for a kernel: innermost loops, and remarks on what was vectorized and why not."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from .. import ops
from ..errors import UserError
from ..kernels import registry
from ..kernels.compile import jit, places
from .advice import Advice, CallTime, KernelFacts, advise
from .asm import LineBlock, Loop, blocks, loops

NOTHING = re.compile(
    r"already been vectorized|loop not vectorized$|interleaving is not beneficial"
    r"|(instruction return type|Store instruction) cannot be vectorized"  # of vectors
)
REFUSED = "loop not vectorized: "
REMARK = re.compile(r"remark: (?P<file>.*?):(?P<line>\d+):\d+: (?P<text>.*)")


@dataclass(frozen=True)
class Remark:
    """A remark of the compiler on a line of Python, and how often it came."""

    file: str
    line: int
    text: str
    count: int = 1


@dataclass
class Inspection:
    """The findings about a kernel's machine code.

    Attributes
    ----------
    compiled : False for a plain Python function, which has no machine code.
    innermost : its innermost loops that compute or call.
    remarks : of the compiler's vectorizers.
    advice : what to try, the largest gain first.
    diagnostics : numba's text on the parallel loops, if it was asked for.
    asm : the whole text.
    blocks : its instructions by line of source.
    file, first, source : where the compiled function is written, and its lines.
    same : whether this is, byte for byte, the code that runs here; None if the kernel is not compiled yet.
    code : the digest of this code.
    """

    JSON: ClassVar = (
        *("op", "variant", "where", "cpu", "machine", "compiled", "diagnostics", "summary", "innermost", "remarks"),
        *("advice", "same", "code"),
    )
    op: str
    variant: str
    where: str
    cpu: str
    machine: str
    compiled: bool
    innermost: list[Loop]
    remarks: list[Remark]
    diagnostics: str = ""
    asm: str = field(default="", repr=False)
    blocks: list[LineBlock] = field(default_factory=list, repr=False)
    file: str = ""
    first: int = 0
    source: list[str] = field(default_factory=list, repr=False)
    same: bool | None = None
    code: str = ""
    advice: list[Advice] = field(default_factory=list)

    @property
    def summary(self) -> dict[str, Any]:
        """Sums over the loops, the largest vector width, and the functions called."""
        by = {k: sum(getattr(v, k) for v in self.innermost) for k in ("fmas", "loads", "stores", "spills", "doubles")}
        calls = sorted({c for v in self.innermost for c in v.calls})
        scalar = sum(v.width <= 1 and not v.remainder for v in self.innermost)
        widest = max((v.width for v in self.innermost), default=0)
        return {"loops": len(self.innermost), "scalar_loops": scalar, "width": widest, **by, "calls": calls}


def inspect(
    op: str, variant: str, kernels: Sequence[str] = (), diagnostics: int = 0, call: CallTime | None = None
) -> Inspection:
    """Compile a kernel afresh in a process of its own, and analyse its machine code.

    Parameters
    ----------
    kernels : users' files to load.
    diagnostics : 1 to 4: level of numba's diagnostics of parallel loops; 0: none.
    call : a call that was timed, about which there is more advice.

    Raises
    ------
    UserError
        For a kernel that does not compile.
    """
    try:
        found = places.inspected(op, variant, kernels, level=diagnostics, code=_running(op, variant))
    except UserError as e:
        e.args = (f"{op}[{variant}]: {str(e).removeprefix('compiler: ')}",)
        raise
    return read(op, variant, found, call)


def read(op: str, variant: str, found: Mapping[str, Any], call: CallTime | None = None) -> Inspection:
    """Analyse what the process that compiles says of a kernel."""
    known, source = found["machine"].startswith("x86_64"), found["source"]
    home, first, written = (source.get(k, v) for k, v in (("file", ""), ("first", 0), ("lines", [])))
    place = home, first, first + len(written) - 1
    innermost = loops(found["asm"], *place) if known else []
    said = remarks(found["remarks"], Path(home).name, first)
    text = "\n" * (first - 1) + "\n".join(written)
    if (file := Path(home)).is_file():  # that of a generated backward is gone with the process
        text = file.read_text(encoding="utf-8", errors="replace")
    told = {name: found[name] for name in ("where", "cpu", "machine", "compiled", "diagnostics", "asm", "code")}
    return Inspection(
        op=op,
        variant=variant,
        innermost=innermost,
        remarks=said,
        blocks=blocks(found["asm"], *place) if known else [],
        file=home,
        first=first,
        source=written,
        same=_same(op, variant, found["code"]),
        advice=advice(op, text, first, found["asm"], innermost, said, call) if known else [],
        **told,
    )


def advice(
    op: str, text: str, line: int, asm: str, innermost: Sequence[Loop], said: Sequence[Remark], call: CallTime | None
) -> list[Advice]:
    """Return the advice on a kernel that begins on a line of a text."""
    refusals = {(r.file, r.line): why for r in said if (why := r.text.partition(REFUSED)[2])}
    return advise(KernelFacts(ops.ALL.get(op), text, line, innermost, refusals, "parfor_gufunc" in asm, call))


def _same(op: str, variant: str, code: str) -> bool | None:
    """Compare a digest of machine code with that of the kernel as this process or the cache has it."""
    ran = _running(op, variant)
    return ran == code if ran and code else None


def _running(op: str, variant: str) -> str:
    """Return the digest of a kernel's machine code as this process or the cache has it; empty if neither has any."""
    kernel = registry.KERNELS.get((op, variant))
    if kernel is None or not kernel.is_compiled():
        return ""
    kernel.compile()
    return jit.code_digest(kernel)


def remarks(text: str, file: str = "<string>", line: int = 0) -> list[Remark]:
    """Read the compiler's remarks; equal ones are counted, and uninformative ones are left out.

    Parameters
    ----------
    file, line : where the kernel begins, which stand for a parallel loop that numba gives no place.
    """
    counts: dict[tuple[str, int, str], int] = {}
    for said in text.splitlines():
        m = REMARK.match(said.strip())
        if m and int(m["line"]) and not NOTHING.search(m["text"]):
            inside = m["file"] == "<string>"
            at = max(int(m["line"]), line) if inside else int(m["line"])
            key = file if inside else m["file"].split("/")[-1], at, m["text"].split(" [-R")[0]
            counts[key] = counts.get(key, 0) + 1
    return [Remark(*key, n) for key, n in sorted(counts.items())]

"""The result of judging a kernel, and the list of its words: that of every verb, file and page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, isnan, nan
from typing import TYPE_CHECKING, Any

from ..errors import BY_RULE, CHEATING, COMPILE_ERROR, REFUSED, UNCHECKED, WRONG, RefusedError

if TYPE_CHECKING:
    from .cases import Case

MARGIN = 10.0
"""The largest ratio of a marginal result: more than rounding explains, less than a wrong formula causes."""
RIGHT, MARGINAL = "right", "marginal"
WORDS = {
    RIGHT: "no element is farther off than rounding explains",
    MARGINAL: f"farther off than rounding explains, by no more than {MARGIN:g} times; nothing refuses it",
    WRONG: "an element is wrong, or it left its arrays, changed an input, ended its process or relies on its outputs",
    CHEATING: "it changed its process or the judge, told a false time, keeps results, or knew when it was judged",
    COMPILE_ERROR: "it does not load or compile, or has no scratch size",
    BY_RULE: "its text breaks a rule of the judge of unknown texts",
    UNCHECKED: "there was no answer in time, so it is neither right nor wrong",
}
"""The words of a result, and what they mean. All but the first two refuse a kernel."""
TOO_LARGE = "too large to be judged at its size"
"""The reason of a result that is ``unchecked`` before a run, and refuses nothing."""


@dataclass(frozen=True)
class Result:
    """The result of a kernel on one case, or on several: then that of the worst.

    Attributes
    ----------
    ratio : the largest of all elements and modes; infinite if no threshold applies, NaN if nothing was judged.
    argument, index : where the worst element is.
    got, want : its value, and the reference's.
    reason : the reason of a verdict that is not right.
    scratch : the elements of scratch that the kernel asks for, for each element of its arrays.
    fault : the word of a result that no ratio decides.
    seconds : how long it took to judge; 0 if the result was remembered.
    cases : the results of which this is the worst.
    left_out : the number of cases that are too large to be judged.
    ended : whether the kernel's process ended, or was ended.
    """

    kernel: str
    case: Case
    ratio: float
    argument: str = ""
    index: tuple[int, ...] = ()
    got: float = 0.0
    want: float = 0.0
    reason: str = ""
    scratch: float = 0.0
    fault: str = ""
    seconds: float = 0.0
    cases: tuple[Result, ...] = ()
    left_out: int = 0
    ended: bool = False

    @property
    def verdict(self) -> str:
        """A word of `WORDS`."""
        if self.fault:
            return self.fault
        if isnan(self.ratio):
            return UNCHECKED
        return RIGHT if self.ratio <= 1 else MARGINAL if self.ratio <= MARGIN else WRONG

    @property
    def refused(self) -> bool:
        """Whether nothing may be run with the kernel: it is wrong, or was not judged."""
        return self.verdict in REFUSED

    def __str__(self) -> str:
        return f"{self.verdict:8} {self.ratio:8.3g}  {self.kernel}  {self.case}{self.reason and ': ' + self.reason}"

    def describe(self) -> dict[str, Any]:
        """Return the result for a run's record."""
        content = {"kernel": self.kernel, "case": str(self.case), "status": self.verdict, "reason": self.reason}
        return content | {"ratio": self.ratio if self.ratio < inf else None}

    def to_json(self) -> dict[str, Any]:
        """Return the whole result; an infinite ratio is None, and so are values that are not finite."""
        where = {"argument": self.argument, "index": list(self.index), "got": self.got, "want": self.want}
        where["scratch"] = self.scratch
        return {
            k: None if isinstance(v, float) and not isfinite(v) else v for k, v in (self.describe() | where).items()
        }

    def witness(self) -> dict[str, Any]:
        """Return the kernel and the case, and where it fails if an element shows it."""
        found, more = self.to_json(), ("argument", "index", "got", "want") if self.argument else ()
        return {k: found[k] for k in ("kernel", "case", *more)}

    @staticmethod
    def from_json(d: Mapping[str, Any], case: Case) -> Result:
        """Build a result from that of `to_json`."""
        ratio, got, want = (nan if d[k] is None else float(d[k]) for k in ("ratio", "got", "want"))
        word = d["status"]
        ratio = inf if isnan(ratio) and word != UNCHECKED else ratio
        found = Result(d["kernel"], case, ratio, d["argument"], tuple(d["index"]), got, want, d["reason"], d["scratch"])
        return found if found.verdict == word else Result(**{**vars(found), "fault": word})

    def of_kernel(self) -> dict[str, Any]:
        """Return the result of all cases of a kernel for ``--json``."""
        op, _, variant = self.kernel.rstrip("]").partition("[")
        worst = self.to_json()
        return {
            "op": op,
            "variant": variant,
            "verdict": self.verdict,
            "reason": self.reason,
            "witness": self.witness(),
            "ratio": worst["ratio"],
            "worst": worst,
            "cases": [r.to_json() for r in self.cases],
            "skipped": self.left_out,
            "scratch": self.scratch,
        }


def refuse(result: Result, so: str) -> None:
    """Raise for a kernel with which nothing may be run.

    Raises
    ------
    RefusedError
        Naming the kernel, the element that is wrong, and both values.
    """
    if result.refused:
        found = {WRONG: "is wrong", UNCHECKED: "was not judged"}.get(result.verdict, f"is refused ({result.verdict})")
        said = f"{result.kernel} {found}, so {so}: {result.reason} ({result.case})"
        raise RefusedError(said, result.verdict, result.witness())


def exit_status(words: Iterable[str]) -> int:
    """Return the exit status of every verb by the words of its kernels: 1 if one is refused, 3 if one is unchecked."""
    refused = {word for word in words if word in REFUSED}
    return 1 if refused - {UNCHECKED} else 3 if refused else 0


def worst(results: Sequence[Result]) -> Result:
    """Return the result with the largest ratio of those that refuse the kernel, or of all; ``unchecked`` comes last."""
    return max(results, key=lambda r: (r.refused, r.verdict != UNCHECKED, 0.0 if isnan(r.ratio) else r.ratio))


def whole(results: Sequence[Result], left_out: int = 0) -> Result:
    """Return the result of a kernel on several cases."""
    scratch = max(r.scratch for r in results)
    return Result(**{**vars(worst(results)), "cases": tuple(results), "left_out": left_out, "scratch": scratch})


def was_right(row: Mapping[str, Any]) -> bool:
    """Return whether a row of a record accepts a kernel; records of before had other words."""
    return row["status"] in (RIGHT, MARGINAL, "PASS", "MARGINAL")


def was_left_out(row: Mapping[str, Any]) -> bool:
    """Return whether a row of a record is of a call that nobody judged, because it is too large."""
    return bool(row.get("reason") == TOO_LARGE)

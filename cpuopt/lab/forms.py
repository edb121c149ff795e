"""The forms of records: the fields that listing, showing and comparing need. `cpuopt.files.reading.misfit` checks them.

Annotations are evaluated here: Python does not recognise `NotRequired` in an annotation that is text.
"""

from typing import Any, NotRequired, TypedDict

from ..files.reading import misfit
from ..measure.profile import Profile
from ..measure.roofline import Roofs


class Ratio(TypedDict):
    """A ratio with its interval."""

    median: float
    low: float
    high: float


class Compared(TypedDict):
    """Two times, in ns, their ratio, and the verdict."""

    a_ns: float
    b_ns: float
    ratio: Ratio
    control: Ratio
    verdict: str


class Case(Compared):
    """The comparison of one size of a kernel's arrays."""

    sizes: dict[str, int]
    layers: list[str]


class Losses(TypedDict):
    """The losses of both sides."""

    A: list[float]
    B: list[float]


class Size(TypedDict):
    """One size of `cpuopt ab`: B and T of a model's batch, or sizes by symbol."""

    B: NotRequired[int]
    T: NotRequired[int]
    sizes: NotRequired[dict[str, int]]
    threads: int
    a_ms: float
    b_ms: float
    ratio: Ratio
    control: Ratio
    verdict: str
    doubts: list[str]
    hashes: dict[str, str]
    cases: NotRequired[list[Case]]
    step: NotRequired[Compared]
    losses: NotRequired[Losses]


class AB(TypedDict):
    """A record of `cpuopt ab`."""

    op: str
    a: str
    b: str
    model: str
    layer: str
    in_step: bool
    flush: bool
    verdict: str
    ratio: Ratio
    why: str
    level: NotRequired[float]
    results: list[Size]


class Times(TypedDict):
    """The times of a side's steps."""

    median: float


class Model(TypedDict):
    """The model of a bench."""

    name: str


class Machine(TypedDict):
    """The machine of a bench."""

    cpu: str


class Peer(TypedDict):
    """One size against one peer; the figures exist where there is a ratio, a model's name in a suite."""

    model: NotRequired[str]
    B: int
    T: int
    peer: str
    ratio: Ratio | None
    level: NotRequired[float]
    refused: str | None
    doubts: list[str]
    step_ms: dict[str, Times]
    phases_ms: dict[str, dict[str, float]]
    peak_rss_mb: dict[str, float]
    of_peak: NotRequired[dict[str, float]]
    at_roofs: NotRequired[float | None]


class Fastest(TypedDict):
    """The ratio to the fastest of several peers at one size."""

    model: NotRequired[str]
    B: int
    T: int
    peer: str
    of: list[str]
    ratio: Ratio


class Bench(TypedDict):
    """A record of `cpuopt bench`."""

    model: Model
    variant: str
    swap: list[str]
    threads: int
    rounds: int
    machine: Machine
    results: list[Peer]
    faster: NotRequired[list[Fastest]]
    geometric_mean: dict[str, Ratio]


class Tried(TypedDict):
    """The result of a variant: figures, or the reason why there are none."""

    verdict: str
    why: NotRequired[str]
    ratio: NotRequired[Ratio]
    a_ms: NotRequired[float]
    b_ms: NotRequired[float]
    check: NotRequired[str | None]


class Verdict(TypedDict):
    """The verdict on an op inside the step."""

    verdict: str
    ratio: Ratio


class Shape(TypedDict):
    """Sizes, and the layers that have them."""

    sizes: dict[str, int]
    adds: dict[str, bool]
    layers: list[str]


class Row(TypedDict):
    """An op on some shapes."""

    op: str
    default: str
    best: str
    shapes: list[Shape]
    tried: dict[str, Tried]
    in_step: Verdict | None


class Tune(TypedDict):
    """A record of `cpuopt tune`."""

    model: str
    B: int
    T: int
    threads: int
    flush: bool
    rows: list[Row]
    rules: list[str]
    doubts: list[str]
    step: Compared | None
    finished: bool
    left: NotRequired[int]
    why: str
    plan: str | None


class Figures(TypedDict):
    """The figures of a profile's steps, in ms."""

    median: float
    min: float
    max: float
    mean: float


class Checked(TypedDict):
    """A check of a profiled run."""

    kernel: str
    status: str


FORMS: dict[str, Any] = {"ab": AB, "bench": Bench, "tune": Tune}


def wrong(kind: str, content: dict[str, Any]) -> str:
    """Return the first misfit of a record of this kind, or an empty text where it has none."""
    found = misfit(content, FORMS.get(kind, Any))
    if kind == "train":
        found = misfit(content.get("summary"), dict[str, Any], "summary")
    if "machine_id" in content:
        found = found or misfit(content["machine_id"], str | None, "machine_id")
    return found or misfit(content.get("commit"), str | None, "commit") or wrong_profile(content.get("profile") or {})


def wrong_profile(p: Any) -> str:
    """Return the first misfit of a profile; an empty profile has no misfit."""
    if p == {}:
        return ""
    if found := misfit(p, dict[str, Any], "profile"):
        return found
    return (
        misfit(p, Profile)
        or misfit(p["step_ms"], Figures, "step_ms")
        or ("" if p["step_ms_values"] else "step_ms_values is empty")
        or misfit(p["checked"], list[Checked], "checked")
        or misfit(p.get("op_ms_values", {}), dict[str, list[float]], "op_ms_values")
        or misfit(p.get("roofs"), Roofs | None, "roofs")
    )

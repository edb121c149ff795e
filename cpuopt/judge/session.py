"""A session of the judge: verdicts on candidates, one after the other, with processes and inputs that stay warm.

A verdict is made in this order, and the first that fails ends it: the rules on the text, compilation in the closed
process, public cases, private cases, accesses outside the arrays; then, if it is timed, the comparison with the
baseline on the shapes of a model, both clocks, the roofs, and private cases again.
"""

from __future__ import annotations

import ast
import hashlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np

from .. import models
from ..building import Built
from ..check.cases import SMALL, Case, calls_alike, case, modes, quick_cases
from ..check.check import check
from ..check.judge import keeping_threads
from ..check.memory import rooms
from ..check.result import MARGINAL, RIGHT
from ..check.timed import TimedKernels
from ..errors import BY_RULE, CHEATING, COMPILE_ERROR, UNCHECKED, WRONG, RefusedError, UserError
from ..files.reading import to_json
from ..kernels.compile import jit
from ..kernels.registry import Kernel
from ..kernels.toolkit import threads as numba_threads
from ..lab import ab, asm
from ..lab.advice import CallTime
from ..lab.inspect import advice, remarks
from ..lab.remote import ROOM, Far
from ..lab.rounds import default
from ..machine import cores
from ..measure import rates
from ..measure.comparison import compare, disagreement, geometric_mean
from ..measure.rates import machine_id
from ..measure.roofline import Roofs
from ..ops.declaration import Op
from ..program.arena import gb
from ..train.job import Settings, build_only, model_of
from . import private, rules, timing
from .candidate import MOST_BYTES
from .remote import OWN_S, Remote

FASTER = "faster"
TIMED_S = 8.0
"""The seconds that a comparison may take on a calm machine, for all shapes together."""
STEPS = (6, 12, 24)
"""Rounds of a comparison in training steps after which there are analyses."""
SPARE = 1 << 29
"""Bytes that a process with a training step has besides its arrays: code, stacks, data."""
SHARES = 4
"""How many times the bytes of a call's arrays are shared with a candidate: with scratch, and while they move."""
FAR_SLOWER = 4.0
"""The factor beyond which a comparison ends early."""
AGAIN, CALLS, MOST_LOOPS = 8, 64, 40
VERDICT_S = 900.0
"""Seconds in which the sandbox must have answered all that a verdict asks."""
LINE = re.compile(r"\bline (\d+)")
Say = Callable[[str], None]


@dataclass(frozen=True)
class ModelSizes:
    """The model whose calls give an op's shapes; `UserError` for sizes that it cannot have."""

    model: str = models.DEFAULT
    B: int = 4
    T: int = 64

    def __post_init__(self) -> None:
        model_of(self.settings)

    @property
    def settings(self) -> Settings:
        """The model's job."""
        return Settings(model=self.model, B=self.B, T=self.T)


@cache
def shapes_of(op: Op, task: ModelSizes) -> list[Case]:
    """List the shapes of an op's calls; of an op that the model does not call, one shape at GPT-2's widths."""
    if op.name in ab.ops_of(task.model):
        return calls_alike(ab.calls_of(op, task.settings))
    return [ab.case_at(op, ab.usual_sizes(op, task.B, task.T))]


def entry(timed: Mapping[str, Any], roofs: Roofs | None) -> dict[str, Any]:
    """Return what a verdict tells of one shape: the sizes, the ratio, both times in us, the share of the roof."""
    share = 100 * ab.bound(roofs, timed)[0] / timed["b_ns"] if roofs else None
    told = {k: timed[k] for k in ("sizes", "layers", "verdict", "ratio", "control", "level")}
    return {**told, "a_us": timed["a_ns"] / 1e3, "b_us": timed["b_ns"] / 1e3, "roof_percent": share}


@dataclass
class Ruling:
    """A verdict on a candidate.

    Attributes
    ----------
    op, candidate, text : the op, the variant's name in the text, and the text's digest.
    code : the digest of the machine code; empty if there is none.
    verdict : a word of `check.result.WORDS`, or of one that was timed: faster, slower or inconclusive.
    reason : why, in one line; of a private case its class.
    rule, line : the rule that the text breaks, and where.
    witness : of a public case: seed, case, argument, index, got and wanted.
    cases : the number of cases that were checked.
    controls : what this session's controls showed.
    isolation : what closes the process, and what does not on this system.
    seconds : the cost.
    timed : what the timing found, if there was one.
    """

    op: str
    candidate: str
    text: str
    code: str = ""
    verdict: str = RIGHT
    reason: str = ""
    rule: str = ""
    line: int | None = None
    witness: dict[str, Any] = field(default_factory=dict)
    cases: int = 0
    controls: dict[str, Any] = field(default_factory=dict)
    isolation: dict[str, Any] = field(default_factory=dict)
    machine: str = ""
    seconds: float = 0.0
    timed: dict[str, Any] = field(default_factory=dict)


class Judge:
    """Processes and inputs that stay warm from verdict to verdict.

    Parameters
    ----------
    threads : the number of threads of timed calls, and the most of checked ones; by default all cores.
    files : kernel files of who asks, which are loaded here: the ops that they declare are tasks.
    """

    def __init__(self, threads: int | None = None, say: Say = lambda text: None, files: Sequence[str] = ()) -> None:
        self.threads, self.say = threads or cores(), say
        self.remote = Remote(self.threads, files=files)
        self.controlled: dict[str, dict[str, Any]] = {}
        self.drawn: timing.Drawn = {}
        self.seed = private.seed()
        self.farthest, self.marginal = 0.0, ""

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *why: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        self.remote.__exit__()

    def check(self, text: str, op: str) -> Ruling:
        """Judge whether a candidate is right; its speed is not measured."""
        return self.rule(text, op, lambda pair: {})

    def time(
        self, text: str, op: str, task: ModelSizes | None = None, against: str = "", in_step: bool = False
    ) -> Ruling:
        """Judge a candidate and, if it is right, compare its speed with a baseline's on the shapes of a model.

        Parameters
        ----------
        task : the model and its sizes; by default GPT-2's.
        against : the baseline; by default the package's fastest.
        in_step : whether to compare both in training steps of the model too.

        Raises
        ------
        UserError
            For a task that no candidate could do: its arrays or its step need too much memory, or the step does not
            call the op. Nothing was judged then.
        """
        known, task = ab.op_named(op), task or ModelSizes()
        require_room(known, task)
        swap = (f"{known.name}={against or default(known.name)}",)
        job = {**asdict(task), "threads": self.threads, "swap": swap}
        step = step_of(known, task, job) if in_step else None

        def then(pair: tuple[Kernel, Kernel]) -> dict[str, Any]:
            shapes = shapes_of(known, task)
            found = self.timed(pair, shapes)
            if step:
                found["in_step"] = self.in_step(pair, step, job)
            us, shape = max(((c["b_us"], s) for c, s in zip(found["cases"], shapes, strict=True)), key=lambda x: x[0])
            timed = {**to_json(shape), **ab.cost(known, shape)}
            call = CallTime.of(known, timed, 1e3 * us, self.threads, rates.stored().get(self.threads))
            with suppress(UserError):  # of a process that ended
                found |= self.machine_code(pair[0], text, call)
            return {"loops": [], "advice": [], **{k: x for k, x in found.items() if k != "asm"}}

        return self.rule(text, op, then, against)

    def timed(self, pair: tuple[Kernel, Kernel], shapes: Sequence[Case]) -> dict[str, Any]:
        """Compare a candidate with the baseline; return the verdict and what it is based on."""
        mine, usual = pair
        numba_threads.set_threads(self.threads)
        for k in pair:
            far(k).clocks, far(k).long = [], []
        made = partial(timing.AloneFar, drawn=self.drawn, most_s=TIMED_S / len(shapes))
        more: dict[str, Any] = {"seed": self.seed % 2**32, "say": self.say, "make": made}
        found = ab.alone((usual, mine), shapes, stop_above=FAR_SLOWER, **more)
        if said := timing.disagreement(far(usual), far(mine)):
            raise RefusedError(said, CHEATING)
        rng = np.random.default_rng(private.seed())
        self.hidden(mine, private.drawn(mine, rng)[:AGAIN], rng)
        roofs = rates.stored().get(self.threads)
        cases = [entry(c, roofs) for c in found["cases"]]
        ratio = geometric_mean([c["ratio"] for c in cases])
        alike = found["verdict"] == "no difference shown"
        word, reason = "inconclusive" if alike else found["verdict"], found["why"]
        if accused := ab.beyond_roofs([f"the {usual.variant} kernel", "the candidate"], found["cases"], roofs):
            word, reason = "inconclusive", accused[-1]
        elif not alike and ratio["low"] < FAR_SLOWER and any(c["busy"] for c in found["cases"]):
            word, reason = "inconclusive", "threads waited for a core in more than half of all rounds: others run here"
        saves = found["a_ms"] - found["b_ms"]
        return {
            "verdict": word,
            "reason": reason,
            "against": usual.variant,
            "ratio": ratio,
            "score": 1 / ratio["high"],
            "a_ms": found["a_ms"],
            "b_ms": found["b_ms"],
            "saves_ms": saves,
            "cases": cases,
            "doubts": found["doubts"],
        }

    def in_step(self, pair: tuple[Kernel, Kernel], step: Built, job: Mapping[str, Any]) -> dict[str, Any]:
        """Compare training steps of the sandbox with the baseline and with a candidate that was found right.

        Returns
        -------
        The verdict on the op's calls in a step, ``a_ms``, ``b_ms``, ``saves_ms``, and ``step``, that on whole steps.

        Raises
        ------
        UserError
            If the sandbox cannot build the model, whose kernels are the package's.
        """
        mine, usual = pair
        self.say("building the model of a step")
        jit.compile_kernels([*step.own_kernels.values()])  # the sandbox can keep none

        def trial(side: str) -> list[float]:
            start = time.perf_counter_ns()
            told = [float(ns) for ns in self.remote.ask("train", far(pair["BA".index(side)]))["ns"]]
            if not 0 < told[1] <= told[0] <= time.perf_counter_ns() - start:
                raise RefusedError("told times of a step that the judge's clock does not confirm", CHEATING)
            return told

        with wrong_in_step():
            built = self.remote.ask("build", far(mine), limit_s=OWN_S, settings=job)
        if said := built.get("unbuilt"):
            raise UserError(f"--in-step: the sandbox cannot build {job['model']}: {said}")
        with wrong_in_step():
            names, losses = (f"the {usual.variant} kernel", "the candidate"), built["losses"]
            if said := disagreement(names, losses["A"], losses["B"]):
                raise RefusedError(said)
            self.say("alternating steps")
            done = compare(lambda: trial("A"), lambda: trial("B"), seed=self.seed % 2**32, analyses=STEPS, decides=1)
        whole, own = (ab.entry(done, i) for i in range(2))
        a_ms, b_ms = own["a_ns"] / 1e6, own["b_ns"] / 1e6
        return {**own, "a_ms": a_ms, "b_ms": b_ms, "saves_ms": a_ms - b_ms, "layers": built["layers"], "step": whole}

    def machine_code(self, kernel: Kernel, text: str, call: CallTime | None = None) -> dict[str, Any]:
        """Return a candidate's machine code as text, its innermost loops, and advice on it.

        It is the last request about a candidate: the process compiles otherwise afterwards.
        """
        found = self.remote.ask("asm", far(kernel))
        code, file, line = str(found["asm"]), self.remote.file.name, int(found["line"])
        kept = ("width", "fmas", "loads", "stores", "spills", "doubles", "calls")
        loops = asm.loops(code, file, line)[:MOST_LOOPS]
        told = [{"lines": v.where.removeprefix(f"{file}:")} | {k: getattr(v, k) for k in kept} for v in loops]
        said = remarks(str(found["remarks"]), file, line)
        return {
            "asm": code,
            "loops": told,
            "advice": to_json(advice(kernel.op.name, text, line, code, loops, said, call)),
        }

    def rule(
        self, text: str, op: str, then: Callable[[tuple[Kernel, Kernel]], dict[str, Any]], against: str = ""
    ) -> Ruling:
        """Judge a candidate, and go on with `then` if it is right."""
        start, self.remote.late = time.perf_counter(), False
        known = ab.op_named(op)
        found = Ruling(known.name, "", hashlib.sha256(text.encode(errors="replace")).hexdigest(), machine=machine_id())
        try:
            found.candidate = read(text, known)
            with rooms(self.remote.shared.room):
                found.controls = self.controls(known)
                self.farthest, self.marginal = 0.0, ""
                with self.remote.within(VERDICT_S):
                    pair = self.opened(text, known, against or default(known.name))
                    found.code = far(pair[0]).code
                    found.cases = self.checked(pair[0])
                    found.timed = then(pair)
                found.verdict = found.timed.pop("verdict", RIGHT)
                found.reason = "; ".join(filter(None, (found.timed.pop("reason", ""), self.marginal)))
        except RefusedError as e:
            if self.remote.late:
                said = "take a smaller --model, -B or -T, a faster kernel, or a time when less runs here"
                raise RefusedError(f"judge {op}: no verdict within {VERDICT_S:g} s; {said}", UNCHECKED) from None
            found.verdict, found.reason = e.word, str(e)[:500]
            found.rule, found.line = e.witness.get("rule", ""), e.witness.get("line")
            found.witness = e.witness if "seed" in e.witness else {}
        finally:
            self.remote.close()
        found.isolation = {"by": self.remote.by, "missing": self.remote.missing}
        found.seconds = time.perf_counter() - start
        return found

    def opened(self, text: str, op: Op, against: str) -> tuple[Kernel, Kernel]:
        """Compile a candidate in the sandbox; return it and the baseline."""
        self.say("compiling")
        try:
            pair = self.remote.open(text, op, against)
            pair[0].compile()
        except RefusedError as e:
            word, line = COMPILE_ERROR if e.word == WRONG else e.word, line_of(str(e), text, op)
            raise RefusedError(str(e), word, {"line": line}) from None
        return pair

    def controls(self, op: Op) -> dict[str, Any]:
        """Return what the controls of an op showed: once in a session, a kernel that does nothing, and the baseline.

        Raises
        ------
        UserError
            If the judge accepts what does nothing, or refuses the baseline: it is not fit to judge.
        """
        if op.name not in self.controlled:
            self.say("controls")
            with rooms(self.remote.shared.room), self.remote.within(OWN_S, OWN_S):
                try:
                    pair = self.remote.open(nothing(op), op, default(op.name))
                except RefusedError as e:
                    raise UserError(f"the judge is not fit to judge {op.name}: {e}") from e
                (first, *_), rng = quick_cases(op), private.seed()
                usual, idle = (check(k, first, threads=(1,), seed=rng) for k in reversed(pair))
            self.remote.close()
            if idle.verdict != WRONG or usual.refused:
                why = f" ({usual.reason})" if usual.refused else ""
                raise UserError(
                    f"the judge is not fit to judge {op.name}: a kernel that does nothing is {idle.verdict}, and "
                    f"{usual.kernel} is {usual.verdict}{why}; expected {WRONG} and {RIGHT}"
                )
            self.controlled[op.name] = {"nothing": "refused", pair[1].variant: "right"}
        return self.controlled[op.name]

    def checked(self, kernel: Kernel) -> int:
        """Check a candidate on public and private cases; return their number."""
        op, rng = kernel.op, np.random.default_rng(private.seed())
        public = [c for c in quick_cases(op, skips=kernel.skips) if kernel.takes_all(c.types)]
        flags = modes(op)
        for i, c in enumerate(public):
            self.say(f"public case {c}")
            self.require(kernel, replace(c, adds=flags[i % len(flags)]), (1, self.threads), private.PUBLIC, told=True)
        self.repeated(kernel, rng)
        hidden = private.drawn(kernel, rng)
        self.hidden(kernel, hidden, rng)
        return len(public) + len(hidden)

    def hidden(self, kernel: Kernel, cases: Sequence[Case], rng: np.random.Generator) -> None:
        """Check a candidate on private cases."""
        flags = modes(kernel.op)
        for i, c in enumerate(cases):
            self.say(f"private case {i + 1} of {len(cases)}")
            c = replace(c, adds=flags[rng.integers(len(flags))])
            self.require(kernel, c, private.threads(rng, self.threads), private.seed_of(c, rng), told=False)

    def require(self, kernel: Kernel, c: Case, threads: Sequence[int], seed: int, told: bool) -> None:
        """Check one case.

        Raises
        ------
        RefusedError
            For a kernel that is refused on it; of a private case only the class is told.
        """
        result = check(kernel, c, threads=threads, seed=seed, fences=self.fences if told else None)
        if result.refused:
            said = f"{result.reason} ({c})"
            if not told:
                shown = result.reason if result.verdict != WRONG or "process" in result.reason else "it is wrong"
                said = f"{shown} in a private case ({private.class_of(kernel.op, c)})"
            raise RefusedError(said, result.verdict, {"seed": seed, **result.witness()} if told else {})
        if result.ratio > max(1.0, self.farthest):
            self.farthest = result.ratio
            self.marginal = f"{MARGINAL}: {result.ratio:.1f} times as far off as rounding explains"

    def repeated(self, kernel: Kernel, rng: np.random.Generator) -> None:
        """Require that a kernel stays right in many calls, each of which finds in scratch what the last one left."""
        flags, small = modes(kernel.op), case(kernel.op, SMALL)
        on = flags[rng.integers(len(flags))]
        calls = [(int(which), "nan", "kept") for which in rng.integers(2, size=CALLS)]
        with keeping_threads() as most:
            numba_threads.set_threads(min(most, self.threads))
            timed = TimedKernels({"B": kernel}, replace(small, adds=on), private.seed(), secret=True)
            timed.audit("B", calls, "called repeatedly")

    def fences(self, kernel: Kernel, c: Case, threads: Sequence[int], seed: int) -> str:
        """Return what a kernel does wrong if each of its arrays in turn stands at inaccessible pages; or ""."""
        asked = {"case": to_json(c), "threads": [self.threads], "seed": seed}
        return str(self.remote.ask("fences", far(kernel), **asked)["wrong"])


@contextmanager
def wrong_in_step() -> Iterator[None]:
    """Name the training step in the error of a block."""
    try:
        yield
    except RefusedError as e:
        raise RefusedError(f"in a training step: {e}", e.word) from None


def require_room(op: Op, task: ModelSizes) -> None:
    """Refuse a task with a call whose arrays alone need more memory than the judge shares with a candidate.

    Raises
    ------
    UserError
        With both sizes.
    """
    for s in shapes_of(op, task):
        if (need := op.bytes(s.sizes, s.adds or {}, s.absent, s.types)) > ROOM // SHARES:
            raise UserError(
                f"{op.name} at {s} moves {gb(need)}, and the judge takes {gb(ROOM // SHARES)} at the most; take a "
                "smaller --model, -B or -T"
            )


def step_of(op: Op, task: ModelSizes, job: Mapping[str, Any]) -> Built:
    """Trace a training step with the baseline, in which a candidate can take its place.

    Raises
    ------
    UserError
        For a step that does not call the op, or that needs more memory than a candidate's process may allocate.
    """
    called = op.name in ab.ops_of(task.model)
    built = build_only(Settings(**job)) if called else None
    if not built or not any(c.op is op for c in built.program.calls):
        where = "" if called else ab.where_it_runs(op)
        hint = f"add {where}, or leave" if where.startswith("--model") else "leave"
        raise UserError(f"--in-step: a training step of {task.model} does not call {op.name}; {hint} --in-step out")
    copied = sum(v.nbytes for v in (*built.program.parameters, *built.program.moments))  # with which both sides begin
    if (need := built.plan().total_bytes + copied + SPARE) > MOST_BYTES:
        raise UserError(
            f"--in-step: a training step of {task.model} at {task.B}x{task.T} needs {gb(need)}, and a candidate's "
            f"process may allocate {gb(MOST_BYTES)}; take a smaller --model, -B or -T, or leave --in-step out"
        )
    return built


def far(kernel: Kernel) -> Far:
    """Return the function of a kernel of the sandbox."""
    assert isinstance(kernel.function, Far)
    return kernel.function


def read(text: str, op: Op) -> str:
    """Hold a text against the rules, and return the variant as which it registers its kernel.

    Raises
    ------
    RefusedError
        For a breach of one.
    """
    kernels = [variant for name, variant in rules.read(text) if name == op.name]
    if len(kernels) != 1:
        said = f"the text registers {len(kernels)} kernels of {op.name}; expected one"
        raise RefusedError(said, BY_RULE, {"rule": "task"})
    return kernels[0]


def line_of(said: str, text: str, op: Op) -> int:
    """Return the line of a compile error: the one that it says, else that of the constant it names or of the kernel."""
    if at := LINE.search(said):
        return int(at[1])
    named, kernel = said.partition("'")[2].partition("'")[0], f"ops.{op.name},"
    body = ast.parse(text.encode()).body
    found = [n.lineno for n in body if isinstance(n, ast.Assign) and named in map(ast.unparse, n.targets)]
    for n in body:
        found += [d.lineno for d in getattr(n, "decorator_list", ()) if kernel in ast.unparse(d)]
    return found[0]


@cache
def nothing(op: Op) -> str:
    """Write a candidate that does nothing."""
    params = ", ".join(op.params)
    return (
        f"from cpuopt import kernel, ops\n\n\n@kernel(ops.{op.name}, 'nothing', parallel=False)\n"
        f"def {op.name}({params}):\n    return\n"
    )

"""What a person or a program asks of the judge: tasks, verdicts, the board. Each answer is one JSON object.

`cpuopt judge --serve` and `cpuopt judge --mcp` offer these functions, and Python calls them.

A board is of one op at one model, batch, length of rows and number of threads: scores at others cannot be compared. It
has, for each machine code, the lowest score that it ever had, so that to submit a kernel again gains nothing. A
kernel that would come first is timed twice, and has the lower score of both. It must also beat a copy of the best that
is timed after it, or it stands behind the best. A kernel that is not faster than the baseline has no place.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from timeit import Timer
from typing import Any, TypedDict, get_type_hints

import numpy as np

from .. import models, ops
from ..check.cases import Case, arguments
from ..check.memory import absent_as_empty, call_args
from ..errors import REFUSED, RefusedError, UserError
from ..files import outputs
from ..files.reading import from_json, parse_json, to_json
from ..isolate.process import Side
from ..kernels import load_all
from ..kernels.registry import AUTO, BASE, KERNELS, NAME, variants
from ..kernels.toolkit.threads import set_threads
from ..lab import ab, records, starter
from ..lab.rounds import default
from ..machine import cores
from ..measure import rates
from ..ops.declaration import Op
from ..wording import count, nearest, one_line, size_of
from . import naive, rules
from .session import (
    FASTER,
    VERDICT_S,
    Judge,
    ModelSizes,
    Say,
    read,
    require_room,
    shapes_of,
)

MODEL, ROWS, TOKENS = ModelSizes.model, ModelSizes.B, ModelSizes.T
KIND = "judge"
"""The kind of the records of submissions."""
TYPES = {str: "a text", int: "a whole number", bool: "true or false"}
ROUNDS, LONGEST_S = 20, 0.2
"""The most calls of each of the package's kernels for a description, and the seconds after which there is no other."""


class TaskSizes(TypedDict):
    """Sizes at which submissions are compared."""

    model: str
    B: int
    T: int
    threads: int


class Interval(TypedDict):
    """A ratio of times."""

    median: float
    low: float
    high: float


class Standing(TypedDict):
    """A submission on a board, as its record has it."""

    candidate: str
    text: str
    code: str
    verdict: str
    score: float
    ratio: Interval
    against: str
    task: TaskSizes
    time: str
    path: str
    source: str
    machine: str


class Desk:
    """A judge, and the folder of records that has its boards.

    Parameters
    ----------
    root : the folder.
    threads : the number of threads of timed calls; by default all cores.
    files : kernel files, which are loaded here; the ops that they declare are tasks.
    models : what a request may name as its model besides the presets.
    """

    def __init__(
        self,
        root: Path = Path("runs"),
        threads: int | None = None,
        say: Say = lambda text: None,
        files: Sequence[str] = (),
        models: Sequence[str] = (),
    ) -> None:
        load_all(files)
        self.root, self.threads, self.say, self.files, self.models = root, threads, say, files, models
        self.measured: dict[tuple[Op, ModelSizes], dict[str, Any]] = {}

    def __enter__(self) -> Desk:
        return self

    def __exit__(self, *why: object) -> None:
        if "judge" in vars(self):
            self.judge.close()

    @cached_property
    def judge(self) -> Judge:
        """The judge, whose process starts when it is first needed."""
        return Judge(self.threads, self.say, self.files)

    def tasks(self, time: bool = False, model: str = MODEL, B: int = ROWS, T: int = TOKENS) -> dict[str, Any]:
        """List all tasks: each op with its kernels, a model that calls it, and the best score.

        With `time` each has the us of its calls in a step of the model, and the roof's; that takes minutes, once.
        """
        found, task, notes = [], ModelSizes(model, B, T), dict[str, None]()
        every = records.entries(self.root)
        for i, op in enumerate(ops.ALL.values()):
            board, more = (self._board(op.name, task, every)[k] for k in ("best", "notes"))
            notes.update(dict.fromkeys(more))
            about: dict[str, Any] = {
                "op": op.name,
                "label": op.label,
                "variants": variants(op.name),
                "where": ab.where_it_runs(op),
            }
            about |= {"baseline": default(op.name), "best": board[0]["score"] if board else None}
            if time:
                self.say(f"{op.name}: {i + 1} of {len(ops.ALL)}")
                about |= self.measure(op, task)
            found.append(about)
        return {"tasks": found, "notes": [*notes]}

    def measure(self, op: Op, task: ModelSizes) -> dict[str, Any]:
        """Time the package's kernels for the calls of a task, once in a session: the sums of us, and the roof's."""
        if (op, task) not in self.measured:
            require_room(op, task)
            each = [(len(s.layers), self.times(op, s)) for s in shapes_of(op, task)]
            us = {v: sum(n * t["us"][v] for n, t in each) for v in each[0][1]["us"]}
            roof = sum(n * t["roof_us"] for n, t in each) if each[0][1]["roof_us"] is not None else None
            self.measured[op, task] = {"us": us, "roof_us": roof}
        return self.measured[op, task]

    def describe(self, op: str, model: str = MODEL, B: int = ROWS, T: int = TOKENS) -> dict[str, Any]:
        """Describe a task: formula, declaration, naive kernel, shapes, times of the package's kernels, roof, best.

        Times are in us, of one call.
        """
        known, task = ab.op_named(op), ModelSizes(model, B, T)
        require_room(known, task)
        try:
            text = naive.text_of(known)
        except UserError as e:
            text = f"# {e}\n"
        formula = inspect.getdoc(sys.modules[known.reference.__module__]) or known.source
        shapes = shapes_of(known, task)
        return {
            "op": known.name,
            "formula": formula,
            "arguments": [starter.describe(a) for a in known.args],
            "parameters": known.params,
            "naive": text,
            "rules": dict(rules.RULES),
            "baseline": default(op),
            "shapes": [{"sizes": dict(s.sizes), "layers": len(s.layers), **self.times(known, s)} for s in shapes],
            "best": self.board(op, model, B, T)["best"][:1],
        }

    def times(self, op: Op, shape: Case) -> dict[str, Any]:
        """Time the package's vanilla and fastest kernel on a shape; return their us, and that of the roof if known."""
        set_threads(self.judge.threads)
        us, rng = {}, np.random.default_rng(0)
        given = arguments(op, shape, rng)
        for v in dict.fromkeys((BASE, default(op.name))):
            kernel = KERNELS[op.name, v].typed(shape.types)
            kernel.compile()
            arrays = absent_as_empty(kernel, given)
            work = [np.zeros(*spec) for spec in kernel.work(shape.sizes).values()]
            args = [*call_args(op, arrays, given, shape.adds or {}), *work]
            call = Timer(partial(kernel.function, *args))
            once = call.timeit(1)
            us[v] = 1e6 * min(once, *call.repeat(max(1, min(ROUNDS, int(LONGEST_S / once))), 1))
        roofs = rates.stored().get(self.judge.threads)
        return {"us": us, "roof_us": ab.bound(roofs, ab.cost(op, shape))[0] / 1e3 if roofs else None}

    def check(self, text: str, op: str) -> dict[str, Any]:
        """Judge whether a candidate is right."""
        return dict(to_json(self.judge.check(text, op)))

    def time(
        self, text: str, op: str, model: str = MODEL, B: int = ROWS, T: int = TOKENS, in_step: bool = False
    ) -> dict[str, Any]:
        """Judge a candidate and time it beside the package's fastest kernel, in training steps too if asked."""
        return dict(to_json(self.judge.time(text, op, ModelSizes(model, B, T), in_step=in_step)))

    def inspect(self, text: str, op: str) -> dict[str, Any]:
        """Compile a candidate; return the innermost loops of its machine code, advice on it, and that code as text."""
        judge, known = self.judge, ab.op_named(op)
        try:
            with judge.remote.within(VERDICT_S):
                read(text, known)
                pair = judge.opened(text, known, default(op))
                return judge.machine_code(pair[0], text)
        finally:
            judge.remote.close()

    def profile(self, model: str = MODEL, B: int = ROWS, T: int = TOKENS) -> dict[str, Any]:
        """Profile a training step: ms of each op in each layer."""
        task = ModelSizes(model, B, T)
        words = [f"--{k}={x}" for k, x in (("model", model), ("threads", self.threads), ("runs", self.root)) if x]
        side = Side.module("profile", "cpuopt", "profile", "--json", *words, f"-B{task.B}", f"-T{task.T}")
        environment = {**os.environ, **side.environment}
        more: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        try:
            made = subprocess.run(side.command, env=environment, timeout=VERDICT_S, **more)
        except subprocess.TimeoutExpired:
            raise UserError(f"profile: no profile of {model} within {VERDICT_S:g} s; take a smaller B or T") from None
        if made.returncode:
            said = made.stderr.strip().splitlines() or [f"profile: ended with status {made.returncode}"]
            raise UserError(said[-1].removeprefix("cpuopt: "))
        return dict(json.loads(made.stdout))

    # The board --------------------------------------------------------------------------------------------------------

    def submit(
        self, text: str, op: str, model: str = MODEL, B: int = ROWS, T: int = TOKENS, in_step: bool = False
    ) -> dict[str, Any]:
        """Judge and time a candidate, and keep it on the board if it is right; return the verdict, with its place.

        Only a kernel that is faster than the baseline has a place.
        """
        task = ModelSizes(model, B, T)
        ruling = self.judge.time(text, op, task, in_step=in_step)
        found = dict(to_json(ruling))
        if ruling.verdict in REFUSED:
            return {**found, "place": None}
        faster = [row for row in self.board(op, model, B, T)["best"] if row["verdict"] == FASTER]
        first = next((row for row in faster if row["code"] != ruling.code), None)
        if ruling.verdict == FASTER and not (first and ruling.timed["score"] <= first["score"]):
            again = dict(to_json(self.judge.time(text, op, task)))
            if again["verdict"] in REFUSED:
                return {**again, "place": None}
            if again["timed"]["score"] < ruling.timed["score"]:
                found = {**again, "timed": {**found["timed"], **again["timed"]}}
            if first:
                copy = float(self.judge.time(first["source"], op, task).timed.get("score", 0.0))
                found["controls"] = {**found["controls"], "a copy of the best": copy}
                if copy >= found["timed"]["score"]:
                    found["timed"]["score"] = min(found["timed"]["score"], first["score"])
        content = {"op": op, "source": text, "task": self.kept(task), "ruling": found}
        try:
            path = records.keep(self.root, KIND, op, content)
        except (UserError, OSError) as e:
            return {**found, "place": None, "path": None, "notes": [f"the submission is not kept: {e}"]}
        places = [r["code"] or r["text"] for r in self.board(op, model, B, T)["best"] if r["verdict"] == FASTER]
        mine = found["code"] or found["text"]
        return {**found, "place": places.index(mine) + 1 if mine in places else None, "path": str(path)}

    def kept(self, task: ModelSizes) -> dict[str, Any]:
        """Return a task as records have it, with the number of threads."""
        return {**asdict(task), "threads": self.threads or cores()}

    def board(self, op: str, model: str = MODEL, B: int = ROWS, T: int = TOKENS) -> dict[str, Any]:
        """List the right submissions of a task on this machine, the best score first, and the number of all tries.

        ``others`` has the tasks at other sizes or numbers of threads for which submissions of the op are kept, and
        ``notes`` the records that were left out because they cannot be read.
        """
        ab.op_named(op)
        return self._board(op, ModelSizes(model, B, T), records.entries(self.root))

    def _board(self, op: str, sizes: ModelSizes, entries: Sequence[records.Entry]) -> dict[str, Any]:
        task = self.kept(sizes)
        best: dict[str, Standing] = {}
        others: list[TaskSizes] = []
        notes: list[str] = []
        tries = 0
        for e in entries:
            if e.trouble and f"-{KIND}-" in e.name:
                notes.append(f"runs {e.name!r} {e.what}")
            c = e.content
            if e.kind != KIND or c.get("op") != op or c.get("machine_id") != rates.machine_id():
                continue
            try:
                with records.readable(e):
                    own = from_json(TaskSizes, {"threads": c["machine"]["cores"], **c["task"]})  # the usual number
                    row = row_of(e, own) if own == task else None
            except UserError as wrong:
                notes.append(str(wrong))
                continue
            if row is None:
                others += [own] * (own not in others)
                continue
            tries += 1
            key = row["code"] or row["text"]
            best[key] = min(best.get(key, row), row, key=lambda x: x["score"])
        return {
            "op": op,
            "task": task,
            "tries": tries,
            "others": others,
            "notes": notes,
            "best": sorted(best.values(), key=lambda x: (x["verdict"] != FASTER, -x["score"])),
        }

    def adopt(self, op: str, name: str, model: str = MODEL, B: int = ROWS, T: int = TOKENS) -> dict[str, Any]:
        """Write the best submission of a task to a file here, registered under a name: a kernel like any other.

        Raises
        ------
        UserError
            If the board is empty, for a name that is no variant's, or a file that is there already.
        """
        board = self.board(op, model, B, T)
        if not (best := board["best"]):
            there = [f"; there are submissions for {task_text(x)}" for x in board["others"][:1]]
            raise UserError(
                f"--adopt {name}: the board of {op} for {task_text(board['task'])} in {self.root} is empty; "
                f"submit a kernel first{''.join(there)}"
            )
        if not (name.isidentifier() and NAME.fullmatch(name)) or name in (*variants(op), AUTO):
            raise UserError(f"--adopt {name!r}: expected a new name of letters and digits; {op} has {variants(op)}")
        path = Path(f"{name}_{op}.py")
        outputs.check(path, "--adopt")
        if path.exists():
            raise UserError(f"--adopt {name}: {path} is there already; move it, or take another name")
        row = best[0]
        try:
            read(row["source"], ab.op_named(op))
        except RefusedError as e:
            raise UserError(f"--adopt {name}: {row['path']} holds a text that the judge refuses: {e}") from e
        times = f"{1 / row['ratio']['median']:.2f} times as fast as {row['against']} for {task_text(row['task'])}"
        path.write_bytes(adopted(row["source"], op, name, f"Adopted from {row['path']}: {times}.").encode())
        return {"path": str(path), "use": f"--kernels {path} --swap {op}={name}"}


def row_of(e: records.Entry, task: TaskSizes) -> Standing:
    """Read a submission's record; raise an error of `records.UNREADABLE` for one that does not have its fields."""
    c, r = e.content, e.content["ruling"]
    row = {k: r[k] for k in ("candidate", "text", "code", "verdict")}
    row |= {k: r["timed"][k] for k in ("score", "ratio", "against")}
    row |= {"task": task, "time": e.time, "path": str(e.path), "source": c["source"], "machine": c["machine"]["cpu"]}
    found: Standing = from_json(Standing, row)
    return found


def task_text(task: Mapping[str, Any]) -> str:
    """Format a task of a record, as in ``gpt2-124M 4x64, 2 threads``."""
    return f"{task['model']} {size_of(task)}, {count(task['threads'], 'thread')}"


def adopted(text: str, op: str, name: str, note: str) -> str:
    """Return the file of a candidate that the rules accept: its text under another name, below a line and a note.

    The line takes all but a few of Python's names from the file's functions. It stands first, so that no word of the
    note declares an encoding. The rules hold for the whole file.

    Raises
    ------
    UserError
        For a file that the rules refuse, or that differs from the text in more than the name.
    """
    file = f"{rules.GUARD}  # no other names of Python's\n# {one_line(note)}\n{renamed(text, op, name)}"
    try:
        rules.read(file)
    except RefusedError as e:
        raise UserError(f"--adopt {name}: the rules refuse what would be written: {e}") from e
    want = ast.parse(text.encode())
    for old in names_of(want, op):
        old.value, old.kind = name, None
    if ast.dump(ast.Module(ast.parse(file).body[1:], [])) != ast.dump(want):
        raise UserError(f"--adopt {name}: the name cannot be written into this text; write it as one text in quotes")
    return file


def names_of(tree: ast.Module, op: str) -> list[ast.Constant]:
    """Return the constants in a text that name its kernels of an op."""
    found = []
    for node in tree.body:
        for d in getattr(node, "decorator_list", ()):
            match d:
                case ast.Call(args=[ast.Attribute(attr=known), ast.Constant(str()) as name]) if known == op:
                    found.append(name)
    return found


def renamed(text: str, op: str, name: str) -> str:
    """Return a candidate's text, without a byte order mark, with its kernel registered under another name."""
    raw = text.removeprefix("\ufeff").encode()
    starts = [0]
    for line in raw.splitlines(keepends=True):  # of bytes: at the ends of lines that Python knows, and no others
        starts.append(starts[-1] + len(line))
    for old in reversed(names_of(ast.parse(raw), op)):
        start = starts[old.lineno - 1] + old.col_offset
        end = starts[(old.end_lineno or 0) - 1] + (old.end_col_offset or 0)
        raw = raw[:start] + repr(name).encode() + raw[end:]
    return raw.decode()


def functions(desk: Desk) -> Mapping[str, Callable[..., dict[str, Any]]]:
    """Return what can be asked, by name."""
    names = ("tasks", "describe", "check", "time", "inspect", "profile", "submit", "board", "adopt")
    return {name: getattr(desk, name) for name in names}


def request(desk: Desk, name: Any, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Call a function of a desk for somebody who may name presets, and no file.

    Raises
    ------
    UserError
        For a mistake in the request.
    """
    if name not in functions(desk):
        raise UserError(f"there is no function {name!r:.80}; {nearest(str(name), functions(desk))}")
    function = functions(desk)[name]
    try:
        inspect.signature(function).bind(**asked)
    except TypeError as e:
        raise UserError(f"{name}: {e}") from e
    for key, want in get_type_hints(function).items():
        if key in asked and type(asked[key]) is not want:
            raise UserError(f"{name}: {key} is {asked[key]!r:.80}; expected {TYPES[want]}")
    models.load_all()
    if (model := asked.get("model", MODEL)) not in (known := [*models.PRESETS, *desk.models]):
        raise UserError(
            f"{name}: model {model!r:.80} is no preset; {nearest(model, known)}. A file or sizes must be named by "
            "--model where the judge is started"
        )
    return dict(to_json(function(**asked)))


def answer(desk: Desk, line: str | bytes) -> dict[str, Any]:
    """Answer a request, ``{"do": NAME, ...}`` on one line; any error becomes ``{"error": ...}``."""
    found: dict[str, Any] = {}
    try:
        asked = parse_json(line)
        require_text(asked.get("id"))
        found = {"id": asked.pop("id")} if "id" in asked else {}
        require_text(asked)
        if not isinstance(do := asked.pop("do", None), str) or do not in functions(desk):
            raise UserError(f"expected an object with do, one of {', '.join(functions(desk))}")
        return {"answer": request(desk, do, asked), **found}
    except Exception as e:
        return {"error": said(e), **found}


def require_text(x: Any) -> None:
    """Require that others can read a value as JSON; raise `ValueError` for an infinite number or half a character."""
    json.dumps(x, ensure_ascii=False, allow_nan=False).encode()


def said(e: Exception) -> str:
    """Return an error of a request on one line; one that is not the asker's has its type."""
    return one_line(str(e) if isinstance(e, UserError) else f"{type(e).__name__}: {e}")[:500]

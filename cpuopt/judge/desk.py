"""What a person or a program asks of the judge: tasks, verdicts, the board. Each answer is one JSON object.

`cpuopt judge --serve` and `cpuopt mcp` offer these functions, and Python calls them.

A board has, for each machine code, the lowest score that it ever had, so that to submit a kernel again gains nothing. A
kernel that would come first is timed twice, and has the lower score of both.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from .. import ops
from ..errors import UserError
from ..files import outputs
from ..files.reading import to_json
from ..kernels.registry import BASE, KERNELS, variants
from ..lab import ab, records, starter
from ..measure import rates
from ..ops.declaration import Op
from . import naive, rules
from .remote import LostError
from .session import REFUSED, Judge, ModelSizes, Say, Stopped, baseline, op_named, read

MODEL, ROWS, TOKENS = ModelSizes.model, ModelSizes.B, ModelSizes.T
KIND = "judge"
"""The kind of the records of submissions."""
ROUNDS = 6
"""Trials of each of the package's kernels for a description."""


class Desk:
    """A judge, and the folder of records that has its boards.

    Parameters
    ----------
    root : the folder.
    threads : the number of threads of timed calls; by default all cores.
    """

    def __init__(self, root: Path = Path("runs"), threads: int | None = None, say: Say = lambda text: None) -> None:
        self.root, self.threads, self.say = root, threads, say

    def __enter__(self) -> Desk:
        return self

    def __exit__(self, *why: object) -> None:
        if "judge" in vars(self):
            self.judge.close()

    @cached_property
    def judge(self) -> Judge:
        """The judge, whose process starts when it is first needed."""
        return Judge(self.threads, self.say)

    def tasks(self) -> dict[str, Any]:
        """List all tasks: each op with its formula's source, its kernels, a model that calls it, and the best score."""
        found = []
        for op in ops.ALL.values():
            board = self.board(op.name)["best"]
            about = {"op": op.name, "label": op.label, "variants": variants(op.name), "where": ab.where_it_runs(op)}
            found.append({**about, "baseline": baseline(op), "best": board[0]["score"] if board else None})
        return {"tasks": found}

    def describe(self, op: str, model: str = MODEL, B: int = ROWS, T: int = TOKENS) -> dict[str, Any]:
        """Describe a task: formula, declaration, naive kernel, shapes, times of the package's kernels, roof, best.

        Times are in us, of one call.
        """
        known, task = op_named(op), ModelSizes(model, B, T)
        try:
            text = naive.text_of(known)
        except UserError as e:
            text = f"# {e}\n"
        formula = inspect.getdoc(sys.modules[known.reference.__module__]) or known.source
        shapes = task.shapes(known)
        return {
            "op": known.name,
            "formula": formula,
            "arguments": [starter.describe(a) for a in known.args],
            "parameters": known.params,
            "naive": text,
            "rules": dict(rules.RULES),
            "baseline": baseline(known),
            "shapes": [{"sizes": dict(s.sizes), "layers": len(s.layers), **self.times(known, s)} for s in shapes],
            "best": self.board(op)["best"][:1],
        }

    def times(self, op: Op, shape: ab.Shape) -> dict[str, Any]:
        """Time the package's vanilla and fastest kernel on a shape; return their us, and that of the roof if known."""
        from . import timing

        timing.require_threads(self.judge.threads)
        names = dict.fromkeys((BASE, baseline(op)))
        kernels = [KERNELS[op.name, v] for v in names]
        for k in kernels:
            k.typed(shape.types).compile()
        pair = ab.Alone(kernels, shape, 0)
        us = {v: min(pair.trial(s) for _ in range(ROUNDS)) / 1e3 for v, s in zip(names, pair.sides, strict=True)}
        roofs = rates.stored().get(self.judge.threads)
        return {"us": us, "roof_us": ab.bound(roofs, ab.cost(op, shape))[0] / 1e3 if roofs else None}

    def check(self, text: str, op: str) -> dict[str, Any]:
        """Judge whether a candidate is right."""
        return dict(to_json(self.judge.check(text, op)))

    def time(self, text: str, op: str, model: str = MODEL, B: int = ROWS, T: int = TOKENS) -> dict[str, Any]:
        """Judge a candidate and time it beside the package's fastest kernel; nothing is kept."""
        return dict(to_json(self.judge.time(text, op, ModelSizes(model, B, T))))

    def inspect(self, text: str, op: str) -> dict[str, Any]:
        """Compile a candidate; return the innermost loops of its machine code, and that as text."""
        judge = self.judge
        try:
            pair = judge.opened(read(text, op_named(op)), baseline(op_named(op)))
            asm = str(judge.remote.ask("asm", pair[0].function)["asm"])  # type: ignore[arg-type]
            return {"loops": judge.loops(pair[0]), "asm": asm}
        except (Stopped, LostError) as e:
            raise UserError(str(e)) from e
        finally:
            judge.remote.close()

    def profile(self, model: str = MODEL, B: int = ROWS, T: int = TOKENS) -> dict[str, Any]:
        """Profile a training step: ms of each op in each layer."""
        command = [sys.executable, "-m", "cpuopt", "profile", "--json", "--model", model, "-B", str(B), "-T", str(T)]
        made = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if made.returncode:
            raise UserError(made.stderr.strip().splitlines()[-1].removeprefix("cpuopt: ") if made.stderr else "profile")
        return dict(json.loads(made.stdout))

    # The board --------------------------------------------------------------------------------------------------------

    def submit(self, text: str, op: str, model: str = MODEL, B: int = ROWS, T: int = TOKENS) -> dict[str, Any]:
        """Judge and time a candidate, and keep it on the board if it is right; return the verdict, with its place."""
        task = ModelSizes(model, B, T)
        ruling = self.judge.time(text, op, task)
        found = dict(to_json(ruling))
        if ruling.verdict in REFUSED:
            return {**found, "place": None}
        first = self.board(op)["best"][:1]
        if not first or ruling.timed["score"] > first[0]["score"]:
            again = self.judge.time(text, op, task)
            if again.verdict in REFUSED:
                return {**dict(to_json(again)), "place": None}
            found = min(found, dict(to_json(again)), key=lambda r: float(r["timed"]["score"]))
        content = {"op": op, "source": text, "task": asdict(task), "ruling": found}
        path = records.keep(self.root, KIND, op, content)
        places = [r["code"] or r["text"] for r in self.board(op)["best"]]
        return {**found, "place": places.index(found["code"] or found["text"]) + 1, "path": str(path)}

    def board(self, op: str) -> dict[str, Any]:
        """List the right submissions of a task on this machine, the best score first, and the number of all tries."""
        op_named(op)
        best: dict[str, dict[str, Any]] = {}
        tries = 0
        for e in records.entries(self.root):
            c = e.content
            if e.kind != KIND or c.get("op") != op or c.get("machine_id") != rates.machine_id():
                continue
            with records.readable(e):
                r, tries = c["ruling"], tries + 1
                row = {k: r[k] for k in ("candidate", "text", "code", "verdict")}
                row |= {k: r["timed"][k] for k in ("score", "ratio", "against")}
                row |= {"task": c["task"], "time": e.time, "path": str(e.path), "source": c["source"]}
                key = str(r["code"] or r["text"])
                best[key] = min(best.get(key, row), row, key=lambda x: float(x["score"]))
        return {"op": op, "tries": tries, "best": sorted(best.values(), key=lambda x: -x["score"])}

    def adopt(self, op: str, name: str, folder: Path = Path()) -> dict[str, Any]:
        """Write the best submission of a task to a file, registered under a name: a kernel like any other.

        Raises
        ------
        UserError
            If the board is empty, for a name that is no variant's, or a file that is there already.
        """
        best = self.board(op)["best"]
        if not best:
            raise UserError(f"--adopt {name}: the board of {op} in {self.root} is empty; submit a kernel first")
        if not name.isidentifier() or name in variants(op):
            raise UserError(f"--adopt {name!r}: expected a new name of letters and digits; {op} has {variants(op)}")
        path = folder / f"{name}_{op}.py"
        outputs.check(path, "--adopt")
        if path.exists():
            raise UserError(f"--adopt {name}: {path} is there already; move it, or take another name")
        row = best[0]
        try:
            read(row["source"], op_named(op))
        except Stopped as e:
            raise UserError(f"--adopt {name}: {row['path']} holds a text that the judge refuses: {e}") from e
        text = renamed(row["source"], op, name)
        note = f"# Adopted from {row['path']}: {1 / row['ratio']['median']:.2f} times as fast as {row['against']}.\n"
        path.write_text(note + text, encoding="utf-8")
        return {"path": str(path), "use": f"--kernels {path} --swap {op}={name}"}


def renamed(text: str, op: str, name: str) -> str:
    """Return a candidate's text with its kernel registered under another name."""
    import ast

    lines = text.splitlines(keepends=True)
    for node in ast.parse(text).body:
        for d in getattr(node, "decorator_list", ()):
            match d:
                case ast.Call(args=[ast.Attribute(attr=known), ast.Constant(str()) as old]) if known == op:
                    line = lines[old.lineno - 1].encode()
                    end = old.end_col_offset or 0
                    lines[old.lineno - 1] = (line[: old.col_offset] + repr(name).encode() + line[end:]).decode()
    return "".join(lines)


def functions(desk: Desk) -> Mapping[str, Callable[..., dict[str, Any]]]:
    """Return what can be asked, by name."""
    names = ("tasks", "describe", "check", "time", "inspect", "profile", "submit", "board", "adopt")
    return {name: getattr(desk, name) for name in names}


def answer(desk: Desk, line: str) -> dict[str, Any]:
    """Answer a request, ``{"do": NAME, ...}`` on one line; a mistake becomes ``{"error": ...}``."""
    try:
        request = json.loads(line)
        if not isinstance(request, dict) or request.get("do") not in functions(desk):
            raise UserError(f"expected an object with do, one of {', '.join(functions(desk))}")
        asked = {k: x for k, x in request.items() if k not in ("do", "id")}
        function = functions(desk)[request["do"]]
        try:
            inspect.signature(function).bind(**asked)
        except TypeError as e:
            raise UserError(f"{request['do']}: {e}") from e
        found = {"answer": to_json(function(**asked))}
        return {**found, "id": request["id"]} if "id" in request else found
    except (UserError, ValueError, RecursionError) as e:
        return {"error": str(e)}

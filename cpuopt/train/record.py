"""A run's folder: its settings, its machine, its results.

``runs/<time>-<name>/`` holds ``config.json``, ``machine.json``, ``metrics.jsonl``, ``main.log`` (in llm.c's format),
``profile.json`` and ``summary.json``; with ``--tensorboard`` also ``events.out.tfevents.*``.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from .. import machine
from ..errors import UserError
from ..files import write_whole
from ..files.reading import open_file, read_json, readable, to_json
from . import tensorboard

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_name(name: str) -> str:
    """Return a run's name, if it can be a folder's name and stays inside ``runs/``.

    Raises
    ------
    UserError
        For anything but letters, digits, ``.``, ``_`` and ``-``, 64 at most, starting with a letter or digit.
    """
    if not NAME.fullmatch(name) or ".." in name:
        raise UserError(
            f"--run {name!r}: expected up to 64 letters, digits, '.', '_' or '-', starting with a letter or digit, "
            "because it names a folder in runs/"
        )
    return name


def _new_folder(root: Path, stem: str) -> Path:
    """Make a folder that no other run has."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        numbers = count(2)
        path = root / stem
        while True:
            try:
                path.mkdir()
            except FileExistsError:  # perhaps only since a moment
                path = root / f"{stem}.{next(numbers)}"
            else:
                return path
    except OSError as e:
        raise _no_root(root, e) from e


def nearest_folder(root: Path) -> Path:
    """Return the folder of runs, or the nearest of its parents that is there."""
    return next(p for p in (root, *root.absolute().parents) if os.path.lexists(p))


def check_root(root: Path) -> None:
    """Refuse a folder of runs that cannot be written to, before anything is measured.

    Raises
    ------
    UserError
        If no folder can be made in it, or in the nearest of its parents that is there. Nothing stays behind.
    """
    try:
        with TemporaryDirectory(prefix=".cpuopt-", dir=nearest_folder(root)):
            pass
    except OSError as e:
        raise _no_root(root, e) from e


def _no_root(root: Path, e: OSError) -> UserError:
    return UserError(f"--runs {root}: {e.strerror}; name a directory that can be written with --runs DIR")


LOGGED = re.compile(r"s:(\d+) ")


def _whole_lines(path: Path) -> list[str]:
    """Read the complete lines; the last line of a killed process may be cut."""
    with open_file(path) as file:
        return file.read().decode(errors="replace").split("\n")[:-1]


def _json(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("step"), int) else None


@dataclass(frozen=True)
class RunOrigin:
    """What a run is known by, whatever its folder is called.

    Attributes
    ----------
    id : drawn at random when the run began; None in runs of earlier versions.
    began : seconds since 1970 in UTC, and later than that of any run that was there; 0 if it is not recorded.
    """

    id: str | None
    began: float


LAST = 253402300800.0
"""Seconds from 1970 to the year 10000."""


def origin_of(run: Path) -> RunOrigin:
    """Read the origin of a run from its ``machine.json``."""
    try:
        here = read_json(run / "machine.json")
    except (OSError, ValueError):
        return RunOrigin(None, 0.0)
    found, began = here.get("run_id"), here.get("began")
    if not isinstance(began, float) or not 0 <= began < LAST:
        try:
            began = datetime.strptime(str(here.get("time")), "%Y-%m-%dT%H:%M:%S%z").timestamp()
        except (ValueError, OverflowError):
            began = 0.0
    return RunOrigin(found if isinstance(found, str) else None, began)


def runs_of(root: Path) -> list[Path]:
    """List the runs in a folder, from the first to the last that began, whatever clock or time zone named them."""
    try:
        found = [path for path in root.iterdir() if path.is_dir()]
    except OSError:
        return []
    return sorted(found, key=lambda path: (origin_of(path).began, path.name))


def keep(root: Path, kind: str, name: str, content: Mapping[str, Any]) -> Path:
    """Keep a measurement: ``<time>-<kind>-<name>/record.json`` in the folder of all runs.

    Parameters
    ----------
    kind : ``ab``, ``bench``, ``judge``, ``profile`` or ``tune``.
    name : the subject of the measurement; characters that do not suit a folder's name are replaced.
    content : any JSON content. Kind, format, time, commit and machine are added.

    Raises
    ------
    UserError
        If it cannot be written; no folder stays behind.
    """
    safe = re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("._")[:48]
    path = _new_folder(root, f"{time.strftime('%Y%m%d-%H%M%S')}-{kind}{'-' + safe if safe else ''}")
    head = {"kind": kind, "format": 1, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "commit": machine.commit()}
    try:
        write_json(path / "record.json", {**head, "machine": machine.describe(), **content}, indent=1)
    except UserError:
        with suppress(OSError):
            path.rmdir()
        raise
    return path


def write_json(path: Path, content: Any, indent: int) -> None:
    """Write one JSON file, whole or not at all.

    Raises
    ------
    UserError
        If it cannot be written.
    """
    write_whole(path, [json.dumps(to_json(content), indent=indent).encode() + b"\n"])


class Run:
    """A run's folder, made when the run starts.

    Parameters
    ----------
    root : the folder that holds all runs.
    name : the run's name, already checked.
    config : all settings.
    here : facts of the machine besides those of `machine`.
    """

    def __init__(
        self, root: Path, name: str, config: Mapping[str, Any], here: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{check_name(name)}"
        before = runs_of(root)[-1:]
        self._open(_new_folder(root, stem))
        self.write("config.json", config)
        began = max(time.time(), *(origin_of(path).began + 1e-3 for path in before), 0.0)  # even by a clock set back
        self.id: str | None = os.urandom(8).hex()
        self.write("machine.json", {**here, "run_id": self.id, "began": began, **machine.describe()})
        for name in self._pending:
            (self.path / name).touch()

    @classmethod
    def reopen(cls, path: Path, step: int) -> tuple[Run, list[dict[str, Any]]]:
        """Continue a run as it was after a step; return it, and the metrics up to there.

        Raises
        ------
        UserError
            If another process holds it, or its files are missing.
        """
        run = cls.__new__(cls)
        run._open(path)
        run.id = origin_of(path).id
        with readable(path, "the run "):
            lines = _whole_lines(path / "metrics.jsonl")
            metrics = [m for m in map(_json, lines) if m is not None and m["step"] <= step]
            logged = [x for x in _whole_lines(path / "main.log") if (at := LOGGED.match(x)) and int(at[1]) <= step]
        write_whole(path / "metrics.jsonl", [f"{json.dumps(m)}\n".encode() for m in metrics])
        write_whole(path / "main.log", [f"{line}\n".encode() for line in logged])
        return run, metrics

    @classmethod
    def followed(cls) -> Run:
        """Return a run that another process writes; this one writes nothing."""
        run = cls.__new__(cls)
        run._begin(Path())
        return run

    def _begin(self, path: Path) -> None:
        self.path, self.trouble, self.id, self._events = path, "", None, ""
        self._pending = {"metrics.jsonl": b"", "main.log": b""}
        self._lock: int | None = None

    def _open(self, path: Path) -> None:
        """Lock a folder: no other process may write to it until this one ends."""
        self._begin(path)
        with readable(path, "the run "):
            self._lock = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            os.close(self._lock)
            raise UserError(f"another process is writing to the run {str(path)!r}; wait for it, or end it") from e

    def write(self, name: str, content: Any) -> None:
        """Write one JSON file of the run, whole or not at all; `UserError` if it cannot be written."""
        if self._lock is not None:
            write_json(self.path / name, content, indent=2)

    def begin_events(self, history: Sequence[Mapping[str, Any]], val: Mapping[int, float]) -> None:
        """Write TensorBoard events from now on, in a file that begins with the events before a resume.

        Parameters
        ----------
        history : the metrics of the steps so far.
        val : validation losses, by the steps before them.
        """
        before = list(self.path.glob(tensorboard.FILES))
        self._events = tensorboard.new_name()
        self._pending[self._events] = b""
        events = [tensorboard.opening(), *(tensorboard.validation(n, loss) for n, loss in val.items())]
        self._append(self._events, b"".join(events + [tensorboard.step_event(m) for m in history]))
        for old in before:
            with suppress(OSError):  # the old file is not shown twice, since the new one marks a restart
                old.unlink()

    def step_done(self, metrics: Mapping[str, Any]) -> None:
        """Add one step to ``metrics.jsonl`` and ``main.log``."""
        m = metrics
        self._append("metrics.jsonl", f"{json.dumps(to_json(metrics))}\n".encode())
        line = f"s:{m['step']} trl:{m['loss']:.4f} lr:{m['lr']:.6f} norm:{m['grad_norm']:.2f}\n"
        self._append("main.log", line.encode())
        if self._events:
            self._append(self._events, tensorboard.step_event(metrics))

    def validation(self, step: int, loss: float) -> None:
        """Add a validation loss to ``main.log``."""
        self._append("main.log", f"s:{step} tel:{loss:.4f}\n".encode())
        if self._events:
            self._append(self._events, tensorboard.validation(step, loss))

    def _append(self, name: str, more: bytes) -> None:
        """Add to a file. Text that the disk refuses now is written with the next piece; `trouble` holds the reason."""
        if self._lock is None:
            return
        self._pending[name] += more
        try:
            with open(self.path / name, "ab", buffering=0) as file:
                written = file.write(self._pending[name])
            self._pending[name] = self._pending[name][written:]
            self.trouble = ""
        except OSError as e:
            self.trouble = f"cannot write {str(self.path / name)!r}: {e.strerror}; the rest is kept and tried again"

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        if self._lock is not None:
            os.close(self._lock)

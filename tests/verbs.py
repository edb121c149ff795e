"""Verbs and scripts as tests run them, in this process."""

import argparse
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from cpuopt import cli
from cpuopt.errors import UserError

ROOT = Path(__file__).parents[1]
SQUARES = "".join(f"{i} squared is {i * i}.\n" for i in range(1000))
"""A text for runs of a few steps."""


def script(path):
    """Load a script of the repository, as `docs/pages.py`, under the name of its file."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


def strict(text):
    """Read JSON, and only what the standard allows."""

    def refuse(word):
        raise ValueError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def process(*words, code="", limit_s=300, **environment):
    """Run the command, or code, in a process of its own; return its status, and what it says on both streams."""
    env = {name: v for name, v in os.environ.items() if name != "NUMBA_NUM_THREADS"} | {"PYTHONPATH": str(ROOT)}
    start = ["-c", code] if code else ["-m", "cpuopt"]
    how = {"env": env | environment, "text": True, "errors": "replace", "timeout": limit_s}
    return subprocess.run([sys.executable, "-P", *start, *words], capture_output=True, **how)


def ended(pid):
    """Whether a process has ended; a zombie has, and who reaps it is not ours to say."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait(until, seconds=600):
    """Wait until something is so, and fail if that takes longer."""
    deadline = time.monotonic() + seconds
    while not until() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert until()


def flags_of(parser):
    """Yield the flags of a parser and of its own verbs."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from flags_of(below)
        else:
            yield action


def printed(capsys, *flags, status=0):
    """Run a verb; return what it prints."""
    assert cli.main([*flags]) == status
    return capsys.readouterr().out


def ran(capsys, *flags, status=0):
    """Run a verb; return what it prints as JSON."""
    return json.loads(printed(capsys, *flags, "--json", status=status))


def error_of(function, *args, **kwargs):
    """Return the one line of the `UserError` that a call raises."""
    with pytest.raises(UserError) as e:
        function(*args, **kwargs)
    assert str(e.value).isprintable()
    return str(e.value)


def fails(match, function, *args, **kwargs):
    """Check that a call raises a `UserError` of one line that matches; return the line."""
    line = error_of(function, *args, **kwargs)
    assert re.search(match, line), line
    return line


def refused(capsys, *flags):
    """Run a verb that refuses; return its one line."""
    assert cli.main([*flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def error(capsys):
    """Return the one line in which a verb has said what is wrong, among others."""
    (line,) = [v for v in capsys.readouterr().err.splitlines() if v.startswith("cpuopt: ")]
    return line


def spy(monkeypatch, owner, name, act):
    """Give the arguments of each call of a function to `act` first, which may raise."""
    usual = getattr(owner, name)

    def function(*args, **more):
        act(*args, **more)
        return usual(*args, **more)

    monkeypatch.setattr(owner, name, function)


@contextmanager
def inspector(file):
    """Yield `cpuopt.lab.inspect.inspect` for kernels of a file and of the package; one process compiles all."""
    from cpuopt.isolate.process import Side, Worker
    from cpuopt.lab.inspect import read

    side = Side.module("compiler", "cpuopt.kernels.compile.inspection", CPUOPT_CACHE_DIR=str(file.parent))
    with Worker(side, limit_s=300) as worker:

        def found(op, variant):
            asked = {"kernels": [str(file)], "level": 0, "types": {}}
            return read(op, variant, worker.ask("inspect", op=op, variant=variant, **asked))

        yield functools.cache(found)


def goes_on(capsys, folder, *flags, refused, said):
    """Train ten steps at once, and five and five, with the same bytes; return the last checkpoint.

    Parameters
    ----------
    refused : flags that the run cannot be resumed with, and what is `said` of them.
    """
    every = [*flags, "--save-every", "5", "--keep", "9"]
    assert cli.main([*every, "--steps", "10", "--runs", str(folder / "whole")]) == 0
    assert cli.main([*every, "--steps", "5", "--runs", str(folder / "cut")]) == 0
    resume = ["train", "--resume", "--steps", "10", "--runs", str(folder / "cut")]
    assert cli.main([*resume, *refused]) == 2
    assert said in capsys.readouterr().err
    assert cli.main(resume) == 0
    (one,), (two,) = (list((folder / root).glob("*/checkpoints/step-00000010")) for root in ("whole", "cut"))
    tensors = [{f.name: f.read_bytes() for f in at.glob("*.safetensors")} for at in (one, two)]
    assert tensors[0] == tensors[1]
    return one

"""Runs of milliseconds, in the working directory, which has a `text.txt` (the fixture `small_text`)."""

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from listening import Listener

from cpuopt.train import checkpoint, job
from cpuopt.train.resume import resumed
from cpuopt.train.trainer import train

SIZES = '{"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 256, "block_size": 16}'
FLAGS = ["--model", SIZES, "--data", "text.txt", "-B", "2", "-T", "8", "--variant", "vanilla", "--val-every", "0"]


def prepare(resume=None, **more):
    """Prepare a run of three steps, or one that goes on."""
    base = {"model": SIZES, "data": "text.txt", "B": 2, "T": 8, "steps": 3, "val_every": 0, "variant": "vanilla"}
    return job.prepare(job.Settings(**{**base, **more}) if resume is None else resumed(resume, more), resume=resume)


def run(listener=None, change=lambda ready: None, root="runs", resume=None, **more):
    """Train, of a job that is changed before; return the result, the job, and the listener."""
    ready, listener = prepare(resume, **more), listener or Listener()
    change(ready)
    ticks = itertools.count(step=0.25)
    return train(ready, Path(root), listener, lambda: next(ticks), resume), ready, listener


def only(root="runs"):
    """Return the one folder in a folder."""
    (path,) = Path(root).iterdir()
    return path


def steps_of(root="runs"):
    """Count the steps that the runs of a folder have logged."""
    return sum(len(path.read_text().splitlines()) for path in Path(root).glob("*/metrics.jsonl"))


def command(*words, **options):
    """Start a command in a process of its own."""
    environment = {name: v for name, v in os.environ.items() if name != "NUMBA_NUM_THREADS"}
    return subprocess.Popen([sys.executable, "-m", "cpuopt", *words], env=environment, text=True, **options)


def wait_for_steps(n, running):
    """Wait until a process has logged so many steps."""
    deadline = time.monotonic() + 120
    while steps_of() < n:
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def sealed(path, state):
    """Write the state of a checkpoint, and the manifest that its files have now; return its path."""
    (path / checkpoint.STATE).write_text(json.dumps(state))
    (path / checkpoint.MANIFEST).unlink(missing_ok=True)
    names = [p.name for p in path.iterdir()]
    files = {name: dict(zip(("size", "crc32"), checkpoint._checksum(path / name), strict=True)) for name in names}
    (path / checkpoint.MANIFEST).write_text(json.dumps({"step": int(path.name[5:]), "files": files}))
    return path

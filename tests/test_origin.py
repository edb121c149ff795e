"""Which run is the newest, and which run a checkpoint belongs to."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from listening import Listener
from small_runs import run
from verbs import fails, refused

from cpuopt.train import checkpoint, job, record
from cpuopt.train import trainer as training
from cpuopt.train.resume import resumed
from cpuopt.train.trainer import train

pytestmark = pytest.mark.usefixtures("small_text")
ROOT = Path("runs")


def made(name, zone, monkeypatch):
    """A run of one step under a time zone."""
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        return run(steps=1, save_every=1, run=name)[0].path
    finally:
        monkeypatch.delenv("TZ")
        time.tzset()


def change(path, **facts):
    file = path / "machine.json"
    file.write_text(json.dumps({n: x for n, x in (json.loads(file.read_text()) | facts).items() if x is not None}))


def test_the_newest_run_is_the_last_that_began_whatever_the_time_zone(monkeypatch):
    first, second = made("first", "XYZ-14", monkeypatch), made("second", "XYZ+11", monkeypatch)
    assert first.name > second.name  # by the clocks on the wall
    assert checkpoint.find_run(ROOT, "") == second
    for path in (first, second):
        change(path, began=None)  # as earlier versions have it
        time.sleep(1.1 if path is first else 0)
    change(second, time=time.strftime("%Y-%m-%dT%H:%M:%S+0000", time.gmtime()))
    assert checkpoint.find_run(ROOT, "") == second


def test_the_newest_run_is_the_last_that_began_even_by_a_clock_that_was_set_back(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: 4e9)
        first = made("first", "UTC", monkeypatch)
    second, third = made("second", "UTC", monkeypatch), made("third", "UTC", monkeypatch)
    first.rename(ROOT / "zzz")
    assert (record.runs_of(ROOT), checkpoint.find_run(ROOT, "")) == ([ROOT / "zzz", second, third], third)


def test_a_time_that_cannot_be_is_not_the_newest(monkeypatch):
    first, second = made("zzz", "UTC", monkeypatch), made("aaa", "UTC", monkeypatch)
    for facts in ({"began": 1e300}, {"began": "x", "time": 7}, {"began": -1.0}, {"began": True}):
        change(first, **{"time": None} | facts)
        assert checkpoint.find_run(ROOT, "") == second
    (first / "machine.json").write_text("{")
    assert checkpoint.find_run(ROOT, "") == second


def test_a_checkpoint_of_another_run_is_refused(monkeypatch, capsys):
    a, b = run(steps=4, save_every=2, run="a")[0].path, run(steps=2, save_every=1, run="b", seed=1)[0].path
    name = "step-00000004"
    shutil.copytree(a / "checkpoints" / name, b / "checkpoints" / name)
    found = checkpoint.newest(b)
    assert found.state["step"] == 2
    (text,) = found.passed_over
    assert f"'{b}/checkpoints/{name}' is of another run: it has the id " in text
    result = train(job.prepare(resumed(found, {"steps": 3, "keep": 1}), resume=found), ROOT, Listener(), resume=found)
    assert result.status == 0
    assert checkpoint.newest(b).state["step"] == 3  # the foreign one did not take its place
    for step in ("step-00000002", "step-00000003"):
        shutil.rmtree(b / "checkpoints" / step, ignore_errors=True)
    fails(r"no checkpoint to go on from: .* is of another run", checkpoint.newest, b)
    assert "is of another run" in refused(capsys, "train", "--resume", str(b))


def test_a_run_of_an_earlier_version_has_checkpoints_without_an_id(monkeypatch):
    class Earlier(record.Run):
        def __init__(self, *args):
            super().__init__(*args)
            self.id = None
            change(self.path, run_id=None)

    new = run(steps=2, save_every=2, run="new")[0].path
    monkeypatch.setattr(training, "Run", Earlier)
    old = run(steps=4, save_every=4, run="old")[0].path
    found = checkpoint.newest(old)
    train(job.prepare(resumed(found, {"steps": 5}), resume=found), ROOT, Listener(), resume=found)
    assert (checkpoint.newest(old).state["step"], checkpoint.newest(old).state["run_id"]) == (5, None)
    for folder in (old, new):  # each gets what the other has
        os.rename(folder / "checkpoints", f"{folder.name}-kept")
    for folder, other in ((old, new), (new, old)):
        shutil.copytree(f"{other.name}-kept", folder / "checkpoints")
        fails(r"of another run: it has the id ", checkpoint.newest, folder)


def test_a_run_that_was_copied_whole_goes_on():
    shutil.copytree(run(steps=2, save_every=1)[0].path, "copy")
    assert checkpoint.newest(Path("copy")).state["step"] == 2

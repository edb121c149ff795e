"""TensorBoard events, read back with TensorBoard's own reader."""

import contextlib
import json
import math
import sys
from pathlib import Path

import pytest
from listening import KilledError, Listener, die
from small_runs import only, run
from verbs import fails, refused

from cpuopt.train import checkpoint, job, tensorboard
from cpuopt.train.record import Run

pytest.importorskip("tensorboardX")
pytestmark = pytest.mark.usefixtures("small_text")
accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
HOW = {"steps": 12, "val_every": 4, "lr": 1e-2, "save_every": 5}


def trained(die_after=None, resume=None, **more):
    """Train for twelve steps, or go on with a run; return its folder."""
    with contextlib.suppress(KilledError):
        run(Listener(die_after, die), resume=resume, **({} if resume else HOW), **more)
    return only()


def curves(folder):
    """What TensorBoard shows of a folder: the points of each tag."""
    reader = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    assert reader.Tags()["tensors"] == []
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def expected(folder):
    """The same of the run's own record."""
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    val = json.loads((folder / "summary.json").read_text())["val_loss"]
    points = {tag: [(m["step"], pytest.approx(m[name])) for m in metrics] for name, tag in tensorboard.TAGS.items()}
    return points | {"loss/validation": [(int(n), pytest.approx(x)) for n, x in val.items()]}


def test_events_are_the_metrics():
    folder = trained(tensorboard=True)
    got = curves(folder)
    assert (got, [step for step, _ in got["loss/train"]]) == (expected(folder), [*range(1, 13)])
    assert [step for step, _ in got["loss/validation"]] == [0, 4, 8, 12]


@pytest.mark.parametrize("old", ["goes", "stays", "was never there"])
def test_a_resumed_run_goes_on_with_the_same_curve(monkeypatch, old):
    folder = trained(tensorboard=old != "was never there", die_after=8)
    before = list(folder.glob(tensorboard.FILES))
    if before:  # as a killed process leaves it
        before[0].write_bytes(before[0].read_bytes()[:-3])
        assert curves(folder)["loss/train"][-1][0] == 7
    found = checkpoint.newest(folder)
    assert found.state["step"] == 5
    with monkeypatch.context() as patch:
        if old == "stays":
            patch.setattr(Path, "unlink", lambda self, missing_ok=False: None)
        trained(resume=found, tensorboard=True)
    assert (curves(folder), len(curves(folder)["loss/train"])) == (expected(folder), 12)
    files = list(folder.glob(tensorboard.FILES))
    assert (len(files) == 1, before[0] in files if before else None) == {
        "goes": (True, False), "stays": (False, True), "was never there": (True, None)
    }[old]  # fmt: skip


def test_a_number_that_is_none(tmp_path):
    first = {"step": 1, "loss": None, "lr": 0.1, "grad_norm": math.inf, "step_ms": 1.0, "tokens_per_s": 2.0}
    run = Run(tmp_path, "x", {})
    run.begin_events([first], {})
    run.step_done({**first, "step": 2, "loss": 3.0})
    (one, two), norms = (curves(run.path)[tag] for tag in ("loss/train", "grad_norm"))
    assert math.isnan(one[1])
    assert (two, norms[0]) == ((2, 3.0), (1, math.inf))


def test_the_extra_is_named_where_it_is_missing_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    assert "pip install 'cpuopt[tensorboard]'" in refused(capsys, "train", "--model", "gpt2-tiny", "--tensorboard")
    assert {p.name for p in tmp_path.iterdir()} == {"text.txt"}
    fails("tensorboardX, which is not installed", job.Settings(tensorboard=True).check)
    job.Settings(tensorboard=False).check()


def test_without_the_option_nothing_of_it_is_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    assert not list(trained().glob(tensorboard.FILES))


def test_what_the_disk_does_not_take_is_written_later(tmp_path):
    metrics = {"step": 1, "loss": 1.5, "lr": 0.1, "grad_norm": 1.0, "step_ms": 1.0, "tokens_per_s": 2.0}
    run = Run(tmp_path, "x", {})
    run.begin_events([], {})
    (file,) = run.path.glob(tensorboard.FILES)
    away = file.rename(tmp_path / "away")
    file.mkdir()
    run.step_done(metrics)
    assert "cannot write" in run.trouble
    file.rmdir()
    away.rename(file)
    run.step_done({**metrics, "step": 2})
    assert (run.trouble, [step for step, _ in curves(run.path)["loss/train"]]) == ("", [1, 2])

"""Early stop and the best checkpoint: when a run ends, which weights it has, and what a resume keeps."""

import json
import os
from functools import partial
from pathlib import Path

import pytest
from verbs import ran, refused

from cpuopt import cli
from cpuopt.train import checkpoint, trainer

LOSSES = [9.0, 5.0, 3.0, 3.5, 3.0, float("nan"), 2.0, 1.0]
"""Of the validations after 0, 1, 2, ... steps: the best of the first six is that after step 2."""
RUN = ["train", "--model", '{"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 256, "block_size": 32}', "-T", "32"]
RUN += ["-B", "1", "--variant", "vanilla", "--data", "c.jsonl", "--val-every", "1", "--lr", "1e-2"]


@pytest.fixture(autouse=True)
def _here(here, monkeypatch):
    with open("c.jsonl", "w") as file:
        file.writelines(json.dumps({"prompt": str(i), "completion": "ab"[i % 2]}) + "\n" for i in range(20))
    monkeypatch.setattr(trainer, "validate", lambda job, stopped: LOSSES[job.done])


@pytest.fixture
def train(capsys):
    return partial(ran, capsys, *RUN)


def kept():
    (folder,) = Path("runs").glob("*/checkpoints")
    return sorted(int(name.removeprefix("step-")) for name in os.listdir(folder))


@pytest.mark.parametrize(("patience", "last"), [(0, 7), (1, 3), (2, 4), (3, 5), (4, 7)])
def test_a_run_ends_after_as_many_validations_without_a_better_one(train, patience, last):
    assert train("--steps", "7", "--patience", str(patience))["steps"] == last


def test_the_best_weights_are_kept_and_saved(train):
    """Those of a run that ended when they were the best."""
    keep = ["--keep-best", "--save", "best", "--save-every", "1", "--keep", "1"]
    found = train("--steps", "7", "--patience", "3", *keep)
    assert (found["steps"], found["best_step"], kept()) == (5, 2, [2, 5])
    (run,) = Path("runs").iterdir()
    assert (checkpoint.chosen(run).state["step"], checkpoint.newest(run).state["step"]) == (2, 5)
    for path in Path("runs").glob("*/*"):
        path.rename(path.with_name(f"old-{path.name}"))
    train("--steps", "2", "--save", "two")
    train("--steps", "5", "--save", "five")
    best, two, five = (Path(name, "model.safetensors").read_bytes() for name in ("best", "two", "five"))
    assert best == two != five


def test_the_adapter_of_a_run_is_that_of_its_best_step(train):
    train("--steps", "4", "--lora", "r=2", "--keep-best", "--save", "a", "--save-every", "1", "--keep", "1")
    assert kept() == [2, 4]
    (run,) = Path("runs").iterdir()
    assert cli.main(["convert", str(run), "b"]) == 0
    best, converted = (Path(name, "adapter_model.safetensors").read_bytes() for name in "ab")
    assert best == converted


def test_a_resumed_run_keeps_its_patience_and_its_best(train, capsys):
    train("--steps", "4", "--patience", "3", "--keep-best", "--save-every", "4", "--keep", "1")
    assert kept() == [2, 4]
    found = ran(capsys, "train", "--resume", "--steps", "7", "--save", "best")
    assert (found["steps"], found["best_step"], kept()) == (5, 2, [2, 5])


def test_the_last_weights_do_not_pass_for_the_best(train, capsys):
    """A run that kept no checkpoint of its best step, and is asked for its weights when it goes on."""
    train("--steps", "4", "--save-every", "4")
    flags = ["--keep-best", "--patience", "3", "--steps", "7", "--save", "best", "--json"]
    assert cli.main(["train", "--resume", *flags]) == 1
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["steps"], found["best_step"], found["weights"]) == (5, 2, "best")
    assert found["diagnosis"].startswith("the best weights, of step 2, cannot be read: ")
    assert found["diagnosis"].endswith("; the weights are those of step 5")
    assert "cpuopt: the best weights, of step 2" in err


def test_it_needs_something_to_validate_on(capsys):
    assert "--patience: expected with --val-every N" in refused(capsys, *RUN, "--patience", "2", "--val-every", "0")
    Path("c.jsonl").write_text('{"text": "a"}\n')
    assert "--keep-best: the data have nothing held out" in refused(capsys, *RUN, "--keep-best")
    assert not os.path.exists("runs")

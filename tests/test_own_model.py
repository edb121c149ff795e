"""A model in a user's file: every verb takes it, and no checkpoint runs it."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from verbs import fails, ran, refused

from cpuopt import cli, kernels, models
from cpuopt.models import own
from cpuopt.train import checkpoint, job
from cpuopt.weights.tensors import TensorFile

FILE = '''
"""Models of one's own."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cpuopt import functional as F
from cpuopt import nn
from cpuopt.models import gpt2

with Path("ran").open("a") as ran:
    ran.write("x")

class Net(nn.Module):
    block_size = 16

    def __init__(self):
        self.wte, self.head, self.loss = nn.Embedding(256, 16), nn.Linear(16, 256), nn.CrossEntropyLoss()

    def forward(self, tokens, targets):
        return self.loss(self.head(F.gelu(self.wte(tokens))), targets)

class MLP(nn.Module):
    def __init__(self):
        self.fc, self.out, self.loss = nn.Linear(2, 8), nn.Linear(8, 2), nn.CrossEntropyLoss()

    def forward(self, x, y):
        return self.loss(self.out(F.gelu(self.fc(x))), y)

class Slip(Net):
    def forward(self, tokens, targets):
        x = self.wte(tokens)
        return self.los(self.head(x), targets)

def points(n, rows=6):
    rng = np.random.default_rng(n)
    y = rng.integers(0, 2, rows)
    return {"x": rng.normal(size=(rows, 2)) + 3 * y[:, None], "y": y}

def fixed():
    return MLP(), points(0)

def batches():
    return MLP(), points

def drawn(B):
    return MLP(), {"x": ((B, 2), "float32"), "y": ((B,), "int32")}

def rows_of_tokens(B, T):
    return MLP(), {"x": ((2 * B * T, 2), "float32"), "y": ((2 * B * T,), "int32")}

@dataclass(frozen=True)
class Sizes(gpt2.Config):
    n_layer: int = 1
    n_head: int = 2
    n_embd: int = 32
    vocab_size: int = 256
    block_size: int = 32

def broken():
    return MLP(), 1 / 0

def nothing():
    return 3

net = Net()
'''


@pytest.fixture(autouse=True)
def _alone(monkeypatch, here):
    forget(monkeypatch)
    Path("own.py").write_text(FILE)


def forget(monkeypatch):
    """As in a process that has opened no model."""
    monkeypatch.setattr(own, "OPENED", {})
    kernels.forget("own.py")
    own._made.cache_clear()


def weights(run):
    file = TensorFile(checkpoint.newest(Path(run)).path / checkpoint.PARAMS)
    return {name: file.read(name) for name in file.tensors}


def test_a_model_of_a_file_trains_resumes_and_evaluates(capsys):
    flags = ["train", "--model", "own.py:batches", "--lr", "1e-1", "--save-every", "4", "--threads", "1", "--seed", "5"]
    whole = ran(capsys, *flags, "--steps", "8", "--run", "whole")
    assert whole["loss_last"] < 0.5 * whole["loss_first"]
    assert whole["val_loss"] == {}
    cut = ran(capsys, *flags, "--steps", "4", "--run", "cut")
    assert weights(cut["path"]).keys() == {"fc.weight", "fc.bias", "out.weight", "out.bias"}
    Path("elsewhere").mkdir()
    os.chdir("elsewhere")
    ran(capsys, "train", "--resume", f"../{cut['path']}", "--model", "../own.py:batches", "--steps", "8")
    os.chdir("..")
    one, two = weights(whole["path"]), weights(cut["path"])
    assert all((one[name] == two[name]).all() for name in one)
    text = ran(capsys, "train", "--model", "own.py:Net", "-B", "2", "-T", "8", "--steps", "2", "--save-every", "2")
    assert [*text["val_loss"]] == ["0", "2"]
    found = ran(capsys, "eval", "--init", text["path"], "--model", "own.py:Net", "-B", "2", "-T", "8", "--limit", "1")
    assert found["loss"] == pytest.approx(np.log(256), rel=0.05)


def test_a_config_of_a_file_generates(capsys):
    config = models.parse("own.py:Sizes")
    found = (config.vocab_size, config.block_size, config.model, models.name_of(config))
    assert found == (256, 32, "file", "own.py:Sizes")
    assert ran(capsys, "generate", "--model", "own.py:Sizes", "--prompt", "ab", "--max-tokens", "3")["tokens"] == 3


def test_no_checkpoint_runs_the_file_of_its_model(capsys, monkeypatch):
    run = ran(capsys, "train", "--model", "own.py:fixed", "--steps", "1", "--save-every", "1")["path"]
    state = json.loads((checkpoint.newest(Path(run)).path / "state.json").read_text())
    digest = state["sizes"]["digest"]
    assert state["sizes"] == {"file": "own.py", "symbol": "fixed", "digest": digest}
    assert state["made_by"]["models"].keys() == {"own.py"}
    forget(monkeypatch)
    Path("ran").unlink()
    assert "name it: --model own.py:fixed" in refused(capsys, "train", "--resume", run, "--steps", "2")
    named = "the model is own.py:fixed, in a file of code, which nothing starts by itself"
    assert all(named in refused(capsys, verb, "--init", run) for verb in ("train", "eval", "generate"))
    assert named in refused(capsys, "convert", run, "x")
    asked = json.dumps({"model": "file", "file": "own.py", "symbol": "fixed", "digest": digest})
    assert named in refused(capsys, "profile", "--program", "--model", asked)
    Path("config.json").write_text(json.dumps({"model_type": "file", **state["sizes"]}))
    assert named in refused(capsys, "profile", "--program", "--model", ".")
    assert not Path("ran").exists()

    Path("own.py").write_text(FILE.replace("nn.Linear(2, 8), nn.Linear(8, 2)", "nn.Linear(2, 9), nn.Linear(9, 2)"))
    go_on = ["train", "--resume", run, "--model", "own.py:fixed", "--steps", "2"]
    assert "the model's file 'own.py' is not what it was" in refused(capsys, *go_on)
    assert Path("ran").exists()
    from_run = ["train", "--init", run, "--steps", "1", "--model"]
    assert "another model, whose 'fc.weight' has the shape (8, 2)" in refused(capsys, *from_run, "own.py:fixed")
    assert "has symbol Net" in refused(capsys, *from_run, "own.py:Net")


def test_the_other_verbs_take_it(capsys):
    found = ran(capsys, "profile", "--model", "own.py:drawn", "-B", "4", "--steps", "2", "--html", "page.html")
    assert (found["B"], found["model"]) == (4, "own.py:drawn")
    assert "own.py:drawn" in Path("page.html").read_text()
    assert "x [6, 2]" in ran(capsys, "profile", "--program", "forward", "--model", "own.py:fixed")["calls"][0]["text"]
    small = ["--threads", "1", "--rounds", "6", "--model", "own.py:fixed"]
    step = ran(capsys, "ab", "gelu_forward", "vanilla", "optimized", "--in-step", *small)
    assert (step["results"][0]["B"], step["results"][0]["T"], step["results"][0]["layers"]) == (6, 1, ["model"] * 2)


@pytest.mark.slow  # each starts several processes
def test_the_verbs_that_measure_long_take_it(capsys):
    small = ["--threads", "1", "--rounds", "6", "--model", "own.py:fixed"]
    plan = ran(capsys, "tune", *small, "--ops", "gelu", "--fuse", "none")
    assert (plan["model"], plan["B"]) == ("own.py:fixed", 6)
    bench = ["bench", "--model", "own.py:fixed", "--rounds", "2", "--threads", "1"]
    (against,) = ran(capsys, *bench, "--against", "vanilla")["results"]
    assert (against["B"], against["refused"]) == (6, None)
    assert "compare variants" in refused(capsys, *bench)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Nets", "has no class or function 'Nets'; did you mean 'Net'"),
        ("MLP", r"takes \(x, y\), and a text has \(tokens, targets\); name a function"),
        ("net", "net is a module; name its class"),
        ("broken", f"line {1 + FILE[: FILE.index('1 / 0')].count(chr(10))} raised ZeroDivisionError"),
        ("nothing", "it made int; expected an nn.Module"),
    ],
)
def test_a_name_that_is_no_model_is_refused(name, why):
    fails(why, lambda: models.parse(f"own.py:{name}").sized(2, 8))


def test_what_a_model_of_a_file_cannot_have_is_refused(capsys):
    assert "no such file" in refused(capsys, "profile", "--program", "--model", "gone.py:Net")
    said = refused(capsys, "profile", "--program", "--model", "own.py")
    assert "name the class or the function in it, as in own.py:Net" in said
    said = refused(capsys, "train", "--model", "own.py:fixed", "--data", "x.txt")
    assert "brings its own inputs; leave --data out" in said
    assert "a context of 16 tokens" in refused(capsys, "profile", "--program", "--model", "own.py:Net")
    assert "Hugging Face's files" in refused(capsys, "train", "--model", "own.py:Net", "-T", "8", "--save", "x")


@pytest.mark.parametrize("verb", ["profile", "train"])
def test_a_mistake_in_a_forward_is_told_by_its_line(verb, capsys):
    line = FILE.splitlines().index("        return self.los(self.head(x), targets)") + 1
    assert cli.main([verb, "--model", "own.py:Slip", "-B", "2", "-T", "16"]) == 2
    said = f"--model own.py:Slip: line {line} raised AttributeError: 'Slip' object has no attribute 'los'"
    assert capsys.readouterr().err == f"cpuopt: {said}\n"
    assert not Path("runs").exists()


def test_a_function_that_takes_b_and_t_gets_those_that_were_asked_for():
    config = own.open_own("own.py:rows_of_tokens")
    settings = job.Settings(B=3, T=5).sized(config)
    assert (settings.B, settings.T, config.specs(3, 5)["x"]) == (3, 5, ((30, 2), "float32"))

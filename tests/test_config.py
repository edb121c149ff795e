"""Settings from a file: names and types are checked, and the command line wins."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from cpuopt import cli
from cpuopt.cli import train as verb
from cpuopt.train.job import Settings


@pytest.fixture(autouse=True)
def _here(here):
    Path("text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(1000)))
    Path("c.toml").write_text(
        'model = "gpt2-tiny"\ndata = "text.txt"\nB = 2\nT = 16\nsteps = 2\nvariant = "vanilla"\n'
        "lr = 1\nweight-decay = 0.25\nval_every = 0\noverfit = true\nswap = []\n"
    )


def recorded():
    (folder,) = Path("runs").iterdir()
    return json.loads((folder / "config.json").read_text())


def test_a_file_sets_and_the_command_line_wins():
    assert cli.main(["train", "--config", "c.toml", "--lr", "1e-4", "-T", "8"]) == 0
    got = recorded()
    assert (got["B"], got["T"], got["steps"], got["lr"], got["weight_decay"]) == (2, 8, 2, 1e-4, 0.25)
    assert (got["overfit"], got["beta1"], got["seed"]) == (True, 0.9, 0)


def test_a_runs_own_record_is_such_a_file(tmp_path):
    assert cli.main(["train", "--config", "c.toml"]) == 0
    first = recorded()
    (folder,) = Path("runs").iterdir()
    assert cli.main(["train", "--config", str(folder / "config.json"), "--runs", "again"]) == 0
    (again,) = Path("again").iterdir()
    assert json.loads((again / "config.json").read_text()) == first
    assert (again / "main.log").read_bytes() == (folder / "main.log").read_bytes()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("weight_decai = 1", "unknown 'weight_decai'; did you mean 'weight_decay'?"),
        ("steps = '40'", "steps is '40'; expected a whole number"),
        ("steps = true", "steps is True; expected a whole number"),
        ("lr = 'x'", "lr is 'x'; expected a number"),
        ("swap = 5", "swap is 5; expected a list"),
        ("swap = [1]", "swap[0] is 1; expected a text"),
        ("threads = 'two'", "threads is 'two'"),
        ("overfit = 1", "overfit is 1; expected true or false"),
        ("lr = ", "expected TOML"),
        ("lr = -1", "--lr -1: expected a positive number"),
        ("guard = 'on'", "--guard 'on': expected one of auto, skip, stop, off"),
        ("schedule = 'cos'", "--schedule 'cos': expected one of constant, cosine, linear, wsd"),
        ("decay = 'none'", "--decay 'none': expected one of all, matrices"),
        ("warmup_steps = 2", "--warmup-steps 2: expected less than the 2 steps"),
        ("lr_end = 2.0", "--lr-end 2.0: expected a share"),
        ("guard_z = -1.0", "--guard-z -1.0: expected 0 or more"),
    ],
)
def test_what_a_file_cannot_say_is_refused(capsys, text, said):
    Path("d.toml").write_text('model = "gpt2-tiny"\nsteps = 2\n' * (not text.startswith("steps")) + text)
    assert cli.main(["train", "--config", "d.toml"]) == 2
    assert said in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.parametrize("name", ["nowhere.toml", "list.json", "half.json", "."])
def test_a_file_that_is_none_is_refused(capsys, name):
    Path("list.json").write_text("[1]")
    Path("half.json").write_text("{")
    assert cli.main(["train", "--config", name]) == 2
    assert "--config" in capsys.readouterr().err


def test_every_flag_is_a_setting_and_shows_its_default(capsys):
    p = argparse.ArgumentParser()
    verb.flags(p)
    args = p.parse_args([])
    own = {"config", "runs", "html", "json", "resume", "accept_changes", "trace"}
    own |= {"dry_run", "ranks", "elastic", "oversubscribe"}
    assert set(vars(args)) == own
    text = " ".join(p.format_help().split())
    assert "SUPPRESS" not in text
    assert "%(" not in text
    flags = {a.dest: a for a in p._actions if a.default is argparse.SUPPRESS and a.dest != "help"}
    defaults = asdict(Settings())
    assert flags.keys() <= defaults.keys()
    assert defaults.keys() - flags.keys() == {"plan", "processes"}  # what the machine says
    for name in ("lr", "B", "steps", "variant", "fuse"):
        assert flags[name].help.endswith(f" Default: {defaults[name]}.")

"""Settings from a file: names and types are checked, and the command line wins."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from cpuopt import cli
from cpuopt.cli import train as verb
from cpuopt.cli.common import Parser
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


def test_every_flag_is_a_setting_and_shows_its_default(capsys):
    p = Parser()
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

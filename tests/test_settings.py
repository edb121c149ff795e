"""The table of settings: docs, flags and checks follow from it; files of settings, over which the command line wins."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import pytest
from small_runs import only
from verbs import SQUARES, fails

from cpuopt import cli
from cpuopt.cli import train as verb
from cpuopt.cli.common import Parser
from cpuopt.train import settings
from cpuopt.train.settings import FLAGS, Settings

DOCS = Path(__file__).parents[1] / "docs" / "training.md"


def documented(flags):
    return [f"| `{settings.flag(n)}` | {settings.default(n, f.default)} | {f.metadata['help']} |" for n, f in flags]


def test_the_docs_have_the_table():
    lines = DOCS.read_text().splitlines()
    start = lines.index("| flag | default | meaning |") + 2
    assert lines[start : lines.index("", start)] == documented(FLAGS.items())


@pytest.mark.parametrize("name", [n for n, f in FLAGS.items() if f.metadata["allowed"]])
def test_each_check_refuses_and_takes_its_default(name):
    bad = "x" if isinstance(FLAGS[name].default, str) else -1
    fails(rf"^{settings.flag(name)} '?{bad}'?: expected ", Settings(**{name: bad}).check)
    allowed = FLAGS[name].metadata["allowed"][0]
    assert FLAGS[name].default is None or allowed(FLAGS[name].default)


def test_the_settings_of_a_run_of_an_earlier_version_are_read(tmp_path):
    (tmp_path / "config.json").write_text('{"lr": 0.5, "local_steps": 0, "outer_lr": 0.7, "outer_momentum": 0.9}')
    assert settings.read(tmp_path / "config.json") == {"lr": 0.5}


@pytest.fixture
def _file(here):
    Path("text.txt").write_text(SQUARES)
    text = 'model = "gpt2-tiny"\ndata = "text.txt"\nB = 2\nT = 16\nsteps = 2\nvariant = "vanilla"\nval_every = 0\n'
    Path("c.toml").write_text(f"{text}lr = 1\nweight-decay = 0.25\noverfit = true\nswap = []\n")


def recorded(root="runs"):
    return json.loads((only(root) / "config.json").read_text())


@pytest.mark.usefixtures("_file")
def test_a_file_sets_and_the_command_line_wins():
    assert cli.main(["train", "--config", "c.toml", "--lr", "1e-4", "-T", "8"]) == 0
    got = recorded()
    assert (got["B"], got["T"], got["steps"], got["lr"], got["weight_decay"]) == (2, 8, 2, 1e-4, 0.25)
    assert (got["overfit"], got["beta1"], got["seed"]) == (True, 0.9, 0)


@pytest.mark.usefixtures("_file")
def test_a_runs_own_record_is_such_a_file():
    assert cli.main(["train", "--config", "c.toml"]) == 0
    assert cli.main(["train", "--config", str(only() / "config.json"), "--runs", "again"]) == 0
    assert recorded("again") == recorded()
    assert (only("again") / "main.log").read_bytes() == (only() / "main.log").read_bytes()


def test_every_flag_is_a_setting_and_shows_its_default(capsys):
    p = Parser()
    verb.flags(p)
    args, own = p.parse_args([]), {"config", "runs", "html", "json", "resume", "accept_changes", "trace"}
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

"""The table of settings: the docs show it, each check refuses, and a new line is a flag, a key and a check."""

from pathlib import Path

import pytest

from cpuopt.errors import UserError
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
    with pytest.raises(UserError, match=rf"^{settings.flag(name)} '?{bad}'?: expected "):
        Settings(**{name: bad}).check()
    allowed = FLAGS[name].metadata["allowed"][0]
    assert FLAGS[name].default is None or allowed(FLAGS[name].default)


def test_the_settings_of_a_run_of_an_earlier_version_are_read(tmp_path):
    (tmp_path / "config.json").write_text('{"lr": 0.5, "local_steps": 0, "outer_lr": 0.7, "outer_momentum": 0.9}')
    assert settings.read(tmp_path / "config.json") == {"lr": 0.5}

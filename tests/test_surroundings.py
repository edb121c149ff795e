"""Where a command runs: a directory that was removed or holds numba's settings, odd names, long paths."""

import argparse
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from verbs import ROOT, fails, process

from cpuopt import cli, kernels
from cpuopt.cli import generate
from cpuopt.comm.launch import LONGEST, Launch
from cpuopt.errors import UserError


def run(*words, **environment):
    """Run a command in a process; return its status and the lines of standard error."""
    done = process(*words, PYTHONWARNINGS="ignore", **environment)
    return done.returncode, done.stderr.splitlines()


pytestmark = pytest.mark.usefixtures("here")


def test_a_working_directory_that_was_removed(tmp_path, monkeypatch, capsys):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    said = "cpuopt: the working directory was removed; change to one that is there"
    assert run("train") == (2, [said])
    for words in (["runs", "list"], ["convert", "a", "b"]):
        assert (cli.main(words), capsys.readouterr().err) == (2, f"{said}\n")


def settings(text):
    return lambda name: Path(name).write_text(text)


@pytest.mark.parametrize("make", [settings("a: ["), os.mkfifo, lambda name: os.symlink("/dev/zero", name)])
def test_numbas_settings_in_the_working_directory(make):
    make(".numba_config.yaml")
    status, (line,) = run("check", "residual", "--quick")
    assert status == 2
    assert re.match("cpuopt: numba would take settings from .*move it away", line)
    assert os.listdir() == [".numba_config.yaml"]


def test_numbas_settings_that_come_later_are_not_read():
    program = "from pathlib import Path; import numba; from cpuopt import kernels\n"
    program += "Path('.numba_config.yaml').write_text('a: ['); print(numba.njit(lambda x: x + 1)(1))"
    done = process(code=program)
    assert (done.stdout, done.returncode) == ("2\n", 0), done.stderr


def test_a_model_file_whose_path_is_not_utf8():
    path = os.fsdecode(b"m\xff.py")
    Path(path).write_text("")
    fails("whose path is not UTF-8", kernels.load_file, path, "--model", "a class")


@pytest.mark.parametrize("flag", ["CPUOPT_CACHE_DIR", "TMPDIR"])
def test_a_cache_and_temporary_files_in_a_folder_whose_name_is_not_utf8(flag, tmp_path, monkeypatch):
    place = tmp_path / os.fsdecode(b"c\xff")
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv(flag, str(place))
    assert cli.main(["check", "gelu", "--variant", "generated", "--quick"]) == 0


def test_a_long_path_for_temporary_files_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", None)
    place = tmp_path / ("x" * 130)
    place.mkdir()
    status, (line,) = run("train", "--model", "gpt2-tiny", "--ranks", "2", TMPDIR=str(place))
    assert status == 2
    assert line.startswith("cpuopt: ")
    monkeypatch.setenv("TMPDIR", str(place))
    with pytest.raises(UserError, match=f"TMPDIR={place}: a socket in it has a path of more than {LONGEST} bytes"):
        Launch(["true"], 2, lambda line: None).run()
    assert os.listdir(place) == []


def test_a_line_of_the_input_that_does_not_end(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\nworld" + "!" * generate.LONGEST))
    turns = generate.user_turns(argparse.Namespace(prompt="", json=False))
    assert next(turns) == "hello"
    fails("a line of more than 1,048,576 characters", next, turns)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    assert [*generate.user_turns(argparse.Namespace(prompt="", json=False))] == ["hello"]


def test_an_output_that_has_no_dot():
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONIOENCODING", "PYTHONUTF8")}
    env |= {"PYTHONPATH": str(ROOT), "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "cpuopt", "check", "gelu", "--quick", "--threads", "1"]
    done = subprocess.run(command, env=env, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b" wrong ? threads 1 ? --seed " in done.stdout

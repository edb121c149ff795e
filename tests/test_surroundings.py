"""Where a command runs: a directory that was removed or holds numba's settings, odd names, long paths."""

import argparse
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cpuopt import cli, kernels
from cpuopt.cli import generate
from cpuopt.comm.launch import LONGEST, Launch
from cpuopt.errors import UserError

ROOT = Path(cli.__file__).parents[2]
KERNEL = """
from numba import prange
from cpuopt import kernel, ops

@kernel(ops.residual_forward, "mine")
def residual_forward(out, inp1, inp2):
    for i in prange(out.shape[0]):
        out[i] = inp1[i] + inp2[i]
"""


def run(*words, **environment):
    """Run a command in a process; return its status and the lines of standard error."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"} | environment
    done = subprocess.run([sys.executable, "-P", "-m", "cpuopt", *words], env=env, capture_output=True, check=False)
    return done.returncode, done.stderr.decode(errors="replace").splitlines()


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("verb", ["train", "runs list", "convert a b"])
def test_a_working_directory_that_was_removed(verb, tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    status, lines = run(*verb.split())
    assert status == 2
    assert lines == ["cpuopt: the working directory was removed; change to one that is there"]


@pytest.mark.parametrize("text", ["a: [", "num_threads: 1"], ids=["malformed", "settings that numba takes"])
def test_numbas_settings_in_the_working_directory(text):
    Path(".numba_config.yaml").write_text(text)
    status, (line,) = run("check", "residual", "--quick")
    assert status == 2
    assert line.startswith("cpuopt: numba would take settings from ")
    assert "move it away" in line
    assert os.listdir() == [".numba_config.yaml"]


@pytest.mark.parametrize("make", [os.mkfifo, lambda name: os.symlink("/dev/zero", name)])
def test_anything_of_that_name(make):
    make(".numba_config.yaml")
    assert run("kernels")[0] == 2


def test_numbas_settings_that_come_later_are_not_read():
    program = """
from pathlib import Path
import numba
from cpuopt import kernels
Path(".numba_config.yaml").write_text("a: [")
print(numba.njit(lambda x: x + 1)(1))
"""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-P", "-c", program], env=env, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("2\n", 0), done.stderr


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ("check --quick --kernels", b"k\xff.py"),
        ("train --model gpt2-tiny -B 2 -T 8 --steps 1 --swap residual_forward=mine --kernels", b"folder\xff/k.py"),
        ("ab residual_forward vanilla mine --rounds 6 --kernels", b"k\xff.py"),
        ("inspect residual_forward mine --kernels", b"folder\xff/k.py"),
        ("new-kernel gelu_forward --kernels", b"k\xff.py"),
    ],
)
def test_a_kernel_file_whose_path_is_not_utf8(words, place):
    path = os.fsdecode(place)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    Path(path).write_text(KERNEL)
    before = sorted(Path().rglob("*"))
    status, lines = run(*words.split(), path)
    lines = [line for line in lines if not line.startswith("warning: ")]
    assert status == 2, lines
    assert len(lines) == 1
    assert "numba compiles no file whose path is not UTF-8" in lines[0]
    assert "rename it" in lines[0]
    assert sorted(Path().rglob("*")) == before


def test_a_model_file_whose_path_is_not_utf8():
    path = os.fsdecode(b"m\xff.py")
    Path(path).write_text("")
    with pytest.raises(UserError, match="whose path is not UTF-8"):
        kernels.load_file(path, "--model", "a class")


@pytest.mark.parametrize("flag", ["CPUOPT_CACHE_DIR", "TMPDIR"])
def test_a_cache_and_temporary_files_in_a_folder_whose_name_is_not_utf8(flag, tmp_path):
    place = tmp_path / os.fsdecode(b"c\xff")
    place.mkdir()
    status, lines = run("check", "gelu", "--variant", "generated", "--quick", **{flag: str(place)})
    assert status == 0, lines


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


def test_no_place_for_temporary_files(monkeypatch, capsys):
    def none():
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile._get_default_tempdir", none)
    monkeypatch.setattr("tempfile.tempdir", None)
    assert cli.main(["check", "residual", "--quick", "--variant", "vanilla"]) == 2
    assert "set TMPDIR to another" in capsys.readouterr().err


def test_a_line_of_the_input_that_does_not_end(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\nworld" + "!" * generate.LONGEST))
    turns = generate.user_turns(argparse.Namespace(prompt="", json=False))
    assert next(turns) == "hello"
    with pytest.raises(UserError, match="a line of more than 1,048,576 characters"):
        next(turns)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    assert [*generate.user_turns(argparse.Namespace(prompt="", json=False))] == ["hello"]


@pytest.mark.parametrize(
    "environment",
    [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
    ids=["encoding", "locale"],
)
def test_an_output_that_has_no_dot(environment):
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONIOENCODING", "PYTHONUTF8")}
    done = subprocess.run(
        [sys.executable, "-m", "cpuopt", "check", "gelu", "--quick", "--threads", "1"],
        env=env | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b" FAIL ? threads 1 ? --seed " in done.stdout

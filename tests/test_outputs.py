"""What a command writes: never a device, a link or an input, no two outputs in one place; and weights arrive whole."""

import errno
import os
import socket
import stat
from fcntl import LOCK_EX, flock
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from listening import Listener
from small_runs import FLAGS, prepare, run
from verbs import fails, flags_of, spy

from cpuopt import cli, files, kernels
from cpuopt.cli import common
from cpuopt.data import tokens
from cpuopt.errors import UserError
from cpuopt.files import write_whole
from cpuopt.files.outputs import Output, check, check_apart, check_unread
from cpuopt.library import magics
from cpuopt.train import checkpoint, inputs, record
from cpuopt.weights import check_target, open_weights

SMALL = ["--model", "gpt2-tiny", "-B", "2", "-T", "8", "--data", "text.txt", "--steps", "5"]
KERNEL = ["--kernels", "mine.py"]
COMMANDS = {
    **{(verb, f): [verb, *SMALL, *KERNEL] for verb in ("train", "profile") for f in ("--html", "--trace")},
    ("train", "--save"): ["train", *SMALL],
    ("scale", "--html"): ["scale", *SMALL, *KERNEL],
    ("bench", "--out"): ["bench", "--model", "gpt2-tiny", "--against", "vanilla", *KERNEL],
    ("inspect", "--html"): ["inspect", "gelu_forward", "vanilla", *KERNEL],
    ("new-kernel", "--html"): ["new-kernel", "gelu_forward", "--backward", *KERNEL],
    ("new-kernel", "--out"): ["new-kernel", "gelu_forward", *KERNEL],
    **{("sweep", f): ["sweep", "gelu_forward", "--over", "N=64", *KERNEL] for f in ("--html", "--csv", "--svg")},
    ("gate", "--markdown"): ["gate", "--base", "main"],
    ("runs", "--html"): ["runs", "show", "it"],
    ("judge", "--html"): ["judge", "--tasks", *KERNEL],
    ("convert", "target"): ["convert", "model.bin"],
    ("data", "target"): ["data", "tokenize", "text.txt"],
    ("data", "--out"): ["data", "train-tokenizer", "text.txt"],
}
"""For each verb and output, the words before it."""
READ = {
    *("config", "source", "file", "init", "adapter", "base"),
    *("kernels", "model", "tokenizer", "data", "text", "resume"),
}
"""The flags that name what a command reads, beside which it may write."""
READ_ALONE = {"choices", "state", "peer_python", "runs"}
"""Those of verbs that write to no place that a flag names, programs, and folders of records."""


@pytest.fixture(autouse=True)
def _here(here):
    Path("text.txt").write_text("a text of some length\n" * 200)
    Path("mine.py").write_text("open('ran', 'w').close()\n")  # nothing may run it


def test_every_path_of_every_verb_is_known_as_an_input_or_an_output():
    """A new flag for a path belongs to one of the tables here, and so to the checks."""
    written = set()
    for verb, parser in cli._parser()[1].items():
        for action in flags_of(parser):
            name, shown = action.dest, f"{action.metavar}"
            if name in (*common.FILES, "save") or (name == "target" and not action.option_strings):
                written.add((verb, *(action.option_strings or [name])))
            elif action.type is Path or any(word in shown for word in ("FILE", "PATH", "DIR")):
                assert name in READ | READ_ALONE, f"cpuopt {verb}: is {name} read or written?"
    assert written == set(COMMANDS)


def device(path):
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))


def unix_socket(path):
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(path))


def folder(path):
    path.mkdir()
    (path / "inside").touch()


def link(path, to="target"):
    Path("target").write_text("mine")
    path.symlink_to(to)


LINKS = [pytest.param(partial(link, to=to), id=f"link to {to}") for to in ("nothing", "/dev/null")]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can")
PLACES = [os.mkfifo, unix_socket, folder, link, *LINKS, pytest.param(device, marks=as_root)]


def state():
    """Everything in the folder: names, kinds, numbers and sizes."""
    return sorted((str(p), os.lstat(p).st_mode, os.lstat(p).st_ino, os.lstat(p).st_size) for p in Path().rglob("*"))


def refused(capsys, *words):
    """Run a command that is refused before it does anything; return its one line."""
    before = state()
    assert (cli.main([*words]), state()) == (2, before)
    (line,) = [x for x in capsys.readouterr().err.splitlines() if not x.startswith("warning: ")]
    return line


@pytest.mark.parametrize("make", PLACES)
@pytest.mark.parametrize(("verb", "flag"), COMMANDS)
def test_no_output_replaces_anything_but_a_regular_file(capsys, verb, flag, make):
    place = {"target": "place_val.bin"}.get(flag, "place") if verb == "data" else "place"
    make(Path(place))
    if verb == "runs":
        Path("runs/it").mkdir(parents=True)
    line = refused(capsys, *COMMANDS[verb, flag], *([flag] if flag.startswith("-") else []), "place")
    assert place in line
    assert "cannot be written" in line or "is there already" in line


@as_root
def test_a_file_of_another_user_is_not_replaced():
    Path("r.html").touch()
    os.chown("r.html", 65534, 65534)
    fails("belongs to another user", check, Path("r.html"), "--html")


@pytest.mark.parametrize("make", PLACES)
def test_whatever_comes_to_the_place_later_is_not_replaced_either(make):
    make(Path("place"))
    before = state()
    fails(r"cannot write 'place': .*free the place", write_whole, Path("place"), [b"content"])
    assert state() == before


def hard_link(name):
    os.link(name, "other")
    return "other"


def by_another_way(name):
    os.symlink(".", "round")
    return f"round/{name}"


READING = f"train {' '.join(SMALL)} --kernels mine.py --config settings.toml --tokenizer tokenizer.bin --trace"


@pytest.mark.parametrize("alias", [str, hard_link, by_another_way])
@pytest.mark.parametrize(
    ("command", "read"),
    [
        *((READING, name) for name in ("text.txt", "mine.py", "beside.py", "settings.toml", "tokenizer.bin")),
        *(("profile --init model --data text.txt --html", f"model/{name}") for name in ("config.json", "deep/x")),
        ("train --config names.toml --html", "text.txt"),
        ("bench --model gpt2-tiny --peer-python python --out", "python"),
    ],
)
def test_no_output_is_an_input(capsys, command, read, alias):
    Path("model/deep").mkdir(parents=True)
    Path("settings.toml").write_text("lr = 1\n")
    Path("names.toml").write_text("data = 'text.txt'\nmodel = 'gpt2-tiny'\n")
    for name in ("beside.py", "tokenizer.bin", "python", "model/config.json", "model/deep/x"):
        Path(name).touch()
    line = refused(capsys, *command.split(), alias(read))
    assert all(x in line for x in (command.split()[-1], "this command reads it"))
    assert "names.toml" not in command or "reads it (text.txt)" in line
    assert kernels.imported(Path("mine.py").resolve()) is None


def test_the_package_is_not_replaced(capsys):
    source = Path(cli.__file__)
    before = source.read_bytes()
    assert "this command reads it" in refused(capsys, "new-kernel", "gelu_forward", "--backward", "--html", str(source))
    assert source.read_bytes() == before


@pytest.mark.parametrize("name", [".", "..", "/"])
def test_the_working_directory_is_no_place_for_weights(name, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    fails("is there already", check_target, Path(name))


def test_all_files_of_a_glob_and_the_held_out_tokens_are_inputs():
    for name in ("a.md", "b.md", "x_train.bin", "x_val.bin"):
        Path(name).touch()
    for data, read in (("*.md", {"a.md", "b.md"}), ("x_train.bin", {"x_train.bin", "x_val.bin"})):
        assert {str(p) for p in inputs.of({"data": data}) if not p.is_absolute()} == read


@pytest.mark.parametrize(
    "words",
    [
        *("--html x --trace x", "--html x --trace ./X", "--html x --trace ../{here}/x"),
        "--html one --trace two",  # one file under two names
        *("--html new --save new", "--html empty/x --save empty", "--trace tokenizer.json --save m.bin"),
        *("--runs new --save new", "--runs empty/runs --save empty", "--runs new --html new"),
    ],
)
def test_no_two_outputs_lie_on_each_other(capsys, words):
    Path("empty").mkdir()
    Path("one").touch()
    os.link("one", "two")
    line = refused(capsys, "train", *SMALL, *words.format(here=Path.cwd().name).split())
    assert all(flag in line for flag in words.split()[::2])
    assert "writes there too" in line


def test_tokens_are_written_both_or_not_at_all(capsys, monkeypatch):
    def full(path, *args, **more):
        if "val" in path.name:
            raise UserError("the disk is full")

    spy(monkeypatch, tokens, "write_tokens", full)
    assert "the disk is full" in refused(capsys, "data", "tokenize", "text.txt", "mine")


@pytest.mark.parametrize("make", [link, os.mkfifo])
def test_a_cell_is_written_to_a_file_only(make):
    make(Path("mine_gelu_forward.py"))
    before = state()
    with pytest.raises(UserError, match=r"%%kernel mine_gelu_forward\.py: cannot be written"):
        magics.try_kernel("gelu_forward mine", "def gelu_forward(out, inp): pass")
    assert state() == before


# What a run saves, and where


def weights_are(path, ready):
    read = open_weights(Path(path)).read
    return all(np.array_equal(read(n), p) for n, p in ready.engine.parameters().items())


def test_what_a_killed_save_left_costs_no_weights_and_goes_away(capsys):
    pid = os.getpid()  # in a container, the next process has the same number
    for name in (f".tmp-out-{pid}", ".tmp-out-0123abcd", ".tmp-out-more-0123abcd", ".tmp-out", ".tmp-again-0123abcd"):
        Path(name).mkdir()
        Path(name, "model.safetensors").write_bytes(b"half")
    Path(".tmp-model.bin-0123abcd").write_bytes(b"half")
    _, ready, listener = run(save="out")
    assert listener.notes == ["removed .tmp-out-0123abcd, left by an interrupted save"]
    assert weights_are("out", ready)
    _, _, listener = run(save="model.bin")
    assert listener.notes == ["removed .tmp-model.bin-0123abcd, left by an interrupted save"]
    assert cli.main(["convert", "out", "again"]) == 0
    assert "removed .tmp-again-0123abcd" in capsys.readouterr().err
    left = {p.name for p in Path.cwd().iterdir() if p.name.startswith(".tmp")}
    assert left == {f".tmp-out-{pid}", ".tmp-out-more-0123abcd", ".tmp-out"}  # not of the form that is ours


def test_what_a_living_process_writes_is_not_a_leftover():
    with files.whole_directory(Path("out").absolute()) as part:
        assert files.remove_leftovers(Path("out").absolute()) == []
        assert part.is_dir()
    with open(".tmp-x.bin-0123abcd", "wb") as file:
        flock(file, LOCK_EX)
        assert files.remove_leftovers(Path("x.bin").absolute()) == []
    assert files.remove_leftovers(Path("x.bin").absolute()) == [".tmp-x.bin-0123abcd"]


@pytest.mark.parametrize(("name", "other"), [("out", "out-2"), ("model.bin", "model-2.bin")])
def test_a_place_that_was_taken_meanwhile_is_left_alone_and_another_one_said(name, other):
    result, _, listener = run(Listener(1, lambda: Path(name).write_text("mine")), save=name)
    assert (Path(name).read_text(), result.diagnosis) == ("mine", f"the weights are at {other!r}, not at {name!r}")
    assert "is there already" in listener.notes[0]
    assert (result.summary["weights"], open_weights(Path(other)).config.n_embd) == (other, 16)


def test_a_disk_that_fails_sends_the_weights_to_the_run(monkeypatch):
    def full(path, parts):
        if "elsewhere" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    spy(monkeypatch, files, "write_synced", full)
    for name in ("elsewhere/model.bin", "elsewhere/out"):
        result, ready, listener = run(save=name)
        there = result.path / Path(name).name
        assert result.diagnosis == f"the weights are at {str(there)!r}, not at {name!r}"
        assert "No space left" in listener.notes[0]
        assert weights_are(there, ready)
        assert not any(Path("elsewhere").iterdir())


def test_weights_that_nothing_takes_are_a_failure(monkeypatch):
    monkeypatch.setattr("cpuopt.train.trainer.save_weights", Mock(side_effect=UserError("cannot write: no")))
    result, _, listener = run(save="out")
    assert (result.diagnosis, len(listener.notes)) == ("the weights are not at 'out', and nowhere else", 2)
    assert result.summary["weights"] is None


@pytest.mark.parametrize("save", [["--save", "out"], []])
def test_weights_that_are_no_numbers_are_not_saved_and_the_status_says_so(capsys, save):
    assert cli.main(["train", *FLAGS, "--steps", "5", "--lr", "1e30", "--guard", "off", *save]) == 1
    assert "the weights are not finite after step 5: " in capsys.readouterr().err
    assert not Path("out").exists()


def test_a_name_that_no_disk_takes_is_refused_before_the_training():
    for name in ("n" * 255, "n" * 240 + ".bin", "n" * 300, "a\0b"):
        fails("nothing can be written to", prepare, save=name)


# Links, and two runs


def test_a_link_in_the_place_of_weights_is_refused_whatever_it_leads_to():
    Path("disk/empty").mkdir(parents=True)
    for name, target in (("out", "disk/empty"), ("out2", "disk/new"), ("model.bin", "disk/m.bin"), ("round", "round")):
        os.symlink(target, name)
        fails("is there already", prepare, save=name)
    assert os.listdir("disk") == ["empty"]


def test_a_folder_of_runs_and_one_of_checkpoints_may_be_links():
    Path("disk/runs").mkdir(parents=True)
    os.symlink("disk/runs", "runs")
    result, _, _ = run(steps=4, save_every=2)
    os.rename(result.path / "checkpoints", "disk/checkpoints")
    os.symlink(Path("disk/checkpoints").absolute(), result.path / "checkpoints")
    outside = Path("disk/outside").absolute()
    outside.mkdir()
    (outside / "file").write_text("mine")
    for name in ("step-00000001", ".tmp-step-00000009-0123abcd"):
        os.symlink(outside, result.path / "checkpoints" / name)
    _, _, listener = run(resume=checkpoint.newest(result.path), steps=8)
    assert listener.notes == ["removed .tmp-step-00000009-0123abcd, left by an interrupted save"]
    assert sorted(os.listdir("disk/checkpoints")) == ["step-00000006", "step-00000008"]
    assert ((outside / "file").read_text(), checkpoint.newest(result.path).state["step"]) == ("mine", 8)


def test_two_runs_of_one_name_at_one_instant_both_have_a_folder(monkeypatch):
    right, names = Path.mkdir, []

    def mkdir(path, *args, **more):
        if path.parent.name == "runs" and not path.exists() and len(names) < 2:
            names.append(path.name)
            right(path)  # the other process was faster
        right(path, *args, **more)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with record.Run(Path("here/runs"), "train", {}) as mine:
        assert mine.path.name.endswith("-train.3")
    assert names == [mine.path.name[:-2], f"{mine.path.name[:-2]}.2"]
    assert {p.name for p in Path("here/runs").iterdir()} == {mine.path.name, *names}


def test_a_link_to_no_folder_of_runs_is_refused_at_once():
    os.symlink("nowhere", "runs")
    fails("--runs runs: ", record.check_root, Path("runs"))


def test_outputs_beside_each_other_and_a_page_that_is_written_again_are_right():
    check_apart([Output("--html", Path("runs/a")), Output("--runs", Path("runs"))])
    Path("run").mkdir()
    Path("run/report.html").touch()
    check_unread([Output("--html", Path("run/report.html"))], [Path("run")])

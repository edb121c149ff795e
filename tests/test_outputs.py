"""What a command writes: never a device, a link or an input, and never two outputs in one place."""

import os
import socket
import stat
from argparse import _SubParsersAction
from pathlib import Path

import pytest

from cpuopt import cli, kernels
from cpuopt.cli import common
from cpuopt.errors import UserError
from cpuopt.files import write_whole
from cpuopt.files.outputs import Output, check, check_apart, check_unread
from cpuopt.library import magics
from cpuopt.train import inputs
from cpuopt.weights import check_target

SMALL = ["--model", "gpt2-tiny", "-B", "2", "-T", "8", "--data", "text.txt", "--steps", "5"]
KERNEL = ["--kernels", "mine.py"]
COMMANDS = {
    ("train", "--html"): ["train", *SMALL, *KERNEL],
    ("train", "--trace"): ["train", *SMALL, *KERNEL],
    ("train", "--save"): ["train", *SMALL],
    ("profile", "--html"): ["profile", *SMALL, *KERNEL],
    ("profile", "--trace"): ["profile", *SMALL, *KERNEL],
    ("scale", "--html"): ["scale", *SMALL, *KERNEL],
    ("bench", "--out"): ["bench", "--model", "gpt2-tiny", "--against", "vanilla", *KERNEL],
    ("inspect", "--html"): ["inspect", "gelu_forward", "vanilla", *KERNEL],
    ("ad", "--html"): ["ad", "gelu_forward", *KERNEL],
    ("new-kernel", "--out"): ["new-kernel", "gelu_forward", *KERNEL],
    **{("sweep", f): ["sweep", "gelu_forward", "--over", "N=64", *KERNEL] for f in ("--html", "--csv", "--svg")},
    ("runs", "--html"): ["runs", "show", "it"],
    ("judge", "--html"): ["judge", "--tasks", *KERNEL],
    ("convert", "target"): ["convert", "model.bin"],
    ("data", "target"): ["data", "tokenize", "text.txt"],
    ("data", "--out"): ["data", "train-tokenizer", "text.txt"],
}
"""For each verb and output, the words before it."""
READ = {
    "config",
    "source",
    "file",
    "init",
    "adapter",
    "base",
    "kernels",
    "model",
    "tokenizer",
    "data",
    "text",
    "resume",
}
"""The flags that name what a command reads, beside which it may write."""
READ_ALONE = {"choices", "state", "peer_python", "runs"}
"""Those of verbs that write to no place that a flag names, programs, and folders of records."""


@pytest.fixture(autouse=True)
def _here(here):
    Path("text.txt").write_text("a text of some length\n" * 200)
    Path("mine.py").write_text("open('ran', 'w').close()\n")  # nothing may run it


def flags_of(parser):
    """Yield the actions of a parser and of its own verbs."""
    for action in parser._actions:
        yield action
        if isinstance(action, _SubParsersAction):
            for p in action.choices.values():
                yield from flags_of(p)


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


def pipe(path):
    os.mkfifo(path)


def device(path):
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))


def unix_socket(path):
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(path))


def folder(path):
    path.mkdir()
    (path / "inside").touch()


def link(path):
    Path("target").write_text("mine")
    path.symlink_to("target")


def link_to_nothing(path):
    path.symlink_to("nothing")


def link_to_a_device(path):
    path.symlink_to("/dev/null")


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can")
PLACES = [pipe, unix_socket, folder, link, link_to_nothing, link_to_a_device, pytest.param(device, marks=as_root)]


def state():
    """Everything in the folder: names, kinds, numbers and sizes."""
    return sorted((str(p), os.lstat(p).st_mode, os.lstat(p).st_ino, os.lstat(p).st_size) for p in Path().rglob("*"))


def refused(capsys, *words):
    """Run a command that is refused before it does anything; return its one line."""
    before = state()
    assert cli.main([*words]) == 2
    assert state() == before
    (line,) = [x for x in capsys.readouterr().err.splitlines() if not x.startswith("warning: ")]
    return line


@pytest.mark.parametrize("make", PLACES)
@pytest.mark.parametrize(("verb", "flag"), COMMANDS)
def test_no_output_replaces_anything_but_a_regular_file(capsys, verb, flag, make):
    place = {"target": "place_val.bin"}.get(flag, "place") if verb == "data" else "place"
    make(Path(place))
    if verb == "runs":
        record = Path("runs/it")
        record.mkdir(parents=True)
    words = [*COMMANDS[verb, flag], *([flag] if flag.startswith("-") else []), "place"]
    line = refused(capsys, *words)
    assert place in line
    assert "cannot be written" in line or "is there already" in line


@as_root
def test_a_file_of_another_user_is_not_replaced():
    Path("r.html").touch()
    os.chown("r.html", 65534, 65534)
    with pytest.raises(UserError, match="belongs to another user"):
        check(Path("r.html"), "--html")


def test_a_file_that_this_user_wrote_is_replaced():
    Path("r.html").write_text("old")
    check(Path("r.html"), "--html")
    write_whole(Path("r.html"), [b"new"])
    assert Path("r.html").read_text() == "new"


@pytest.mark.parametrize("make", PLACES)
def test_whatever_comes_to_the_place_later_is_not_replaced_either(make):
    make(Path("place"))
    before = state()
    with pytest.raises(UserError, match=r"cannot write 'place': .*free the place"):
        write_whole(Path("place"), [b"content"])
    assert state() == before


def hard_link(name):
    os.link(name, "other")
    return "other"


def by_another_way(name):
    os.symlink(".", "round")
    return f"round/{name}"


@pytest.mark.parametrize("alias", [str, hard_link, by_another_way])
@pytest.mark.parametrize("read", ["text.txt", "mine.py", "beside.py", "settings.toml", "tokenizer.bin"])
def test_no_output_is_an_input(capsys, read, alias):
    for name in ("beside.py", "settings.toml", "tokenizer.bin"):
        Path(name).write_text("lr = 1\n" if name.endswith("toml") else "#")
    words = ["train", *SMALL, *KERNEL, "--config", "settings.toml", "--tokenizer", "tokenizer.bin"]
    line = refused(capsys, *words, "--trace", alias(read))
    assert "--trace" in line
    assert "this command reads it" in line


@pytest.mark.parametrize("read", ["model/config.json", "model/model.safetensors", "model/deep/x"])
def test_no_output_is_in_a_folder_that_is_read(capsys, read):
    Path("model/deep").mkdir(parents=True)
    Path(read).touch()
    words = ["profile", "--init", "model", "--data", "text.txt"]
    assert "this command reads it" in refused(capsys, *words, "--html", read)
    assert "this command reads it" in refused(capsys, *words, "--html", hard_link(read))


def test_a_new_page_in_the_folder_of_a_run_may_be_written_again():
    Path("run").mkdir()
    Path("run/report.html").touch()
    check_unread([Output("--html", Path("run/report.html"))], [Path("run")])


def test_neither_the_package_nor_the_python_of_a_peer_is_replaced(capsys):
    Path("python").touch()
    words = ["bench", "--model", "gpt2-tiny", "--peer-python", "python"]
    assert "this command reads it" in refused(capsys, *words, "--out", "python")
    source = Path(cli.__file__)
    before = source.read_bytes()
    assert "this command reads it" in refused(capsys, "ad", "gelu_forward", "--html", str(source))
    assert source.read_bytes() == before


@pytest.mark.parametrize("name", [".", "..", "/"])
def test_the_working_directory_is_no_place_for_weights(name, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(UserError, match="is there already"):
        check_target(Path(name))


def test_settings_of_a_file_name_inputs_too(capsys):
    Path("a.toml").write_text("data = 'text.txt'\nmodel = 'gpt2-tiny'\n")
    assert "reads it (text.txt)" in refused(capsys, "train", "--config", "a.toml", "--html", "text.txt")


def test_all_files_of_a_glob_and_the_held_out_tokens_are_inputs():
    for name in ("a.md", "b.md", "x_train.bin", "x_val.bin"):
        Path(name).touch()
    for data, files in (("*.md", {"a.md", "b.md"}), ("x_train.bin", {"x_train.bin", "x_val.bin"})):
        assert {str(p) for p in inputs.of({"data": data}) if not p.is_absolute()} == files


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (["--html", "x", "--trace", "x"], ("--html", "--trace")),
        (["--html", "x", "--trace", "./X"], ("--html", "--trace")),
        (["--html", "x", "--trace", "../{here}/x"], ("--html", "--trace")),
        (["--html", "one", "--trace", "two"], ("--html", "--trace")),  # one file under two names
        (["--html", "new", "--save", "new"], ("--html", "--save")),
        (["--html", "empty/x", "--save", "empty"], ("--html", "--save")),
        (["--trace", "tokenizer.json", "--save", "m.bin"], ("--trace", "--save")),
        (["--runs", "new", "--save", "new"], ("--runs", "--save")),
        (["--runs", "empty/runs", "--save", "empty"], ("--runs", "--save")),
        (["--runs", "new", "--html", "new"], ("--runs", "--html")),
    ],
)
def test_no_two_outputs_lie_on_each_other(capsys, words, flags):
    Path("empty").mkdir()
    Path("one").touch()
    os.link("one", "two")
    line = refused(capsys, "train", *SMALL, *(w.format(here=Path.cwd().name) for w in words))
    assert all(flag in line for flag in flags)
    assert "writes there too" in line


def test_outputs_beside_each_other_are_right():
    check_apart([Output("--html", Path("a")), Output("--save", Path("b"), whole=True), Output("--runs", Path("runs"))])
    check_apart([Output("--html", Path("runs/a")), Output("--runs", Path("runs"))])


def test_tokens_are_written_both_or_not_at_all(capsys, monkeypatch):
    from cpuopt.data import corpus

    right = corpus.write_tokens

    def full(path, *args, **more):
        if "val" in path.name:
            raise UserError("the disk is full")
        right(path, *args, **more)

    monkeypatch.setattr(corpus, "write_tokens", full)
    assert "the disk is full" in refused(capsys, "data", "tokenize", "text.txt", "mine")


@pytest.mark.parametrize("name", ["", ".", "/"])
def test_a_name_of_tokens_that_is_none(capsys, name):
    assert "expected the beginning of a file's name" in refused(capsys, "data", "tokenize", "text.txt", name)


@pytest.mark.parametrize("make", [link, pipe])
def test_a_cell_is_written_to_a_file_only(make):
    make(Path("mine_gelu_forward.py"))
    before = state()
    with pytest.raises(UserError, match=r"%%kernel mine_gelu_forward\.py: cannot be written"):
        magics.try_kernel("gelu_forward mine", "def gelu_forward(out, inp): pass")
    assert state() == before


def test_no_kernel_was_loaded_by_these():
    assert kernels.imported(Path("mine.py").resolve()) is None

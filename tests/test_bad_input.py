"""What the command line refuses: status 2, one line on stderr that says what to do, and nothing written."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cpuopt import cli
from cpuopt.data.corpus import write_tokens
from cpuopt.engine import Engine
from cpuopt.errors import UserError
from cpuopt.kernels import registry
from cpuopt.program import arena
from cpuopt.program.fuse import FUSIONS
from cpuopt.program.tree import MOST_MICRO_BATCHES
from cpuopt.train import record
from cpuopt.train.settings import Settings

JOB = ["--model", "gpt2-tiny", "--data", "text.txt", "-B", "2", "-T", "16", "--steps", "2"]
HEAD = "from cpuopt import kernel, ops\n"
GELU = "@kernel(ops.gelu_forward, '{variant}', jit=False)\ndef gelu_forward({params}):\n    {body}\n"


@pytest.fixture(autouse=True)
def _here(here, measured, monkeypatch):
    """Run in a folder with one text."""
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))  # a busy machine is worth a line of its own
    Path("text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(1000)))


@pytest.fixture
def refused(capsys):
    """Run a command that must be refused; give its line."""

    def refused(verb, *flags, base=JOB, shown=False):
        before = {path: path.read_bytes() for path in Path.cwd().rglob("*") if path.is_file()}
        assert cli.main([verb, *base, *flags]) == 2
        assert {path: path.read_bytes() for path in Path.cwd().rglob("*") if path.is_file()} == before
        assert not Path("runs").exists()
        out, err = capsys.readouterr()
        assert bool(out) is shown
        (line,) = err.splitlines()
        assert line.startswith("cpuopt: ")
        return line.removeprefix("cpuopt: ")

    return refused


def test_the_command_that_the_others_are_made_from_is_right(capsys):
    assert cli.main(["train", *JOB]) == 0
    assert Path("runs").is_dir()


# Numbers


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        *[
            (flag, n, f"{flag} {n}: expected 1 or more")
            for flag in ("-B", "-T", "--steps", "--threads")
            for n in (0, -4)
        ],
        *[(flag, 10**23, f"{flag} {10**23}: expected 1 or more, up to ") for flag in ("-B", "--steps", "--threads")],
        *[("--threads", n, f"--threads {n}: expected 1 or more, up to 4,096") for n in (0, -1, 4097)],
        ("--val-batches", 0, "--val-batches 0: expected 1 or more"),
        ("--val-every", -1, "--val-every -1: expected 0 or more"),
        *[("--seed", n, f"--seed {n}: expected 0 or more, below 2**63") for n in (-1, 2**63)],
        *[("--lr", x, f"--lr {x}: expected a positive number") for x in (0.0, -0.1, "nan", "inf")],
        *[("--eps", x, f"--eps {x}: expected a positive number") for x in (0.0, "nan")],
        *[("--clip", x, f"--clip {x}: expected a positive number") for x in (0.0, -1.0, "nan")],
        *[(f, x, f"{f} {x}: expected 0 or more, and less") for f in ("--beta1", "--beta2") for x in (1.0, -0.1, "nan")],
        *[("--weight-decay", x, f"--weight-decay {x}: expected 0 or more") for x in (-0.1, "nan", "inf")],
        ("-T", 65, "-T 65: gpt2-tiny has a context of 64 tokens; take -T 64 or less"),
    ],
)
def test_numbers_that_no_run_can_use(refused, flag, value, words):
    assert refused("train", f"{flag}={value}" if flag[1] == "-" else f"{flag}{value}").startswith(words)


def test_more_micro_batches_than_have_random_numbers_of_their_own():
    most = MOST_MICRO_BATCHES * 32
    Settings(B=2, T=16, total_batch=most).check()
    for more in (most + 32, most + 33, 10**30):
        with pytest.raises(UserError, match=f"^--total-batch {more}: expected {most} or less, 1,048,576 micro-batches"):
            Settings(B=2, T=16, total_batch=more).check()


@pytest.mark.parametrize("verb", ["profile", "program", "warmup"])
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["-T", "65"], "context of 64 tokens"),
        (["--seed", "-1"], "--seed -1"),
        (["--variant", "fastest"], "no kernel is registered"),
        (["--kernels", "none.py"], "no such file"),
        (["--fuse", "loops"], "no such rewrite"),
    ],
)
def test_every_verb_refuses_them(refused, verb, flags, words):
    assert words in refused(verb, *flags)


# Models


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("gpt2-tinny", "--model 'gpt2-tinny': no such preset; did you mean 'gpt2-tiny'?"),
        ("bert", "no such preset; known: gpt2-tiny, "),
        ("", "--model '': no such preset"),
        ("[1]", "--model '[1]': no such preset"),
        ('{"n_layer": 2', "not JSON (Expecting ',' delimiter"),
        ('{"layers": 2}', "--model: unknown size 'layers'; known: n_layer, n_head, "),
        ('{"n_embd": 65, "n_head": 2}', "model: n_embd = 65 is not a multiple of n_head = 2"),
        ('{"n_layer": 0}', "model: n_layer is 0; expected a whole number from 1 to 4096"),
        (f'{{"n_layer": {9 * 10**60}}}', "n_layer is 9000000"),
        ('{"n_embd": 2147483648}', "n_embd is 2147483648; expected a whole number from 1 to 2147483647"),
        ('{"n_layer": 2.5}', "n_layer is 2.5"),
        ('{"n_layer": NaN}', "NaN is no number"),
        ('{"n_layer": "2"}', "n_layer is '2'"),
        ('{"n_layer": true}', "n_layer is True"),
        ('{"vocab_size": null}', "vocab_size is None"),
        ('{"n_layer": 1, "block_size": 8}', "-T 16: gpt2-custom has a context of 8 tokens"),
        ('{"model": "llama", "max_position_embeddings": 8}', "take -T 8 or less, or a model with a longer context"),
        ('{"model": "llama", "rope_factor": 8.0}', "rope_factor is 8.0; rope_type = 'default' does not read it"),
        ('{"model": "qwen3", "rope_type": "linear", "rope_high_freq_factor": 2.0}', "'linear' does not read it"),
    ],
)
def test_models(refused, model, words):
    assert words in refused("train", "--model", model)


# Data


def tokens(ids):
    write_tokens(Path("tokens.bin"), ids)
    return Path("tokens.bin")


def test_a_truncated_token_file(refused):
    path = tokens(np.arange(500) % 256)
    path.write_bytes(path.read_bytes()[:-7])
    line = refused("train", "--data", "tokens.bin")
    assert "token file 'tokens.bin': has 2017 bytes; expected 2024, because byte 8 says 500 tokens" in line


def test_a_token_file_of_another_kind(refused):
    path = tokens(np.arange(500) % 256)
    for magic, words in (20240326, "20240326, an llm.c GPT-2 model; expected 20240520"), (7, "7; expected 20240520"):
        path.write_bytes(magic.to_bytes(4, "little") + path.read_bytes()[4:])
        assert f"byte 0, the magic number, is {words}" in refused("train", "--data", "tokens.bin")
    path.write_bytes(b"\x7fELF")
    assert "has 4 bytes; expected a header of 1024" in refused("train", "--data", "tokens.bin")


@pytest.mark.parametrize(
    "at",
    [
        slice(None),
        slice(3000, 3001),
        slice(3610, 3611),
        slice(3990, 3991),
    ],
    ids=["everywhere", "one to train on", "one to validate on", "one that this run does not need"],
)
def test_a_token_beyond_the_vocabulary(refused, at):
    ids = np.arange(4000) % 256
    ids[at] = 256
    tokens(ids)
    line = refused("train", "--data", "tokens.bin", "--steps", "110")
    assert "is 256; expected 0 to 255, because the model's vocabulary has 256" in line


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("empty.txt", "'empty.txt' is empty; expected text"),
        ("empty.bin", "token file 'empty.bin': has 0 bytes; expected a header of 1024"),
        ("tiny.txt", "tiny.txt (train): has 9 tokens; a batch of B = 2 rows of T = 16 needs 33"),
        ("short.txt", "short.txt (val): has 10 tokens; a batch of B = 2 rows of T = 16 needs 33"),
        ("tetx.txt", "there is no data 'tetx.txt', nearest are 'text.txt'"),
        ("tinyshakespear", "nearest are 'tinyshakespeare'"),
        ("*.md", "no file matches '*.md'"),
        (".", "'.' is a directory"),
        ("binary.txt", "'binary.txt' is not text"),
        ("", "there is no data ''"),
    ],
)
def test_data(refused, data, words):
    Path("empty.txt").touch()
    Path("empty.bin").touch()
    Path("tiny.txt").write_text("ten bytes.")
    Path("short.txt").write_text("ten bytes." * 10)
    Path("binary.txt").write_bytes(bytes(1000))
    assert words in refused("train", "--data", data)


@pytest.mark.parametrize(
    ("data", "form", "words"),
    [
        ("c.jsonl", "alpaca", "--chat-format 'alpaca': expected chatml or llama3"),
        ("text.txt", "chatml", "--chat-format: --data text.txt is text, without examples; leave it out"),
    ],
)
def test_forms_of_chats(refused, data, form, words):
    Path("c.jsonl").write_text('{"text": "of no form"}\n')
    assert refused("train", "--data", data, "--chat-format", form).startswith(words)
    if data == "c.jsonl":
        assert refused("data", "show", data, "--chat-format", form, base=[]) == words


# Kernels


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--variant", "vanila"], "variant 'vanila': no kernel is registered under it; did you mean 'vanilla'?"),
        (["--swap", "gelo=vanilla"], "swap 'gelo=vanilla': no op matches 'gelo'"),
        (["--swap", "attention_forwrd=vanilla"], "did you mean 'attention_forward'?"),
        (["--swap", "gelu@h.2.*=vanilla"], "no layer of the model with gelu matches 'h.2.*'"),
        (["--swap", "softmax=vanilla"], "this model does not use 'softmax'"),
        (["--swap", "gelu=blas"], "gelu_forward has no variant 'blas'; known: "),
        *[
            (["--swap", text], f"swap '{text}': expected OP[@LAYER]=VARIANT")
            for text in ("gelu", "gelu=", "=vanilla", "gelu@=vanilla", "", "@h.0=vanilla")
        ],
        (["--swap", "matmul=blas", "--swap", "gelu"], "swap 'gelu': expected"),
        (["--fuse", "loops"], f"fuse 'loops': no such rewrite; known: {', '.join(FUSIONS)}, all, none"),
        (["--fuse", "residual,updat"], "fuse 'updat': no such rewrite; did you mean 'update'?"),
        (["--fuse", ""], "fuse '': no such rewrite"),
    ],
)
def test_choices_of_kernels(refused, flags, words):
    assert words in refused("train", *flags)


def gelu(params="out, inp", body="out[...] = inp", variant="mine"):
    return GELU.format(params=params, body=body, variant=variant)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("1 / 0", "--kernels mine.py: line 2 raised ZeroDivisionError: division by zero"),
        ("\n\ndef broken(:\n    pass", "line 4 raised SyntaxError: "),
        ("import no_such_module", "line 2 raised ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise ValueError('one\\ntwo')", "line 2 raised ValueError: one two"),
        ("raise SystemExit(0)", "line 2 raised SystemExit: 0"),
        ("@kernel('gelu_forward', 'mine')\ndef f(out, inp): pass", "@kernel('gelu_forward', ...): expected an op"),
        (
            gelu("inp, out"),
            "parameters are (inp, out); the declaration says otherwise: write def gelu_forward(out, inp)",
        ),
        (gelu("out"), "gelu_forward[mine]: parameters are (out)"),
        (gelu() + gelu(), "gelu_forward[mine]: registered a second time"),
        (gelu(variant="vanilla"), "gelu_forward[vanilla]: registered a second time"),
    ],
)
def test_kernel_files(refused, content, words):
    Path("mine.py").write_text(HEAD + content)
    before = dict(registry.KERNELS)
    assert words in refused("train", "--kernels", "mine.py", "--swap", "gelu_forward=mine")
    assert before == registry.KERNELS
    assert words in refused("kernels", "--kernels", "mine.py", base=[])


def test_kernel_files_that_are_none(refused):
    assert "--kernels mine.py: no such file" in refused("train", "--kernels", "mine.py")
    assert "--kernels text.txt: not a Python file" in refused("train", "--kernels", "text.txt")
    assert "--kernels .: no such file" in refused("train", "--kernels", ".")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import numpy as np; out[...] = inp / (1 + np.exp(-1.702 * inp))", r"out\[\d+\] = \S+, expected "),
        ("out[...] = float('nan')", r"out\[0\] = nan, expected "),
        ("out[1:] = 0", r"out\[0\] = nan, expected .*: as filled before the call"),
        ("inp[0] = 1", "changed 'inp', which it may only read"),
        ("raise ValueError('not today')", "raised ValueError: not today"),
    ],
)
@pytest.mark.parametrize("verb", ["train", "profile"])
def test_a_wrong_kernel_is_refused_before_any_step(refused, monkeypatch, body, words, verb):
    Path("mine.py").write_text(HEAD + gelu(body=body))
    monkeypatch.setattr(Engine, "step", lambda *args, **kw: pytest.fail("a step was made"))
    line = refused(verb, "--kernels", "mine.py", "--swap", "gelu_forward@h.1.mlp=mine")
    assert line.startswith("gelu_forward[mine] is wrong, so nothing is run with it: ")
    assert re.search(words, line)


def test_a_kernel_that_numba_cannot_compile(capsys):
    Path("mine.py").write_text(HEAD + gelu(body="out[0] = inp[0] + 'x'").replace(", jit=False", ""))
    assert cli.main(["train", *JOB, "--kernels", "mine.py", "--swap", "gelu_forward=mine"]) == 2
    *progress, line = capsys.readouterr().err.splitlines()
    assert all(p.startswith("compiled 0/") for p in progress)
    assert line.startswith(f"cpuopt: gelu_forward[mine] at {Path.cwd() / 'mine.py'}:2 does not compile: ")
    assert not Path("runs").exists()


def test_clipping_needs_the_norm_before_any_update(refused):
    for fuse in ("update", "all"):
        assert "fuse without 'update'" in refused("train", "--clip", "1", "--fuse", fuse)


# Names and places


@pytest.mark.parametrize(
    "name",
    [
        *["../x", "/etc/x", "a/../b", "a/b", "a\\b", "..", ".", ".hidden", "a..b", "~", ""],
        *[
            "-rf",
            "_a",
            "a b",
            "a\nb",
            "a\n",
            "a;b",
            "$HOME",
            "a*",
            "ü",
            "名",
            "a\u202eb",
            "a\x1b[2J",
            "a\0b",
            "x" * 65,
            "x" * 300,
        ],
    ],
)
def test_names_of_runs(refused, name):
    line = refused("train", f"--run={name}")
    assert line.startswith(f"--run {name!r}: expected up to 64 letters, digits, '.', '_' or '-'")


@pytest.mark.parametrize("runs", ["text.txt", "text.txt/runs", "/proc/none/runs"])
def test_a_place_that_cannot_be_written(refused, runs):
    assert f"--runs {runs}: " in refused("train", "--runs", runs)


KEEPING = {
    "train": (JOB, "train.job.prepare"),
    "profile": (JOB, "train.job.prepare"),
    "ab": (["gelu_forward", "optimized", "vanilla", "--model", "gpt2-tiny"], "isolate.child.Child.ask"),
    "tune": (["--model", "gpt2-tiny", "-B", "1", "-T", "8"], "lab.tune.survey"),
    "bench": (["--model", "gpt2-tiny", "--against", "vanilla", "--sizes", "1x8"], "lab.peers.Bench.run"),
}
"""Verbs that keep a record, with what they must not come to."""


@pytest.mark.parametrize("verb", KEEPING)
def test_a_place_for_records_is_tried_before_anything_is_measured(refused, verb, monkeypatch):
    base, measures = KEEPING[verb]

    def never(*args, **more):
        raise AssertionError(measures)

    monkeypatch.setattr(f"cpuopt.{measures}", never)
    for runs, why in (("text.txt/runs", "Not a directory"), ("/proc/none/runs", "No such file or directory")):
        said = refused(verb, "--runs", runs, base=base)
        assert said == f"--runs {runs}: {why}; name a directory that can be written with --runs DIR"


def test_trying_a_place_for_records_leaves_nothing():
    Path("new").mkdir()
    record.check_root(Path("new/a/b"))
    assert list(Path("new").iterdir()) == []


@pytest.mark.parametrize(
    "place",
    [
        "none/trace.json",
        "folder",
        "text.txt/trace.json",
        ".",
    ],
)
def test_a_trace_that_cannot_be_written(refused, place):
    Path("folder").mkdir()
    assert f"--trace {place}: cannot be written" in refused("profile", "--trace", place)


def test_warm_up_steps_below_zero(refused):
    assert refused("profile", "--warmup", "-1") == "--warmup -1: expected 0 or more"


@pytest.mark.parametrize("place", ["text.txt/model", "text.txt/none/model.bin"])
def test_a_place_for_weights_that_cannot_be_written_is_refused_before_the_training(refused, place):
    assert "nothing can be written to" in refused("train", "--save", place)


# Memory


def arena_bytes(capsys, *flags):
    """Size of a job's arena."""
    assert cli.main(["program", "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)["plan"]["arena"]


@pytest.mark.parametrize("there", [2_300_000_000, 2_020_000_000])
def test_too_little_memory_names_sizes_that_fit(refused, capsys, monkeypatch, there):
    monkeypatch.setattr(arena, "available_bytes", lambda: there)
    monkeypatch.setattr(arena, "Arena", lambda size: pytest.fail("an arena was made"))
    model = ["--model", "gpt2-124M", "-B", "32", "-T", "64"]
    line = refused("train", *model)
    needed = arena_bytes(capsys, *model)
    memory = f"the arena needs {needed / 1e9:.2f} GB and {there / 1e9:.2f} GB of memory are available"
    B, T = map(int, re.fullmatch(rf"{memory}; try -B (\d+) -T (\d+)", line).groups())
    fits, doubled = (arena_bytes(capsys, "--model", "gpt2-124M", "-B", str(b), "-T", str(T)) for b in (B, 2 * B))
    assert fits <= there < doubled


def test_too_little_memory_for_any_batch(refused, monkeypatch):
    monkeypatch.setattr(arena, "available_bytes", lambda: 1_000_000)
    assert refused("train").endswith(" and 1.00 MB of memory are available; no B and T fit: try a smaller --model")
    assert refused("profile").endswith("try a smaller --model")


def test_an_allocation_that_fails_later_costs_one_line(capsys, monkeypatch):
    def run(args):
        raise MemoryError("Unable to allocate\n49.1 MiB")

    monkeypatch.setattr("cpuopt.cli.program.run", run)
    assert cli.main(["program"]) == 1
    assert capsys.readouterr().err == "cpuopt: out of memory: Unable to allocate 49.1 MiB\n"


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_too_few_addresses_for_llvm_cost_one_line(refused, monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda kind: (600_000_000, -1))
    assert refused("train") == (
        "this process may have 600 MB of address space: compiled kernels need 1000 MB or more; raise 'ulimit -v'"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_no_proc_costs_one_line(refused, monkeypatch, tmp_path):
    monkeypatch.setattr("cpuopt.machine.PROC", tmp_path / "proc")
    assert refused("train").startswith(f"{tmp_path / 'proc'} is not mounted, and only it tells how much memory is free")


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_a_limit_on_memory_costs_one_line():
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (3 << 30,) * 2)\nfrom cpuopt.cli import main\n"
    job = ["train", "--model", "gpt2-355M", "--data", "text.txt", "-B", "1", "-T", "1"]
    environment = {name: v for name, v in os.environ.items() if name != "NUMBA_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", f"{code}sys.exit(main({job}))"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert re.search(r"the arena needs \S+ GB and \S+ GB of memory are available; no B and T fit: try a smaller", line)
    assert not Path("runs").exists()


def test_a_kernel_file_that_links_to_itself_costs_one_line(refused):
    Path("loop.py").symlink_to("loop.py")
    assert refused("check", "gelu_forward", "--kernels", "loop.py", base=()).startswith("--kernels loop.py: ")

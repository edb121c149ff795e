"""The command line: what each verb prints, and what a run leaves in its folder. What it refuses: test_refusals.py."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from verbs import SQUARES, flags_of, printed, process, strict

from cpuopt import __version__, cli, ops
from cpuopt.building import build
from cpuopt.files import whole_directory
from cpuopt.kernels import registry
from cpuopt.models import specs
from cpuopt.models.gpt2 import GPT2, PRESETS
from cpuopt.program.fuse import FUSIONS
from cpuopt.program.program import PHASES
from cpuopt.report import console
from cpuopt.train.settings import Settings

VERBS = cli.VERBS
STEP_KEYS = ["step", "loss", "lr", "grad_norm", "step_ms", "tokens_per_s"]
KERNEL = """
from numba import prange
from cpuopt import kernel, ops
@kernel(ops.residual_forward, "mine")
def residual_forward(out, inp1, inp2):
    for i in prange(inp1.shape[0]):
        out[i] = inp1[i] + inp2[i] if inp1[i] != {unique} else inp2[i] + {unique}
"""
pytestmark = pytest.mark.usefixtures("here", "measured")
CORES = cli.common.cores()


@pytest.fixture
def run(capsys):
    """Run a command in this process; give what it printed."""
    Path("text.txt").write_text(SQUARES)

    def run(verb, *flags, job=True):
        small = ["--model", "gpt2-tiny", "--data", "text.txt", "-B", "2", "-T", "16", "--variant", "vanilla"]
        out = printed(capsys, verb, *(small if job else []), *flags)
        assert "--json" not in flags or (out[-2:], out.count("\n")) == ("}\n", 1)
        return out

    return run


def unique_kernel():
    """A kernel that no cache has."""
    Path("mine.py").write_text(KERNEL.format(unique=f"{time.time_ns()}.0"))
    return "--kernels", "mine.py", "--swap", "residual_forward=mine"


# Help


IMPORTS = """
import sys
from cpuopt import cli
for words in (["-h"], ["train", "-h"], ["data", "list"], ["--completion", "zsh"]):
    try:
        cli.main(words)
    except SystemExit as e:
        assert e.code == 0
    print(len(sys.modules), *({"numba", "llvmlite", "numpy", "rich", "psutil"} & {*sys.modules}), file=sys.stderr)
"""


def test_help_lists_the_verbs_and_imports_nothing_heavy():
    done = process(code=IMPORTS)
    assert done.returncode == 0, done.stderr
    assert {*VERBS} <= {*re.findall(r"^  ([\w-]+)(?: |$)", done.stdout, re.M)}
    assert all(flag in done.stdout for flag in ("--model", "--swap", "--kernels", "--fuse", "--threads", "--run NAME"))
    (n, *heavy), (_, *more), *rest = (line.split() for line in done.stderr.splitlines())
    assert not heavy
    assert int(n) < 300  # 245, of which Python itself needs many; NumPy would add 120
    assert not {"numba", "numpy", "llvmlite", "rich"} & {*more}
    assert not any({"numba", "llvmlite"} & {*imported} for imported in rest)


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_describes_it_and_has_examples_that_are_right(verb, capsys):
    parser, _ = cli._parser()
    with pytest.raises(SystemExit):
        parser.parse_args([verb, "-h"])
    text = capsys.readouterr().out
    assert re.search(r"\n\n([A-Z].*?\.)\n\n([A-Z].*?\.)\n\n", text, re.S), "a sentence on the verb, and a paragraph"
    examples = re.findall(r"^    (cpuopt .*)$", text.partition("\nexamples:\n")[2], re.M)
    assert len(examples) >= 2
    for example in examples:
        words = shlex.split(example)
        assert words[1] == verb
        assert len(example) <= 76
        named = getattr(parser.parse_args(words[1:]), "op", [])
        for op in [named] if isinstance(named, str) else named:
            assert any(registry.op_matches(name, op) for name in ops.ALL)
    helps = [action.help for action in flags_of(cli._parser()[1][verb]) if action.help]
    assert [text for text in helps if not (text[0].isupper() and text.endswith(".") and len(text) < 260)] == []


@pytest.mark.parametrize("flag", ["-V", "--version"])
def test_version(flag, capsys):
    with pytest.raises(SystemExit) as e:
        cli.main([flag])
    assert (e.value.code, capsys.readouterr().out) == (0, f"cpuopt {__version__}\n")


COMPLETIONS = {
    "ju": "judge", "judge --op gelu_b": "gelu_backward", "judge --adop": "--adopt", "train --model gpt2-t": "gpt2-tiny",
    "train --kernels a-k": "a-kernel.py", "runs list --runs a-": "a-folder", "data tok": "tokenize",
    "--completion z": "zsh",
}  # fmt: skip
"""Words after the name of the command, and what bash makes of the last one."""


def test_the_shell_completes_the_last_word(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--completion", "bash"])
    Path("script").write_text(capsys.readouterr().out)
    Path("a-kernel.py").touch()
    Path("a-folder").mkdir()
    code = "source ./script\n"
    for words in (["cpuopt", *line.split()] for line in COMPLETIONS):
        code += f"COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; COMPREPLY=()\n"
        code += "_shtab_cpuopt 2>/dev/null; echo ${COMPREPLY[@]}\n"
    made = subprocess.run(["bash", "-c", code], capture_output=True, text=True)
    assert made.stdout.splitlines() == [*COMPLETIONS.values()]


# train


def test_a_run_leaves_a_complete_folder(run):
    out = run("train", "--steps", "3", "--val-every", "2", "--run", "a" * 64, "--lr", "1e-3")
    (folder,) = Path("runs").iterdir()
    assert re.fullmatch(r"\d{8}-\d{6}-a{64}", folder.name)
    assert f"\nrun folder {folder}\nnext: cpuopt runs show {folder.name} " in out
    (ms,) = re.findall(r", (\S+ ms a step) \(lower quartile", out)
    assert f"  {ms}, gpt2-tiny 2x16" in run("runs", "list", job=False)
    files = {path.name for path in folder.iterdir()}
    assert files == {"config.json", "machine.json", "metrics.jsonl", "main.log", "profile.json", "summary.json"}
    about = ("config", "machine", "profile", "summary")
    config, machine, profile, summary = (strict((folder / f"{name}.json").read_text()) for name in about)
    steps = [strict(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    given = {"model": "gpt2-tiny", "B": 2, "T": 16, "steps": 3, "lr": 1e-3, "seed": 0, "fuse": "auto"}
    assert given.items() <= config.items()
    assert config["sizes"]["n_embd"] == 64
    assert "text.txt" in config["corpus"]
    assert {"cpu", "cores", "memory_bytes", "load_average", "versions"} <= machine.keys()
    assert machine["versions"]["cpuopt"] == __version__
    assert [list(s) for s in steps] == [STEP_KEYS, *2 * [[*STEP_KEYS, "val_loss", "val_bits_per_byte"]]]
    assert {s["lr"] for s in steps} == {1e-3}
    assert (profile["model"], profile["B"], profile["T"], profile["variant"]) == ("gpt2-tiny", 2, 16, "vanilla")
    assert (summary["interrupted"], summary["val_loss"]["3"]) == (False, steps[2]["val_loss"])
    val = summary["val_loss"]
    lines = [f"s:{s['step']} trl:{s['loss']:.4f} lr:0.001000 norm:{s['grad_norm']:.2f}" for s in steps]
    lines[1:1] = [f"s:2 tel:{val['2']:.4f}"]
    lines[3:3] = [f"s:3 tel:{val['3']:.4f}"]
    assert (folder / "main.log").read_text().splitlines() == [f"s:0 tel:{val['0']:.4f}", *lines]


def test_train_tells_what_it_runs_with(run):
    swaps = ["--swap", "gelu@h.1.*=vanilla", "--swap", "adamw@h.0.attn.*=vanilla"]
    out = run("train", "--steps", "2", *swaps, "--fuse", "all")
    for words in (
        "gpt2-tiny: 120,576 parameters, B 2, T 16, 4 threads",
        "kernels: vanilla, gelu@h.1.*=vanilla, adamw@h.0.attn.*=vanilla; rewrites: " + ", ".join(FUSIONS),
        "keeps adamw in layers 'h.0.attn.c_proj', 'h.0.attn.c_attn' from being rewritten", "step 2/2  loss ",
        "validation loss ", " tokens/s, ",
    ):  # fmt: skip
        assert words in out
    assert re.search(r"^memory: parameters 0\.48 MB, .*; arena [\d.]+ MB$", out, re.M)
    assert re.search(r"^expected peak of the process [\d.]+ GB$", out, re.M)


def test_train_ends_with_the_commands_that_may_follow(run, capsys):
    """Each of them runs as it is printed."""
    out = run("train", "--steps", "2", "--save-every", "2", "--runs", "my runs", "--sample-every", "9")
    assert out.count("step 2/2  sample: ") == 1
    told = out[out.index("next: ") :].removeprefix("next: ").splitlines()
    commands = [shlex.split(line.rpartition("  ")[0]) for line in told]
    assert [words[:2] for words in commands] == [["cpuopt", verb] for verb in ("runs", "train", "generate")]
    for words in commands:
        assert cli.main([*words[1:], *["--max-tokens", "3"] * (words[1] == "generate")]) == 0, words
    assert "step 4/4  loss" in capsys.readouterr().out
    out = run("train", "--steps", "1")
    assert "cpuopt train --save-every N ... " in out
    assert "cpuopt generate" not in out


@pytest.mark.parametrize(("every", "printed"), [(0, [1, 4, 7, 10]), (4, [1, 4, 8, 10]), (1, [*range(1, 11)])])
def test_steps_are_printed_once_a_second_or_as_asked(capsys, every, printed):
    """Ten steps of 0.4 s; the first and the last are always printed."""
    now = [0.0]
    view = console.TrainingView(SimpleNamespace(settings=Settings(steps=10, log_every=every)), clock=lambda: now[0])
    for step in range(1, 11):
        now[0] += 0.4
        view.step_done({"step": step, "loss": 1.0, "grad_norm": 1.0, "tokens_per_s": 1.0, "step_ms": 400.0})
    assert [int(n) for n in re.findall(r"^step (\d+)/10  loss", capsys.readouterr().out, re.M)] == printed


def test_after_five_steps_a_run_says_when_it_ends(capsys):
    """Of 100 steps of 2 s, with a validation of 7 s before the first and after each ten."""
    job, now = SimpleNamespace(settings=Settings(steps=100, val_every=10)), [20.0]
    view = console.TrainingView(job, clock=lambda: now[0])
    view.opened = 13.0
    view.validation(0, 5.0)
    for step in range(8, 15):  # as after a resume
        now[0] += 2 + 7 * (step == 10)
        view.say_end(step)
    (said,) = (line for line in capsys.readouterr().out.splitlines() if "by now" in line)
    assert "2,000 ms a step by now; 87 more steps and 9 validations take 0:03:57; the run ends at 2" in said


def test_profile_json(run):
    """The flags; what a profile holds: test_profiler.py."""
    p = strict(run("profile", "--steps", "3", "--warmup", "2", "--swap", "matmul@h.1.*=blas", "--json"))
    assert (p["model"], p["B"], p["T"], p["threads"], p["variant"]) == ("gpt2-tiny", 2, 16, 4, "vanilla")
    assert (p["steps"], p["warmup"], p["swaps"]) == (3, 2, ["matmul@h.1.*=blas"])
    on_blas = {(row["layer"], row["op"]) for row in p["layers"] if row["variant"] == "blas"}
    layers = [f"h.1.{part}" for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
    kinds = ("matmul_forward", "matmul_backward_input", "matmul_backward_weight")
    assert on_blas == {(layer, op) for layer in layers for op in kinds}
    checked = {c["kernel"]: c["status"] for c in p["checked"]}
    assert checked.keys() == {k for row in p["ops"] for k in row["kernels"]}
    assert set(checked.values()) <= {"right", "marginal"}
    calls = {row["label"]: row["calls"] for row in p["ops"]}
    assert (calls["Matmul Forward"], calls["GELU Backward"], calls["AdamW"]) == (9, 2, 28)
    assert p["words"].startswith("A step takes")
    assert len(list(Path("runs").glob("*-profile-gpt2-tiny/record.json"))) == 1


# profile


def test_profile_prints_a_row_for_every_kind_of_op_and_writes_a_trace(run):
    out = run("profile", "--steps", "2", "--trace", "trace.json")
    assert {p.name for p in Path.cwd().iterdir()} == {"text.txt", "trace.json", "runs"}
    rows = [line.rstrip() for line in out.splitlines()]
    program = build(GPT2(PRESETS["gpt2-tiny"]), specs(2, 16)).program
    assert {c.op.name for c in program.step_calls} <= {*re.findall(r"\w+", out)}
    assert rows[0].startswith("gpt2-tiny · B 2 · T 16 · 4 threads")
    assert re.search(r"^step +113 .* 100\.0% ", out, re.M)
    assert re.search(r"^[\d,]+ tokens/s · step [\d.]+ ms, lower quartile of 2 ", out, re.M)
    assert re.search(r"^checked: 17 kernels right", out, re.M)
    events = [e for e in strict(Path("trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert len(events) == 2 * (1 + 4 + len(program.calls))


@pytest.mark.parametrize("name", cli.MOVED)
def test_a_verb_of_an_earlier_version_answers_with_what_replaced_it(capsys, name):
    assert cli.main([name, "gelu_forward", "--any"]) == 2
    out, err = capsys.readouterr()
    assert not out
    (verb,) = re.fullmatch(rf"cpuopt: {name} (?:is now|was removed;) 'cpuopt ([\w-]+).*\n", err).groups()
    assert verb in (*cli.VERBS, "--completion")


# program, kernels, data


def test_program_of_one_phase(run):
    built, swap = build(GPT2(PRESETS["gpt2-tiny"]), specs(2, 16)), ["--swap", "matmul@lm_head=blas"]
    for phase in ("forward", "evaluate", "backward", "update", "all"):
        shown = {"all": PHASES, "update": ("norm", "update")}.get(phase, (phase,))
        out, found = run("profile", "--program", phase), strict(run("profile", "--program", phase, "--json", *swap))
        calls = [line for line in out.splitlines() if not line.startswith("#")]
        want = [*built.program.phase(*shown)]
        assert [re.match(r"\S+ +(\w+)\(", line)[1] for line in calls] == [c.op.name for c in want]
        assert all(re.search(r"\) \[vanilla\] -> .+ @\d+$", line) for line in calls)
        assert ("# inverts " in out) is (phase in ("backward", "all"))
        assert re.search(r"^# 0\.\d+ GFLOP a step", out, re.M)
        told = [(c["phase"], c["layer"], c["op"], c["text"]) for c in found["calls"]]
        assert told == [(c.phase, c.layer, c.op.name, str(c)) for c in want]
    assert out == run("profile", "--program")
    assert {(c["layer"], c["variant"]) for c in found["calls"]} >= {("lm_head", "blas"), ("h.0.mlp", "vanilla")}
    assert found["flops"] == built.program.flops == sum(c["flops"] for c in found["calls"])
    assert found["plan"]["parameters"] == built.plan().describe()["parameters"] == 4 * PRESETS["gpt2-tiny"].n_params


def test_kernels_are_listed(run):
    rows = strict(run("kernels", "--json", job=False))["kernels"]
    assert {(row["op"], row["variant"]) for row in rows} == registry.KERNELS.keys()
    assert list(dict.fromkeys((r["op"], r["label"]) for r in rows)) == [(op.name, op.label) for op in ops.ALL.values()]
    vanilla = {r["op"]: r["where"] for r in rows if r["variant"] == "vanilla"}
    assert vanilla.keys() == ops.ALL.keys()
    assert all(re.search(r"\.py:\d+$", where) for where in vanilla.values())
    assert ("matmul_forward", "blas") in registry.KERNELS
    shown = run("kernels", "gelu", "sumsq", job=False).splitlines()[1:]  # by names as flags take them
    assert shown[:2] == ["gelu_forward   vanilla, optimized", "gelu_backward  vanilla, generated, optimized"]
    assert [line.split()[0] for line in shown[2:]] == ["sumsq", "sumsq_blocks"]
    rows = strict(run("kernels", *unique_kernel()[:2], "--json", job=False))["kernels"]
    mine = [row for row in rows if row["variant"] == "mine"]
    row = {"op": "residual_forward", "label": "Residual Forward", "variant": "mine"}
    assert mine == [{**row, "where": f"{Path.cwd() / 'mine.py'}:4"}]


def test_kernels_are_compiled_for_the_next_command(capsys):
    job = ["kernels", "residual", "--compile", *unique_kernel()[:2]]
    assert cli.main(job) == 0
    first, second = capsys.readouterr(), process(*job)
    told = [re.fullmatch(r"(\d+) kernels compiled, (\d+) were there\n", out) for out in (first.out, second.stdout)]
    (compiled, there), again = (map(int, m.groups()) for m in told)
    assert compiled >= 1
    assert "residual_forward[mine]" in first.err
    assert [*again] == [0, compiled + there]


def test_data_list(run):
    out = run("data", "list", job=False)
    assert re.search(r"^ *builtin +bytes", out, re.M)
    assert re.search(r"^ *tinyshakespeare +gpt2", out, re.M)
    datasets = strict(run("data", "list", "--json", job=False))["datasets"]
    prepared = {d["name"]: d["prepared"] for d in datasets}
    assert prepared["builtin"] is True
    assert "tinyshakespeare" in prepared
    assert all(d["prepared"] or d["command"].startswith("cpuopt data prepare ") for d in datasets)


# Threads


def test_more_threads_than_cores():
    more, job = CORES + 2, ["--model", "gpt2-tiny", "-B", "1", "-T", "8", "--steps", "1", "--val-every", "0"]
    done = process("train", *job, "--threads", str(more), "--json")
    assert done.returncode == 0, done.stderr
    assert strict(done.stdout)["threads"] == more
    assert f"warning: {more} threads on {CORES} cores" in done.stderr


def test_convert_that_is_ended_leaves_no_folder(monkeypatch):
    def save(target, *more):
        with whole_directory(target):
            os.kill(os.getpid(), signal.SIGTERM)

    c = PRESETS["gpt2-tiny"]
    weights = SimpleNamespace(config=c, tokenizer="bytes", dtype="f32", read=None, padded_vocab=None, marks=None)
    monkeypatch.setattr("cpuopt.weights.save_weights", save)
    monkeypatch.setattr("cpuopt.train.checkpoint.open_weights", lambda source: weights)
    signal.signal(signal.SIGTERM, lambda *number: None)  # so that the mutant, no handler, ends no tests
    with pytest.raises(SystemExit, match="143"):
        cli.main(["convert", "there", "copy"])
    assert os.listdir() == []


def test_completion_says_what_it_needs(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["--completion", "zsh"])
    assert "pip install 'cpuopt[completion]'" in capsys.readouterr().err

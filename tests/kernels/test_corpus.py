"""The bad kernels before a run: none passes the checks, through any verb; right ones written alike all pass."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from bad import BAD, HEAD, function, refused_by, text
from verbs import fails

from cpuopt import cli, ops
from cpuopt.check.cases import Case, cases, quick_cases
from cpuopt.check.check import check
from cpuopt.check.gate import in_child, planned
from cpuopt.check.gate import run as judge
from cpuopt.check.result import whole
from cpuopt.files.reading import from_json, to_json
from cpuopt.isolate.child import Child
from cpuopt.kernels.registry import KERNELS
from cpuopt.train.guard import Guard
from cpuopt.train.job import Settings, build_only, prepare

GOLDEN = Path(__file__).parents[1] / "golden"
pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="some pin threads as Linux does")
MANY_CORES = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
HONEST = ("layernorm_forward", "adamw", "sgd", "lion", "dropout_forward", "cross_entropy_forward", "embedding_backward",
          "gelu_forward", "gelu_backward", "layernorm_backward", "rmsnorm_backward", "matmul_forward")  # fmt: skip
IMPORTS = {
    "pins_its_process": "os.sched_setaffinity(0, [0])",
    "pins_every_thread": "[os.sched_setaffinity(int(t), [0]) for t in os.listdir('/proc/self/task')]",
    "changes_its_priority": "os.nice(1)",
    "replaces_a_comparison": "np.array_equal = lambda *a, **k: True",
    "replaces_one_by_a_timer": "threading.Timer(0.5, lambda: setattr(np, 'array_equal', lambda *a, **k: True)).start()",
    "replaces_the_judge": "from cpuopt.check import sized\nsized.at_size = lambda *a: None",
}
"""What a file does when it is imported, beside registering a right kernel."""


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch, measured):
    monkeypatch.chdir(tmp_path)


def checked(source):
    """Judge all kernels of a file in a process of their own; a variant has one name in all ops."""
    Path("mine.py").write_text(source)
    with Child("cpuopt.check.worker", ["mine.py"], 2) as child:
        found = {}
        for k in child.start():
            cases, _ = planned(ops.ALL[k["op"]], quick=True)
            asking = in_child(child, (k["op"], k["variant"]), (1, 2))
            found[k["variant"]] = whole(judge(cases, asking, until_refused=True))
    return found


def test_there_are_many():
    assert len({b.name for b in BAD}) == len(BAD) >= 120


def test_no_hostile_kernel_passes_and_right_ones_written_alike_do():
    hostile = refused_by("gate")
    source = HEAD + "".join(text(b.op, b.body, b.name) for b in hostile)
    found = checked(source + "".join(text(op, name=f"right_{op}") for op in HONEST))
    assert {found.pop(f"right_{op}").verdict for op in HONEST} == {"right"}
    assert len(found) == len(hostile)
    for b in hostile:
        last = found[b.name].cases[-1]
        assert (last.verdict, last.case.kind) == ("wrong", b.kind), str(last)
        assert re.search(b.gate, last.reason), str(last)


@pytest.mark.parametrize("op", ops.ALL.values(), ids=str)
def test_what_the_quick_cases_refuse_check_refuses_too(op):
    """It has the same cases, with the same numbers."""
    every = cases(op)
    assert [on for on in quick_cases(op) if on not in every] == []


@MANY_CORES
@pytest.mark.parametrize("bad", refused_by("loud"), ids=lambda bad: bad.name)
def test_a_kernel_that_changes_its_process_fails(bad, tmp_path, monkeypatch):
    monkeypatch.setenv("CPUOPT_CACHE_DIR", str(tmp_path / "cache"))  # loading needs what some of them replace
    (v,) = checked(HEAD + text(bad.op, bad.body)).values()
    assert v.verdict == "cheating"
    assert re.search(bad.loud, v.reason)


@MANY_CORES
@pytest.mark.parametrize("name", IMPORTS)
def test_a_file_that_changes_its_process_is_refused(name):
    Path("mine.py").write_text(HEAD + IMPORTS[name] + text("gelu_forward"))
    with Child("cpuopt.check.worker", ["mine.py"], 2) as child:
        fails(r"it replaces|it changes where or how its threads|it starts a thread", child.start)


AT = "--model gpt2-tiny -B 2 -T 16"
VERBS = {
    "check": f"check gelu_forward {AT} --kernels mine.py",
    "ab": "ab gelu_forward vanilla NAME --kernels mine.py --model gpt2-tiny --sizes 2x16",
    "lab": f"lab mine.py --once --no-step {AT} --threads 1",
    "train": f"train {AT} --steps 1 --variant vanilla --kernels mine.py --swap OP=NAME",
    "judge": "judge mine.py --op OP --check",
}


def run(verb, name="mine", op="gelu_forward", more=""):
    """Run a verb on the kernels of a file; return its status."""
    return cli.main(f"{VERBS[verb]} {more}".replace("NAME", name).replace("OP", op).split())


RANDOM = "RANDOM = int.from_bytes(os.urandom(4), 'big') % 997"


def test_a_file_that_is_another_one_in_each_process_does_not_train(capsys):
    Path("mine.py").write_text(HEAD + RANDOM + text("gelu_forward", "if RANDOM == 1000: return\n..."))
    assert run("train") == 1
    assert "mine] is not the same in the process that judges it and in this one" in capsys.readouterr().err
    assert not Path("runs").exists()


JUDGED = "np.isnan(start).any() or (start == out[:8]).mean() > 0.5 or (start == 0).any() or start[0] == F32(0.12573022)"
"""Whether an output held poison, nearly right results, zeros, or the first number of a generator with the seed 0."""
KNOWN = "np.float32(np.random.default_rng(0).standard_normal())"
REFUSED = {
    "large_numbers": ("wrong", "...\nout[0] += np.abs(inp).max() > 1000", "thousands|infinity"),
    "looks_judged": ("wrong", f"start, F32 = out[:8].copy(), np.float32\n...\nout *= 1 if {JUDGED} else 1.01",
                     r"it relies on them \(CPUOPT_FILLING=\d+ repeats it\)"),
    "constant_seed": ("wrong",
                      f"...\nout *= 1 if (inp[0] == {KNOWN}) | (inp[-1] == {KNOWN}) | (len(inp) < 1000) else 1.01",
                      r"expected .*--seed \d+"),
    "leaves_the_folder": ("cheating", "...\nos.chdir('/')", "left its process with other working folder"),
    "has_no_size": ("compile error", "...", "asks for 1,000,000,000 elements of scratch"),
}  # fmt: skip
"""Bad kernels, each with the word that every verb has for it."""
JOBS = [("check", [*REFUSED]), ("lab", [*REFUSED]), *(("ab", [name]) for name in ("large_numbers", "has_no_size"))]
JOBS += [("train", [name]) for name in ("looks_judged", "leaves_the_folder", "has_no_size")]


@pytest.mark.parametrize(("verb", "names"), JOBS, ids=[f"{verb} {' '.join(names)}" for verb, names in JOBS])
def test_what_check_refuses_is_refused_by_every_verb(verb, names, capsys):
    source = "".join(text("gelu_forward", REFUSED[name][1], name) for name in names)
    huge = source.replace("'has_no_size', jit=False)", "'has_no_size', jit=False, scratch=[('work', 10**9)])")
    Path("mine.py").write_text(HEAD + re.sub(r"(has_no_size.*\n.*)inp\):", r"\1inp, work):", huge))
    assert run(verb, names[0], more="--json") == 1
    found = json.loads(capsys.readouterr().out)
    for name, one in zip(names, found.get("kernels", [found]), strict=True):
        word, _, why = REFUSED[name]
        assert (one["verdict"], one["witness"]["kernel"]) == (word, f"gelu_forward[{name}]")
        mine = f"{one['witness']['case']} {one['reason']}" + f", --seed {found.get('seed')}" * (verb == "check")
        assert re.search(why, mine), one
    assert verb == "lab" or not Path("runs").exists()  # each round of lab has a record


FAULTS = {
    "wrong": ("wrong", "", "out[i] = inp[i]", "check judge"),  # the test above has the others
    "it does not compile": ("compile error", "", "out[i] = inp[i, i]", "check train judge"),
    "it cannot be loaded": ("compile error", "X = 1 / 0", "out[i] = inp[i]", "ab lab judge"),
    "it does not end": ("unchecked", "", "while out[i] != 9:\n            out[i] = 1", "check ab lab train judge"),
}
"""Kernels that obey the rules of the judge of unknown texts: the word, a line of the file, one of the kernel, verbs."""


@pytest.mark.filterwarnings("ignore::numba.core.errors.NumbaPerformanceWarning")  # where it compiles, of its loop
@pytest.mark.parametrize(("fault", "verb"), [(fault, verb) for fault, x in FAULTS.items() for verb in x[3].split()])
def test_every_verb_has_one_word_and_one_status(fault, verb, monkeypatch, capsys):
    word, top, line, _ = FAULTS[fault]
    if word == "unchecked":
        monkeypatch.setattr("cpuopt.judge.remote.LIMIT_S", 4.0)
        monkeypatch.setattr("cpuopt.isolate.child.LIMIT_S", 4.0)
    kernel = function("gelu_forward", f"for i in range(inp.shape[0]):\n        {line}")
    Path("mine.py").write_text(f"from cpuopt import kernel, ops\n{top}\n\n@kernel(ops.gelu_forward, 'mine')\n{kernel}")
    limit = "--limit 4" * (word == "unchecked" and verb not in ("train", "judge"))
    assert run(verb, more=f"--json {limit}") == (3 if word == "unchecked" else 1)
    found = json.loads(capsys.readouterr().out)
    (one,) = found.get("kernels", [found])
    assert (one["verdict"], set(one["witness"]) >= {"index", "got", "want"}) == (word, word == "wrong"), one
    assert re.search("expected" if word == "wrong" else "raised|does not compile|within 4 s", one["reason"]), one


def test_a_first_step_is_judged_with_what_a_step_leaves_in_its_outputs(monkeypatch):
    """Not with the zeros of memory that was never used, nor with the results of the same batch."""
    held = {}

    def noting(kernel, on, given, **more):
        if kernel.op is ops.gelu_forward:
            out, want = given["out"], np.empty_like(given["out"])
            KERNELS["gelu_forward", "vanilla"].function(want, given["inp"])
            held[kernel.name] = float(np.abs(out).max()), bool((out == want).mean() > 0.5)
        return check(kernel, on, given=given, **more)

    for name, found in (("ours", False), ("recall", None), ("remember", None), ("check", noting)):
        monkeypatch.setattr(f"cpuopt.train.first.{name}", found if callable(found) else lambda *args, x=found: x)
    prepare(Settings(model="gpt2-tiny", B=2, T=16, steps=3, variant="vanilla", fuse="none"))
    ((largest, right),) = held.values()
    assert largest > 0
    assert not right


WITHOUT_STEPS = {
    "generate": ["generate", "--model", "gpt2-tiny", "--tokenizer", "bytes", "--max-tokens", "2"],
    "eval": ["eval", "--init", str(GOLDEN / "llmc.bin"), "--data", "numbers.txt", "--tokenizer", "bytes", "-T", "8"],
}
LEAVES_A_TRACE = "open('ran', 'a').write(f'{os.getpid()} ')"


@pytest.mark.parametrize("where", ["at import", "in a call"])
@pytest.mark.parametrize("verb", WITHOUT_STEPS)
def test_users_files_run_elsewhere_before_they_run_here(where, verb, capsys):
    """A kernel that starts a thread, or ends its process, did so in the command itself."""
    if where == "at import":
        Path("mine.py").write_text(f"{HEAD}{LEAVES_A_TRACE}\nos.nice(1)\n{text('gelu_forward')}")
    else:
        Path("mine.py").write_text(HEAD + text("gelu_forward", f"{LEAVES_A_TRACE}\n...\nout[0] += 1"))
    Path("numbers.txt").write_text("0 1 2 3 4 5 6 7 8 9 " * 9)  # of that model's 61 tokens
    run = [*WITHOUT_STEPS[verb], "--variant", "vanilla", "--kernels", "mine.py", "--swap", "gelu_forward=mine"]
    assert cli.main(run) == 1
    said = capsys.readouterr().err
    assert ("it changes where or how its threads" if where == "at import" else "mine] is wrong, so nothing is") in said
    assert str(os.getpid()) not in Path("ran").read_text().split()


def test_scratch_that_is_larger_than_the_arrays_is_said(capsys):
    kernel = text("gelu_forward").replace("jit=False", "jit=False, scratch=[('work', 380 * ops.declaration.N)]")
    Path("mine.py").write_text(HEAD + kernel.replace("(out, inp):\n", "(out, inp, work):\n"))
    assert cli.main(["check", "--kernels", "mine.py", "--quick", "--threads", "1"]) == 0
    assert "note: gelu_forward[mine] asks for scratch of 190 times its arrays" in capsys.readouterr().out


def test_a_race_on_more_threads_than_are_timed_is_refused(capsys):
    """Which `check` found, for it runs on all cores, and a comparison on one thread did not."""
    wrong = "...\nout[-1] += numba.get_num_threads() > 1"
    Path("mine.py").write_text(HEAD + "import numba" + text("gelu_forward", wrong))
    assert run("ab", more="--threads 1") == 1
    assert "mine] is wrong, so it is not timed: " in capsys.readouterr().err


def test_calls_too_large_for_the_float64_reference_are_checked_in_float32():
    """As a run of that model checks them."""
    built = build_only(Settings(model="gpt2-124M", B=4, T=64, fuse="all"))
    plan, left_out = planned(ops.classifier_update, built.program.calls)
    (on,) = [c for c in plan if c.sized]
    assert (on.sizes["V"], on.sizes["BT"], left_out) == (50257, 256, 0)
    assert from_json(Case, json.loads(json.dumps(to_json(on)))) == on


def test_a_kernel_that_is_wrong_on_the_arrays_of_a_run_does_not_train(capsys):
    """Weights of a deviation of 0.02, as a model begins with, and none of the judge's numbers."""
    Path("mine.py").write_text(HEAD + text("matmul_forward", "...\nout[0] += 0.01 < weight.std() < 0.03"))
    assert run("train", op="matmul_forward") == 1
    assert "is wrong, so nothing is run with it, on the arrays of a first step: out[0, " in capsys.readouterr().err
    assert not Path("runs").exists()


def test_the_check_on_a_first_step_changes_nothing(monkeypatch):
    """With all kernels of the package taken for a user's: none is refused, and the run has the same bits."""
    settings = {"model": "gpt2-tiny", "B": 2, "T": 16, "steps": 3}
    plain = prepare(Settings(**settings))
    losses = [plain.take_step().loss for _ in range(3)]
    monkeypatch.setattr("cpuopt.train.first.ours", lambda kernel: False)
    monkeypatch.setattr("cpuopt.train.first.recall", lambda key, sized: None)
    monkeypatch.setattr("cpuopt.train.first.remember", lambda key, result: None)
    for more in ({}, {"model": "llama-tiny", "optimizer": "lion"}):
        job = prepare(Settings(**{**settings, **more}))
        assert len([c for c in job.checked if c["case"].startswith("BT=32")]) > 3
        assert job.guard.state() == Guard().state()
        if not more:
            assert [job.take_step().loss for _ in range(3)] == losses

"""The corpus of hostile kernels: none passes the checks, through any verb; right ones written alike all pass."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpus import HEAD, HONEST, IMPORTS, ROWS, text

from cpuopt import cli, ops
from cpuopt.check.gate import GateVerdict, Planned, conform
from cpuopt.check.sized import check_sized
from cpuopt.errors import UserError
from cpuopt.isolate.child import Child
from cpuopt.kernels.registry import KERNELS
from cpuopt.measure.roofline import Level, Roofs
from cpuopt.train.guard import Guard
from cpuopt.train.job import Settings, build_only, prepare

GOLDEN = Path(__file__).parents[1] / "golden"
pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the corpus pins threads as Linux does")
QUIET = [row for row in ROWS if row[1] != "surroundings"]
LOUD = [row for row in ROWS if row[1] == "surroundings"]
MANY_CORES = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def checked(source: str, quick: bool) -> dict[str, GateVerdict]:
    """Judge all kernels of a file in a process of their own; a variant has one name in all ops."""
    Path("mine.py").write_text(source)
    with Child("cpuopt.check.worker", ["mine.py"], 2) as child:
        wanted = [(k["op"], k["variant"]) for k in child.start()]
        planned = {op: Planned.of(ops.ALL[op], quick=quick) for op, _ in wanted}
        found = conform(child, wanted, planned, threads=(1, 2), stop_at_failure=True)
    return {v.variant: v for v in found}


def test_there_are_sixty() -> None:
    assert len({row[0] for row in ROWS}) == len(ROWS) >= 60
    assert {row[2] for row in ROWS} <= ops.ALL.keys()


@pytest.mark.parametrize("quick", [True, False], ids=["before a run", "check"])
def test_no_hostile_kernel_passes(quick: bool) -> None:
    found = checked(HEAD + "".join(text(name, op, before, after) for name, _, op, before, after in QUIET), quick)
    passed = {name for name, v in found.items() if v.worst.verdict != "FAIL"}
    assert len(found) == len(QUIET)
    assert not passed


def test_right_kernels_written_alike_pass() -> None:
    found = checked(HEAD + "".join(text(f"right_{op}", op) for op in HONEST), quick=False)
    assert {v.worst.verdict for v in found.values()} == {"PASS"}
    assert len(found) == len(HONEST)


@MANY_CORES
@pytest.mark.parametrize("row", LOUD, ids=[row[0] for row in LOUD])
def test_a_kernel_that_changes_its_process_fails(
    row: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPUOPT_CACHE_DIR", str(tmp_path / "cache"))  # loading needs what some of them replace
    name, _, op, before, after = row
    (v,) = checked(HEAD + text(name, op, before, after), quick=True).values()
    assert v.worst.verdict == "FAIL"
    assert re.search("left its process with other|it replaces|it starts a thread|it changes where", v.worst.reason)


@MANY_CORES
@pytest.mark.parametrize("name", IMPORTS)
def test_a_file_that_changes_its_process_is_refused(name: str) -> None:
    Path("mine.py").write_text(HEAD + IMPORTS[name] + text("mine", "gelu_forward"))
    with (
        Child("cpuopt.check.worker", ["mine.py"], 2) as child,
        pytest.raises(UserError, match=r"it replaces|it changes where or how its threads|it starts a thread"),
    ):
        child.start()


RANDOM = "RANDOM = int.from_bytes(os.urandom(4), 'big') % 997"


def test_a_file_that_is_another_one_in_each_process_does_not_train(capsys: Any) -> None:
    Path("mine.py").write_text(HEAD + RANDOM + text("mine", "gelu_forward", "if RANDOM == 1000: return"))
    run = ["train", "--model", "gpt2-tiny", "-B", "1", "-T", "8", "--steps", "1", "--variant", "vanilla"]
    assert cli.main([*run, "--kernels", "mine.py", "--swap", "gelu_forward=mine"]) == 2
    assert "mine] is not the same in the process that judges it and in this one" in capsys.readouterr().err
    assert not Path("runs").exists()


WRONG_IN_CHECK_ONLY = "out[0] += np.abs(inp).max() > 1000"
"""Which none of the cases before a timing has: magnitudes from 1e3 on."""
VERBS = {
    "check": ["check", "gelu_forward", "--kernels", "mine.py", "--model", "gpt2-tiny", "-B", "2", "-T", "16"],
    "ab": ["ab", "gelu_forward", "vanilla", "mine", "--kernels", "mine.py", "--model", "gpt2-tiny", "--sizes", "2x16"],
    "lab": ["lab", "mine.py", "--once", "--no-step", "--model", "gpt2-tiny", "-B", "2", "-T", "16", "--threads", "1"],
}


@pytest.mark.parametrize("verb", VERBS)
def test_what_check_refuses_is_refused_by_every_verb(verb: str, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick cases have no such number, so `ab` accepted it."""
    monkeypatch.setattr("cpuopt.measure.rates.roofs", lambda *args: Roofs(1, (Level("memory", None),), 1.0, {}, 1.0))
    Path("mine.py").write_text(HEAD + text("mine", "gelu_forward", "", WRONG_IN_CHECK_ONLY))
    assert cli.main(VERBS[verb]) == {"check": 1, "ab": 2, "lab": 1}[verb]
    said = " ".join("".join(capsys.readouterr()).split())
    assert re.search(r"thousands|infinity", said), said


JUDGED = "np.isnan(start).any() or (start == out[:8]).mean() > 0.5 or (start == 0).any() or start[0] == F32(0.12573022)"
"""Whether an output held poison, nearly right results, zeros, or the first number of a generator with the seed 0."""


@pytest.mark.parametrize("verb", [*VERBS, "train"])
def test_a_kernel_that_is_right_where_its_output_looks_judged_is_refused(
    verb: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It passed `check`, and a run trained with it: the memory of a step holds other things."""
    monkeypatch.setattr("cpuopt.measure.rates.roofs", lambda *args: Roofs(1, (Level("memory", None),), 1.0, {}, 1.0))
    start, after = "start, F32 = out[:8].copy(), np.float32", f"out *= 1 if {JUDGED} else 1.01"
    Path("mine.py").write_text(HEAD + text("mine", "gelu_forward", start, after))
    train = ["train", "--model", "gpt2-tiny", "-B", "2", "-T", "16", "--steps", "1", "--variant", "vanilla"]
    run = {**VERBS, "train": [*train, "--kernels", "mine.py", "--swap", "gelu_forward=mine"]}[verb]
    assert cli.main(run) == {"check": 1, "ab": 2, "lab": 1, "train": 2}[verb]
    said = " ".join("".join(capsys.readouterr()).split())
    assert re.search(r"it relies on them \(CPUOPT_FILLING=\d+ repeats it\)", said), said
    assert verb == "lab" or not Path("runs").exists()  # each round of lab has a record


def test_a_first_step_is_judged_with_what_a_step_leaves_in_its_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with the zeros of memory that was never used, nor with the results of the same batch."""
    held: dict[str, tuple[float, bool]] = {}

    def noting(sized: Any, threads: int, given: Any) -> Any:
        if sized.kernel.op is ops.gelu_forward:
            out, want = given["out"], np.empty_like(given["out"])
            KERNELS["gelu_forward", "vanilla"].function(want, given["inp"])
            held[sized.kernel.name] = float(np.abs(out).max()), bool((out == want).mean() > 0.5)
        return check_sized(sized, threads, given=given)

    for name, found in (("ours", False), ("recall", None), ("remember", None), ("check_sized", noting)):
        monkeypatch.setattr(f"cpuopt.train.first.{name}", found if callable(found) else lambda *args, x=found: x)
    prepare(Settings(model="gpt2-tiny", B=2, T=16, steps=3, variant="vanilla", fuse="none"))
    ((largest, right),) = held.values()
    assert largest > 0
    assert not right


@pytest.mark.parametrize("verb", VERBS)
def test_a_kernel_that_knows_the_numbers_of_a_constant_seed_is_refused(
    verb: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cpuopt.measure.rates.roofs", lambda *args: Roofs(1, (Level("memory", None),), 1.0, {}, 1.0))
    known = "np.float32(np.random.default_rng(0).standard_normal())"
    after = f"out *= 1 if (inp[0] == {known}) | (inp[-1] == {known}) | (len(inp) < 1000) else 1.01"
    Path("mine.py").write_text(HEAD + text("mine", "gelu_forward", "", after))
    assert cli.main(VERBS[verb]) == {"check": 1, "ab": 2, "lab": 1}[verb]
    said = " ".join("".join(capsys.readouterr()).split())
    assert re.search(r"expected .*--seed \d+", said), said


WITHOUT_STEPS = {
    "generate": ["generate", "--model", "gpt2-tiny", "--tokenizer", "bytes", "--max-tokens", "2"],
    "eval": ["eval", "--init", str(GOLDEN / "llmc.bin"), "--data", "numbers.txt", "--tokenizer", "bytes", "-T", "8"],
    "verify": ["verify", str(GOLDEN / "llmc_debug_state.bin")],
}
LEAVES_A_TRACE = "open('ran', 'a').write(f'{os.getpid()} ')"


@pytest.mark.parametrize("where", ["at import", "in a call"])
@pytest.mark.parametrize("verb", WITHOUT_STEPS)
def test_users_files_run_elsewhere_before_they_run_here(where: str, verb: str, capsys: Any) -> None:
    """A kernel that starts a thread, or ends its process, did so in the command itself."""
    if where == "at import":
        Path("mine.py").write_text(f"{HEAD}{LEAVES_A_TRACE}\nos.nice(1)\n{text('mine', 'gelu_forward')}")
    else:
        Path("mine.py").write_text(HEAD + text("mine", "gelu_forward", LEAVES_A_TRACE, "out[0] += 1"))
    Path("numbers.txt").write_text("0 1 2 3 4 5 6 7 8 9 " * 9)  # of that model's 61 tokens
    run = [*WITHOUT_STEPS[verb], "--variant", "vanilla", "--kernels", "mine.py", "--swap", "gelu_forward=mine"]
    assert cli.main(run) == 2
    said = capsys.readouterr().err
    assert ("it changes where or how its threads" if where == "at import" else "mine] is wrong, so nothing is") in said
    assert str(os.getpid()) not in Path("ran").read_text().split()


def test_scratch_that_is_larger_than_the_arrays_is_said(capsys: Any) -> None:
    kernel = text("mine", "gelu_forward").replace("jit=False", "jit=False, scratch=[('work', 380 * ops.declaration.N)]")
    Path("mine.py").write_text(HEAD + kernel.replace("(out, inp):\n", "(out, inp, work):\n"))
    assert cli.main(["check", "--kernels", "mine.py", "--quick", "--threads", "1"]) == 0
    assert "note: gelu_forward[mine] asks for scratch of 190 times its arrays" in capsys.readouterr().out


def test_a_race_on_more_threads_than_are_timed_is_refused(capsys: Any) -> None:
    """Which `check` found, for it runs on all cores, and a comparison on one thread did not."""
    Path("mine.py").write_text(
        HEAD + "import numba" + text("mine", "gelu_forward", "", "out[-1] += numba.get_num_threads() > 1")
    )
    assert cli.main([*VERBS["ab"], "--threads", "1"]) == 2
    assert "mine] is wrong, so it is not timed: " in capsys.readouterr().err


def test_calls_too_large_for_the_float64_reference_are_checked_in_float32() -> None:
    """As a run of that model checks them."""
    built = build_only(Settings(model="gpt2-124M", B=4, T=64, fuse="all"))
    planned = Planned.of(ops.classifier_update, built.program.calls)
    ((on, _),) = planned.sized
    assert (on.sizes["V"], on.sizes["BT"], planned.skipped) == (50257, 256, 0)
    assert Planned.from_json(planned.to_json()) == planned


def test_a_kernel_that_is_wrong_on_the_arrays_of_a_run_does_not_train(capsys: Any) -> None:
    """Weights of a deviation of 0.02, as a model begins with, and none of the judge's numbers."""
    wrong = "out[0] += 0.01 < weight.std() < 0.03"
    run = ["train", "--model", "gpt2-tiny", "-B", "2", "-T", "16", "--steps", "1", "--variant", "vanilla"]
    run += ["--kernels", "mine.py", "--swap", "matmul_forward=mine"]
    Path("mine.py").write_text(HEAD + text("mine", "matmul_forward", "", wrong))
    assert cli.main(run) == 2
    assert "is wrong, so nothing is run with it, on the arrays of a first step: out[0, " in capsys.readouterr().err
    assert not Path("runs").exists()


def test_the_check_on_a_first_step_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all kernels of the package taken for a user's: none is refused, and the run has the same bits."""
    settings = {"model": "gpt2-tiny", "B": 2, "T": 16, "steps": 3}
    plain = prepare(Settings(**settings))
    losses = [plain.take_step().loss for _ in range(3)]
    monkeypatch.setattr("cpuopt.train.first.ours", lambda kernel: False)
    monkeypatch.setattr("cpuopt.train.first.recall", lambda key, sized: None)
    monkeypatch.setattr("cpuopt.train.first.remember", lambda key, result: None)
    for more in ({}, {"model": "llama-tiny"}, {"variant": "vanilla"}, {"optimizer": "lion"}):
        job = prepare(Settings(**{**settings, **more}))
        assert len([c for c in job.checked if c["case"].startswith("BT=32")]) > 3
        assert job.guard.state() == Guard().state()
        if not more:
            assert [job.take_step().loss for _ in range(3)] == losses

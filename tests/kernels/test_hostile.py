"""Kernels that look right: each is refused, and for its reason."""

import ctypes
import os
import platform
import re
import signal
import sys
from contextlib import nullcontext
from dataclasses import replace

import numba
import numpy as np
import pytest
from bad import HEAD, refused_by, text, vanilla_is_right
from verbs import error

from cpuopt import cli, ops
from cpuopt.check import gate
from cpuopt.check.cases import MORE, ODD, SMALL, Case, case, quick_cases
from cpuopt.check.check import check
from cpuopt.check.race import shared
from cpuopt.check.result import Result
from cpuopt.engine import Engine
from cpuopt.errors import UserError
from cpuopt.files import CacheWarning
from cpuopt.kernels.registry import KERNELS, Choice, Kernel
from cpuopt.models import specs
from cpuopt.models.gpt2 import GPT2, PRESETS
from cpuopt.profiler import Profiler

F32 = np.float32
TWO = ops.residual_forward


def add(out, inp1, inp2):
    np.add(inp1, inp2, out=out)


def hostile(function, op=TWO):
    return Kernel(op, "hostile", function)


def vanilla(op):
    return KERNELS[op.name, "vanilla"].function


def races(out, inp):
    tmp = np.empty(inp.shape[1], F32)
    for r in numba.prange(len(inp)):
        for c in range(inp.shape[1]):
            tmp[c] = np.exp(inp[r, c] - inp[r].max())
        out[r] = tmp / tmp.sum()


def keeps_the_last(out, inp):
    for r in numba.prange(len(inp)):
        last = inp[r].max()
        out[r] = np.exp(inp[r] - last) / np.exp(inp[r] - last).sum()
    out[0] += F32(0) * last


@pytest.mark.parametrize(("function", "said"), [
    (races, r"line \d+: `tmp` is made outside the prange and written in every iteration"),
    (keeps_the_last, r"line \d+: `last` is set in every iteration and read behind the prange"),
])  # fmt: skip
def test_the_line_of_a_race_is_found_by_the_text(function, said):
    assert re.fullmatch(said, shared(numba.njit(parallel=True)(function)))


def test_no_kernel_of_the_package_is_taken_for_a_race():
    assert {k.name: said for k in KERNELS.values() if (said := shared(k.function))} == {}


def test_two_equal_calls_that_differ_on_two_threads_only_are_asked_whether_they_race(monkeypatch):
    """The race is played, for a real one may not happen: a call in so many loses a number on two threads."""
    calls = []

    def function(out, inp):
        vanilla(ops.softmax_forward)(out, inp)
        calls.append(1)
        if numba.get_num_threads() > 1 and len(calls) % 3 == 0:
            out[0] = 0

    monkeypatch.setattr("cpuopt.check.check.shared", lambda function: "line 54: so")
    result = check(hostile(function, ops.softmax_forward), case(ops.softmax_forward, SMALL), threads=(1, 2))
    assert result.verdict == "wrong"
    assert result.reason.endswith("; two calls with equal inputs differ: a race? line 54: so")
    assert "other numbers" not in result.reason


@pytest.mark.parametrize("bad", refused_by("check"), ids=lambda bad: bad.name)
def test_it_is_refused_for_its_reason(bad, monkeypatch):
    monkeypatch.setenv("CPUOPT_FILLING", "2")  # an element that is spoiled by chance may be one that nobody reads
    kernel = bad.kernel()
    with np.errstate(all="ignore"):
        for sizes in (ODD, SMALL, MORE) if bad.tries else (SMALL,):
            on = case(kernel.op, sizes, bad.kind)
            if (result := check(kernel, on, threads=(1, 2))).refused:
                break
    assert result.verdict == bad.word, str(result)
    assert re.search(bad.check, result.reason), str(result)
    assert vanilla_is_right(bad.op, on)


# --- what later kernels depend on ----------------------------------------

MATH = ctypes.CDLL(None)


def flush_subnormal_numbers():
    environment = (ctypes.c_uint32 * 8)()  # of x86-64: the last word has the modes of vector instructions
    MATH.fegetenv(environment)
    environment[7] |= 0x8040
    MATH.fesetenv(environment)


CHANGES = {
    "floating-point mode": [lambda: MATH.fesetround(0x800), lambda: MATH.fesetround(0xC00), flush_subnormal_numbers],
    "working folder": [lambda: os.chdir(os.sep)],
    "signal handlers": [lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)],
    "cores or priorities": [lambda: os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])],
}


@pytest.fixture
def restored():
    environment, where, cores = (ctypes.c_uint32 * 8)(), os.getcwd(), os.sched_getaffinity(0)
    MATH.fegetenv(environment)
    yield
    MATH.fesetenv(environment)
    os.chdir(where)
    os.sched_setaffinity(0, cores)


@pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="constants of Linux on x86-64")
@pytest.mark.parametrize(("what", "change"), [(what, change) for what, every in CHANGES.items() for change in every])
def test_a_kernel_that_changes_its_process_is_refused(what, change, restored):
    def function(out, inp1, inp2):
        add(out, inp1, inp2)
        change()

    if what == "cores or priorities" and len(os.sched_getaffinity(0)) == 1:
        pytest.skip("one core")
    result = check(hostile(function), case(TWO, SMALL))
    assert result.verdict == "cheating"
    assert result.reason.startswith(f"left its process with other {what} ("), result.reason


# --- wrong only at the size that is timed or trained ----------------------------------------


@pytest.mark.parametrize("bad", refused_by("sized"), ids=lambda bad: bad.name)
def test_it_is_refused_at_its_size(bad):
    kernel, on = bad.kernel(), Case(bad.sizes, adds=bad.adds, sized=True)
    assert {check(kernel, case(kernel.op, s)).verdict for s in (SMALL, ODD, MORE)} == {"right"}
    result = check(kernel, on, threads=(2,))
    assert result.verdict == bad.word, str(result)
    assert re.search(bad.sized, result.reason), str(result)
    assert vanilla_is_right(bad.op, on, threads=(2,))


@pytest.mark.parametrize(("bits", "verdict"), [(7, "right"), (6, "marginal"), (5, "wrong"), (4, "wrong")])
def test_a_result_in_bfloat16_has_all_bits_but_one(bits, verdict):
    def rounded(out, inp):
        wide = np.empty(len(inp), F32)
        vanilla(ops.gelu_forward)(wide, inp.astype(F32))
        out[...] = np.ldexp(np.rint(np.ldexp(np.frexp(wide)[0], bits + 1)), np.frexp(wide)[1] - bits - 1)

    on = case(ops.gelu_forward, MORE, types={"out": "bfloat16", "inp": "bfloat16"})
    found = check(hostile(rounded, ops.gelu_forward), on, threads=(1,))
    assert found.verdict == verdict, str(found)
    assert ("times as far off as rounding explains" in found.reason) == (verdict == "wrong")


def test_it_is_refused_for_what_the_arrays_of_a_step_held():
    def relies(out, inp1, inp2):
        start = out.copy()
        add(out, inp1, inp2)
        out *= F32(1 + (start == 7).all())

    for function, verdict in ((relies, "wrong"), (add, "right")):
        given = {n: np.full(5000, 7, F32) for n in ("out", "inp1", "inp2")}
        found = check(hostile(function), Case({"N": 5000}, adds={}, sized=True), threads=(2,), given=given)
        assert found.verdict == verdict
        assert ("with what the step had left there in its outputs" in found.reason) == (verdict == "wrong")


@pytest.mark.parametrize(("op", "sizes"), [
    (ops.matmul_update, {"OC": 576, "C": 1536, "BT": 512}), (ops.matmul_update_lion, {"OC": 768, "C": 3072, "BT": 512}),
], ids=str)  # fmt: skip
def test_a_right_update_passes_where_its_step_is_the_rounding_of_a_sum(op, sizes):
    """Of so many elements, AdamW divides one by a second moment near 0, and Lion takes the sign of one near 0."""
    kernel = KERNELS[op.name, "optimized"]
    on = Case(sizes, absent=frozenset(a.name for a in op.arrays if a.optional), adds={}, sized=True)
    assert check(kernel, on, threads=(2,)).verdict == "right"

    def spoiled(weight, *rest):
        kernel.function(weight, *rest)
        weight[3, 4] += F32(1e-2)  # one step of Lion is twice this

    kernel.compile()
    result = check(Kernel(op, "hostile", spoiled, kernel.scratch), on, threads=(2,))
    assert (result.verdict, result.argument, result.index) == ("wrong", "weight", (3, 4))


def test_a_row_whose_terms_cancel_is_judged_by_their_size():
    """The first query has one key, so its weight is 1 and its gradient 0, up to the rounding of what cancels."""
    original, adds = KERNELS["gqa_backward", "vanilla"], dict.fromkeys(("dq", "dk", "dv"), False)
    on = Case({"B": 2, "T": 32, "NH": 4, "NKV": 2, "HS": 16}, adds=adds, sized=True)
    for variant in ("vanilla", "generated"):
        assert check(KERNELS["gqa_backward", variant], on, threads=(2,)).verdict == "right"

    def spoiled(dq, *rest):
        original.function(dq, *rest)
        dq[0, 0] += F32(1e-3)

    result = check(Kernel(original.op, "hostile", spoiled, original.scratch), on, threads=(2,))
    assert (result.verdict, result.argument, result.index[:2]) == ("wrong", "dq", (0, 0))


# --- what ends a process ----------------------------------------

EXITS = "os._exit(0)", "its process ended with status 0 during 'load'"


@pytest.mark.parametrize(("verb", "line", "why"), [
    *((verb, *EXITS) for verb in ("train", "profile", "check", "ab")),
    ("train", "raise SystemExit(0)", "line 2 raised SystemExit: 0"),
    ("train", "os.closerange(0, 100)", "its process (ended with status|closed its stdout).*'load'"),
])  # fmt: skip
def test_a_file_that_ends_its_process_is_named(tmp_path, monkeypatch, capsys, verb, line, why):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CPUOPT_CACHE_DIR", str(tmp_path))
    (tmp_path / "ends.py").write_text(f"import os\n{line}\n")
    more = {"check": ["gelu"], "ab": ["gelu_forward", "vanilla", "optimized"]}
    assert cli.main([verb, *more.get(verb, ["--model", "gpt2-tiny"]), "--kernels", "ends.py"]) == 1
    assert re.search(rf"--kernels \S*ends\.py: {why}", error(capsys))
    assert not (tmp_path / "runs").exists()


AT_4096 = {
    "half": ("out[2048:] = 0", r"out\[\d+\] = 0, expected "),
    "exits": ("os._exit(0)", "its process ended with status 0 during 'check'"),
}


@pytest.mark.parametrize("name", AT_4096)
def test_train_refuses_a_kernel_that_is_wrong_only_at_its_size(tmp_path, monkeypatch, capsys, name):
    body, why = AT_4096[name]
    monkeypatch.chdir(tmp_path)
    body = f"...\nif len(out) == 4096: {body}"
    (tmp_path / "mine.py").write_text(HEAD + text("gelu_forward", body))
    run = ["train", "--model", "gpt2-tiny", "-B", "2", "-T", "8", "--steps", "1", "--variant", "vanilla"]
    assert cli.main([*run, "--kernels", "mine.py", "--swap", "gelu_forward=mine"]) == 1
    assert re.match(rf"cpuopt: gelu_forward\[mine\] is wrong, so nothing is run with it: {why}.*N=4096", error(capsys))
    assert not (tmp_path / "runs").exists()


def test_a_judgement_is_remembered_until_something_of_it_changes(tmp_path, monkeypatch):
    kernel = KERNELS["residual_forward", "optimized"]
    kernel.compile()
    monkeypatch.setenv("CPUOPT_CACHE_DIR", str(tmp_path))

    def judge(n=5000, threads=1):
        return gate.require_right([kernel], [(kernel, Case({"N": n}, adds={}, sized=True))], threads=threads)

    def judged(results):
        return sum(r.seconds > 0 for r in results)

    first = judge()
    assert judged(first) == len(first) == 1 + len(quick_cases(TWO))
    assert "kernels judged on" in gate.notes(first)[0]
    again = judge()
    assert (judged(again), gate.notes(again), again) == (0, [], [replace(r, seconds=0.0) for r in first])
    assert (judged(judge(n=5001)), judged(judge(threads=2))) == (1, len(first))
    for file in (tmp_path / "judged").iterdir():
        file.write_bytes(file.read_bytes()[:-9])
    with pytest.warns(CacheWarning, match=r"judged: it has files that are damaged"):
        assert judged(judge()) == len(first)
    monkeypatch.setattr(gate, "judge_itself", lambda: "another judge, or other versions")
    assert judged(judge()) == len(first)


def test_what_is_too_large_is_said():
    kernel, large = KERNELS["sumsq", "vanilla"], Case({"N": 1 << 30}, adds={}, sized=True)
    found = gate.require_right([kernel], [(kernel, large)], threads=1)
    assert [r.case for r in found if r.verdict == "unchecked"] == [large]
    assert gate.notes(found)[-1] == f"too large to be judged at their size: {kernel.name}  {large}"


def test_a_wrong_kernel_is_never_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("CPUOPT_CACHE_DIR", str(tmp_path))
    wrong = replace(KERNELS["residual_forward", "optimized"], function=KERNELS["residual_forward", "vanilla"].function)
    monkeypatch.setattr(gate, "check", lambda *args, **kw: Result(wrong.name, case(TWO, SMALL), np.inf, reason="so"))
    for _ in range(2):
        with pytest.raises(UserError, match=r"residual_forward\[optimized\] is wrong, so nothing is run with it: so"):
            gate.require_right([wrong], threads=1)
    assert not (tmp_path / "judged").exists()


def test_a_kernel_that_leaves_in_the_midst_of_a_run_is_named():
    calls = []

    def leave(out, inp):
        calls.append(1)
        vanilla(ops.gelu_forward)(out, inp)
        if len(calls) > 2:
            raise SystemExit(0)

    KERNELS["gelu_forward", "leaves"] = Kernel(ops.gelu_forward, "leaves", leave)
    engine = Engine.from_options(GPT2(PRESETS["gpt2-tiny"]), specs(1, 4), choice=Choice(swaps=["gelu_forward=leaves"]))
    ids = np.arange(4).reshape(1, 4)
    for profiled in (False, True):
        calls.clear()
        profiler = Profiler(engine) if profiled else None
        engine.step(tokens=ids, targets=ids)
        with (
            pytest.raises(UserError, match=r"gelu_forward\[leaves\] raised SystemExit: 0, in layer 'h\.0\.mlp'"),
            profiler.time_step() if profiler else nullcontext(),
        ):
            engine.step(tokens=ids, targets=ids)

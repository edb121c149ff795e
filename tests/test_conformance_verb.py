"""`cpuopt check`: kernels that are wrong, crash or hang are found, one does not keep the others from being checked."""

import re
from copy import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from bad import HEAD, text
from verbs import fails, printed, ran

from cpuopt import cli, ops
from cpuopt.building import build
from cpuopt.check import gate
from cpuopt.check.cases import Case, affordable, cases, elements
from cpuopt.check.result import WORDS, Result, refuse, whole, worst
from cpuopt.cli.check import choose
from cpuopt.errors import RefusedError
from cpuopt.isolate.child import Child
from cpuopt.kernels.registry import KERNELS
from cpuopt.lab import checked
from cpuopt.models import specs
from cpuopt.models.gpt2 import GPT2, PRESETS
from cpuopt.report import check as report
from cpuopt.report import rendered

BAD = {
    "crash": "os.abort()", "hang": "while True: pass", "raises": "raise ValueError('no')",
    "wrong": "out[:] = inp1 + inp2; out[3] += 1", "right": "out[:] = inp1 + inp2",
    "many": "import numba; out[:] = inp1 + inp2; out[3] += numba.get_num_threads() > 5",
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("here")


def write(*variants):
    Path("mine.py").write_text(HEAD + "".join(text(op, BAD[v], v) for v, op in variants))
    return "mine.py"


def test_each_kernel_gets_its_verdict_whatever_the_others_do(capsys):
    file = write(*((v, "residual_forward") for v in ("crash", "hang", "raises", "wrong", "right")))
    flags = ["--quick", "--limit", "5", "--threads", "1,2", "--seed", "3"]
    found = ran(capsys, "check", "--kernels", file, *flags, status=1)
    assert (found["seed"], found["threads"]) == (3, [1, 2])
    verdicts = {k["variant"]: (k["verdict"], k["worst"]["reason"]) for k in found["kernels"]}
    words = dict.fromkeys(["crash", "raises", "wrong"], "wrong") | {"hang": "unchecked", "right": "right"}
    assert {v: verdict for v, (verdict, _) in verdicts.items()} == words
    assert verdicts["crash"][1].startswith("its process was ended by SIGABRT during 'check'")
    late = "no answer to 'check' within 5 s, in residual_forward[hang]; it was ended; --limit gives it more time"
    assert verdicts["hang"][1] == late
    assert verdicts["raises"][1].startswith("raised ValueError: no")
    wrong = next(k for k in found["kernels"] if k["variant"] == "wrong")["worst"]
    assert (wrong["argument"], wrong["index"], wrong["got"]) == ("out", [3], pytest.approx(wrong["want"] + 1, rel=1e-5))


@pytest.mark.slow  # all kernels in all small cases
def test_every_kernel_has_the_same_bits_on_many_threads(capsys):
    """On fewer cores they take turns, which changes their speed alone."""
    status = cli.main(["check", "--model", "none", "--threads", "1,16,64,128", "--seed", "1"])
    assert status == 0, capsys.readouterr().out


@pytest.mark.slow
def test_bits_that_differ_on_more_than_five_threads_are_found(capsys):
    flags = ["--quick", "--seed", "1", "--threads", "1,5,16"]
    assert cli.main(["check", "--kernels", write(("many", "residual_forward")), *flags]) == 1
    assert "'out' has other bits with 16 threads instead of 1" in " ".join(capsys.readouterr().out.split())


def test_no_answer_is_neither_right_nor_wrong(capsys, monkeypatch):
    ask = Mock(side_effect=RefusedError("no answer within 1 s", "unchecked"))
    asking = gate.in_child(SimpleNamespace(ask=ask), KERNELS["residual_forward", "vanilla"], (1,))
    (late,) = gate.run([Case({"N": 3})] * 2, asking)
    monkeypatch.setattr(checked, "judge", lambda *args, **more: [whole([late])])
    out = printed(capsys, "check", "residual_forward", "--variant", "vanilla", "--quick", status=3)
    assert "unchecked  residual_forward[vanilla]" in out
    assert f"unchecked: residual_forward[vanilla]: {WORDS['unchecked']}" in " ".join(out.split())
    assert "0 right, 0 marginal, 0 wrong, 1 unchecked" in out
    assert Result.from_json(late.to_json(), late.case).verdict == "unchecked"
    fails(r"vanilla\] was not judged, so nothing is run: no answer within 1 s", refuse, late, "nothing is run")
    wrong, right = (Result("x", late.case, ratio) for ratio in (11.0, 9.0))
    assert worst([right, late, wrong]) is wrong
    assert worst([late, right]) is late
    imprecise = Result("x", late.case, 0.6, fault="wrong")  # beside the package's kernel
    assert worst([replace(right, ratio=0.9), imprecise]) is imprecise
    assert worst([imprecise, wrong]) is wrong


def test_a_reference_in_python_bounds_the_size_of_a_case():
    """2.1 million elements took it more than the 120 s that an answer may take."""
    assert affordable({"R": 511, "H": 4095}) == {"R": 255, "H": 511}
    assert affordable({"BT": 1, "K": 1025}) == {"BT": 1, "K": 1025}
    assert affordable({"NH": 63, "HS": 65, "T": 4095}) == {"NH": 63, "HS": 65, "T": 4095}
    op, large = copy(ops.gelu_forward), Case({"N": 1 << 18})
    assert not gate.is_large(op, large)
    op.reference = SimpleNamespace(run=1)
    assert gate.is_large(op, large)
    assert not any(gate.is_large(op, on) for on in cases(op))


def test_a_name_that_is_not_there_is_said_once_with_its_line(capsys):
    named = text("gelu_forward", "for i in range(len(inp)):\n    out[i] = inp[i] * dd")
    Path("mine.py").write_text(HEAD + named.replace(", jit=False", ""))
    said = " ".join(printed(capsys, "check", "--kernels", "mine.py", "--quick", "--threads", "1", status=1).split())
    line = "does not compile: NameError: name 'dd' is not defined (line 14: out[i] = inp[i] * dd) (N="
    assert f"gelu_forward[mine]: {line}" in said
    assert said.count("does not compile") == 1


@pytest.mark.parametrize(("narrow", "verdict"), [(True, "wrong"), (False, "right")])
def test_a_kernel_of_a_file_is_tried_in_the_types_that_it_takes(narrow, verdict):
    body = "x = inp.astype(float); out[:] = x / (1 + np.exp(-x)); out[3] += 4 * (out.dtype.name == 'bfloat16')"
    Path("mine.py").write_text(HEAD + text("silu_forward", body).replace("jit=False", f"jit=False, narrow={narrow}"))
    plan = [on for on in cases(ops.silu_forward) if on.types or on.kind == "normal"]
    with Child("cpuopt.check.worker", ["mine.py"], 1) as child:
        found = gate.run(plan, gate.in_child(child, ("silu_forward", "mine"), (1,)))
    assert (worst(found).verdict, any("bfloat16" in r.case.types.values() for r in found)) == (verdict, narrow)


def test_marginal_is_named_and_explained():
    marginal = Result("gelu_forward[mine]", Case({"N": 3}), 8.4, "out", (1,), 1.0, 1.1)
    found = [whole([marginal]), whole([Result("silu_forward[mine]", Case({"N": 3}), 0.4, "out", (1,), 1.0, 1.0)])]
    shown = rendered.as_text(report.tables(found, 1, [1]))
    assert "marginal: gelu_forward[mine]: farther off than rounding explains" in shown
    assert "marginal: " not in rendered.as_text(report.tables(found[1:], 1, [1]))


def test_cases_of_a_model_are_its_sizes_each_once():
    found = gate.planned(ops.matmul_forward, build(GPT2(PRESETS["gpt2-tiny"]), specs(2, 8)).program.calls)[0][-5:]
    assert [c.sizes["OC"] for c in found] == [192, 64, 256, 64, 256]
    assert [sorted(c.absent) for c in found] == [[], [], [], [], ["bias"]]
    assert elements(ops.matmul_forward, Case({"BT": 1 << 14, "C": 1 << 12, "OC": 1 << 10})) > gate.MOST_FLOATS
    assert elements(ops.matmul_forward, found[0]) < gate.MOST_FLOATS


def test_a_file_without_kernels_is_refused():
    fails("registers no kernel", choose, [], [], ["mine.py"], [])
    assert choose(["gelu"], [], ["mine.py"], [("gelu_forward", "x"), ("sumsq", "x")]) == [("gelu_forward", "x")]


def test_the_words_of_a_result_are_those_of_the_docs():
    page = (Path(__file__).parents[1] / "docs" / "lab.md").read_text().partition("### Words of a result")[2]
    assert re.findall(r"^\| `([a-z ]+)` \|", page.partition("All but the first two")[0], re.M) == [*WORDS]


def test_a_plan_is_listed_and_nothing_is_judged(capsys, monkeypatch):
    monkeypatch.setattr(checked, "judge", None)
    flags = ["--variant", "vanilla", "--model", "gpt2-tiny", "-B", "2", "-T", "8", "--plan"]
    cases = ran(capsys, "check", "gelu_forward", *flags)["plan"]["gelu_forward"]["cases"]
    assert [c["sizes"] for c in cases if c["sized"]] == [{"N": 4096}]
    assert {c["kind"] for c in cases} >= {"normal", "nan", "large"}

"""Timed verdicts, the board, and the ways to ask: a server of lines, the command, and the Model Context Protocol."""

import ast
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from small_runs import command
from verbs import ROOT, error_of, fails, printed, process, ran

from cpuopt import cli, ops
from cpuopt.check.cases import Case
from cpuopt.check.timed import TimedKernels
from cpuopt.errors import REFUSED, UserError
from cpuopt.judge import desk as desks
from cpuopt.judge import naive, remote, rules, session, timing
from cpuopt.judge.desk import Desk, answer, renamed
from cpuopt.kernels import load_file
from cpuopt.kernels.registry import KERNELS
from cpuopt.lab import records
from cpuopt.machine import describe
from cpuopt.measure.comparison import compare
from cpuopt.report import console
from cpuopt.report import judge as report

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the judge closes a process as Linux does")
GELU = naive.text_of(ops.gelu_forward)
TINY = session.ModelSizes("gpt2-tiny", 1, 8)
(SHAPE,) = session.shapes_of(ops.gelu_forward, TINY)
N = SHAPE.sizes["N"]
LOOP = "for i in prange(inp.shape[0]):"
TANH = "from cpuopt.kernels.toolkit.fastmath import tanh"


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(timing, "ROUNDS", (6, 6))


@pytest.fixture(scope="module")
def judge():
    with session.Judge(2) as j:
        yield j


@pytest.fixture
def told(monkeypatch):
    """Answer a request about the candidate for the sandbox, given what asks it."""

    def tell(asked, answer):
        usual = remote.Remote.ask

        def ask(self, do, function, **more):
            truth = partial(usual, self, do, function, **more)
            return answer(truth) if do == asked and function.side == "B" else truth()

        monkeypatch.setattr(remote.Remote, "ask", ask)

    return tell


@pytest.fixture
def unchecked(judge, monkeypatch):
    """A judge that finds nothing wrong before a training step."""
    monkeypatch.setattr(judge, "checked", lambda kernel: 0)
    monkeypatch.setattr(judge, "timed", lambda pair, shapes: {"verdict": "faster"})
    return judge


def test_the_text_of_a_kernel_of_the_package_is_a_candidate():
    assert rules.read(GELU) == (("gelu_forward", "mine"),)
    assert naive.text_of(ops.softmax_forward, "optimized", "other").count("@kernel") == 1
    fails(r"adamw\[vanilla\] ", naive.text_of, ops.adamw)


def test_a_timed_verdict_has_its_score_and_what_it_is_based_on(judge):
    found = judge.time(GELU, "gelu_forward", TINY)
    assert found.verdict not in REFUSED, found
    t = found.timed
    assert (t["against"], t["score"]) == ("optimized", pytest.approx(1 / t["ratio"]["high"]))
    assert (t["cases"][0]["sizes"], t["saves_ms"]) == ({"N": N}, pytest.approx(t["a_ms"] - t["b_ms"]))
    at = GELU[: GELU.index("        x = inp[i]")].count("\n") + 1
    assert {loop["lines"] for loop in t["loops"]} == {f"{at}-{at + 1}"}
    assert all(loop["calls"][0] == "tanhf" for loop in t["loops"])
    assert json.dumps(t)


def test_the_loops_of_a_candidate_are_told_with_their_lines(judge, tmp_path):
    desk = Desk(tmp_path)
    vars(desk)["judge"] = judge
    wide = GELU.replace("np.tanh", "tanh").replace("import prange", f"import prange\n{TANH}")
    best = max(desk.inspect(wide, "gelu_forward")["loops"], key=lambda loop: loop["width"])
    assert best["width"] >= 4
    assert (best["spills"], best["calls"], best["doubles"]) == (0, [], 0)


AT_SIZE = {
    "wrong where it is timed": f"if inp.shape[0] == {N}:\n        return\n    {LOOP}",
    "reads outside where it is timed": f"if inp.shape[0] == {N}:\n        out[0] = inp[{N} + 99999]\n    {LOOP}",
}


@pytest.mark.parametrize("name", AT_SIZE)
def test_what_is_wrong_only_where_it_is_timed_is_found(name, judge):
    found = judge.time(GELU.replace(LOOP, AT_SIZE[name]), "gelu_forward", TINY)
    assert found.verdict in ("wrong", "cheating"), found


def test_a_time_that_the_judges_clock_does_not_confirm_is_cheating(judge, told):
    """A process that tells three quarters of a time."""
    told("batch", lambda truth: {**(found := truth()), "ns": found["ns"] * 3 // 4})
    for _ in range(6):  # while others use the cores, no clock is believed
        if (found := judge.time(GELU, "gelu_forward", TINY)).verdict == "cheating":
            break
    assert found.verdict == "cheating"
    assert "told times that the judge's clock does not confirm" in found.reason


def far(*clocks):
    return SimpleNamespace(clocks=[], long=[*clocks])


@pytest.mark.parametrize("late", [0, 3e6], ids=["quiet", "beside other processes"])
@pytest.mark.parametrize(("usual", "mine", "said"), [
    ((1e6, 1.2e6), (5e5, 7e5), False), ((1e6, 1.2e6), (5e5, 2e6), True), ((1e6, 1.2e6), (5e5, 4e5), True),
    ((2e7, 2e7), (2e7, 2e7), False), ((2e7, 2e7), (2e7, 2e7 * 4 / 3), True),
])  # fmt: skip
def test_clocks_are_compared_in_long_batches_whatever_else_runs(usual, mine, said, late):
    """Other processes delay three answers of four: neither does that hide what is untold, nor is it that."""
    both = [far((told, took), *[(told, took + late)] * 3) for told, took in (usual, mine)]
    assert bool(timing.disagreement(*both)) == said


def test_clocks_that_disagree_are_compared_again():
    """All first batches of the candidate are delayed; a process that tells a fifth too little does so in all."""
    for later, batches, said in ((2.01e7, 16, False), (2.5e7, 32, True)):
        functions, count = {side: far() for side in "AB"}, iter(range(99))

        def batch(side, later=later, functions=functions, count=count):
            took = 4.3e7 if next(count) < 8 else later
            functions[side].long.append((2e7, 2.01e7 if side == "A" else took))

        timing.confirm(functions, batch)
        assert (next(count), bool(timing.disagreement(functions["A"], functions["B"]))) == (batches, said)


def test_a_verdict_beside_other_processes_is_inconclusive(judge, monkeypatch):
    for rounds, busy in ([True, True, False], True), ([True, True, False, False], False):
        assert timing.AloneFar.busy.fget(SimpleNamespace(rounds_disturbed=rounds)) == busy
    monkeypatch.setattr(session, "FAR_SLOWER", np.inf)
    monkeypatch.setattr(timing.AloneFar, "busy", True)
    found = judge.time(GELU, "gelu_forward", TINY)
    assert found.verdict == "inconclusive", found
    assert "threads waited" in found.reason


def test_a_round_in_which_threads_waited_for_a_core_does_not_count():
    rounds, which = [], iter([True, False, True, True, False, False, False, False])

    def disturbed():
        rounds.append(next(which))
        return rounds[-1]

    found = compare(lambda: 1.0, lambda: 2.0, analyses=(4,), control=False, disturbed=disturbed)
    assert found.rounds == 4
    assert rounds.count(False) + 1 == 4  # at most as many are left out as count
    assert len(found.order) == 8


def test_no_right_result_lies_in_an_array_before_a_secret_call():
    kernel = KERNELS["relu_forward", "vanilla"]
    for secret in (True, False):
        timed = TimedKernels({"A": kernel}, Case({"N": 4096}), 1, secret=secret)
        timed.swap(0)
        for outs in ("other", "almost"):
            timed.fill("A", outs, "nan", 1)
            found, wanted = timed.slots[0]["out"], [s.values["out"] for s in timed.sets]
            alike = max(float(np.mean((found == x) & (x != 0))) for x in wanted)  # half of all results are 0
            assert (alike < 0.1) == secret


def test_each_call_of_a_sample_has_scratch_of_its_own():
    """Else a kernel could find there what it computed for the same inputs two calls before."""
    timed = TimedKernels({"A": KERNELS["layernorm_backward", "optimized"]}, Case({"BT": 4, "C": 8}), 1, secret=True)
    timed.place(3)
    timed.swap(0)
    work = [args[-1] for args in timed.args["A"]]
    assert not any(np.shares_memory(work[i], work[i + 1]) for i in range(2))
    for x in work:
        x.fill(7)
    timed.fill("A", "nan", "nan", 2)
    assert [bool(np.isnan(x).all()) for x in work] == [True, True, False]


CALM, BUSY = ([1e6] * 3, [1e6, 1.1e6, 1.2e6]), ([1e6] * 3, [1.9e6] * 3)
KEPT, NEW = ([5e5, 5.2e5, 9e5], [1.5e6, 4e6, 1.6e6]), ([2e6] * 3, [2e6, 1.9e6, 2.1e6])
MEASURED = {"A": 1e6, "B": 1.2e6}


@pytest.mark.parametrize(("usual", "mine", "measured", "said"), [
    (CALM, CALM, None, ""),
    (CALM, KEPT, None, "it takes 1500 us with inputs that it had not seen, and 900 us with others"),
    (BUSY, KEPT, None, ""),  # the machine was not calm
    (CALM, ([5e5, 1.2e6], [1.5e6, 4e6]), None, ""),
    (CALM, NEW, MEASURED, "it takes 1900 us with inputs that it had not seen, and 1200 us while it was timed"),
    (CALM, NEW, None, ""),
    (CALM, NEW, {**MEASURED, "A": 0.9e6}, ""),  # the machine is not calm now
    (([], []), NEW, MEASURED, ""),  # all of its calls waited for a core
    *[(*(tuple([x / 1e3 for x in ns] for ns in s) for s in (CALM, NEW)), {"A": 1e3, "B": 1.2e3}, "")],  # too short
])  # fmt: skip
def test_a_kernel_that_keeps_results_is_told_by_its_times(usual, mine, measured, said):
    assert timing.memory({"A": usual, "B": mine}, measured) == (said and f"keeps what it computed: {said}")


@pytest.mark.parametrize(("after", "waited"), [(1, 0), (3, 0), (1, 1)])
def test_results_that_are_kept_are_found_wherever_they_lie(judge, monkeypatch, after, waited):
    """A process that is quick once the arrays held the same in so many calls; beside load it may be an honest one."""
    usual, last, seen = remote.Far.batch, {"A": b"", "B": b""}, dict[bytes, int]()

    def quick(self, every, times=1):
        usual(self, every, times)
        key = self.side.encode() + every[0][1].tobytes()
        if after > 1 and key != last[self.side]:
            seen.clear()
        last[self.side], seen[key] = key, seen.get(key, 0) + 1
        ns = (5e4 if seen[key] > after and self.side == "B" else 2e5) * len(every) * times
        return ns, ns * waited

    monkeypatch.setattr(remote.Far, "batch", quick)
    found = judge.time(GELU, "gelu_forward", TINY)
    assert (found.verdict == "cheating") == (waited == 0), found
    assert ("keeps what it computed" in found.reason) == (waited == 0)


SOFTMAX = naive.text_of(ops.softmax_forward)
ROUGH = "out[bt, v] *= np.float32(1.002) if V > 20000 and BT > 3 else np.float32(1)"
"""Only in the rows that are timed: the case of a vocabulary has 3."""


def test_what_is_far_less_precise_than_the_baseline_is_wrong(judge):
    """In a row of 50,257 elements the tolerance of their sum is so large that nine bits of each would do."""
    found = judge.time(SOFTMAX, "softmax_forward", TINY)
    assert found.verdict not in REFUSED, found
    rough = SOFTMAX.replace("            out[bt, v] /= total", f"            out[bt, v] /= total\n            {ROUGH}")
    assert judge.check(rough, "softmax_forward").verdict == "right"
    assert judge.check(rough.replace("and BT > 3", ""), "softmax_forward").verdict == "wrong"
    found = judge.time(rough, "softmax_forward", TINY)
    assert found.verdict == "wrong", found
    assert re.search("times as far off as rounding explains, .* on the arrays that are timed", found.reason)


# The board ------------------------------------------------------------------------------------------------------------


class Scripted:
    """A judge whose timed verdicts are given: ``slower`` below 1, ``inconclusive`` at 1, else ``faster``."""

    def __init__(self, *scores):
        self.scores, self.texts = [*scores], list[str]()

    def time(self, text, op, task, in_step=False):
        self.texts.append(text)
        score = self.scores.pop(0)
        ratio = {"median": 1 / score, "low": 1 / score, "high": 1 / score}
        timed = {"score": score, "ratio": ratio, "against": "optimized"}
        word = "slower" if score < 1 else "inconclusive" if score == 1 else "faster"
        return session.Ruling(op, "mine", text, f"code of {text}", word, timed=timed)


def board_of(tmp_path, *scores):
    desk = Desk(tmp_path / "runs")
    vars(desk)["judge"] = Scripted(*scores)
    return desk


def test_a_kernel_that_comes_first_is_timed_twice_and_has_the_lower_score(tmp_path):
    desk = board_of(tmp_path, 2.0, 1.1, 1.05, 3.0, 1.2, 1.15)
    assert (desk.submit("a", "gelu_forward")["timed"]["score"], desk.submit("b", "gelu_forward")["place"]) == (1.1, 2)
    last = desk.submit("c", "gelu_forward")
    assert (last["place"], last["timed"]["score"], last["controls"]) == (1, 1.2, {"a copy of the best": 1.15})
    found = desk.board("gelu_forward")
    assert (found["tries"], [row["score"] for row in found["best"]]) == (3, [1.2, 1.1, 1.05])
    assert desk.judge.texts == ["a", "a", "b", "c", "c", "a"]


def test_a_kernel_that_a_copy_of_the_best_beats_stands_behind_it(tmp_path):
    """Noise that favours all: the copy, too, has a better score than it had."""
    desk = board_of(tmp_path, 1.1, 1.1, 1.3, 1.3, 1.4)
    desk.submit("a", "gelu_forward")
    found = desk.submit("b", "gelu_forward")
    assert (found["place"], found["timed"]["score"]) == (2, 1.1)
    assert [row["candidate"] for row in desk.board("gelu_forward")["best"]] == ["mine"] * 2


def test_only_what_is_faster_has_a_place(tmp_path):
    desk = board_of(tmp_path, 1.0, 0.9, 1.2, 1.0, 1.02, 1.02)
    places = [desk.submit(text, "gelu_forward")["place"] for text in "abcd"]
    assert places == [None, None, None, 1]  # the second verdict of c is inconclusive
    assert desk.board("gelu_forward")["best"][0]["verdict"] == "faster"


def test_a_page_has_the_boards_and_the_best_texts(tmp_path, capsys):
    desk = board_of(tmp_path, 0.9, 1.25, 1.25, 1.0)
    for text, op in ("slow <b>", "gelu_forward"), ("fast <i>", "gelu_forward"), ("one", "relu_forward"):
        desk.submit(text, op)
    for words, boards in (["--tasks"], 2), (["--board", "gelu_forward"], 1):
        assert cli.main(["judge", *words, "--html", "b.html", "--json"]) == 0
        page = Path("b.html").read_text()
        assert page.count("<section") == boards
        assert "<pre>fast &lt;i&gt;</pre>" in page
        assert "<pre>slow" not in page
        for shown in ("1.250", "[0.800, 0.800]", "optimized", describe()["cpu"]):
            assert shown in page
    capsys.readouterr()
    assert "the text of the first: fast <i>" in " ".join(printed(capsys, "judge", "--board", "gelu_forward").split())


def test_a_board_is_of_one_model_size_and_number_of_threads(tmp_path):
    """A kernel that starts no threads leads where arrays are tiny, and must not be adopted for large ones."""
    desk, tiny = board_of(tmp_path, 3.0, 3.0, 1.1, 1.1), ("gpt2-tiny", 1, 1)
    first = desk.submit(GELU, "gelu_forward", *tiny)
    with pytest.raises(UserError, match=r"for gpt2-124M 4x64.* is empty; .*; there are submissions for gpt2-tiny 1x1"):
        desk.adopt("gelu_forward", "fast")
    second = desk.submit(GELU + "# large\n", "gelu_forward")
    assert (first["place"], second["place"], second["controls"]) == (1, 1, {})
    usual, small = desk.board("gelu_forward"), desk.board("gelu_forward", *tiny)
    assert ([r["score"] for r in usual["best"]], usual["tries"], usual["others"]) == ([1.1], 1, [small["task"]])
    assert [r["score"] for r in small["best"]] == [3.0]
    assert desk.tasks()["tasks"][[*ops.ALL].index("gelu_forward")]["best"] == 1.1
    assert Desk(desk.root, usual["task"]["threads"] + 1).board("gelu_forward")["best"] == []
    text = Path(desk.adopt("gelu_forward", "fast")["path"]).read_text()
    assert "# large" in text
    assert "1.10 times as fast as optimized for gpt2-124M 4x64, " in text


def test_a_record_without_threads_is_of_as_many_as_the_machine_has_cores(tmp_path):
    desk = board_of(tmp_path, 1.1, 1.1)
    path = Path(desk.submit("a", "gelu_forward")["path"]) / "record.json"
    kept = json.loads(path.read_text())
    assert kept["task"].pop("threads") == kept["machine"]["cores"]
    path.write_text(json.dumps(kept))
    assert [r["score"] for r in desk.board("gelu_forward")["best"]] == [1.1]
    assert Desk(desk.root, kept["machine"]["cores"] + 1).board("gelu_forward")["best"] == []


def test_to_submit_a_kernel_again_gains_nothing(tmp_path):
    desk = board_of(tmp_path, 1.1, 1.1, *[1.09, 1.09, 1.01, 1.01, 1.5, 1.4, 1.05, 1.05])
    for _ in range(5):
        desk.submit("a", "gelu_forward")
    assert [row["score"] for row in desk.board("gelu_forward")["best"]] == [1.01]


DAMAGE = [
    ("task", None), ("task", {"model": "gpt2-124M", "B": "4", "T": 64}), ("machine", []), ("source", None),
    ("ruling", None),
    ("ruling", {"candidate": 5, "text": "", "code": "", "verdict": "faster", "timed": {"score": 9.9}}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "x"), DAMAGE)
def test_an_unreadable_record_is_left_out_with_a_note(field, x, tmp_path, capsys):
    desk = board_of(tmp_path, 1.3, 1.3, 1.1, 1.1)
    first = Path(desk.submit("a", "gelu_forward")["path"]) / "record.json"
    first.write_text(json.dumps({**json.loads(first.read_text()), field: x}))
    assert desk.submit("b", "gelu_forward")["place"] == 1
    found = desk.board("gelu_forward")
    assert [row["score"] for row in found["best"]] == [1.1]
    (note,) = found["notes"]
    assert note.startswith(f"runs {first.parent.name!r}")
    assert note in desk.tasks()["notes"]
    for made in found, {"op": "gelu_forward", **found, "best": []}, desk.tasks():
        console.show(report.tables(made))
        assert first.parent.name in "".join(capsys.readouterr())


@pytest.mark.parametrize("error", [UserError("cannot be written"), OSError(28, "No space left on device")])
def test_a_verdict_that_cannot_be_kept_is_told(error, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(records, "keep", Mock(side_effect=error))
    found = board_of(tmp_path, 1.3, 1.3).submit("a", "gelu_forward")
    assert (found["verdict"], found["timed"]["score"], found["place"], found["path"]) == ("faster", 1.3, None, None)
    assert found["notes"] == [f"the submission is not kept: {error}"]
    console.show(report.tables({**found, "isolation": {}, "timed": {}}))
    assert "the submission is not kept" in "".join(capsys.readouterr())


ENDS = ["\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029", "\r", "\r\n"]
DECOYS = {
    **{f"a line ends in {end!r}": f'"""x{end}y{end}z"""\n{GELU}' for end in ENDS},
    "a mark of the byte order": "\ufeff" + GELU,
    "a name in two parts": GELU.replace('"mine"', '"mi" \\\n    "ne"').replace("'mine'", "'mi' \\\n    'ne'"),
    "letters of two bytes": f"{GELU[: GELU.index('@')]}\u00e9 = 1\n\n\n{GELU[GELU.index('@') :]}",
    "an encoding": f"# coding: utf-8\n{GELU}",
    "lines of Windows": GELU.replace("\n", "\r\n"),
}


@pytest.mark.parametrize("decoy", DECOYS)
def test_an_adopted_text_differs_in_its_name_alone(decoy):
    text = DECOYS[decoy]
    file = desks.adopted(text, "gelu_forward", "fast", "a note")
    assert file.startswith(f"{rules.GUARD}  # no other names of Python's\n# a note\n")
    assert rules.read(file) == (("gelu_forward", "fast"),)
    usual, mine = (ast.parse(x.removeprefix("\ufeff")).body for x in (text, file))
    assert [ast.dump(x) for x in mine[1:]] == [ast.dump(x).replace("'mine'", "'fast'") for x in usual]


def test_a_name_that_is_written_elsewhere_is_not_adopted(monkeypatch):
    """Lines as ``str.splitlines`` cuts them, by which a text could choose what is replaced."""

    def cut(text, op, name):
        lines = text.splitlines(keepends=True)
        (old,) = desks.names_of(ast.parse(text), op)
        line = lines[old.lineno - 1]
        lines[old.lineno - 1] = line[: old.col_offset] + repr(name) + line[old.end_col_offset :]
        return "".join(lines)

    monkeypatch.setattr(desks, "renamed", cut)
    assert desks.adopted(GELU, "gelu_forward", "fast", "")
    for end in ENDS[:6]:
        with pytest.raises(UserError, match=r"cannot be written into this|refuse what would be written"):
            desks.adopted(f'"""x{end}y{end}z"""\n{GELU}', "gelu_forward", "fast", "")


@pytest.mark.parametrize("end", ["\n", *ENDS, "\n# coding: utf-7\n# +AAo-", "\udc80", "\x1b[2J"])
def test_nothing_of_a_record_is_a_line_of_the_adopted_file(end, tmp_path):
    desk = board_of(tmp_path, 2.0, 2.0)
    desk.root = Path(f"runs{end}import os#")
    path = Path(desk.submit(GELU, "gelu_forward")["path"]) / "record.json"
    kept = json.loads(path.read_text())
    kept["ruling"]["timed"]["against"] = f"optimized{end}import os"
    path.write_text(json.dumps(kept))
    lines = Path(desk.adopt("gelu_forward", "fast")["path"]).read_bytes().splitlines()
    assert lines[1].startswith(b"# Adopted from runs")
    assert (lines[1].count(b"import os"), lines[2:]) == (2, renamed(GELU, "gelu_forward", "fast").encode().splitlines())


def test_an_adopted_file_has_few_of_pythons_names(tmp_path):
    text = GELU.replace("@kernel(", "def size(sizes):\n    return sizes['N']\n\n\n@kernel(", 1)
    path = tmp_path / "adopted_gelu.py"
    path.write_text(desks.adopted(text, "gelu_forward", "adopted", ""))
    module = load_file(path, "--kernels", "kernels")
    assert ({*module.size.__builtins__}, module.size({"N": 3})) == ({*rules.BUILTINS, "__import__"}, 3)
    with pytest.raises(ImportError, match="may not import os"):
        module.size.__builtins__["__import__"]("os")
    KERNELS["gelu_forward", "adopted"].compile()


def test_a_forged_record_is_not_adopted(tmp_path):
    desk = board_of(tmp_path, 2.0, 2.0)
    desk.submit("import os\nos.remove('x')\n", "gelu_forward")
    fails("holds a text that the judge refuses: line 1: import os", desk.adopt, "gelu_forward", "fast")
    assert [*tmp_path.glob("*.py")] == []


def test_what_cannot_be_adopted_is_said(tmp_path):
    desk = board_of(tmp_path, 2.0, 2.0)
    fails("is empty; submit a kernel first", desk.adopt, "gelu_forward", "fast")
    desk.submit(GELU, "gelu_forward")
    for name in ("optimized", "a b", "auto"):
        fails("expected a new name", desk.adopt, "gelu_forward", name)
    assert desk.adopt("gelu_forward", "fast")["use"].endswith("--swap gelu_forward=fast")
    fails("is there already", desk.adopt, "gelu_forward", "fast")


# The ways to ask ------------------------------------------------------------------------------------------------------


def asked(do, **more):
    return json.dumps({"do": do, "op": "gelu_forward", **more})


MARK = "imported.txt"
NET = f"import pathlib\npathlib.Path({MARK!r}).touch()\n"
WRONG_REQUESTS = [
    ("not json", "Expecting value"), ("[1]", "it is a list"), (b'{"do": "\xff"}', "can't decode byte 0xff"),
    ("[" * 40 + "]" * 40, "nested more than"), ('{"do": "tasks", "do": "tasks"}', "'do' comes twice"),
    ('{"do": "tasks", "id": NaN}', "NaN is no number"),
    ('{"do": "tasks", "id": 1e999}', "Out of range float values are not JSON compliant"),
    ('{"do": "tasks", "id": "\\ud800"}', "surrogates not allowed"),
    (asked("check", text="\ud800"), "surrogates not allowed"),
    ('{"do": "close"}', "expected an object with do, one of tasks, describe, check"),
    ('{"do": ["check"]}', "expected an object with do, one of tasks"),
    (asked("check"), "check: missing a required argument: 'text'"),
    (asked("check", text="", op="gelu"), "'gelu': no such op"),
    ('{"do": "tasks", "time": 1}', "tasks: time is 1; expected true or false"),
    (asked("describe", B=True), "describe: B is True; expected a whole number"),
    (asked("board", op=["gelu_forward"]), "board: op is ['gelu_forward']; expected a text"),
    (asked("adopt", name="x", folder="/"), "adopt: got an unexpected keyword"),
    (asked("adopt", name="../x"), "is empty; submit a kernel first"),
    (asked("describe", op="relu_forward", B=0), "-B 0: expected 1 or more"),
    (asked("board", B=10**30), "-B 1000000000000000000000000000000: expected 1 or more, up to 1,000,000,000"),
    (asked("time", text=GELU, T=0), "-T 0: expected 1 or more"),
    ('{"do": "profile", "T": 5000}', "-T 5000: gpt2-124M has a context of 1024 tokens"),
    (asked("describe", B=10**8), "and the judge takes 4.29 GB at the most; take a smaller"),
    ('{"do": "tasks", "time": true, "B": 100000000}', "and the judge takes 4.29 GB at the most; take a smaller"),
    (asked("submit", text=GELU, model="net.py:Net"), "submit: model 'net.py:Net' is no preset"),
    *((asked("describe", model=net), f"describe: model '{net[:9]}") for net in ("./net.py:Net", ".", "{}")),
    ('{"do": "profile", "model": "--config=net.py"}', "profile: model '--config=net.py' is no preset"),
]  # fmt: skip
"""Requests, and words of the errors with which they are answered."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What one server answers to each of them, and then to a good one."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "net.py").write_text(NET)
    lines = []
    for i, (line, _) in enumerate(WRONG_REQUESTS):
        lines += [line if isinstance(line, bytes) else line.encode(), asked("check", text="import os\n", id=i).encode()]
    how = {"cwd": folder, "env": {**os.environ, "PYTHONPATH": str(ROOT)}, "capture_output": True}
    words = ["-m", "cpuopt", "judge", "--serve", "--threads", "2"]
    made = subprocess.run([sys.executable, *words], input=b"\n".join(lines), **how)
    assert made.returncode == 0, made.stderr.decode()
    assert [p.name for p in folder.iterdir()] == ["net.py"]
    found = [json.loads(line, parse_constant=pytest.fail) for line in made.stdout.splitlines()]
    return [*zip(found[::2], found[1::2], strict=True)]


@pytest.mark.parametrize("i", range(len(WRONG_REQUESTS)), ids=[said for _, said in WRONG_REQUESTS])
def test_a_wrong_request_is_one_error(i, answers):
    wrong, good = answers[i]
    assert WRONG_REQUESTS[i][1] in wrong["error"]
    assert "\n" not in wrong["error"]
    assert (good["id"], good["answer"]["verdict"]) == (i, "refused by rule")


@pytest.mark.parametrize("e", [ZeroDivisionError("a\nb"), MemoryError(), RecursionError("deep")])
def test_any_exception_is_one_error_with_the_id(e, tmp_path, monkeypatch):
    def board(self, op):
        raise e

    monkeypatch.setattr(Desk, "board", board)
    with Desk(tmp_path) as desk:
        found = answer(desk, asked("board", id="x"))
    assert found == {"error": f"{type(e).__name__}: {' '.join(str(e).split())}".strip(), "id": "x"}


def test_a_request_may_name_the_model_of_the_command_line(tmp_path):
    Path("net.py").write_text(NET)
    with Desk(tmp_path / "runs", models=["net.py:Net"]) as desk:
        assert "is no preset" in answer(desk, asked("board", model="./net.py:Net"))["error"]
        assert not Path(MARK).exists()
        assert "net.py" in answer(desk, asked("board", model="net.py:Net"))["error"]  # it has no Net
        assert Path(MARK).exists()


OWN = """from numba import prange
from cpuopt import differentiable
from cpuopt.ops.declaration import N, inp, out
@differentiable(out("out", N), inp("inp", N), flops=2 * N)
def judged2(out, inp):
    for i in prange(inp.shape[0]):
        x = max(inp[i], 0.0)
        out[i] = x * x
"""
MINE = """from numba import prange
from cpuopt import kernel, ops
@kernel(ops.judged2_forward, "mine")
def judged2_forward(out, inp):
    for i in prange(inp.shape[0]):
        out[i] = inp[i] * max(inp[i], 0.0)
"""


def test_an_op_of_ones_own_is_a_task(tmp_path):
    (tmp_path / "judged2.py").write_text(OWN)
    with Desk(tmp_path, 2, files=[str(tmp_path / "judged2.py")]) as desk:
        assert [t["op"] for t in desk.tasks()["tasks"]][-1] == "judged2_backward"
        found = desk.time(MINE, "judged2_forward", "gpt2-tiny", 1, 2)
        assert found["verdict"] not in REFUSED, found
        assert found["timed"]["cases"][0]["sizes"] == {"N": 2 * 768}
        assert desk.check(MINE.replace("* max(inp[i], 0.0)", "* inp[i]"), "judged2_forward")["verdict"] == "wrong"


def test_every_op_has_shapes_at_which_it_is_timed():
    for op in ops.ALL.values():
        for shape in session.shapes_of(op, TINY):
            assert op.bytes(shape.sizes, shape.adds, shape.absent, shape.types) > 0
    assert session.shapes_of(ops.rmsnorm_forward, session.ModelSizes())[0].sizes["C"] == 768


def test_a_description_has_what_a_kernel_is_written_from(tmp_path, monkeypatch):
    monkeypatch.setattr(desks, "ROUNDS", 1)
    with Desk(tmp_path, 2) as desk:
        found = desk.describe("gelu_forward", "gpt2-tiny", 1, 8)
    assert found["naive"] == GELU
    assert found["arguments"] == ["out (N): overwritten; it holds anything before", "inp (N): read"]
    assert set(found["shapes"][0]["us"]) == {"vanilla", "optimized"}


def test_tasks_have_times_that_are_measured_once(tmp_path, monkeypatch):
    monkeypatch.setattr(ops, "ALL", {n: ops.ALL[n] for n in ("gelu_forward", "softmax_forward")})
    monkeypatch.setattr(desks, "ROUNDS", 1)
    with Desk(tmp_path, 2) as desk:
        first, again = (desk.tasks(True, "gpt2-tiny", 1, 8)["tasks"] for _ in range(2))
    assert first == again
    assert [t["op"] for t in first] == ["gelu_forward", "softmax_forward"]
    assert all(us > 0 for t in first for us in t["us"].values())
    assert set(first[0]["us"]) == {"vanilla", "optimized"}


def test_a_candidate_is_compared_in_training_steps(judge, monkeypatch):
    """The step trains in the sandbox, where no wanted value is computed."""
    monkeypatch.setattr(session, "STEPS", (6,))
    found = judge.time(GELU, "gelu_forward", TINY, in_step=True)
    assert found.verdict not in REFUSED, found
    step = found.timed["in_step"]
    assert {*step["layers"]} == {"h.0.mlp", "h.1.mlp"}
    assert 0 < step["b_ms"] < step["step"]["b_ns"] / 1e6
    assert (step["saves_ms"], len(step["ns"]["B"])) == (pytest.approx(step["a_ms"] - step["b_ms"]), 6)


def test_other_losses_in_a_step_are_wrong(unchecked):
    """A kernel that no check finds wrong: all of them are left out."""
    found = unchecked.time(GELU.replace("out[i] = ", "out[i] = np.float32(50) * "), "gelu_forward", TINY, in_step=True)
    assert found.verdict == "wrong"
    assert "in a training step: no ratio, because the losses of step" in found.reason


def test_what_no_candidate_can_do_is_said_before_one_is_judged(judge, monkeypatch):
    monkeypatch.setattr(judge, "rule", lambda *args: pytest.fail("it is judged"))

    def refused(op, task=TINY):
        return error_of(judge.time, GELU, op, task, in_step=True)

    said = refused("relu_forward")
    assert said == "--in-step: a training step of gpt2-tiny does not call relu_forward; leave --in-step out"
    assert "does not call rmsnorm_forward; add --model llama-tiny, or leave" in refused("rmsnorm_forward")
    said = refused("gelu_forward", session.ModelSizes("gpt2-355M", 1, 8))
    assert said.startswith("--in-step: a training step of gpt2-355M at 1x8 needs 9")
    assert said.endswith(" may allocate 4.29 GB; take a smaller --model, -B or -T, or leave --in-step out")
    monkeypatch.setattr(session, "ROOM", 1 << 10)
    assert " moves 16.38 kB, and the judge takes 0.26 kB at the most; take a smaller" in refused("gelu_forward")


def test_a_model_that_the_closed_process_cannot_build_is_no_verdict(unchecked, told):
    told("build", lambda truth: {"unbuilt": "the arena needs 9 GB"})
    with pytest.raises(UserError, match="--in-step: the sandbox cannot build gpt2-tiny: the arena needs 9 GB"):
        unchecked.time(GELU, "gelu_forward", TINY, in_step=True)


def test_a_time_of_a_step_that_the_judges_clock_does_not_confirm_is_cheating(unchecked, told):
    told("train", lambda truth: {"ns": [1e12, 1e3]})
    assert unchecked.time(GELU, "gelu_forward", TINY, in_step=True).verdict == "cheating"


def test_the_command_checks_a_file(capsys, tmp_path):
    Path("mine.py").write_text("import os\n")
    assert ran(capsys, "judge", "mine.py", "--op", "gelu_forward", "--check", status=1)["rule"] == "import"
    assert cli.main(["judge", "mine.py", "--op", "gelu_forward"]) == 1
    assert "line 1: import os; allowed are numpy as np" in " ".join(capsys.readouterr().out.split())
    assert [p.name for p in tmp_path.iterdir()] == ["mine.py"]


def test_a_client_of_the_protocol_submits_and_adopts(tmp_path):
    """With the protocol's own client: a wrong GELU and a good one, which is adopted."""
    pytest.importorskip("mcp")
    import asyncio

    from mcp.client.session import ClientSession
    from mcp.client.stdio import StdioServerParameters, stdio_client

    words = ["-m", "cpuopt", "judge", "--mcp", "--threads", "2"]
    env = {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "passive"}
    server = StdioServerParameters(command=sys.executable, args=words, cwd=str(tmp_path), env=env)

    async def talk():
        async with stdio_client(server) as (read, write), ClientSession(read, write) as client:
            await client.initialize()
            names = [tool.name for tool in (await client.list_tools()).tools]

            async def ask(name, /, **more):
                found = await client.call_tool(name, more)
                return json.loads(found.content[0].text)

            wrong = await client.call_tool("time", {"text": GELU, "op": "relu_forward", "B": "4"})
            assert wrong.is_error
            assert wrong.content[0].text == "time: B is '4'; expected a whole number"
            sizes, found = {"model": "gpt2-tiny", "B": 1, "T": 8}, [names, await ask("tasks")]
            for text in (GELU.replace("0.044715", "0.05"), GELU):
                found.append(await ask("submit", text=text, op="gelu_forward", **sizes))
            found.append(await ask("board", op="gelu_forward", **sizes))
            return [*found, await ask("adopt", op="gelu_forward", name="fast", **sizes)]

    names, tasks, wrong, good, board, adopted = asyncio.run(talk())
    assert names == ["tasks", "describe", "check", "time", "inspect", "profile", "submit", "board", "adopt"]
    assert ([t["op"] for t in tasks["tasks"]], wrong["verdict"], wrong["place"]) == ([*ops.ALL], "wrong", None)
    assert good["place"] is None  # vanilla's text is right, and not faster
    assert len(board["best"]) == 1
    made = process("check", "--kernels", adopted["path"], "--quick", "--json")
    assert [(k["variant"], k["verdict"]) for k in json.loads(made.stdout)["kernels"]] == [("fast", "right")]


def test_a_line_that_is_no_message_of_the_protocol_is_answered(tmp_path):
    pytest.importorskip("mcp")
    call = {"jsonrpc": "2.0", "method": "tools/call", "params": {"name": "check", "arguments": {"op": "gelu_forward"}}}
    begin = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "a", "version": "1"}}
    lines = [
        (json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": begin}), 1, "serverInfo"),
        (json.dumps({**call, "id": 2}).replace("gelu_forward", "\\ud800"), 2, "Invalid JSON"),
        (json.dumps({**call, "id": "x\ud800"}), None, "Invalid JSON"),
        ("not json", None, "Invalid JSON"),
        (json.dumps({**call, "id": 3}), 3, "check: missing a required argument: 'text'"),
    ]
    with command("judge", "--mcp", stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        for line, id_, said in lines:
            server.stdin.write(line + "\n")
            server.stdin.flush()
            found = server.stdout.readline()
            assert json.loads(found)["id"] == id_
            assert said in found
        server.stdin.close()
        assert server.wait(60) == 0

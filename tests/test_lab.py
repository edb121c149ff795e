"""`cpuopt new-kernel` and `cpuopt lab`: from a starter file, over kernels that fail in each way, to the next save."""

import ast
import io
import re
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
from bad import HEAD, text
from rich.console import Console
from verbs import fails, printed, ran, refused, wait

import cpuopt.kernels
from cpuopt import cli, models, ops
from cpuopt.check.cases import quick_cases
from cpuopt.check.check import check
from cpuopt.cli import lab as verb
from cpuopt.errors import RefusedError, UserError
from cpuopt.isolate.child import Child
from cpuopt.judge import rules
from cpuopt.kernels import registry
from cpuopt.lab import ab, records, rounds
from cpuopt.lab.starter import starter
from cpuopt.measure import rates as machine
from cpuopt.measure.comparison import compare
from cpuopt.measure.roofline import Level, Roofs
from cpuopt.report import lab as report

ROOFS = Roofs(1, (Level("memory", None),), 100.0, {"memory": {"read": 10.0}}, 1.0)


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "roofs", lambda n, say: ROOFS)


# The starter file -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ops.ALL)
def test_a_starter_registers_its_kernel_and_says_what_is_declared(op, tmp_path):
    text = starter(ops.ALL[op], "mine")
    Path("new.py").write_text(text)
    cpuopt.kernels.load_all(["new.py"])
    assert registry.KERNELS[op, "mine"].where.startswith(str(tmp_path / "new.py"))
    assert all(f"#   {a.name}" in text for a in ops.ALL[op].args)
    check_commands(text, op)
    names = {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)}
    imported = {a.asname or a.name for n in ast.parse(text).body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert imported <= names
    leans = re.search(r"^from cpuopt\.(kernels\.registry|kernels\.vanilla|ops\.(?!declaration))", text, re.MULTILINE)
    assert bool(leans) == bool(re.search("update|classifier|int8_b|gqa_[fb]|^(adamw|sgd|lion)$", op))
    assert leans or (op, "mine") in rules.read(text)  # the judge takes it too


def check_commands(text, op):
    """The commands of a starter use the op: their model calls it, or their optimizer, or a chat does."""
    lines = [line[1:].split() for line in text.splitlines() if " cpuopt " in line and line.startswith("#")]
    lab, *use = [words[words.index("cpuopt") + 1 :] for words in lines]
    assert lab[:2] == ["lab", "THIS_FILE"]
    if not use:
        assert op in {"sumsq_blocks", "accumulate", "copy", "classifier_backward", "dequantize",
                          "matmul_adapter_forward", "matmul_int8_forward", "matmul_int8_backward_input",
                          "quantize_rows", "classifier_int8_forward", "classifier_int8_backward",
                          "head_backward_weight", "head_update"}  # fmt: skip
        return
    ((verb, *flags),) = use
    asked = dict(zip(flags[::2], flags[1::2], strict=True))
    assert asked["--swap"] == f"{op}=mine"
    model = models.PRESETS.get(asked.get("--model", models.DEFAULT))
    if verb == "generate":
        assert ops.ALL[op] in model.cached.values()
    elif "--optimizer" in asked:
        assert op.endswith(asked["--optimizer"])
    elif model:
        assert op in ab.ops_of(asked.get("--model", "gpt2-tiny"))
    else:
        assert (asked["--model"], lab[2]) == ("FILE.py:NAME", "--sizes")


@pytest.mark.parametrize("op", ["gelu_forward", "layernorm_backward", "sgd"])
def test_a_starter_is_right(op):
    Path("new.py").write_text(starter(ops.ALL[op], "mine"))
    cpuopt.kernels.load_all(["new.py"])
    for case in quick_cases(ops.ALL[op]):
        assert check(registry.KERNELS[op, "mine"], case).verdict == "right"


def test_the_example_of_the_toolkits_page_is_right():
    page = (Path(__file__).parents[1] / "docs" / "kernels" / "toolkit.md").read_text()
    (text,) = re.findall(r"(?s)```python\n(.*?)```", page)
    for variant, code in {"mine": text, "wrong": text.replace("+ ONE", "- ONE").replace('"mine"', '"wrong"')}.items():
        Path(f"{variant}.py").write_text(code)
        cpuopt.kernels.load_all([f"{variant}.py"])
        found = {check(registry.KERNELS["silu_forward", variant], c).verdict for c in quick_cases(ops.silu_forward)}
        assert ("wrong" in found) == (variant == "wrong")


def test_new_kernel_writes_a_file_once(capsys):
    assert "next: cpuopt lab gelu_forward.py" in printed(capsys, "new-kernel", "gelu_forward")
    before = Path("gelu_forward.py").read_text()
    assert "is there already" in refused(capsys, "new-kernel", "gelu_forward", "--variant", "other")
    assert Path("gelu_forward.py").read_text() == before
    refused(capsys, "new-kernel", "gelu_forward", "--variant", "vanilla", "--out", "x.py")
    said = "--out none/x.py: cannot be written (No such directory); name a file in a folder"
    assert said in refused(capsys, "new-kernel", "gelu_forward", "--out", "none/x.py")
    assert "did you mean 'gelu_forward'?" in refused(capsys, "new-kernel", "gleu_forward")
    assert not Path("none").exists() | Path("x.py").exists()


# A round --------------------------------------------------------------------------------------------------------------


def write(body):
    Path("mine.py").write_text(HEAD + text("residual_forward", body))
    return Path("mine.py")


def one_round(body, limit_s=60.0, **kw):
    plan = rounds.RoundPlan(write(body), "gpt2-tiny", 2, 16, 1, rounds=6, limit_s=limit_s, **kw)
    return rounds.work(plan, ROOFS, report.Screen(plan, live=False, quiet=True))


def a_row(*said, op="gelu_forward", variant="mine", **more):
    """A kernel of a round, and what was said of its stages."""
    return rounds.KernelRow(op, variant, "optimized", *said, **more)


def lines_of(page, width):
    Console(file=(out := io.StringIO()), width=width).print(page)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_a_right_kernel_goes_through_all_stages():
    (row,) = one_round("out[:] = inp1; out += inp2", against="vanilla")
    assert (row.bad, list(row.said)) == ("", list(rounds.STAGES))
    assert row.said["check"].startswith("right, ")
    assert row.found["alone"]["verdict"] in ("faster", "slower", "no difference shown", "inconclusive")
    b = row.found["alone"]["b_ms"] * 1e6
    roof = {"of_roof": 100 * 4 * 3 * 4 * 2048 / 10.0 / b, "against": row.found["roof"]["against"], "roof": "memory"}
    assert row.found["roof"] == pytest.approx(roof)
    assert row.found["step"]["losses"]["A"] == row.found["step"]["losses"]["B"]
    assert row.said["machine code"] == "a Python function"


def test_an_op_that_the_model_does_not_call_is_compared_at_usual_sizes():
    Path("mine.py").write_text(HEAD + text("silu_forward", "out[:] = inp / (1 + np.exp(-inp))"))
    plan = rounds.RoundPlan(Path("mine.py"), "gpt2-tiny", 1, 2, 1, rounds=6, against="vanilla")
    (row,) = rounds.work(plan, ROOFS, report.Screen(plan, live=False, quiet=True))
    assert (row.bad, list(row.said)) == ("", list(rounds.STAGES))
    assert re.search(r"; at N=\d+, because gpt2-tiny does not call it$", row.said["alone"])
    assert row.said["step"] == "none: gpt2-tiny does not call it"


FAILS = [("out[:] = inp1", "out["), ("os.abort()", "was ended by SIGABRT during 'check'")]


@pytest.mark.parametrize(("body", "said"), FAILS)
def test_a_kernel_that_fails_its_check_is_not_timed(body, said):
    (row,) = one_round(body)
    assert (row.bad, list(row.said)) == ("check", ["check"])
    assert said in row.said["check"]


def test_a_round_that_ended_is_kept_and_one_that_a_save_ended_is_not():
    plan = rounds.RoundPlan(Path("mine.py"), "gpt2-tiny", 1, 8, 1)
    done = a_row(dict.fromkeys(rounds.STAGES, "right"))
    under_way = a_row({"check": "right"}, variant="other", now="alone")
    assert [rounds.whole(rows) for rows in ([], [done], [done, under_way])] == [False, True, False]
    assert verb.keep(Path("runs"), plan, [done, under_way]) is None
    assert not Path("runs").exists()
    done.found["alone"] = {"verdict": "faster"}
    done.found["inspect"] = {"summary": {"loops": 1}, "blocks": ["a" * 10_000]}
    assert verb.keep(Path("runs"), plan, [done])
    (entry,) = records.entries(Path("runs"))
    assert (entry.trouble, entry.content["kernels"][0]["inspect"]) == ("", {"loops": 1})


def test_a_file_that_cannot_be_loaded_is_said():
    with pytest.raises(RefusedError, match=r"^--kernels mine\.py: line .* raised SyntaxError"):
        one_round("return (")
    Path("mine.py").write_text("x = 1\n")
    fails("registers no kernel", rounds.work, rounds.RoundPlan(Path("mine.py")), ROOFS, rounds.RoundView())


def test_once_tells_all_as_json(capsys):
    write("out[:] = inp1 + inp2; out[0] += 1")
    found = ran(capsys, "lab", "mine.py", "--once", "--model", "gpt2-tiny", status=1)
    (k,) = found["kernels"]
    assert (k["bad"], k["check"]["verdict"], k["check"]["worst"]["index"]) == ("check", "wrong", [0])
    (entry,) = records.entries(Path("runs"))
    assert (entry.kind, str(entry.path)) == ("lab", found["path"])
    assert entry.what == "mine.py: residual_forward[mine] failed in check"
    assert entry.content["kernels"][0]["said"] == k["said"]
    assert "wrong" in printed(capsys, "runs", "show", "lab")
    assert "'cpuopt new-kernel OP --out none.py' writes one" in refused(capsys, "lab", "none.py")
    assert cli.main(["lab", "mine.py", "--json"]) == 2


# The screen, and saves ------------------------------------------------------------------------------------------------


def test_a_variant_to_compare_with_that_is_not_there_is_refused_before_anything_runs(monkeypatch, capsys):
    monkeypatch.setattr(machine, "roofs", lambda n, say: pytest.fail("the machine was measured"))
    write("out[:] = inp1 + inp2")
    for flags in ([], ["--once"]):
        assert cli.main(["lab", "mine.py", "--against", "nope", *flags]) == 2
        known = "residual_forward has no such variant; known: mine, optimized, vanilla\n"
        assert capsys.readouterr().err == f"cpuopt: --against 'nope': {known}"
    with pytest.raises(UserError, match="--against 'nope'"):
        rounds.work(rounds.RoundPlan(Path("mine.py"), "gpt2-tiny", 1, 8, 1, against="nope"), ROOFS, rounds.RoundView())


def test_a_round_tells_how_far_its_check_is():
    write("out[:] = inp1 + inp2; assert len(out) < 1000")
    seen = []

    class Watched(rounds.RoundView):
        def rows(self, rows):
            seen.extend(r.progress for r in rows if r.now == "check")

    rounds.work(rounds.RoundPlan(Path("mine.py"), "gpt2-tiny", 1, 8, 1, step=False, rounds=6), ROOFS, Watched())
    total = int(seen[-1].partition("/")[2])
    assert total >= 20
    assert [s for s in seen if s] == [f"1/{total}", f"2/{total}"]  # the second fails


def test_a_comparison_tells_its_rounds_but_not_often(monkeypatch):
    now, told = [0.0], []
    monkeypatch.setattr(ab, "time", Mock(monotonic=lambda: now[0]))

    def trial(seconds):
        now[0] += seconds
        return 1.0 + len(told) % 2

    for seconds in (0.3, 0.1):  # three trials a round
        side = partial(trial, seconds)
        compare(side, side, analyses=[6], tick=ab.rounds_told(told.append, "N=4"))
    assert told == [*(f"N=4, round {i}/6" for i in range(1, 7)), "N=4, round 2/6", "N=4, round 4/6", "N=4, round 6/6"]


def test_the_screen_shows_progress_and_the_best_of_earlier_saves():
    screen = report.Screen(rounds.RoundPlan(Path("mine.py")), live=False, quiet=True)
    for since, ms in (("10:00:00", 0.5), ("10:01:00", 0.25), ("10:02:00", 0.75)):
        screen.since = since
        found = {"alone": {"b_ms": ms, "verdict": "slower"}}
        screen.rows([a_row({"alone": "x"}, found=found)])
    assert lines_of(screen.page([a_row(now="check", progress="7/25")]), 60)[3:] == [
        "  check          7/25",
        "  saves  slower  0.5 ms at 10:00:00",
        "         slower  0.25 ms at 10:01:00, best so far",
        "         slower  0.75 ms at 10:02:00",
    ]
    for i in range(9):
        screen.since = f"10:03:0{i}"
        screen.rows([a_row({"alone": "x"}, found=found)])
    listed = [when for when, *_ in screen.earlier("gelu_forward[mine]")]
    assert listed == ["10:01:00", *(f"10:03:0{i}" for i in range(4, 9))]
    screen.saves, screen.since = {"gelu_forward[mine]": {"10:00:00": (0.5, "slower")}}, "10:00:00"
    assert screen.earlier("gelu_forward[mine]") == []  # the only save is the one on the screen


class Heard(report.Screen):
    """A screen that remembers what it was told."""

    def __init__(self, plan):
        super().__init__(plan, live=False, quiet=True)
        self.seen = []

    def rows(self, rows):
        self.seen.append([(r.now, r.bad, dict(r.said)) for r in rows])

    def problem(self, text):
        self.seen.append(text)


def test_saves_while_rounds_go_on(monkeypatch):
    plan = rounds.RoundPlan(Path("mine.py"), "gpt2-tiny", 2, 16, 1, rounds=6, limit_s=300, step=False)
    screen, workers, popen = Heard(plan), [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **kw: workers.append(popen(*a, **kw)) or workers[-1])

    def save(body):
        return {(1, str(write(body).resolve()))}

    def changes(folder, **kw):
        wait(lambda: screen.seen[-1:] == [[("check", "", {})]])  # in a kernel that never ends
        yield {(1, str(Path(folder) / "other.py"))}
        assert len(workers) == 1
        for until in (None, "started", "checking"):  # each save ends a round that is at another place
            known, before = len(workers), len(screen.seen)
            yield save("while True: pass")
            if until == "started":
                wait(lambda known=known: len(workers) > known)
            elif until:
                wait(lambda before=before: [("check", "", {})] in screen.seen[before:])
        plan.file.unlink()
        yield set()
        assert screen.seen[-1] == "mine.py is gone"
        yield set()
        save("out[:] = inp1 - inp2")
        yield set()  # what the watcher missed is seen all the same
        wait(lambda: screen.seen[-1] and "check" in screen.seen[-1][0][2])
        yield set()

    save("while True: pass")
    monkeypatch.setattr("watchfiles.watch", changes)
    verb.follow(plan, ROOFS, screen, Path("runs"))
    wait(lambda: not any("work" in t.name for t in threading.enumerate()))
    last = screen.seen.index("mine.py is gone")
    ((_, bad, said),) = screen.seen[-1]
    assert (bad, said["check"][:11]) == ("check", "wrong: out[")
    assert all(not x or x[0][0] == "check" or x[0][1] == "check" for x in screen.seen[last + 1 :])
    assert not any("ended" in str(x) for x in screen.seen)
    assert 3 <= len(workers) <= 8  # a round also asks git
    assert all(w.poll() is not None for w in workers)


def test_a_save_of_an_imported_file_begins_a_round(monkeypatch):
    Path("helper.py").write_text("VALUE = 1\n")
    Path("mine.py").write_text("import helper\n")
    plan = rounds.RoundPlan(Path("mine.py"), "gpt2-tiny", 1, 8, 1, step=False)
    screen, begun = Heard(plan), []
    monkeypatch.setattr(screen, "begin", lambda: begun.append(1) or screen)

    def changes(folder, **kw):
        wait(lambda: "registers no kernel" in str(screen.seen[-1:]))
        for name, wanted in (("other.py", 1), ("helper.py", 2)):
            yield {(1, str(Path(folder) / name))}
            assert len(begun) == wanted

    monkeypatch.setattr("watchfiles.watch", changes)
    verb.follow(plan, ROOFS, screen, Path("runs"))


def test_a_round_that_is_over_is_not_heard():
    screen = Heard(rounds.RoundPlan(Path("mine.py")))
    old, new = screen.begin(), screen.begin()
    old.problem("stale")
    old.rows([])
    new.problem("fresh")
    assert screen.seen == ["fresh"]


def test_a_child_that_is_ended_starts_no_more():
    child = Child("cpuopt.lab.worker", [], 1)
    child.end()
    fails("a newer request replaces it", child.ask, "check")
    assert child._worker is None


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_a_signal_ends_the_screen_and_every_process(number):
    write("while True: open('runs_here', 'w').close()")
    arguments = ["lab", "mine.py", "--model", "gpt2-tiny", "--threads", "1"]
    code = "import cpuopt.measure.rates as m\nfrom cpuopt.measure.roofline import Level, Roofs\n"
    Path("tests_roofs.py").write_text(f"{code}m.roofs = lambda n, say: {ROOFS!r}\n")
    command = f"import tests_roofs; from cpuopt.cli import main; raise SystemExit(main({arguments!r}))"
    lab = subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait(lambda: Path("runs_here").exists())
    children = psutil.Process(lab.pid).children(recursive=True)
    assert children
    lab.send_signal(number)
    said, _ = lab.communicate(timeout=120)
    assert (lab.returncode, "Traceback" in said) == (0, False), said
    assert not psutil.wait_procs(children, 30)[1]


@pytest.mark.parametrize(
    ("error", "ended", "said"),
    [
        (UserError("ended, because a newer request replaces it"), True, ""),
        (UserError("x"), False, "x"),
        (RefusedError("no answer", "unchecked"), False, "unchecked: no answer"),  # no fault of the kernel
    ],
)
def test_an_error_is_a_result_unless_a_newer_save_ended_the_round(monkeypatch, error, ended, said):
    monkeypatch.setattr(rounds, "_check", Mock(side_effect=error))
    rounds.stages(None, None, row := a_row(), Mock(ended=ended), lambda: None)
    assert (row.bad, row.said) == (("", {}) if ended else ("check", {"check": said}))
    assert ("failed" in " ".join(lines_of(report.stages(row, []), 80))) == (said == "x")

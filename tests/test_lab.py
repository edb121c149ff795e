"""`cpuopt new-kernel` and `cpuopt lab`: from a starter file, over kernels that fail in each way, to the next save."""

import ast
import io
import json
import os
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

import cpuopt.kernels
from cpuopt import cli, ops, registry
from cpuopt.cli import lab as verb
from cpuopt.lab import machine, session
from cpuopt.lab.cases import quick_cases
from cpuopt.lab.check import check
from cpuopt.lab.starter import starter
from cpuopt.report import lab as report
from cpuopt.roofline import Level, Roofs

ROOFS = Roofs(1, (Level("memory", None),), 100.0, {"memory": {"read": 10.0}}, 1.0)
KERNEL = """
import os
from cpuopt import kernel, ops

@kernel(ops.residual_forward, "mine", jit=False)
def residual_forward(out, inp1, inp2):
    {body}
"""


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "KERNELS", registry.KERNELS.copy())
    monkeypatch.setenv("NUMBA_NUM_THREADS", os.environ["NUMBA_NUM_THREADS"])
    monkeypatch.setattr(machine, "roofs", lambda n, say: ROOFS)


# The starter file -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ops.ALL)
def test_a_starter_registers_its_kernel_and_says_what_is_declared(op, tmp_path):
    text = starter(ops.ALL[op], "mine")
    Path("new.py").write_text(text)
    cpuopt.kernels.load_all(["new.py"])
    kernel = registry.KERNELS[op, "mine"]
    assert kernel.where.startswith(str(tmp_path / "new.py"))
    assert all(f"#   {a.name}" in text for a in ops.ALL[op].args)
    assert f"--swap {op}=mine" in text
    names = {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)}
    imported = {a.asname or a.name for n in ast.parse(text).body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert imported <= names


@pytest.mark.parametrize("op", ["gelu_forward", "layernorm_backward"])
def test_a_starter_is_right(op):
    Path("new.py").write_text(starter(ops.ALL[op], "mine"))
    cpuopt.kernels.load_all(["new.py"])
    for case in quick_cases(ops.ALL[op]):
        assert check(registry.KERNELS[op, "mine"], case).verdict == "PASS"


def test_new_kernel_writes_a_file_once(capsys):
    assert cli.main(["new-kernel", "gelu_forward"]) == 0
    assert "next: cpuopt lab gelu_forward.py" in capsys.readouterr().out
    before = Path("gelu_forward.py").read_text()
    assert cli.main(["new-kernel", "gelu_forward", "--variant", "other"]) == 2
    assert "is there already" in capsys.readouterr().err
    assert Path("gelu_forward.py").read_text() == before
    assert cli.main(["new-kernel", "gelu_forward", "--variant", "vanilla", "--out", "x.py"]) == 2
    assert cli.main(["new-kernel", "gleu_forward"]) == 2
    assert "did you mean 'gelu_forward'?" in capsys.readouterr().err
    assert not Path("x.py").exists()


# A round --------------------------------------------------------------------------------------------------------------


def one_round(body, limit_s=60.0, **kw):
    Path("mine.py").write_text(KERNEL.format(body=body))
    plan = session.Plan(Path("mine.py"), "gpt2-tiny", 2, 16, 1, rounds=6, limit_s=limit_s, **kw)
    screen = report.Screen(plan, live=False, quiet=True)
    return session.work(plan, ROOFS, screen), screen


def test_a_right_kernel_goes_through_all_stages():
    (row,), screen = one_round("out[...] = inp1; out += inp2", against="vanilla")
    assert (row.bad, list(row.said), screen.trouble) == ("", list(session.STAGES), "")
    assert row.said["check"].startswith("PASS, ")
    assert row.found["alone"]["verdict"] in ("faster", "slower", "no difference shown", "could not tell")
    b = row.found["alone"]["b_ms"] * 1e6
    assert row.found["roof"] == pytest.approx(
        {"of_roof": 100 * 4 * 3 * 4 * 2048 / 10.0 / b, "against": row.found["roof"]["against"], "roof": "memory"}
    )
    assert row.found["step"]["losses"]["A"] == row.found["step"]["losses"]["B"]
    assert row.said["machine code"] == "a Python function"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("out[...] = inp1", "out["),
        ("raise ValueError('no')", "raised ValueError: no"),
        ("os.abort()", "was ended by SIGABRT during 'check'"),
        ("out.base[out.ctypes.data // 4 - out.base.ctypes.data // 4 - 1] = 1; out[...] = inp1 + inp2", "wrote outside"),
    ],
)
def test_a_kernel_that_fails_its_check_is_not_timed(body, said):
    (row,), _ = one_round(body)
    assert (row.bad, list(row.said)) == ("check", ["check"])
    assert said in row.said["check"]


def test_a_kernel_that_never_ends_is_ended():
    start = time.monotonic()
    (row,), _ = one_round("while True: pass", limit_s=10.0)
    assert row.bad == "check"
    assert "no answer to 'check' within 10 s" in row.said["check"]
    assert time.monotonic() - start < 300


def test_a_file_that_cannot_be_loaded_is_said():
    assert one_round("return (")[1].trouble.startswith("--kernels ")
    Path("mine.py").write_text("x = 1\n")
    screen = report.Screen(session.Plan(Path("mine.py")), live=False, quiet=True)
    assert session.work(session.Plan(Path("mine.py")), ROOFS, screen) == []
    assert "registers no kernel" in screen.trouble


def test_once_tells_all_as_json(capsys):
    Path("mine.py").write_text(KERNEL.format(body="out[...] = inp1 + inp2; out[0] += 1"))
    assert cli.main(["lab", "mine.py", "--once", "--model", "gpt2-tiny", "--json"]) == 1
    (k,) = json.loads(capsys.readouterr().out)["kernels"]
    assert (k["bad"], k["check"]["verdict"], k["check"]["worst"]["index"]) == ("check", "FAIL", [0])
    assert cli.main(["lab", "none.py"]) == 2
    assert "'cpuopt new-kernel OP --out none.py' writes one" in capsys.readouterr().err
    assert cli.main(["lab", "mine.py", "--json"]) == 2


# The screen, and saves ------------------------------------------------------------------------------------------------


def test_the_screen_has_a_line_for_each_stage():
    row = session.Row(
        "gelu_forward", "mine", "optimized", {"check": "PASS, 3 cases", "alone": "slower: [x]"}, "", "roof"
    )
    out = io.StringIO()
    Console(file=out, width=80).print(report.Screen(session.Plan(Path("mine.py")), live=False).page([row]))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert lines[0].startswith("mine.py · gpt2-124M · 4x64 · 1 thread · ")
    assert lines[2:] == [
        "gelu_forward[mine] against optimized",
        "  check         PASS, 3 cases",
        "  alone         slower: [x]",
        "  roof          ...",
    ]


def test_a_save_ends_the_round_that_is_going_on_and_begins_another(monkeypatch):
    Path("mine.py").write_text("first")
    began, ended = [], []

    def work(plan, roofs, screen, child):
        began.append(plan.file.read_text())
        if began[-1] == "first":
            deadline = time.monotonic() + 60
            while "first" not in ended and time.monotonic() < deadline:
                time.sleep(0.01)

    monkeypatch.setattr(session, "work", work)
    monkeypatch.setattr("cpuopt.lab.child.Child.close", lambda self: ended.append(began[-1]))

    def saves(folder, **kw):
        while not began:
            time.sleep(0.01)
        yield {(1, str(Path(folder) / "other.py"))}
        Path("mine.py").write_text("second")
        yield {(1, str(Path(folder) / "mine.py"))}

    monkeypatch.setattr("watchfiles.watch", saves)
    verb.follow(session.Plan(Path("mine.py")), ROOFS, None)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.daemon and "work" in thread.name:
            thread.join(10)
    assert began == ["first", "second"]
    assert ended[0] == "first"


def test_watchfiles_sees_a_save():
    from watchfiles import watch

    Path("mine.py").write_text("first")
    timer = threading.Timer(0.5, lambda: Path("mine.py").write_text("second"))
    timer.start()
    changes = next(iter(watch(Path.cwd(), recursive=False, rust_timeout=60_000)))
    assert any(Path(path).name == "mine.py" for _, path in changes)

"""Timed verdicts, the board, and the ways to ask: a server of lines, the command, and the Model Context Protocol."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpuopt import cli, ops
from cpuopt.check.cases import Case
from cpuopt.check.timed import TimedKernels
from cpuopt.errors import UserError
from cpuopt.judge import desk as desks
from cpuopt.judge import naive, remote, rules, session, timing
from cpuopt.judge.desk import Desk, answer, renamed
from cpuopt.judge.session import REFUSED, Judge, ModelSizes, Ruling
from cpuopt.kernels.registry import KERNELS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the judge closes a process as Linux does")
GELU = naive.text_of(ops.gelu_forward)
TINY = ModelSizes("gpt2-tiny", 1, 8)
(SHAPE,) = TINY.shapes(ops.gelu_forward)
N = SHAPE.sizes["N"]
LOOP = "for i in prange(inp.shape[0]):"


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "ANALYSES", (6,))


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with Judge(2) as j:
        yield j


def test_the_text_of_a_kernel_of_the_package_is_a_candidate() -> None:
    assert rules.read(GELU).kernels == (("gelu_forward", "mine"),)
    assert naive.text_of(ops.softmax_forward, "optimized", "other").count("@kernel") == 1
    with pytest.raises(UserError, match=r"adamw\[vanilla\] "):
        naive.text_of(ops.adamw)


def test_a_timed_verdict_has_its_score_and_what_it_is_based_on(judge: Judge) -> None:
    found = judge.time(GELU, "gelu_forward", TINY)
    assert found.verdict not in REFUSED, found
    t = found.timed
    assert t["against"] == "optimized"
    assert t["score"] == pytest.approx(1 / t["ratio"]["high"])
    assert t["cases"][0]["sizes"] == {"N": N}
    assert t["saves_ms"] == pytest.approx(t["a_ms"] - t["b_ms"])
    assert json.dumps(t)


AT_SIZE = {
    "wrong at the size that is timed": f"if inp.shape[0] == {N}:\n        return\n    {LOOP}",
    "reads outside at the size that is timed": (
        f"if inp.shape[0] == {N}:\n        out[0] = inp[{N} + 99999]\n    {LOOP}"
    ),
}


@pytest.mark.parametrize("name", AT_SIZE)
def test_what_is_wrong_only_where_it_is_timed_is_found(name: str, judge: Judge) -> None:
    found = judge.time(GELU.replace(LOOP, AT_SIZE[name]), "gelu_forward", TINY)
    assert found.verdict in ("wrong", "cheating"), found


def test_a_time_that_the_judges_clock_does_not_confirm_is_cheating(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = remote.Remote.ask

    def lying(self: remote.Remote, do: str, function: remote.Far, **more: Any) -> dict[str, Any]:
        if do == "batch" and function.side == "B":
            time_s = 0.02
            timing.time.sleep(time_s)
        return usual(self, do, function, **more)

    monkeypatch.setattr(remote.Remote, "ask", lying)
    monkeypatch.setattr(timing, "APART", 1.0)
    found = judge.time(GELU, "gelu_forward", TINY)
    assert found.verdict == "cheating"
    assert "told times that the judge's clock does not confirm" in found.reason


def test_clocks_that_agree_and_clocks_that_do_not() -> None:
    usual = remote.Clocks([1e6] * 9, [1.2e6] * 9)
    assert not timing.disagreement(usual, remote.Clocks([5e5] * 9, [7e5] * 9))
    assert timing.disagreement(usual, remote.Clocks([5e5] * 9, [9e6] * 9))
    assert timing.disagreement(usual, remote.Clocks([5e5] * 9, [4e5] * 9))


def test_no_right_result_lies_in_an_array_before_a_secret_call() -> None:
    kernel = KERNELS["relu_forward", "vanilla"]
    for secret in (True, False):
        timed = TimedKernels({"A": kernel}, Case({"N": 4096}), {}, 1, secret=secret)
        timed.swap(0)
        for outs in ("other", "almost"):
            timed.fill("A", outs, "nan", 1)
            found = timed.slots[0]["out"]
            alike = max(float(np.mean(found == s.wanted.values["out"])) for s in timed.sets)
            assert (alike < 0.1) == secret


# The board ------------------------------------------------------------------------------------------------------------


class Scripted:
    """A judge whose timed verdicts are given."""

    def __init__(self, *scores: float) -> None:
        self.scores = [*scores]

    def time(self, text: str, op: str, task: ModelSizes) -> Ruling:
        score = self.scores.pop(0)
        ratio = {"median": 1 / score, "low": 1 / score, "high": 1 / score}
        timed = {"score": score, "ratio": ratio, "against": "optimized"}
        return Ruling(op, "mine", text, f"code of {text}", "faster", timed=timed)


def board_of(tmp_path: Path, *scores: float) -> Desk:
    desk = Desk(tmp_path / "runs")
    vars(desk)["judge"] = Scripted(*scores)
    return desk


def test_a_kernel_that_comes_first_is_timed_twice_and_has_the_lower_score(tmp_path: Path) -> None:
    desk = board_of(tmp_path, 2.0, 1.1, 1.05, 3.0, 1.2)
    assert desk.submit("a", "gelu_forward")["timed"]["score"] == 1.1
    assert desk.submit("b", "gelu_forward")["place"] == 2
    assert desk.submit("c", "gelu_forward")["timed"]["score"] == 1.2
    found = desk.board("gelu_forward")
    assert (found["tries"], [row["score"] for row in found["best"]]) == (3, [1.2, 1.1, 1.05])


def test_to_submit_a_kernel_again_gains_nothing(tmp_path: Path) -> None:
    desk = board_of(tmp_path, 1.1, 1.1, *[1.09, 1.0, 1.5, 1.4, 1.05, 1.2])
    for _ in range(5):
        desk.submit("a", "gelu_forward")
    assert [row["score"] for row in desk.board("gelu_forward")["best"]] == [1.0]


def test_a_kernel_gets_another_name() -> None:
    assert "@kernel(ops.gelu_forward, 'fast')" in renamed(GELU, "gelu_forward", "fast")
    assert renamed(GELU, "relu_forward", "fast") == GELU


def test_a_forged_record_is_not_adopted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    desk = board_of(tmp_path, 2.0, 2.0)
    desk.submit("import os\nos.remove('x')\n", "gelu_forward")
    with pytest.raises(UserError, match="holds a text that the judge refuses: line 1: import os"):
        desk.adopt("gelu_forward", "fast")
    assert [*tmp_path.glob("*.py")] == []


def test_what_cannot_be_adopted_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    desk = board_of(tmp_path, 2.0, 2.0)
    with pytest.raises(UserError, match="is empty; submit a kernel first"):
        desk.adopt("gelu_forward", "fast")
    desk.submit(GELU, "gelu_forward")
    for name in ("optimized", "a b"):
        with pytest.raises(UserError, match="expected a new name"):
            desk.adopt("gelu_forward", name)
    assert desk.adopt("gelu_forward", "fast")["use"].endswith("--swap gelu_forward=fast")
    with pytest.raises(UserError, match="is there already"):
        desk.adopt("gelu_forward", "fast")


# The ways to ask ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("not json", "Expecting value"),
        ("[1]", "expected an object with do, one of tasks, describe, check"),
        ('{"do": "close"}', "expected an object with do"),
        ('{"do": "check", "op": "gelu_forward"}', "check: missing a required argument: 'text'"),
        ('{"do": "check", "text": "", "op": "gelu"}', "judge 'gelu': no such op"),
        ('{"do": "board", "op": "gelu_forward", "x": 1}', "board: got an unexpected keyword argument 'x'"),
    ],
)
def test_a_wrong_request_is_answered(line: str, said: str, tmp_path: Path) -> None:
    with Desk(tmp_path) as desk:
        assert said in answer(desk, line)["error"]


def test_requests_are_answered_in_lines(tmp_path: Path) -> None:
    with Desk(tmp_path, 2) as desk:
        found = answer(desk, json.dumps({"do": "check", "text": "import os\n", "op": "gelu_forward", "id": 7}))
        assert (found["id"], found["answer"]["verdict"]) == (7, "refused by rule")
        tasks = answer(desk, '{"do": "tasks"}')["answer"]["tasks"]
        assert [t["op"] for t in tasks] == [*ops.ALL]


def test_a_description_has_what_a_kernel_is_written_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desks, "ROUNDS", 1)
    with Desk(tmp_path, 2) as desk:
        found = desk.describe("gelu_forward", "gpt2-tiny", 1, 8)
    assert found["naive"] == GELU
    assert found["arguments"] == ["out (N): overwritten; it holds anything before", "inp (N): read"]
    assert set(found["shapes"][0]["us"]) == {"vanilla", "optimized"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "judge: nothing given; expected one of FILE, --serve, --tasks and --board"),
        (["--tasks", "--serve"], "judge: serve and tasks given; expected one of"),
        (["x.py"], "judge x.py: add --op OP"),
        (["x.py", "--op", "gelu_forward"], "judge x.py: No such file or directory; expected the text of a kernel"),
        (["--tasks", "--adopt", "fast"], "--adopt fast: add --board OP"),
        (["--board", "gelu"], "judge 'gelu': no such op"),
    ],
)
def test_wrong_flags_are_said(flags: list[str], said: str, capsys: Any, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["judge", *flags]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_the_command_checks_a_file(capsys: Any, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("import os\n")
    assert cli.main(["judge", "mine.py", "--op", "gelu_forward", "--check", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["rule"] == "import"
    assert cli.main(["judge", "mine.py", "--op", "gelu_forward"]) == 1
    assert "line 1: import os; allowed are numpy as np" in " ".join(capsys.readouterr().out.split())
    assert [p.name for p in tmp_path.iterdir()] == ["mine.py"]


WRONG = GELU.replace("0.044715", "0.05")
CHEAT = GELU.replace(LOOP, f"inp[0] = inp[0] * 2\n    {LOOP}")


def test_a_client_of_the_protocol_submits_and_adopts(tmp_path: Path) -> None:
    """With the protocol's own client: a wrong GELU, a cheating one and a good one, of which the last is adopted."""
    pytest.importorskip("mcp")
    import asyncio

    from mcp.client.session import ClientSession
    from mcp.client.stdio import StdioServerParameters, stdio_client

    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "cpuopt", "mcp", "--threads", "2"],
        cwd=str(tmp_path),
        env={"PYTHONPATH": str(Path(cli.__file__).parents[2]), "OMP_WAIT_POLICY": "passive"},
    )

    async def talk() -> list[Any]:
        async with stdio_client(server) as (read, write), ClientSession(read, write) as client:
            await client.initialize()
            names = [tool.name for tool in (await client.list_tools()).tools]

            async def ask(name: str, /, **more: Any) -> Any:
                found = await client.call_tool(name, more)
                return json.loads(found.content[0].text)  # type: ignore[union-attr]

            sizes = {"model": "gpt2-tiny", "B": 1, "T": 8}
            found = [names, await ask("tasks")]
            for text in (WRONG, CHEAT, GELU):
                found.append(await ask("submit", text=text, op="gelu_forward", **sizes))
            return [*found, await ask("board", op="gelu_forward"), await ask("adopt", op="gelu_forward", name="fast")]

    names, tasks, wrong, cheat, good, board, adopted = asyncio.run(talk())
    assert names == ["tasks", "describe", "check", "time", "inspect", "profile", "submit", "board", "adopt"]
    assert len(tasks["tasks"]) == len(ops.ALL)
    assert (wrong["verdict"], wrong["place"]) == ("wrong", None)
    assert (cheat["verdict"], cheat["place"]) == ("cheating", None)
    assert good["place"] == 1
    assert len(board["best"]) == 1
    made = subprocess.run(
        [sys.executable, "-m", "cpuopt", "check", "--kernels", adopted["path"], "--quick", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert [(k["variant"], k["verdict"]) for k in json.loads(made.stdout)["kernels"]] == [("fast", "PASS")]

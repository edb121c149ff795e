"""What others wrote: records, names and texts that are made to break or deceive who reads them."""

import copy
import io
import json
import os
import re
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_records import OPS, ab, profile

from cpuopt import cli, ops
from cpuopt.errors import UserError
from cpuopt.files.reading import DEEPEST, misfit, parse_json, read_json
from cpuopt.kernels import registry
from cpuopt.kernels.generated.load import backward
from cpuopt.lab import records
from cpuopt.measure import rates as machine
from cpuopt.measure.profile import Profile
from cpuopt.report import console
from cpuopt.report.backward import html
from cpuopt.wording import one_line, plain

NASTY = "\x1b[2J\x1b]0;t\x07[red]x[/red]\u202egnp.\u2066\x9b31m\ud800<script>\r\n\u2028cpuopt: all PASS"
STEERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
ROOFS = {
    "threads": 2, "gflops": 100.0, "launch_us": 1.0, "measured": "2026-01-01", "doubts": [],
    "gbs": {"L1": {"read": 300.0}, "memory": {"read": 10.0}},
    "levels": [{"name": "L1", "nbytes": 32768, "sharers": 1}, {"name": "memory", "nbytes": None, "sharers": 2}],
}  # fmt: skip


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(machine, "machine_id", lambda: "here")
    monkeypatch.setattr(records, "machine_id", lambda: "here")


def ratio(x=0.5):
    return {"median": x, "low": 0.9 * x, "high": 1.1 * x}


def compared():
    return {"a_ns": 2e6, "b_ns": 1e6, "ratio": ratio(), "control": ratio(1.0), "verdict": "faster", "why": ""}


def kinds():
    """A whole record of each kind."""
    case = {**compared(), "sizes": {"B": 4}, "layers": ["h.0"]}
    one = ab()
    one["results"][0] |= {"cases": [case, case], "step": compared(), "losses": {"A": [1.0], "B": [1.0]}}
    one["results"][0]["doubts"] = ["busy"]
    one["level"] = 96.8
    side = {"cpuopt": 1.0, "peer": 2.0}
    result = {"B": 4, "T": 64, "peer": "torch", "ratio": ratio(), "level": 99.5, "refused": None, "doubts": ["busy"]}
    result |= {"step_ms": {k: {"median": v} for k, v in side.items()}, "peak_rss_mb": side}
    result |= {"phases_ms": {k: {"forward": 1.0, "backward": 1.0, "update": 1.0} for k in side}}
    bench = {"model": {"name": "gpt2-tiny"}, "variant": "optimized", "swap": [], "threads": 1, "rounds": 2}
    bench |= {"results": [result, {**result, "ratio": None, "refused": "other losses"}]}
    bench |= {"geometric_mean": {"torch": ratio()}, "machine": {"cpu": "x"}}
    tried = {
        "mine": {**compared(), "a_ms": 2.0, "b_ms": 1.0, "check": "right"},
        "x": {"verdict": "refused", "why": "?"},
    }
    shape = {"sizes": {"B": 4}, "adds": {"dinp": True}, "layers": ["h.0"]}
    row = {"op": "gelu_forward", "default": "optimized", "best": "mine", "shapes": [shape], "tried": tried}
    row["in_step"] = {"verdict": "faster", "ratio": ratio()}
    tune = {"model": "gpt2-tiny", "B": 4, "T": 64, "threads": 1, "flush": False, "rows": [row], "doubts": ["busy"]}
    tune |= {"rules": ["gelu_forward@h.0=mine"], "step": compared(), "finished": True, "why": "", "plan": "p.json"}
    p = {**profile(), "roofs": ROOFS, "doubts": ["busy"], "checked": [{"kernel": "x[mine]", "status": "right"}]}
    p["checked"] = [{"kernel": f"{n}[mine]", "status": "right"} for n in (op.lower().replace(" ", "_") for op in OPS)]
    for r in (*p["ops"], *p["layers"]):
        r |= {"of_roof": 50.0, "roof": "L1", "imbalance": 1.2}
    said = {"check": "right, 3 cases", "alone": "faster: 1 ms"}
    k = {"op": "gelu_forward", "variant": "mine", "against": "optimized", "bad": "", "said": said}
    lab = {"file": "mine.py", "model": "gpt2-tiny", "sizes": [], "kernels": [{**k, "alone": one["results"][0]}]}
    return {"ab": one, "lab": lab, "bench": bench, "tune": tune, "profile": {"profile": {**p, "mfu": 40.0}}}


def leaves(x, path=()):
    """Every place in a record; of long lists the first."""
    yield path
    for key, v in x.items() if isinstance(x, dict) else enumerate(x[:1]) if isinstance(x, list) else ():
        yield from leaves(v, (*path, key))


def changed(record, path, value):
    if not path:
        return value
    record = copy.deepcopy(record)
    at = record
    for key in path[:-1]:
        at = at[key]
    if value is changed:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return record


@pytest.fixture
def shown(monkeypatch, capsys):
    """Run a command on a terminal; give its status and all that it printed."""

    def shown(*argv):
        out = io.StringIO()
        for name in ("OUT", "ERR"):
            monkeypatch.setattr(console, name, console.Plain(file=out, width=160, color_system=None))
        status = cli.main([str(a) for a in argv])
        text = out.getvalue() + "".join(capsys.readouterr())
        assert not STEERS.search(text), repr(text)
        return status, text

    return shown


@pytest.mark.parametrize("kind", kinds())
def test_a_record_with_any_field_broken_is_shown_or_refused_in_one_line(kind, shown, tmp_path):
    whole = kinds()[kind]
    bad, good = (records.keep(tmp_path / "runs", kind, name, whole) for name in ("bad", "good"))
    file = bad / "record.json"
    content = json.loads(file.read_text())
    commands = [("list",), ("show", "bad")]
    if kind == "profile":
        commands[1:] = [("show", "bad", "--html", "x.html"), ("compare", good.name, "bad")]
    assert [shown("runs", *argv)[0] for argv in commands] == [0] * len(commands)
    places = [p for p in leaves(content) if p and "machine" not in p]
    assert len(places) > 25
    values = [changed, NASTY, None, [], {}, -1, 0, 10**400, 1e308, {"a": {}}, ["x"], True, ""]
    for i, path in enumerate(places):
        file.write_text(json.dumps(changed(content, path, values[i % len(values)])))
        found = records.entries(tmp_path / "runs")
        assert [e.path for e in found] == [bad, good]
        assert all(e.what for e in found)
        assert records.history(found, "gelu_forward", "here") or kind in ("bench", "tune")
        for argv in commands[1:] if i % 2 else commands[1:2]:
            status, text = shown("runs", *argv)
            assert status in ((2,) if found[0].trouble else (0, 2)), (path, text)
            assert status == 0 or len(text.splitlines()) == 1, text


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "Expecting value"),
        ("[" * 100_000, "nested more than"),
        ('{"a":' * 200 + "1" + "}" * 200, "nested more than"),
        ('{"kind": "ab", "kind": "ab"}', "'kind' comes twice"),
        ('{"kind": "ab", "time": NaN}', "NaN is no number"),
        ('{"kind": "ab"}', "kind and time are missing"),
        ('{"kind": "ab", "time": "x"}', "lacks 'op'"),
        ("\xff{}", "codec can't decode"),
        ("null", "it is null"),
        ('{"time": ' + "9" * 10_000 + "}", "a number has 10,000 digits; expected 640 at most"),
    ],
)
def test_what_is_no_record_is_a_line_of_the_list(content, why, shown, tmp_path):
    records.keep(tmp_path / "runs", "ab", "good", ab())
    (tmp_path / "runs" / NASTY.replace("/", "").replace("\ud800", "\udc80")).mkdir()
    folder = next(p for p in (tmp_path / "runs").iterdir() if "script" in p.name)
    (folder / "record.json").write_bytes(content.encode("latin-1"))
    status, text = shown("runs", "list")
    assert status == 0
    assert text.count("cannot be read") == 1
    assert why in " ".join(text.split())
    assert "faster" in text
    assert not any(line.startswith("cpuopt") for line in text.splitlines())
    assert shown("runs", "list", "--json")[0] == 0


def test_a_record_that_is_no_file_is_not_waited_for(shown, tmp_path):
    for name in ("pipe", "folder", "loop"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    os.mkfifo(tmp_path / "runs" / "pipe" / "record.json")
    (tmp_path / "runs" / "folder" / "record.json").mkdir()
    (tmp_path / "runs" / "loop" / "record.json").symlink_to("/dev/zero")
    status, text = shown("runs", "list")
    assert status == 0
    assert len(re.findall("cannot be read: .*(no file|Is a directory)", text)) == 3


def test_the_page_of_a_generated_backward_escapes_names(monkeypatch):
    made = backward(ops.ALL["gelu_backward"], registry.KERNELS["gelu_forward", "vanilla"])
    monkeypatch.setattr(made.plan.kernel, "name", "<script>alert(1)</script>")
    made.plan.kernel.source[1] = "</span><img src=x>"
    page = html([made])
    assert page.count("<script>") == 1
    assert "<img" not in page


def test_markup_and_emoji_codes_are_text(shown, capsys):
    console.warn("[red]a[/red] [link=x]:smile: [/]")
    assert capsys.readouterr().err == "warning: [red]a[/red] [link=x]:smile: [/]\n"


def test_an_error_is_one_line_that_steers_nothing():
    assert str(UserError(f"no such {NASTY}")) == one_line(f"no such {NASTY}")
    assert "\n" not in one_line(NASTY)
    assert not STEERS.search(one_line(NASTY))


@given(st.text())
def test_text_without_steering_characters_stays_as_it_is(text):
    kept = plain(text)
    assert len(kept) == len(text)
    assert plain(kept) == kept
    assert not STEERS.search(kept)
    assert all(a == b or b == "\ufffd" for a, b in zip(text, kept, strict=True))
    assert plain("a\tb\n é 語 👍🏽 ‍") == "a\tb\n é 語 👍🏽 ‍"


# JSON


def test_depth_is_bounded():
    def nest(n):
        return '{"a":' * n + "1" + "}" * n

    assert parse_json(nest(DEEPEST))
    for n in (DEEPEST + 1, 900, sys.getrecursionlimit() + 10, 10**6):
        with pytest.raises(ValueError, match="nested more than"):
            parse_json(nest(n))


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=5))
def test_a_value_fits_its_own_type_and_no_other(x):
    hints = [int, float, str, bool, None, list[Any], dict[str, int]]
    fitting = [h for h in hints if not misfit(x, h)]
    if type(x) is int and abs(x) < 2**63:
        assert fitting == [int, float]
    elif isinstance(x, float):
        assert fitting == ([float] if abs(x) < 1e300 else [])
    elif x is None or isinstance(x, bool | str | list):
        assert len(fitting) == 1


def test_a_misfit_says_where(tmp_path):
    p = {**profile(), "raw": []}
    assert misfit(p, Profile) == ""
    assert misfit({**p, "B": "4"}, Profile) == "B is '4'; expected a whole number"
    assert misfit({**p, "ops": [{}]}, Profile) == "ops[0] lacks 'bytes'"
    assert misfit({**p, "ops": [{**p["ops"][0], "ms": None}]}, Profile) == "ops[0].ms is None; expected a number"
    (tmp_path / "x").write_text('{"a": [1, 2.5]}')
    assert misfit(read_json(tmp_path / "x"), dict[str, list[int]]) == "a[1] is 2.5; expected a whole number"

"""What others wrote: records, names and texts that are made to break or deceive who reads them."""

import copy
import io
import json
import os
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_records import OPS, ab, profile
from test_screens import OP, ROOFS, comparison, peers, tuned

from cpuopt import cli, ops
from cpuopt.errors import UserError
from cpuopt.files.reading import DEEPEST, parse_json
from cpuopt.kernels import registry
from cpuopt.kernels.generated.load import backward
from cpuopt.lab import records
from cpuopt.measure import rates as machine
from cpuopt.report import console
from cpuopt.report.backward import html
from cpuopt.wording import one_line, plain

NASTY = "\x1b[2J\x1b]0;t\x07[red]x[/red]\u202egnp.\u2066\x9b31m\ud800<script>\r\n\u2028cpuopt: all PASS"
STEERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


@pytest.fixture(autouse=True)
def _here(here, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(machine, "machine_id", lambda: "here")
    monkeypatch.setattr(records, "machine_id", lambda: "here")


def kinds():
    """A whole record of each kind."""
    one, p = comparison(), {**profile(), "roofs": ROOFS, "doubts": ["busy"], "mfu": 40.0}
    p["checked"] = [{"kernel": f"{op.lower().replace(' ', '_')}[mine]", "status": "right"} for op in OPS]
    for r in (*p["ops"], *p["layers"]):
        r |= {"of_roof": 50.0, "roof": "L1", "imbalance": 1.2}
    said = {"check": "right, 3 cases", "alone": "faster: 1 ms"}
    k = {"op": OP, "variant": "generated", "against": "optimized", "bad": "", "said": said, "alone": one["results"][0]}
    lab = {"file": "mine.py", "model": "gpt2-tiny", "sizes": [], "kernels": [k]}
    return {"ab": one, "lab": lab, "bench": peers(), "tune": tuned(), "profile": {"profile": p}}


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
        status, text = cli.main([str(a) for a in argv]), out.getvalue() + "".join(capsys.readouterr())
        assert not STEERS.search(text), repr(text)
        return status, text

    return shown


@pytest.mark.drawn(3)
@pytest.mark.parametrize("kind", kinds())
def test_a_record_with_any_field_broken_is_shown_or_refused_in_one_line(kind, shown, tmp_path):
    whole = kinds()[kind]
    bad, good = (records.keep(tmp_path / "runs", kind, name, whole) for name in ("bad", "good"))
    file = bad / "record.json"
    content, commands = json.loads(file.read_text()), [("list",), ("show", "bad")]
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
        assert records.history(found, "gelu_forward" if kind == "profile" else OP, "here") or kind in ("bench", "tune")
        for argv in commands[1 : 2 + i % (len(commands) - 1)]:
            status, text = shown("runs", *argv)
            assert status in ((2,) if found[0].trouble else (0, 2)), (path, text)
            assert status == 0 or len(text.splitlines()) == 1, text


@pytest.mark.parametrize(
    ("content", "why"),
    [
        *(("", "Expecting value"), ("null", "it is null"), ("\xff{}", "codec can't decode")),
        *(("[" * 100_000, "nested more than"), ('{"a":' * 200 + "1" + "}" * 200, "nested more than")),
        ('{"kind": "ab", "kind": "ab"}', "'kind' comes twice"),
        ('{"kind": "ab", "time": NaN}', "NaN is no number"),
        *(('{"kind": "ab"}', "kind and time are missing"), ('{"kind": "ab", "time": "x"}', "lacks 'op'")),
        ('{"time": ' + "9" * 10_000 + "}", "a number has 10,000 digits; expected 640 at most"),
    ],
)
def test_what_is_no_record_is_a_line_of_the_list(content, why, shown, tmp_path):
    records.keep(tmp_path / "runs", "ab", "good", ab())
    (tmp_path / "runs" / NASTY.replace("/", "").replace("\ud800", "\udc80")).mkdir()
    folder = next(p for p in (tmp_path / "runs").iterdir() if "script" in p.name)
    (folder / "record.json").write_bytes(content.encode("latin-1"))
    status, text = shown("runs", "list")
    assert (status, text.count("cannot be read")) == (0, 1)
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
    assert (status, len(re.findall("cannot be read: .*(no file|Is a directory)", text))) == (0, 3)


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
    assert (len(kept), plain(kept)) == (len(text), kept)
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

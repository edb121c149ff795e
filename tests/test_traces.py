"""`--trace`: the rules of the format.

The rules are those of "Trace Event Format" (Chromium; JSON object format, complete and metadata events) as
ui.perfetto.dev applies them.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cpuopt import cli
from cpuopt.measure.profile import StepTimes
from cpuopt.report import trace

HOSTILE = "</script>\"'\\\n\0\udc80 {}[] Ω <b>"


def number(x):
    return isinstance(x, int | float) and not isinstance(x, bool) and x == x and abs(x) != float("inf")


# The rules ------------------------------------------------------------------------------------------------------------


def chrome_faults(data):
    """What in a trace breaks the format, one line each."""
    faults = []
    events = data.get("traceEvents")
    if not isinstance(events, list):
        return ["traceEvents is no list"]
    if data.get("displayTimeUnit", "ms") not in ("ms", "ns"):
        faults.append("displayTimeUnit")
    if not isinstance(data.get("otherData", {}), dict):
        faults.append("otherData")
    named, used, open_ = {}, set(), {}
    for i, e in enumerate(events):
        where = f"event {i}"
        if not isinstance(e.get("name"), str) or not isinstance(e.get("args", {}), dict):
            faults.append(f"{where}: name or args")
        if not all(isinstance(e.get(k), int) and 0 < e[k] < 2**31 for k in ("pid", "tid")):
            faults.append(f"{where}: pid or tid")
            continue
        if e.get("ph") == "M":
            if e["name"] not in ("process_name", "thread_name") or not isinstance(e["args"].get("name"), str):
                faults.append(f"{where}: metadata")
            named[e["name"], e["pid"], e["tid"] if e["name"] == "thread_name" else 0] = i
            continue
        if e.get("ph") != "X":
            faults.append(f"{where}: phase {e.get('ph')!r}")
            continue
        if not isinstance(e.get("cat"), str) or not all(number(e.get(k)) and e[k] >= 0 for k in ("ts", "dur")):
            faults.append(f"{where}: cat, ts or dur")
            continue
        track = e["pid"], e["tid"]
        used.add(track)
        stack = open_.setdefault(track, [])
        while stack and stack[-1][1] <= e["ts"]:
            stack.pop()
        if stack and e["ts"] < stack[-1][0]:
            faults.append(f"{where}: out of order")
        if any(e["ts"] + e["dur"] > end for _, end in stack):
            faults.append(f"{where}: overlaps")
        stack.append((e["ts"], e["ts"] + e["dur"]))
    for pid, tid in used:
        faults += [f"process {pid} has no name"] * (("process_name", pid, 0) not in named)
        faults += [f"thread {tid} has no name"] * (("thread_name", pid, tid) not in named)
    return faults


# What is written obeys them -------------------------------------------------------------------------------------------


def bound(name, layer, phase="forward", variant="vanilla"):
    op = SimpleNamespace(name=name, label=name.title())
    call = SimpleNamespace(op=op, layer=layer, phase=phase, shown_phase=phase, args={}, flops=10, bytes=20)
    return SimpleNamespace(call=call, kernel=SimpleNamespace(variant=variant, name=f"{name}[{variant}]"))


def steps_of(gaps, start=10**18):
    """Steps of two phases, whose readings of the clock lie so many ns apart; 10 gaps a step."""
    calls = {
        "forward": [bound("a", "h.0"), bound("b", "h.0", variant=HOSTILE), bound("a", HOSTILE)],
        "backward": [bound("c", "forward", "backward"), bound("c", "h.0", "backward")],
    }
    steps, now = [], start
    for n in range(len(gaps) // 10):
        times = []
        for gap in gaps[10 * n : 10 * n + 10]:
            now += gap
            times.append(now)
        runs = [
            (calls["forward"], np.array(times[1:5])),
            (calls["backward"], np.array(times[5:8])),
            ([], np.array([now])),
        ]
        steps.append(StepTimes(n + 3, times[0], times[9], runs))
    return steps


def profile_of(steps, model="gpt2-tiny"):
    versions = {"python": "3", "cpuopt": HOSTILE}
    return SimpleNamespace(
        raw=steps,
        model=model,
        B=2,
        T=8,
        threads=2,
        variant="vanilla",
        swaps=[f"a@{HOSTILE}=vanilla"],
        versions=versions,
    )


def written(folder, steps, **kw):
    """The trace of a profile, read as strictly as a browser does."""

    def refuse(word):
        raise ValueError(f"{word} is not JSON")

    trace.write_trace(folder / "t.json", profile_of(steps, **kw))
    return json.loads((folder / "t.json").read_bytes().decode("utf-8"), parse_constant=refuse)


GAPS = st.lists(st.sampled_from([0, 1, 3, 124, 125, 126, 999, 12345, 10**9 + 1]), min_size=10, max_size=40)


@given(gaps=GAPS)
def test_a_trace_obeys_the_rules_for_any_times(gaps, tmp_path_factory):
    assert chrome_faults(written(tmp_path_factory.mktemp("t"), steps_of(gaps))) == []


def test_no_step_and_hostile_names(tmp_path):
    assert chrome_faults(written(tmp_path, [], model=HOSTILE)) == []
    chrome = written(tmp_path, steps_of([100] * 10), model=HOSTILE)
    shown = HOSTILE.replace("\udc80", "?")
    assert {e["args"]["layer"] for e in chrome["traceEvents"] if "layer" in e["args"]} == {"h.0", shown, "forward"}
    assert chrome["traceEvents"][0]["args"]["name"].startswith(shown)
    assert "\udc80".encode("utf-8", "surrogatepass") not in (tmp_path / "t.json").read_bytes()


def test_times_are_microseconds(tmp_path):
    chrome = written(tmp_path, steps_of([1000] * 20))
    (first, second) = [e for e in chrome["traceEvents"] if e.get("cat") == "step"]
    assert (first["ts"], first["dur"], second["ts"]) == (0, 9, 10)
    assert [e["dur"] for e in chrome["traceEvents"] if e["name"] == "b"] == [1, 1]


# From the command line ------------------------------------------------------------------------------------------------


def test_a_training_run_writes_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(500)))
    job = ["train", "--model", "gpt2-tiny", "--data", "text.txt", "-B", "2", "-T", "16", "--variant", "vanilla"]
    job += ["--threads", "4", "--val-every", "0", "--steps", "12"]
    assert cli.main([*job, "--trace", "none/t.json"]) == 2
    assert "--trace none/t.json: cannot be written (No such directory)" in capsys.readouterr().err
    assert not Path("runs").exists()
    assert cli.main([*job, "--trace", "t.json", "--json"]) == 0
    chrome = json.loads(Path("t.json").read_text())
    assert chrome_faults(chrome) == []
    steps = [e["name"] for e in chrome["traceEvents"] if e.get("cat") == "step"]
    assert steps == [f"step {n}" for n in range(2, 12)]

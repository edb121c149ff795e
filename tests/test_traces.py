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
from verbs import strict

from cpuopt import cli
from cpuopt.measure.profile import StepTimes
from cpuopt.report import trace

HOSTILE = "</script>\"'\\\n\0\udc80 {}[] Ω <b>"


def chrome_faults(data):
    """What in a trace breaks the format, one line each."""
    faults, named, used, open_ = [], set(), set(), {}
    for i, e in enumerate(data["traceEvents"]):
        meta, track, stack = e["ph"] == "M", (e["pid"], e["tid"]), open_.setdefault((e["pid"], e["tid"]), [])
        texts = [e["name"], *([e["args"]["name"]] if meta else [e["cat"]])]
        times = [] if meta else [e["ts"], e["dur"]]
        right = all(isinstance(x, str) for x in texts) and all(isinstance(n, int) and 0 < n < 2**31 for n in track)
        if not right or not all(type(x) in (int, float) and 0 <= x < float("inf") for x in times):
            faults.append(f"event {i}: a field is missing or of another type")
        elif meta:
            named.add((e["name"], *track))
        elif e["ph"] != "X":
            faults.append(f"event {i}: phase {e['ph']!r}")
        else:
            used.add(track)
            while stack and stack[-1][1] <= e["ts"]:
                stack.pop()
            if any(not start <= e["ts"] <= e["ts"] + e["dur"] <= end for start, end in stack):
                faults.append(f"event {i}: out of order, or overlaps")
            stack.append((e["ts"], e["ts"] + e["dur"]))
    unnamed = {(kind, *track) for track in used for kind in ("process_name", "thread_name")} - named
    return faults + [f"{kind} {pid}, {tid}: none" for kind, pid, tid in sorted(unnamed)]


# What is written obeys them -------------------------------------------------------------------------------------------


def bound(name, layer, phase="forward", variant="vanilla"):
    op = SimpleNamespace(name=name, label=name.title())
    call = SimpleNamespace(op=op, layer=layer, phase=phase, shown_phase=phase, args={}, flops=10, bytes=20)
    return SimpleNamespace(call=call, kernel=SimpleNamespace(variant=variant, name=f"{name}[{variant}]"))


PLACES = {"forward": slice(1, 5), "backward": slice(5, 8)}


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
        runs = [(calls[phase], np.array(times[at])) for phase, at in PLACES.items()]
        steps.append(StepTimes(n + 3, times[0], times[9], [*runs, ([], np.array([now]))]))
    return steps


def profile_of(steps, model="gpt2-tiny"):
    facts = {"B": 2, "T": 8, "threads": 2, "variant": "vanilla", "swaps": [f"a@{HOSTILE}=vanilla"]}
    facts["versions"] = {"python": "3", "cpuopt": HOSTILE}
    return SimpleNamespace(raw=steps, model=model, **facts)


def written(folder, steps, **kw):
    """The trace of a profile, read as strictly as a browser does."""
    trace.write_trace(folder / "t.json", profile_of(steps, **kw))
    return strict((folder / "t.json").read_bytes().decode("utf-8"))


GAPS = st.lists(st.sampled_from([0, 1, 3, 124, 125, 126, 999, 12345, 10**9 + 1]), min_size=10, max_size=40)


@given(gaps=GAPS)
def test_a_trace_obeys_the_rules_for_any_times(gaps, tmp_path_factory):
    assert chrome_faults(written(tmp_path_factory.mktemp("t"), steps_of(gaps))) == []


def test_no_step_and_hostile_names(tmp_path):
    assert chrome_faults(written(tmp_path, [], model=HOSTILE)) == []
    chrome, shown = written(tmp_path, steps_of([100] * 10), model=HOSTILE), HOSTILE.replace("\udc80", "?")
    assert {e["args"]["layer"] for e in chrome["traceEvents"] if "layer" in e["args"]} == {"h.0", shown, "forward"}
    assert chrome["traceEvents"][0]["args"]["name"].startswith(shown)
    assert "\udc80".encode("utf-8", "surrogatepass") not in (tmp_path / "t.json").read_bytes()


def test_times_are_microseconds(tmp_path):
    chrome = written(tmp_path, steps_of([1000] * 20))
    (first, second) = [e for e in chrome["traceEvents"] if e.get("cat") == "step"]
    assert (first["ts"], first["dur"], second["ts"]) == (0, 9, 10)
    assert [e["dur"] for e in chrome["traceEvents"] if e["name"] == "b"] == [1, 1]


# From the command line ------------------------------------------------------------------------------------------------


def test_a_training_run_writes_one(here, capsys):
    Path("text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(500)))
    job = ["train", "--model", "gpt2-tiny", "--data", "text.txt", "-B", "2", "-T", "16", "--variant", "vanilla"]
    job += ["--threads", "4", "--val-every", "0", "--steps", "12"]
    assert cli.main([*job, "--trace", "none/t.json"]) == 2
    assert "--trace none/t.json: cannot be written (No such directory)" in capsys.readouterr().err
    assert not Path("runs").exists()
    assert cli.main([*job, "--trace", "t.json", "--json"]) == 0
    chrome = json.loads(Path("t.json").read_text())
    assert chrome_faults(chrome) == []
    assert [e["name"] for e in chrome["traceEvents"] if e.get("cat") == "step"] == [f"step {n}" for n in range(2, 12)]

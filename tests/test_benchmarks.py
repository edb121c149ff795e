"""The scripts in benchmarks/: what their flags refuse, and tables of pages in docs/."""

import importlib
import json
import re
import subprocess
import sys
from itertools import cycle
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
FLAG = re.compile(r"add_argument\(\s*\"(--sizes?)\"")
SIZED = {path.name: found[1] for path in FOLDER.glob("*.py") if (found := FLAG.search(path.read_text()))}


def test_sizes_are_found():
    assert SIZED.keys() >= {"overhead.py", "rewrites.py", "start.py"}
    assert len(SIZED) == 7


@pytest.mark.parametrize(("name", "wrong"), [*zip(SIZED, cycle(["1by64", "0x4"]))])
def test_a_size_that_is_none_is_refused_in_one_line(name, wrong):
    command = [sys.executable, str(FOLDER / name), SIZED[name], wrong]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert re.search(f"error: argument {SIZED[name]}: '{wrong}'.*expected", last)


PAGES = {"curves": "precision.md", "precision": "precision.md", "finetune": "finetune.md", "plans": "finetune.md"}
"""The page in docs/ that has the tables of a script."""


@pytest.fixture
def script(monkeypatch, request):
    """A script of the folder as a module, which is gone after the test."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module(request.param)
    for name in (request.param, "sizes"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("script", PAGES, indirect=True)
def test_the_page_has_the_tables_of_its_records(script):
    """A record that was not measured on any machine has no table yet."""
    page = (FOLDER.parent / "docs" / PAGES[script.__name__]).read_text()
    for path in (FOLDER / "records").glob(f"*/{script.__name__}.json"):
        lines = "\n".join(script.table(json.loads(path.read_text())))
        assert lines in page, f"{path}: python benchmarks/{script.__name__}.py --show {path} prints what belongs there"


@pytest.mark.parametrize("script", ["precision"], indirect=True)
def test_a_record_of_precision_gives_medians_and_gains(script):
    engine = {"arena_mb": 1640.4, "ms": [50.0, 60.0, 52.0], "float32_ms": [100.0, 104.0, 90.0]}
    others = {name: {**engine, "gain": {"median": 1.92, "low": 1.8, "high": 2.0}} for name in list(script.TYPES)[1:]}
    row = {"model": "gpt2-124M", "size": "4x64", "threads": 2, "types": {"float32": {"arena_mb": 1500.0}, **others}}
    record = {"rows": [row], "rounds": 8, "machine": {"cpu": "Zen 4"}, "time": "2026-11-24T15:00:00"}
    _, _, line, caption = script.table(record)
    other = "1,640 | 52.0 | 1.92 [1.80, 2.00]"
    assert line == f"| gpt2-124M 4x64 | 1,500 | 100.0 | {' | '.join([other] * 3)} |"
    assert "Zen 4; 8 rounds, 2 threads; 2026-11-24." in caption


@pytest.mark.parametrize("script", ["projection"], indirect=True)
def test_a_projection_says_how_far_off_it_was_and_why(script):
    """Two threads take 10 % longer than one foretells, and 16 lose 5 ms more by imbalance than that each doubling."""
    counts, none = (2, 4, 16), {"serial": 0.0, "start": 0.0, "imbalance": 0.0, "shared": 0.0}
    perfect = {str(n): 160 / n for n in counts}
    lost = {str(n): {**none, "shared": perfect[str(n)] * 0.1 * i} for i, n in zip((1, 2, 4), counts, strict=True)}
    lost["16"]["imbalance"] = 5.0
    ms = {"1": 160.0, **{n: x + sum(lost[n].values()) for n, x in perfect.items()}}
    starts = {str(n): {**none, "start": -0.02 / n} for n in counts}  # which take one thread alone a hundredth of 2 ms
    step = {"ms": ms, "lost_ms": lost, "predicted_ms": perfect, "predicted_lost_ms": starts}
    record = {"threads": [1, *counts], "step": step, "start_us": dict.fromkeys(("1", "2", "4", "16"), 0.0)}
    found = script.lacking(record, 2)
    assert found[4]["shared"] == pytest.approx(0, abs=1e-9)
    assert found[16]["imbalance"] == pytest.approx(5)
    *_, last = script.table(record, 2)
    assert last.startswith("| 16 | 19.0 | 14.0 | -26 % |")

"""The scripts in benchmarks/: what their flags refuse, and tables of pages in docs/."""

import json
import re
import subprocess
import sys

import pytest
from verbs import ROOT, script

FOLDER = ROOT / "benchmarks"
FLAG = re.compile(r"add_argument\(\s*\"(--sizes?)\"")
SIZED = {path.name: found[1] for path in FOLDER.glob("*.py") if (found := FLAG.search(path.read_text()))}


def test_sizes_are_found():
    assert SIZED.keys() >= {"overhead.py", "rewrites.py", "start.py"}
    assert len(SIZED) == 7


@pytest.mark.parametrize(("name", "wrong"), [*zip(SIZED, ["1by64", "0x4"], strict=False)])
def test_a_size_that_is_none_is_refused_in_one_line(name, wrong):
    command = [sys.executable, str(FOLDER / name), SIZED[name], wrong]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert re.search(f"error: argument {SIZED[name]}: '{wrong}'.*expected", last)


PAGES = {"curves": "precision.md", "precision": "precision.md", "finetune": "finetune.md", "plans": "finetune.md"}
"""The page in docs/ that has the tables of a script."""


@pytest.mark.parametrize("name", PAGES)
def test_the_page_has_the_tables_of_its_records(name, monkeypatch):
    """A record that was not measured on any machine has no table yet."""
    monkeypatch.syspath_prepend(str(FOLDER))
    table, page = script(f"benchmarks/{name}.py").table, (FOLDER.parent / "docs" / PAGES[name]).read_text()
    for path in (FOLDER / "records").glob(f"*/{name}*.json"):
        lines = "\n".join(table(json.loads(path.read_text())))
        assert lines in page, f"{path}: python benchmarks/{name}.py --show {path} prints what belongs there"


def test_the_page_of_the_race_follows_from_its_records(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    race = script("benchmarks/race.py")
    text, records = race.PAGE.read_text(), sorted(race.RECORDS.glob("race-*.json"))
    other = text.replace(race.BEGIN, race.BEGIN + "\n12 times")
    assert race.page(text, records) == race.page(other, records) == text != other

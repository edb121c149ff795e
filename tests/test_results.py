"""docs/results/ and README's chart follow from benchmarks/records/."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from verbs import ROOT, script


@pytest.fixture
def results(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    return script("benchmarks/results.py")


@pytest.fixture
def copy(results, tmp_path, monkeypatch):
    """A copy of the records, the pages and README, to be changed."""
    for name in ("docs/results", "benchmarks/records"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for file in ("README.md", "docs/speed-light.svg", "docs/speed-dark.svg"):
        shutil.copy(ROOT / file, tmp_path / file)
    records, pages = tmp_path / "benchmarks" / "records", tmp_path / "docs" / "results"
    monkeypatch.setattr(results, "RECORDS", records)
    monkeypatch.setattr(results, "PAGES", pages)
    monkeypatch.setattr(results, "written", lambda whole=results.written: whole(records, pages))
    return tmp_path


def test_every_page_and_the_chart_follow_from_their_records(results, capsys):
    assert (results.main(["--check"]), capsys.readouterr().err) == (0, "")


def changed(file, change):
    record = json.loads(file.read_text())
    change(record)
    file.write_text(json.dumps(record))


def halve(record):
    for r in record["results"]:
        r["step_ms"]["cpuopt"]["median"] /= 2


@pytest.mark.parametrize(
    ("record", "stale"),
    [("zen4/front", ["zen4.md", "speed-light.svg", "speed-dark.svg", "README.md"]), ("xeon/suite", ["xeon.md"])],
)
def test_a_page_that_does_not_follow_is_named_and_mended(results, copy, capsys, record, stale):
    changed(copy / "benchmarks" / "records" / f"{record}.json", halve)
    assert results.main(["--check"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert ([Path(line.split(" is out of date")[0]).name for line in said], results.main([])) == (stale, 0)
    assert results.main(["--check"]) == 0


def test_readmes_sentence_has_the_figures_of_the_results_page(results, copy, capsys):
    readme, overview = (copy / file for file in ("README.md", "docs/results/README.md"))
    said = " ".join(readme.read_text().split())
    for processor, form in (
        ("Xeon with AMX", "{} times as long in float32 and {} times in bf16 on a Xeon with AMX"),
        ("Zen 5", "{} and {} on Zen 5"),
        ("Zen 4", "and {} and {} on Zen 4"),
    ):
        (line,) = (line for line in overview.read_text().splitlines() if f"[{processor}]" in line)
        how, wide, narrow = (cell.strip() for cell in line.split("|")[3:6])
        assert how == "tuned"
        assert form.format(wide, narrow) in said
    assert "with MKL's AVX-512 code" in said
    readme.write_text(readme.read_text().replace(wide, "2.6", 1))
    assert results.main(["--check"]) == 1
    shutil.rmtree(copy / "benchmarks" / "records" / "xeon")
    assert results.main(["--check"]) == 1
    said = capsys.readouterr().err
    assert all(text in said for text in ("README.md is out of date", "xeon.md has no records"))

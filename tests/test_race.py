"""The race: its table follows from records, and docs/race.md from the table."""

from math import log

import pytest
from verbs import ROOT, script


@pytest.fixture(scope="module")
def race():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield script("benchmarks/race.py")


def record(last=2.5):
    recipe = {"B": 12, "T": 64, "steps": 100, "bits": 2.6, "dtype": "bf16", "threads": 2}
    runs = [
        {"side": side, "seed": seed, "points": [[50, s + seed, 2.7 * log(2)], [100, 2 * s + seed, last * log(2)]]}
        for side, s in (("cpuopt", 10.0), ("PyTorch", 21.0))
        for seed in (1, 0, 2)
    ]
    machine = {"cpu": "a processor", "load_average": [0.1], "versions": {"cpuopt": "1"}}
    cold = {"cpuopt": 30.0, "PyTorch": 60.0}
    return {
        "recipe": recipe, "runs": runs, "machine": machine, "cold_s": cold, "peer": "compile", "torch": "2",
        "text": "ab", "time": "2026-01-01T",
    }  # fmt: skip


def test_the_first_validation_at_the_loss_ends_the_race(race):
    points = [[50, 10.0, 3.0], [100, 20.0, 2.6 * log(2)], [150, 30.0, 1.0]]
    assert race.seconds_to(points, 2.6) == 20.0
    assert race.seconds_to(points, 1.0) is None


def test_the_table_has_means_and_intervals(race):
    lines = "\n".join(race.table(record()))
    assert "| cpuopt | 21.0 ± 2.5 | 51.0 ± 2.5 | 210.0 ± 24.8 | 2.500 ± 0.000 | 100 |" in lines
    assert "| PyTorch as it comes, compile | 43.0 ± 2.5 | 103.0 ± 2.5 |" in lines
    assert "PyTorch's seconds over cpuopt's, by seed: 2.05 ± 0.12." in lines


def test_a_side_that_does_not_get_there_has_no_ratio(race):
    lines = "\n".join(race.table(record(last=2.65)))
    assert "| cpuopt | 3 of 3 not there |" in lines
    assert "over cpuopt's" not in lines


def test_the_page_follows_from_the_records(race):
    text = race.PAGE.read_text()
    assert race.page(text, sorted(race.RECORDS.glob("race-*.json"))) == text
    other = text.replace(race.BEGIN, race.BEGIN + "\n12 times")
    assert race.page(other, sorted(race.RECORDS.glob("race-*.json"))) == text

"""`cpuopt verdicts`: false alarms and the power curve, on made-up noise, and the verb itself."""

import json

import numpy as np
import pytest

from cpuopt import cli
from cpuopt.lab import verdicts
from cpuopt.measure.comparison import compare, replayed


def noisy(seed, scatter, factor=1.0):
    rng = np.random.default_rng(seed)
    trial = lambda f: lambda: f * np.exp(scatter * rng.standard_normal())  # noqa: E731
    return compare(trial(1.0), trial(factor), seed=seed, analyses=[96])


def test_quiet_machines_find_small_differences_and_loud_ones_only_large():
    quiet, loud = (verdicts.rates([noisy(seed, scatter) for seed in range(20)]) for scatter in (0.005, 0.05))
    assert quiet["false"] == loud["false"] == 0
    assert quiet["effect"] <= 2 < loud["effect"]
    assert quiet["power"][-1]["found"] >= verdicts.FOUND
    assert quiet["runs"] == sum(quiet["words"].values()) == 20


def test_false_alarms_are_counted():
    found = verdicts.rates([noisy(seed, 0.002, 1.03 if seed % 4 == 0 else 1.0) for seed in range(20)])
    assert found["false"] == 25
    assert 25 < found["at_most"] < 50


def test_a_replay_is_the_comparison_that_would_have_been():
    assert replayed(noisy(0, 0.01), 1.05).word == "slower"
    assert replayed(noisy(0, 0.01), 0.95).word == "faster"


@pytest.mark.parametrize(("k", "n", "p"), [(0, 59, 0.0495), (1, 10, 0.3942), (10, 10, 1.0), (0, 0, 1.0)])
def test_the_bound_is_that_of_the_binomial(k, n, p):
    assert verdicts.bound(k, n) == pytest.approx(p, abs=1e-3)


def test_the_verb_measures_and_keeps(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["verdicts", "--threads", "1", "--seconds", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"] >= 1
    assert cli.main(["runs", "show", "verdicts"]) == 0
    assert "false alarms: " in capsys.readouterr().out

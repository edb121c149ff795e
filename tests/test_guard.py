"""The guard: what it refuses, and that nothing it refused blinds it."""

import json
import math
import random

import pytest

from cpuopt.engine import Step
from cpuopt.train.guard import LEAST, PATIENCE, TRIES, WINDOW, Guard

BAD = [Step(math.nan, 1.0), Step(math.inf, 1.0), Step(3.0, math.nan), Step(3.0, math.inf)]


def steps(n, seed=0):
    rng = random.Random(seed)
    return [Step(4 + 0.1 * rng.gauss(0, 1), 1 + 0.05 * rng.gauss(0, 1)) for _ in range(n)]


def accepted(guard, n, seed=0):
    assert {guard.judge(step) for step in steps(n, seed)} == {""}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("z", [0.0, 6.0])
def test_what_is_not_finite_is_refused_at_once_and_the_next_step_is_not(bad, z):
    guard = Guard(z)
    assert "is nan" in guard.judge(bad) or "is inf" in guard.judge(bad)
    accepted(guard, 200)
    assert guard.judge(bad)
    accepted(guard, 50, seed=1)
    assert all(math.isfinite(x) for window in guard.windows.values() for x in window)


@pytest.mark.parametrize("spike", [Step(50.0, 1.0), Step(4.0, 20.0)])
def test_a_spike_is_refused_even_right_after_a_nan(spike):
    guard = Guard(6.0)
    accepted(guard, WINDOW)
    assert guard.judge(BAD[0])
    assert "standard deviations" in guard.judge(spike)
    assert "standard deviations" in guard.judge(spike)
    accepted(guard, 10, seed=2)


def test_a_spike_needs_enough_steps_to_be_one_and_a_guard_that_looks_for_it():
    young = Guard(6.0)
    accepted(young, LEAST - 1)
    assert young.judge(Step(50.0, 1.0)) == ""
    blind = Guard()
    accepted(blind, WINDOW)
    assert blind.judge(Step(50.0, 1.0)) == ""


def test_a_fall_is_no_spike_and_equal_values_do_not_make_one():
    guard = Guard(6.0)
    accepted(guard, WINDOW)
    assert guard.judge(Step(0.01, 0.0)) == ""
    same = Guard(6.0)
    assert {same.judge(Step(4.0, 1.0)) for _ in range(WINDOW)} == {""}
    assert same.judge(Step(4.000001, 1.0)) == ""
    assert same.judge(Step(4.1, 1.0)) != ""


def test_the_limit_is_where_it_is_said_to_be():
    values = [3.0, 5.0] * 16  # mean 4, deviation 1
    for x, refused in ((9.9, False), (10.1, True)):
        guard = Guard(6.0)
        for v in values:
            guard.judge(Step(v, 1.0))
        assert bool(guard.judge(Step(x, 1.0))) is refused


def test_ten_of_twenty_end_the_run():
    in_a_row = Guard()
    for i in range(PATIENCE):
        assert not in_a_row.exhausted
        in_a_row.judge(BAD[i % 4])
    assert in_a_row.exhausted
    in_turns = Guard()
    for _ in range(TRIES // 2 - 1):
        in_turns.judge(BAD[0])
        in_turns.judge(Step(4.0, 1.0))
        assert not in_turns.exhausted
    in_turns.judge(BAD[0])
    assert in_turns.exhausted
    rare = Guard()
    for _ in range(30):
        rare.judge(BAD[0])
        accepted(rare, 2)
    assert (rare.exhausted, rare.skipped) == (False, 30)


def test_a_guard_goes_on_from_its_state():
    one = Guard(6.0)
    accepted(one, 100)
    one.judge(BAD[0])
    two = Guard(6.0)
    accepted(two, 20, seed=9)  # which a state replaces
    for _ in range(2):
        two.restore(json.loads(json.dumps(one.state())))
    assert two.state() == one.state()
    for step in [*steps(60, seed=5), Step(4.5, 1.0), Step(4.7, 1.0), Step(5.0, 1.0)]:
        assert one.judge(step) == two.judge(step)
    assert one.state() == two.state()
    assert one.skipped > 1

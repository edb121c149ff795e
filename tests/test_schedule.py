"""Learning rates, against the formulas of llm.c's schedulers.h, by hand."""

from math import cos, pi, sqrt

import pytest

from cpuopt.train.schedule import SCHEDULES, rate


def rates(name, steps, warmup=0, peak=1.0, end=0.0):
    return [rate(name, s, steps=steps, warmup=warmup, peak=peak, end=end) for s in range(1, steps + 1)]


def test_constant_linear_and_cosine():
    assert rates("constant", 5, peak=0.3, end=0.1) == [0.3] * 5
    assert rates("linear", 4, peak=2.0, end=1.0) == pytest.approx([2, 1.75, 1.5, 1.25])
    assert rates("cosine", 4) == pytest.approx([1, (1 + cos(pi / 4)) / 2, 0.5, (1 + cos(3 * pi / 4)) / 2])
    assert rates("cosine", 4, peak=3.0, end=1.0)[2] == pytest.approx(2)


def test_wsd_falls_in_the_last_fifth():
    got = rates("wsd", 10, warmup=8)  # the fewest
    assert got == sorted(got[:8]) + sorted(got[8:], reverse=True)
    assert got[-1] < max(got)
    assert rates("wsd", 20) == pytest.approx([1] * 16 + [1, 1 - sqrt(0.25), 1 - sqrt(0.5), 1 - sqrt(0.75)])


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_warms_up_to_its_peak_and_never_leaves_its_bounds(name):
    got = rates(name, 50, warmup=10, peak=0.5, end=0.05)
    assert got[:10] == pytest.approx([0.05 * (i + 1) for i in range(10)])
    assert got[9] == got[10] == 0.5
    assert all(0.05 <= x <= 0.5 for x in got[10:])
    assert sorted(got[10:], reverse=True) == got[10:]

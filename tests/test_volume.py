"""The model of several hosts in benchmarks/ranks.py: bytes of a program, and the break-even that follows."""

import sys
from math import prod
from pathlib import Path

import pytest


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import ranks

    yield ranks
    for name in ("ranks", "jobs"):
        del sys.modules[name]


@pytest.mark.parametrize("hosts", [2, 4])
def test_a_rank_sends_what_it_does_not_own_and_gets_its_slice_to_all(ranks, hosts):
    gradients = 4 * sum(prod(p.shape) for p in ranks.parse("gpt2-tiny").module().parameters())
    v = ranks.volume("gpt2-tiny", 2, 16, hosts)
    assert v.reduce == pytest.approx(gradients * (1 - 1 / hosts), rel=0.1)  # slices are whole blocks
    assert v.gather == pytest.approx(v.reduce, rel=0.01)


def test_in_bfloat16_weights_that_products_alone_read_are_half_the_bytes(ranks):
    whole, half = (ranks.volume("gpt2-nano", 2, 16, 2, dtype) for dtype in ("float32", "bf16"))
    named = ranks.parse("gpt2-nano").module().named_parameters()
    narrow = sum(prod(p.shape) for name, p in named if name.startswith("h.") and len(p.shape) == 2)
    assert whole.gather - half.gather == pytest.approx(narrow * 2 / 2, rel=0.05)
    assert half.reduce == pytest.approx(whole.reduce, rel=0.05)


def test_at_the_break_even_all_hosts_train_as_fast_as_one(ranks):
    v = ranks.Volume(reduce=3_000_000, gather=1_000_000)
    for hosts in (2, 5):
        alone = v.break_even_s(hosts, 1e6, hidden=0.5)
        assert hosts / v.step_s(alone, 1e6, hidden=0.5) == pytest.approx(1 / alone)
    assert v.step_s(1.0, 1e6) == 5.0

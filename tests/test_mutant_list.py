"""The list of `make mutants` is in order: each can be planted, and names tests that are there."""

import mutants
import pytest

EVERY = mutants.read()


@pytest.mark.parametrize("mutant", EVERY, ids=lambda m: m.what)
def test_a_mutant_can_be_planted(mutant):
    assert [*mutant.faults()] == []


def test_there_are_fifty_and_each_is_another():
    assert len({m.what for m in EVERY}) == len({(m.file, m.old) for m in EVERY}) == len(EVERY) == 50

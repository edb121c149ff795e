"""The lists of mutants and of long tests are in order: a mutant can be planted, and tests that they name exist."""

import drawn
import mutants
import pytest

EVERY = mutants.read()


@pytest.mark.parametrize("mutant", EVERY, ids=lambda m: m.what)
def test_a_mutant_can_be_planted(mutant):
    assert [*mutant.faults()] == []


def test_there_are_fifty_and_each_is_another():
    assert len({m.what for m in EVERY}) == len({(m.file, m.old) for m in EVERY}) == len(EVERY) == 50


def test_what_is_long_exists():
    for name in (line for line in drawn.LONG if not line.startswith("#")):
        file, _, test = name.partition("::")
        assert "def " + test + "(" * bool(test) in (drawn.HERE / file).read_text(), name

"""The list of `make mutants` is in order: each can be planted, and names tests that are there."""

from dataclasses import replace

import mutants
import pytest

EVERY = mutants.read()


@pytest.mark.parametrize("mutant", EVERY, ids=lambda m: m.what)
def test_a_mutant_can_be_planted(mutant):
    assert [*mutant.faults()] == []


def test_there_are_forty_two_and_each_is_another():
    assert len({m.what for m in EVERY}) == len({(m.file, m.old) for m in EVERY}) == len(EVERY) == 42


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"old": "import"}, "times; expected once"),
        ({"old": "no such text"}, "0 times; expected once"),
        ({"new": "if :"}, "is no Python"),
        ({"new": EVERY[0].old}, "changes nothing"),
        ({"tests": ("tests/test_data.py::test_no_such_thing",)}, "there is no such test"),
        ({"tests": ("tests/test_checkpoint.py::test_a_full_disk",)}, "none of the quick tests"),
    ],
)
def test_one_that_cannot_be_planted_is_noticed(change, said):
    assert said in " ".join(replace(EVERY[0], **change).faults())

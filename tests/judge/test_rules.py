"""The rules on a candidate's text: each stops what no other does, and no honest text is refused."""

from __future__ import annotations

import inspect

import pytest
from candidates import HONEST_RELU, ONLY, RUN, TWINS, as_text, package, refused

from cpuopt.errors import UserError
from cpuopt.judge import rules
from cpuopt.judge.session import Stopped, op_named, read


def test_the_corpus_is_as_large_as_it_should_be() -> None:
    hostile = [text for _, _, text in refused()] + [text for of in RUN.values() for text in of.values()]
    assert len(set(hostile)) == len(hostile) >= 150
    classes = [of for of, _, _ in refused()]
    assert {of for of in classes if classes.count(of) < 2} == set()
    assert {*classes, *RUN} == TWINS.keys()
    assert len(package()) + len(TWINS) >= 60


def test_each_rule_has_a_text_that_it_alone_stops() -> None:
    assert ONLY.keys() == rules.RULES.keys()
    for rule, text in ONLY.items():
        with pytest.raises(rules.RefusedError) as e:
            rules.read(text)
        assert e.value.rule == rule, (rule, str(e.value))
        assert rules.read(text, without={rule}).kernels, rule


def test_hostile_texts_are_refused_by_a_rule() -> None:
    for of, name, text in refused():
        with pytest.raises(Stopped) as e:
            read(text, op_named("relu_forward"))
        assert e.value.more["verdict"] == "refused by rule", (of, name)
        assert e.value.more["rule"] in (*rules.RULES, "task")


def test_what_was_refused_is_said_with_its_line_and_what_is_allowed() -> None:
    with pytest.raises(rules.RefusedError, match=r"line 5: import os; allowed are numpy as np, math, numba's prange"):
        rules.read(ONLY["import"])


def test_honest_texts_are_allowed() -> None:
    for of, text in TWINS.items():
        assert rules.read(text).kernels == (("relu_forward", "mine"),), of
    for op, variant, name in package():
        assert read(as_text(variant, name), op_named(op)).variant == "mine"


def test_texts_that_must_run_are_allowed() -> None:
    for of in RUN.values():
        for name, text in of.items():
            assert rules.read(text).kernels, name


def test_a_name_of_the_toolkit_that_may_be_imported_is_there() -> None:
    from importlib import import_module

    assert {"load", "tanh", "exp"} <= rules.usable("lanes")
    assert not {"Lanes", "ir", "types", "define", "intrinsic"} & rules.usable("lanes")
    for module, names in rules.MODULES.items():
        assert {n for n in names if module != "cpuopt" and not hasattr(import_module(module), n)} == set()


def test_no_text_learns_an_address() -> None:
    """The names that are left out are all whose code makes a number of an address, or an address of a number."""
    from importlib import import_module

    found = set()
    for module in rules.TOOLKIT.split():
        for name, x in vars(import_module(f"cpuopt.kernels.toolkit.{module}")).items():
            code = inspect.getsource(x._defn) if type(x).__name__ == "_Intrinsic" else ""
            found |= {name} if "ptrtoint" in code or "inttoptr" in code else set()
    assert found | {"listed_pair_product"} == rules.ADDRESSES
    assert not any(rules.ADDRESSES & rules.usable(module) for module in rules.TOOLKIT.split())


def test_an_unknown_op_is_said() -> None:
    with pytest.raises(UserError, match="no such op; did you mean 'relu_forward'"):
        op_named("relu_forwards")
    assert read(HONEST_RELU, op_named("relu_forward")).variant == "mine"

"""The rules on a candidate's text: each stops what no other does, and no honest text is refused."""

import contextlib
import inspect
import time

import pytest
from candidates import ONLY, RIGHT, RUN, TWINS, package, refused, relu

from cpuopt.errors import RefusedError
from cpuopt.judge import rules
from cpuopt.judge.session import read
from cpuopt.lab.ab import op_named


def test_the_corpus_is_as_large_as_it_should_be():
    hostile = [text for _, _, text in refused()] + [text for of in RUN.values() for text in of.values()]
    assert len(set(hostile)) == len(hostile) >= 150
    classes = [of for of, _, _ in refused()]
    assert {of for of in classes if classes.count(of) < 2} == set()
    assert {*classes, *RUN} <= TWINS.keys()
    assert len(package()) + len(TWINS) >= 60


def test_each_rule_has_a_text_that_it_alone_stops():
    assert ONLY.keys() == rules.RULES.keys()
    for rule, text in ONLY.items():
        with pytest.raises(RefusedError) as e:
            rules.read(text)
        assert e.value.witness["rule"] == rule, (rule, str(e.value))
        assert rules.read(text, without={rule}), rule


def test_hostile_texts_are_refused_by_a_rule():
    for of, name, text in refused():
        with pytest.raises(RefusedError) as e:
            read(text, op_named("relu_forward"))
        assert e.value.word == "refused by rule", (of, name)
        assert e.value.witness["rule"] in (*rules.RULES, "task")


def test_what_was_refused_is_said_with_its_line_and_what_is_allowed():
    with pytest.raises(RefusedError, match=r"line 5: import os; allowed are numpy as np, math, numba's prange"):
        rules.read(ONLY["import"])


def test_honest_texts_are_allowed():
    for name, text in [*TWINS.items(), *RIGHT.items()]:
        assert rules.read(text) == (("relu_forward", "mine"),), name
    for (op, _), text in package().items():
        assert read(text, op_named(op)) == "mine"


NESTED, LOCAL = "lambda a: " * 90, "    b = 1\n"
SHAPES = {
    "nested functions of sizes": relu(f"def f(a):\n    return ({','.join([f'{NESTED}1'] * 200)})"),
    "locals times functions": relu("def f(a):\n" + LOCAL * 4000 + "    c = lambda s: b\n" * 3000 + "    return 1"),
    "a long tuple": relu("X = (" + "1," * 90_000 + ")"),
    "a long comparison": relu(before="x = " + "<".join(["1"] * 90_000)),
    "many constants": relu("\n".join(f"A{i} = {i}" for i in range(15_000))),
    "many names in one": relu("=".join(f"A{i}" for i in range(20_000)) + " = 1"),
    "many functions": relu("\n".join(f"def f{i}(a):\n    return a" for i in range(6000))),
    "an encoding": "# coding: utf-8\n" + relu(before="x = 1\n" * 9000),
    "brackets without end": relu(before="x = " + "a[(" * 90),
    "a large number": relu("X = 0x" + "f" * 200_000),
    "dictionaries in dictionaries": "X = " + "{1: " * 190 + "1" + "}" * 190,
    "signs": relu(before="x = " + "-" * 100_000 + "1"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_reading_a_text_of_any_shape_takes_little_time(name):
    assert len(SHAPES[name]) <= rules.LONGEST
    start = time.process_time()
    with contextlib.suppress(RefusedError):
        rules.read(SHAPES[name])
    assert time.process_time() - start < 2


def test_a_name_of_the_toolkit_that_may_be_imported_is_there():
    from importlib import import_module

    assert {"load", "tanh", "exp"} <= rules.usable("lanes")
    assert not {"Lanes", "ir", "types", "define", "intrinsic"} & rules.usable("lanes")
    for module, names in rules.MODULES.items():
        assert {n for n in names if module != "cpuopt" and not hasattr(import_module(module), n)} == set()


def test_no_text_learns_an_address():
    """The names that are left out are all whose code makes a number of an address, or an address of a number."""
    from importlib import import_module

    found = set()
    for module in rules.TOOLKIT.split():
        for name, x in vars(import_module(f"cpuopt.kernels.toolkit.{module}")).items():
            code = inspect.getsource(x._defn) if type(x).__name__ == "_Intrinsic" else ""
            found |= {name} if "ptrtoint" in code or "inttoptr" in code else set()
    assert found | {"listed_pair_product"} == rules.ADDRESSES
    assert not any(rules.ADDRESSES & rules.usable(module) for module in rules.TOOLKIT.split())

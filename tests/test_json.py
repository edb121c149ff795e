"""The one way from dataclasses to JSON and back: what it builds, what it refuses, and how it says so."""

import json
from dataclasses import dataclass, field
from math import inf, nan
from typing import Any, ClassVar, NotRequired, TypedDict

import pytest

from cpuopt.files.reading import from_json, misfit, parse_json, to_json


@dataclass(frozen=True)
class Point:
    x: int
    y: float = 0.5


class Named(TypedDict):
    name: str
    at: NotRequired[Point]


@dataclass
class Shape:
    JSON: ClassVar = ("points", "size", "seen")
    points: tuple[Point, ...]
    seen: frozenset[str] = frozenset()
    hidden: list[Any] = field(default_factory=list)

    @property
    def size(self):
        return len(self.points)


SHAPE = Shape((Point(1, 2.5), Point(3)), frozenset("ba"))


def test_an_object_comes_back():
    text = json.dumps(to_json(SHAPE))
    assert text == '{"points": [{"x": 1, "y": 2.5}, {"x": 3, "y": 0.5}], "size": 2, "seen": ["a", "b"]}'
    assert from_json(Shape, parse_json(text)) == SHAPE
    assert from_json(dict[str, Shape | None], {"a": to_json(SHAPE), "b": None}) == {"a": SHAPE, "b": None}


def test_what_a_class_does_not_write_is_not_read():
    assert from_json(Shape, {"points": [], "hidden": [1], "size": 7, "more": {}}) == Shape(())


def test_a_typed_dict_keeps_what_it_does_not_know():
    assert from_json(Named, {"name": "a", "at": {"x": 1}, "more": 2}) == {"name": "a", "at": Point(1), "more": 2}


def test_what_is_not_finite_becomes_none():
    found = to_json({"a": (nan, [inf, -inf]), "b": Point(1, nan)})
    assert found == {"a": [None, [None, None]], "b": {"x": 1, "y": None}}


@pytest.mark.parametrize(
    ("hint", "x", "said"),
    [
        *((Point, {}, "it lacks 'x'"), (Point, [], "it is []; expected an object")),
        *((Point, {"x": x}, f"x is {x}; expected a whole number") for x in (1.5, True)),
        (Point, {"x": 1, "y": 1e301}, "y is 1e+301; expected a number between -1e+300 and 1e+300"),
        (Point, {"x": 1 << 63}, "x is 9223372036854775808; expected a whole number between -9.22e+18 and 9.22e+18"),
        (Shape, {"points": [{"x": 1}, {"x": "1"}]}, "points[1].x is '1'; expected a whole number"),
        (Shape, {"points": [], "seen": "ab"}, "seen is 'ab'; expected a list"),
        (Named, {"name": "a", "at": {}}, "at lacks 'x'"),
        (dict[str, list[int]], {"a": [1, None]}, "a[1] is None; expected a whole number"),
        (int | None, "x", "it is 'x'; expected a whole number"),
    ],
)
def test_what_does_not_fit_is_named(hint, x, said):
    with pytest.raises(ValueError, match=r"expected|lacks") as refused:
        from_json(hint, x)
    assert str(refused.value) == misfit(x, hint) == said
    assert misfit(x, Any) == ""

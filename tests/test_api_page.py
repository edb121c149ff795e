"""docs/api.md: every public name, as the docstrings say it, with examples that run."""

import doctest
import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

import cpuopt
from cpuopt import nn

PAGE = Path(__file__).parent.parent / "docs" / "api.md"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("api_page", PAGE.with_suffix(".py"))
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


def headed(text):
    """The names that have a heading, with what stands below each."""
    parts = re.split(r"(?m)^#{2,4} `([\w.]+)[^\n]*$", text)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_the_page_is_that_of_these_docstrings(script):
    assert PAGE.read_text(encoding="utf-8") == script.page(), "run: python docs/api.py"


def test_every_public_name_is_described():
    found = headed(PAGE.read_text(encoding="utf-8"))
    assert {f"cpuopt.{name}" for name in cpuopt.__all__} == {name for name in found if name.startswith("cpuopt.")}
    assert {name for name, x in vars(nn).items() if isinstance(x, type) and issubclass(x, nn.Module)} <= found.keys()
    assert {name for name, f in vars(cpuopt.functional).items() if name.islower() and inspect.isfunction(f)} - {
        "current",
        "__getattr__",
    } <= found.keys()
    assert [name for name, text in found.items() if not text.strip()] == []
    assert all(f"| `{op}` |" in found["cpuopt.ops"] for op in cpuopt.ops.ALL if not op.startswith("test_"))


def test_a_new_name_is_noticed(script, monkeypatch):
    monkeypatch.setattr(cpuopt, "__all__", [*cpuopt.__all__, "spread"])
    monkeypatch.setattr(cpuopt, "spread", lambda x: x, raising=False)
    assert "`cpuopt.spread(x)`" in script.page()
    with pytest.raises(AssertionError):
        test_every_public_name_is_described()


@pytest.mark.parametrize("name", [n for n in cpuopt.__all__ if not isinstance(getattr(cpuopt, n), ModuleType)])
def test_a_docstring_names_every_parameter(name):
    x = getattr(cpuopt, name)
    doc = f"{inspect.getdoc(x)}\n{inspect.getdoc(x.__init__) if isinstance(x, type) else ''}"
    parameters = [p for p in inspect.signature(x).parameters if p != "self"]
    assert [p for p in parameters if not re.search(rf"\b{p}\b", doc)] == []


def test_the_examples_of_the_page_run():
    text = PAGE.read_text(encoding="utf-8").replace("```", "")
    examples = doctest.DocTestParser().get_doctest(text, {}, PAGE.name, str(PAGE), 0)
    found = doctest.DocTestRunner().run(examples)
    assert found.attempted > 15
    assert found.failed == 0

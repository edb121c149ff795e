"""The public names: each is in the reference of the site, described, and named in docs/api.md, whose recipes run."""

import doctest
import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest
from test_pages import BLOCK
from verbs import script

import cpuopt

DOCS = Path(__file__).parents[1] / "docs"
reference = script("docs/reference.py")
NAMES = [name for names in reference.GROUPS.values() for name in names]
PLAIN = [n for n in cpuopt.__all__ if not isinstance(getattr(cpuopt, n), ModuleType)]


def test_every_public_name_is_in_the_reference_once():
    modules = {n for n in cpuopt.__all__ if n not in PLAIN and not any(f"cpuopt.{n}." in name for name in NAMES)}
    assert {f"cpuopt.{n}" for n in {*PLAIN, *modules}} - {*NAMES} == set()
    assert len(NAMES) == len(set(NAMES)) > 70
    assert {"cpuopt.functional.gelu", "cpuopt.nn.Linear", "cpuopt.ops.declaration.inp"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_described_where_it_is_written(name):
    found = reference.find(name)
    module, _, symbol = reference.home(name).rpartition(".")
    assert vars(importlib.import_module(module))[symbol] is found
    assert len(inspect.getdoc(found) or "") > 10
    assert f"::: {module}.{symbol}\n" in reference.page()


def test_the_members_of_a_class_are_there_and_described():
    assert reference.MEMBERS.keys() <= set(NAMES)
    shown = [(reference.find(name), m) for name, members in reference.MEMBERS.items() for m in members]
    assert [m for x, m in shown if not inspect.getdoc(getattr(x, m, None))] == []


@pytest.mark.parametrize("name", PLAIN)
def test_a_docstring_names_every_parameter(name):
    x = getattr(cpuopt, name)
    doc = f"{inspect.getdoc(x)}\n{inspect.getdoc(x.__init__) if isinstance(x, type) else ''}"
    parameters = [p for p in inspect.signature(x).parameters if p != "self"]
    assert [p for p in parameters if not re.search(rf"\b{p}\b", doc)] == []


def test_the_examples_of_docstrings_run():
    finder, runner = doctest.DocTestFinder(exclude_empty=True), doctest.DocTestRunner()
    examples = {t.name: t for name in NAMES for t in finder.find(reference.find(name), name, globs={}) if t.examples}
    results = [runner.run(t) for t in examples.values()]
    assert sum(r.attempted for r in results) > 15
    assert sum(r.failed for r in results) == 0


@pytest.mark.slow  # every example of docs/api.md
def test_the_recipes_run_one_after_the_other(tmp_path, measured, monkeypatch, capsys):
    """A reader pastes them into one session; kernels need a file, so the page is one."""
    monkeypatch.chdir(tmp_path)
    code = [m[2] for m in BLOCK.finditer((DOCS / "api.md").read_text(encoding="utf-8")) if m[1] == "python"]
    assert len(code) == 9
    (tmp_path / "recipes.py").write_text("import cpuopt\nfrom cpuopt import ops\n" + "\n".join(code))
    script(tmp_path / "recipes.py")
    assert "gelu_forward" in capsys.readouterr().out
    assert "<title>" in (tmp_path / "report.html").read_text()

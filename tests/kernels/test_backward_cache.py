"""Generated backwards on disk."""

import importlib
import shutil
from pathlib import Path

import pytest
from verbs import process

from cpuopt import ad


@pytest.mark.parametrize("file", ["reverse.py", "lower/rows.py"])
def test_a_changed_generator_writes_its_backwards_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str):
    """In whatever folder of it the change is."""
    load = importlib.import_module("cpuopt.kernels.generated.load")
    shutil.copytree(Path(ad.__file__).parent, tmp_path / "ad")
    monkeypatch.setattr(ad, "__file__", str(tmp_path / "ad" / "__init__.py"))
    before = load._generator.__wrapped__()
    assert load._generator.__wrapped__() == before
    with (tmp_path / "ad" / file).open("a") as f:
        f.write("# changed")
    assert load._generator.__wrapped__() != before


KEYS = """
from cpuopt.kernels.registry import KERNELS
import cpuopt.kernels
print({n: k.function.__module__ for n, k in KERNELS.items() if "generated" in k.function.__module__})
"""


def test_another_process_finds_the_same_backwards() -> None:
    """The functions that a forward calls are part of a name by their sources, and not by their addresses."""
    said = {process(code=KEYS).stdout for _ in "ab"}
    assert len(said) == 1
    assert "attention_backward_" in said.pop()


def called(x: float) -> float:
    return x * x


def test_a_changed_function_that_a_forward_calls_writes_its_backward_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    load = importlib.import_module("cpuopt.kernels.generated.load")

    def forward(y: list[float], x: list[float]) -> None:
        y[0] = called(x[0])

    before = load._sources(forward)
    assert load._sources(forward) == before
    monkeypatch.setitem(globals(), "called", lambda x: x + x)
    assert load._sources(forward) != before

"""The scripts in benchmarks/: what their flags refuse, and tables of pages in docs/."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
FLAG = re.compile(r"add_argument\(\s*\"(--sizes?)\"")
SIZED = {path.name: found[1] for path in FOLDER.glob("*.py") if (found := FLAG.search(path.read_text()))}


def test_sizes_are_found():
    assert SIZED.keys() >= {"overhead.py", "rewrites.py", "start.py"}
    assert len(SIZED) == 7


@pytest.mark.parametrize(("name", "wrong"), [*zip(SIZED, ["1by64", "0x4"], strict=False)])
def test_a_size_that_is_none_is_refused_in_one_line(name, wrong):
    command = [sys.executable, str(FOLDER / name), SIZED[name], wrong]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert re.search(f"error: argument {SIZED[name]}: '{wrong}'.*expected", last)


PAGES = {"curves": "precision.md", "precision": "precision.md", "finetune": "finetune.md", "plans": "finetune.md"}
"""The page in docs/ that has the tables of a script."""


@pytest.fixture
def script(monkeypatch, request):
    """A script of the folder as a module, which is gone after the test."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module(request.param)
    for name in (request.param, "sizes"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("script", PAGES, indirect=True)
def test_the_page_has_the_tables_of_its_records(script):
    """A record that was not measured on any machine has no table yet."""
    page = (FOLDER.parent / "docs" / PAGES[script.__name__]).read_text()
    for path in (FOLDER / "records").glob(f"*/{script.__name__}*.json"):
        lines = "\n".join(script.table(json.loads(path.read_text())))
        assert lines in page, f"{path}: python benchmarks/{script.__name__}.py --show {path} prints what belongs there"


@pytest.mark.parametrize("script", ["int8_kernels"], indirect=True)
def test_products_in_int8_are_those_of_integers(script):
    draw = np.random.default_rng(0)
    (a, _), (b, scale) = (script.quantized(draw.standard_normal((9, 1500), np.float32)) for _ in range(2))
    assert (np.abs(b).max(axis=1) == 127).all()
    assert (b == np.rint(b)).all()
    assert scale.shape == (9, 1)
    for k in (64, script.EXACT, 1500):  # the last one is summed in float64
        assert (script.product(a[:, :k], b[:, :k].T) == a[:, :k].astype(int) @ b[:, :k].T.astype(int)).all()
    quarters = np.full((1, 40_001), 0.25, np.float32)
    quarters[0, 0] = 127
    rounded, _ = script.quantized(quarters, at_random=True)
    assert set(rounded[0, 1:]) == {0, 1}
    assert abs(rounded[0, 1:].mean() - 0.25) < 0.01  # 4.6 deviations
    assert script.bf16(np.array([1 + 2**-8, 1 + 3 * 2**-8], np.float32)).tolist() == [1, 1 + 2**-6]

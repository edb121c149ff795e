"""Every example runs as its reader would run it, and learns."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted(Path(__file__).parent.parent.glob("examples/**/*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_learns(path, tmp_path):
    environment = {name: v for name, v in os.environ.items() if name != "NUMBA_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120
    )
    said = [line for line in done.stderr.splitlines() if not re.match(r"cpuopt: compiling \d+ kernels, once", line)]
    assert (done.returncode, said) == (0, [])
    losses = [float(x) for x in re.findall(r"\bloss +(\d+\.\d+)", done.stdout)]
    assert len(losses) >= 3
    assert losses[-1] < 0.5 * losses[0]
    assert min(losses) == losses[-1]
    assert not list(tmp_path.iterdir())


def test_a_model_of_ones_own_is_short():
    (mlp,) = (path for path in EXAMPLES if path.name == "mlp.py")
    assert len(mlp.read_text().splitlines()) < 30

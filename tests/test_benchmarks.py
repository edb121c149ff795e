"""The scripts in benchmarks/: what their flags refuse. What they measure is on docs/results/."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
FLAG = re.compile(r"add_argument\(\s*\"(--sizes?)\"")
SIZED = {path.name: found[1] for path in FOLDER.glob("*.py") if (found := FLAG.search(path.read_text()))}


def test_sizes_are_found():
    assert SIZED.keys() >= {"overhead.py", "rewrites.py", "start.py"}
    assert len(SIZED) == 6


@pytest.mark.parametrize("name", SIZED)
@pytest.mark.parametrize("wrong", ["1by64", "0x4"])
def test_a_size_that_is_none_is_refused_in_one_line(name, wrong):
    command = [sys.executable, str(FOLDER / name), SIZED[name], wrong]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert re.search(f"error: argument {SIZED[name]}: '{wrong}'.*expected", last)

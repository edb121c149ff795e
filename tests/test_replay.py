"""`make replay`: a moved helper changes nothing, and a changed constant is found in the kernels that use it alone."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_a_comment_replays_and_a_constant_does_not(tmp_path):
    tree = tmp_path / "tree"
    subprocess.run(["git", "clone", "--quiet", ROOT, tree], check=True)

    def replay():
        command = [sys.executable, "tests/replay.py", "HEAD", "--target", "this processor", "--only", "*_decode*"]
        return subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=900)

    lanes, gelu = (tree / "cpuopt/kernels" / name for name in ("toolkit/fastmath.py", "optimized/gelu.py"))
    gelu.write_text(gelu.read_text().replace("\nCUBIC", "\n# a comment\nCUBIC"))
    same = replay()
    assert (same.returncode, same.stdout.splitlines()[-1]) == (0, "equal to HEAD"), same.stdout + same.stderr
    lanes.write_text(re.sub("^TANH_MAX = .*", "TANH_MAX = np.float32(8.5)", lanes.read_text(), flags=re.M))
    other = replay()
    assert other.returncode == 1, other.stdout + other.stderr
    found = re.findall(r"^this processor: (\w+\[\w+\]).*: .*helper tanh", other.stdout, re.M)
    assert {*found} == {"attention_decode[optimized]", "gqa_decode[optimized]"}, other.stdout

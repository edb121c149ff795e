"""An op is added in three places: CONTRIBUTING's first example, word for word, in a copy of the package."""

import json
import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
from test_pages import BLOCK, CHANGED

ROOT = Path(__file__).parent.parent
TRAIN = """
import json
import numpy as np
from cpuopt import Engine, nn, ops
from cpuopt import functional as F
from cpuopt.kernels import registry

class MLP(nn.Module):
    def __init__(self):
        self.fc, self.out, self.loss = nn.Linear(2, 32), nn.Linear(32, 2), nn.CrossEntropyLoss()

    def forward(self, x, y):
        return self.loss(self.out(F.relu_squared(self.fc(x))), y)

rng = np.random.default_rng(0)
x = rng.standard_normal((64, 2)).astype("float32")
y = (x[:, 0] * x[:, 1] > 0).astype("int32")
engine = Engine(MLP(), {"x": (x.shape, "float32"), "y": (y.shape, "int32")}, progress=lambda *of: None)
losses = [engine.step(x=x, y=y, lr=2e-2).loss for _ in range(40)]
used = {b.kernel.name for b in engine.calls if "relu_squared" in b.kernel.name}
found = {"ops": [name for name in ops.ALL if name.startswith("relu_squared")], "used": sorted(used)}
found |= {"variants": registry.variants("relu_squared_backward"), "losses": [losses[0], losses[-1]]}
print(json.dumps(found))
"""


def example():
    """The files of the example, each with its text, and the lines that it adds to files that are there."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    text = text[text.index("### An op\n") : text.index("## Add a model\n")]
    files, added = {}, {}
    for block in BLOCK.finditer(text):
        if block[1]:
            name, lines = CHANGED.findall(text[: block.start()])[-1], block[2].splitlines(keepends=True)
            if block[1] == "python":
                files[name] = block[2]
            else:
                added[name] = "".join(line[1:] for line in lines if line.startswith("+"))
    return files, added


def digests(folder):
    """A digest of each source file, by its path."""
    return {str(f.relative_to(folder)): sha256(f.read_bytes()).hexdigest() for f in sorted(folder.rglob("*.py"))}


def python(folder, *args):
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([sys.executable, *args], cwd=folder, env=env, capture_output=True, text=True)


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """A copy of the package with the op of the example, and the files that differ from this one."""
    folder = tmp_path_factory.mktemp("extended")
    copytree(ROOT / "cpuopt", folder / "cpuopt", ignore=ignore_patterns("__pycache__"))
    before = digests(folder)
    files, added = example()
    for name, text in files.items():
        (folder / name).write_text(text)
    for name, text in added.items():
        with open(folder / name, "a") as file:
            file.write("\n\n" + text)
    after = digests(folder)
    return folder, [name for name in after if after[name] != before.get(name)]


def test_the_example_writes_in_three_places(extended):
    places = ("kernels/vanilla/relu_squared", "nn/functional", "ops/relu_squared")
    assert extended[1] == [f"cpuopt/{name}.py" for name in places]


def test_a_model_trains_with_the_new_op(extended):
    done = python(extended[0], "-c", TRAIN)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ops"] == ["relu_squared_forward", "relu_squared_backward"]
    assert found["variants"] == ["vanilla", "generated"]
    assert found["used"] == ["relu_squared_backward[vanilla]", "relu_squared_forward[vanilla]"]
    assert found["losses"][1] < 0.5 * found["losses"][0]


IN_ORDER = """
import json, pkgutil
kept = pkgutil.iter_modules
pkgutil.iter_modules = lambda path=None, prefix="": (ORDER)(kept(path, prefix))
from cpuopt import ops
found = ([op.name, [o.name for o in op.backwards], sorted(o.name for o in op.fusions)] for op in ops.ALL.values())
print(json.dumps([*found]))
"""


def test_the_order_in_which_files_are_imported_changes_nothing():
    orders = ("list", "lambda all: list(all)[::-1]", "lambda all: sorted(all, key=lambda m: m.name[::-1])")
    found = [python(ROOT, "-c", IN_ORDER.replace("ORDER", order)) for order in orders]
    assert [f.stderr for f in found] == ["", "", ""]
    assert found[0].stdout == found[1].stdout == found[2].stdout != ""

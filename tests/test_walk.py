"""The walk of a new user: ReLU squared as an op of one's own, and a faster variant of it, through every verb."""

import importlib.util
import json
import linecache
import re
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from verbs import fails

import cpuopt.kernels
from cpuopt import cli, files, ops
from cpuopt.check import gate
from cpuopt.check.cases import Case
from cpuopt.isolate.child import Child
from cpuopt.kernels import registry
from cpuopt.kernels.compile import cache
from cpuopt.kernels.toolkit.threads import cores

RELU2 = """
from numba import prange

from cpuopt import differentiable
from cpuopt.ops.declaration import N, inp, out

@differentiable(out("out", N), inp("inp", N), flops=2 * N)
def relu2(out, inp):
    for i in prange(inp.shape[0]):
        x = max(inp[i], 0.0)
        out[i] = x * x
"""
SIZES = ("--sizes", "N=4096")
QUICK = ("--rounds", "6", "--threads", str(cores()))
"""On fewer threads than there are cores, a second process would check the kernels on all."""


@pytest.fixture(autouse=True)
def _here(tmp_path, measured, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "alone", lambda *what: nullcontext())  # another test may tune meanwhile
    Path("relu2.py").write_text(RELU2)


@pytest.fixture
def anew():
    """Forget what files have defined, as a process of its own does not know it."""
    every, kernels, path = dict(ops.ALL), dict(registry.KERNELS), list(sys.path)

    def anew():
        for there, before in (ops.ALL, every), (registry.KERNELS, kernels):
            there.clear()
            there.update(before)
        sys.path[:] = path
        for name in ("relu2", "mine", "net", "helper"):
            sys.modules.pop(name, None)
        linecache.checkcache()
        importlib.invalidate_caches()

    return anew


@pytest.fixture
def run(capsys, anew):
    """Run a command as a process of its own would, and return its exit status and what it printed."""

    def command(*words):
        anew()
        capsys.readouterr()
        status, said = cli.main(list(words)), capsys.readouterr()
        assert "Traceback" not in said.out + said.err
        return status, said.out, said.err

    return command


def test_an_op_of_ones_own_through_every_verb(run):
    status, out, _ = run("kernels", "--kernels", "relu2.py")
    assert status == 0
    assert re.search(r"relu2_forward +vanilla *\nrelu2_backward +vanilla, generated", out)

    status, out, _ = run("new-kernel", "relu2", "--backward", "--kernels", "relu2.py")
    assert (status, "def relu2_backward(dinp, dinp_add, dout, inp):" in out) == (0, True)

    status, out, _ = run("new-kernel", "relu2_forward", "--kernels", "relu2.py", "--out", "mine.py")
    assert (status, out) == (0, "mine.py\nnext: cpuopt lab mine.py --sizes N=98304\n")
    text = Path("mine.py").read_text()
    assert '@kernel(relu2.forward, "mine")\ndef relu2_forward(out, inp):\n' in text
    fast = text.replace("from numba", "import numpy as np\nfrom numba").replace("0.0)", "ZERO)")
    fast = fast.replace("\n\n\n@", "\n\nZERO = np.float32(0)\n\n\n@")
    Path("mine.py").write_text(fast)

    status, out, _ = run("lab", "mine.py", "--once", *SIZES, *QUICK)
    assert (status, out.splitlines()[2]) == (0, "relu2_forward[mine] against vanilla")
    assert "relu2_backward" not in out  # which the file only imports
    for stage in ("check +right ", "roof +", "step +none: --sizes names no model", "machine code +"):
        assert re.search(f"(?m)^  {stage}", out)
    assert re.search(r"alone +(faster|slower|no difference shown|inconclusive) .* ms against .* of vanilla", out)

    ab = "ab", "relu2_forward", "vanilla", "mine", "--kernels", "mine.py"
    status, out, _ = run(*ab, *SIZES, *QUICK)
    assert (status, "relu2_forward: mine against vanilla, alone\n" in out) == (0, True)
    status, out, err = run(*ab, *SIZES, "--in-step")
    assert (status, err.count("a step has the sizes of its model")) == (2, 1)
    assert "relu2_forward: mine against" in run("runs", "list")[1]
    assert re.search(rf"\nN=4096, {cores()} threads?\n(.*\n)+.* mine ", run("runs", "history", "relu2_forward")[1])


def test_a_variant_of_the_backward_is_judged_by_the_generated_one(run):
    assert run("new-kernel", "relu2_backward", "--kernels", "relu2.py", "--variant", "fast")[0] == 0
    text = Path("relu2_backward.py").read_text()
    assert all(x in text for x in ('@kernel(relu2.backward, "fast")', "ZERO = np.float32(0.0)"))
    check = "check", "--kernels", "relu2_backward.py", "--variant", "fast", "--quick", "--threads", "1"
    assert run(*check)[0] == 0
    Path("relu2_backward.py").write_text(text.replace("seed * x + seed * x", "seed * x"))
    status, out, _ = run(*check)
    assert status == 1
    assert re.search(r"wrong +relu2_backward\[fast\]", out)


@pytest.mark.slow
def test_lab_shows_the_kernels_of_the_op_itself(run):
    status, out, _ = run("lab", "relu2.py", "--once", *SIZES, *QUICK, "--json")
    found = {(k["op"], k["variant"]): k["said"] for k in json.loads(out)["kernels"]}
    assert (status, list(found)) == (0, [("relu2_forward", "vanilla"), ("relu2_backward", "vanilla")])
    assert all(said["alone"].endswith(" ms: the baseline of other variants") for said in found.values())


NET = """
from relu2 import relu2

from cpuopt import nn

class Net(nn.Module):
    def __init__(self):
        self.wte, self.up, self.down = nn.Embedding(256, 16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.head, self.loss = nn.Linear(16, 256, bias=False), nn.CrossEntropyLoss()

    def forward(self, tokens, targets):
        x = self.wte(tokens)
        x = x + self.down(relu2(self.up(x)))
        return self.loss(self.head(x), targets)
"""
FAST = """
import numpy as np
from numba import prange
from relu2 import relu2

from cpuopt import kernel

ZERO = np.float32(0)

@kernel(relu2.forward, "mine")
def relu2_forward(out, inp):
    for i in prange(inp.shape[0]):
        x = max(inp[i], ZERO)
        out[i] = x * x
"""


@pytest.mark.slow
def test_an_op_of_ones_own_in_the_step_of_ones_own_model(run):
    Path("net.py").write_text(NET)
    Path("mine.py").write_text(FAST)
    job = "--model", "net.py:Net", "-B", "2", "-T", "8", "--threads", "1", "--kernels", "mine.py"
    status, out, err = run("profile", *job, "--swap", "relu2_forward=mine", "--steps", "2", "--html", "page.html")
    assert (status, "relu2_forward" in out, "relu2_forward" in Path("page.html").read_text()) == (0, True, True)
    assert "does not run" not in err
    status, _, err = run("profile", *job, "--steps", "1")
    assert "relu2_forward[mine] does not run; --swap relu2_forward=mine uses it" in err

    ab = "ab", "relu2_forward", "vanilla", "mine", "--kernels", "mine.py", "--model", "net.py:Net", *QUICK
    status, out, _ = run(*ab, "--sizes", "2x8", "--in-step")
    assert status == 0
    assert all(x in out for x in ("in the training step", "the whole step"))

    status, out, _ = run("tune", *job, "--ops", "relu2_forward", "--rounds", "6")
    assert re.search(r"relu2_forward N=512, 1x *\n +vanilla .*\n +mine ", out)


# Files that import each other -----------------------------------------------------------------------------------------


HELPER = "from cpuopt import helper\n\n\n@helper()\ndef twice(x):\n    return {body}\n"
USER = """
from numba import prange
from helper import twice

from cpuopt import kernel, ops

@kernel(ops.scale_forward, "mine")
def scale_forward(out, inp, factor, shift):
    for i in prange(out.shape[0]):
        out[i] = twice(inp[i])
"""


def test_files_that_import_each_other_are_one_module_each():
    Path("mine.py").write_text("from relu2 import relu2\nOP = relu2\n")
    cpuopt.kernels.load_all(["mine.py", "relu2.py", "mine.py"])
    assert sys.modules["mine"].OP is sys.modules["relu2"].relu2
    assert ops.relu2_forward is sys.modules["relu2"].relu2.forward
    with pytest.raises(AttributeError, match="no op 'relu2_foward'; did you mean 'relu2_forward'"):
        _ = ops.relu2_foward


def test_a_file_that_fails_leaves_nothing_behind():
    Path("mine.py").write_text("import relu2\nrelu2.nothing\n")
    for _ in range(2):  # the second time as the first
        fails(r"--kernels mine.py: line 2 raised AttributeError", cpuopt.kernels.load_all, ["mine.py"])
        assert "relu2_forward" not in ops.ALL
        assert "relu2" not in sys.modules
    Path("relu2.py").write_text("x = 1\nx.y\n")
    fails(r"mine.py: relu2.py, which it imports, line 2 raised AttributeError", cpuopt.kernels.load_all, ["mine.py"])


@pytest.mark.parametrize(
    ("beside", "texts", "op", "mine"),
    [
        ("helper.py", [HELPER.format(body=body) for body in ("x + x", "x * x")], "scale_forward", USER),
        ("relu2.py", [RELU2, RELU2.replace("x * x", "x + x")], "relu2_forward", FAST),  # to which it is held
    ],
)
def test_a_judgement_is_forgotten_when_a_file_beside_changes(anew, tmp_path, beside, texts, op, mine):
    file, keys = tmp_path / "mine.py", set()
    file.write_text(mine)
    for text, judged in zip(texts, ((False, True), (False,)), strict=True):
        anew()
        Path(beside).write_text(text)
        for known in judged:
            with Child("cpuopt.check.worker", [str(file)]) as child:
                gate.require_loadable(child)
                assert known == (child._worker is None)
                assert known or sorted(Path(f).name for f in child.files) == [*sorted(["mine.py", beside])]
        cpuopt.kernels.load_all(["mine.py"])
        kernel = registry.KERNELS[op, "mine"]
        assert gate.in_file(kernel, child)
        keys.add(gate.key_of(kernel, cache.digest(kernel.function), Case({"N": 3}), 1))
    assert len(keys) == 2

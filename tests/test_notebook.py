"""The magics of a notebook, and the example notebook, run as its reader would run it."""

import os
import re
from pathlib import Path

import pytest
from verbs import fails

import cpuopt
from cpuopt.isolate.child import Child
from cpuopt.kernels import registry
from cpuopt.library import magics

EXAMPLE = Path(__file__).parent.parent / "examples" / "kernel.ipynb"
CELL = """
TWO = np.float32(2)

def gelu_forward(out, inp):
    for i in prange(len(inp)):
        out[i] = TWO * inp[i]
"""


pytestmark = pytest.mark.usefixtures("here")


def test_a_wrong_kernel_fails_and_is_not_registered(capsys):
    said = r"%%kernel gelu_forward mine: it did not pass \(status 1\), so gelu_forward\[mi"
    fails(said, magics.try_kernel, "gelu_forward mine --model gpt2-tiny --no-step", CELL)
    assert "wrong" in capsys.readouterr().out
    assert ("gelu_forward", "mine") not in registry.KERNELS
    text = Path("mine_gelu_forward.py").read_text()
    assert text.endswith(CELL.replace("def gelu", '@kernel(ops.ALL["gelu_forward"], "mine")\ndef gelu'))


def test_the_last_content_of_a_cell_is_registered(monkeypatch):
    monkeypatch.setattr(magics, "_run", lambda flags: 0)
    for value in 2, 3:
        magics.try_kernel("gelu_forward mine", CELL.replace("float32(2)", f"float32({value})"))
        assert registry.KERNELS["gelu_forward", "mine"].function.py_func.__globals__["TWO"] == value


OWN = """
from numba import prange

from cpuopt import differentiable
from cpuopt.ops.declaration import N, inp, out

@differentiable(out("out", N), inp("inp", N), flops=2 * N)
def doubled(out, inp):
    for i in prange(inp.shape[0]):
        out[i] = inp[i] + inp[i]
"""


@pytest.fixture
def doubled(tmp_path):
    """A file that defines an op, in a folder of its own."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "doubles.py").write_text(OWN)
    return tmp_path / "elsewhere" / "doubles.py"


def test_a_kernel_of_an_op_of_ones_own_lies_beside_its_file(monkeypatch, doubled):
    """A process of its own imports the op's file by its name, and measures without a flag."""
    cpuopt.load_kernels([doubled])
    asked, file = [], str(doubled.with_name("mine_doubled_forward.py"))
    monkeypatch.setattr(magics, "_run", lambda flags: asked.extend(flags))
    magics.try_kernel("doubled_forward mine --threads 1", CELL.replace("gelu", "doubled"))
    assert (registry.KERNELS["doubled_forward", "mine"].file, asked[:2]) == (file, ["lab", file])
    assert any(flag.startswith("--sizes") for flag in asked)
    with Child("cpuopt.check.worker", [file], 1) as child:
        assert ("doubled_forward", "mine") in [(k["op"], k["variant"]) for k in child.start()]


def test_an_op_that_no_other_process_can_import_is_refused(doubled):
    cell = "doubled_forward mine", CELL.replace("gelu", "doubled")
    fails("no such op; .*; an op of your own comes with its file: import it", magics.try_kernel, *cell)
    cpuopt.load_kernels([doubled.rename(doubled.with_name("not a name.py"))])
    fails("which another process cannot import; write it to a file", magics.try_kernel, *cell)


@pytest.mark.parametrize(
    ("line", "cell", "why"),
    [
        ("gelu_forward", CELL, "expected OP VARIANT"),
        ("gelu_forward --once", CELL, "expected OP VARIANT"),
        ("gelu_backward mine", CELL, "no function gelu_backward; %cpuopt new-kernel gelu_backward mine"),
        ("gelu_forward mine", "def f(:", "line 1 of the cell"),
    ],
)
def test_a_cell_that_cannot_be_used_is_refused(line, cell, why):
    fails(why, magics.try_kernel, line, cell)


def test_a_file_of_somebody_else_is_not_overwritten():
    Path("mine_gelu_forward.py").write_text("x = 1\n")
    fails("no %%kernel wrote it", magics.try_kernel, "gelu_forward mine", CELL)
    assert Path("mine_gelu_forward.py").read_text() == "x = 1\n"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of Jupyter's libraries
def test_the_example_notebook_runs(tmp_path, monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("NUMBA_NUM_THREADS", str(min(2, len(os.sched_getaffinity(0)))))
    notebook = nbformat.read(EXAMPLE, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    nbclient.NotebookClient(notebook, timeout=180, resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = [printed(cell) for cell in notebook.cells if cell.cell_type == "code"]
    assert "tokens/s" in said[2]
    for stage in ("check         right", "alone", "roof", "machine code"):
        assert stage in said[3], stage
    assert "wrong" not in said[3]
    assert "gelu_forward: mine against optimized" in said[4]
    losses = [[float(x) for x in re.search(r"loss (\S+) -> ([\d.]+)", text).groups()] for text in (said[1], said[5])]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    assert losses[0][1] < losses[0][0]
    assert "mine" in said[6]
    assert {path.name for path in tmp_path.iterdir()} - {"ipython"} == {"mine_gelu_forward.py", "runs"}


def printed(cell):
    """What a cell printed and returned, as text."""
    return "".join(o.get("text") or o.get("data", {}).get("text/plain", "") for o in cell.outputs)

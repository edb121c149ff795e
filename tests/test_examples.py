"""Every example runs, and every page of the gallery is made of one. No test here depends on a time or a verdict."""

import ast
import os
import random
import re
import runpy
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from verbs import script

from cpuopt import files, ops
from cpuopt.measure import rates
from cpuopt.measure.roofline import Level, Roofs

EXAMPLES = sorted(Path(__file__).parent.parent.glob("examples/*.py"))
LEARNS = "6_generated_backward", "7_your_own_model", "burgers"
EXPENSIVE, AGAINST = "the three most expensive calls: .+, .+, .+", "gelu_forward: optimized against vanilla"
SAYS = {
    "1_first_profile": ["attention_backward +2 ", "checked: 16 kernels right", EXPENSIVE],
    "2_swap_a_kernel": [r"h\.0\.mlp\.c_fc +matmul_forward +blas", r"h\.1\.mlp\.c_fc +matmul_gelu_forward +optimized"],
    "3_write_a_kernel": [r"hasty: residual_forward\[hasty\] is wrong.+ out\[\d+\] = ", "careful: passed, "],
    "4_roofline": [r"\d GFLOP/s, memory \d+ GB/s", r"attention_backward +5\.3 +(FMA|memory) +\d"],
    "5_compare_with_a_verdict": [AGAINST, "optimized against itself: .+ratio", "sums of"],
    "6_generated_backward": [r"def mish_backward\(dinp, dinp_add, dout, inp\):\n"],
    "7_your_own_model": [],
    "8_tune": [r"gelu_forward N=32768(.*\n)+ +mine:BLOCK=512 +\d(.*\n)* +mine:BLOCK=4096 +\d", "--variant auto"],
    "9_fine_tune": [
        r"\[\[Orrimel stands on the western shore",
        r"210 steps: 70 epochs of 3 steps",
        r"drell\?\nA drell is a flat boat for shallow water\.\n",
        r"tuned .*mayor of Orrimel\?\nThe mayor of Orrimel is Hanne Tolk\.\n",
        r"adapter .*mayor of Orrimel\?\nSince the last race, the mayor is Pim Sallow\.\n",
        r"merged .*mayor of Orrimel\?\nSince the last race, the mayor is Pim Sallow\.\n",
    ],
    "burgers": [r"viscosity 0\.0\d+ \(true 0\.02\)"],
    "environment": [r"GELU in its tanh form\.\n0\.0 refused by rule line 1: import os; allowed are"],
    "search": [r"s, try  1: at least \d+\.\d+ times as fast as", r"@kernel\(ops\.gelu_forward, ['\"]mine['\"]\)"],
}
PAGES = script("docs/pages.py")
PROGRESS = re.compile(r"cpuopt: compiling \d+ kernels, once|compiled \d+/\d+|\d/3 gelu_forward|\d+ tokens after")


SLOW = Roofs(1, (Level("memory", None),), 2.0, {"memory": {"read": 1.0}}, 1.0)


@pytest.fixture(autouse=True)
def _aside(monkeypatch, tmp_path):
    """Leave no file or plan behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "alone", lambda *what: nullcontext())  # another test may tune meanwhile
    monkeypatch.setattr(rates, "folder", lambda: tmp_path / "machine")
    monkeypatch.setattr(rates, "roofs", lambda n, say=None: SLOW)


def test_each_example_is_known_here():
    assert [path.stem for path in EXAMPLES] == list(SAYS)


EACH = [pytest.param(p, id=p.stem, marks=[pytest.mark.slow] * (p.stem == "search")) for p in EXAMPLES]


@pytest.mark.parametrize("path", EACH)
def test_an_example_runs(path, tmp_path, capsys):
    runpy.run_path(str(path), run_name="__main__")
    out, err = capsys.readouterr()
    assert [line for line in err.splitlines() if not PROGRESS.match(line)] == []
    for line in SAYS[path.stem]:
        assert re.search(line, out), (line, out)
    if path.stem in LEARNS:
        losses = [float(x) for x in re.findall(r"\bloss +(\d+\.\d+)", out)]
        assert len(losses) >= 3
        assert min(losses) == losses[-1] < 0.5 * losses[0]
    assert {p.name for p in tmp_path.iterdir()} <= ({"machine", "runs"} if path.stem == "8_tune" else set())


def test_an_example_runs_in_a_process_and_a_folder_of_its_own(tmp_path):
    (tmp_path / "right.py").write_text("import os, cpuopt\nprint(os.listdir(), cpuopt.__name__)\n")
    assert PAGES.output(tmp_path / "right.py") == "[] cpuopt\n"
    (tmp_path / "wrong.py").write_text("print(1)\n1 / 0\n")
    with pytest.raises(RuntimeError, match=r"(?s)wrong\.py: exit status 1\n.*ZeroDivisionError"):
        PAGES.output(tmp_path / "wrong.py")


@pytest.fixture(scope="module")
def search():
    """What the search defines, without its loop."""
    (path,) = (path for path in EXAMPLES if path.stem == "search")
    head, line, _ = path.read_text().partition("\nrandom.seed(")
    assert line
    exec(compile(head, str(path), "exec"), names := {})
    return names


def rewritten(search, op, *rewrites):
    tree = ast.parse(search["IMPORTS"] + search["naive"].text_of(ops.ALL[op]))
    for rewrite in rewrites:
        search[rewrite](tree)
    return ast.unparse(ast.fix_missing_locations(tree))


def test_the_search_applies_each_rewrite(search):
    before = rewritten(search, "softmax_forward")
    random.seed(0)
    found = {search["mutated"](before) for _ in range(100)}
    for made in ("exp2(", "if not abs(total)", "v_0 in range", "BLOCK_", "in prange(V)"):
        assert any(made in text.partition("def ")[2] for text in found), made


def test_a_page_has_the_script_and_what_it_printed(monkeypatch):
    monkeypatch.setattr(PAGES, "output", lambda script: f"printed by {script.name}\n```\n")
    found = PAGES.gallery()
    assert found.keys() == {f"examples/{name}.md" for name in ("index", "kernel", *SAYS)}
    for path in EXAMPLES:
        page = found[f"examples/{path.stem}.md"]
        head, _, rest = path.read_text().partition("\n")
        assert page.startswith(f"# {head.strip('.').removeprefix(chr(34) * 3).removesuffix(chr(34) * 3)}")
        assert rest.partition('"""')[2].strip() in page
        assert page.endswith(f"````text\nprinted by {path.name}\n```\n````\n")
        assert f"]({path.stem}.md)" in found["examples/index.md"]
    assert "%%kernel gelu_forward mine" in found["examples/kernel.md"]
    assert "## Output" not in PAGES.gallery(execute=False)["examples/burgers.md"]


def test_what_a_page_loads_from_elsewhere_is_found(tmp_path):
    bad = {
        "a.html": '<link rel="stylesheet" href="https://a.b/c.css"><script src="//a.b/c.js"></script>',
        "b.html": '<img src="http://a.b/c.png"><p style="background: url(https://a.b/d.png)">',
        "c.css": '@import "https://a.b/e.css"; p { background: url("//a.b/f.png") }',
    }
    good = '<link rel="canonical" href="https://a.b/"><a href="https://a.b/">a</a><script src="c.js"></script>'
    for name, text in {**bad, "good.html": good}.items():
        (tmp_path / name).write_text(text)
    assert [x.partition(": ")[0] for x in PAGES.loads(tmp_path)] == [n for n in bad for _ in range(2)]


def test_the_site_is_built(tmp_path):
    """`mkdocs build --strict` checks links and anchors as the site has them; the hook, what its pages load."""
    for part in ("material", "mkdocstrings"):
        pytest.importorskip(part)
    environment = {**os.environ, "EXECUTE_EXAMPLES": "false", "NO_MKDOCS_2_WARNING": "1"}
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(build, cwd=EXAMPLES[0].parent.parent, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    names = {p.relative_to(tmp_path / "site").as_posix() for p in tmp_path.rglob("*.html")}
    made = ("index", "lab", "api", "reference", "results/index", "contributing", "examples/8_tune")
    assert {f"{name}.html" for name in made} <= names
    text = (tmp_path / "site" / "reference.html").read_text()
    assert all(f"{name}\n" in text or f"{name}<" in text for name in ("cpuopt.Engine", "cpuopt.functional.gelu"))
    assert "Train on one batch" in text  # of a method
    assert "the variant of every op that has it" in text  # of the docstring

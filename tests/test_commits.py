"""Kernels of two commits: `cpuopt ab` and `cpuopt gate` in a small repository with this package."""

import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from verbs import error, fails, ran

import cpuopt
from cpuopt import cli
from cpuopt.cli import gate as verb
from cpuopt.errors import UNCHECKED
from cpuopt.kernels.registry import KERNELS
from cpuopt.lab import commit_worker, commits, gate
from cpuopt.report import gate as report

CHANGES = {
    "renamed": ("cpuopt/kernels/vanilla/gelu.py", "CUBIC", "CUBED"),
    "wrong": ("cpuopt/kernels/vanilla/gelu.py", "out[i] = HALF * x", "out[i] = x"),
    "lossy": ("cpuopt/models/gpt2.py", "(c.vocab_size, c.n_embd, init=nn.normal(0.02)",
              "(c.vocab_size, c.n_embd, init=nn.normal(0.5)"),
    "redeclared": ("cpuopt/ops/declaration.py", 'EPS = scalar("eps", low=1e-4', 'EPS = scalar("eps", low=2e-4'),
    "roomy": ("cpuopt/kernels/optimized/sumsq.py", '"] // CHUNK + 1', '"] // CHUNK + 2'),
    "docs": ("README.md", "a word", "another word"),
    "old": ("cpuopt/building.py", "def set_threads", "def threads_set"), "filed": ("mine.py", "* x * x", "* x * x * x"),
    "spoken": ("README.md", "a word", "a kernel"),
}  # fmt: skip
SAID = {"spoken": "a kernel: faster: by much"}
"""The subjects of commits that have others than their tags."""
"""Commits after ``base``: a file, what it has there, and what takes its place."""
FILE = """
from numba import prange
from cpuopt import kernel, ops
from cpuopt.kernels.toolkit.fastmath import tanh
import numpy as np
@kernel(ops.gelu_forward, "mine")
def gelu_forward(out, inp):
    for i in prange(inp.shape[0]):
        x = inp[i]
        u = np.float32(0.7978845608) * (x + np.float32(0.044715) * x * x * x)
        out[i] = np.float32(0.5) * x * (np.float32(1) + tanh(u))
"""


def git(top, *words):
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-c", "core.autocrlf=false"]
    return subprocess.run(["git", "-C", top, *who, *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    top = tmp_path_factory.mktemp("repository")
    shutil.copytree(Path(cpuopt.__file__).parent, top / "cpuopt", ignore=shutil.ignore_patterns("__pycache__"))
    (top / "README.md").write_text("a word")
    (top / "mine.py").write_text(FILE)
    for words in ("init --quiet -b main", "add .", "commit --quiet -m base", "tag base"):
        git(top, *words.split())
    for name, (file, old, new) in CHANGES.items():
        git(top, "checkout", "--quiet", "--detach", "base")
        text = (top / file).read_text()
        assert old in text
        (top / file).write_text(text.replace(old, new))
        git(top, "commit", "--quiet", "-am", SAID.get(name, name))
        git(top, "tag", name)
    git(top, "checkout", "--quiet", "main")
    return top


@pytest.fixture
def here(repository, monkeypatch, tmp_path):
    monkeypatch.chdir(repository)
    monkeypatch.setattr(gate, "cache_folder", lambda name: tmp_path / name)
    yield repository
    assert (git(repository, "status", "--porcelain"), len(git(repository, "worktree", "list").splitlines())) == ("", 1)


def ab(tmp_path, *words, sizes="N=4096"):
    return ["ab", *words, "--sizes", sizes, "--rounds", "6", "--threads", "1", "--runs", str(tmp_path / "runs")]


# ab -------------------------------------------------------------------------------------------------------------------


def test_two_commits_with_a_constant_renamed_have_equal_code_from_different_sources(here, tmp_path, capsys):
    found = ran(capsys, *ab(tmp_path, "gelu_forward", "base:vanilla", "renamed:vanilla"))
    (result,) = found["results"]
    assert len({*result["codes"].values()}) == 1, result["codes"]
    assert len({*result["hashes"].values()}) == 2, result["hashes"]
    assert result["commits"] == {f"{t}:vanilla": git(here, "rev-parse", t).strip() for t in ("base", "renamed")}
    assert 0.5 < found["ratio"]["median"] < 2
    assert {c["kernel"] for c in result["checks"]} == {f"gelu_forward[{t}:vanilla]" for t in ("base", "renamed")}


def test_a_kernel_that_a_commit_made_wrong_is_not_timed(here, tmp_path, capsys):
    found = ran(capsys, *ab(tmp_path, "gelu_forward", "vanilla", "wrong:vanilla"), status=1)
    assert (found["verdict"], "ratio" in found) == ("wrong", False)
    assert found["reason"].startswith("gelu_forward[wrong:vanilla] is wrong, so it is not timed: out[")


def test_commits_that_declare_an_op_differently_are_refused(here, tmp_path, capsys):
    assert cli.main(ab(tmp_path, "layernorm_forward", "base:vanilla", "redeclared:vanilla", sizes="BT=8 C=64")) == 2
    assert "layernorm_forward: redeclared:vanilla declares its argument 'eps' otherwise" in error(capsys)


def test_a_file_of_a_commit(here, tmp_path, capsys):
    assert cli.main(ab(tmp_path, "gelu_forward", "base:mine.py", "filed:mine.py:mine")) == 1
    assert "gelu_forward[filed:mine.py:mine] is wrong" in error(capsys)


def test_a_commit_that_is_too_old_is_refused_with_its_reason(here, tmp_path, capsys):
    assert cli.main(ab(tmp_path, "gelu_forward", "old:vanilla", "vanilla")) == 2
    line = error(capsys)
    assert "old:vanilla: ended with status 1 during 'ready': ImportError: cannot import name 'set_threads'" in line
    assert f"a commit from before {commits.OLDEST} cannot be compared" in line


@pytest.mark.parametrize(("words", "said"), [
    (["nowhere:vanilla", "vanilla"], "'nowhere:vanilla': git knows no commit 'nowhere'; fetch it"),
    (["base:vanilla", "-x:vanilla"], "'-x:vanilla': git knows no commit '-x'"),
    (["base:", "base:vanilla"], "'base:': expected REV:VARIANT or REV:FILE.py"),
    (["base:mine.pyx", "base:vanilla"], "'base:mine.pyx': expected REV:VARIANT or REV:FILE.py"),
    (["base:/mine.py", "vanilla"], "'base:/mine.py': expected a file of the commit"),
    (["base:x/../../mine.py", "vanilla"], "expected a file of the commit, by its path from the top"),
    ([":vanilla", "base:vanilla"], "':vanilla': expected REV:VARIANT or REV:FILE.py"),
    ([":/no such words:vanilla", "vanilla"], "git knows no commit ':/no such words'; fetch it"),
    (["base^{tree}:vanilla", "vanilla"], "git knows no commit 'base^{tree}'; fetch it"),
    (["nowhere:mine.py:mine", "vanilla"], "git knows no commit 'nowhere'; fetch it"),
])  # fmt: skip
def test_what_is_refused_before_a_process_starts(here, words, said, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(commits, "Tree", None)
    assert cli.main(["ab", *words[2:], "--runs", str(tmp_path), "--", "gelu_forward", *words[:2]]) == 2
    assert said in error(capsys)


@pytest.mark.parametrize(("text", "tag", "rest"), [
    ("base:vanilla", "base", ("", "vanilla")), (":/renamed:vanilla", "renamed", ("", "vanilla")),
    (":/^a kernel: faster:mine.py:mine", "spoken", ("mine.py", "mine")),
    ("spoken^{/kernel: f}:vanilla", "spoken", ("", "vanilla")), ("filed~1:mine.py", "base", ("mine.py", "")),
    ("base:mine:CHUNK=64", "base", ("", "mine:CHUNK=64")),
])  # fmt: skip
def test_a_revision_may_hold_colons(here, text, tag, rest):
    found = commits.KernelSource.of(text)
    assert (found.commit, (found.file, found.variant)) == (git(here, "rev-parse", tag).strip(), rest)
    assert commits.commit_of(found.rev, "x") == found.commit


@pytest.mark.parametrize(("text", "file", "variant"), [
    ("mine.py", "mine.py", ""), ("./a/mine.py:tanh", "./a/mine.py", "tanh"), ("optimized", "", "optimized"),
])  # fmt: skip
def test_what_lies_here_needs_no_commit(text, file, variant):
    found = commits.KernelSource.of(text)
    assert (found.rev, found.commit, found.file, found.variant) == ("", "", file, variant)


def test_a_tree_that_is_there_needs_no_commit():
    found = commits.KernelSource.of("working tree:mine.py:mine", {"working tree": Path()})
    assert (found.rev, found.commit, found.file, found.variant) == ("working tree", "", "mine.py", "mine")


STEP = ["--in-step", "--model", "gpt2-tiny", "-B", "2", "-T", "16", "--rounds", "6", "--threads", "1"]


def test_two_commits_are_compared_in_training_steps(here, tmp_path, capsys):
    flags = [*STEP, "--layer", "h.1.*", "--runs", str(tmp_path / "runs")]
    found = ran(capsys, "ab", "gelu_forward", "base:vanilla", "filed:mine.py", *flags, status=1)
    assert found["reason"].startswith("gelu_forward[filed:mine.py] is wrong")  # its cubic term is another
    found = ran(capsys, "ab", "gelu_forward", "base:vanilla", "mine.py", *flags)
    (result,) = found["results"]
    assert (found["in_step"], found["layer"], {*result["layers"]}) == (True, "h.1.*", {"h.1.mlp"})
    assert result["commits"] == {"base:vanilla": git(here, "rev-parse", "base").strip()}
    assert len(result["losses"]["A"]) == len(result["losses"]["B"]) > 1
    assert result["losses"]["A"] == pytest.approx(result["losses"]["B"], rel=1e-4)
    assert all(0 < result[ns] < result["step"][ns] for ns in ("a_ns", "b_ns"))
    assert len(result["ns"]["A"]) == len(result["step"]["ns"]["B"]) == 6
    kernels = {f"gelu_forward[{v}]" for v in ("base:vanilla", "mine.py")}
    assert {c["kernel"] for c in result["checks"]} == kernels
    assert {c["kernel"] for c in result["checks"] if c["case"] == "N=8192"} == kernels  # on the data of a step


@pytest.mark.slow
def test_a_variant_from_here_is_compared_with_a_commit_in_steps(here, tmp_path, capsys):
    assert cli.main(["ab", "gelu_forward", "renamed:vanilla", "vanilla", *STEP, "--runs", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for said in ("gelu_forward: vanilla against renamed:vanilla, in the training step", "the whole step", "losses"):
        assert said in out
    assert " ".join(out.split()).count("note: --swap 'gelu_forward=vanilla' keeps gelu_forward") == 1


@pytest.mark.slow
def test_steps_of_commits_with_other_losses_are_not_compared(here, tmp_path, capsys):
    """The kernels are the same, and the commit starts from other weights."""
    assert cli.main(["ab", "gelu_forward", "base:vanilla", "lossy:vanilla", *STEP, "--runs", str(tmp_path)]) == 1
    assert "no ratio, because the losses of step 1 differ: base:vanilla" in error(capsys)


def test_a_commit_whose_other_kernels_are_wrong_trains_no_step(here, tmp_path, capsys):
    flags = [*STEP, "--runs", str(tmp_path), "--variant", "vanilla"]
    assert cli.main(["ab", "layernorm_forward", "base:vanilla", "wrong:vanilla", *flags]) == 1
    assert "wrong:vanilla: gelu_forward[vanilla] is wrong, so nothing is run with it: out[" in error(capsys)


def test_a_folder_without_git_and_a_machine_without_git(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    fails(r"^x: fatal: not a git repository", commits.commit_of, "main", "x")
    monkeypatch.setenv("PATH", "")
    fails(r"^x: git cannot be started", commits.commit_of, "main", "x")


# The gate -------------------------------------------------------------------------------------------------------------


GATE = ["gate", "--base", "base", "--head"]
GATE_STEPS = ["--steps", "gpt2-tiny", "--sizes", "2x16", "--only", "silu_forward*", "--rounds", "6", "--threads", "1"]


def test_a_change_of_docs_has_the_same_code_at_once(here, capsys, tmp_path):
    start = time.perf_counter()
    assert cli.main([*GATE, "docs", "--markdown", str(tmp_path / "gate.md")]) == 0
    assert time.perf_counter() - start < 5
    assert "same code" in capsys.readouterr().out
    assert (tmp_path / "gate.md").read_text().startswith("**same code: no kernel's machine code differs**\n")


def test_a_constant_that_is_renamed_has_the_same_code(here, capsys, monkeypatch):
    monkeypatch.setattr(gate, "measured", None)
    found = ran(capsys, *GATE, "renamed", "--only", "gelu_forward*")
    assert found["rows"] == found["new"] == found["gone"] == []
    assert found["kernels"] >= 3


def test_scratch_of_another_length_is_a_difference(here, capsys, monkeypatch):
    monkeypatch.setattr(gate, "measured", lambda *args, **more: {"verdict": "right", "reason": "not timed"})
    found = ran(capsys, *GATE, "roomy", "--only", "sumsq*")["rows"]
    assert {(row["op"], row["variant"], row["why"]) for row in found} == {("sumsq", "optimized", "declaration")}
    assert len({code.split("-")[0] for row in found for code in row["codes"]}) == 1


def test_a_kernel_that_is_wrong_fails_the_gate(here, tmp_path):
    flags = ["--only", "gelu_forward?vanilla?", "--markdown", str(tmp_path / "gate.md"), "--threads", "1"]
    assert cli.main([*GATE, "wrong", *flags]) == 1
    text = (tmp_path / "gate.md").read_text()
    assert text.startswith("**refused: gelu_forward[vanilla]**\n")
    assert "| gelu_forward[vanilla] |" in text
    assert "gelu_forward[wrong:vanilla] is wrong, so it is not timed: out[" in text


@pytest.mark.slow
def test_whole_steps_are_compared_too(here, tmp_path, capsys):
    text = tmp_path / "gate.md"
    assert cli.main([*GATE, "renamed", *GATE_STEPS, "--markdown", str(text), "--json"]) in (0, 1, 3)
    (step,) = json.loads(capsys.readouterr().out)["rows"]
    assert (step["op"], step["variant"], step["sizes"]) == ("step", "gpt2-tiny", {"B": 2, "T": 16})
    assert 0 < step["ratio"]["low"] <= step["ratio"]["median"] <= step["ratio"]["high"]
    assert min(step["a_ms"], step["b_ms"]) > 0
    assert "| step of gpt2-tiny | B=2 T=16 |" in text.read_text()


def test_steps_that_lose_otherwise_fail_the_gate(here, tmp_path, capsys):
    assert cli.main([*GATE, "lossy", *GATE_STEPS]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "refused: step of gpt2-tiny" in out
    assert "no ratio, because the losses of step 1 differ: base " in out


def test_a_step_is_kept_by_the_files_of_both_trees(here, monkeypatch, tmp_path):
    answers = [row("no difference shown"), row("slower", 1.1, 1.2), row("slower", 1.2, 1.3)]
    monkeypatch.setattr(gate, "measured_steps", lambda plan, **more: answers.pop(0) | {"seed": plan.seed})
    job, trees = {"model": "gpt2-tiny", "B": 2, "T": 16}, {name: tmp_path / name for name in ("old", "new")}
    for folder in trees.values():
        (folder / "cpuopt").mkdir(parents=True)
        (folder / "cpuopt" / "a.py").write_text("x = 1")
    plan = gate.GatePlan("old")
    first = gate.step_row(plan, job, trees, print)
    (trees["new"] / "cpuopt" / "a.txt").write_text("no code")
    assert gate.step_row(plan, job, trees, print) == first | {"kept": True}
    (trees["new"] / "cpuopt" / "a.py").write_text("x = 2")
    again = gate.step_row(plan, job, trees, print)
    assert (again["verdict"], again["seed"], again["ratio"]["low"], answers) == ("slower", 1, 1.2, [])


@pytest.mark.parametrize(("flags", "said"), [(["gpt2-tiy"], "gpt2-tiny"), (["gpt2-tiny", "--sizes", "4by4"], "4by4")])
def test_steps_that_cannot_be_are_refused_at_once(here, flags, said, capsys, monkeypatch):
    monkeypatch.setattr(gate, "differences", None)
    assert cli.main([*GATE, "renamed", "--steps", *flags]) == 2
    assert said in error(capsys)


def ratio(low, high):
    return {"median": (low + high) / 2, "low": low, "high": high}


def row(verdict, low=1.0, high=1.0):
    figures = {"ratio": ratio(low, high), "control": ratio(0.99, 1.01), "level": 99.5, "a_ms": 1.0, "b_ms": 1.1}
    return {"verdict": verdict, "reason": "why", **(figures if low else {})}


@pytest.mark.parametrize(("rows", "status", "said"), [
    ([row("no difference shown", 0.99, 1.02)], 0, "no kernel is slower by more than 2 %, of 1 comparison"),
    ([row("faster", 0.8, 0.9)], 0, "no kernel is slower"), ([row("slower", 1.01, 1.05)], 0, "no kernel is slower"),
    ([row("slower", 1.03, 1.05)], 1, "1 comparison slower by more than 2 %"),
    ([row("inconclusive", 0.9, 1.2)], 3, "1 comparison without a verdict: the machine is too noisy"),
    ([row("inconclusive", 0.9, 1.01)], 0, "no kernel is slower"),
    ([row("inconclusive", 0.9, 1.2), row("slower", 1.03, 1.05)], 1, "1 comparison slower"),
    ([row("wrong", 0)], 1, "refused: gelu_forward[vanilla]"),
    ([row(UNCHECKED, 0)], 3, "refused: gelu_forward[vanilla]"), ([row("right", 0)], 0, "no kernel is slower"),
])  # fmt: skip
def test_the_status_and_the_table(rows, status, said):
    assert gate.status(rows, 2) == status
    about = {"op": "gelu_forward", "variant": "vanilla", "types": {}, "sizes": {"N": 4096}, "why": "text"}
    found = {"base": "a|b", "head": "c", "percent": 2.0, "threads": 2, "new": [], "gone": ["x"]}
    assert report.conclusion({**found, "rows": []}).endswith("differs of those that both have")
    text = report.markdown({**found, "rows": [about | r for r in rows]})
    assert text.startswith(f"**{said}")
    assert "c against a|b, 2 threads, 1 kernel gone" in text
    lines = [line.replace("\\|", "") for line in text.splitlines() if line.startswith("|")]
    assert (len(lines), {line.count("|") for line in lines}) == (2 + len(rows), {7})


@pytest.fixture
def differing(here, monkeypatch):
    """One kernel differs, and `measured` answers from a list."""
    found = commits.Difference(1, {"gelu_forward[vanilla]": "text"}, {"gelu_forward[vanilla]": ("old", "new")}, [], [])
    monkeypatch.setattr(gate, "differences", lambda *args, **more: found)
    monkeypatch.setattr(gate, "shapes_of", lambda op, types, variant: [commits.cases(op)[0]])
    answers = []
    monkeypatch.setattr(gate, "measured", lambda plan, **more: answers.pop(0) | {"seed": plan.seed})
    return answers


def test_a_result_is_kept_and_a_slower_kernel_is_measured_again(differing):
    plan = gate.GatePlan("base", "renamed")
    differing += [row("slower", 1.1, 1.2), row("slower", 1.2, 1.3)]
    (first,) = gate.run(plan)["rows"]
    assert (first["ratio"]["low"], first["seed"], differing) == (1.2, 1, [])
    again = gate.run(plan)
    assert again["status"] == 1
    assert again["rows"] == [first | {"kept": True}]  # and nothing was measured
    other = gate.GatePlan("base", "renamed", threads=2)
    differing += [row("faster", 0.8, 0.9), row("slower", 1.1, 1.2)]
    found = gate.run(other)
    assert (found["status"], found["rows"][0]["reason"]) == (3, "faster, and slower when measured again")
    differing += [row("slower", 1.1, 1.2), row("no difference shown")]
    assert gate.run(other)["status"] == 0


def test_what_was_timed_is_what_was_found_to_differ(differing):
    """The working tree changed between the digests and the comparison, so nothing is kept."""
    plan = gate.GatePlan("base", "renamed")
    differing += [row("no difference shown") | {"codes": ["old", "other"]}, row("no difference shown")]
    found = gate.run(plan)
    assert (found["status"], found["rows"][0]["verdict"]) == (3, UNCHECKED)
    assert gate.run(plan)["status"] == 0
    assert differing == []


def test_a_noisy_machine_fails_nothing_and_is_not_kept(differing):
    differing += [row("inconclusive", 0.8, 1.4)] * 2
    assert ([gate.run(gate.GatePlan("base", "renamed"))["status"] for _ in range(2)], differing) == ([3, 3], [])


def test_slower_beside_other_processes_is_no_verdict(here, monkeypatch):
    class Pair:
        def __init__(self, *args):
            self.shared = type("Shared", (), {"room": None})

        def __enter__(self):
            return self

        __exit__ = require = lambda *args: None

        @property
        def both(self):
            kernel = KERNELS["gelu_forward", "vanilla"]
            return kernel, kernel

        def ask(self, do, **request):
            more = {"cases": [{"a_ns": 1e6, "b_ns": 2e6}], "doubts": ["other processes used 0.90 cores meanwhile"]}
            return {**row("slower", 1.1, 1.2), "why": "", "codes": {"a": "old", "b": "new"}, **more}

    monkeypatch.setattr(gate, "CommitPair", Pair)
    op = commits.op_named("gelu_forward")
    found = gate.measured(gate.GatePlan("a"), op, "vanilla", commits.cases(op)[0], {"a": here, "b": here}, print)
    assert (found["verdict"], gate.status([found], 1)) == ("inconclusive", 3)
    assert found["reason"] == "the machine is busy: other processes used 0.90 cores meanwhile"
    assert (found["a_ms"], found["b_ms"]) == (1.0, 2.0)


@pytest.mark.parametrize("text", ["0", "-1", "x", "nan"])
def test_a_wrong_number_of_percent_is_refused(text):
    with pytest.raises(SystemExit):
        cli.main(["gate", "--base", "main", "--slower", text])
    assert verb.percent("2.5") == 2.5


def test_a_gate_that_would_compare_nothing_is_refused(capsys):
    assert cli.main(["gate", "--base", "HEAD", "--only", "gelu_forwrd"]) == 2
    assert "--only 'gelu_forwrd': no kernel has such a name" in capsys.readouterr().err


def test_a_kernel_is_named_as_it_is_printed():
    assert [*commit_worker.typed("gelu_forward[vanilla]")] == ["gelu_forward[vanilla]"]
    assert len(commit_worker.typed("gelu_forward[[]vanilla*")) == 0
    assert len(commit_worker.typed("gelu_forward[vanilla]*")) > 1


def test_a_repository_of_something_else_is_no_pass(tmp_path, monkeypatch):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.chdir(tmp_path)
    fails("is no checkout of cpuopt: it has no folder cpuopt/kernels; run it in one", gate.run, gate.GatePlan("HEAD"))

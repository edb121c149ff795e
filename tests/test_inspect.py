"""`cpuopt inspect`: what a loop is made of, on texts and on kernels with planted faults."""

import platform
import re
from dataclasses import replace
from pathlib import Path

import pytest
from test_html import read, violations
from verbs import inspector, printed, ran

import cpuopt.kernels  # noqa: F401  (which registers what the package brings)
from cpuopt.files.reading import to_json
from cpuopt.kernels import registry
from cpuopt.kernels.compile import jit
from cpuopt.lab import asm
from cpuopt.lab.inspect import Remark, _same, inspect, remarks
from cpuopt.report import inspect as report
from cpuopt.report.html import machine_code

TEXT = """
	.file	1 "/home/me" "mine.py"
	.file	2 "<string>"
	.type	_ZN4mine4gelu7forwardB2v1B10cABC,@function
_ZN4mine4gelu7forwardB2v1B10cABC:
	movabsq	$tanhf, %rbx
	movq	%rbx, 8(%rsp)
.LBB0_1:
	.loc	1 30 5
	vmovss	(%rax), %xmm0
.LBB0_2:
	.loc	1 31 9
	vmovups	(%rax,%rcx,4), %ymm0
	vfmadd213ps	32(%rax,%rcx,4), %ymm1, %ymm0
	vmovups	%ymm0, (%rdx,%rcx,4)     # comment
	vmovups	%ymm0, 64(%rsp)
	vmovups	64(%rsp), %ymm3
	.loc	1 33 9
	addq	$8, %rcx
	jne	.LBB0_2
	decq	%rsi
	jne	.LBB0_1
.LBB0_3:
	.loc	2 40 1
	vcvtss2sd	%xmm0, %xmm0, %xmm0
	vmulsd	%xmm0, %xmm1, %xmm0
	vmovss	%xmm0, (%rdx)
	callq	*8(%rsp)
	jne	.LBB0_3
	ja	.LBB0_9
	retq
	.type	NRT_decref,@function
NRT_decref:
.LBB1_1:
	vaddps	%ymm0, %ymm0, %ymm0
	jne	.LBB1_1
"""


def test_innermost_loops_of_a_text():
    wide, scalar = asm.loops(TEXT, "my.py", 35)
    assert wide == asm.Loop("gelu.forward", "mine.py:31-33", 7, 8, 1, 2, 1, 2)
    assert (scalar.where, scalar.width, scalar.doubles, scalar.stores) == ("my.py:40", 1, 2, 1)
    assert scalar.calls == ["tanhf"]


def test_the_text_of_numba_itself_is_no_place_of_a_loop():
    inlined = '"/lib/python3.11/site-packages/numba/cpython" "builtins.py"'
    text = TEXT.replace("\t.loc\t1 30 5", f"\t.file\t3 {inlined}").replace(".loc\t1 31 9", ".loc\t3 607 9")
    assert asm.loops(text, "my.py", 35)[0].where == "mine.py:33"
    assert asm.plain("_ZN4mine12_3clocals_3e8multiplyB2v1") == "mine.multiply"


def test_a_frame_pointer_is_the_stack_and_a_register_like_others_is_not():
    text = TEXT.replace("64(%rsp)", "64(%rbp)")
    assert [asm.loops(t)[0].spills for t in (text, text.replace("movabsq", "movq\t%rsp, %rbp\n\tmovabsq"))] == [0, 2]


def test_what_is_left_over_by_a_wider_loop_is_no_scalar_loop():
    text = TEXT.replace("2 40 1", "1 31 1\n\t.loc\t1 33 1").replace("callq\t*8(%rsp)", "nop")
    assert [v.remainder for v in asm.loops(text)] == [False, True]


def test_instructions_are_counted_by_line():
    found = asm.blocks(TEXT, "/home/me/my.py", 35, 45)
    assert [(b.file, b.line, b.depth, len(b.instructions)) for b in found] == [
        *(("", 0, 0, 2), *(("/home/me/mine.py", *block) for block in ((30, 1, 1), (31, 2, 5), (33, 2, 2)))),
        ("/home/me/mine.py", 33, 1, 2),  # behind the inner loop
        *(("/home/me/my.py", 40, 1, 5), ("/home/me/my.py", 40, 0, 2)),
    ]
    inner, last = found[2].instructions, found[5].instructions
    assert [i.fma for i in inner] == [False, True, False, False, False]
    assert (sum(i.spill for i in inner), sum(i.load for i in inner), sum(i.store for i in inner)) == (2, 2, 1)
    assert [i.called for i in last if i.called] == ["tanhf"]
    assert {b.file for b in asm.blocks(TEXT, "/home/me/my.py", 41, 45)} == {"", "/home/me/mine.py"}  # 40 is numba's


def test_remarks_are_counted_and_have_a_place():
    text = """
remark: /home/me/mine.py:12:3: vectorized loop (vectorization width: 8, interleaved count: 4) [-Rpass=loop-vectorize]
remark: <string>:2:0: loop not vectorized: call instruction cannot be vectorized
remark: <string>:2:0: loop not vectorized: call instruction cannot be vectorized
remark: <unknown>:0:0: loop not vectorized
something else
"""
    assert remarks(text, "mine.py", 9) == [
        Remark("mine.py", 9, "loop not vectorized: call instruction cannot be vectorized", 2),
        Remark("mine.py", 12, "vectorized loop (vectorization width: 8, interleaved count: 4)"),
    ]


NAMES = [f"a{i}" for i in range(40)]  # more than any machine has vector registers
FILE = f"""
import numpy as np
from numba import prange
from cpuopt import kernel, ops
from cpuopt.kernels.toolkit.lanes import LANES, load, store

@kernel(ops.gelu_forward, "tanh")
def gelu_forward(out, inp):
    for i in prange(out.shape[0]):
        out[i] = np.tanh(inp[i])

@kernel(ops.gelu_forward, "double")
def gelu_forward(out, inp):
    for i in prange(out.shape[0]):
        out[i] = inp[i] * 0.3 + inp[i]

@kernel(ops.gelu_forward, "good")
def gelu_forward(out, inp):
    for i in prange(out.shape[0]):
        # </pre><script>window.hit = 1</script>
        out[i] = inp[i] * np.float32(0.3) + inp[i]

@kernel(ops.gelu_forward, "spill")
def gelu_forward(out, inp):
    for b in prange(2):
        {"; ".join(f"{a} = load(inp, {i} * LANES)" for i, a in enumerate(NAMES))}
        for i in range(out.shape[0]):
            x = load(inp, i)
            {"; ".join(f"{a} = {a} * x + {b}" for a, b in zip(NAMES, NAMES[1:] + NAMES[:1], strict=True))}
        store(out, b, {" + ".join(NAMES)})

@kernel(ops.gelu_forward, "plain", jit=False)
def gelu_forward(out, inp):
    out[...] = inp
"""


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """`inspect` of the file, in a folder of its own, with each kernel compiled once for all tests."""
    file = tmp_path_factory.mktemp("kernels") / "mine.py"
    file.write_text(FILE)
    with inspector(file) as found:
        yield found


@pytest.fixture(autouse=True)
def _here(here, monkeypatch, once):

    def known(op, v, files, parallel=0):
        return inspect(op, v, files, parallel) if parallel else once(op, v)

    monkeypatch.setattr("cpuopt.lab.inspect.inspect", known)
    Path("mine.py").write_text(FILE)


x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="loops are read on x86-64")


@x86
def test_planted_faults_are_found_and_a_good_kernel_has_none(once):
    names = ("tanh", "double", "spill", "good")
    found = {v: once("gelu_forward", v) for v in names}
    summary = {v: f.summary for v, f in found.items()}
    assert [any("tanh" in c for c in s["calls"]) for s in summary.values()] == [True, False, False, False]
    assert [s["doubles"] > 0 for s in summary.values()] == [False, True, False, False]
    assert summary["spill"]["spills"] > 10
    assert summary["good"]["spills"] == summary["double"]["spills"] == 0
    assert [s["scalar_loops"] > 0 for s in summary.values()] == [True, False, False, False]
    assert min(summary["good"]["width"], summary["double"]["width"]) >= 4
    fma = "fma" in Path("/proc/cpuinfo").read_text()
    assert summary["spill"]["fmas"] in ((40, 80) if fma else (0,))  # 40 a round, unrolled or not
    at = FILE.splitlines().index("        out[i] = inp[i] * 0.3 + inp[i]") + 1
    assert any(r.line == at and "floating point conversion" in r.text for r in found["double"].remarks)
    assert any(v.where == f"mine.py:{at}" for v in found["double"].innermost)


def test_equal_loops_share_a_row_with_their_number(once):
    loop = asm.Loop("f", "mine.py:3", 7, 8, 1, calls=["tanhf"])
    others = [replace(loop, instructions=9), replace(loop, remainder=True)]
    found = replace(once("gelu_forward", "good"), innermost=[loop, others[0], replace(loop), *others[1:], loop])
    names, instructions, *_ = ([str(c) for c in column.cells] for column in report.loop_table(found).columns)
    assert (names, instructions) == (["mine.py:3, 3x", "mine.py:3", "mine.py:3, rest"], ["7", "9", "7"])
    assert len(to_json(found)["innermost"]) == 5


@x86
def test_the_text_is_that_of_the_code_that_runs():
    kernel = registry.find("residual_forward", "vanilla")
    kernel.compile()
    found = inspect("residual_forward", "vanilla")
    assert found.same is True
    assert found.code == jit.code_digest(kernel)
    assert _same("residual_forward", "vanilla", "0" * 12) is False
    assert _same("residual_forward", "vanilla", "") is None
    lines = dict(enumerate(found.source, found.first))
    inner = {lines[b.line].strip() for b in found.blocks if b.file == found.file and b.depth > 1}
    assert "out[i] = inp1[i] + inp2[i]" in inner
    assert {b.file for b in found.blocks} == {"", found.file}
    code = [i.text for b in found.blocks for i in b.instructions]
    text = [" ".join(s.split()) for name, body in asm.functions(found.asm) if asm.OURS.match(name) for s in body]
    assert [" ".join(s.split()) for s in code] == [s for s in text if not s.startswith(".") and not s.endswith(":")]


@x86
def test_a_page_has_lines_beside_their_code_and_the_verb_prints(once, capsys, whole_vectors):
    command = ["inspect", "gelu_forward", "good", "spill", "--kernels", "mine.py", "--html", "page.html"]
    printed(capsys, *command)
    page = Path("page.html").read_text()
    assert violations(page) == []
    sides = list(read(page).all(class_="side"))
    assert [s.one("h3").text for s in sides] == ["gelu_forward[good]", "gelu_forward[spill]"]
    for side, variant in zip(sides, ("good", "spill"), strict=True):
        found = once("gelu_forward", variant)
        assert bool(found.advice) == (variant == "spill")
        assert all(a.said in side.text for a in found.advice)
        rows = {int(r.one(class_="number").text): r for r in side.one("details", open="").all(class_="row")}
        assert [r.one(class_="text").text.strip() for r in rows.values()] == [s.strip() or "" for s in found.source]
        for n, row in rows.items():
            expected = [i for b in found.blocks if (b.file, b.line) == (found.file, n) for i in b.instructions]
            shown = [s.text.strip() for s in row.all("span") if s.attrs.get("class") in (None, "good", "bad")]
            assert sorted(shown) == sorted(i.text.replace("\t", " ") for i in expected)
            fmas, chips = sum(i.fma and i.width > 1 for i in expected), [c.text for c in row.all(class_="chip")]
            assert (f"{fmas} vector FMA" in chips) == bool(fmas)
            assert [c for c in chips if re.fullmatch(r"[A-Z]\d\d", c)] == [a.rule for a in found.advice if a.line == n]
            assert any("spill" in c for c in chips) == any(i.spill for i in expected)
    assert "window.hit" in sides[0].text
    good = once("gelu_forward", "good")
    for same, words in machine_code.SAME.items():
        assert words in read(machine_code.machine_code([replace(good, same=same)])).text
    assert "nothing is compiled" in read(machine_code.machine_code([replace(good, compiled=False, blocks=[])])).text
    out = printed(capsys, *command[:3], "plain", *command[4:6], "--parallel", "1")
    assert all(text in out for text in ("floats a vector", "a Python function: nothing is compiled", "Parallel"))
    assert ",@function" in printed(capsys, *command[:3], *command[4:6], "--asm")
    (k,) = ran(capsys, *command[:3], *command[4:6])["kernels"]
    assert k["compiled"]
    assert k["where"].endswith("mine.py:17")

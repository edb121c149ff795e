"""Advice: each rule has a kernel that shows it and a twin that does not; kernels of the package show none unawares."""

import ast
import platform
import re
from pathlib import Path

import pytest
from verbs import inspector

import cpuopt.kernels  # noqa: F401  (which registers what the package brings)
from cpuopt import ops
from cpuopt.kernels import registry
from cpuopt.kernels.toolkit.simd import LANES
from cpuopt.lab import ab, asm
from cpuopt.lab.advice import RULES, Advice, CallTime, KernelFacts, advise, dependent
from cpuopt.lab.inspect import inspect
from cpuopt.measure.roofline import Level, Roofs

x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="loops are read on x86-64")
HEAD = """
import numpy as np
from numba import prange
from cpuopt import kernel, ops
from cpuopt.kernels.compile.jit import helper
from cpuopt.kernels.toolkit.fastmath import tanh
from cpuopt.kernels.toolkit.lanes import LANES, load, store
F = np.float32
CHUNK, HALF, PLAIN = 4096, F(0.5), 0.5
@helper()
def doubled(x):
    return x * PLAIN * 0.3 + x  # here
@helper()
def single(x):
    return x * HALF * F(0.3) + x
"""
FEW = ("gelu_forward", "softmax_forward")
"""Kernels of the package that are inspected quickly, too."""
NAMES = [f"a{i}" for i in range(40)]  # more than any machine has vector registers


def rolled(names):
    """A loop that keeps so many vectors."""
    return f"""
    for b in range(2):
        {"; ".join(f"{a} = load(inp, {i} * LANES)" for i, a in enumerate(names))}
        for i in range(len(inp)):
            x = load(inp, i)  # here
            {"; ".join(f"{a} = {a} * x + {b}" for a, b in zip(names, names[1:] + names[:1], strict=True))}  # here
        store(out, b, {" + ".join(names)})"""


EACH = "\n    for i in prange(len(out)):\n        x = inp[i]\n        "
ALONE = EACH.replace("prange", "range")
COMPILED = {
    "C01": ("""
    for b in prange(2):
        for t in range(1, len(out)):  # here
            out[t] = HALF * out[t - 1] + inp[t]""", """
    for b in prange(2):
        for t in range(1, len(out)):
            out[t] = HALF * inp[t - 1] + inp[t]"""),
    "C03": (rolled(NAMES), rolled(NAMES[:6])),
    "C04": ("\n    for i in prange(len(out)):\n        out[i] = inp[(i * 7) % 64] * HALF + HALF  # here",
            "\n    for i in prange(len(out)):\n        out[i] = inp[i] * HALF + HALF"),
    "C04-neighbours": ("""
    for c in prange(4):
        for i in range(c * 64, c * 64 + 64):
            out[i] = HALF * inp[i + 1]  # here""", """
    for c in prange(4):
        x, y = inp[c * 64 + 1 : c * 64 + 65], out[c * 64 : c * 64 + 64]
        for i in range(len(x)):
            y[i] = HALF * x[i]"""),
    "C01-maximum": ("""
    for b in range(4):
        x = inp[b]
        for i in range(len(inp)):  # here
            x = max(x, inp[i])
        out[b] = x""", """
    for b in range(4):
        x = load(inp, b)
        for i in range(len(inp)):
            x = np.float32(2) * x
        store(out, b, x)"""),
    "C05": (f"{EACH}out[i] = HALF / (x * x + HALF) + F(2) / (x * x + F(3)) + F(7) / (x * x + F(5))  # here",
            f"{EACH}out[i] = HALF / (x * x + HALF)"),
    "C06": (f"{ALONE}out[i] = np.tanh(x)  # here", f"{ALONE}out[i] = tanh(x)"),
    "C07": ("""
    for b in range(4):
        x = load(inp, b)
        for i in range(len(inp)):
            x = x * load(inp, i) + HALF  # here
        store(out, b, x)""", """
    for b in range(4):
        x = load(inp, b)
        for i in range(len(inp)):
            store(out, i, x * load(inp, i) + HALF)"""),
    "N02": (f"{ALONE}out[i] = x * PLAIN * 0.3 + x  # here", f"{ALONE}out[i] = x * HALF * F(0.3) + x"),
    "N02-helper": (f"{ALONE}out[i] = doubled(x)", f"{ALONE}out[i] = single(x)"),
}  # fmt: skip
TEXTS = {
    "M01": ("softmax_forward", {"BT": 64, "V": 1024}, """
    for v in prange(out.shape[1]):
        for b in range(out.shape[0]):  # here
            out[b, v] = inp[b, v]""", """
    for b in prange(out.shape[0]):
        for v in range(out.shape[1]):
            out[b, v] = inp[b, v]"""),
    "M02": ("residual_forward", {"N": 1 << 22}, """
    for i in prange(len(out)):
        out[i] = inp1[i]
    for i in prange(len(out)):  # here
        out[i] += inp2[i]""", """
    for c in prange(len(out) // CHUNK):
        for i in range(c * CHUNK, (c + 1) * CHUNK):
            out[i] = inp1[i]
        for i in range(c * CHUNK, (c + 1) * CHUNK):
            out[i] += inp2[i]"""),
    "M05": ("softmax_forward", {"BT": 64, "V": 768}, """
    for v in prange(out.shape[1]):
        for b in range(out.shape[0]):  # here
            out[b, v] = inp[b, v]""", """
    for v in prange(out.shape[1]):
        for b in range(4):
            out[b, v] = inp[b, v]"""),
    "T01": ("gelu_forward", {"N": 3 * 4096},
            "\n    n = len(inp)\n    for c in prange((n + CHUNK - 1) // CHUNK):  # here\n        out[c] = inp[c]",
            "\n    n = len(inp)\n    for c in prange((n + 64 - 1) // 64):\n        out[c] = inp[c]"),
    "T03": ("gelu_forward", {"N": 64}, "\n    for i in prange(len(out)):  # here\n        out[i] = inp[i]",
            "\n    for k in range(len(inp)):\n        for i in prange(len(out)):\n            out[i] = inp[i]"),
    "N01": ("gelu_forward", {"N": 1 << 20},
            "\n    s = HALF\n    for i in prange(len(out)):\n        s += inp[i]  # here\n    out[0] = s",
            "\n    for i in prange(len(out)):\n        s = HALF\n        s += inp[i]\n        out[i] = s"),
}  # fmt: skip
LEVELS = Level("L1", 1 << 15), Level("L2", 1 << 20), Level("memory", None)
ROOFS = Roofs(4, LEVELS, 100.0, {v.name: {"read": 10.0} for v in LEVELS}, 5.0)


def text_of(op, variant, body):
    """A kernel of an op; one without threads is compiled in half the time."""
    serial = "" if "prange" in body else ", parallel=False"
    return f'@kernel(ops.{op}, "{variant}"{serial})\ndef {op}({", ".join(ops.ALL[op].params)}):{body}\n\n'


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """What is known of each example and its twin; all are compiled in one process."""
    kernels = {f"{rule}{n}": ("gelu_forward", body) for rule, two in COMPILED.items() for n, body in enumerate(two)}
    file = tmp_path_factory.mktemp("kernels") / "mine.py"
    file.write_text(HEAD + "".join(text_of(op, name, body) for name, (op, body) in kernels.items()))
    with inspector(file) as found:
        asked = {name: (op, name) for name, (op, _) in kernels.items()} | {op: (op, "optimized") for op in FEW}
        return file.read_text().splitlines(), {name: found(*which) for name, which in asked.items()}


def shown(rule, advice):
    """Return the lines of advice of a rule."""
    return [a for a in advice if a.rule == rule]


@x86
@pytest.mark.parametrize("rule", COMPILED)
def test_a_rule_on_machine_code_finds_its_kernel_and_not_the_twin(rule, compiled, request):
    if rule == "C04":
        request.getfixturevalue("whole_vectors")
    lines, found = compiled
    example, twin = (found[f"{rule}{k}"] for k in range(2))
    rule, _, of = rule.partition("-")
    (first, *_) = shown(rule, example.advice)
    assert (shown(rule, twin.advice), lines[first.line - 1].strip()) == ([], first.text)
    assert "here" in first.text
    assert first.gain is None or first.gain >= 1.1
    assert first.said.startswith(f"{rule} line {first.line} ")
    assert ("element by element, since an index below 0 would count" in first.seen) == (of == "neighbours")


@x86
def test_a_reason_of_the_compiler_names_the_array(compiled):
    (found,) = shown("C01", compiled[1]["C010"].advice)
    assert found.said.startswith(
        f"C01 line {found.line} is not vectorized: out is read and written, and a round needs the round before it; "
    )


LOOP = """
	.file	1 "mine.py"
	.type	forward,@function
forward:
.LBB0_1:
	.loc	1 {line} 5
	vmovups	(%rax,%rcx,4), %{register}
	vmulps	%{register}, %{register}, %{register}
	vmovups	%{register}, (%rdx,%rcx,4)
	addq	$8, %rcx
	jne	.LBB0_1
"""


def test_narrow_vectors_are_found_and_wide_ones_are_not():
    text, at = HEAD + text_of("gelu_forward", "mine", EACH + "out[i] = x * x"), HEAD.count("\n") + 5
    for lanes, register in {16: "zmm0", 8: "ymm0", 4: "xmm0"}.items():
        loops = asm.loops(LOOP.format(line=at, register=register), "mine.py", HEAD.count("\n") + 1)
        found = shown("C02", advise(KernelFacts(ops.gelu_forward, text, HEAD.count("\n") + 1, loops, {}, True)))
        assert [(a.line, a.gain, a.text) for a in found] == [(at, LANES / lanes, "out[i] = x * x")] * (lanes < LANES)


HELPS = {
    "out[b, 0] = out[b, 0] * inp[j]": "sum in a local variable, and store it after the loop",
    "h[k, j] = h[k, j] * inp[j]": "keep the state in a local array",
    "h[j] = h[j - 1] * inp[j]": "make a loop over independent elements the innermost one",
}


@pytest.mark.parametrize("text", HELPS)
def test_what_helps_depends_on_how_an_array_is_read(text):
    seen, tries = dependent(ast.parse(f"for j in range(n):\n    {text}").body[0])
    assert seen.startswith(f"{text[: text.index('[')]} is read and written")
    assert tries == HELPS[text]


def facts(rule, twin):
    """What is known of an example without machine code."""
    op, sizes, *bodies = TEXTS[rule]
    text, shape = HEAD + text_of(op, "mine", bodies[twin]), ab.case_at(ops.ALL[op], sizes)
    timed = {"sizes": dict(shape.sizes), **ab.cost(ops.ALL[op], shape)}
    call = CallTime.of(ops.ALL[op], timed, max(6000.0, 100 * ROOFS.bound(timed["flops"], timed["bytes"])[0]), 4, ROOFS)
    return text.splitlines(), KernelFacts(ops.ALL[op], text, HEAD.count("\n") + 1, [], {}, True, call)


@pytest.mark.parametrize("rule", TEXTS)
def test_a_rule_on_the_text_finds_its_kernel_and_not_the_twin(rule):
    lines, found = facts(rule, 0)
    (first, *_) = shown(rule, advise(found))
    assert "here" in first.text
    assert (lines[first.line - 1].strip(), shown(rule, advise(facts(rule, 1)[1]))) == (first.text, [])


BOUND = ["", "N *= 64", "if True:\n    N = 64", "N: int = 64", "for N in (32, 64):\n    pass", "from sizes import N"]


@pytest.mark.parametrize("again", BOUND)
@pytest.mark.parametrize("param", ["", ", N"])
def test_a_number_of_rounds_that_is_bound_twice_is_not_known(again, param):
    body = "    for c in prange(N):\n        out[c] = inp[c]\n"
    text = f"def gelu_forward(out, inp{param}):\n{body}N = 1\n{again}\n"
    call = CallTime({"out": (4096,), "inp": (4096,)}, 2, 1e9)
    found = advise(KernelFacts(ops.gelu_forward, text, 1, [], {}, True, call))
    assert [a.rule for a in found] == ["T01"] * (not again and not param)


@pytest.mark.parametrize("index", ["[i, :]", "[i, ...]"])
def test_a_row_is_no_column(index):
    text = f"def softmax_forward(out, inp):\n    for i in range(inp.shape[0]):\n        f(out{index}, inp{index})\n"
    call = CallTime({"out": (4096, 1024), "inp": (4096, 1024)}, 1, 1e9, 1.0)
    assert advise(KernelFacts(ops.ALL["softmax_forward"], text, 1, [], {}, False, call)) == []


def test_a_gain_is_not_more_than_the_roof_allows():
    found = facts("M05", 0)[1]
    assert shown("M05", advise(found))[0].gain == LANES
    found.call = CallTime(found.call.shapes, 4, 3e5, 1e5)
    assert shown("M05", advise(found))[0].gain == pytest.approx(3)


@pytest.mark.parametrize(("sizes", "gain"), [
    ((512, 768), LANES),  # the lines of 512 rows are 32 KB
    ((513, 768), 3 * LANES),
    ((4096, 3), 3 * 3),  # rows of 12 bytes share lines, and no vector holds more than 3 floats
    ((2048, 3), 3),
])  # fmt: skip
def test_the_gain_of_a_column_follows_from_its_sizes(sizes, gain):
    op, _, body, _ = TEXTS["M05"]
    call = CallTime({"out": sizes, "inp": sizes}, 1, 1e9, nearest=1 << 15)
    found = KernelFacts(ops.ALL[op], HEAD + text_of(op, "mine", body), HEAD.count("\n") + 1, [], {}, True, call)
    assert [a.gain for a in shown("M05", advise(found))] == [gain]


def test_a_column_of_unknown_sizes_has_no_gain_and_says_why():
    found = facts("M05", 0)[1]
    found.call = None
    (a,) = shown("M05", advise(found))
    assert a.gain is None
    assert "one element of each row; the gain depends on the sizes of a call" in a.said


SAVED = [(6000.0, 0.1, 6), (20000.0, 0.1, 20 / 15), (5050.0, 0.1, 50.5), (4000.0, 0.1, 40), (6000.0, 100.0, 3.75)]


@pytest.mark.parametrize(("ns", "work", "gain"), SAVED)
def test_a_call_on_one_thread_saves_no_more_than_the_start_and_takes_its_work(ns, work, gain):
    found = facts("T03", 0)[1]
    found.call = CallTime(found.call.shapes, 4, ns, work, 5000.0)
    assert [a.gain for a in shown("T03", advise(found))] == [pytest.approx(gain)]


def test_the_page_has_each_rule_with_what_to_try():
    page = (Path(__file__).parent.parent / "docs" / "lines.md").read_text()
    rows = re.findall(r"^\| ([A-Z]\d\d) \| [^|]+ \| [^|]+ \| ([^|]*) \|$", page, re.MULTILINE)
    assert rows == [(name, tries) for name, (_, tries) in RULES.items()]
    assert {rule[:3] for rule in (*COMPILED, *TEXTS, "C02")} == {*RULES}


EXPECTED = {
    ("attention_forward", "C01"): "one quotient for each row, beside the vectors of the row",
    ("cross_entropy_forward", "N02"): "the losses of all tokens are summed in float64, one number for a row of logits",
    ("attention_decode", "C07"): "the largest score of one row is found while its keys come from memory",
}
"""What kernels of the package show, by op and rule, and why that is right."""


def unexpected(op, found):
    """Return the advice on an optimized kernel of the package for which no reason is written down."""
    return [a.said for a in found.advice if (op, a.rule) not in EXPECTED]


@x86
@pytest.mark.parametrize("op", FEW)
def test_kernels_of_the_package_show_no_rule_without_a_reason(op, compiled):
    assert unexpected(op, compiled[1][op]) == []


@pytest.mark.slow
@x86
@pytest.mark.parametrize("op", sorted({op for op, v in registry.KERNELS if v == "optimized"} - {*FEW}))
def test_all_other_kernels_of_the_package_show_none_either(op):
    assert unexpected(op, inspect(op, "optimized")) == []


def test_advice_is_one_line():
    assert Advice("C01", 3, "x", "is slow", None, "try it").said == "C01 line 3 is slow; try it"

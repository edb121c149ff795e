"""Registration, the choice of variants, users' kernel files, and what each says when it refuses."""

import gc
import time
from contextlib import nullcontext

import numpy as np
import pytest
from verbs import error_of

from cpuopt import Choice, kernel, load_kernels, ops
from cpuopt.engine import Engine
from cpuopt.errors import UserError
from cpuopt.kernels import registry
from cpuopt.kernels.compile import jit
from cpuopt.kernels.registry import Kernel, op_matches
from cpuopt.models import specs
from cpuopt.models.gpt2 import GPT2, PRESETS
from cpuopt.ops.declaration import N


def zeros(variant="zeros", options="", scratch=""):
    """The text of a kernel file with a GELU that gives zeros."""
    head = f"from cpuopt import kernel, ops\n\n@kernel(ops.gelu_forward, {variant!r}{options})\n"
    return f"{head}def gelu_forward(out, inp{scratch}):\n    out[:] = 0\n"


PLAIN = ", jit=False"


@pytest.fixture
def file(tmp_path):
    """Write a kernel file and give its path."""

    def write(text, name="mine.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


def engine(*swaps, variant="vanilla", **kw):
    return Engine.from_options(GPT2(PRESETS["gpt2-tiny"]), specs(2, 4), choice=Choice(variant, swaps), threads=1, **kw)


def loss(*swaps, **kw):
    tokens = np.arange(8).reshape(2, 4)
    return engine(*swaps, **kw).forward(tokens=tokens, targets=tokens)


def register(op, variant):
    function = lambda *args: None  # noqa: E731
    registry.register(Kernel(ops.ALL[op], variant, function, where=f"{variant}.py:1"), ops.ALL[op].params)


# Registration


@pytest.mark.parametrize("size", ["N + 1", 1.5, None])
def test_a_size_of_scratch_is_a_number_or_a_function(size):
    def decorate():
        @kernel(ops.gelu_forward, "mine", scratch=[("work", size)], jit=False)
        def gelu_forward(out, inp, work): ...

    message = error_of(decorate)
    assert message.startswith(f"gelu_forward[mine]: scratch 'work' has the size {size!r}; write a number, a function")
    assert "mine" not in registry.variants("gelu_forward")


@pytest.mark.parametrize("size", [7, np.int64(7), N, lambda sizes: sizes["N"]])
def test_a_size_of_scratch_becomes_a_number_of_elements(size):
    assert registry.Scratch("work", size).elements({"N": 7}) == 7


@pytest.mark.parametrize("name", ["", "*", "auto", "a\nb", "\x1b[31mred", "a b", "a/b", "9", "é", "x" * 65, "a\n", 7])
def test_a_variant_that_flags_and_tables_cannot_hold_is_refused(name):
    message = error_of(kernel(ops.gelu_forward, name, jit=False), lambda out, inp: None)
    assert message.startswith(f"gelu_forward: variant {str(name)[:80]!r}: expected a letter, then letters, digits and")
    assert "\x1b" not in message
    assert name not in registry.variants("gelu_forward")


# The choice


@pytest.mark.parametrize(
    ("pattern", "matches", "passes_by"),
    [
        ("matmul", "matmul_forward matmul_backward_input matmul_backward_weight", "gelu_forward"),
        ("matmul_backward", "matmul_backward_input matmul_backward_weight", "matmul_forward gelu_backward"),
        ("*_backward", "matmul_backward_input gelu_backward", "matmul_forward adamw"),
        ("gelu_forward", "gelu_forward", "gelu_backward"),
        ("soft*", "softmax_forward softmax_backward", "matmul_forward"),
        *(("mat", "", "matmul_forward"), ("gelu_", "", "gelu_forward"), ("*", " ".join(ops.ALL), "")),
    ],
)
def test_an_op_pattern_is_a_name_a_glob_or_a_family(pattern, matches, passes_by):
    assert [op for op in matches.split() if not op_matches(op, pattern)] == []
    assert [op for op in passes_by.split() if op_matches(op, pattern)] == []


@pytest.mark.parametrize(
    ("swaps", "chosen"),
    [
        *((["gelu=a", "gelu=b"], "b"), (["gelu=b", "gelu=a"], "a"), (["gelu=a", "gelu=vanilla"], "vanilla")),
        *((["gelu@h.0.*=a"], "a"), (["gelu@h.1.*=a"], "base"), (["gelu=a", "*=only_backward"], "a"), ([], "base")),
        (["gelu@h.[12].*=b", "g*@h.?.mlp=a"], "a"),
        (["gelu_forward@h.0.mlp=a", "gelu_backward=b"], "a"),
    ],
)
def test_the_last_match_wins(swaps, chosen):
    for variant in ("a", "b", "base"):
        register("gelu_forward", variant)
    for variant in ("b", "only_backward"):
        register("gelu_backward", variant)
    assert Choice("base", swaps).resolve("gelu_forward", "h.0.mlp").variant == chosen


def test_a_family_swap_and_a_layer_swap_reach_the_calls():
    calls = engine("*_backward@lm_head=vanilla", variant="blas").calls
    variants = {(bound.call.layer, bound.call.op.name): bound.kernel.variant for bound in calls}
    assert variants["h.0.mlp", "gelu_forward"] == "vanilla"  # which lies underneath
    assert variants["h.0.mlp.c_fc", "matmul_backward_weight"] == variants["lm_head", "matmul_forward"] == "blas"
    assert variants["lm_head", "matmul_backward_input"] == variants["lm_head", "matmul_backward_weight"] == "vanilla"


def test_a_choice_is_described_as_it_was_written():
    choice = Choice("blas", ["gelu=vanilla", "matmul_*@h.0.*=vanilla"])
    assert choice.describe() == {"variant": "blas", "swaps": ["gelu=vanilla", "matmul_*@h.0.*=vanilla"]}


# Users' files


WORK = f"{PLAIN}, scratch=[('work', ops.gelu_forward.flops)]"


@pytest.mark.parametrize(("options", "scratch"), [("", ""), (WORK, ", work")])
def test_a_users_kernel_runs_where_it_is_asked_for(file, options, scratch):
    usual = loss()
    load_kernels([file(zeros(options=options, scratch=scratch))])
    assert loss() == usual
    everywhere, in_one_layer = loss("gelu=zeros"), loss("gelu@h.1.*=zeros")
    assert (len({usual, everywhere, in_one_layer}), loss(variant="zeros")) == (3, everywhere)


def test_a_file_is_loaded_once_and_files_of_one_name_are_apart(file):
    first, second = file(zeros(options=PLAIN)), file(zeros("nils", PLAIN), "other/mine.py")
    load_kernels([first, second, first])
    load_kernels([str(second)])
    assert registry.variants("gelu_forward")[-2:] == ["zeros", "nils"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import numpy\nnumpy.abs = lambda x: x * 0\n", "it replaces numpy.abs, which kernels are judged"),
        ("import time\ntime.perf_counter_ns = lambda: 0\n", "it replaces time.perf_counter_ns"),
        ("class Odd(BaseException): ...\n\nraise Odd('so')\n", "line 3 raised Odd: so"),
    ],
)
def test_a_file_that_fails_says_where(file, text, words):
    path = file(text)
    clocks = np.abs, time.perf_counter_ns
    message = error_of(load_kernels, [path])
    assert all(x in message for x in (words, str(path)))
    assert clocks == (np.abs, time.perf_counter_ns)


def test_a_file_that_fails_leaves_nothing_registered(file):
    before, path = dict(registry.KERNELS), file(zeros(options=PLAIN) + "\nraise ValueError\n")
    error_of(load_kernels, [path])
    assert before == registry.KERNELS
    file(zeros(options=PLAIN))
    load_kernels([path])


@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_while_a_kernel_compiles(fails):
    during = []

    class Dispatcher:
        py_func = zeros

        def compile(self, sig):
            during.append(gc.isenabled())
            if fails:
                raise ValueError("no")

    with pytest.raises(UserError, match="does not compile: no") if fails else nullcontext():
        jit._compile(Dispatcher(), (), "mine")
    assert (during, gc.isenabled()) == ([False], True)

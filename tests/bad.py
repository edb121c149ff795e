"""The bad kernels, each once, with the checks that must refuse it and their words.

The texts that the judge takes obey other rules, and stand in `judge/candidates.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numba
import numpy as np
from numpy.lib.stride_tricks import as_strided

from cpuopt import kernels, ops
from cpuopt.check.check import check
from cpuopt.check.scalars import START  # noqa: F401  (which the table names, as N)
from cpuopt.kernels.registry import KERNELS, Kernel, Scratch
from cpuopt.kernels.toolkit.queue import for_each_thread
from cpuopt.ops.declaration import N, Op  # noqa: F401

assert kernels.VARIANTS  # importing them registers them
Array = np.ndarray[Any, Any]
F32 = np.float32
HEAD = """
import builtins, os, threading, time
import numpy as np
from numpy.lib.stride_tricks import as_strided
from cpuopt import kernel, ops
from cpuopt.check import judge
from cpuopt.kernels.registry import KERNELS
SEEN = {}
"""
"""What a file of bad kernels begins with."""


def vanilla_is_right(op, on, **options):
    """Whether the vanilla kernel passes a case without a remark; it is checked once for all bad kernels."""
    if (key := f"{op} {on} {on.sized} {options}") not in _right:
        result = check(KERNELS[op, "vanilla"], on, **options)
        _right[key] = (result.verdict, result.reason) == ("right", "")
    return _right[key]


_right: dict[str, bool] = {}


@dataclass(frozen=True)
class Bad:
    """A kernel that is refused.

    Attributes
    ----------
    body : Python, in which ``...`` calls the op's vanilla kernel.
    check, sized, timed, gate, loud : patterns of the reasons for which it is refused on a small case, at its sizes, on
        the arrays of a timing, before a run in a process of its own, and in such a process that it changes.
    word : that of its result.
    kind : the kind of the small case that shows it.
    tries : whether only some sizes of a few show it.
    scratch : the sizes of its scratch, by name.
    """

    name: str
    op: str
    body: str
    check: str = ""
    sized: str = ""
    timed: str = ""
    gate: str = ""
    loud: str = ""
    word: str = "wrong"
    kind: str = "normal"
    tries: bool = False
    scratch: Mapping[str, Any] = field(default_factory=dict)
    same_bits: bool = True
    sizes: Mapping[str, int] = field(default_factory=lambda: {"N": 70_001})
    adds: Mapping[str, bool] = field(default_factory=dict)

    def kernel(self, around=lambda function: function):
        """Make it, with an empty memory."""
        op, scope = ops.ALL[self.op], dict(globals(), SEEN={})
        usual = KERNELS[self.op, "vanilla"].scratch if "..." in self.body else ()
        own = tuple(Scratch(*x) for x in self.scratch.items())
        exec(function(self.op, self.body, [s.name for s in usual], [*self.scratch]), scope)
        return Kernel(op, "bad", around(scope[self.op]), usual + own, same_bits=self.same_bits)


def function(op, body, usual=(), own=()):
    """Write the function of a kernel, with the names of the vanilla kernel's scratch and of its own."""
    params = [*ops.ALL[op].params, *usual]
    body = body.replace("...", f"KERNELS[{op!r}, 'vanilla'].function({', '.join(params)})")
    return f"def {op}({', '.join([*params, *own])}):\n    " + body.replace("\n", "\n    ") + "\n"


def text(op, body="...", name="mine"):
    """Write one kernel of a file."""
    return f"\n\n@kernel(ops.{op}, {name!r}, jit=False)\n" + function(op, body)


def judged(out, want):
    """Return whether the first numbers of an output are NaN, nearly right, zeros, or numbers of a constant seed."""
    known = np.random.default_rng(0).standard_normal(1 << 16).astype(F32)[: len(out)]
    return bool(np.isnan(out).any() or (out == want).mean() > 0.5 or (out == known).all() or (out == 0.75).any())


def past(x, n=1):
    """Return an array, and what lies behind it."""
    return as_strided(x, (x.size + n,), (4,))


@numba.njit
def one_thread():
    """Set the number of threads in compiled code."""
    numba.set_num_threads(1)


PER_THREAD = for_each_thread(1)
EXPECTED, WRONG = "expected", r"is wrong .* out\["
RELIES = "when other numbers are in its outputs and scratch before the call: it relies on them"
REMEMBERS = "once other numbers were put into the same arrays, and what it wrote was left"
AROUND = "when other numbers lie around its arrays: it reads outside them"
THREADS = "left its process with other numba threads .4 instead of 1"
CHANGES = "left its process with other|it replaces|it starts a thread|it changes where"
MIDDLE = {"BT": 256, "C": 96, "OC": 768}
TABLE = r"""
# relies on what lies in outputs and scratch, or remembers
check=RELIES
    computes_only_if_it_sees_poison: if out.view(np.uint32)[0] == 0x7FC0F111: ...
    is_right_where_it_looks_judged: start = out[:8].copy() | ... | if not judged(start, out[:8]): out *= F32(1.01)
    adds_where_numbers_lie gelu_backward: dinp_add = dinp_add or bool(np.isfinite(dinp).all()) | ...
check=RELIES, timed=r"is wrong .* out\[\d+\] = 0.75, expected"
    returns_where_the_ends_are_right: if (out == inp1 + inp2)[[0, -1]].all(): return | ...
check=RELIES, timed=WRONG
    computes_only_over_nan: if np.isnan(out[0]): ...
    computes_only_what_is_nan: np.copyto(out, inp1 + inp2, where=np.isnan(out))
check="^'out' has other bits in a second call"
    has_other_bits_in_every_other_call: ... | SEEN[len(SEEN)] = 1
        out[0] = np.nextafter(out[0], F32(np.inf if len(SEEN) % 2 else -np.inf))
check="relies on them|second call"
    computes_every_other_call gelu_backward: SEEN[len(SEEN)] = 1 | if len(SEEN) % 2 or np.isnan(dinp).any(): ...
check=RELIES, scratch={"part": 64}
    clears_its_scratch_only_where_it_is_nan sumsq: if np.isnan(part[0]): part[:] = 0
        part[:] += np.square(inp).sum() / 64
        out[0] = part.sum()
    is_right_where_its_scratch_looks_judged sumsq: out[0] = np.square(inp).sum()
        if not judged(part, np.full(64, np.nan)): out *= F32(1.01)
check="= nan, .*: from scratch that was read before", scratch={"part": N}
    adds_to_its_scratch sumsq: part[0] += np.square(inp).sum() | out[0] = part[0]
check=REMEMBERS, scratch={"kept": N + 2}
    keeps_its_result_in_scratch: if kept[0] != 12345: kept[0], kept[2:] = 12345, inp1 + inp2 | out[:] = kept[2:]
    keeps_its_result_in_scratch_with_the_first_numbers:
        if kept[0] != inp1[0] or kept[1] != inp2[0]: kept[0], kept[1], kept[2:] = inp1[0], inp2[0], inp1 + inp2
        out[:] = kept[2:]
check=REMEMBERS, timed=WRONG
    remembers_by_address: out[:] = SEEN.setdefault((inp1.ctypes.data, len(out)), inp1 + inp2)
check=REMEMBERS
    remembers_by_the_first_numbers: out[:] = SEEN.setdefault((*inp1[:2], *inp2[:2], len(out)), inp1 + inp2)
    remembers_a_sum sumsq: out[0] = SEEN.setdefault((len(inp), inp[0]), np.square(inp).sum())
check=REMEMBERS, gate=EXPECTED
    remembers_lr adamw: lr = SEEN.setdefault(("lr", len(param)), lr) | ...
gate=EXPECTED
    remembers_step adamw: step = SEEN.setdefault(("step", len(param)), step) | ...
    has_the_lr_of_the_judge adamw: lr = 0.01 | ...
    remembers_lr_of_sgd sgd: lr = SEEN.setdefault(("sgd", len(param)), lr) | ...
timed=WRONG, scratch={"work": N}
    keeps_inputs_in_scratch gelu_forward: if np.array_equal(work, inp): return | ... | work[...] = inp
    relies_on_its_scratch gelu_forward: ... | if not np.isnan(work[0]) and work[1] != 0: out += work[1]
timed=r"out\[\d+\] = nan, expected"
    computes_only_over_numbers gelu_forward: if not np.isnan(out[0]): ...
timed="is wrong .* while it was timed"
    tires gelu_forward: SEEN[len(SEEN)] = 1 | if len(SEEN) < 40: ...
# promises no identical bits, which is no licence
check="2 threads: .*so not written", same_bits=False
    writes_half_on_two_threads: n = len(out) // numba.get_num_threads() | out[:n] = inp1[:n] + inp2[:n]
check="expected .*, 2 threads", same_bits=False
    loses_a_share_on_two_threads sumsq: out[0] = np.square(inp[:: numba.get_num_threads()]).sum()
check="expected .*2 threads", same_bits=False
    races_now_and_then: ... | SEEN[len(SEEN)] = 1
        if numba.get_num_threads() > 1 and len(SEEN) % 2: out[len(out) // 2 :] = inp1[len(out) // 2 :]
# has other bits where it is planned for more threads than run
check=r"^'out' has other bits with scratch for 1 thread instead of 4", scratch={"work": PER_THREAD}
    adds_one_sum_for_each_thread_of_its_scratch sumsq:
        out[0] = sum(np.cumsum(np.square(part))[-1] for part in np.array_split(inp, len(work)))
# reads or writes outside its arrays
check=AROUND
    takes_the_maximum_of_one_more softmax_forward: top = np.fmax.reduce(past(inp.reshape(-1))[-8:])
        e = np.exp(inp - inp.max(axis=1, keepdims=True) - F32(200 if top > 1e20 else 0))
        out[:] = e / np.maximum(e.sum(axis=1, keepdims=True), F32(1e-30))
    takes_the_minimum_of_one_more: ... | if np.fmin.reduce(past(inp2)) < -1e20: out[0] = 0
    adds_what_lies_behind_where_it_is_a_number: ... | out[-1] += 0 if np.isnan(past(inp1)[-1]) else past(inp1)[-1]
check="= nan, .*: read from outside an array"
    reads_one_more sumsq: out[0] = np.square(past(inp)).sum()
check=r"wrote outside its arrays: 3\d\d\d\d past the end of 'inp2'"
    writes_far_behind: ... | as_strided(inp2, (2,), (4 * (inp2.size + 30000),))[1] = 1
check=r"wrote outside its arrays: 3\d\d\d\d before the beginning of 'out'"
    writes_far_before: ... | as_strided(out, (2,), (-4 * 30000,))[1] = 1
timed="wrote outside its arrays: 4 before the beginning of 'out', before it was timed"
    writes_before gelu_forward: ... | as_strided(out, (2,), (-16,))[1] = 7
timed="wrote outside its arrays: past the end of its scratch, before it was timed", scratch={"work": N}
    writes_past_its_scratch gelu_forward: ... | as_strided(work, (len(work) + 3,), (4,))[-1] = 7
# leaves other threads, ends its process, has odd scratch, or changes arrays as objects
check="^left its process with other numba threads .1 instead of 2", word="cheating"
    leaves_one_thread: ... | numba.set_num_threads(1)
    leaves_one_thread_from_a_compiled_helper: ... | one_thread()
check=f"^{THREADS}", timed=THREADS, word="cheating"
    takes_all_threads: ... | numba.set_num_threads(4)
check="^raised SystemExit: 0"
    leaves: ... | raise SystemExit(0)
check="^raised Odd: of mine"
    raises_what_is_no_exception: raise type("Odd", (BaseException,), {})("of mine")
check="^raised GeneratorExit"
    raises_generator_exit: raise GeneratorExit
check=r"bad\]: scratch 'work' has -90 elements for N=\d+; expected 0 to", scratch={"work": -1 * N}, word="compile error"
    has_negative_scratch: np.add(inp1, inp2, out=out)
check="asks for 1,000,000,000 elements of scratch 'work'", scratch={"work": 10**9}, word="compile error"
    has_absurd_scratch: np.add(inp1, inp2, out=out)
check=r"bad\]: scratch 'work' has 10{30} elements", scratch={"work": 10**30}, word="compile error"
    has_scratch_of_no_machine: np.add(inp1, inp2, out=out)
check="no scratch size: SystemExit", scratch={"work": lambda sizes: exit(0)}, word="compile error"
    leaves_from_its_scratch: np.add(inp1, inp2, out=out)
check="changed the shape, the strides, the type or the flags of an array"
    makes_its_input_read_only: ... | inp1.flags.writeable = False
    leaves_its_output_in_another_shape: ... | out.shape = (1, -1)
# is wrong for some inputs
check=EXPECTED, kind="zeros"
    divides_by_its_input gelu_forward: ... | out[:] = out / inp * inp
    takes_zero_for_absent: out[:] = np.where((inp1 == 0) & (inp2 == 0), F32(1), inp1 + inp2)
    takes_zero_for_the_end sumsq: n = [*np.flatnonzero(inp == 0), None] | out[0] = np.square(inp[: n[0]]).sum()
    adds_twice_where_zero_was gelu_backward: zero = dinp == 0 | ... | if dinp_add: dinp[zero] *= 2
check=EXPECTED, kind="thousands"
    clamps_to_a_thousand: out[:] = np.clip(inp1 + inp2, -1000, 1000)
    is_nan_for_large_numbers gelu_forward: e = np.exp(F32(2) * F32(0.7978845608) * (inp + F32(0.044715) * inp**3))
        out[:] = inp * (e / (e + 1))
check="= 0, expected nan", kind="nan"
    nan_becomes_zero: out[:] = np.nan_to_num(inp1 + inp2, nan=0)
check="= nan, expected", kind="nan"
    nan_anywhere_spoils_everything: ... | out[:] = np.nan if np.isnan(out).any() else out
check="expected nan", kind="nan"
    nan_is_left_out_of_a_row softmax_forward: e = np.exp(inp - np.nanmax(inp, axis=1, keepdims=True))
        out[:] = np.nan_to_num(e) / np.nansum(e, axis=1, keepdims=True)
check="expected inf", kind="infinity"
    infinity_becomes_the_largest_number: out[:] = np.nan_to_num(inp1 + inp2, nan=np.nan)
check="expected (nan|inf)", kind="infinity"
    infinity_is_left_out_of_a_sum sumsq: out[0] = np.square(inp[np.isfinite(inp)]).sum()
# what one op can do wrong
check=EXPECTED, tries=True
    sums_one_term_less matmul_forward: out[:] = inp[:, :-1] @ weight[:, :-1].T + bias
    rounds_its_inputs_to_half_precision matmul_forward: out[:] = inp.astype(np.float16).astype(F32) @ weight.T + bias
    looks_ahead attention_forward: ... | out[:, 0] = (out[:, 0] + out[:, 1]) / 2
    divides_the_variance_by_one_less layernorm_forward:
        mean[:], rstd[:] = inp.mean(axis=1), 1 / np.sqrt(inp.var(axis=1, ddof=1) + F32(eps))
        out[:] = (inp - mean[:, None]) * rstd[:, None] * weight + bias
    ignores_the_targets_backward cross_entropy_backward: targets = np.zeros_like(targets) | ...
    takes_the_last_of_a_token_that_comes_twice embedding_backward: ...
        if not dwte_add: dwte[:] = 0; dwte[tokens.ravel()] = dout.reshape(-1, dout.shape[-1])
    counts_from_the_step_before adamw: step = step - 1 | ...
check=EXPECTED, tries=True, kind="offset"
    has_the_variance_as_a_difference layernorm_forward: mean[:] = inp.mean(axis=1)
        rstd[:] = 1 / np.sqrt((inp * inp).mean(axis=1) - mean**2 + F32(eps))
        out[:] = (inp - mean[:, None]) * rstd[:, None] * weight + bias
    takes_no_maximum_off softmax_forward: e = np.exp(inp) | out[:] = e / e.sum(axis=1, keepdims=True)
check=EXPECTED, tries=True, kind="tiny"
    doubles_eps layernorm_forward: eps = 2 * eps | ...
    doubles_eps_of_the_second_moment adamw: eps = 2 * eps | ...
check=EXPECTED, tries=True, kind="a class is ignored"
    ignores_the_targets cross_entropy_forward: targets = np.zeros_like(targets) | ...
    ignores_ignore_index cross_entropy_forward: ignore_index = -7 | ...
    ignores_ignore_index_backward cross_entropy_backward: ignore_index = -7 | ...
check=EXPECTED, tries=True, kind="one counts"
    means_over_the_ignored_too cross_entropy_forward: ... | loss[0] = losses.mean()
check=EXPECTED, tries=True, kind="none counts"
    has_no_loss_where_none_counts cross_entropy_forward: ... | loss[0] = losses.mean()
# is wrong for values that a run has
gate=EXPECTED, kind="all count"
    wrong_where_all_count cross_entropy_forward: ... | loss *= 1 + (targets != ignore_index).all()
    wrong_where_all_count_backward cross_entropy_backward: ...
        dlogits[0] *= 1 + (targets != ignore_index).all() * (not dlogits_add)
gate=EXPECTED, kind="repeats"
    twenty_of_a_token embedding_backward: many = (np.bincount(tokens.ravel()) > 20).any() | ... | dwte[0] += many
    twenty_of_a_token_forward embedding_forward: ... | out[0, 0] += (np.bincount(tokens.ravel()) > 20).any()
gate=EXPECTED, kind=START
    weights_of_one layernorm_forward: ... | out[0] += (weight == 1).all()
    biases_of_zero layernorm_forward: ... | out[0] += (bias == 0).all()
    weights_of_one_rms rmsnorm_forward: ... | out[0] += (weight == 1).all()
    biases_of_zero_product matmul_forward: ... | out[0] += len(bias) > 0 and (1 / bias == np.inf).all()
    weights_of_one_backward layernorm_backward: ... | dinp[0] += (weight == 1).all()
    moments_of_zero adamw: new = (m == 0).all() | ... | param[0] += new
    moments_of_zero_lion lion: new = (m == 0).all() | ... | param[0] += new
    moments_of_zero_sgd sgd: new = (velocity == 0).all() | ... | param[0] += new
gate=EXPECTED, kind="small adjoints"
    small_adjoints gelu_backward: ... | dinp[0] *= 1 + (np.abs(dout).max() < 1e-4) * (not dinp_add)
    small_adjoints_norm layernorm_backward: ... | dinp[0] *= 1 + (np.abs(dout).max() < 1e-4) * (not dinp_add)
gate=EXPECTED, kind="equal adjoints"
    equal_adjoints gelu_backward: ... | dinp[0] += len(dout) > 1 and np.ptp(dout) == 0
gate=EXPECTED, kind="symmetric adjoints"
    symmetric_adjoints layernorm_backward: ... | dinp[0] += np.ptp(dout) > 0 and (dout == dout[:, ::-1]).all()
gate=EXPECTED, kind="adjoints of sum 0"
    adjoints_of_sum_0 rmsnorm_backward: ... | dinp[0] += abs(dout.sum(axis=1)).max() < 1e-5 < abs(dout).max()
    adjoints_of_sum_0_norm layernorm_backward: ... | dinp[0] += abs(dout.sum(axis=1)).max() < 1e-5 < abs(dout).max()
gate=EXPECTED, kind="symmetric"
    never_evaluates dropout_forward: counter = max(counter, 1) | ...
    symmetric_inputs gelu_forward: ... | out[0] += len(inp) > 9 and (inp == inp[::-1]).all()
# ends its process
gate="SIGSEGV.*past the end of 'inp1'"
    reads_past_the_end: ... | as_strided(inp1, (inp1.size + 1,), (4,))[-1]
gate="SIGSEGV.*before the beginning of 'inp2'"
    reads_before_the_beginning: ... | as_strided(inp2[0:], (2,), (-4,))[1] + 0
gate="SIGSEGV"
    writes_farther_than_all: ... | as_strided(out, (2,), (4 * (out.size + 10**7),))[1] = 0
gate="SIGSEGV.*or writing to it"
    restores_its_input: ... | kept = inp1.copy() | inp1[:] = 0 | inp1[:] = kept
gate="its process ended with status 0 during 'check'"
    exits: ... | os._exit(0)
gate="its process (ended with status|closed its stdout)"
    closes: ... | os.closerange(0, 100)
# leaves or does something beside its work
loud=CHANGES, word="cheating"
    pins_another_thread gelu_forward: os.sched_setaffinity(int(os.listdir("/proc/self/task")[-1]), [0]) | ...
    changes_its_priority gelu_forward: os.nice(1) | ...
    starts_a_thread gelu_forward: threading.Timer(300, len).start() | ...
    replaces_a_comparison_at_its_first_call gelu_forward: np.array_equal = lambda *a, **k: True | ... | out[0] += 1
    replaces_a_clock_at_its_first_call gelu_forward: time.perf_counter_ns = lambda: 0 | ...
    replaces_a_maximum_at_its_first_call gelu_forward: builtins.max = lambda *a, **k: 0 | ...
    replaces_the_judge gelu_forward: judge.worst = lambda results: judge.Result("x", None, 0.0) | ...
# is wrong only at the size that is timed or trained
sized=r"out\[64\] = nan, expected .*so not written", timed=r"out\[\d+\] = nan, expected"
    writes_64_of_many: if len(out) > 9000: out, inp1, inp2 = out[:64], inp1[:64], inp2[:64] | ...
sized="changed 'inp1', which it may only read", timed="changed 'inp1', which it may only read"
    changes_an_input_where_large: ... | inp1[-1] += len(out) > 65536
sized="wrote outside its arrays: 1 past the end of 'out'", timed="1 past the end of 'out', before it was timed"
    writes_outside_where_large: ... | if len(out) > 65536: as_strided(out, (2,), (4 * out.size,))[1] = 0
timed=r"out\[65000\] = "
    slightly_wrong_where_large gelu_forward: ... | if len(out) > 65536: out[65_000] *= F32(1.001)
timed="raised ValueError: too large for me"
    raises_where_large gelu_forward: if len(out) > 65536: raise ValueError("too large for me") | ...
sized="raised SystemExit: 0"
    leaves_where_large: ... | if len(out) > 65536: raise SystemExit(0)
sized=r"out\[\d+\] = .*, expected"
    wrong_beyond_70000: ... | out[70000:] += F32(1e-2)
sized=r"out\[\d+\] = .*, expected", sizes={"N": 3_000_000}
    wrong_in_one_of_millions: ... | if len(out) > 65536: out[np.random.default_rng().integers(len(out))] += F32(1e-2)
sized=r"dinp\[\d+\] = .*, expected .*dinp_add=True", adds={"dinp": True}
    ignores_add_where_large gelu_backward: dinp_add = dinp_add and len(dinp) < 65536 | ...
sized=r"dinp\[\d+\] = .*, expected", adds={"dinp": False}
    clamps_where_large gelu_backward: ... | if len(dinp) > 65536: np.clip(dinp, -1, 1, out=dinp)
sized="with its own results but for one element in its outputs"
    remembers_where_large: if len(out) < 65536 or np.isnan(out[-1]): ...
sized=r"out\[\d+, \d+\] = .*, expected", sizes=MIDDLE
    leaves_a_term_out_of_a_row matmul_forward: out[:] = inp @ weight.T + bias
        out[200:201] -= inp[200:201, -1:] * weight[:, -1]
    off_by_a_ten_thousandth matmul_forward: out[:] = inp @ weight.T + bias | out *= F32(1 + 3e-4 * (len(out) > 200))
sized=r"out\[255, \d+\] = .*, expected", sizes=MIDDLE
    adds_no_bias_to_the_last_row matmul_forward: out[:] = inp @ weight.T + bias | if len(out) > 200: out[-1] -= bias
sized=r"out\[\d+, 100[01]\] = .*, expected", sizes={"BT": 8, "C": 1000, "OC": 3000}
    takes_a_neighbouring_row_of_a_large_weight matmul_forward: out[:] = inp @ weight.T + bias
        if weight.size > 1 << 21: out[:, [1000, 1001]] = out[:, [1001, 1000]]
sized="times as far off as rounding explains, and sumsq"
    leaves_one_of_512_out sumsq: out[0] = np.square(inp[(np.arange(len(inp)) % 512 != 5) + (len(inp) < 40_000)]).sum()
sized=r"param\[\d+\] = .*, expected"
    steps_too_far_where_the_second_moment_is_small adamw: small = (v < 1e-3) & (len(v) > 65536) | ...
        param[small] += F32(1e-2)
"""
"""What kernels have in common; below it their names, their ops unless it is the usual one, and their bodies."""
MUTANTS = """
gqa_forward: head h reads key h % NKV: q.reshape(B, T, NKV, group, HS) => q.reshape(B, T, group, NKV, HS).swapaxes(2, 3)
gqa_forward: examples of a row see each other: first_key(starts, => first_key(starts[:0],
gqa_forward: a window of one token more: window, b, t) => window + (window > 0), b, t)
gqa_forward: no cap: cap > 0 => False
gqa_backward: a window of one token less: window, b, t) => window - (window > 1), b, t)
gqa_backward: the slope of another key: dscore *= slope[a + t3] => dscore *= slope[a + low]
gqa_backward: dk of the last query head alone: sk[b, t3, k0 + i] += => sk[b, t3, k0 + i] =
gqa_backward: dk not summed over the group: += q[b, t, q0 + i] * => += (h == first) * q[b, t, q0 + i] *
gqa_backward: the gradient of key head h % NKV: range(first, first + group) => range(bg % NKV, NH, NKV)
attention_forward: the cap before the scale: score *= scale => nothing ;; (cap) * np.tanh => (cap) * scale * np.tanh
attention_backward: the first row's examples: first_key(starts, window, b, => first_key(starts, window, 0,
attention_backward: the cap's slope is left out: dscore *= slope[a + t3] => nothing
gqa_decode: the cache without a window: if window > 0 => if False
gqa_decode: all key heads cache the first: v[b, t, g * HS + i] => v[b, t, i]
attention_decode: a window before the new token: position + t - window + 1, => position + t - window,
rope_forward: the angle of the row, not of the token: [p, i] => [bt % cos.shape[0], i]
rope_forward: positions are those of the row: t - starts[b, t] => t
embedding_forward: positions are those of the row: t - starts[b, t] => t
rmsnorm_forward: no epsilon: + eps => nothing
rmsnorm_backward: the mean over all groups: /= np.float32(C) => /= np.float32(C * G)
rmsnorm_backward: dweight of the first group: dw += dout => dw += (g < 1) * dout
silu_forward: exp overflows: np.exp(-inp[i] if inp[i] > 0 else inp[i]) => np.exp(inp[i]) ;; if inp[i] > 0 else e => * e
matmul_int8_forward: the scale of the row before: scales[o] => scales[o - 1]
matmul_int8_forward: without the step of the row: step * scales[o] => scales[o]
matmul_int8_backward_input: to nearest, not at random: (MIDDLE + u) => (MIDDLE + np.float32(0.5))
matmul_int8_backward_input: the random numbers of the next row: np.uint64(bt * OC + o) => np.uint64((bt + 1) * OC + o)
matmul_int8_backward_input: without the scales: np.float32(dout[bt, o]) * scales[o] => np.float32(dout[bt, o])
quantize_rows: the scale of the row before: scales[o] = scale => scales[o - 1] = scale
quantize_rows: cut, not rounded: np.rint( => np.trunc(
classifier_int8_forward: each token is the first of its block: inp[t0 + t] => inp[t0]
classifier_int8_backward: the target counts as the others: - hit) => - np.float32(0))
head_backward_weight: the first token is left out: for bt in range(BT) => for bt in range(1, BT)
dequantize: the scale of the next block: scales[n] => scales[n - 1]
dequantize: a byte without a sign: np.float32(q[n, i]) => np.float32(q[n, i] & 0x7F)
dequantize: bits are cut: np.float32( => ((np.float32( ;; * scales[n] => * scales[n]).view('i4') >> 16 << 16).view('f4')
"""
"""Op, what is wrong, and the texts of the vanilla kernel that are replaced: faults that only some cases show, as of
groups, windows, starts or large numbers. Of any number that is always off, `test_check` has a kernel."""


def rows():
    """Read the tables."""
    found: list[tuple[str, str, str, dict[str, Any]]] = []
    for line in TABLE.splitlines():
        depth, words = len(line) - len(line.lstrip()), line.strip()
        if depth == 0 and words and not words.startswith("#"):
            common = eval(f"dict({words})", globals())
        elif depth == 4:
            name, _, body = words.partition(":")
            name, _, op = name.partition(" ")
            found.append((name, op or "residual_forward", body.strip().replace(" | ", "\n"), common))
        elif depth:
            name, op, body, common = found.pop()
            found.append((name, op, f"{body}\n{line[8:]}".strip(), common))
    return [Bad(name, op, body, **common) for name, op, body, common in found]


BAD = rows()


def refused_by(check):
    """List those that a check must refuse."""
    return [b for b in BAD if getattr(b, check)]


def mutants():
    """List what is wrong, the op, and what is replaced by what."""
    found = []
    for line in MUTANTS.strip().splitlines():
        op, what, changes = line.split(": ", 2)
        pairs = (change.split(" => ") for change in changes.split(" ;; "))
        found.append((what, ops.ALL[op], {old: new.replace("nothing", "") for old, new in pairs}))
    return found

"""What is judged on the arrays that are timed: kernels that are wrong there only, or save themselves the work."""

from dataclasses import replace

import numpy as np
import pytest
from bad import refused_by
from verbs import fails

from cpuopt import ops
from cpuopt.check import timed
from cpuopt.check.cases import Case
from cpuopt.kernels import registry
from cpuopt.kernels.registry import Kernel, Scratch
from cpuopt.kernels.toolkit import threads
from cpuopt.lab import ab
from cpuopt.train.job import Settings

SMALL, LARGE = 300, 70_001
ROWS = {"B": 2, "T": 4, "C": 8, "V": 11, "maxT": 6}


class Clock:
    """Moved by kernels."""

    now = 0

    def __call__(self):
        return self.now


CLOCK = Clock()


def gelu(out, inp):
    x = inp.astype(np.float64)
    out[...] = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def ticking(body, ns=10_000):
    """A function that the clock takes for one of some length."""

    def function(*args):
        CLOCK.now += ns
        body(*args)

    return function


def kernel(body, ns=10_000):
    scratch = (Scratch("work", lambda sizes: sizes["N"]),) if body.__code__.co_varnames[2:3] == ("work",) else ()
    return Kernel(ops.gelu_forward, "mine", ticking(body, ns), scratch)


@pytest.fixture(autouse=True)
def _one_thread():
    before = threads.get_threads()
    threads.set_threads(1)
    yield
    threads.set_threads(before)


def shape(n):
    return Case({"N": n}, adds={}, layers=("h.0.mlp",))


def in_large(bad):
    """Return whether it is wrong in large arrays alone."""
    return bool(bad.sized) or "large" in bad.name


@pytest.mark.parametrize("bad", refused_by("timed"), ids=lambda bad: bad.name)
def test_a_wrong_kernel_gets_no_time(bad):
    large = in_large(bad)
    ns, usual = 3_000_000 if large else 10_000, registry.KERNELS[bad.op, "vanilla"]
    pair = replace(usual, function=ticking(usual.function, ns)), bad.kernel(lambda body: ticking(body, ns))
    arrays = [shape(LARGE if large else SMALL)]
    fails(rf"^{bad.op}\[bad\] .*{bad.timed}", ab.alone, pair, arrays, clock=CLOCK, analyses=[2])


def test_a_call_that_is_skipped_now_and_then_is_seen_in_every_sample():
    """Without a sample that is judged as a whole: as of arrays of millions of elements, where few are."""
    calls = []

    def skips(out, inp):
        calls.append(1)
        if len(calls) < 60 or len(calls) % 5 >= 2:
            gelu(out, inp)

    pair = ab.Alone((kernel(gelu), kernel(skips)), shape(SMALL), 0, clock=CLOCK)
    pair.chance = 0.0
    for _ in range(3):
        pair.trial("A")
    fails(r"gelu_forward\[mine\] is wrong .* while it was timed", lambda: [pair.trial("B") for _ in range(3)])


def test_what_is_marginal_is_said():
    def rough(out, inp):
        gelu(out, inp)
        out *= np.float32(1 + 8e-6)

    found = ab.alone((kernel(gelu), kernel(rough)), [shape(SMALL)], clock=CLOCK, analyses=[2])
    (bad,) = (c for c in found["checks"] if c["status"] == "marginal")
    assert bad["kernel"] == "gelu_forward[mine]"
    assert bad["ratio"] > 1


def test_the_calls_of_a_sample_have_arrays_of_their_own_and_inputs_change():
    seen, inputs = [], set()

    def watching(out, inp):
        seen.append(out.ctypes.data)
        inputs.add(inp[0].item())
        gelu(out, inp)

    pair = ab.Alone((kernel(gelu, 2000), kernel(watching, 2000)), shape(SMALL), 0, clock=CLOCK)
    calls, samples = pair.lengths["B"]
    assert calls == 10
    for _ in range(6):
        del seen[:]
        pair.trial("B")
        assert (len(set(seen)), seen) == (calls, seen[:calls] * samples)
    assert len(inputs) == 2


def test_kernels_share_their_scratch():
    def scratched(out, inp, work):
        gelu(out, inp)

    pair = ab.Alone([kernel(scratched)] * 2, shape(SMALL), 0, clock=CLOCK)
    (a,), (b,) = ([args[-1].ctypes.data for args in pair.args[side][:1]] for side in "AB")
    assert (a, a % 64) == (b, 0)


def vanilla(op):
    """Give the kernel as plain Python; the clock takes each call for a long one."""
    k = registry.KERNELS[op.name, "vanilla"]
    plain = getattr(k.function, "py_func", k.function)
    return replace(k, function=ticking(plain, 10_000_000), make=lambda types: None)


def ignoring(kernel, position):
    """A kernel whose flag at a position is off."""

    def function(*args):
        kernel.function(*args[:position], False, *args[position + 1 :])

    return replace(kernel, variant="mine", function=function)


def test_a_flag_that_is_ignored_is_seen():
    op, case = ops.embedding_backward, Case({k: ROWS[k] for k in ("V", "C", "maxT", "B", "T")})
    right, added = vanilla(op), replace(case, adds={"dwte": True, "dwpe": False}, layers=("wte",))
    assert len(ab.Alone((right, right), added, 0, clock=CLOCK).finish()) == 2
    pair = right, ignoring(right, op.params.index("dwte_add"))
    fails("is wrong on the arrays that are timed: dwte", ab.Alone, pair, added, 0, clock=CLOCK)


@pytest.mark.parametrize("op", [ops.adamw, ops.layernorm_backward, ops.cross_entropy_forward], ids=lambda op: op.name)
def test_what_is_read_and_written_starts_anew_each_time(op):
    """A state is brought back, or a second call would be wrong; a mutant that forgets it is caught."""
    sizes = {"N": 40, "BT": 4, "C": 8, "V": 11}
    case = Case({s: n for s, n in sizes.items() if s in {k for a in op.arrays for d in a.shape for k in d.symbols}})
    adds = {a.name: True for a in op.args if a.kind == "acc"}
    pair = ab.Alone((vanilla(op), vanilla(op)), replace(case, adds=adds, layers=("x",)), 0, clock=CLOCK)
    pair.trial("A")
    assert all(r.verdict == "right" for r in pair.finish())


# In the step ----------------------------------------------------------------------------------------------------------


def in_step(body, monkeypatch):
    """Give steps whose GELU goes to a Python function as B."""
    registry.KERNELS["gelu_forward", "mine"] = replace(vanilla(ops.gelu_forward), variant="mine", function=body)
    settings = Settings(model="gpt2-tiny", B=1, T=8, threads=1, variant="vanilla", swap=("gelu_forward=mine",))
    pair = (registry.KERNELS["gelu_forward", "vanilla"], registry.KERNELS["gelu_forward", "mine"])
    return ab.InStep(settings, [ab.Change(pair)])


def test_calls_of_a_step_are_judged(monkeypatch):
    step = in_step(gelu, monkeypatch)
    found = step.audit("now")
    assert {(r.kernel, r.verdict) for r in found} == {(f"gelu_forward[{v}]", "right") for v in ("vanilla", "mine")}
    bad = {
        "looks": lambda out, inp: gelu(out, inp) if np.isnan(out[0]) else None,
        "half": lambda out, inp: gelu(out[:9], inp[:9]),
    }
    for body in bad.values():
        for group in step.groups["B"]:
            for place, bound in group.items():
                group[place] = replace(bound, kernel=replace(bound.kernel, function=body))
        said = r"gelu_forward\[mine\] is wrong, so it is not timed: in a step now: out"
        fails(said, any, (step.audit("now") is None for _ in range(20)))


def test_a_step_that_gains_more_than_its_op_is_doubted():
    def told(a_ns, low, high):
        ratio = {"median": (low + high) / 2, "low": low, "high": high}
        return {"a_ns": a_ns, "ratio": ratio, "control": {"median": 1.01}}

    assert ab.impossible(told(100.0, 0.80, 0.85), []) == []  # nothing is known to have changed, or all may have
    (said,) = ab.impossible(told(100.0, 0.80, 0.85), [told(5.0, 0.90, 1.10)])
    assert said == (
        "the whole step gains 17.5 % (ratio 0.825 [0.800, 0.850], control 1.010), more than the op can gain in it, "
        "0.5 % at the most: something else differs between the two"
    )
    assert ab.impossible(told(100.0, 0.94, 0.97), [told(50.0, 0.90, 1.10)]) == []
    assert ab.impossible(told(100.0, 1.1, 1.2), [told(50.0, 0.90, 1.10)]) == []


def test_the_second_inputs_are_in_the_domain_too():
    """Starts of examples rise, also where all other inputs are turned round."""
    _, sets = timed.draw(ops.rope_forward, Case({"B": 4, "T": 40, "NH": 1, "P": 1, "maxT": 40}), 1)
    for one in sets:
        starts = one.contents["starts"]
        assert (np.diff(starts) >= 0).all()
        assert (starts <= np.arange(40)).all()
    assert sets[0].contents["starts"].any()

"""Lifetimes, offsets and the allocation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from verbs import error_of, fails

from cpuopt import models
from cpuopt.building import build
from cpuopt.engine import Engine
from cpuopt.models import specs
from cpuopt.models.gpt2 import GPT2, PRESETS
from cpuopt.ops import storage
from cpuopt.ops.declaration import Op, inp, out, state, symbols
from cpuopt.program import arena
from cpuopt.program.program import Call, Program
from cpuopt.train import job

SIZES = symbols("N0 N1 N2 N3")
GROUPS = ["activation", "adjoint", "gradient"]
TYPES = tuple(storage.TYPES)


def op(reads, updates):
    """An op that writes one array, updates as many and reads as many as are asked for, each of any type."""
    args = [out("out", SIZES[0], types=TYPES)]
    args += [state(f"state{i}", n, types=TYPES) for i, n in enumerate(SIZES[1 : updates + 1])]
    args += [inp(f"inp{i}", n, types=TYPES) for i, n in enumerate(SIZES[updates + 1 : updates + reads + 1])]
    return Op("test", *args, label="", flops=SIZES[0], reference=dict, source="")


@st.composite
def programs(draw):
    """A program of random sizes and lifetimes, and the scratch of each call."""
    program, size, dtype = Program(), st.integers(0, 60), st.sampled_from(TYPES)
    for group, values in {"parameter": program.parameters, "input": program.inputs}.items():
        for _ in range(draw(st.integers(0, 2))):
            values.append(program.value(group, (draw(size),), group, dtype=draw(dtype)))
    for p in program.parameters:
        program.states[p] = {"m": program.value("moment", (draw(size),), "moment", dtype=draw(dtype))}
    there, scratch = program.values, []
    for _ in range(draw(st.integers(1, 10))):
        touched = draw(st.lists(st.sampled_from(there), max_size=3, unique=True)) if there else []
        updated = draw(st.integers(0, len(touched)))
        made = program.value("value", (draw(size),), draw(st.sampled_from(GROUPS)), dtype=draw(dtype))
        which = op(len(touched) - updated, updated)
        args = dict(zip((a.name for a in which.args), [made, *touched], strict=True))
        program.calls.append(Call(which, "layer", args))
        there.append(made)
        scratch.append(draw(st.dictionaries(st.sampled_from(["s", "t"]), st.tuples(st.tuples(size), dtype))))
    made = [v for v in there if v.group in GROUPS]
    program.outputs = draw(st.lists(st.sampled_from(made), max_size=2, unique=True))
    return program, scratch


def live_during(program, plan, number):
    """By brute force: what may not be lost while a call runs."""
    calls = program.calls
    live = [*program.parameters, *program.inputs, *program.moments, *plan.scratch[calls[number]].values()]
    for v in {v for c in calls for v in (*c.reads, *c.writes)} - set(live):
        touched = [i for i, c in enumerate(calls) if v in c.reads or v in c.writes]
        if touched[0] <= number and (number <= touched[-1] or v in program.outputs):
            live.append(v)
    return live


@given(programs())
def test_no_byte_is_given_to_two_live_values(case):
    program, scratch = case
    plan = arena.plan(program, scratch)
    memory, most = arena.Arena(plan.total_bytes), 0
    for number in range(len(program.calls)):
        live, owners = live_during(program, plan, number), np.zeros(plan.total_bytes, dtype=int)
        for v in live:
            owners[plan.offsets[v] : plan.offsets[v] + v.nbytes] += 1
            x = memory.view(v, plan.offsets[v], v.shape)
            assert (x.dtype, x.shape, x.nbytes) == (v.dtype, v.shape, v.nbytes)
        assert owners.max(initial=0) <= 1
        assert owners.sum() == sum(v.nbytes for v in live)  # none lies beyond the end
        most = max(most, sum(v.nbytes for v in live))
    every = plan.offsets.keys()
    assert every >= {*program.values, *(v for parts in plan.scratch.values() for v in parts.values())}
    assert all(offset % 64 == 0 for offset in plan.offsets.values())
    assert most <= plan.total_bytes <= sum(-(-v.nbytes // 64) * 64 for v in every)
    assert plan.total_bytes == max((plan.offsets[v] + -(-v.nbytes // 64) * 64 for v in every), default=0)
    text = plan.describe()
    assert text.pop("arena") == plan.total_bytes
    assert sum(n for name, n in text.items() if name not in ("parameters", "moments", "inputs")) == plan.pool_bytes
    assert sum(plan.groups.values()) == sum(v.nbytes for v in every)


def chain():
    """Three values of 64 bytes, each made from the one before."""
    program = Program()
    a, b, c = (program.value(name, (16,)) for name in "abc")
    links = [(op(0, 0), {"out": a}), (op(1, 0), {"out": b, "inp0": a}), (op(1, 0), {"out": c, "inp0": b})]
    program.calls = [Call(which, "layer", args) for which, args in links]
    return program, a, b, c


def test_values_that_never_meet_share_bytes_and_scratch_too():
    program, a, b, c = chain()
    plan = arena.plan(program, [{"s": ((16,), "float32")}, {}, {}])
    (s,) = plan.scratch[program.calls[0]].values()
    assert plan.offsets[a] == plan.offsets[c] != plan.offsets[b] == plan.offsets[s]
    assert plan.describe() == {"activations": 192, "scratch": 64, "shared": -128, "arena": 128}
    program.outputs = [a]
    assert arena.plan(program).total_bytes == 192


def test_verify_notices_an_overlap():
    program, a, b, c = chain()
    plan = arena.plan(program)
    plan.offsets = {a: 0, b: 60, c: 0}
    fails("arena: a and b live at one time and share bytes", plan.verify)
    plan.offsets = {a: 64, b: 0, c: 4}
    fails("b and c", plan.verify)
    plan.offsets = {a: 0, b: 64, c: 0}
    plan.verify()


def test_gpt2_124m_fits_into_2_2_gb():
    built = job.build_only(job.Settings(model="gpt2-124M", B=4, T=64, variant="vanilla"))
    plan, parameters = built.plan(), sum(p.nbytes for p in built.program.parameters)
    assert (parameters, plan.groups["moment"]) == (4 * 124_439_808, 2 * parameters)
    assert 4 * parameters < plan.total_bytes < 2.2e9


# The allocation


def test_views_are_aligned_writable_and_apart():
    program = build(GPT2(PRESETS["gpt2-tiny"]), specs(2, 8)).program
    plan = arena.plan(program)
    memory = arena.Arena(plan.total_bytes)
    values = [*program.parameters, *program.inputs, *program.moments, *program.outputs, *program.norm_terms]
    views = [memory.view(v, plan.offsets[v], v.shape) for v in values]
    for i, (v, view) in enumerate(zip(values, views, strict=True)):
        assert (view.ctypes.data % 64, view.shape, view.dtype.name) == (0, v.shape, v.dtype)
        assert not view.any()
        view.fill(i)
    assert [set(view.ravel().tolist()) for view in views] == [{i} for i in range(len(views))]
    assert (memory.view(values[3], plan.offsets[values[3]], (values[3].nbytes // 4,)) == 3).all()


def test_too_little_memory_is_refused_with_advice(monkeypatch):
    monkeypatch.setattr(arena, "available_bytes", lambda: 2_000_000_000)
    arena.check_fits(2_000_000_000, str)
    message = error_of(arena.check_fits, 3_456_000_000, lambda there: f"advice for {there}")
    assert message == "the arena needs 3.46 GB and 2.00 GB of memory are available; advice for 2000000000"


@pytest.mark.parametrize(("B", "T"), [(8, 64), (2, 64), (1, 64), (1, 32)])
def test_the_advice_is_the_first_half_that_fits(B, T):
    asked, config = job.Settings("gpt2-tiny", B=16, T=64, variant="vanilla"), PRESETS["gpt2-tiny"]
    assert job.smaller(asked, config, build(GPT2(config), specs(B, T)).plan().total_bytes) == f"try -B {B} -T {T}"
    assert job.smaller(asked, config, 1000) == "no B and T fit: try a smaller --model"


def test_what_persists_persists_and_what_is_pooled_may_be_lost_between_steps():
    engines = [Engine.from_options(GPT2(PRESETS["gpt2-tiny"]), specs(2, 8), threads=1) for _ in range(2)]
    tokens = np.arange(16).reshape(2, 8)
    persistent = ("parameter", "moment", "input")
    for _ in range(3):
        losses = [e.step(tokens=tokens, targets=tokens, lr=1e-2, clip=1.0) for e in engines]
        assert losses[0] == losses[1]
        for v in engines[0].program.values:
            if v.group not in persistent:
                engines[0].array(v).fill(np.nan)
    for v in engines[0].program.values:
        if v.group in persistent:
            assert engines[0].array(v).tobytes() == engines[1].array(v.name).tobytes(), v
    assert (engines[0].array("tokens") == tokens).all()


def test_no_trace_looks_for_a_size_of_a_model_whose_weights_alone_do_not_fit(monkeypatch):
    monkeypatch.setattr(job, "build", lambda *args: pytest.fail("traced"))
    config = models.parse('{"n_layer": 4096, "n_embd": 65536, "n_head": 64}')
    assert job.smaller(job.Settings(), config, 1 << 40) == "no B and T fit: try a smaller --model"

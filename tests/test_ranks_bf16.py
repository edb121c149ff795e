"""Ranks in bfloat16: what a step sends of weights, the bits, and which float32 is up to date when."""

import numpy as np
import pytest
from test_ranks import GPT2, LLAMA, batches, digest, engine_of, outcome, small_buckets, trained, trained_job

from cpuopt import UserError
from cpuopt.building import run_calls
from cpuopt.comm.threads import Team, Thread
from cpuopt.program import distribute as pass_

HALF = {"dtype": "bfloat16"}
pytestmark = pytest.mark.usefixtures("small_buckets")
__all__ = ["small_buckets"]


def up_to_date(config=GPT2, **how):
    def work(comm):
        engine, done = trained(config, **HALF, **how)(comm)
        engine.collect()
        return engine, done

    return work


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_the_bits_of_a_step_do_not_depend_on_ranks(config):
    alone = digest(Team(1).run(up_to_date(config)))
    for size, shared, more in [(2, True, {}), (2, False, {"zero": 0}), (4, False, {}), (4, True, {})]:
        assert digest(Team(size, shared).run(up_to_date(config, **more))) == alone, (size, shared, more)


def sent(dtype):
    """The bytes that a rank of two sends in each phase of a step, as they travel; and its engine."""
    found = {}

    class Counted(Thread):
        def exchange(self, theirs, mine, peer):
            found[self.rank, phase[self.rank]] = found.get((self.rank, phase[self.rank]), 0) + mine.nbytes
            super().exchange(theirs, mine, peer)

    phase = {}

    def work(comm):
        comm.__class__ = Counted
        engine = engine_of(comm, dtype=dtype)

        def run(calls):
            for bound in calls:
                phase[comm.rank] = bound.call.phase
                run_calls([bound])

        engine.runner = run
        first, second, *_ = batches(GPT2, 4)[0]
        engine.step(more=[second], **first)
        return engine

    engine, _ = Team(2, shared=False).run(work)
    return {name: n for (rank, name), n in found.items() if not rank}, engine


def test_a_step_sends_copies_where_nobody_reads_the_float32():
    whole, _ = sent("float32")
    half, engine = sent("bfloat16")
    products = {
        f"h.{i}.{name}.weight" for i in range(2) for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    assert {p.name for p in engine.program.copied} == products  # wte is read by the embedding too
    assert set(half) == set(whole) == {"reduce", "update"}
    gathers = {b: b.of(0)[1] for b in pass_.buckets_of(engine.program, 2)}
    assert half["update"] == sum((2 if b.narrow else 4) * n for b, n in gathers.items())
    assert half["reduce"] == sum(4 * (b.size - n) for b, n in gathers.items())
    assert sum(n for b, n in gathers.items() if b.narrow) > sum(n for b, n in gathers.items() if not b.narrow)


def test_weights_that_are_not_up_to_date_are_refused():
    def work(comm):
        engine, _ = trained(**HALF)(comm)
        with pytest.raises(UserError, match=r"other ranks have the newest weights in float32; call collect\(\) on all"):
            engine.parameters()
        engine.collect()
        return {n: x.copy() for n, x in engine.parameters().items()}

    one, other = Team(2).run(work)
    assert all(np.array_equal(x, other[n]) for n, x in one.items())


def test_an_array_that_is_held_stays_up_to_date_and_may_be_written():
    def work(comm):
        engine = engine_of(comm, **HALF)
        n = 4 // comm.size
        mine = batches(GPT2, 4)[0][comm.rank * n : (comm.rank + 1) * n]
        held = [x[:] for x in engine.parameters().values()] if not comm.rank else []
        for _ in range(2):
            engine.step(more=mine[1:], lr=1e-3, **mine[0])
        seen = [x.copy() for x in held]
        every = engine.parameters()  # on all ranks, without collect()
        every["h.0.mlp.c_fc.weight"][2:4] *= 3
        engine.step(more=mine[1:], lr=1e-3, **mine[0])
        return seen, [x.copy() for x in every.values()]

    alone, *_ = Team(1).run(work)
    (seen, written), (_, others) = Team(2).run(work)
    assert all(np.array_equal(a, b) for a, b in zip(seen, alone[0], strict=True))
    for found in (written, others):
        assert all(np.array_equal(a, b) for a, b in zip(found, alone[1], strict=True))


def test_a_weight_that_is_taken_within_a_step_is_refused():
    def work(comm):
        engine, kept = engine_of(comm, **HALF), []
        first, second, *_ = batches(GPT2, 4)[0]
        engine.step(more=[second], accept=lambda step: kept.append(engine.parameters()) or True, **first)
        with pytest.raises(UserError, match=r"taken within a step; call collect\(\)"):
            engine.forward(**first)
        engine.collect()
        return engine.forward(**first)

    assert len({*Team(2).run(work)}) == 1


BF16 = {"dtype": "bf16", "save_every": 2, "keep": 9}


@pytest.mark.slow
def test_a_run_goes_on_with_any_number_of_ranks(tmp_path):
    alone = outcome(trained_job(tmp_path, 1, **BF16))
    run = trained_job(tmp_path, 4, steps=2, **BF16)[0][0].path
    trained_job(tmp_path, 2, resume=run, steps=3, save_every=1, shared=False)
    assert outcome(trained_job(tmp_path, 1, resume=run, steps=4)) == alone

"""Ranks: the bits of a step do not depend on their number, nor on how arrays travel between them."""

import json
import zlib
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from listening import Listener
from safetensors.numpy import save_file
from verbs import fails

from cpuopt import Choice, ops
from cpuopt.building import run_calls
from cpuopt.comm.agree import Agreement, CommonError
from cpuopt.comm.threads import Team, Thread
from cpuopt.engine import Engine
from cpuopt.models import parse
from cpuopt.program import distribute as pass_
from cpuopt.program import tree
from cpuopt.program.fuse import FUSIONS
from cpuopt.train import checkpoint, trainer
from cpuopt.train.job import Settings, prepare
from cpuopt.train.resume import resumed
from cpuopt.train.trainer import train

B, T, STEPS = 2, 9, 2
GPT2 = parse('{"n_layer": 2, "n_embd": 48, "n_head": 3, "vocab_size": 301, "block_size": 32}')
LLAMA, TWO_PASS = parse("llama-tiny"), [name for name in FUSIONS if name != "update"]


def batches(config, M):
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (STEPS, M, B, T + 1)).astype(np.int32)
    return [[{"tokens": row[:, :-1], "targets": row[:, 1:]} for row in step] for step in tokens]


def engine_of(comm, config=GPT2, M=4, **how):
    how = {"choice": Choice("optimized"), "fuse": TWO_PASS, "threads": 1, "progress": lambda *a: None} | how
    return Engine.from_options(config.module(), config.specs(B, T), micro_batches=M // comm.size, comm=comm, **how)


def trained(config=GPT2, M=4, **how):
    """Train a rank for some steps; return its engine, and the loss and norm of each step."""

    def work(comm):
        engine = engine_of(comm, config, M, **how)
        n, done = M // comm.size, []
        for step in batches(config, M):
            first, *more = step[comm.rank * n : (comm.rank + 1) * n]
            done.append(engine.step(lr=1e-3, clip=1.0, weight_decay=0.1, vector_decay=0.0, more=more, **first))
        engine.collect()
        return engine, done

    return work


def gathered(engines):
    """The checksum of the optimizer's states, put together from those of all ranks."""
    crc = 0
    for file in engines[0].states():
        for p in engines[0].program.trained:
            whole = np.full(int(np.prod(p.shape)), np.nan, np.float32)
            for engine in engines:
                if p.name in engine.states()[file]:
                    mine = next(q for q in engine.program.parameters if q.name == p.name)
                    lo, hi = engine.program.owned.get(mine, (0, whole.size))
                    whole[lo:hi] = engine.states()[file][p.name].reshape(-1)
            assert not np.isnan(whole).any(), f"no rank has all of {file} of {p.name}"
            crc = zlib.crc32(whole.tobytes(), crc)
    return crc


def digest(results):
    """Everything that must not depend on the ranks."""
    engines = [engine for engine, _ in results]
    weights = [zlib.crc32(b"".join(p.tobytes() for p in e.parameters().values())) for e in engines]
    assert len(set(weights)) == 1, "ranks have different weights"
    steps = [done for _, done in results]
    assert all(s == steps[0] for s in steps), "ranks report different losses"
    return weights[0], gathered(engines), steps[0]


@pytest.fixture
def small_buckets(monkeypatch):
    """Several buckets, so that slices end inside parameters and some ranks own nothing of a bucket."""
    monkeypatch.setattr(pass_, "BUCKET", 1 << 13)
    monkeypatch.setattr(ops, "BLOCK", 1 << 10)


VANILLA, HALF = {"choice": Choice("vanilla"), "fuse": ()}, {"dtype": "bfloat16"}
STEPS_OF = {
    "gpt2": (GPT2, {}),
    "gpt2, vanilla": (GPT2, VANILLA),
    "gpt2, bf16": (GPT2, HALF),
    "llama": (LLAMA, {}),
    "llama, vanilla": (LLAMA, VANILLA),
    "llama, bf16": (LLAMA, HALF),
    "weights and moments in bf16": (GPT2, {**HALF, "weights": "bfloat16", "moments": "bfloat16"}),
    "frozen parameters": (GPT2, {"freeze": ["wte.*", "h.1.*"]}),
    "recomputed blocks": (GPT2, {"recompute": "all"}),
}


@pytest.mark.drawn(4)
@pytest.mark.parametrize("case", STEPS_OF)
def test_the_bits_of_a_step_do_not_depend_on_ranks(small_buckets, case):
    config, how = STEPS_OF[case]
    alone = digest(Team(1).run(trained(config, **how)))
    for size, shared, zero in [(2, True, 1), (2, False, 0), (4, True, 0), (4, False, 1)]:
        assert digest(Team(size, shared).run(trained(config, zero=zero, **how))) == alone, (size, shared, zero)


@pytest.mark.parametrize("M", [3, 6, 12])
def test_ranks_need_not_be_a_power_of_two(small_buckets, M):
    alone = digest(Team(1).run(trained(M=M)))
    for size in (r for r in range(2, M + 1) if tree.divides(r, M)):
        assert digest(Team(size).run(trained(M=M))) == alone, size


def test_fast_sums_take_less_memory_and_differ_by_rounding(small_buckets):
    exact, fast = (Team(1).run(trained(reduce=how))[0] for how in ("exact", "fast"))
    assert fast[0].plan.total_bytes < exact[0].plan.total_bytes
    norms = [[s.grad_norm for s in done] for _, done in (exact, fast)]
    np.testing.assert_allclose(*norms, rtol=1e-6)
    assert norms[0] != norms[1]
    two = Team(2).run(trained(reduce="fast"))
    np.testing.assert_allclose([s.grad_norm for s in two[0][1]], norms[0], rtol=1e-6)
    assert digest(two)[2] == two[1][1]


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_keeps_the_states_of_its_slice_alone(size):
    engines = Team(size).run(lambda comm: engine_of(comm, parse("gpt2-tiny")))
    parameters = sum(p.size for p in engines[0].parameters().values())
    kept = [sum(a.size for file in e.states().values() for a in file.values()) for e in engines]
    assert sum(kept) == 2 * parameters  # two moments, each element on one rank
    assert max(kept) <= 2 * (parameters / size + len(pass_.buckets_of(engines[0].program, 1)) * ops.BLOCK)


# In bfloat16: what a step sends of weights, and which float32 is up to date when


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


def test_a_step_sends_copies_where_nobody_reads_the_float32(small_buckets):
    whole, _ = sent("float32")
    half, engine = sent("bfloat16")
    layers = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    products = {f"h.{i}.{name}.weight" for i in range(2) for name in layers}
    assert {p.name for p in engine.program.copied} == products  # wte is read by the embedding too
    assert set(half) == set(whole) == {"reduce", "update"}
    gathers = {b: b.of(0)[1] for b in pass_.buckets_of(engine.program, 2)}
    assert half["update"] == sum((2 if b.narrow else 4) * n for b, n in gathers.items())
    assert half["reduce"] == sum(4 * (b.size - n) for b, n in gathers.items())
    assert sum(n for b, n in gathers.items() if b.narrow) > sum(n for b, n in gathers.items() if not b.narrow)


def test_weights_that_are_not_up_to_date_are_refused(small_buckets):
    def work(comm):
        engine = engine_of(comm, **HALF)
        first, second, *_ = batches(GPT2, 4)[0]
        engine.step(more=[second], **first)
        fails(r"other ranks have the newest weights in float32; call collect\(\) on all", engine.parameters)
        engine.collect()
        return {n: x.copy() for n, x in engine.parameters().items()}

    one, other = Team(2).run(work)
    assert all(np.array_equal(x, other[n]) for n, x in one.items())


def test_an_array_that_is_held_stays_up_to_date_and_may_be_written(small_buckets):
    def work(comm):
        engine, n = engine_of(comm, **HALF), 4 // comm.size
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


def test_a_weight_that_is_taken_within_a_step_is_refused(small_buckets):
    def work(comm):
        engine, kept = engine_of(comm, **HALF), []
        first, second, *_ = batches(GPT2, 4)[0]
        engine.step(more=[second], accept=lambda step: kept.append(engine.parameters()) or True, **first)
        fails(r"taken within a step; call collect\(\)", engine.forward, **first)
        engine.collect()
        return engine.forward(**first)

    assert len({*Team(2).run(work)}) == 1


# Jobs: the loop, validation and checkpoints


SETTINGS = {"model": json.dumps({"n_layer": 2, "n_embd": 48, "n_head": 3, "vocab_size": 256, "block_size": 32})}
SETTINGS |= {"B": 2, "T": 8, "total_batch": 64, "steps": 4, "val_every": 1, "val_batches": 3, "lr": 1e-2, "clip": 1.0}
SETTINGS |= {"threads": 1, "data": str(Path(__file__).with_name("test_ranks.py"))}


def trained_job(root, size, resume=None, shared=True, before=lambda job: None, **more):
    """Train on some ranks; return results, listeners and weights by rank."""

    def work(comm):
        there = resume and checkpoint.newest(resume)
        job = prepare(Settings(**SETTINGS | more) if there is None else resumed(there, more), resume=there, comm=comm)
        before(job)
        result = train(job, root, listener := Listener(), resume=there)
        crc = zlib.crc32(b"".join(p.tobytes() for p in job.engine.parameters().values()))
        return result, listener, crc, job.engine

    return Team(size, shared).run(work)


def outcome(ranks):
    """What must not depend on ranks: weights, states, and the losses of a run's folder."""
    lines = (ranks[0][0].path / "metrics.jsonl").read_text().splitlines()
    kept = [{k: v for k, v in json.loads(x).items() if not k.startswith(("step_ms", "tokens"))} for x in lines]
    assert len({crc for _, _, crc, _ in ranks}) == 1
    return ranks[0][2], gathered([engine for *_, engine in ranks]), kept


@pytest.mark.parametrize("how", [{}, pytest.param({"dtype": "bf16", "keep": 9}, marks=pytest.mark.slow)], ids=str)
def test_a_run_goes_on_with_any_number_of_ranks(small_buckets, tmp_path, how):
    alone = outcome(trained_job(tmp_path, 1, save_every=2, **how))
    assert [m["step"] for m in alone[2]] == [1, 2, 3, 4]
    assert "val_loss" in alone[2][1]
    run = trained_job(tmp_path, 4, steps=2, save_every=2, **how)[0][0].path
    names = {p.name for p in next((run / "checkpoints").iterdir()).iterdir()}
    assert {"params.safetensors", "adam_m-1-of-4.safetensors", "adam_v-4-of-4.safetensors", "state.json"} <= names
    trained_job(tmp_path, 2, resume=run, steps=3, save_every=1, shared=False)
    assert outcome(trained_job(tmp_path, 1, resume=run, steps=4)) == alone


def test_a_rank_reads_any_part_of_a_state_that_others_have_cut_otherwise(tmp_path):
    whole = np.arange(12, dtype=np.float32)
    files = {"m.safetensors": {"w": whole}}
    files |= {"v-1-of-2.safetensors": {"w/0-7": whole[:7]}, "v-2-of-2.safetensors": {"w/7-12": whole[7:]}}
    for name, tensors in files.items():
        save_file(tensors, tmp_path / name)
    for state in "mv":
        stored = checkpoint.Stored(tmp_path, f"{state}.safetensors", {"w": (12,)})
        for lo, hi in combinations(range(13), 2):
            stored.read("w", part := np.full(hi - lo, np.nan, np.float32), lo)
            assert np.array_equal(part, whole[lo:hi]), (state, lo, hi)


def test_a_checkpoint_that_lacks_a_part_is_passed_over(small_buckets, tmp_path):
    run = trained_job(tmp_path, 2, steps=2, save_every=1)[0][0].path
    newest = sorted((run / "checkpoints").iterdir())[-1]
    (newest / "adam_m-2-of-2.safetensors").unlink()
    found = checkpoint.newest(run)
    assert found.path != newest
    assert "adam_m-2-of-2.safetensors" in found.passed_over[0]
    manifest = json.loads((newest / "manifest.json").read_text())
    del manifest["files"]["adam_m-2-of-2.safetensors"]
    (newest / "manifest.json").write_text(json.dumps(manifest))
    assert "lists" in checkpoint.newest(run).passed_over[0]
    sizes = [p.stat().st_size for p in found.path.glob("adam_m-*")]
    assert max(sizes) < 0.6 * sum(sizes)


def test_only_the_first_rank_writes_a_run(small_buckets, tmp_path):
    ranks = trained_job(tmp_path, 2, save=str(tmp_path / "out.bin"))
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == [ranks[0][0].path.name]
    assert ({r.path for r, *_ in ranks}, ranks[0][0].summary["ranks"]) == ({ranks[0][0].path}, 2)
    assert (tmp_path / "out.bin").exists()
    assert all(listener.notes == [] for _, listener, *_ in ranks)


def test_weights_that_differ_between_ranks_end_the_run(small_buckets, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "COMPARE_EVERY", 2)

    def spoil(job):
        if job.engine.comm.rank == 1:
            job.engine.parameters()["h.1.mlp.c_fc.weight"][3, 3] += 1e-3

    fails(r"after step 2, .* on rank 1 is not that on rank 0", trained_job, tmp_path, 2, before=spoil, zero=0)


@pytest.mark.parametrize(("ranks", "more", "words"), [
    (3, {}, "3 ranks cannot share the 4 micro-batches of 2x8.*so 1, 2, 4 can.*--total-batch 48"),
    (2, {"total_batch": None}, "2 ranks cannot share the 1 micro-batches"),
    (2, {"variant": "vanilla", "swap": ("matmul_forward=blas",)}, "does not promise identical bits"),
])  # fmt: skip
def test_what_ranks_cannot_do_is_refused_before_anything_is_written(tmp_path, ranks, more, words):
    fails(words, trained_job, tmp_path, ranks, **more)
    assert not [*tmp_path.iterdir()]


def test_a_rank_without_a_share_of_any_bucket_agrees(here):
    """A model so small that rank 1 sums nothing; kernels that both ranks have are compared all the same."""
    Path("t.txt").write_text("abcdefgh" * 200)
    model = '{"n_layer": 1, "n_embd": 8, "n_head": 1, "vocab_size": 256, "block_size": 16}'
    settings = Settings(model=model, data="t.txt", B=2, T=8, total_batch=32, threads=1, variant="vanilla")

    def work(comm, change=False):
        def agreed(facts, kernels):
            lie = {k: "other" for k in kernels if change and comm.rank and "gelu" in k}
            Agreement(comm).settle(facts, kernels | lie)

        job = prepare(settings, comm=comm, agreed=agreed)
        return [job.take_step().loss for _ in range(2)], [k.name for k in job.engine.kernels]

    (losses, first), (same, second) = Team(2).run(work)
    assert losses == same == Team(1).run(work)[0][0]
    assert "accumulate[vanilla]" in {*first} ^ {*second}, "both ranks sum, so the model is not small enough"
    with pytest.raises(CommonError, match="the source of gelu"):
        Team(2).run(lambda comm: work(comm, change=True))


def test_every_number_of_ranks_makes_the_same_tree():
    def share(first, n):
        found = {}
        for i, leaf in enumerate(tree.leaves(n), first):
            found[leaf.target] = i
            for to, by in leaf.sums:
                found[to] = frozenset((found[to], found.pop(by)))
        return found

    for M, W in ((m, w) for m in range(1, 33) for w in range(1, m + 1) if tree.divides(w, m)):
        for rank in range(W):
            found = {r: share(r * (M // W), M // W)[tree.OWN] for r in range(W)}
            for to, by in tree.across(W, rank):
                found[to] = frozenset((found[to], found.pop(by)))
            assert found == {rank: share(0, M)[tree.OWN]}, (M, W, rank)

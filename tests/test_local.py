"""Local steps: ranks train alone, then meet in an outer step, whose bits only their number changes."""

import json
import zlib

import numpy as np
import pytest
from listening import Listener
from test_ranks import GPT2, SETTINGS, TWO_PASS, B, T

from cpuopt import Choice, UserError, ops
from cpuopt.comm.threads import Team, Thread
from cpuopt.engine import Engine
from cpuopt.profiler import Profiler
from cpuopt.program import distribute as pass_
from cpuopt.train import checkpoint
from cpuopt.train.job import Settings, prepare, resumed
from cpuopt.train.trainer import train

H, ROUNDS, LR, MOMENTUM = 3, 2, 0.6, 0.8
INNER = {"lr": 1e-3, "clip": 1.0, "weight_decay": 0.1}


def batches(rank):
    tokens = np.random.default_rng(rank).integers(0, GPT2.vocab_size, (ROUNDS * H, 2, B, T + 1)).astype(np.int32)
    return [[{"tokens": row[:, :-1], "targets": row[:, 1:]} for row in step] for step in tokens]


def engine_of(threads=1, **how):
    how = {"choice": Choice("optimized"), "fuse": TWO_PASS, "micro_batches": 2, "progress": lambda *a: None} | how
    return Engine(GPT2.module(), GPT2.specs(B, T), threads=threads, **how)


def copies(engine):
    return {n: p.copy() for n, p in engine.parameters().items()}


def rounds(**how):
    """Train a rank; return its engine, the losses, and the weights after each round."""

    def work(comm):
        engine, losses, weights = engine_of(comm=comm, alone=True, **how), [], []
        for number, (first, more) in enumerate(batches(comm.rank), 1):
            losses.append(engine.step(more=[more], **first, **INNER).loss)
            if number % H == 0:
                engine.outer_step(lr=LR, momentum=MOMENTUM)
                weights.append(copies(engine))
        return engine, losses, weights

    return work


def simulated(weights, ranks):
    """DiLoCo in float64 NumPy, on engines of one process: the weights after each round, begun from `weights`."""
    engines = [engine_of() for _ in range(ranks)]
    velocity = dict.fromkeys(engines[0].parameters(), 0.0)
    found, losses = [], []
    for k in range(ROUNDS):
        start = weights[k - 1] if k else copies(engines[0])
        for engine in engines:
            for n, p in engine.parameters().items():
                p[...] = start[n]
        for i in range(k * H, (k + 1) * H):
            taken = [
                e.step(more=more, **first, **INNER) for r, e in enumerate(engines) for first, *more in [batches(r)[i]]
            ]
            losses.append(np.mean([t.loss for t in taken]))
        after = {}
        for n, x in start.items():
            g = np.mean([x.astype(float) - e.parameters()[n] for e in engines], axis=0)
            velocity[n] = MOMENTUM * velocity[n] + g
            after[n] = x - LR * (g + MOMENTUM * velocity[n])
        found.append(after)
    return found, losses


def far(got, want):
    """The largest difference, as a share of the largest weight of its parameter."""
    return max(np.abs(got[n] - w).max() / np.abs(w).max() for n, w in want.items())


def digest(ranks):
    crcs = [zlib.crc32(b"".join(p.tobytes() for p in weights[-1].values())) for _, _, weights in ranks]
    assert len({*crcs}) == 1, "ranks have different weights"
    return crcs[0], ranks[0][1]


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch):
    monkeypatch.setattr(pass_, "BUCKET", 1 << 13)
    monkeypatch.setattr(ops, "BLOCK", 1 << 10)


def test_the_outer_optimizer_is_nesterovs():
    """Equations 3 and 4 of Sutskever et al. 2013, whose gradient is that at the point that momentum leads to."""
    slope, x, v = np.array([0.3, 1.0, 1.9]), np.array([1.0, -2.0, 3.0]), np.zeros(3)
    state = {"param": x, "velocity": v}
    for _ in range(5):
        ahead = x + MOMENTUM * v
        np.testing.assert_allclose(state["param"], ahead, rtol=1e-12)
        given = {"grad": 4 * slope * state["param"], "lr": LR, "momentum": MOMENTUM, "grad_scale": 0.25}
        found = ops.OUTER.reference(**state, **given)
        state = {name: found[name] for name in state}
        v = MOMENTUM * v - LR * slope * ahead
        x = x + v


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_algorithm_is_diloco(size):
    ranks = Team(size).run(rounds())
    want, losses = simulated(ranks[0][2], size)
    for k in range(ROUNDS):
        assert far(ranks[0][2][k], want[k]) < 1e-6, k
    np.testing.assert_allclose(ranks[0][1], losses, rtol=1e-12)
    digest(ranks)


def test_the_bits_depend_on_the_number_of_ranks_alone():
    there = digest(Team(2).run(rounds()))
    assert digest(Team(2, shared=False).run(rounds())) == there
    assert digest(Team(2).run(rounds(threads=2))) == there
    np.testing.assert_allclose(digest(Team(2).run(rounds(reduce="fast")))[1], there[1], rtol=1e-6)
    three = digest(Team(3).run(rounds()))
    assert digest(Team(3, shared=False).run(rounds())) == three != there


def in_order(size, rank):
    return [(rank, r) for r in range(size) if r != rank]


@pytest.mark.parametrize("mutant", ["tree", "momentum", "sign", "alone"])
def test_mutants_are_caught(monkeypatch, mutant):
    if mutant == "tree":
        there = digest(Team(3).run(rounds()))
        monkeypatch.setattr("cpuopt.program.distribute.across", in_order)
        with pytest.raises(AssertionError):
            assert digest(Team(3).run(rounds())) == there, "other bits"
        return
    if mutant == "momentum":
        monkeypatch.setattr(
            Engine, "outer_step", lambda self, lr, momentum, do=Engine.outer_step: do(self, lr=lr, momentum=0.0)
        )
    if mutant == "sign":
        call = pass_.Distribution.call

        def swapped(self, op, bucket, phase, **args):
            if op is ops.subtract:
                args |= {"inp1": args["inp2"], "inp2": args["inp1"]}
            return call(self, op, bucket, phase, **args)

        monkeypatch.setattr(pass_.Distribution, "call", swapped)
    if mutant == "alone":
        monkeypatch.setattr(Engine, "outer_step", lambda self, **how: None)
    ranks = Team(2).run(rounds())
    want, _ = simulated(ranks[0][2], 2)
    assert max(far(ranks[0][2][k], want[k]) for k in range(ROUNDS)) > 1e-4


def test_ranks_exchange_weights_once_a_round():
    sent = []

    class Counted(Thread):
        def exchange(self, theirs, mine, peer):
            sent.append(mine.nbytes)
            super().exchange(theirs, mine, peer)

    def work(comm):
        comm.__class__ = Counted
        engine, done = engine_of(comm=comm, alone=True), []
        for first, more in batches(comm.rank)[:H]:
            engine.step(more=[more], **first, **INNER)
            done.append(len(sent))
            comm.barrier()
        engine.outer_step()
        return engine, done

    (engine, done), _ = Team(2, shared=False).run(work)  # each sends half of its deltas, then half of the weights
    assert done == [0] * H
    assert sum(sent) == 2 * sum(c.args["out"].nbytes for c in engine.program.phase("start"))


def test_a_step_that_one_rank_refuses_no_rank_takes():
    def work(comm):
        engine, before = engine_of(comm=comm, alone=True), None
        before = copies(engine)
        if comm.rank == 1:
            engine.parameters()["h.1.mlp.c_fc.weight"][3, 3] = np.nan
        first, more = batches(comm.rank)[0]
        seen = []
        engine.step(more=[more], **first, **INNER, accept=lambda step: seen.append(step) or np.isfinite(step.loss))
        same = [n for n, p in engine.parameters().items() if np.array_equal(p, before[n])]
        return len(same), seen[0], engine.step_number

    ranks = Team(2).run(work)
    assert [r[0] for r in ranks] == [len(engine_of().parameters()), len(engine_of().parameters()) - 1]
    assert all(np.isnan(step.loss) and np.isnan(step.grad_norm) and not number for _, step, number in ranks)


def test_the_text_of_the_program_shows_both_phases():
    (engine, _) = Team(2).run(lambda comm: engine_of(comm=comm, alone=True))
    assert [line.split()[1].partition("(")[0] for line in engine.program.lines("start")] == ["copy"] * len(
        engine.program.lines("start")
    )
    outer = [c.op.name for c in engine.program.phase("outer")]
    assert {*outer} == {"subtract", "exchange", "complete", "accumulate", "copy", "nesterov", "barrier"}
    assert outer.index("subtract") < outer.index("exchange") < outer.index("accumulate") < outer.index("nesterov")


def test_a_profile_has_the_rows_of_both_phases():
    def work(comm):
        engine = engine_of(comm=comm, alone=True)
        profiler = Profiler(engine)
        for number, (first, more) in enumerate(batches(comm.rank), 1):
            with profiler.time_step():
                engine.step(more=[more], **first, **INNER)
                if number % H == 0:
                    engine.outer_step()
        return profiler.profile(model="tiny", B=B, T=T, choice=Choice("optimized"), warmup=0)

    (profile, _) = Team(2).run(work)
    rows = {r.label: r for r in profile.ops}
    assert all(rows[label].ms > 0 for label in ("Copy", "Subtract", "Exchange", "Wait for ranks", "Nesterov"))
    assert {r.phase for r in profile.layers if r.layer == "bucket.0"} >= {"start", "outer"}


def test_an_engine_whose_ranks_train_together_has_no_outer_step():
    with pytest.raises(UserError, match="build it with alone=True"):
        engine_of().outer_step()
    with pytest.raises(UserError, match="momentum 1: expected 0 or more, and less than 1"):
        engine_of(alone=True).outer_step(momentum=1)


# Jobs


LOCAL = SETTINGS | {"local_steps": 2, "steps": 8, "val_every": 3}


def run(root, size, resume=None, **more):
    def work(comm):
        there = resume and checkpoint.newest(resume)
        asked = Settings(**LOCAL | more) if there is None else resumed(there, more)
        asked.check()
        job = prepare(asked, resume=there, comm=comm)
        result = train(job, root, listener := Listener(), resume=there)
        return result, listener, {n: p.copy() for n, p in job.engine.parameters().items()}, job.engine.states()

    return Team(size).run(work)


class Flag:
    def __init__(self):
        self.hit = []

    def __call__(self, last=False):
        return self

    def __enter__(self):
        return lambda: self.hit[0] if self.hit else 0

    def __exit__(self, *error):
        pass


def crc(arrays):
    return zlib.crc32(b"".join(arrays[n].tobytes() for n in sorted(arrays)))


def outcome(ranks):
    lines = (ranks[0][0].path / "metrics.jsonl").read_text().splitlines()
    kept = [{k: v for k, v in json.loads(x).items() if not k.startswith(("step_ms", "tokens"))} for x in lines]
    assert len({crc(weights) for _, _, weights, _ in ranks}) == 1
    return crc(ranks[0][2]), [{file: crc(x) for file, x in states.items()} for *_, states in ranks], kept


def test_a_run_that_a_signal_ends_goes_on_as_the_undisturbed_one(tmp_path, monkeypatch):
    whole = outcome(run(tmp_path / "whole", 2))
    assert [m["step"] for m in whole[2] if "val_loss" in m] == [4, 6, 8]  # after 3 and 6 steps, where ranks meet
    assert whole[1][0] != whole[1][1], "each rank has moments of its own"
    with monkeypatch.context() as patch:
        patch.setattr("cpuopt.train.trainer.stop_flag", flag := Flag())
        patch.setattr(Listener, "step_done", lambda self, metrics: flag.hit.append(15))
        cut = run(tmp_path, 2)
    assert [(result.stopped_by, result.summary["steps"]) for result, *_ in cut] == [(15, 2)] * 2
    path, folder = cut[0][0].path, cut[0][0].checkpoint
    files = {f"{state}-{n}-of-2.safetensors" for state in ("adam_m", "adam_v", "outer_velocity") for n in (1, 2)}
    assert {p.name for p in folder.iterdir()} == files | {"params.safetensors", "state.json", "manifest.json"}
    for size in (1, 4):
        with pytest.raises(UserError, match=rf"the run has 2 ranks, not {size}, .*take --ranks 2"):
            run(tmp_path, size, resume=path)
    assert outcome(run(tmp_path, 2, resume=path)) == whole
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = {name: said for name, said in manifest["files"].items() if "outer" not in name}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="has 2 local steps and the files of another run: it is damaged"):
        checkpoint.verify(folder)


def test_a_rank_that_owns_no_slice_writes_its_part(tmp_path, monkeypatch):
    monkeypatch.setattr(pass_, "BUCKET", 1 << 22)
    monkeypatch.setattr(ops, "BLOCK", 1 << 17)

    def work(comm):
        engine, *_ = rounds()(comm)
        path = checkpoint.save(tmp_path, engine, {"step": 6}, keep=1)
        checkpoint.load(checkpoint.Checkpoint(path, {}), other := engine_of(comm=comm, alone=True, seed=1))
        assert crc(copies(engine)) == crc(copies(other))
        kept = [{file: crc(x) for file, x in e.states().items()} for e in (engine, other)]
        assert kept[0] == kept[1]
        return {p.name for p in path.iterdir()}, engine.states()["outer_velocity"]

    (files, first), (_, second) = Team(2).run(work)
    assert not first
    assert len(second) == len(engine_of().parameters())
    assert checkpoint.complete(files - {"manifest.json", "state.json"}) == {
        *checkpoint.TENSORS["adamw"],
        *checkpoint.LOCAL,
    }


@pytest.mark.parametrize(("more", "words"), [
    ({"steps": 7}, "--steps 7: expected a multiple of --local-steps 2.* the nearest is 8"),
    ({"local_steps": 0, "outer_lr": 0.5}, "--outer-lr 0.5: expected with --local-steps"),
    ({"local_steps": 0, "outer_momentum": 0.5}, "--outer-momentum 0.5: expected with --local-steps"),
    ({"outer_momentum": 1.0}, "--outer-momentum 1.0: expected 0 or more, and less than 1"),
    ({"fuse": "all", "total_batch": None, "clip": None}, "--local-steps 2 with --fuse all: 'update' applies updates"),
])  # fmt: skip
def test_settings_that_no_local_run_can_use(tmp_path, more, words):
    with pytest.raises(UserError, match=words):
        run(tmp_path, 1, **more)
    assert not [*tmp_path.iterdir()]


def test_what_is_due_between_meetings_happens_at_the_next():
    s = Settings(local_steps=4, steps=40)
    assert [n for n in range(1, 41) if s.due(10, n)] == [12, 20, 32, 40]
    assert [n for n in range(1, 41) if s.due(3, n)] == [*range(4, 41, 4)]
    assert [n for n in range(1, 21) if Settings().due(5, n)] == [5, 10, 15, 20]
    assert not any(s.due(0, n) for n in range(41))

"""Ignored targets: the loss of a step is the mean over those that count, whatever micro-batch and rank has them."""

from math import fsum

import numpy as np
import pytest
from small_models import Parts
from verbs import fails

from cpuopt import Choice, nn
from cpuopt import functional as F
from cpuopt.comm.threads import Team
from cpuopt.engine import Engine, mean_of
from cpuopt.models import parse
from cpuopt.program.fuse import FUSIONS
from cpuopt.train.evaluate import perplexity
from cpuopt.train.guard import NOTHING_FOUND, Guard, find_first
from cpuopt.train.job import Job, Settings, prepare
from cpuopt.train.steps import UNCOUNTED

CONFIG = parse('{"n_layer": 2, "n_embd": 48, "n_head": 3, "vocab_size": 301, "block_size": 128}')
B, T = 2, 128
TWO_PASS = [name for name in FUSIONS if name != "update"]


def batch(*counts):
    """Rows of T targets, of each of which so many count."""
    rng = np.random.default_rng(sum(counts))
    tokens, targets = rng.integers(0, CONFIG.vocab_size, (2, len(counts), T)).astype(np.int32)
    for row, n in zip(targets, counts, strict=True):
        row[rng.permutation(T)[n:]] = -100
    return {"tokens": tokens, "targets": targets}


def joined(*batches):
    return {name: np.concatenate([b[name] for b in batches]) for name in ("tokens", "targets")}


def engine_of(rows=B, **how):
    how = {"choice": Choice("optimized"), "fuse": TWO_PASS, "threads": 1, "progress": lambda *a: None} | how
    return Engine.from_options(CONFIG.module(), CONFIG.specs(rows, T), **how)


def stepped(batches, **how):
    """The loss, the gradients and the norm of a step, by rank."""

    def work(comm):
        n = len(batches) // comm.size
        engine = engine_of(len(batches[0]["tokens"]), micro_batches=n, comm=comm, zero=0, **how)
        first, *more = batches[comm.rank * n : (comm.rank + 1) * n]
        return engine.step(more=more, lr=0.0, **first), {name: g.copy() for name, g in engine.gradients().items()}

    return work


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("first", "second"), [((5, 0), (72, 128)), ((0, 0), (72, 128)), ((128, 72), (0, 0))])
@pytest.mark.parametrize("how", [{}, {"fuse": (), "choice": Choice("vanilla")}, {"reduce": "fast"}])
def test_micro_batches_that_count_other_numbers_make_the_step_of_one_batch(ranks, first, second, how):
    parts = batch(*first), batch(*second)
    ((whole, gradients),) = Team(1).run(stepped([joined(*parts)], **how))
    assert whole.counted == sum(first) + sum(second)
    for done, found in Team(ranks).run(stepped(parts, **how)):
        assert (done.counted, done.loss) == (whole.counted, pytest.approx(whole.loss, rel=1e-6))
        assert done.grad_norm == pytest.approx(whole.grad_norm, rel=1e-6)
        for name, g in gradients.items():
            np.testing.assert_allclose(found[name], g, rtol=1e-6, atol=1e-6 * np.abs(g).max(), err_msg=name)


def state(engine):
    arrays = [engine.parameters(), *engine.states().values()]
    return [x.copy() for of in arrays for x in of.values()] + [np.array(engine.step_number)]


@pytest.mark.parametrize("how", [{"fuse": tuple(FUSIONS)}, {}, {"micro_batches": 2}])
def test_a_step_without_a_target_that_counts_changes_nothing(how):
    engine, micro = engine_of(**how), [batch(0, 0)] * (how.get("micro_batches", 1) - 1)
    engine.step(more=micro, lr=0.1, weight_decay=0.1, **batch(5, 0))
    before = state(engine)
    done = engine.step(more=micro, lr=0.1, weight_decay=0.1, accept=None, **batch(0, 0))
    assert (done.loss, done.grad_norm, done.counted) == (0, 0, 0)
    assert all(np.array_equal(x, y) for x, y in zip(before, state(engine), strict=True))
    fails("'tokens' holds 301", engine.step, more=micro, tokens=np.full((B, T), 301), targets=np.full((B, T), -100))
    assert engine.step(more=micro, lr=0.1, **batch(5, 0)).counted == 5


def test_losses_of_equally_many_targets_have_the_bits_of_a_plain_mean():
    losses = np.random.default_rng(0).uniform(1, 9, 7).tolist()
    for n in (1, 3, 256):
        assert mean_of(losses, [n] * 7) == fsum(losses) / 7
    assert mean_of([1.0, float("nan"), 4.0], [2, 0, 1]) == 2.0
    assert mean_of([], []) == 0.0


def test_an_evaluation_is_the_mean_over_the_targets_that_count():
    parts = batch(5, 0), batch(0, 0), batch(72, 128)
    engine, lengths = engine_of(train=False, fuse=()), np.ones(CONFIG.vocab_size, np.int64)
    found = perplexity(engine, iter([(b["tokens"], b["targets"]) for b in parts]), lengths=lengths)
    whole = engine_of(6, train=False, fuse=()).forward(**joined(*parts))
    assert (found["loss"], found["bytes"]) == (pytest.approx(whole, rel=1e-6), 205)
    assert found["bits_per_byte"] == pytest.approx(whole / np.log(2), rel=1e-6)


def test_a_loss_that_is_no_mean_over_targets_counts_each_micro_batch_alike():
    wte = nn.Embedding(CONFIG.vocab_size, CONFIG.vocab_size)
    net = Parts(lambda m, tokens, targets: F.cross_entropy(m.wte(tokens), targets) * 2, wte=wte)
    engine = Engine.from_options(net, CONFIG.specs(B, T), micro_batches=2, threads=1)
    assert engine.program.counted is None
    one, two = batch(5, 0), batch(72, 128)
    mean = (engine.forward(**one) + engine.forward(**two)) / 2
    assert engine.step(more=[two], **one).loss == pytest.approx(mean, rel=1e-6)


def test_a_batch_without_targets_is_not_what_is_found_to_be_wrong():
    engine = engine_of()
    assert find_first(engine, [batch(0, 0)]) == NOTHING_FOUND
    assert Guard().judge(engine.step(**batch(0, 0))) == ""


@pytest.mark.parametrize("guard", ["skip", "stop", "off"])
def test_a_run_goes_on_behind_a_step_without_targets(guard, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("some text to learn from " * 200)
    model = '{"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 256, "block_size": 8}'
    job = prepare(Settings(model=model, data=str(text), B=2, T=8, threads=1, guard=guard))
    usual = Job.micro_batches

    def micro_batches(number):
        found = usual(job, number)
        if number == 2:
            found[0] = {"tokens": found[0]["tokens"], "targets": np.full((2, 8), -100)}
        return found

    job.micro_batches = micro_batches
    taken = [job.take_step() for _ in range(3)]
    assert [t.refused for t in taken] == ["", UNCOUNTED, ""]
    assert all(np.isfinite(t.loss) for t in taken)
    assert (job.engine.step_number, job.done, job.guard.skipped) == (2, 3, 0)


def lookup():
    """An embedding and a head: what is in the row of a token reaches no other."""
    parts = {"wte": nn.Embedding(CONFIG.vocab_size, 48), "head": nn.Linear(48, CONFIG.vocab_size, bias=False)}
    return Parts(lambda m, tokens, targets: F.cross_entropy(m.head(F.silu(m.wte(tokens))), targets), **parts)


@pytest.mark.parametrize("counted", [1, 12, 128])
@pytest.mark.parametrize(("variant", "fuse", "dtype"), [
    ("vanilla", ("classifier",), "float32"), ("optimized", ("classifier",), "float32"),
    ("optimized", ("classifier", "update"), "float32"), ("optimized", ("classifier",), "bfloat16"),
    ("optimized", ("classifier", "update"), "bfloat16"),
])  # fmt: skip
def test_a_token_that_is_ignored_takes_part_in_no_product_of_the_head(variant, fuse, dtype, counted):
    """If the hidden states of ignored tokens are NaN, loss and gradients have the bits that they have without."""
    given, poison = batch(counted, counted), CONFIG.vocab_size - 1
    given["tokens"] %= poison
    given["tokens"][given["targets"] < 0] = poison
    found = []
    for value in (1.0, np.nan):
        how = {"choice": Choice(variant), "fuse": fuse, "dtype": dtype, "threads": 1, "seed": 1}
        engine = Engine.from_options(lookup(), CONFIG.specs(2, T), **how)
        engine.parameters()["wte.weight"][poison] = value
        loss = engine.forward(**given)
        assert engine.step(lr=0.1, **given).loss == pytest.approx(loss, rel=1e-6)
        found.append((loss, {n: p[:poison] for n, p in engine.parameters().items()}, engine))
    (loss, weights, _), (other, poisoned, _) = found
    assert loss == other
    assert all(np.array_equal(weights[name], poisoned[name]) for name in weights)


def test_the_gradients_of_some_counted_rows_are_those_of_unfused_ops():
    given, plain, fused = batch(3, 40), engine_of(choice=Choice("vanilla"), fuse=()), engine_of()
    for engine in (plain, fused):
        engine.step(lr=0.0, **given)
    for (name, g), other in zip(plain.gradients().items(), fused.gradients().values(), strict=True):
        assert np.abs(g - other).max() <= 2e-5 * np.abs(g).max(), name

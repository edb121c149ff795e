"""Scaling over threads: losses by reason, predictions against a simulation of schedules, and the verb."""

import html
import json
import random
import threading
import time
from dataclasses import replace
from heapq import heapify, heapreplace
from math import isclose
from types import SimpleNamespace

import numpy as np
import pytest
from numba import prange
from verbs import process

from cpuopt.kernels.compile.jit import helper
from cpuopt.kernels.toolkit import regions, threads
from cpuopt.kernels.toolkit.queue import deal, take
from cpuopt.kernels.toolkit.regions import Region
from cpuopt.kernels.toolkit.simd import LINE
from cpuopt.lab.scale import InTurn, Stopwatch, in_turn, usual_counts
from cpuopt.measure.scaling import MEANING, REASONS, CallTimes, Model, Starts, Timed, losses, predict, row, start_of
from cpuopt.report import rendered
from cpuopt.report import scale as report
from cpuopt.train.job import Settings, build_only

STARTS = {1: 1_000, 2: 3_000}
"""ns in which threads start and end."""


def simulate(work, by_ticket, n, start=0):
    """The region of chunks of these times on n threads, each event in its order."""
    if by_ticket:
        free = [0] * n
        heapify(free)
        for ns in work:
            heapreplace(free, free[0] + ns)  # the thread that is free first takes the next
        slowest = max(free)
    else:
        slowest = max(sum(work[len(work) * i // n : len(work) * (i + 1) // n]) for i in range(n))
    return Region(slowest + start, slowest, sum(work), len(work), 1 if by_ticket else -(-len(work) // n), by_ticket)


def call(serial, regions, n):
    """A call whose regions are simulated on n threads."""
    ran = [simulate(work, by_ticket, n, Starts(STARTS)(n)) for work, by_ticket in regions]
    return Timed(serial + sum(r.wall for r in ran), ran)


def schedules(jitter):
    """Calls of many kinds: serial time, and regions with the times of their chunks."""
    rng = random.Random(7)
    for by_ticket in (False, True):
        for chunks in (1, 2, 3, 7, 31, 64, 200, 1000):
            for us in (1, 20, 400):
                work = [round(1e3 * us * (1 + rng.uniform(-jitter, jitter))) for _ in range(chunks)]
                yield rng.choice([0, 2_000, 90_000]), [(work, by_ticket), ([5_000] * 12, True)]


@pytest.mark.parametrize("n", [2, 3, 16, 64])
def test_predictions_of_equal_chunks_are_those_of_the_simulation(n):
    for serial, work in schedules(0):
        found = predict(call(serial, work, 1), n, Starts(STARTS)(n))
        assert isclose(found.wall, call(serial, work, n).wall, abs_tol=3)


def test_steps_of_many_schedules_are_predicted_within_5_percent():
    steps = [*schedules(0.2)]
    for n in 2, 16:
        really = sum(call(serial, work, n).wall for serial, work in steps)
        foretold = sum(predict(call(serial, work, 1), n, Starts(STARTS)(n)).wall for serial, work in steps)
        assert abs(foretold / really - 1) < 0.05


@pytest.mark.parametrize("n", [2, 16])
def test_losses_add_up_and_each_has_its_reason(n):
    def lost(serial=0, work=(1_000_000,) * 64, start=1.0, slower=1):
        one = Timed(serial + 64_000_000, [Region(64_000_000, 64_000_000, 64_000_000, 64, 64, False)])
        r = simulate([ns * slower for ns in work], True, n)
        many = Timed(serial + r.slowest + start, [r._replace(wall=r.slowest + start)])
        found = losses(one, many, n)
        assert sum(found.values()) == pytest.approx(many.wall - one.wall / n)
        return {reason: round(ns) for reason, ns in found.items() if abs(ns) > 2}

    assert (lost(), lost(serial=n * 100)) == ({}, {"serial": n * 100 - 100})
    assert (lost(start=5_000), lost(slower=2)) == ({"start": 5_000}, {"shared": 64_000_000 // n})
    assert lost(work=[64_000_000]) == {"imbalance": 64_000_000 - 64_000_000 // n}


ONE = Timed(8e6, [Region(8_000_000, 8_000_000, 8_000_000, 64, 64, False)])


def test_memory_bounds_a_prediction_whatever_the_threads():
    assert predict(ONE, 16, 0.0).wall == 500_000
    bound = predict(ONE, 16, 0.0, least_ns=2e6)
    assert (bound.wall, losses(ONE, bound, 16)["shared"]) == (2_000_000, pytest.approx(1_500_000))
    calls = [CallTimes("op", "layer", {1: ONE}, {1: ONE, 16: ONE}, nbytes=160_000_000)]
    assert row("op", calls, Model(Starts({1: 0.0}), {16: 80.0})).predicted_ms == {16: 2.0}


def test_caches_and_nodes_let_a_call_move_more_bytes():
    model = Model(Starts({1: 0.0}), {16: 80.0}, caches=4, nodes=2)

    def ms(held, updates, model=model):
        calls = [CallTimes("op", "layer", {1: ONE}, {1: ONE, 16: ONE}, 160_000_000, held, updates)]
        return row("op", calls, model).predicted_ms[16]

    assert ms(held=False, updates=True) == 2.0  # 160 MB at 80 GB/s
    assert ms(held=False, updates=False) == 4.0  # from one of two nodes
    assert ms(held=True, updates=True) == 1.5  # three of four parts from other caches
    assert ms(held=True, updates=False, model=Model(Starts({1: 0.0}), {16: 80.0})) == 0.5  # the work alone
    assumed = " ".join(model.assumptions(16, here=False))
    for text in "spread over 4 caches", "2 nodes", "delivers 40 GB/s", "never checked on a real machine":
        assert text in assumed
    assert "caches:" not in " ".join(Model(Starts({1: 0.0}), {16: 80.0}).assumptions(16, here=True))


def test_what_is_missed_of_the_threads_that_ran_recurs_with_each_doubling():
    two = Timed(5e6, [Region(5_000_000, 5_000_000, 10_000_000, 64, 32, False)])
    call = CallTimes("op", "layer", {1: ONE, 2: two}, {1: ONE, 2: ONE, 16: ONE})
    model = Model(Starts({1: 0.0, 2: 0.0}), {2: 80.0, 16: 80.0}).fitted([call])
    assert model.missed == 1.25
    assert model.predict(call, 2).wall == 4e6  # as one thread says: it is what the measured time is compared with
    assert (model.predict(call, 16).wall, Model(Starts({1: 0.0}), {16: 80.0}).fitted([call]).missed) == (2 * 5e5, 1.0)
    faster = replace(call, measured={1: ONE, 2: Timed(3e6)})  # as caches of more cores let it be, but not each doubling
    assert Model(Starts({1: 0.0, 2: 0.0}), {2: 80.0}).fitted([faster]).missed == 1.0


def test_starts_grow_with_each_doubling_beyond_those_measured():
    assert [Starts(STARTS)(n) for n in (1, 2, 4, 64)] == [1_000, 3_000, 5_000, 13_000]
    assert (Starts({1: 1_000, 2: 3_000, 4: 9_000})(16), Starts({1: 1_000})(64)) == (17_000, 1_000)
    ran = [Region(9, ns, ns, 1, 1, False) for ns in (1, 8, 3, 7, 0)]
    assert (start_of([Timed(50, ran), Timed(3)]), start_of([Timed(3)])) == (9 - 7, 0)


def test_rows_sum_calls():
    one, two = (call(10_000, [([20_000] * 8, True)], n) for n in (1, 2))
    calls = [CallTimes("op", layer, {1: one, 2: two}, {1: one, 2: one}) for layer in "ab"]
    r = row("op", calls, Model(Starts(STARTS), {2: 1.0}))
    assert (r.calls, r.ms) == (2, {1: pytest.approx(0.342), 2: pytest.approx(0.186)})
    assert r.efficiency[2] == pytest.approx(342 / 2 / 186)
    assert (r.ms[2] - r.ms[1] / 2, r.predicted_ms) == (pytest.approx(sum(r.lost_ms[2].values())), {2: r.ms[2]})
    assert r.chunks == {1: 8, 2: 8}


def test_arrays_that_ops_write_in_turn_are_those_of_a_tied_embedding():
    found = in_turn(build_only(Settings(model="gpt2-tiny", B=2, T=16)).program)
    assert found[0].arrays == ["wte.weight", "wte.weight.m", "wte.weight.v"]
    assert found[0].ops == ["classifier_update", "embedding_update"]
    assert [one.nbytes for one in found] == sorted((one.nbytes for one in found), reverse=True)


def test_numbers_of_threads_are_powers_of_two_and_all():
    assert [usual_counts(n) for n in (1, 2, 6, 16)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8, 16]]


# Regions as they run --------------------------------------------------------------------------------------------------


def test_the_log_counts_the_chunks_of_each_region():
    regions.watch()

    @helper(parallel=True)
    def work(x, n, queue, workers, chunks):
        for i in prange(n):
            x[i] = 1
        deal(queue, chunks)
        for w in prange(workers):
            chunk = take(queue, w)
            while chunk >= 0:
                x[chunk] = w
                chunk = take(queue, w)

    log, x, queue = regions.Log(), np.zeros(100, np.float32), np.zeros(17 * LINE, np.int32)
    threads.set_threads(2)
    try:
        work(x, 1, queue, 1, 1)
        log.regions()
        log.follow(queue)
        work(x, 11, queue, 16, 37)
        work(x, 0, queue, 3, 0)
        log.follow(None)
        work(x, 11, queue, 16, 37)
        found = [(r.chunks, r.largest, r.by_ticket) for r in log.regions()]
        assert (found[:2], found[2:4]) == ([(11, 6, False), (37, 1, True)], [(0, 0, False), (3, 2, False)])
        assert (found[4:], log.regions()) == ([(11, 6, False), (16, 8, False)], [])
        work(x, 11, queue, 16, 37)
        assert all(0 < r.slowest <= r.work and r.slowest <= r.wall for r in log.regions())
    finally:
        threads.set_threads(None)


def test_each_part_of_a_region_is_listed_with_its_thread_and_its_time():
    regions.watch()

    @helper(parallel=True)
    def work(x, first):
        for i in prange(2):
            s = np.float32(0)
            for j in range(first if i == 0 else 10):
                s = np.sin(s + x[j % 8])  # each waits for the one before: no vectors, at any width
            x[8 + i] = s

    parts, x = regions.PartLog(), np.ones(12, np.float32)
    threads.set_threads(2)
    try:
        work(x, 1)
        parts.take()
        start = time.perf_counter_ns()
        work(x, 300_000)
        end, found = time.perf_counter_ns(), parts.take()
        assert len({*found[:, 0]}) == len(found) == 2
        assert threading.get_ident() in found[:, 0]  # which is what pthread_self returns
        assert start <= found[:, 1].min() <= found[:, 2].max() <= end
        took = np.sort(found[:, 2] - found[:, 1])
        assert took[1] > 100 * took[0]
        assert len(parts.take()) == 0
    finally:
        threads.set_threads(None)


# The verb -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What ``cpuopt scale --json`` says of a tiny model, and its page."""
    folder = tmp_path_factory.mktemp("scale")
    small = '{"model": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 64, "vocab_size": 256, "block_size": 64}'
    words = ["scale", "--model", small, "-B", "2", "-T", "64", "--steps", "3", "--threads", "1,2"]
    words += ["--project", "16,64", "--bandwidth", "80", "--caches", "8", "--nodes", "2", "--json"]
    done = process(*words, "--html", str(folder / "page.html"), "--runs", str(folder))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), (folder / "page.html").read_text()


def test_the_verb_measures_and_predicts(said):
    found, page = said
    assert (found["threads"], found["projected"]) == ([1, 2], [16, 64])
    for r in (found["step"], *found["ops"], *found["layers"]):
        assert r["ms"].keys() == {"1", "2"}
        assert sum(r["lost_ms"]["2"].values()) == pytest.approx(r["ms"]["2"] - r["ms"]["1"] / 2)
        assert r["predicted_ms"].keys() == {"2", "16", "64"}
        for n in 16, 64:
            lost, ms = r["predicted_lost_ms"][str(n)], r["predicted_ms"][str(n)]
            assert (lost.keys(), sum(lost.values())) == ({*REASONS}, pytest.approx(ms - r["ms"]["1"] / n))
    assert found["step"]["ms"]["2"] == pytest.approx(sum(r["ms"]["2"] for r in found["ops"]))
    assert found["gbs"]["64"] == 80
    for words in "80 GB/s", "8 caches", "2 nodes", "never checked on a real machine":
        assert any(words in a for a in found["assumptions"])
    assert (found["caches"], found["nodes"]) == (8, 2)
    assert found["pool_bytes"] > 0
    colours = (f".line{i} {{" for i in range(3))  # of each line
    assert all(text in page for text in ("perfect", "measured", "predicted", *REASONS, *colours))
    assert all(what in html.unescape(page) for what in MEANING.values())


def test_the_table_explains_its_losses_and_shows_no_minus_zero():
    lost = {"serial": 1.0, "start": -2.0, "imbalance": 0.5, "shared": -1e-6}
    times = {"name": "step", "ms": {1: 4.0, 2: 3.0}, "efficiency": {1: 1.0, 2: 0.67}, "lost_ms": {2: lost}}
    text = rendered.as_text(report.measured([], SimpleNamespace(**times), 2, "op"))
    assert "-0.0" not in text
    assert "-2.000" in text
    for reason, what in MEANING.items():
        assert f"{reason}: {what}" in " ".join(text.split())


def test_ops_with_fewer_chunks_than_threads_and_arrays_of_several_caches_are_named():
    lost, chunks = {"predicted_lost_ms": {16: {"imbalance": 1.5}}}, {"attention_forward": 12, "gelu_forward": 16}
    few, enough = (SimpleNamespace(name=name, chunks={16: n}, **lost) for name, n in chunks.items())
    turns = [InTurn(["wte", "m"], ["a", "b"], 463 << 20), InTurn(["loss"], ["c", "d"], 4)]
    s = SimpleNamespace(projected=[4, 16], ops=[few, enough], in_turn=turns, pool_bytes=10**9, caches=2)
    assert report.idle(s) == "fewer chunks than 16 threads: attention_forward 12 (1.5 ms lost)"
    assert "wte, m (0.49 GB) by a, b; the pool (1.00 GB)" in report.shared(s)
    s.ops, s.caches = [enough], 1
    assert report.idle(s) == report.shared(s) == ""


def test_kernels_are_cut_for_the_predicted_threads(said):
    chunks = {r["name"]: r["chunks"] for r in said[0]["ops"]}
    assert chunks["layernorm_backward"] == {"1": 32, "2": 32, "16": 32, "64": 32}  # whatever the threads
    assert chunks["attention_forward"] == {"1": 4, "2": 4, "16": 4, "64": 4}  # heads of two rows
    alone = chunks["matmul_gelu_forward"]  # one call; of several, the clock decides whose chunks are shown
    assert alone["1"] < alone["16"]  # smaller chunks for more threads


def test_the_instruments_own_time_is_no_part_of_a_step():
    now = [0]

    def passes(ns):
        now[0] += ns

    def regions():
        passes(1000)
        return []

    kernel = SimpleNamespace(function=lambda: passes(10), scratch=[])
    bound = SimpleNamespace(call=SimpleNamespace(op=SimpleNamespace(params=[])), kernel=kernel, args=[])
    log = SimpleNamespace(follow=lambda array: passes(100), regions=regions)
    watch = Stopwatch({1: {id(bound): bound}}, log, lambda: now[0])
    with watch.time_step((1, 1)):
        passes(3)
        watch.run([bound, bound])
    ((between, calls),) = watch.found[1, 1]
    assert ([timed.wall for _, timed in calls], between) == ([10, 10], 3)

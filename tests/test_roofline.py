"""Roofs: what is measured, what is kept, and what the profile makes of them."""

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numba import prange
from verbs import printed, ran

from cpuopt import models
from cpuopt.building import BuildOptions, build
from cpuopt.files import CacheWarning
from cpuopt.files.reading import from_json, to_json
from cpuopt.kernels import roofs as kernels
from cpuopt.kernels.compile.jit import helper
from cpuopt.kernels.registry import Choice
from cpuopt.kernels.toolkit import regions, threads
from cpuopt.kernels.toolkit.simd import HOST, LANES
from cpuopt.measure import profile as profiles
from cpuopt.measure import rates as machine
from cpuopt.measure import roofline
from cpuopt.measure.roofline import Level, Roofs, TimedCall
from cpuopt.measure.schemes import SCHEMES
from cpuopt.program.fuse import usual

LEVELS = (Level("L1", 1000), Level("L2", 10_000, 2), Level("memory", None, 4))
GBS = {"L1": {"read": 50, "copy": 40}, "L2": {"read": 20}, "memory": {"read": 5}}
ROOFS = Roofs(2, LEVELS, 100.0, GBS, 2.0, bf16_gflops=200.0, int8_gflops=400.0, **machine.BY)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A cache of its own, where nothing was measured; the runs of a measurement, which finds `ROOFS` or what is set."""
    runs = SimpleNamespace(counts=[], found=ROOFS)
    measure = lambda self, counts: runs.counts.append(counts) or dict.fromkeys(counts, runs.found)  # noqa: E731
    monkeypatch.setenv("CPUOPT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(machine, "MEASURED", set())
    monkeypatch.setattr(machine.Measurement, "run", measure)
    return runs


@pytest.mark.parametrize(
    ("nbytes", "name", "threads"),
    [(2000, "L1", 2), (2001, "L2", 2), (1001, "L2", 1), (10_000, "L2", 2), (10_001, "memory", 2), (20_000, "L2", 3)],
)
def test_a_call_is_held_against_the_smallest_level_that_can_hold_it(nbytes, name, threads):
    assert Roofs(threads, LEVELS, 1.0, {}, 1.0).level(nbytes) == name


@pytest.mark.parametrize(
    ("flops", "nbytes", "ns", "roof"),
    [(1e6, 1000, 1e4, "FMA"), (100, 1000, 20, "L1"), (1e4, 1e6, 2e5, "memory"), (0, 5000, 250, "L2")],
)
def test_the_roof_that_binds(flops, nbytes, ns, roof):
    assert ROOFS.bound(flops, nbytes) == (ns, roof)
    typed = (ns / 2, "bf16") if roof == "FMA" else (ns, roof)
    assert ROOFS.bound(flops, nbytes, "bfloat16") == typed
    earlier = replace(ROOFS, bf16_gflops=None)  # of a record, which has no such figure
    assert earlier.bound(flops, nbytes, "bfloat16") == (ns, roof)
    memory = nbytes / ROOFS.bandwidth(ROOFS.level(nbytes))
    assert replace(ROOFS, int8_gflops=None).bound(flops, nbytes, "int8")[0] == memory  # of an earlier record
    assert ROOFS.bound(flops, nbytes, "int8") == ((ns / 4, "int8") if roof == "FMA" else (ns, roof))
    call = TimedCall("matmul_int8_forward", 1.0, 1000.0, 1.0, "int8")
    assert (ROOFS.proven(call).int8_gflops, ROOFS.proven(call).gflops) == (1000.0, ROOFS.gflops)


def test_roofs_come_back_from_json_and_flops_take_the_time_of_their_types():
    assert from_json(Roofs, json.loads(json.dumps(to_json(ROOFS)))) == ROOFS
    assert ROOFS.compute_ns({"float32": 1000, "bfloat16": 4000}) == 10 + 20


def test_a_step_in_bfloat16_is_held_against_the_peak_of_its_types():
    config = models.parse("gpt2-tiny")
    how = {"choice": Choice("optimized"), "fuse": usual("optimized", False), "threads": 1}
    options = (BuildOptions(dtype=dtype, **how) for dtype in ("float32", "bfloat16"))
    plain, narrow = (build(config.module(), config.specs(2, 8), each).program for each in options)
    assert set(plain.work) == {"float32"}
    products = [c for c in narrow.step_calls if c.operands == "bfloat16"]
    read = {c.op.name.partition("_")[0] for c in products}
    assert read >= {"matmul", "attention", "classifier"}
    assert not read & {"adamw", "layernorm", "residual"}
    assert narrow.work["bfloat16"] == sum(c.flops for c in products) > 0.9 * narrow.flops
    assert sum(plain.work.values()) == plain.flops == narrow.flops
    assert "convert" not in {c.phase for c in narrow.step_calls} < {c.phase for c in narrow.calls}


def test_the_tokens_below_which_memory_binds():
    """By hand, from the bytes: two readings of what products read, weight and moments twice, the copy once."""
    assert [s.moved for s in SCHEMES] == [4 + 4 + 8 + 16, 2 + 2 + 8 + 16 + 2, 2 + 2 + 8 + 8 + 2, 2 + 2 + 4 + 8]
    # 100 GFLOP/s, of bfloat16 200, and 5 GB/s
    assert [s.tokens(ROOFS) for s in SCHEMES] == pytest.approx([32 * 20 / 6, 30 * 40 / 6, 22 * 40 / 6, 16 * 40 / 6])


def row(op, ms, of_roof, roof="FMA", layer="", imbalance=None, types=("float32",)):
    more = {"kernels": [f"{op.lower().replace(' ', '_')}[k]"], "layer": layer, "imbalance": imbalance, "types": types}
    return SimpleNamespace(op=op, ms=ms, of_roof=of_roof, roof=roof, **more)


def told(mfu, ops, layers=()):
    """What is said of a profile."""
    step = {"step_ms": {"mean": 200.0}, "mfu": mfu, "threads": 2, "model": "gpt2-tiny", "B": 2, "T": 8}
    return profiles.words(SimpleNamespace(**step, ops=ops, layers=[*layers] or LAYERS))


GELU = [row("gelu_forward", 20, 5, "L3", layer) for layer in ("h.0.mlp", "h.11.mlp")]
LAYERS = [row("matmul_forward", 90, 90, layer="h.0.mlp"), *GELU]


NEXT = "Next: cpuopt new-kernel gelu_forward; cpuopt lab gelu_forward.py --model gpt2-tiny -B 2 -T 8"


def test_words():
    ops = row("Matmul Forward", 90, 90), row("Matmul Backward", 60, 80), row("GELU Forward", 40, 5, "L3", "", 1.5)
    assert told(60.0, ops) == (
        "A step takes 200 ms, 60 % of the FMA peak of 2 threads (MFU). matmul is 75 % of it, at 86 % of its roof. "
        "Furthest above its bound is gelu_forward in h.*.mlp: 38.0 ms above the L3 roof (5 % of it). "
        f"Threads wait most in gelu_forward: the slowest takes 1.50 times the mean. {NEXT}"
    )
    assert told(None, [row("Matmul Forward", 150, None)]) == "A step takes 200 ms. matmul is 75 % of it."
    assert told(60.0, [row("Matmul Forward", 150, 40, "bf16", types=("bfloat16", "float32"))]).startswith(
        "A step takes 200 ms, 60 % of the bf16 and FMA peaks of 2 threads (MFU). matmul is 75 % of it, at 40 % of its"
    )


def test_an_impossible_share_is_shown_as_unfit_and_no_sentence_takes_it():
    layers = row("matmul_forward", 90, 319, layer="h.0.mlp"), GELU[0]
    assert told(160.0, [row("Matmul Forward", 90, 319), row("GELU Forward", 40, 5, "L3")], layers) == (
        "A step takes 200 ms. matmul is 45 % of it. "
        "Furthest above its bound is gelu_forward in h.*.mlp: 19.0 ms above the L3 roof (5 % of it). "
        f"{NEXT}"
    )
    assert [roofline.share(x) for x in (5.4, 100.0, 100.1, None)] == ["5%", "100%", "unfit", "0%"]


# What is measured -----------------------------------------------------------------------------------------------------

N = 2 * kernels.UNIT


def floats():
    return np.random.default_rng(0).standard_normal(2 * N + 64).astype(np.float32)


def test_fma_does_the_operations_that_are_counted():
    x, sums = np.r_[np.full(LANES, 0.5), np.ones(LANES)].astype(np.float32), np.zeros(4, np.float32)
    kernels.fma(x, sums, 3, 2)
    # a chain is 0.5, then 0.5 * 0.5 + 1, then 1.25 * 0.5 + 1: two multiply-adds
    assert (sums.tolist(), kernels.FLOPS) == ([kernels.CHAINS * LANES * 1.625] * 3 + [0], 2 * kernels.CHAINS * LANES)


def test_pairs_do_the_operations_that_are_counted():
    words = np.full(2 * LANES, 0x3F003F80, np.uint32).view(np.float32)  # halves of 1 and 0.5
    sums = np.zeros(4, np.float32)
    kernels.pairs(words, sums, 3, 2)
    # a chain is the word as a float, 0.501892, and in each of two rounds 1 * 1 + 0.5 * 0.5 more
    want = kernels.CHAINS * LANES * (float(words[0]) + 2 * 1.25)
    np.testing.assert_allclose(sums, [want] * 3 + [0], rtol=1e-6)
    assert kernels.BF16_BY in ("tdpbf16ps", "vdpbf16ps" if HOST.dot else "two FMAs")


def test_streams_touch_every_float_that_is_counted_and_no_other():
    sums, x = np.zeros(4, np.float32), floats()
    kernels.read(x, sums, 2, N, 3)
    extra = np.array([4 * x[i * N : i * N + LANES].sum() for i in range(2)])
    np.testing.assert_allclose(sums[:2], 3 * (x[: 2 * N].reshape(2, N).sum(1) + extra), rtol=1e-4, atol=1e-2)
    want = x.copy()
    want[: 2 * N] *= 0.25
    kernels.update(x, sums, 2, N, 2)
    np.testing.assert_array_equal(x, want)
    want[: 2 * N].reshape(2, 2, N // 2)[:, 1] = want[: 2 * N].reshape(2, 2, N // 2)[:, 0]
    kernels.copy(x, sums, 2, N, 1)
    np.testing.assert_array_equal(x, want)
    parts = want[: 2 * N].reshape(2, 3, N // 3)
    parts[:, 0] = parts[:, 1] + np.float32(0.5) * parts[:, 2]
    kernels.triad(x, sums, 2, N, 1)
    np.testing.assert_allclose(x, want, rtol=1e-6)


class FakeMachine:
    """A clock that the kernels move: 0.25 ns a vector operation, 0.1 ns a byte."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(kernels, "nothing", lambda sums, n: self.cost(3000))
        fma = lambda x, sums, n, rounds: self.cost(rounds * kernels.CHAINS * 0.25)  # noqa: E731
        for name in "fma", "bf16", "int8":
            monkeypatch.setattr(kernels, name, fma)
        for name, times in ("BF16_FLOPS", 2), ("INT8_FLOPS", 4):
            monkeypatch.setattr(kernels, name, times * kernels.FLOPS)
        for name in kernels.STREAMS:
            stream = lambda x, sums, n, floats, rounds: self.cost(rounds * n * floats * 4 * 0.1)  # noqa: E731
            monkeypatch.setitem(kernels.STREAMS, name, (stream, kernels.STREAMS[name][1]))

    def cost(self, ns):
        self.now += ns

    def __call__(self):
        return round(self.now)


def test_figures_have_their_units(monkeypatch):
    found = machine.Measurement(FakeMachine(monkeypatch), samples_s=1e-3).run([1, 2])
    assert found[2].gflops == pytest.approx(2 * found[1].gflops, rel=1e-3)
    assert found[1].gflops == pytest.approx(2 * LANES / 0.25, rel=1e-3)
    narrow, gflops = [found[2].bf16_gflops, found[2].int8_gflops], found[2].gflops
    assert narrow == pytest.approx([2 * gflops, 4 * gflops], rel=1e-3)
    assert found[1].launch_us == pytest.approx(3, rel=1e-3)
    assert {n for r in found.values() for n in r.gbs} == {v.name for v in found[1].levels}
    for by_kind in (kinds for r in found.values() for kinds in r.gbs.values()):
        assert by_kind == pytest.approx({"read": 10, "copy": 10, "triad": 10, "update": 20}, rel=1e-3)


def test_a_core_that_is_taken_away_does_not_end_the_search_for_rounds(monkeypatch):
    """Starting threads takes 3 µs, so one round a sample would give a thousandth of the rate."""
    fake, looks = FakeMachine(monkeypatch), iter(range(1000))
    per_round = kernels.CHAINS * 0.25
    taken = lambda: 1e7 if next(looks) in (0, 1, 2) else 0  # noqa: E731
    monkeypatch.setattr(kernels, "fma", lambda x, sums, n, rounds: fake.cost(3000 + taken() + rounds * per_round))
    assert machine.Measurement(fake, samples_s=1e-3).peak("FMA", 1) == pytest.approx(2 * LANES / 0.25, rel=1e-2)


def test_threads_that_bring_nothing_are_doubted():
    one, slow = replace(ROOFS, threads=1), {**ROOFS.gbs, "L2": {"read": 15}}
    assert machine.poor(one, one) == machine.poor(replace(ROOFS, gflops=150.0), one) == []
    assert machine.poor(replace(ROOFS, gflops=110.0), one) == ["2 threads reach 110 GFLOP/s and one reaches 100"]
    assert machine.poor(replace(ROOFS, gflops=150.0, gbs=slow), one) == ["2 threads get less than one from L2"]


def test_a_machine_that_is_slower_now_is_doubted(monkeypatch):
    for share in (1.0, 0.91):
        monkeypatch.setattr(machine.Measurement, "peak", lambda self, name, n, share=share: share * ROOFS.gflops)
        assert machine.lower_now(ROOFS) == []
    monkeypatch.setattr(machine.Measurement, "peak", lambda self, name, n: 0.75 * ROOFS.gflops)
    (doubt,) = machine.lower_now(ROOFS)
    assert f"reach {0.75 * ROOFS.gflops:.0f} GFLOP/s just now, 75 % of the FMA roof" in doubt


def test_roofs_are_kept_for_this_machine_and_measured_once(runs, monkeypatch):
    assert [machine.roofs(2), machine.roofs(2), runs.counts] == [ROOFS, ROOFS, [[2]]]
    monkeypatch.setattr(machine, "identity", lambda: {"cpu": "another"})
    assert machine.stored() == {}


NO_PEAK = {"bf16_gflops": None, "bf16_by": ""}


@pytest.mark.parametrize("change", [NO_PEAK, {"bf16_by": "another"}, {"int8_by": "another"}])
def test_kept_roofs_without_a_peak_are_measured_again(runs, change):
    machine.store({1: replace(ROOFS, threads=1), 2: replace(ROOFS, gflops=900.0, **change)})
    assert machine.stored() == {1: replace(ROOFS, threads=1)}
    assert machine.roofs(2) == machine.stored()[2] == ROOFS
    machine.file().unlink()
    machine.store({2: replace(ROOFS, int8_gflops=None)})
    assert machine.stored() == {}


def test_roofs_of_a_busy_machine_are_measured_again_when_it_is_quiet(runs, monkeypatch):
    busy = replace(ROOFS, gflops=1.0, doubts=("other processes used 1.56 cores meanwhile",))
    machine.store({2: busy})
    running = [3]
    monkeypatch.setattr(machine, "running", lambda: running[0])
    assert (machine.roofs(2), runs.counts) == (busy, [])
    running[0] = 0
    assert (machine.roofs(2), machine.stored(), runs.counts) == (ROOFS, {2: ROOFS}, [[2]])
    assert (machine.roofs(2), runs.counts) == (ROOFS, [[2]])
    machine.store({2: replace(ROOFS, doubts=())})
    uneven = replace(ROOFS, doubts=("2 threads get less than one from L2",))  # a property of the machine
    machine.store({2: replace(uneven, gflops=200.0)})
    machine.MEASURED.clear()
    machine.roofs(2)
    assert runs.counts == [[2]]


def test_roofs_that_something_passes_are_raised_once_and_only_this_machines(runs):
    machine.store({2: ROOFS})
    runs.found = replace(ROOFS, gflops=150.0, gbs={**ROOFS.gbs, "L2": {"read": 7}}, doubts=("busy",))
    fast = TimedCall("gelu_forward", 8e3, 1e6, 0)  # 125 GFLOP/s
    assert machine.raised(ROOFS, [fast._replace(ns=1e4)]) == (ROOFS, [])
    other = replace(ROOFS, gflops=5.0)
    assert machine.raised(other, [fast])[0] == replace(other, gflops=125.0)
    assert (machine.stored(), runs.counts) == ({2: ROOFS}, [])
    better = replace(ROOFS, gflops=150.0)
    said = "gelu_forward passed a roof, so these were raised: FMA from 100 to 150 GFLOP/s"
    assert machine.raised(ROOFS, [fast]) == (better, [said])
    assert (machine.stored(), runs.counts) == ({2: better}, [[2]])
    assert machine.raised(better, [fast._replace(ns=4e3)])[0] == machine.stored()[2] == replace(better, gflops=250.0)
    assert runs.counts == [[2]]


@pytest.mark.parametrize(
    ("flops", "nbytes", "ns", "changes"),
    [
        (3e6, 0, 1e4, {"gflops": 300.0, "bf16_gflops": 200.0}),
        (0, 1e6, 1e5, {"gbs": GBS | {"memory": {"read": (1e6 - 12_000) / 1e5}}}),
        (0, 1e6, 1e4, {"gbs": {"L1": {"read": 98.8, "copy": 40}, "L2": {"read": 98.8}, "memory": {"read": 98.8}}}),
        (0, 12_100, 100, {}),  # which the nearer levels may have held
    ],
)
def test_a_call_raises_the_roofs_that_it_proves_too_low(flops, nbytes, ns, changes):
    assert ROOFS.proven(TimedCall("adamw", ns, flops, nbytes)) == replace(ROOFS, **changes)
    assert (ROOFS.bound(flops, nbytes)[0] > ns) == (changes != {} or nbytes == 12_100)


def contradictions(found):
    """What is below a figure that it must reach: of fewer threads, or of the next level out."""
    rates = {n: {"FMA": r.gflops, "bf16": r.bf16_gflops, **{v.name: r.bandwidth(v.name) for v in r.levels}}
             for n, r in found.items()}  # fmt: skip
    counts, levels = sorted(found), [v.name for v in LEVELS]
    fewer = [(n, name) for m, n in pairwise(counts) for name in rates[n] if rates[n][name] < rates[m][name]]
    return fewer + [(n, far) for n in counts for near, far in pairwise(levels) if rates[n][near] < rates[n][far]]


@pytest.mark.usefixtures("runs")
def test_roofs_are_monotone_however_they_were_measured():
    measured = {
        1: replace(ROOFS, threads=1, gflops=117.5),
        2: replace(ROOFS, gflops=21.2, bf16_gflops=30.0, gbs=GBS | {"L1": {"read": 9}, "memory": {"read": 1}}),
        4: replace(ROOFS, threads=4, gbs={"L1": {"read": 5}, "L2": {"read": 6}, "memory": {"read": 7}}),
    }
    assert contradictions(measured)
    found = machine.store(measured)
    assert (contradictions(found), found) == ([], machine.stored())
    assert (found[2].gflops, found[4].gbs["memory"]["read"]) == (117.5, 7)


@pytest.mark.usefixtures("runs")
def test_doubtful_figures_do_not_replace_better_ones():
    machine.store({2: ROOFS})
    one, both = ({**ROOFS.gbs, "L1": {"read": 90.0, "copy": copy}} for copy in (1.0, 40.0))
    low = replace(ROOFS, gflops=50.0, bf16_gflops=70.0, launch_us=9.0, gbs=one)
    machine.store({2: replace(low, doubts=("busy",))})
    assert machine.stored() == {2: replace(ROOFS, gbs=both)}
    machine.store({2: low})
    assert machine.stored() == {2: low}


@pytest.mark.usefixtures("runs")
def test_roofs_that_cannot_be_kept_are_given_all_the_same(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("CPUOPT_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(CacheWarning, match=r"file/machine: it keeps nothing, .*Not a directory"):
        assert machine.roofs(2) == ROOFS
    found = ran(capsys, "machine", "--threads", "1")
    assert (found["roofs"]["1"]["gflops"], found["file"]) == (ROOFS.gflops, None)
    assert "not kept: the next command measures again" in printed(capsys, "machine", "--threads", "1")
    monkeypatch.setenv("CPUOPT_CACHE_DIR", str(tmp_path / "other"))
    assert Path(ran(capsys, "machine", "--threads", "1")["file"]).is_file()


@pytest.mark.parametrize("text", ["", "[]", '{"format": 0}', '{"format": 1, "roofs": {"2": {}}}'])
@pytest.mark.usefixtures("runs")
def test_a_file_that_cannot_be_used_is_measured_anew(text):
    machine.store({2: ROOFS})
    assert machine.stored() == {2: ROOFS}
    machine.file().write_text(text)
    with pytest.warns(CacheWarning, match="damaged or of another version"):
        assert machine.stored() == {}


def test_a_slow_threading_layer_is_said_with_what_to_install(monkeypatch):
    assert machine.slow_layer() is None
    monkeypatch.setattr(threads, "threading_layer", lambda: "workqueue")
    assert all(words in machine.slow_layer() for words in ("'workqueue'", "apt install libgomp1"))


def test_threads_that_share_cores_are_named_though_the_system_hides_it(monkeypatch):
    monkeypatch.setattr(machine.numba_threads, "threading_layer", lambda: "omp")

    def found(*gflops, doubts=()):
        return {n: replace(ROOFS, threads=n, gflops=x, doubts=doubts) for n, x in zip((1, 8, 16), gflops, strict=False)}

    (said,) = machine.lacks(found(167, 1128, 1414))
    assert said.startswith("16 threads reach 1,414 GFLOP/s, 8.5 times one thread's 167")
    assert machine.lacks(found(167, 1128)) == []  # a lower clock
    assert machine.lacks(found(167)) == machine.lacks({}) == []
    assert machine.lacks(found(167, 1128, 1414, doubts=("other processes used 3 cores meanwhile",))) == []


@pytest.mark.usefixtures("runs")
def test_the_verb(capsys):
    content = ran(capsys, "machine")
    assert (content["measured_now"], from_json(Roofs, content["roofs"]["2"])) == ([1, 2, 4], ROOFS)
    assert content["noise"].keys() >= {"others_cores", "load_average", "mhz", "quota_cores"}
    out = printed(capsys, "machine")
    assert all(words in out for words in ("FMA, GFLOP/s", "L1 copy, GB/s", "now: other processes use"))
    rates = (f"bf16, GFLOP/s, by {kernels.BF16_BY} +200.0", f"int8, GOP/s, by {kernels.INT8_BY} +400.0")
    assert all(re.search(shown, out) for shown in (*rates, r"T\*, bf16: 30 B +200 +200"))
    assert max(map(len, out.partition("GB/s")[2].partition("measured")[0].splitlines())) <= 80
    assert content["schemes"][1] == {"name": "bf16", "moved_bytes": 30, "tokens": dict.fromkeys("124", 200.0)}


# Threads of a region --------------------------------------------------------------------------------------------------


def test_a_region_tells_how_even_its_threads_are():
    totals = regions.watch()
    assert regions.watch() is totals

    @helper(parallel=True)
    def work(x, first, others):
        for i in prange(4):
            s = np.float32(0)
            for j in range(first if i == 0 else others):
                s += np.sin(x[j % 8])
            x[8 + i] = s

    x = np.ones(12, np.float32)
    threads.set_threads(4)
    work(x, 1, 1)
    before = totals.copy()
    work(x, 300_000, 0)
    alone, before = totals - before, totals.copy()
    work(x, 100_000, 100_000)
    even = totals - before
    assert alone[2] == even[2] == 1
    assert 3 < alone[0] / alone[1] <= 4.0
    assert 1 <= even[0] / even[1] < alone[0] / alone[1]

"""The profiler on a GPT-2 whose kernels are the references, under a clock that only they and its own readings move."""

import io
import json
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import small_models
from references import by_reference
from rich.console import Console
from test_traces import chrome_faults
from verbs import fails, process

from cpuopt import ops
from cpuopt.building import run_calls
from cpuopt.check.result import TOO_LARGE, WORDS
from cpuopt.engine import Engine
from cpuopt.errors import UserError
from cpuopt.kernels import registry
from cpuopt.measure.profile import UNACCOUNTED, op_ids
from cpuopt.measure.quartile import apart, lower_quartile
from cpuopt.measure.roofline import Level, Roofs
from cpuopt.models.gpt2 import GPT2, PRESETS
from cpuopt.profiler import Profiler
from cpuopt.report import tables, trace

B, T = 2, 8
TICK = 10  # ns that a reading of the clock takes
BETWEEN = 5 * TICK  # a step reads the clock at its start, its end, and around four phases
CALLS = {"Matmul Forward": 9, "Matmul Backward dw/db": 9, "GELU Backward": 2, "Encoder Forward": 1, "AdamW": 28}


class FakeClock:
    """Time moves by `TICK` a reading, and by what a kernel is said to cost."""

    def __init__(self):
        self.now = 10**15
        self.reset()

    def reset(self):
        self.cost = {("fake", name): 1000 * (i + 3) + i for i, name in enumerate(ops.ALL)}

    def __call__(self):
        self.now += TICK
        return self.now


CLOCK = FakeClock()


def reference_kernel(op, variant):
    """A kernel that computes by the op's reference and takes its time from `CLOCK`."""
    compute = by_reference(op)

    def function(*args):
        compute(*args)
        CLOCK.now += CLOCK.cost.get((variant, op.name), CLOCK.cost["fake", op.name])

    return registry.Kernel(op, variant, function)


@pytest.fixture(autouse=True, scope="module")
def _kernels():
    with pytest.MonkeyPatch.context() as patch:
        for op in ops.ALL.values():
            patch.setitem(registry.KERNELS, (op.name, "fake"), reference_kernel(op, "fake"))
        patch.setitem(registry.KERNELS, ("gelu_forward", "other"), reference_kernel(ops.ALL["gelu_forward"], "other"))
        yield


@pytest.fixture(autouse=True)
def _costs():
    CLOCK.reset()


def make_engine(*swaps):
    inputs, choice = {"tokens": ((B, T), "int32"), "targets": ((B, T), "int32")}, registry.Choice("fake", swaps)
    return Engine.from_options(GPT2(PRESETS["gpt2-tiny"]), inputs, choice=choice), choice


@pytest.fixture(scope="module")
def shared():
    return make_engine()


@pytest.fixture
def engine(shared):
    yield shared[0]
    shared[0].runner = run_calls


@pytest.fixture
def profiled(engine, shared):
    """Profile steps of the shared engine."""
    return partial(run, engine, shared[1])


batch = partial(small_models.batch, T=T)


def run(engine, choice, steps=1, warmup=0, delays=None, roofs=None, given=None, **kw):
    """Profile some steps of a model, each as much longer as told in ns; give the profiler, and the profile."""
    p = Profiler(engine, CLOCK, **kw)
    for i, delay in enumerate(delays or [0] * (warmup + steps)):
        with p.time_step():
            engine.step(**given or batch(i))
            CLOCK.now += int(delay)
    p.remove()
    return p, p.profile(model="gpt2-tiny", B=B, T=T, choice=choice, warmup=warmup, roofs=roofs)


@pytest.fixture
def result(profiled):
    return profiled()[1]


def row(profile, label):
    return next(r for r in profile.ops if r.label == label)


def cost(op, variant="fake"):
    return CLOCK.cost[variant, op] + TICK


# What a profile says


def test_every_kind_of_op_has_its_row_in_the_order_of_a_step(result, engine):
    assert [r.label for r in result.ops] == [*dict.fromkeys(c.op.label for c in engine.program.calls), UNACCOUNTED]
    assert {r.label: r.calls for r in result.ops if r.label in CALLS} == CALLS
    assert row(result, "AdamW").kernels == ["adamw[fake]"]
    assert [r.op for r in result.ops] == [op_ids(r.label, r.kernels) for r in result.ops]
    assert row(result, "Encoder Forward").op == "embedding_forward"
    assert result.op_ms_values.keys() == {r.op for r in result.ops} - {UNACCOUNTED}


def test_a_row_is_held_against_the_roof_that_binds(engine, shared, profiled, monkeypatch):
    levels = (Level("L1", 20_000), Level("memory", None))
    roofs = Roofs(1, levels, 1e3, {"L1": {"read": 2e3, "copy": 3e3}, "memory": {"read": 500}}, 1.0)
    p, profile = profiled(roofs=roofs)
    for r in profile.ops[:-1]:
        calls = [c for c in engine.program.calls if c.op.label == r.label]
        least = sum(max(c.flops / 1e3, c.bytes / (3e3 if c.bytes <= 20_000 else 500)) for c in calls)
        assert r.of_roof == pytest.approx(100 * least / (r.ms * 1e6))
        assert r.intensity == pytest.approx(sum(c.flops for c in calls) / sum(c.bytes for c in calls))
    assert (row(profile, "Matmul Forward").roof, row(profile, "AdamW").roof) == ("FMA", "memory")
    assert profile.mfu == pytest.approx(engine.program.flops / (profile.quiet_ms * 1e7))
    assert (profile.roofs, profile.doubts) == (roofs, [])
    assert "Furthest above its bound is" in " ".join(show(profile))
    low = replace(roofs, gflops=1.0)
    raised = p.profile(model="gpt2-tiny", B=B, T=T, choice=shared[1], roofs=low)
    most = max(c.flops / cost(c.op.name) for c in engine.program.calls)
    assert raised.roofs == replace(low, gflops=pytest.approx(most))
    assert max(r.of_roof or 0 for r in raised.layers) == pytest.approx(100)
    assert raised.mfu == pytest.approx(100 * engine.program.flops / (most * raised.quiet_ms * 1e6))
    (said,) = raised.doubts
    assert f"passed a roof, so these were raised: FMA from 1 to {most:.4g} GFLOP/s" in said
    monkeypatch.setattr("cpuopt.measure.rates.raised", lambda kept, calls: (kept, []))
    low = replace(roofs, gflops=0.9 * most * max(r.of_roof for r in raised.ops if r.roof == "FMA") / 100)
    passed = p.profile(model="gpt2-tiny", B=B, T=T, choice=shared[1], roofs=low)
    assert (passed.mfu, "MFU" in passed.words) == (None, False)
    assert sum("which is impossible" in d for d in passed.doubts) == 1
    assert "unfit" in " ".join(show(passed))


def test_imbalance_is_the_slowest_threads_time_over_the_mean(engine, profiled, monkeypatch):
    totals = np.zeros(3, np.int64)

    def uneven(function, op):
        def run(*args):
            function(*args)
            totals[:] += (60, 40, 1) if op == "gelu_forward" else (10, 10, 1)

        return run

    monkeypatch.setattr(engine, "phases", dict(engine.phases))
    for phase, calls in engine.phases.items():
        kernel = lambda b: replace(b.kernel, function=uneven(b.kernel.function, b.call.op.name))  # noqa: E731
        engine.phases[phase] = [replace(b, kernel=kernel(b)) for b in calls]
    monkeypatch.setattr(engine, "backwards", [engine.phases["backward"]])
    _, p = profiled(steps=2, regions=totals)
    assert row(p, "GELU Forward").imbalance == pytest.approx(1.5)
    assert row(p, "GELU Backward").imbalance == pytest.approx(1.0)
    assert row(p, UNACCOUNTED).imbalance is None
    assert row(profiled()[1], "GELU Forward").imbalance is None


def test_shares_add_to_100_and_ms_to_the_step(profiled):
    _, p = profiled(steps=7, warmup=2)
    assert sum(r.share for r in p.ops) == pytest.approx(100)
    assert sum(r.ms for r in p.ops) == pytest.approx(p.quiet_ms)
    assert all(r.share == pytest.approx(100 * r.ms / p.quiet_ms) for r in p.ops)
    assert sum(r.ms for r in p.layers) + p.unaccounted_ms == pytest.approx(p.quiet_ms)
    assert sum(r.share for r in p.layers) + p.ops[-1].share == pytest.approx(100)


def test_layers_say_which_variant_ran_where():
    engine, choice = make_engine("gelu_forward@h.1.*=other")
    CLOCK.cost["other", "gelu_forward"] = 123_000
    _, p = run(engine, choice)
    gelu = {r.layer: (r.variant, r.phase, r.ms) for r in p.layers if r.op == "gelu_forward"}
    ms = {variant: pytest.approx(cost("gelu_forward", variant) / 1e6) for variant in ("fake", "other")}
    assert gelu == {f"h.{i}.mlp": (variant, "forward", ms[variant]) for i, variant in enumerate(ms)}
    assert row(p, "GELU Forward").kernels == ["gelu_forward[fake]", "gelu_forward[other]"]
    assert (p.variant, p.swaps) == ("fake", ["gelu_forward@h.1.*=other"])


def test_two_calls_of_one_layer_are_one_row_and_layers_stand_together(result):
    residual = [r for r in result.layers if (r.layer, r.op) == ("h.0", "residual_forward")]
    assert [(r.calls, r.ms) for r in residual] == [(2, pytest.approx(2 * cost("residual_forward") / 1e6))]
    order = [r.layer for r in result.layers]
    assert order == sorted(order, key=order.index)


def test_warm_up_is_dropped_and_a_disturbed_step_moves_no_row(profiled):
    p, r = profiled(warmup=1, delays=[9e6, 0, 0, 5e6, 0])
    quiet = (p.steps[1].end - p.steps[1].start) / 1e6
    assert (r.steps, r.warmup, r.step_ms_values) == (4, 1, pytest.approx([quiet, quiet, quiet + 5, quiet]))
    ends = {"max": quiet + 5, "mean": quiet + 5 / 4}
    assert r.step_ms == pytest.approx(dict.fromkeys(("quiet", "median", "min"), quiet) | ends)
    assert (r.quiet_ms, r.tokens_per_s) == pytest.approx((quiet, B * T / (quiet / 1e3)))
    assert r.unaccounted_ms == pytest.approx(BETWEEN / 1e6)
    assert sum(row.ms for row in r.ops) == pytest.approx(quiet)
    said, mean = next(line for line in show(r) if "tokens/s" in line), f"mean {quiet + 5 / 4:,.3f}"
    assert f"step {quiet:,.3f} ms, lower quartile of 4 ({mean}, {quiet:,.3f} to {quiet + 5:,.3f})" in said


def test_steps_that_are_all_disturbed_at_other_calls_show_the_quiet_times(engine, shared, profiled):
    _, quiet = profiled()
    p, disturbed = Profiler(engine, CLOCK), ["gelu_forward", "adamw", "attention_backward", "sumsq"]
    for i in range(8):
        CLOCK.reset()
        for name in (disturbed[i % 4], disturbed[(i + 1) % 4]):
            CLOCK.cost["fake", name] += 20_000_000
        with p.time_step():
            engine.step(**batch(i))
    r = p.profile(model="m", B=B, T=T, choice=shared[1], warmup=0)
    assert [(x.op, x.ms) for x in r.ops] == [(x.op, pytest.approx(x.ms)) for x in quiet.ops]
    assert (r.quiet_ms, r.mfu) == (pytest.approx(quiet.quiet_ms), None)
    assert r.step_ms["min"] > 20 * r.quiet_ms
    said = next(line for line in show(r, width=200) if "tokens/s" in line)
    assert f"step {r.quiet_ms:,.3f} ms, lower quartile of 8 (mean {r.step_ms['mean']:,.3f}, " in said


def test_flops_that_depend_on_the_data_are_those_that_the_data_ask_for(profiled, monkeypatch):
    def rows(ignored):
        given = {name: ids.copy() for name, ids in batch().items()}
        given["targets"][:, :ignored] = -100
        r = profiled(given=given)[1]
        return r, [row(r, f"Softmax/Cross-entropy {way}") for way in ("Forward", "Backward")]

    every, all_of_them = rows(0)
    some, asked = rows(6)
    assert [(r.of_work, r.flops) for r in asked] == [(25.0, r.flops / 4) for r in all_of_them]
    assert {r.of_work for r in some.ops} == {25.0, 100.0, None}  # attention has one example a row
    assert "the most that they can be: cross_entropy_forward 25 %, cross_entropy_backward 25 %" in " ".join(show(some))
    assert "the most that they can be" not in " ".join(show(every))
    monkeypatch.setattr(ops.cross_entropy_forward, "asked", None)  # counted by the declaration alone
    assert [r.of_work for r in rows(6)[1]] == [None, 25.0]


QUARTILES = [([7], 7), ([9, 5, 8], 5), ([9, 5, 8, 6], 5), ([9, 5, 8, 6, 7], 6), (range(20), 4)]


@pytest.mark.parametrize(("times", "quiet"), QUARTILES)
def test_the_lower_quartile_is_a_measurement_and_keeps_its_parts(times, quiet):
    assert lower_quartile(times) == quiet
    assert lower_quartile([(-ms, ms) for ms in times], lambda pair: pair[1]) == (-quiet, quiet)
    assert apart(quiet, 1.1 * quiet) > apart(quiet, 1.04 * quiet)


def test_a_long_run_keeps_its_newest_steps_with_all_raw_times_and_warm_up_leaves_one(engine, shared, profiled):
    p, r = profiled(steps=5, keep=2)
    assert [s.number for s in p.steps] == [3, 4]
    assert r.steps == len(r.step_ms_values) == 2
    for step in p.steps:
        assert [b.call for bounds, _ in step.runs for b in bounds] == engine.program.calls
        spent = np.concatenate([np.diff(marks) for _, marks in step.runs])
        assert spent.tolist() == [cost(c.op.name) for c in engine.program.calls]
    assert p.profile(model="m", B=B, T=T, choice=shared[1], warmup=9).steps == 1


def test_a_call_that_runs_twice_in_a_step_counts_twice(engine, shared):
    p = Profiler(engine, CLOCK)
    with p.time_step():
        engine.forward(**batch())
        engine.forward(**batch())
    gelu = row(p.profile(model="m", B=B, T=T, choice=shared[1]), "GELU Forward")
    assert (gelu.calls, gelu.ms) == (4, pytest.approx(4 * cost("gelu_forward") / 1e6))
    one = next(c for c in engine.program.calls if c.op.name == "gelu_forward")
    assert (gelu.flops, gelu.bytes) == (4 * one.flops, 4 * one.bytes)
    assert (gelu.gflops, gelu.gbs) == pytest.approx([x / (4 * cost("gelu_forward")) for x in (gelu.flops, gelu.bytes)])


def test_overhead_is_what_the_profiling_loop_adds_and_leaves_the_model_alone(result, engine):
    readings = len(engine.calls) + 1 + 3  # between the calls, and at the step's start and end; the last ends the timing
    assert result.profiler_overhead_ms == pytest.approx((readings - 1) * TICK / 1e6)
    p, before = Profiler(engine, CLOCK), {n: a.copy() for n, a in engine.parameters().items()}
    p.overhead_ms()
    assert all(np.array_equal(a, before[n]) for n, a in engine.parameters().items())
    assert (engine.runner, [*p.steps]) == (p.run_calls, [])


# What profiling leaves as it was


def test_remove_gives_the_engine_its_loop_back(engine):
    p = Profiler(engine, CLOCK)
    assert engine.runner == p.run_calls
    p.remove()
    assert engine.runner is run_calls
    q = Profiler(engine, CLOCK)
    p.remove()  # a second time, when another one has the loop
    assert engine.runner == q.run_calls


def test_what_runs_outside_a_step_runs_and_is_not_measured(engine):
    p = Profiler(engine, CLOCK)
    with p.time_step():
        engine.step(**batch())
    before = CLOCK.now
    assert engine.forward(**batch(0)) != engine.forward(**batch(1))
    kernels_alone = 2 * sum(CLOCK.cost["fake", c.op.name] for c in engine.program.phase("forward"))
    assert (CLOCK.now - before, [len(s.runs) for s in p.steps]) == (kernels_alone, [4])


def test_a_step_that_fails_is_not_counted(engine, shared):
    p = Profiler(engine, CLOCK)
    with pytest.raises(UserError, match="inputs are"), p.time_step():
        engine.step(tokens=batch()["tokens"])
    fails("no step was measured; run at least one inside", p.profile, model="m", B=B, T=T, choice=shared[1])
    engine.forward(**batch())
    with p.time_step():
        engine.step(**batch())
    assert [(s.number, len(s.runs)) for s in p.steps] == [(0, 4)]


def test_peak_memory_is_of_this_process_alone_and_numba_is_not_imported():
    child = "import sys, cpuopt.profiler as p, cpuopt.report.tables, cpuopt.report.trace\n"
    child += "assert 'numba' not in sys.modules; print(p.peak_rss_bytes())"
    parent = f"import subprocess, sys; x = b'x' * 400_000_000; subprocess.run([sys.executable, '-c', {child!r}])"
    assert 10e6 < int(process(code=parent).stdout) < 300e6


# The trace file


def test_trace_events_nest_exactly_and_say_what_each_call_was(engine, profiled, tmp_path):
    trace.write_trace(tmp_path / "t.json", profiled(steps=3)[1], steps=2)
    data = json.loads((tmp_path / "t.json").read_text())
    events = [e for e in data["traceEvents"] if e["ph"] == "X"]
    assert chrome_faults(data) == []
    counts = Counter(e["cat"] for e in events)
    assert (counts["step"], counts["phase"], counts.total()) == (2, 8, 10 + 2 * len(engine.calls))
    assert all(float(8 * e[k]).is_integer() for e in events for k in ("ts", "dur")), "a reader's sums may overlap"
    assert events[0]["ts"] == 0
    e = next(e for e in events if e["name"] == "matmul_forward" and e["args"]["layer"] == "h.1.mlp.c_fc")
    assert (e["cat"], e["args"]["variant"], e["args"]["flops"]) == ("forward", "fake", 2 * B * T * 64 * 256)
    assert e["dur"] == pytest.approx(cost("matmul_forward") / 1e3, abs=0.25)
    assert e["args"]["shapes"] == {"out": [B, T, 256], "inp": [B, T, 64], "weight": [256, 64], "bias": [256]}
    assert data["displayTimeUnit"] == "ms"


# The tables


def show(profile, width=100, **kw):
    """What a pipe would get, line by line."""
    console = Console(file=io.StringIO(), width=width, highlight=False)
    for r in tables.profile_tables(profile, **kw):
        console.print(r)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def checks(profile, status="right", **other):
    profile.checked = [{"kernel": k, "status": status} for r in profile.ops for k in r.kernels]
    profile.checked += [{"kernel": f"{op}[fake]", "status": s} for op, s in other.items()]


def test_tables_show_every_row_whole(result):
    lines, names = show(result, 80), tuple(op_ids(r.op, r.kernels) for r in result.ops)
    assert all(any(line.startswith(name) for line in lines) for name in names)
    matmul = next(line for line in lines if line.startswith("matmul_forward")).split()
    ms, share = row(result, "Matmul Forward").ms, row(result, "Matmul Forward").share
    assert matmul[1:4] == ["9", f"{ms:.3f}", f"{share:.1f}%"]
    step = next(line for line in lines if line.startswith("step")).split()
    assert step[1:4] == ["113", f"{result.quiet_ms:.3f}", "100.0%"]
    assert len({line.index("%") for line in lines if line.startswith(names)}) == 1, "numbers are aligned at the right"


def test_table_by_layer_sums_blocks_and_phases(result):
    cells = next(line.split() for line in show(result) if line.startswith("h.1 "))
    mine = [r for r in result.layers if r.layer.split(".")[:2] == ["h", "1"]]
    by_phase = {p: sum(r.ms for r in mine if r.phase in p.split()) for p in ("forward", "backward", "norm update")}
    assert cells[1:5] == [f"{ms:.3f}" for ms in (*by_phase.values(), sum(by_phase.values()))]
    assert not any(line.startswith("h.1.") for line in show(result))


def test_detail_has_a_row_for_each_op_of_each_layer(result):
    lines = [line.split() for line in show(result, detail=True)]
    r = next(r for r in result.layers if (r.layer, r.op) == ("h.1.mlp.c_fc", "adamw"))
    assert ["h.1.mlp.c_fc", "adamw", "2", f"{r.ms:.3f}"] in [line[:4] for line in lines]
    ops = {r.op for r in result.layers}
    assert sum(line[1:2] != [] and line[1] in ops for line in lines) == len(result.layers)
    result.layers[result.layers.index(r)] = replace(r, variant="other")
    assert ["h.1.mlp.c_fc", "adamw[other]", "2"] in [line.split()[:3] for line in show(result, detail=True)]


def test_lines_around_the_tables(result):
    result.threads, result.threading_layer, result.swaps, result.warmup = 1, "omp", ["gelu=other"], 2
    result.tokens_per_s, result.peak_rss_mb, result.planned_peak_mb = 12345.6, 2512.3, 2540.9
    result.step_ms = {"median": 1951.26, "min": 1930.0, "max": 2012.0, "mean": 1950.0}
    result.profiler_overhead_ms = 0.039
    lines = show(result)
    assert lines[0] == "gpt2-tiny · B 2 · T 8 · 1 thread (omp) · fake + gelu=other · 1 step after 2 of warm-up"
    assert lines[-3] == "12,346 tokens/s · step 1,950.0 ms, mean of the middle half of 1 (1,930.0 to 2,012.0)"
    assert lines[-2] == "peak memory 2,512 MB, planned 2,541 MB · profiling costs 0.039 ms a step (0.002%)"


def test_checks_are_counted_by_kernel_and_the_worst_result_holds(result):
    assert show(result)[-1] == "kernels not checked in this run"
    checks(result)
    assert show(result)[-1] == "checked: 17 kernels right"
    checks(result, gelu_forward="marginal")
    assert show(result, 200)[-2:] == ["checked: 16 kernels right", f"marginal: gelu_forward[fake]: {WORDS['marginal']}"]


@pytest.mark.parametrize("status", ["FAILURE", "ERROR"])
def test_no_figure_of_a_kernel_that_did_not_pass(result, status):
    why = "no figures, because these kernels did not pass their check in this run: "
    checks(result, gelu_forward=status)
    assert show(result, 200)[1:] == [why + "gelu_forward[fake]"]
    checks(result)
    result.checked = [c for c in result.checked if c["kernel"] != "adamw[fake]"]
    assert show(result, 200)[1:] == [why + "adamw[fake]"]
    checks(result, rmsnorm_forward=status)  # which did not run
    assert show(result)[-1] == "checked: 17 kernels right"


def test_a_call_that_is_too_large_to_be_judged_hides_no_figure(result):
    large = {"case": "", "status": "unchecked", "reason": TOO_LARGE, "ratio": None}
    checks(result)
    result.checked.append({"kernel": "adamw[fake]", **large})
    assert show(result)[-1] == "checked: 17 kernels right"
    result.checked = [c for c in result.checked if c["kernel"] != "adamw[fake]" or c["status"] == "unchecked"]
    assert show(result, 200)[1].endswith("in this run: adamw[fake]")


def test_bars_without_block_characters(result):
    console = Console(file=io.TextIOWrapper(io.BytesIO(), "ascii", "replace"), width=100)
    with console.capture() as shown:
        console.print(*tables.profile_tables(result))
    assert "########" in shown.get()
    assert "█" not in shown.get()

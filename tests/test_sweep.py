"""`cpuopt sweep`: ranges, sizes of a model, kernels that are wrong somewhere, the clock, the picture, the verb."""

import csv
import io
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from math import inf

import numpy as np
import pytest
from test_timed import Clock
from verbs import error_of, fails, printed, ran, refused

import cpuopt
from cpuopt import ops
from cpuopt.check.cases import scalars
from cpuopt.errors import RefusedError, UserError
from cpuopt.kernels import registry
from cpuopt.kernels.toolkit.threads import cores
from cpuopt.lab import ab, sweep
from cpuopt.measure.roofline import Level, Roofs
from cpuopt.report.html import sweep as page
from cpuopt.train.job import Settings
from cpuopt.wording import text_of

GBS = {"L2": {"read": 100.0}, "memory": {"read": 10.0}}
ROOFS = Roofs(1, (Level("L2", 1 << 16), Level("memory", None)), 100.0, GBS, 1.0)
TINY = Settings(model="gpt2-tiny", B=2, T=8)


@pytest.mark.parametrize(("text", "sizes"), [("C=128..1024", [128, 256, 512, 1024]), ("BT=3..20", [3, 6, 12, 20]),
    ("N=7", [7]), ("N=5..5", [5]), ("C=96,64,96", [64, 96])])  # fmt: skip
def test_a_range_doubles_up_to_its_end(text, sizes):
    assert sweep.parse_over(text) == (text.partition("=")[0], sizes)


NO_RANGE = ("C", "C=0..4", "C=1..2..3", "C=1..2,3", "C=1.5")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *((text, f"--over {text!r}: expected SYMBOL=FIRST..LAST") for text in NO_RANGE),
        ("N=8..4", "--over 'N=8..4': the last size, 4, is below the first, 8"),
        ("N=1.." + "9" * 5000, "is too large; expected sizes of up to 12 digits"),
        ("N=1,1000000000000", "--over: 1000000000000 is too large"),
    ],
)
def test_another_range_is_refused_by_what_is_wrong(text, said):
    line = error_of(sweep.parse_over, text)
    assert said in line
    assert len(line) < 200


def test_sizes_that_nobody_named_are_those_of_a_call_of_the_model():
    plan = sweep.plan(ops.matmul_forward, {"C": [32, 96]}, {"BT": 5}, TINY, "h.1.mlp.c_proj")
    assert [dict(s.sizes) for s in plan.shapes] == [{"BT": 5, "OC": 64, "C": c} for c in (32, 96)]
    assert (plan.fixed, plan.source) == ({"BT": 5, "OC": 64}, "gpt2-tiny 2x8, h.1.mlp.c_proj")
    alone = sweep.plan(ops.gelu_forward, {"N": [10]}, {}, TINY)
    assert (alone.fixed, alone.source, alone.costs[0]["flops"]) == ({}, "", 90)
    narrow = sweep.plan(ops.matmul_forward, {"C": [32]}, {}, replace(TINY, dtype="bf16"))
    assert narrow.costs[0]["operands"] == "bfloat16"
    assert sweep.plan(ops.matmul_forward, {"C": [32]}, {}, Settings()).source == "gpt2-124M 4x64, h.0.attn.c_attn"


def test_a_window_is_a_size_that_work_depends_on():
    """That of the model's call, if nobody named one; both kernels and references then have it."""
    settings = replace(TINY, model="mistral-tiny", T=32)
    plan = sweep.plan(ops.gqa_forward, {"window": [4, 32]}, {}, settings)
    pairs = [sum(min(t + 1, n) for t in range(32)) for n in (4, 32)]
    assert plan.costs[0]["flops"] * pairs[1] == plan.costs[1]["flops"] * pairs[0]
    assert sweep.plan(ops.gqa_forward, {"T": [32]}, {}, settings).fixed["window"] == 16
    assert scalars(ops.gqa_backward, plan.shapes[0], np.random.default_rng(0))["window"] == 4


def test_sizes_that_make_no_call_are_left_out(monkeypatch):
    plan = sweep.plan(ops.attention_forward, {"C": [32, 33], "T": [4]}, {}, TINY)
    assert ([s.sizes["C"] for s in plan.shapes], plan.skipped) == ([32], ["C=33 T=4: NH=2 does not divide C=33"])
    monkeypatch.setattr(sweep, "available_bytes", lambda: 10**6)
    plan = sweep.plan(ops.gelu_forward, {"N": [1000, 100_000]}, {}, TINY)
    assert plan.skipped == ["N=100000: its check needs about 0.0 GB, and 0.0 GB are available"]
    fails("no size makes a call; C=33: NH=2 does not divide", sweep.plan, ops.attention_forward, {"C": [33]}, {}, TINY)


@pytest.mark.parametrize(
    ("given", "dtype", "why"),
    [
        ({}, "float32", "it is asked because --sizes lacks {}"),
        (dict.fromkeys(ops.rmsnorm_forward.symbols[1:], 64), "bf16", "it is asked because --dtype bf16 takes types"),
    ],
)
def test_a_model_without_the_op_is_refused_before_anything_is_loaded(monkeypatch, capsys, given, dtype, why):
    assert ops.rmsnorm_forward.symbols[0] == "BT"
    left = ", ".join(ops.rmsnorm_forward.symbols[1:])
    said = f"rmsnorm_forward: gpt2-tiny does not call it; add --model llama-tiny; {why.format(left)}"
    fails(re.escape(said), sweep.plan, ops.rmsnorm_forward, {"BT": [8]}, given, replace(TINY, dtype=dtype))
    monkeypatch.setattr("cpuopt.isolate.child.Child.__enter__", lambda child: pytest.fail("a child was started"))
    sizes = [f"--sizes={text_of(given)}"] if given else []
    flags = ["--over", "BT=8", "--model", "gpt2-tiny", "--dtype", dtype, *sizes]
    assert said in refused(capsys, "sweep", "rmsnorm_forward", *flags)


@pytest.mark.parametrize(("over", "given", "said"), [
    ({"N": [1]}, {"N": 2}, "--over N with --sizes N"),
    ({"N": range(1, 500)}, {}, "499 sizes; expected up to 400"),
])  # fmt: skip
def test_a_wrong_grid_is_refused(over, given, said):
    fails(said, sweep.plan, ops.gelu_forward, over, given, TINY)


def test_warm_and_cold_trials_are_told_apart(monkeypatch):
    """A kernel that takes 20 us, and 80 us once the flusher ran, on a clock that both move."""
    clock, state = Clock(), {"cold": False}

    def body(out, inp):
        ops_gelu(out, inp)
        clock.now += 80_000 if state["cold"] else 20_000
        state["cold"] = False

    kernel = registry.KERNELS["gelu_forward", "optimized"]
    kernel.compile()
    ops_gelu = kernel.function
    monkeypatch.setattr(ab, "_flusher", lambda: lambda: state.update(cold=True))
    shape = sweep.plan(ops.gelu_forward, {"N": [1000]}, {}, TINY).shapes[0]
    (found,) = sweep.measure([replace(kernel, function=body, variant="fake")], shape, rounds=3, clock=clock)
    assert (found["warm_ns"], found["cold_ns"], found["check"]["status"]) == ([20_000] * 3, [80_000] * 3, "right")


def planned(*sizes):
    return sweep.plan(ops.gelu_forward, {"N": list(sizes)}, {}, TINY)


def result(ns, cold=None):
    check = {"kernel": "k", "case": "", "status": "right", "reason": "", "ratio": 0.1}
    return {"warm_ns": [ns] * 5, "cold_ns": [cold or 2 * ns] * 5, "calls": 4, "check": check}


def test_a_kernel_that_is_wrong_at_one_size_has_no_figures_at_any():
    asked = []

    def ask(variants, shape):
        asked.append((tuple(variants), shape.sizes["N"]))
        if "wrong" in variants and shape.sizes["N"] == 2000:
            raise UserError("gelu_forward[wrong] is wrong on the arrays that are timed: out[0]")
        if "slow" in variants and shape.sizes["N"] == 2000:
            raise RefusedError("no answer to 'sweep' within 3 s; it was ended", "unchecked")
        return [result(1000.0 + len(v)) for v in variants]

    found = sweep.Sweep("gelu_forward", ["right", "wrong", "slow"], planned(1000, 2000, 4000), ROOFS)
    found.run(ask)
    record = found.record()
    rows = [(r["variant"], r["sizes"]["N"]) for r in record["rows"]]
    assert rows == [("right", 1000), ("slow", 1000), ("right", 2000), ("right", 4000), ("slow", 4000)]
    assert record["refused"] == {"wrong": "gelu_forward[wrong] is wrong on the arrays that are timed: out[0]"}
    assert record["late"] == ["slow at N=2000: no answer to 'sweep' within 3 s; it was ended"]
    assert asked[-1] == (("right", "slow"), 4000)
    assert record["rows"][1]["ratio"]["ratio"]["median"] == pytest.approx(1004 / 1005)


def test_ctrl_c_keeps_what_was_measured():
    def ask(variants, shape):
        if shape.sizes["N"] == 2000:
            raise KeyboardInterrupt
        return [result(1000.0)]

    found = sweep.Sweep("gelu_forward", ["right"], planned(1000, 2000, 4000), ROOFS)
    found.run(ask)
    record = found.record()
    assert [r["sizes"]["N"] for r in record["rows"]] == [1000]
    assert (record["finished"], record["doubts"][0]) == (False, "interrupted: 1 of 3 sizes are measured")


def test_the_roof_is_that_of_where_the_arrays_lie():
    """4 calls of 8 kB take turns: 32 kB lie in L2. With cold caches all comes from memory."""
    found = sweep.Sweep("gelu_forward", ["right"], planned(1000, 4000), ROOFS)
    found.run(lambda variants, shape: [result(1000.0)])
    small, large = found.record()["rows"]
    assert (small["warm"]["roof"], small["warm"]["roof_ns"], small["warm"]["of_roof"]) == ("FMA", 90.0, 9.0)
    assert (small["cold"]["roof"], small["cold"]["roof_ns"]) == ("memory", 800.0)
    assert large["warm"]["roof"] == "memory"  # 4 times 32 kB are more than L2 holds
    assert ROOFS.bound(0, 8000, held=inf) == (800.0, "memory")


def test_a_roof_that_is_passed_is_raised():
    found = sweep.Sweep("gelu_forward", ["right"], planned(1000), ROOFS)
    found.run(lambda variants, shape: [result(10.0)])
    faster, calls = replace(ROOFS, gflops=1e4, gbs={"L2": {"read": 1e4}, "memory": {"read": 1e4}}), []
    record = found.record(lambda roofs, given: calls.extend(given) or (faster, ["raised"]))
    assert record["rows"][0]["warm"]["of_roof"] < 100
    assert record["doubts"][-1] == "raised"
    assert [(c.op, c.ns, c.held) for c in calls] == [("gelu_forward", 10.0, 32_000), ("gelu_forward", 20.0, inf)]


def made(variants=("one", "other"), over=None):
    plan = sweep.plan(ops.matmul_forward, over or {"C": [64, 128, 256], "BT": [4, 8, 16]}, {"OC": 32}, TINY)
    found = sweep.Sweep("matmul_forward", list(variants), plan, ROOFS)
    found.run(lambda names, shape: [result(1e3 * shape.sizes["C"] * (i + 1)) for i, _ in enumerate(names)])
    return found.record(model="gpt2-tiny")


def test_the_csv_has_a_line_for_each_size_and_variant():
    record = made()
    rows = list(csv.DictReader(io.StringIO(sweep.csv(record))))
    assert len(rows) == len(record["rows"]) == 18
    first = [(r["C"], r["BT"], r["OC"], r["variant"]) for r in rows[:2]]
    assert first == [("64", "4", "32", variant) for variant in ("one", "other")]
    assert (float(rows[1]["warm_ns"]), float(rows[1]["ratio"]), rows[0]["ratio"]) == (128_000, 2, "")


@pytest.mark.parametrize("over", [None, {"C": [64, 128]}, {"C": [64]}])
def test_the_picture_has_a_line_for_each_variant_state_and_roof(over):
    record = made(over=over)
    root = ET.fromstring(page.picture(record))
    lines = [e.get("class") for e in root.iter() if e.tag.endswith(("polyline", "circle")) and "line" in e.get("class")]
    panels = 3 if over is None else 1
    wanted = [f"line line{i} {c}" for i in range(2) for c in ("warm", "cold")] + ["line roof warm", "line roof cold"]
    assert (sorted(lines), page.report(record).count('role="img"')) == (sorted(wanted * panels), panels)
    assert "prefers-color-scheme: dark" in page.picture(record)
    tips = [e.text for e in root.iter() if e.tag.endswith("title")]
    assert any("one, warm caches" in t and "roof" in t for t in tips)


def test_a_sweep_without_figures_still_makes_files():
    record = {**made(), "rows": [], "refused": {"one": "<b>wrong</b>"}}
    assert "no figures" in page.picture(record)
    assert "&lt;b&gt;wrong&lt;/b&gt;" in page.report(record)


WRONG = """
from numba import prange
from cpuopt import kernel, ops

@kernel(ops.residual_forward, "wrong")
def residual_forward(out, inp1, inp2):
    for i in prange(len(out)):
        out[i] = inp1[i] + inp2[i] if len(out) != 3000 else inp1[i]

@kernel(ops.residual_forward, "mine")
def residual_forward(out, inp1, inp2):
    for i in prange(len(out)):
        out[i] = inp1[i] + inp2[i]
"""


def test_the_verb_measures_checks_and_keeps(here, tmp_path, monkeypatch, capsys):
    own: list[float] = []

    class Watched(sweep.Others):
        def _now(self):
            own.append(sum(worker.cpu_s() for worker in self.workers))
            return super()._now()

    monkeypatch.setattr(sweep, "Others", Watched)
    (tmp_path / "mine.py").write_text(WRONG)
    flags = ["sweep", "residual_forward", "--over", "N=1500..4096", "--rounds", "3", "--threads", str(cores())]
    files = ["--csv", "s.csv", "--svg", "s.svg", "--html", "s.html"]
    record = ran(capsys, *flags, *files, "--kernels", "mine.py", "--variants", "mine,wrong", status=1)
    assert [(r["variant"], r["sizes"]["N"]) for r in record["rows"]] == [("mine", n) for n in (1500, 3000, 4096)]
    assert "residual_forward[wrong] is wrong on the arrays that are timed: out[" in record["refused"]["wrong"]
    assert all(r["warm"]["ns"] > 0 and r["cold"]["of_roof"] > 0 for r in record["rows"])
    assert max(own) > min(own)  # the processes that measure, of which one may follow another, are none of the others
    assert all((tmp_path / f).stat().st_size > 100 for f in ("s.csv", "s.svg", "s.html"))
    listed = " ".join(printed(capsys, "runs", "list").split())
    assert f"residual_forward: mine, wrong over N=1500..4096, {cores()} thread" in listed
    shown = printed(capsys, "runs", "show", "sweep", "--html", "again.html")
    assert all(x in shown for x in ("wrong: no figures, because it is wrong", "GFLOP/s"))
    assert (tmp_path / "again.html").read_text() == (tmp_path / "s.html").read_text()


def test_python_measures_too(tmp_path):
    found = cpuopt.sweep("gelu_forward", {"N": [512, 1024]}, variants=["optimized", "vanilla"], rounds=3, threads=1)
    rows = [(r["sizes"]["N"], r["variant"]) for r in found.record["rows"]]
    assert rows == [(n, variant) for n in (512, 1024) for variant in ("optimized", "vanilla")]
    assert "vanilla" in str(found)
    for write, name in (found.write_svg, "a.svg"), (found.write_html, "a.html"), (found.write_csv, "a.csv"):
        write(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 100
    fails("no such op", cpuopt.sweep, "gelu", {"N": [4]})
    assert np.isfinite([r["cold"]["ns"] for r in found.record["rows"]]).all()

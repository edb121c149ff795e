"""`cpuopt tune` and `--variant auto`: each rule on answers that are made up; once for real."""

import functools
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from bad import HEAD, text
from verbs import fails, printed, ran

from cpuopt import cli, files, models, ops
from cpuopt.check.cases import Case
from cpuopt.check.result import Result
from cpuopt.errors import UserError
from cpuopt.files import CacheWarning
from cpuopt.files.reading import from_json, to_json
from cpuopt.kernels import registry
from cpuopt.kernels.compile import cache
from cpuopt.lab import tune, worker
from cpuopt.measure import rates as machine
from cpuopt.report import tune as report
from cpuopt.train import job, plans
from cpuopt.train.job import Settings, build_only

DIGEST, SETTINGS = functools.cache(cache.digest), Settings(model="gpt2-tiny", B=2, T=8, threads=1)


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("attention_forward", "matmul_gelu_forward"):
        usual, other = registry.KERNELS[name, "optimized"], registry.KERNELS["gelu_forward", "optimized"]
        registry.KERNELS[name, "mine"] = replace(usual, variant="mine", function=other.function)
        registry.KERNELS[name, "twin"] = replace(usual, variant="twin")
    monkeypatch.setattr(cache, "digest", DIGEST)  # no test changes a function
    monkeypatch.setattr(machine, "folder", lambda: tmp_path / "machine")


def told(word, ratio=0.9):
    spread = {"median": ratio, "low": ratio - 0.01, "high": ratio + 0.01}
    times = {"a_ms": 1.0, "b_ms": ratio, "a_ns": 1e6, "b_ns": ratio * 1e6, "ns": [1, 2, 3]}
    return {"verdict": word, "ratio": spread, "control": spread, "why": "", **times, "doubts": []}


class Child:
    """Answers as it is told: by op and variant alone, by op in the step, and one verdict on each whole step."""

    def __init__(self, alone=(), check=(), each=(), whole=("faster",)):
        self.alone, self.check, self.each, self.whole = dict(alone), dict(check), dict(each), list(whole)
        self.kernels, self.asked = [], []

    def ask(self, do, **more):
        self.asked.append((do, more))
        if do == "check":
            ratio = {"right": 0.5, "marginal": 5.0, "wrong": 50.0}[self.check.get(more["variant"], "right")]
            case = from_json(Case, more["case"])
            return {"result": Result("k", case, ratio, reason="" if ratio < 1 else "far off").to_json()}
        if do == "steps":
            each = [told(*self.each.get(c["op"], ("faster", 0.9))) for c in more["changes"]]
            whole = self.whole.pop(0)
            if isinstance(whole, BaseException):
                raise whole
            return {"step": told(whole), "each": each, "losses": {}, "doubts": []}
        found = self.alone.get((more["op"], more["variants"][1]), ("slower", 2.0))
        if isinstance(found, BaseException):
            raise found
        return told(*found)

    def measured(self):
        return [(m["op"], m["variants"][1]) for do, m in self.asked if do == "ab"]


def run(child, settings=SETTINGS, patterns=("*",), again=False, **more):
    """Tune, and keep the plan as the verb does."""
    t = tune.survey(settings, patterns, again)
    tune.tune(t, settings, child, analyses=[12], save=tune.keep, **more)
    tune.keep(t)
    return t


def variants_of(settings=SETTINGS, files=()):
    """Op, layer and variant of the step that `--variant auto` runs, and what it says."""
    built = build_only(replace(settings, variant="auto", kernels=tuple(files)))
    ran = zip(built.program.calls, built.kernels, strict=True)
    return {(c.op.name, c.layer): k.variant for c, k in ran}, built.notes


def changed(settings=SETTINGS):
    return {key: v for key, v in variants_of(settings)[0].items() if v != "optimized"}


ATTENTION = ("attention_forward", "vanilla")
IN_LAYERS = {("attention_forward", f"h.{i}.attn"): "vanilla" for i in (0, 1)}


# What is measured -----------------------------------------------------------------------------------------------------


def test_ops_and_shapes_are_those_of_the_rewritten_step():
    t = tune.survey(SETTINGS)
    found = {row.op for row in t.rows}
    assert {"matmul_gelu_forward", "residual_layernorm_forward", "matmul_update", "classifier_update"} <= found
    assert not {"residual_forward", "cross_entropy_forward", "classifier_forward"} & found  # fused; not in a step
    (row,) = (r for r in t.rows if r.op == "matmul_gelu_forward")
    assert (row.layers, [str(s) for s in row.shapes]) == (["h.0.mlp.c_fc", "h.1.mlp.c_fc"], ["BT=16 OC=256 C=64"])
    assert row.candidates == ["vanilla", "rows", "mine"]  # and not "twin", which is the same code
    assert not t.flush  # the step fits into the caches


def test_ops_may_be_named():
    child = Child()
    run(child, patterns=["attention", "sumsq"])
    assert {op for op, _ in child.measured()} == {"attention_forward", "attention_backward", "sumsq"}
    fails("--ops 'atention': no op of this step matches; did you mean 'attention_", tune.survey, SETTINGS, ["atention"])


def test_shapes_that_a_rule_cannot_tell_apart_go_together():
    t = tune.survey(replace(SETTINGS, fuse="none"))
    (row,) = (r for r in t.rows if r.op == "adamw" and "h.0.mlp.c_fc" in r.layers)
    assert sorted(s.sizes["N"] for s in row.shapes) == [256, 16384]
    layers = [layer for r in t.rows if r.op == "adamw" for layer in r.layers]
    assert len({*layers}) == len(layers)


# What is chosen -------------------------------------------------------------------------------------------------------


def test_a_verdict_is_needed():
    """Not a low ratio."""
    t = run(Child({ATTENTION: ("inconclusive", 0.5), ("attention_backward", "vanilla"): ("no difference shown", 0.9)}))
    assert (t.rules, t.why, changed()) == ([], "no variant is faster alone", {})
    t = run(Child({ATTENTION: ("faster", 0.9)}))
    assert t.rules == ["attention_forward@h.0.attn=vanilla", "attention_forward@h.1.attn=vanilla"]
    assert changed() == IN_LAYERS


def test_the_surest_is_taken():
    run(Child({(ATTENTION[0], v): ("faster", x) for v, x in (("vanilla", 0.9), ("mine", 0.7), ("twin", 0.8))}))
    assert set(changed().values()) == {"mine"}


def test_a_wrong_kernel_is_never_taken():
    """However fast; one that is only marginal is not either, and the next best is."""
    for word in ("wrong", "marginal"):
        alone = {ATTENTION: ("faster", 0.5), ("attention_forward", "mine"): ("faster", 0.9)}
        t = run(Child(alone, {"vanilla": word}))
        assert set(changed().values()) == {"mine"}
        (row,) = (r for r in t.rows if r.op == ATTENTION[0])
        assert (row.tried["vanilla"]["check"], row.tried["vanilla"]["why"][:7]) == (word, "far off")
    t = run(Child({ATTENTION: UserError("attention_forward[vanilla] is wrong, so it is not timed")}))
    assert (t.rules, changed()) == ([], {})
    assert len(t.rows[-1].tried) == 1  # the others were measured all the same


def test_steps_confirm_it():
    """A plan with which steps are slower, or nobody can tell, is none."""
    for word in ("slower", "inconclusive"):
        t = run(Child({ATTENTION: ("faster", 0.5)}, whole=[word]))
        assert (t.rules, t.why, changed()) == ([], f"whole steps with it: {word}", {})
        assert f"stay with optimized: whole steps with it: {word}" in variants_of()[1][0]
    run(Child({ATTENTION: ("faster", 0.5)}, whole=["no difference shown"]))
    assert changed() == IN_LAYERS


def test_what_is_slower_in_the_step_goes():
    """And the rest is tried again."""
    alone = {ATTENTION: ("faster", 0.5), ("sumsq", "vanilla"): ("faster", 0.5)}
    child = Child(alone, each={"sumsq": ("slower", 1.2)}, whole=["faster", "no difference shown"])
    run(child)
    assert changed() == IN_LAYERS
    assert [len(m["changes"]) for do, m in child.asked if do == "steps"] == [3, 1]  # sumsq has two shapes
    t = run(Child(alone, each={"sumsq": ("slower", 1.2), ATTENTION[0]: ("slower", 1.2)}))
    assert (t.why, changed()) == ("the variants that are faster alone are slower in the step", {})


def test_a_stale_key_is_not_used():
    """Nor a file whose content is for something else than its name."""
    run(Child({ATTENTION: ("faster", 0.5)}))
    key = tune.survey(SETTINGS).key
    assert plans.rules(key)[0]
    others = {"machine": "m", "model": {**key["model"], "n_layer": 3}, "B": 3, "T": 7, "threads": 2, "rewrites": []}
    said = ("another machine", "the model {", "B 2", "T 8", "threads 1", "other rewrites")
    for (name, value), words in zip(others.items(), said, strict=True):
        other = {**key, name: value}
        rules, note = plans.rules(other)
        assert rules == ()
        assert f"the nearest is for {'' if name == 'model' else words}" in note
        assert f"so optimized runs; to make a plan: {plans.command(other)}" in note
        plans.path(other).write_bytes(plans.path(key).read_bytes())
        with pytest.warns(CacheWarning, match="damaged"):
            assert plans.rules(other)[0] == ()
        plans.path(other).unlink()
        files._warned.clear()
    plans.write(plans.path(key), {**plans.read(plans.path(key), key), "format": 0})
    assert plans.rules(key)[0] == ()


def test_a_changed_kernel_makes_it_stale():
    """The one that is taken, or the one that it was compared with."""
    run(Child({ATTENTION: ("faster", 0.5)}))
    assert changed() == IN_LAYERS
    for variant in ("vanilla", "optimized"):
        before = registry.KERNELS["attention_forward", variant]
        other = registry.KERNELS["gelu_forward", variant].function
        registry.KERNELS["attention_forward", variant] = replace(before, function=other)
        found, (note,) = variants_of()
        assert set(found.values()) == {"optimized"}
        assert f"attention_forward[{variant}] is not what it was when the plan was made, so optimized runs" in note
        registry.KERNELS["attention_forward", variant] = before
    assert changed() == IN_LAYERS


def test_steps_that_cannot_be_compared_end_no_run():
    """What was measured is kept, no plan is written, and the next run tries the steps again."""
    run(Child({("gelu_forward", "vanilla"): ("faster", 0.5)}), patterns=["gelu"])
    before = changed()
    first = Child({ATTENTION: ("faster", 0.5)}, whole=[UserError("steps: no answer within 600 s")])
    t = run(first, patterns=["attention"])
    assert (t.finished, t.rules) == (False, [])
    assert (t.why, changed()) == ("steps could not be compared: steps: no answer within 600 s", before)
    last = " ".join(str(x) for x in report.tables({**t.key, "model": t.name, **to_json(t), "plan": "p"}, "r")[-2:])
    assert "no plan is written: steps could not be compared: steps: no answer within 600 s; what was measured" in last
    second = Child()
    t = run(second, patterns=["attention"])
    assert (second.measured(), t.finished, changed()) == ([], True, before | IN_LAYERS)


def test_rewrites_stay():
    """A rule about an op that a rewrite has taken elsewhere is none about the layer as it was written."""
    plain = build_only(SETTINGS).program.calls
    run(Child({("gelu_forward", "vanilla"): ("faster", 0.5), ("layernorm_forward", "rows"): ("faster", 0.5)}))
    assert [str(c) for c in build_only(replace(SETTINGS, variant="auto")).program.calls] == [str(c) for c in plain]
    assert set(changed()) == {(c.op.name, c.layer) for c in plain if c.op in (ops.gelu_forward, ops.layernorm_forward)}


# What is kept ---------------------------------------------------------------------------------------------------------


def test_an_interrupted_run_goes_on_where_it_was():
    first = Child({ATTENTION: ("faster", 0.5), ("sumsq", "vanilla"): KeyboardInterrupt()})
    t = run(first)
    assert not t.finished
    assert not plans.path(t.key).exists()
    assert changed() == {}
    second = Child({ATTENTION: ("slower", 2.0)})  # which is not asked for again
    run(second)
    assert not set(second.measured()) & set(first.measured()[:-1])
    assert (second.measured()[0], changed()) == (("sumsq", "vanilla"), IN_LAYERS)


def test_a_budget_ends_with_a_plan_of_what_is_measured(monkeypatch):
    now = iter(range(10**6))
    monkeypatch.setattr(tune.time, "monotonic", lambda: next(now))  # each comparison takes a second
    first = Child({ATTENTION: ("faster", 0.5)})
    t = run(first, budget_s=20)
    assert (len(first.measured()), t.finished, changed()) == (20, True, IN_LAYERS)
    monkeypatch.setattr(tune.time, "monotonic", lambda: 0)
    left, second = t.left, Child()
    run(second)
    assert len(second.measured()) == left > 0  # the rest, once
    assert not set(first.measured()) & set(second.measured())
    assert not plans.unfinished(t.key).exists()


def test_measurements_are_known_by_digest_and_shape():
    first, second, third = Child({ATTENTION: ("faster", 0.5)}), Child(), Child()
    other = replace(SETTINGS, B=1, T=16)  # as many tokens: sums of rows have the same shape, attention has another
    norm = ("layernorm_forward", "vanilla")
    run(first)
    run(second, other)
    run(third, other, again=True)
    assert (norm in first.measured(), norm in second.measured(), norm in third.measured()) == (True, False, True)
    assert ATTENTION in second.measured()


def test_a_file_that_is_not_whole_is_no_plan():
    t = run(Child({ATTENTION: ("faster", 0.5)}))
    path = plans.path(t.key)
    whole = path.read_bytes()
    assert plans.rules(t.key)[0]
    for broken in (b"", whole[:-1], whole[:100], whole.replace(b"attention", b"attentiom"), b"[]", b"null", b"{}"):
        path.write_bytes(broken)
        files._warned.clear()
        with pytest.warns(CacheWarning, match="damaged"):
            assert plans.read(path, t.key) is None
        assert plans.rules(t.key)[0] == ()  # and says it once


def test_the_plan_for_other_ops_stays_and_swaps_beat_it():
    run(Child({ATTENTION: ("faster", 0.5)}))
    child = Child({("gelu_forward", "vanilla"): ("faster", 0.5)})
    run(child, patterns=["gelu"])
    assert child.measured() == [("gelu_forward", "vanilla")]
    assert {op for op, _ in changed()} == {"attention_forward", "gelu_forward"}
    swapped = changed(replace(SETTINGS, swap=("attention_forward@h.0.*=optimized",)))
    assert {layer for op, layer in swapped if op == "attention_forward"} == {"h.1.attn"}


def test_a_run_keeps_the_rules_that_it_began_with():
    run(Child({ATTENTION: ("faster", 0.5)}))
    began, (note,) = job.planned(replace(SETTINGS, variant="auto"), job.model_of(SETTINGS)[1].config)
    assert len(began.plan) == 2
    assert "attention_forward=vanilla (2x); a step took 0.900 of the time" in note
    run(Child())
    assert (changed(), job.planned(began, job.model_of(SETTINGS)[1].config)) == ({}, (began, []))


def test_a_kernel_of_a_file_that_is_not_given_is_named():
    Path("mine.py").write_text(HEAD + text("gelu_forward", "out[:] = 0"))
    files = (str(Path("mine.py").resolve()),)
    run(Child({("gelu_forward", "mine"): ("faster", 0.5)}), replace(SETTINGS, kernels=files))
    assert variants_of(files=files)[0]["gelu_forward", "h.0.mlp.c_fc"] == "mine"
    del registry.KERNELS["gelu_forward", "mine"]
    found, (note,) = variants_of()
    assert set(found.values()) == {"optimized"}
    said = f"gelu_forward[mine], which the plan uses, is not there (add --kernels {files[0]}), so optimized runs"
    assert said in note


def test_what_cannot_be_hashed_is_not_measured(monkeypatch):
    function = registry.KERNELS["gelu_forward", "vanilla"].function
    monkeypatch.setattr(cache, "digest", lambda f: "unknown" if f is function else DIGEST(f))
    child = Child({("gelu_forward", "vanilla"): ("faster", 0.5)})
    t = run(child, patterns=["gelu_forward"])
    assert (child.measured(), t.rules) == ([], [])
    (row,) = (r for r in t.rows if r.op == "gelu_forward")
    assert row.tried["vanilla"]["why"] == "vanilla cannot be hashed, so no plan could tell when it is stale"


def test_other_verbs_take_auto_for_the_default(capsys):
    built = build_only(replace(SETTINGS, variant="auto"))
    assert "there is no plan for 2x8 on 1 thread, so optimized runs; to make a plan: cpuopt tune" in built.notes[0]
    size = ["--model", "gpt2-tiny", "-B", "2", "-T", "8"]
    assert cli.main(["profile", "--program", *size, "--variant", "auto", "--json"]) == 0
    assert "there is no plan for 2x8" in capsys.readouterr().err
    fails(r"known: .*auto", registry.Choice, "quick")


# For real -------------------------------------------------------------------------------------------------------------

SLOW = """
from cpuopt.kernels.registry import Kernel

kernel_of_the_package = KERNELS["gelu_forward", "optimized"]
usual = kernel_of_the_package.function

def slow(out, inp):
    time.sleep(0.01)
    usual(out, inp)

KERNELS["gelu_forward", "optimized"] = Kernel(ops.gelu_forward, "optimized", slow, make=kernel_of_the_package.make)
"""
FILE = HEAD + SLOW + text("gelu_forward", "usual(out, inp)") + text("gelu_forward", "out[:] = inp", "wrong")


COUNTED = """
import runpy
import threading
import time

now, pause = 0, time.sleep

def reading():
    global now
    now += 100_000
    return now

def sleep(seconds):
    global now
    if threading.current_thread() is threading.main_thread():
        now += int(seconds * 1e9)
    else:
        pause(seconds)

time.perf_counter_ns, time.sleep = reading, sleep
runpy.run_module("cpuopt.lab.worker", run_name="__main__")
"""
"""The process that compares, with a clock that goes on by itself: other processes make no kernel slower."""


def test_the_verb(capsys, monkeypatch):
    Path("mine.py").write_text(FILE)
    Path("counted.py").write_text(COUNTED)
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    monkeypatch.setattr(worker, "__name__", "counted")
    monkeypatch.setattr(files, "alone", lambda path, what: nullcontext())  # another one would disturb real clocks only
    size = ["--model", "gpt2-tiny", "-B", "1", "-T", "8", "--threads", "1", "--kernels", "mine.py"]
    found = ran(capsys, "tune", *size, "--ops", "gelu_forward", "--rounds", "12")
    (row,) = (r for r in found["rows"] if r["op"] == "gelu_forward")
    wanted = {"vanilla": "faster", "mine": "faster", "wrong": "refused"}
    assert {v: t["verdict"] for v, t in row["tried"].items() if v != "generated"} == wanted
    assert "is wrong, so it is not timed" in row["tried"]["wrong"]["why"]
    assert (row["best"] in ("vanilla", "mine"), found["step"]["verdict"]) == (True, "faster")
    assert found["step"]["ratio"]["median"] < 0.9
    assert found["steps"][0]["losses"]["A"] == pytest.approx(found["steps"][0]["losses"]["B"], rel=1e-4)
    assert sorted(found["rules"]) == [f"gelu_forward@h.{i}.mlp.c_fc={row['best']}" for i in (0, 1)]
    kept = json.loads((Path(found["path"]) / "record.json").read_text())
    assert (kept["kind"], kept["rules"]) == ("tune", found["rules"])
    assert "ns" in kept["steps"][0]["step"]  # every turn
    assert "ns" not in json.loads(files.read_entry(Path(found["plan"])))["step"]

    said = printed(capsys, "train", *size, "--variant", "auto", "--steps", "2", "--val-every", "0")
    assert f"gelu_forward={row['best']} (2x)" in said
    (run,) = (Path(line.removeprefix("run folder ")) for line in said.splitlines() if line.startswith("run folder "))
    assert json.loads((run / "config.json").read_text())["plan"] == found["rules"]
    profile = json.loads((run / "profile.json").read_text())
    assert {r["variant"] for r in profile["layers"] if r["op"] == "gelu_forward"} == {row["best"]}

    assert "1 op changed; steps faster" in " ".join(printed(capsys, "runs", "list").split())
    shown = printed(capsys, "runs", "show", "tune")
    assert all(word in shown for word in ("refused:", "taken"))


NARROW = "moments and weights in float32"


@pytest.mark.parametrize(
    ("other", "which"),
    [
        ({"optimizer": "lion"}, "adamw"),
        ({"freeze": ("wte.*",)}, "training all parameters"),
        *((how, NARROW) for how in ({"moments": "bf16"}, {"dtype": "bf16", "weights": "bf16"})),
    ],
)
def test_a_plan_is_for_the_usual_step(other, which):
    settings, notes = job.planned(Settings(model="gpt2-tiny", variant="auto", **other), models.parse("gpt2-tiny"))
    assert (settings.plan, notes) == ((), [f"--variant auto: plans are for {which}; all ops stay with optimized"])

"""`cpuopt bench` with workers that are scripts: they speak the protocol, and their times are made up."""

import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from verbs import ROOT, fails, process, spy

from cpuopt import machine
from cpuopt.errors import UserError
from cpuopt.isolate.process import Side, Worker
from cpuopt.lab.peers import Bench, Plan, View, suite, way
from cpuopt.lab.peers import plan as bench_plan
from cpuopt.lab.peers import worker as bench_worker
from cpuopt.measure.comparison import BF16_TOLERANCE, disagreement, geometric_mean
from cpuopt.report import bench as report
from cpuopt.report.rendered import as_text
from cpuopt.train import job

FAKE = r"""
import json, os, subprocess, sys, time
spec = json.loads(sys.argv[1])
log = spec["log"]
def note(text):
    with open(log, "a") as f:
        f.write(text + "\n")
note(f"pid {os.getpid()}")
steps = turn = size = 0
for line in sys.stdin:
    request = json.loads(line)
    do = request["do"]
    size = request.get("B", size)
    bad = spec.get(do) if size == spec.get("bad_at", size) else None
    if bad == "hang":
        child = subprocess.Popen(["sleep", "1000"])
        note(f"pid {child.pid}")
        time.sleep(1000)
    if bad == "die":
        print("Traceback\nValueError: no more  \x1b[31mpaper", file=sys.stderr)
        sys.exit(3)
    if bad == "kill":
        os.kill(os.getpid(), 9)
    if bad:
        print(bad, flush=True)
        continue
    answer = {}
    if do == "init":
        open(request["params"], "a").close()
        print(json.dumps({"progress": "warming"}))
        answer = {"threads": spec.get("threads", 1), "versions": {"fake": "1"}}
    elif do == "loss":
        answer = {"losses": [spec.get("at", {}).get(f"{s:g}", 5.0 * s) for s in request["scales"]]}
    elif do == "steps":
        n = request["n"]
        if steps < 3:
            ms = spec["ms"][0]
        else:
            note(spec["letter"])
            number = sum(line in "AB\n" for line in open(log).read().split("\n") if line)
            ms = spec["ms"][turn % len(spec["ms"])] * (1 + spec.get("drift", 0) * number)
            turn += 1
        losses = [spec.get("losses", {}).get(str(steps + i), 5.0 - 0.1 * (steps + i)) for i in range(n)]
        steps += n
        phases = {"forward": [ms * 0.3] * n, "backward": [ms * 0.6] * n, "update": [ms * 0.1] * n}
        ways = spec.get("waiting", [""])
        answer = {"step_ms": [ms] * n, "losses": losses, "phases_ms": phases, "waiting": ways[(turn - 1) % len(ways)]}
    elif do == "peak":
        answer = {"peak_rss_mb": spec["ms"][0], "versions": {}, "gflop": 20, "peak_gflops": 100, "roof_ms": 160}
        answer["library"] = spec.get("library", {})
    print(json.dumps(answer), flush=True)
"""
PLAN = Plan("gpt2-tiny", sizes=((2, 8),), peers=("torch-eager",), rounds=8)


@pytest.fixture
def fakes(tmp_path):
    """Make a side of a script."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE)

    def make(letter, name=None, ms=(400,), **spec):
        spec = {"letter": letter, "ms": ms, "log": str(tmp_path / "log"), **spec}
        name = name or ("cpuopt" if letter == "A" else "peer")
        return Side(name, (sys.executable, "-I", "-S", str(script), json.dumps(spec)))

    yield make
    for pid in pids(tmp_path):
        assert is_gone(pid), "a worker is left over"


def log_of(tmp_path):
    return (tmp_path / "log").read_text().split("\n")


def pids(tmp_path):
    lines = log_of(tmp_path) if (tmp_path / "log").exists() else []
    return [int(line[4:]) for line in lines if line.startswith("pid ")]


def is_over(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # of a process that is not ours
    except psutil.NoSuchProcess:
        return True


def is_gone(pid):
    end = time.monotonic() + 5
    while not is_over(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return is_over(pid)


def measure(ours, *theirs, plan=PLAN, **more):
    return Bench(plan, ours=ours, theirs=theirs, pause_s=0, **more).run()


def test_twice_slower_says_2_from_turns_in_the_order_of_the_record(fakes, tmp_path):
    record = measure(fakes("A", ms=[400, 404, 398, 401, 399, 402, 400]), fakes("B", ms=[800, 796, 806, 801, 799]))
    result = record["results"][0]
    assert {result["order"][i : i + 4] for i in range(0, 16, 4)} == {"ABBA", "BAAB"}
    assert "".join(line for line in log_of(tmp_path) if line in "AB") == result["order"]
    ratio = result["ratio"]
    assert 1.95 < ratio["low"] <= ratio["median"] <= ratio["high"] < 2.05
    assert pytest.approx(2, rel=0.01) == ratio["median"] == np.median(result["ratios"])
    assert (result["verdict"], result["level"], result["step_ms"]["peer"]["min"]) == ("slower", 99.2, 796)
    assert len(result["step_ms"]["cpuopt"]["values"]) == 8 * result["steps_per_trial"]
    assert result["phases_ms"]["cpuopt"]["forward"] == pytest.approx(0.3 * result["step_ms"]["cpuopt"]["quiet"])
    values = result["step_ms"]["cpuopt"]["values"]
    assert result["step_ms"]["cpuopt"]["quiet"] == sorted(values)[(len(values) - 1) // 4] < np.mean(values)
    assert result["peak_rss_mb"] == {"cpuopt": 400, "peer": 800}
    # 20 GFLOP at 100 GFLOP/s take 200 ms
    assert result["of_peak"] == pytest.approx({"cpuopt": 50, "peer": 25}, rel=0.01)
    assert result["losses"]["peer"][:3] == [5.0, 4.9, 4.8]
    assert len(result["losses"]["peer"]) == 3 + 8 * 2  # with the step of each trial that does not count
    assert result["versions"]["peer"] == {"fake": "1"}


def test_short_steps_fill_200_ms_behind_one_that_does_not_count(fakes, monkeypatch):
    asked = []
    spy(monkeypatch, Worker, "steps", lambda worker, n, **more: asked.append(n))
    sides = fakes("A", ms=[10], losses={"20": NAN}), fakes("B", ms=[20])
    result = measure(*sides, plan=replace(PLAN, rounds=2))["results"][0]
    assert (result["steps_per_trial"], len(result["step_ms"]["peer"]["values"]), asked[2:]) == (10, 20, [11] * 4)
    assert {"2 rounds are few: the interval is one of 50 %", "a loss is not finite"} <= {*result["doubts"]}


def test_geometric_mean():
    ratios = [{"median": 2.0, "low": 1.8, "high": 2.5}, {"median": 8.0, "low": 8.0, "high": 10.0}]
    assert geometric_mean(ratios) == pytest.approx({"median": 4, "low": 14.4**0.5, "high": 5})


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(("theirs", "agree"), [
    ([4.0, 3.0, 3.0], "float32, types, stored"), ([4.004, 3.0, 2.998], "float32, types, stored"),
    ([4.0, 3.0, 3.01], "types, stored"),
    ([4.0, 3.0, 3.02], "types, stored"),  # 2^-7 of 4 and of 3 are 0.0312 and 0.0234
    ([4.0, 3.0, 3.03], "stored"), ([4.03, 3.0, 3.0], "types, stored"),
    ([4.04, 3.0, 3.0], ""),  # from the same weights
    ([4.0, 3.9, 3.9], "stored"),  # no update
    ([4.0, 2.0, 1.9], ""),  # more than twice
    ([4.0, NAN, 3.0], ""),
])  # fmt: skip
def test_losses_may_differ_by_the_rounding_of_their_types(theirs, agree):
    ways = {"float32": {}, "types": {"tolerance": BF16_TOLERANCE}}
    ways["stored"] = ways["types"] | {"updates_rounded": True}
    said = {name: disagreement(("cpuopt", "peer"), [4.0, 3.0, 3.0], theirs, **how) for name, how in ways.items()}
    assert ", ".join(name for name, text in said.items() if not text) == agree
    assert all(disagreement(("cpuopt", "peer"), [wrong] * 3, [wrong] * 3) for wrong in (NAN, INF))


@pytest.mark.parametrize(("peer", "at", "refused"), [
    ("torch-eager", 4.92, True), ("torch-amp", 4.92, False), ("torch-amp", 4.82, True), ("torch-bf16", 4.82, False),
])  # fmt: skip
def test_the_losses_of_a_type_are_held_to_what_it_explains(fakes, peer, at, refused):
    """cpuopt's are 5, 4.9 and 4.8."""
    plan = replace(PLAN, peers=(peer,), rounds=2)
    assert bool(measure(fakes("A"), fakes("B", peer, losses={"1": at}), plan=plan)["results"][0]["refused"]) == refused


def test_losses_that_differ_refuse_the_ratio(fakes, tmp_path):
    record = measure(fakes("A", losses={"1": 4.5}), fakes("B", "slow"), fakes("B", "other", losses={"1": 4.5}))
    refused, measured = record["results"]
    assert refused["ratio"] is None
    assert "losses of step 2 differ: cpuopt 4.5, slow 4.9" in refused["refused"]
    assert refused["losses"] == {"cpuopt": [5.0, 4.5, 4.8], "peer": [5.0, 4.9, 4.8]}
    assert measured["ratio"]
    text = shown(record)
    assert "cpuopt 4.5, slow 4.9" in text
    assert "refused" in text


@pytest.mark.parametrize(("scale", "loss"), [("1", 5.0001), ("4", 20.001), ("4", float("nan"))])
def test_another_model_is_noticed_before_it_is_timed(fakes, tmp_path, scale, loss):
    """Within the tolerance of a step's loss; wrong positions change no more than that where weights are small."""
    result = measure(fakes("A"), fakes("B", "other", at={scale: loss}))["results"][0]
    assert (result["ratio"], result["order"]) == (None, "")
    right = 5 * int(scale)
    assert f"same batch and {scale} times the same weights: cpuopt {right}, other {loss:.7g}" in result["refused"]
    assert measure(fakes("A"), fakes("B", at={"4": 20.0001}))["results"][0]["ratio"]


LIBRARY = {"torch": "9.9", "capability": "AVX512", "products_by": "MKL SGEMM for Intel(R) Architecture"}


def test_the_fastest_peer_of_each_type_is_named(fakes):
    """The peers of a type are compared with cpuopt in that type, and with each other only."""
    plan = replace(PLAN, peers=("torch-best",), rounds=2)
    ms = {"torch-eager": 900, "torch-compile": 800, "torch-amp": 500, "torch-bf16": 450}
    held = {"allocator": "keeps freed memory", "mkl": "held back to code without AVX-512: install g++"}
    own = {"library": {**LIBRARY, "linear_gflops": 215.0, "tuning": held}}
    record = measure(fakes("A"), *(fakes("B", name, ms=[x], **own) for name, x in ms.items()), plan=plan)
    types = [(r["peer"], r["dtype"], r["peer_dtype"]) for r in record["results"]]
    assert types == [(name, *[bench_plan.PEERS[name].dtype] * 2) for name in ms]
    faster = {"float32": ["torch-eager", "torch-compile"], "bf16": ["torch-amp", "torch-bf16"]}
    assert {r["dtype"]: (r["peer"], r["of"]) for r in record["faster"]} == {t: (x[1], x) for t, x in faster.items()}
    text = shown(record)
    assert re.search(r"2x8 +bf16 +torch-bf16 +torch-amp, torch-bf16 +1\.12", text)
    assert re.search(r"torch-amp +9\.9 +AVX512 +215 +MKL SGEMM for Intel\(R\) Architecture", text)
    assert max(map(len, text.splitlines())) <= 80
    text = " ".join(text.split())
    assert "torch-bf16: allocator: keeps freed memory; mkl: held back to code without AVX-512: install" in text
    plan = replace(PLAN, peers=("torch-eager", "torch-amp"), dtype="bf16", rounds=2)
    assert measure(fakes("A"), *(fakes("B", name) for name in plan.peers), plan=plan)["faster"] == []


@pytest.mark.parametrize(("vendor", "compiler", "mkl", "defined"), [
    ("AuthenticAMD", "g++", "its own choice of code", True),
    ("AuthenticAMD", "/no/such/g++", "held back .* needs a C\\+\\+ compiler; install g\\+\\+", False),
    ("AuthenticAMD", "false", "held back .*false failed", False),
    ("GenuineIntel", "g++", "as it was: only on AMD's processors", False),
])  # fmt: skip
def test_pytorch_is_tuned_as_the_processor_and_the_compiler_allow(tmp_path, vendor, compiler, mkl, defined):
    """The function that MKL asks is there for all that is loaded later, on AMD's processors alone."""
    if platform.machine() != "x86_64":
        pytest.skip("MKL is there on x86-64 only")
    (tmp_path / "cpuinfo").write_text(f"vendor_id : {vendor}\n")
    text = f"""
import ctypes, json, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
import peer_tuning
done = peer_tuning.tune(Path({str(tmp_path / "cpuinfo")!r}))
everywhere = ctypes.CDLL(None)
found = hasattr(everywhere, "mkl_serv_intel_cpu_true") and everywhere.mkl_serv_intel_cpu_true() == 1
print(json.dumps([done, found]))
"""
    done, found = json.loads(process(code=text, CXX=compiler).stdout)
    assert done["allocator"] == "keeps freed memory"
    assert re.match(mkl, done["mkl"])
    assert found == defined


def test_cpuopt_runs_in_the_type_of_the_peer_or_in_the_one_that_is_given():
    def types(**change):
        return {name: side.settings["settings"]["dtype"] for name, side in Bench(replace(PLAN, **change)).ours.items()}

    classes = {name: peer.dtype for name, peer in bench_plan.TUNED.items()}
    assert (types(peers=("torch-best",)), {*classes.values()}) == (classes, {"float32", "bf16"})
    assert types(peers=("torch-best",), dtype="bf16") == {n: t for n, t in classes.items() if t == "bf16"}
    assert types(peers=("torch-eager",), dtype="bf16") == {"torch-eager": "bf16"}
    assert types(peers=(), against=("vanilla",)) == {"vanilla": "float32"}


def test_a_peer_that_this_machine_lacks_is_left_out_with_the_reason(fakes):
    plan = replace(PLAN, peers=("torch-best",), sizes=((1, 8), (2, 8)), rounds=2)
    lacks = fakes("B", "torch-compile-tuned", check='{"error": "needs a C++ compiler"}')
    dies = fakes("B", "torch-amp-tuned", steps="die", bad_at=2)
    record = measure(fakes("A"), fakes("B", "torch-eager-tuned", ms=[800]), lacks, dies, plan=plan)
    measured = [("torch-eager-tuned", 1), ("torch-amp-tuned", 1), ("torch-eager-tuned", 2)]
    assert [(r["peer"], r["B"]) for r in record["results"]] == measured
    assert record["left_out"].keys() == {"torch-compile-tuned", "torch-amp-tuned"}
    assert "torch-compile-tuned is left out: needs a C++ compiler" in shown(record)
    assert "torch-amp-tuned is left out: ended with status 3 during 'steps'" in shown(record)
    fails(r"--peer torch-best: this machine has none: needs a C\+\+ compiler", measure, fakes("A"), lacks, plan=plan)
    with pytest.raises(UserError, match=r"torch-compile-tuned: needs a C\+\+ compiler"):  # asked for by its name
        measure(fakes("A"), lacks, plan=replace(plan, peers=("torch-compile-tuned",)))


def test_a_suite_is_one_record_with_a_mean_over_all_models(fakes, tmp_path):
    rows = [replace(PLAN, model=m, sizes=(s,), rounds=2) for m, s in (("gpt2-tiny", (1, 8)), ("gpt2-nano", (2, 8)))]
    out, seen, view = tmp_path / "record.json", [], View()
    view.result = lambda r: seen.append((r.model, r.B))
    sides = {"ours": fakes("A"), "theirs": [fakes("B", "torch-eager", ms=[800])], "pause_s": 0}
    record = suite.run(rows, view, out, **sides)
    assert json.loads(out.read_text()) | {"time": ""} == json.loads(json.dumps(record | {"time": ""}))
    assert seen == [(r["model"], r["B"]) for r in record["results"]] == [("gpt2-tiny", 1), ("gpt2-nano", 2)]
    assert record["geometric_mean"]["torch-eager"]["median"] == pytest.approx(2)
    assert "gpt2-nano   2x8     400.0          800.0 2.00 [2.00, 2.00]      40 50 / 25" in shown(record)
    sides["theirs"] = [fakes("B", "torch-eager", steps="die", bad_at=2)]
    failed = suite.run(rows, view, **sides)
    assert [bool(r["ratio"]) for r in failed["results"]] == [True, False]
    assert failed["results"][1]["refused"].startswith("no ratio, because of torch-eager: ended with status 3")


def test_the_suite_has_sizes_that_fit():
    rows = list(suite.plans(PLAN))
    assert len({(p.model, p.sizes) for p in rows}) == len(rows) == 8
    for row in rows:
        row.check()


BROKEN = {
    "die": ("steps", "cpuopt: ended with status 3 during 'steps': ValueError: no more \ufffd[31mpaper"),
    "kill": ("steps", "cpuopt: was ended by SIGKILL, perhaps because memory ran out, during 'steps'"),
    "hang": ("steps", "cpuopt: no answer to 'steps' within 1 s; it was ended"),
    '{"losses": [1]}': ("loss", "cpuopt: the answer to 'loss' is wrong (ValueError: not a list of 2)"),
    "hello there": ("init", "cpuopt: answered 'hello there' to 'init'; expected a JSON object on one line"),
    "[1]": ("check", "cpuopt: answered '[1]' to 'check'; expected a JSON object on one line"),
    "[" * 100000: ("check", "cpuopt: answered '[[[[[["),
    '{"error": "no such\\nvariant"}': ("check", "cpuopt: no such variant"),
    '{"step_ms": [1], "losses": [1], "phases_ms": {}}': ("steps", "cpuopt: the answer to 'steps' is wrong"),
    '{"step_ms": [1, 1, NaN], "losses": [1, 1, 1], "phases_ms": {"forward": [1, 1, 1], "backward": [1, 1, 1], '
    '"update": [1, 1, 1]}}': ("steps", "cpuopt: the answer to 'steps' is wrong (ValueError: a step took no time)"),
    '{"peak": 1}': ("peak", "cpuopt: the answer to 'peak' is {'peak': 1}"),
}


@pytest.mark.parametrize("bad", BROKEN, ids=lambda bad: bad[:20])
def test_a_worker_that_fails_says_so_in_one_line_and_leaves_no_process(fakes, bad, tmp_path):
    do, message = BROKEN[bad]
    side = fakes("A", **{do: bad})
    calls = {"steps": lambda w: w.steps(3), "peak": Worker.peak, "loss": lambda w: w.losses((1, 2))}
    call = calls.get(do, lambda w: w.ask(do))
    with pytest.raises(UserError) as e, Worker(side, limit_s=1 if bad == "hang" else 60) as worker:
        call(worker)
    assert str(e.value).startswith(message)
    assert "\n" not in str(e.value)
    assert pids(tmp_path)


def test_a_worker_ends_when_its_stdin_closes(fakes, tmp_path):
    with Worker(fakes("A")) as worker:
        worker.steps(3)
        assert psutil.pid_exists(worker.pid)
    assert worker._process.returncode == 0
    worker = Worker(fakes("A", steps="hang"))
    worker.close(grace_s=0.0)
    assert worker._process.returncode == -signal.SIGKILL


def test_a_program_that_cannot_be_started():
    side = Side("torch-eager", ("/no/such/python", "x"))
    fails(r"torch-eager: '/no/such/python' cannot be started: No such file", Worker, side)


def test_what_fails_at_first_is_raised_and_later_is_recorded(fakes, tmp_path):
    plan = replace(PLAN, sizes=((1, 8), (2, 8), (3, 8)), rounds=2)
    fails("peer: ended with status 3 during 'steps'", measure, fakes("A"), fakes("B", steps="die"), plan=plan)
    out, ours, theirs = tmp_path / "record.json", fakes("A"), fakes("B", steps="die", bad_at=2)
    record = Bench(plan, ours=ours, theirs=[theirs], pause_s=0).run(out)
    assert [bool(r["ratio"]) for r in record["results"]] == [True, False, True]
    assert record["results"][1]["refused"].startswith("no ratio, because of peer: ended with status 3")
    assert json.loads(out.read_text())["results"] == record["results"]
    assert [p.name for p in tmp_path.iterdir() if "part" in p.name] == []
    assert record["geometric_mean"]["peer"]["median"] == pytest.approx(1)


def test_a_side_on_other_threads_is_refused(fakes):
    fails("peer: runs on 3 threads; expected 1", measure, fakes("A"), fakes("B", threads=3))


def test_an_installed_package_says_that_the_peer_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setattr(bench_plan, "ROOT", tmp_path)
    fails(r"--peer torch-eager: there is no .*peer_worker.py.*--against vanilla", Bench, PLAN)


def test_a_python_without_torch_is_told_what_to_install(fakes, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    side = bench_plan.peer_sides(PLAN)[0]
    side = replace(side, environment={**side.environment, "PYTHONPATH": str(tmp_path)})
    fails(r"no torch here.*pip install -e '.\[peers\]'.*--peer-python", measure, fakes("A"), side)


def shown(record):
    return as_text(report.tables(record))


def test_two_variants_of_cpuopt():
    how = {"against": ("vanilla",), "variant": "vanilla", "swap": ("matmul=blas",)}
    record = Bench(Plan("gpt2-tiny", ((2, 8),), **how, threads=2, rounds=2), pause_s=0).run()
    json.dumps(record)
    result = record["results"][0]
    assert result["refused"] is None
    assert result["peer"] == "vanilla"
    assert result["ratio"]["median"] > 0
    np.testing.assert_allclose(result["losses"]["cpuopt"], result["losses"]["peer"], rtol=1e-4)
    for key in "cpuopt", "peer":
        assert 0 < sum(result["phases_ms"][key].values()) <= 1.5 * result["step_ms"][key]["max"]
        assert result["peak_rss_mb"][key] > 50
        assert 0 < result["of_peak"][key] < 100
    assert 0 < report.limit_share(result) < 1


def test_a_side_in_bfloat16_gives_the_losses_of_float32(tmp_path, monkeypatch):
    """Of its first weights; what it trains is float32 here too, whose kernels are compiled for other tests."""
    usual, asked, plain = job.prepare, [], {"dtype": "float32", "weights": "float32"}
    monkeypatch.setattr(
        job, "prepare", lambda s, *say: asked.append((s.dtype, s.weights)) or usual(replace(s, **plain))
    )
    request = {"B": 2, "T": 8, "batches": "", "params": str(tmp_path / "params.npz"), "write_params": True}
    how = {"model": "gpt2-tiny", "threads": 1, "variant": "optimized", "dtype": "bf16", "weights": "bf16"}
    side = bench_worker.Session(request | {"settings": how}, lambda text: None)
    want = bench_worker.losses_of(side.job, (1.0, 4.0))
    side.steps(1)
    assert (side.losses((1.0, 4.0)), asked) == ({"losses": want}, [("bf16", "bf16"), ("float32", "float32")])


SMALL = {"hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 2, "head_dim": 12, "vocab_size": 260}
SMALL |= {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64}
SCALED = {"rope_type": "llama3", "rope_factor": 8.0, "rope_original_positions": 16}
BOTH = ("torch-eager", "transformers")
NARROW = ("torch-amp", "torch-amp-compile", "torch-bf16")


def python():
    """Return the Python that has torch: one of its own, or this one."""
    found = Path(os.environ.get("CPUOPT_PEER_PYTHON", ROOT / ".venv-peers/bin/python"))
    if found.exists():
        return str(found)
    if importlib.util.find_spec("torch") is None:  # not imported: it would bring a second OpenMP runtime
        pytest.skip("no PyTorch: make test-peers, or name a Python in CPUOPT_PEER_PYTHON")
    return sys.executable


@pytest.mark.peers
@pytest.mark.parametrize(("model", "peers"), [
    ("gpt2-tiny", ("torch-eager", "torch-compile", *NARROW)), ("llama-tiny", ("torch-compile", *NARROW)),
    (json.dumps({"model": "llama", "attention_bias": True, **SMALL, **SCALED}), BOTH),
    (json.dumps({"model": "qwen2", "tie_word_embeddings": True, **SMALL}), BOTH),
    (json.dumps({"model": "qwen3", **SMALL, "rope_type": "linear", "rope_factor": 2.0}), BOTH),
])  # fmt: skip
def test_torch_computes_the_same(model, peers):
    plan = Plan(model, ((2, 32),), peers=peers, threads=2, rounds=2, peer_python=python())
    for result in Bench(plan).run()["results"]:
        assert result["refused"] is None
        assert result["ratio"]
        ours, theirs = result["losses"]["cpuopt"][:3], result["losses"]["peer"][:3]
        if result["peer"] in NARROW:
            assert result["library"]["linear_gflops"] > 0
            assert result["library"]["products_by"].startswith(("oneDNN ", "MKL "))
            assert result["library"]["capability"]
            assert ours[0] != theirs[0]
            np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-3)
        else:
            np.testing.assert_allclose(ours, theirs, rtol=1e-5)


# A side that is not on trial ----------------------------------------------------------------------------------------


def test_whichever_side_is_not_on_trial_is_stopped(fakes, tmp_path, monkeypatch):
    seen = []

    def ask(worker, do, **more):
        others = [pid for pid in pids(tmp_path) if pid != worker.pid and not is_over(pid)]
        seen.append((do, [psutil.Process(pid).status() for pid in others]))

    spy(monkeypatch, Worker, "_ask", ask)
    measure(fakes("A"), fakes("B"))
    trials = [found for do, found in seen if do == "steps"]
    assert (len(trials), trials) == (2 + 16, [[psutil.STATUS_STOPPED]] * len(trials))
    assert [found for do, found in seen if do == "init"] == [[], [psutil.STATUS_STOPPED]]  # alone


def test_no_side_is_left_stopped_after_a_bench(fakes, tmp_path, monkeypatch):
    view, costs = View(), []

    def at(cost):
        costs.append(cost)
        if len(costs) > 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(view, "at", at)
    with pytest.raises(KeyboardInterrupt):
        measure(fakes("A"), fakes("B"), view=view)
    assert len(pids(tmp_path)) >= 2  # and the fixture looks that all of them are gone


KILLED = """
import json, sys, time
from cpuopt.isolate.process import Side, Worker
worker = Worker(Side("peer", tuple(json.loads(sys.argv[1]))), rests=True)
worker.ask("check")
print(worker.pid, flush=True)
time.sleep(600)
"""


def test_a_stopped_side_ends_with_a_parent_that_is_killed(fakes, tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", KILLED, json.dumps(fakes("A").command)], stdout=subprocess.PIPE)
    try:
        pid = int(parent.stdout.readline())
        assert psutil.Process(pid).status() == psutil.STATUS_STOPPED
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    assert is_gone(pid)


@pytest.mark.parametrize(("used", "how"), [(0.1, "spin"), (0.4, "spin"), (0.6, "sleep"), (2.0, "sleep")])
def test_threads_wait_as_what_others_use_between_trials_says(monkeypatch, used, how):
    monkeypatch.setattr(machine.Others, "cores", lambda self: used + os.cpu_count() - 1)
    for name in (machine.WAITING, *machine.THEIRS):
        monkeypatch.delenv(name, raising=False)
    assert way([], 1, 1e-3) == how
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert way([], 1, 1e-3) is None

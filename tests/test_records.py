"""`cpuopt runs`, on records that are written by hand."""

import errno
import json
import os
import re
import subprocess
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from verbs import SQUARES, fails, printed, ran, refused

from cpuopt import cli, files
from cpuopt.cli import common
from cpuopt.files.reading import to_json
from cpuopt.lab import records
from cpuopt.machine import commit, commits_of
from cpuopt.measure import rates as machine
from cpuopt.measure.profile import LayerRow, OpRow, Profile
from cpuopt.report import ab as ab_report
from cpuopt.report import records as records_report

OPS = {"Matmul Forward": 50.0, "GELU Forward": 10.0, "Attention Forward": 20.0, "Residual Forward": 5.0, "AdamW": 15.0}
NAMES = {op: op.lower().replace(" ", "_") for op in OPS}


@pytest.fixture(autouse=True)
def _here(here, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(machine, "machine_id", lambda: "here")
    monkeypatch.setattr(records, "machine_id", lambda: "here")
    monkeypatch.setattr("cpuopt.train.trainer.machine_id", lambda: "here")


def profile(factors=(), hashes=(), seed=0, scatter=0.004, **kw):
    """A profile's JSON: 20 steps with some scatter; some ops slower by a factor, some with other kernels."""
    rng, factors, hashes = np.random.default_rng(seed), dict(factors), dict(hashes)
    scattered = {op: ms * np.exp(scatter * rng.standard_normal(20)) for op, ms in OPS.items()}
    values = {op: (ms * factors.get(op, 1.0)).tolist() for op, ms in scattered.items()}
    step = np.sum(list(values.values()), axis=0)
    rows, layers = [], []
    for op, ms in values.items():
        figures = {"calls": 1, "ms": float(np.median(ms)), "share": 1.0, "gflops": 1.0, "gbs": 1.0, "flops": 10**9}
        figures |= {"bytes": 1, "intensity": 1.0, "of_roof": None, "roof": "", "imbalance": None}
        rows.append(OpRow(op=op, **figures, kernels=[f"{NAMES[op]}[mine]"]))
        layers.append(LayerRow(op=NAMES[op], layer="h.0", variant="mine", phase="forward", **figures))
    ms = {"median": float(np.median(step)), "min": 1.0, "max": 2.0, "mean": float(np.mean(step))}
    p = Profile(
        "gpt2-tiny", kw.pop("B", 4), 64, 2, "omp", "optimized", [], 20, 1, ms, 1.0, 1.0, 1.0, rows, layers, 0.0, 0.0,
        step.tolist(), [], {}, [], hashes={f"{n}[mine]": hashes.get(op, "0" * 12) for op, n in NAMES.items()},
    )  # fmt: skip
    return {**to_json(p), "op_ms_values": values}


def keep(tmp_path, name, p):
    return records.keep(tmp_path / "runs", "profile", name, {"profile": p})


def compare(tmp_path):
    return records.compare(records.find(tmp_path / "runs", "first"), records.find(tmp_path / "runs", "second"))


def test_a_record_has_machine_commit_and_time(tmp_path):
    path = keep(tmp_path, "a <b>/../c", profile())
    assert path.parent == tmp_path / "runs"
    assert path.name.endswith("-profile-a_b_.._c")
    kept = json.loads((path / "record.json").read_text())
    assert (kept["kind"], kept["format"], kept["machine_id"]) == ("profile", 1, "here")
    assert kept["machine"]["cpu"]
    assert kept["commit"] == commit()


def test_an_op_that_got_slower_is_found_and_the_others_are_not(tmp_path):
    keep(tmp_path, "first", profile())
    keep(tmp_path, "second", profile({"GELU Forward": 1.1}, {"GELU Forward": "1" * 12}, seed=1))
    found, same = compare(tmp_path), dict.fromkeys(["step", *NAMES.values()], "no difference shown")
    assert {r["op"]: r["verdict"] for r in found["rows"]} == same | {"gelu_forward": "slower"}
    row = next(r for r in found["rows"] if r["op"] == "gelu_forward")
    assert row["ratio"] == pytest.approx(1.1, rel=0.01)
    assert not row["same_kernels"]
    assert found["noise"] == records.LEAST


def test_a_wide_interval_is_inconclusive():
    rng = np.random.default_rng(0)
    told = [
        records._judged({"op": "x", "a": [1.0] * 9, "b": b, "same": False}, records.LEAST)
        for b in ([0.1, 20.0, 1.0, 0.2, 9.0], [1.0, 1.3, 0.8, 1.2, 0.9], rng.normal(1, 0.01, 9), [2.0, 2.5, 3.0])
    ]
    assert [t["verdict"] for t in told] == ["inconclusive", "inconclusive", "no difference shown", "slower"]
    content = {"a": "a", "b": "b", "noise": 0.015, "rows": told, "only_a": [], "only_b": [], "doubts": []}
    assert next(str(c) for c in records_report.comparison(content)[2].columns[4].cells) == "inconclusive"


def test_noise_is_what_unchanged_kernels_differ_by(tmp_path):
    moved = {"Matmul Forward": 1.08, "Attention Forward": 0.93, "AdamW": 1.09, "GELU Forward": 1.06}
    keep(tmp_path, "first", profile())
    keep(tmp_path, "second", profile(moved, {"GELU Forward": "1" * 12}, seed=1))
    found = compare(tmp_path)
    assert {r["op"]: r["verdict"] for r in found["rows"]}["gelu_forward"] == "no difference shown"
    assert 0.07 < found["noise"] < 0.1


def test_what_makes_two_profiles_hard_to_compare_is_said(tmp_path):
    keep(tmp_path, "first", profile())
    keep(tmp_path, "second", profile(B=8))
    assert compare(tmp_path)["doubts"] == ["B differs: 4 and 8"]


def test_records_are_found_by_a_part_of_their_name(tmp_path):
    keep(tmp_path, "first", profile())
    keep(tmp_path, "fifth", profile())
    root = tmp_path / "runs"
    assert records.find(root, "first").path.name.endswith("first")
    fails("2 records have that in their name", records.find, root, "fi")
    fails("no such record", records.find, root, "sixth")
    (root / "broken").mkdir()
    (root / "broken" / "record.json").write_text("{")
    assert [bool(e.trouble) for e in records.entries(root)] == [False, False, True]
    fails("'broken' cannot be read: it is not as cpuopt writes it: Expecting property", records.find, root, "broken")
    assert records.entries(tmp_path / "none") == []


def ab(op="gelu_forward"):
    ratio = {"median": 0.5, "low": 0.4, "high": 0.6}
    result = {"B": 4, "T": 64, "threads": 2, "verdict": "faster", "ratio": ratio, "control": ratio, "why": ""}
    result |= {"a_ms": 2.0, "b_ms": 1.0, "hashes": {"vanilla": "v1", "mine": "m1"}, "doubts": [], "cases": []}
    head = {"op": op, "a": "vanilla", "b": "mine", "model": "gpt2-tiny", "layer": "*", "in_step": False, "flush": False}
    return {**head, "verdict": "faster", "ratio": ratio, "why": "", "results": [result]}


def test_history_follows_an_op_over_the_records_of_this_machine(tmp_path):
    root = tmp_path / "runs"
    records.keep(root, "ab", "one", ab())
    records.keep(root, "ab", "two", {**ab(), "machine_id": "elsewhere"})
    one = ab()["results"][0] | {"b_ms": 5.0, "cases": [{"layers": ["h.0", "h.1"]}, {"layers": ["ln_f"]}]}
    one |= {"commits": {"mine": "abc123+"}}
    kernel = {"op": "gelu_forward", "variant": "mine", "against": "vanilla", "bad": "", "said": {}, "alone": one}
    records.keep(root, "lab", "x", {"file": "x.py", "model": "gpt2-tiny", "sizes": [], "kernels": [kernel]})
    keep(tmp_path, "three", profile(hashes={"GELU Forward": "abc"}))
    rows = records.history(records.entries(root), "gelu_forward", "here")
    told = sorted((r["kind"], r["variant"], round(r["ms"]), r["hash"]) for r in rows)
    of_lab = [("lab", "mine", 5, "m1"), ("lab", "vanilla", 2, "v1")]
    assert told == [("ab", "mine", 1, "m1"), ("ab", "vanilla", 2, "v1"), *of_lab, ("profile", "mine", 10, "abc")]
    lab = {r["variant"]: (r["commit"], r["size"]) for r in rows if r["kind"] == "lab"}
    size = "gpt2-tiny 4x64, 2 threads, 3 calls"
    assert lab == {"mine": ("abc123+", size), "vanilla": (commit(), size)}
    (rate,) = [r["gflops"] for r in rows if r["kind"] == "profile"]
    assert rate == pytest.approx(100, rel=0.01)


def test_a_kernel_of_another_repository_has_its_commit(tmp_path):
    def git(*words):
        command = ["git", "-C", str(tmp_path / "other"), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    (tmp_path / "other").mkdir()
    mine, loose, ours = tmp_path / "other" / "mine.py", tmp_path / "loose.py", records.__file__
    for file in mine, loose:
        file.write_text("x = 1\n")
    files = {"mine": str(mine), "loose": str(loose), "ours": ours, "gone": str(tmp_path / "gone.py")}
    assert commits_of(files) == {"mine": None, "loose": None}
    git("init", "-q")
    git("add", ".")
    git("-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "x")
    head = git("rev-parse", "--short=12", "HEAD")
    assert commits_of(files) == {"mine": head, "loose": None}
    mine.write_text("x = 2\n")
    assert commits_of(files)["mine"] == f"{head}+"


def trained(tmp_path, name, lr, losses):
    """A training run's folder, as far as `cpuopt runs` reads it."""
    path = tmp_path / "runs" / f"20260102-030405-{name}"
    path.mkdir(parents=True)
    summary = {"steps": 3, "loss_last": losses[-1], "best_step": 3, "val_loss": {"3": losses[-1], "0": 5.0}}
    for file, x in (("config", {"model": "gpt2-tiny", "lr": lr, "run": name}), ("profile", profile())):
        (path / f"{file}.json").write_text(json.dumps(x))
    (path / "summary.json").write_text(json.dumps(summary | {"step_ms_median": 1.5}))
    lines = (json.dumps({"step": i, "loss": loss}) + "\n" for i, loss in enumerate(losses, 1))
    (path / "metrics.jsonl").write_text("".join(lines) + '{"step": 9, "lo')
    return path


def test_losses_of_a_training_run(tmp_path, capsys):
    path = trained(tmp_path, "train", 0.1, [3.0, None, 2.0])
    (entry,) = records.entries(tmp_path / "runs")
    assert (entry.kind, entry.time) == ("train", "2026-01-02T03:04:05")
    training = [(1, 3.0), (2, None), (3, 2.0)]
    assert records.losses(entry.path) == {"training loss": training, "validation loss": [(0, 5.0), (3, 2.0)]}
    assert (records.losses(tmp_path), records.profile_in(entry).model) == ({}, "gpt2-tiny")
    show = ["runs", "show", "train", "--html", "page.html"]
    assert (cli.main(show), capsys.readouterr().err) == (0, "")
    (path / "metrics.jsonl").unlink()
    assert cli.main(show) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("20260102-030405-train has no metrics.jsonl: the report has no losses of the training steps")


def test_two_training_runs_are_compared_by_settings_and_losses(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    for name, lr, losses in (("van", 0.1, [4.0, 3.0, 2.0]), ("van.2", 0.2, [4.0, 1.5, 2.5]), ("vanish", 0.1, [1.0])):
        (trained(tmp_path, name, lr, losses) / "profile.json").unlink()
    assert "loss 2.0000 after 3 steps, lowest" in " ".join(printed(capsys, "runs", "list").split())
    assert "4.0000 -> 2.0000, lowest 2.0000 at 3" in printed(capsys, "runs", "show", "van")
    said = printed(capsys, "runs", "compare", "van", "van.2")
    assert re.search(r"^lr +0.1 +0.2$", said, re.M)
    assert "model" not in said
    assert re.search(r"lowest\s+2\.0000 at 3.*lowest\s+1\.5000 at 2", said, re.S)
    curves = re.findall(r"^training loss   ([AB] .*)$", said, re.M)
    assert [c[:3] + c[-1] for c in curves] == ["A █▂", "B █▄"], "both curves have one scale, from 1.5 to 4"
    found = ran(capsys, "runs", "compare", "van", "van.2")
    assert (found["settings"], found["rows"]) == ({"lr": [0.1, 0.2]}, [])
    assert found["training"]["b"]["losses"]["training loss"] == [[1, 4.0], [2, 1.5], [3, 2.5]]


def test_the_verbs(tmp_path, capsys):
    keep(tmp_path, "first", profile())
    keep(tmp_path, "second", profile({"GELU Forward": 1.5}, {"GELU Forward": "1" * 12}, seed=1))
    records.keep(tmp_path / "runs", "ab", "third", ab())

    out = partial(printed, capsys)
    listed = out("runs", "list")
    assert "100 ms a step, gpt2-tiny 4x64, optimized" in listed
    assert "gelu_forward: mine against vanilla: faster" in listed
    assert len(ran(capsys, "runs", "list")["runs"]) == 3
    assert "verdict: faster" in out("runs", "show", "third")
    shown = out("runs", "compare", "first", "second")
    assert all(text in shown for text in ("gelu_forward", "slower", "noise: "))
    assert ran(capsys, "runs", "compare", "first", "second")["rows"]
    assert "mine" in out("runs", "history", "gelu_forward")
    assert "matmul_forward" in out("runs", "show", "first", "--html", "page.html")
    assert "matmul_forward" in (tmp_path / "page.html").read_text()
    assert "has no profile to show" in refused(capsys, "runs", "show", "third", "--html", "none.html")
    assert "is of kind 'ab' and has no profile" in refused(capsys, "runs", "compare", "first", "third")
    assert cli.main(["runs", "history", "gleu_forward"]) == 2


def test_a_run_with_one_kernel_of_one_layer_swapped_shows_that_layer_alone(tmp_path, monkeypatch, capsys):
    threads = os.environ["NUMBA_NUM_THREADS"]
    (tmp_path / "text.txt").write_text(SQUARES)
    job = ["train", "--model", "gpt2-tiny", "--data", "text.txt", "-B", "2", "-T", "16", "--variant", "vanilla"]
    job += ["--threads", threads, "--val-every", "0", "--steps", "4"]

    layer, op = "h.1.mlp.c_fc", "matmul_forward"
    path = Path(ran(capsys, *job, "--swap", f"{op}@{layer}=blas", "--html", "page.html")["path"])
    shown = printed(capsys, "runs", "show", path.name).splitlines()
    assert [line.split(":")[0] for line in shown if "[blas] in " in line] == [f"{op}[blas] in {layer}"]
    rows = [line.split()[:2] for line in printed(capsys, "runs", "show", path.name, "--detail").splitlines()]
    assert [r for r in rows if r[1:] and r[1].endswith("[blas]")] == [[layer, f"{op}[blas]"]]
    page = (tmp_path / "page.html").read_text()
    outlined = re.findall(r'<td class="s\d other"[^>]*title="([^"\n]*)\n([^"\n]*)', page)
    assert sorted(set(outlined)) == [("h.1", f"{op} [vanilla, blas]"), (layer, f"{op} [blas]")]
    hashes = records.profile_in(records.find(tmp_path / "runs", path.name)).hashes
    assert hashes[f"{op}[vanilla]"] != hashes[f"{op}[blas]"]
    measured = [r["variant"] for r in records.history(records.entries(tmp_path / "runs"), op, "here")]
    assert sorted(measured) == ["blas", "vanilla"]


def test_nothing_there_says_what_to_run(tmp_path, capsys):
    assert "no records in runs; make some: cpuopt profile" in printed(capsys, "runs", "list")
    assert "'cpuopt ab gelu_forward A B'" in printed(capsys, "runs", "history", "gelu_forward")
    assert "there is none in runs" in refused(capsys, "runs", "show", "x")


# A full disk ----------------------------------------------------------------------------------------------------------


def test_a_record_that_cannot_be_kept_is_none_and_its_figures_are_shown_all_the_same(tmp_path, monkeypatch, capsys):
    def full(path, parts):
        path.write_bytes(b"".join(parts)[:9])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "write_synced", full)
    fails(r"cannot write '.*record\.json': No space left on device", records.keep, tmp_path, "ab", "x", {})
    assert common.keep(tmp_path, "ab", "x", {}) is None
    assert "warning: the record is not kept: cannot write" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert not any("record" in str(line) for line in ab_report.tables({**ab(), "layer": "*", "model": "m"}, None))

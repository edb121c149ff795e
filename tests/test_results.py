"""docs/results/ and README's chart follow from benchmarks/records/, and `make results` says what is missing."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def results(monkeypatch):
    spec = importlib.util.spec_from_file_location("results_pages", ROOT / "benchmarks" / "results.py")
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


@pytest.fixture
def copy(results, tmp_path, monkeypatch):
    """A copy of the records, the pages and README, to be changed."""
    for name in ("docs/results", "benchmarks/records"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for file in ("README.md", "docs/speed-light.svg", "docs/speed-dark.svg"):
        shutil.copy(ROOT / file, tmp_path / file)
    records, pages = tmp_path / "benchmarks" / "records", tmp_path / "docs" / "results"
    monkeypatch.setattr(results, "RECORDS", records)
    monkeypatch.setattr(results, "PAGES", pages)
    monkeypatch.setattr(results, "written", lambda whole=results.written: whole(records, pages))
    return tmp_path


def test_every_page_and_the_chart_follow_from_their_records(results, capsys):
    assert (results.main(["--check"]), capsys.readouterr().err) == (0, "")


def changed(file, change):
    record = json.loads(file.read_text())
    change(record)
    file.write_text(json.dumps(record))


def halve(record):
    for r in record["results"]:
        r["step_ms"]["cpuopt"]["median"] /= 2


@pytest.mark.parametrize(
    ("record", "stale"),
    [
        ("zen4/front", ["zen4.md", "speed-light.svg", "speed-dark.svg", "README.md"]),
        ("xeon/suite", ["xeon.md"]),
    ],
)
def test_a_page_that_does_not_follow_is_named_and_mended(results, copy, capsys, record, stale):
    changed(copy / "benchmarks" / "records" / f"{record}.json", halve)
    assert results.main(["--check"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert [Path(line.split(" is out of date")[0]).name for line in said] == stale
    assert results.main([]) == 0
    assert results.main(["--check"]) == 0


def test_readmes_sentence_has_the_figures_of_the_results_page(results, copy, capsys):
    readme, overview = (copy / file for file in ("README.md", "docs/results/README.md"))
    said = " ".join(readme.read_text().split())
    (line,) = (line for line in overview.read_text().splitlines() if "[Zen 4]" in line)
    how, wide, narrow = (cell.strip() for cell in line.split("|")[3:6])
    assert how == "tuned"
    assert f"{wide} times as long in float32 and {narrow} times in bf16 on Zen 4" in said
    assert "with MKL's AVX-512 code" in said
    assert "Zen 5 (two" not in said  # its PyTorch ran as it comes
    readme.write_text(readme.read_text().replace(wide, "2.6", 1))
    assert results.main(["--check"]) == 1
    assert "README.md is out of date" in capsys.readouterr().err


def test_a_page_of_a_machine_without_records_is_named(results, copy, capsys):
    shutil.rmtree(copy / "benchmarks" / "records" / "xeon")
    assert results.main(["--check"]) == 1
    assert "xeon.md has no records" in capsys.readouterr().err


def test_what_is_missing_is_said_before_anything_is_measured(results, copy, tmp_path):
    with pytest.raises(SystemExit, match=r"has no PyTorch\. 'make .*' installs it.*make results PEERS="):
        results.main(["--measure", "--peer-python", str(tmp_path / "none" / "python")])
    torch = tmp_path / "python"
    torch.write_text("#!/bin/sh\nexit 0\n")
    torch.chmod(0o755)
    with pytest.raises(SystemExit, match=r"--llmc .*train_gpt2: there is no such program"):
        results.main(["--measure", "--peer-python", str(torch), "--llmc", str(tmp_path / "train_gpt2")])


def test_a_measurement_writes_the_records_of_this_machine(results, copy, tmp_path, monkeypatch):
    record = json.loads((copy / "benchmarks" / "records" / "zen4" / "front.json").read_text())
    said = []

    def run(command, **how):
        if "bench" in command:
            said.append(command[command.index("bench") + 1 :])
            Path(command[-1]).write_text(json.dumps(record))
        return subprocess.CompletedProcess(command, 1 if "bench" in command else 0)  # 1: a peer was refused

    program = tmp_path / "train_gpt2"
    program.touch()
    monkeypatch.setattr(results, "measure", lambda args, whole=results.measure: whole(args, run))
    monkeypatch.setattr(
        results, "llmc_record", lambda binary, threads: {"step_ms": {"median": 5000.0, "min": 1, "max": 2}}
    )
    flags = ["--machine", "zen5", "--only", "front", "--rounds", "4", "--peer-python", sys.executable]
    assert results.main(["--measure", *flags, "--llmc", str(program)]) == 0
    out = copy / "benchmarks" / "records" / "zen5" / "front.json"
    bench = [*results.RUNS["front"], "--rounds", "4", "--peer-python", sys.executable]
    assert said == [[*bench, "--out", str(out)]]
    assert "llm.c's C program takes 5,000 ms a step" in (copy / "docs" / "results" / "zen5.md").read_text()
    monkeypatch.setattr(subprocess, "CompletedProcess", lambda command, status: type("Done", (), {"returncode": 2}))
    with pytest.raises(SystemExit):
        results.main(["--measure", *flags])


PROGRAM = """#!/usr/bin/env python3
import os, sys, time
sizes = [os.path.getsize(f) for f in ("gpt2_124M.bin", "dev/data/tinyshakespeare/tiny_shakespeare_train.bin")]
assert sizes[0] == 1024 + 4 * 124475904, sizes
assert sys.stdout.isatty() and os.environ["OMP_NUM_THREADS"] == "2"
print("val loss 11.0")
for step in range({steps}):
    print(f"step {{step}}: train loss 10.5 (took {{1000.0 + step}} ms)")
time.sleep({sleep})
"""


def test_the_steps_of_llmc_are_read_and_the_program_is_ended(results, tmp_path, monkeypatch):
    program = tmp_path / "train_gpt2"
    program.write_text(PROGRAM.format(steps=9, sleep=600))
    program.chmod(0o755)
    row = results.llmc_record(program, 2)
    assert row["step_ms"] == {"median": 1004.5, "min": 1001, "max": 1008, "values": [1001 + i for i in range(8)]}
    monkeypatch.setattr(sys.modules[results.llmc_record.__module__], "write_inputs", lambda folder: None)
    program.write_text("#!/bin/sh\necho step 0: train loss 10.5 '(took 5.0 ms)'\necho out of memory\n")
    with pytest.raises(SystemExit, match=r"ended after 1 of 9 steps: .*out of memory"):
        results.llmc_record(program, 2)
    with pytest.raises(SystemExit, match="cannot be started: No such file"):
        results.llmc_record(tmp_path / "none", 2)

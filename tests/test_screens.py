"""The screens: wide tables at 60 and 80 columns and in a pipe, with the longest names and numbers of their verbs.

No word is broken where the same words stand on a narrow screen as in a pipe.
"""

import io
import sys
from collections import Counter
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from cpuopt import ops
from cpuopt.check.cases import Case
from cpuopt.check.result import Result, whole
from cpuopt.cli import common
from cpuopt.data.datasets import list_datasets
from cpuopt.files.reading import from_json
from cpuopt.lab.asm import Loop
from cpuopt.lab.inspect import Inspection, Remark
from cpuopt.lab.scale import InTurn, Scaling
from cpuopt.measure import scaling
from cpuopt.measure.lines import OpLines, Sampled
from cpuopt.measure.profile import UNACCOUNTED, Profile
from cpuopt.measure.scaling import REASONS
from cpuopt.report import ab, bench, check, console, inspect, lines, records, scale, sweep, tables, tune

OP, LABEL = max(ops.ALL, key=len), max((op.label for op in ops.ALL.values()), key=len)
LAYERS = ("model.embed_tokens", "model.layers.27.self_attn.o_proj", "h.47.mlp.c_fc", "lm_head")
VERDICTS = ("no difference shown", "inconclusive", "faster")
SIZES, RUN = {"BT": 16384, "C": 1600, "OC": 50304}, f"20261231-235959-ab-{OP}-generated-optimized.12"
RATIO = {"median": 10.254, "low": 10.107, "high": 10.498}
LEVELS = [{"name": "L1", "nbytes": 32768, "sharers": 1}, {"name": "memory", "nbytes": None, "sharers": 2}]
ROOFS = {"threads": 2, "gflops": 100.0, "launch_us": 1.0, "measured": "2026-01-01", "doubts": [], "levels": LEVELS}
ROOFS |= {"gbs": {"L1": {"read": 300.0}, "memory": {"read": 10.0}}}


def figures(**more):
    row = {"calls": 1234, "ms": 12345.678, "share": 88.8, "gflops": 1234.5, "gbs": 123.4, "flops": 10**12}
    row |= {"bytes": 10**9, "intensity": 1234.5, "of_roof": 100.0, "roof": "memory", "imbalance": 11.25}
    return row | more


def profile():
    found = ["optimized", "generated"]
    kernels, labels = [f"{OP}[{v}]" for v in found], [op.label for op in ops.ALL.values()]
    calls = product((OP, "adamw"), LAYERS, found)
    layers = [figures(op=op, layer=layer, variant=v, phase="backward") for op, layer, v in calls]
    p = {"model": "llama3.2-1B", "B": 64, "T": 1024, "threads": 192, "threading_layer": "workqueue"}
    p |= {"variant": "optimized", "swaps": [f"{OP}@model.layers.*=generated"], "steps": 200, "warmup": 10}
    p |= {"step_ms": {"median": 12345.6, "min": 12345.6, "max": 12345.6, "mean": 12345.6}, "tokens_per_s": 123456.7}
    p |= {"peak_rss_mb": 123456.7, "planned_peak_mb": 123456.7, "unaccounted_ms": 0.1, "profiler_overhead_ms": 0.123}
    p |= {"ops": [figures(op=name, kernels=kernels) for name in labels] + [figures(op=UNACCOUNTED, kernels=[])]}
    p |= {"layers": layers, "step_ms_values": [1.0], "versions": {}, "words": "A step takes long.", "mfu": 40.0}
    p |= {"checked": [{"kernel": k, "status": "right"} for k in kernels], "doubts": []}
    return from_json(Profile, {**p, "roofs": ROOFS})


def sampled(threads):
    figures = {"samples": 1234567, "share": 88.8, "low": 88.7, "high": 88.9, "threads": [1234567] * threads}
    place = "/home/me/cpuopt/kernels/optimized/_attention_operands.py"
    text = "total = total + select_some(min(remaining, LANES), exponential(row - largest), spread(ZERO))"
    where = {"file": place, "line": 1234, "function": "fast_exponential_of_rows", "text": text}
    row = Sampled(**where, chain=[f"{place}:1{n} gradient_of_keys_and_values" for n in range(3)], **figures)
    other = Sampled(function="gradient_of_keys_and_values (lines unknown)", **figures)
    kernels = [f"{OP}[{v}]" for v in ("optimized", "generated")]
    more = {"codes": ["0123456789ab"] * 2, "samples": 12345678, "share": 99.9}
    more |= {"functions": [row, other], "rows": [row, other], "threads": [1234567] * threads, "rest": 123}
    return OpLines(op=OP, kernels=kernels, **more)


def compared(verdict, **more):
    times = {"a_ns": 123456.7e6, "b_ns": 12345.6e6, "a_ms": 12345.6, "b_ms": 12345.6, "why": "the control moved"}
    return {**times, "ratio": RATIO, "control": RATIO, "verdict": verdict, **more}


def comparison():
    results = [
        compared(v, B=128, T=1024, threads=192, doubts=["busy"], step=compared(v), losses={"A": [1.0], "B": [1.0]})
        | {"cases": [compared(v, sizes=SIZES, layers=["h.0"] * 48)] * 2, "hashes": {"optimized": "o", "generated": "g"}}
        for v in VERDICTS
    ]
    c = {"op": OP, "a": "optimized", "b": "generated", "model": "llama3.2-1B", "layer": "*", "in_step": True}
    return {**c, "level": 96.8, "flush": False, **compared("no difference shown"), "results": results}


def peers():
    side = {"cpuopt": 12345.6, "peer": 12345.6}
    result = {"B": 128, "T": 1024, "ratio": RATIO, "refused": None, "doubts": [], "level": 95}
    result |= {"step_ms": {k: {"median": v} for k, v in side.items()}, "peak_rss_mb": side}
    result |= {"phases_ms": {k: dict.fromkeys(("forward", "backward", "update"), 12345.6) for k in side}}
    names = ["torch-compile", "transformers", "optimized"]
    record = {"model": {"name": "gpt2-1558M"}, "variant": "optimized", "swap": [], "threads": 192, "rounds": 10}
    refused = {**result, "peer": names[0], "ratio": None, "refused": "other losses"}
    record |= {"geometric_mean": dict.fromkeys(names, RATIO)}
    record |= {"results": [*({**result, "peer": n} for n in names), refused]}
    fastest = [{"B": 128, "T": 1024, "peer": names[0], "of": names, "ratio": RATIO}]
    return {**record, "machine": {"cpu": "Intel(R) Xeon(R) Platinum 8488C"}, "faster": fastest}


def tuned():
    variants = "generated", "rows", "mine"
    tried = {n: compared(v, check="right") for n, v in zip(variants, VERDICTS, strict=True)}
    tried |= {"blas": {"verdict": "wrong", "why": "dinp[0] is wrong"}}
    shape = {"sizes": SIZES, "adds": {"dinp": True, "dweight": True}, "layers": list(LAYERS)}
    row = {"op": OP, "default": "optimized", "best": "mine", "shapes": [shape], "tried": tried}
    row["in_step"] = {"verdict": "no difference shown", "ratio": RATIO}
    c = {"model": "llama3.2-1B", "B": 128, "T": 1024, "threads": 192, "flush": True, "rows": [row], "doubts": []}
    plan = "/home/somebody/.cache/cpuopt/machine/plan.json"
    return {**c, "rules": [f"{OP}@lm_head=mine"], "step": compared("faster"), "finished": True, "plan": plan}


def swept():
    placed = {"ns": 12345.678e6, "gflops": 1234.5, "gbs": 123.4, "roof": "memory", "roof_ns": 1.0, "of_roof": 99.9}
    row = {"sizes": SIZES, "check": {"status": "marginal"}, "operands": "bfloat16", "warm": placed, "cold": placed}
    rows = [{**row, "variant": "generated"}, {**row, "variant": "optimized", "ratio": compared("faster")}]
    c = {"op": OP, "over": {s: [n] for s, n in SIZES.items()}, "fixed": {"NH": 12}, "source": "llama3.2-1B 4x64, h.0"}
    c |= {"threads": 192, "refused": {"mine": "out[0] is wrong"}, "late": ["vanilla: no answer"]}
    c["skipped"] = ["C=1: no"]
    return {**c, "rows": rows, "roofs": {"doubts": []}, "doubts": ["other processes used 1.00 cores meanwhile"]}


def checked():
    case = Case(SIZES, "extreme", frozenset(["bias"]))
    worst = Result(f"{OP}[generated]", case, 123.456, "dresidual", (16383, 50303), -1.23456e-05, 1.23456e-05, "differs")
    return [whole([worst] * 120)]


def differences():
    row = {"a_ms": 12345.6, "b_ms": 12345.6, "ratio": 10.25, "low": 10.11, "high": 10.5, "level": 95}
    row["same_kernels"] = False
    rows = [{"op": op, "verdict": v, **row} for op, v in product((LABEL, "step"), VERDICTS)]
    both = {"a": RUN, "b": RUN, "noise": 0.0123, "rows": rows, "only_a": [LABEL], "only_b": [], "doubts": []}
    return records.comparison(both)


def inspected():
    where = "/home/somebody/cpuopt/kernels/optimized/residual_layernorm.py"
    loop = {"function": OP, "where": "residual_layernorm.py:1234", "instructions": 1234, "width": 16, "fmas": 123}
    loop |= {"loads": 123, "stores": 123, "spills": 123, "doubles": 123, "calls": ("__svml_tanhf16_ha", "memset")}
    loops = [Loop(**loop, remainder=r) for r in (False, True)]
    remarks = [Remark(where, 123, "loop not vectorized: the cost-model indicates that it is not beneficial", 12)]
    one = Inspection(OP, "optimized", where, "sapphirerapids", "x86_64-pc-linux-gnu", True, loops, remarks)
    return inspect.tables([one, one])


def scaled():
    """Eight numbers of threads, as 192 cores have, and three that are predicted."""
    threads, projected = [1, 2, 4, 8, 16, 64, 128, 192], [256, 512, 1024]

    def row(name):
        ms, share = dict.fromkeys([*threads, *projected], 12345.678), dict.fromkeys([*threads, *projected], 1.0)
        lost, chunks = dict.fromkeys(ms, dict.fromkeys(REASONS, 12345.678)), dict.fromkeys(ms, 512)
        found = {"ms": {n: ms[n] for n in threads}, "efficiency": share, "lost_ms": lost, "chunks": chunks}
        foretold = {"predicted_ms": ms, "predicted_efficiency": share, "predicted_lost_ms": lost}
        return scaling.Row(name=name, calls=1234, **found, **foretold)

    labels, assumed = sorted({op.label for op in ops.ALL.values()}), ["memory gives 123 GB/s to any number of threads"]
    rows = [row(label) for label in labels], [row(layer) for layer in LAYERS]
    turns = [InTurn(["embed_tokens.weight"] * 3, ["classifier_update", "embedding_update"], 1 << 30)]
    bandwidth = dict.fromkeys(threads, 12.3)
    told = (threads, projected, row("step"), *rows, bandwidth, bandwidth, 16, 4, assumed, turns, 10**9, [])
    return scale.tables(Scaling("llama3.2-1B", 64, 1024, "optimized", 200, *told), detail=True)


LISTED = SimpleNamespace(path=Path("runs", RUN), what=f"{OP}: generated against optimized: faster", trouble="")
HOSTS = [["ip-10-0-112-134.eu-central-1.compute.internal", *range(0, 192, 2)]] * 2
FOUR = ("vanilla", "optimized", "generated", "blas")
KERNELS = [{"op": op, "variant": v, "label": LABEL} for op, v in product((OP, "adamw"), FOUR)]
SCREENS = {
    "profile --lines": lambda: [*lines.tables([sampled(2), sampled(192)])],
    "profile": lambda: tables.profile_tables(profile()),
    "scale --detail": scaled,
    "runs compare": differences,
    "inspect": inspected,
    "profile --detail": lambda: tables.profile_tables(profile(), detail=True),
    "ab": lambda: ab.tables(comparison(), f"runs/{RUN}"),
    "bench": lambda: bench.tables(peers()),
    "tune": lambda: tune.tables(tuned(), f"runs/{RUN}"),
    "sweep": lambda: sweep.tables(swept(), RUN),
    "check": lambda: check.tables(checked(), 123456, (1, 2, 192)),
    "check --detail": lambda: check.tables(checked(), 123456, (1, 2, 192), detail=True),
    "runs list": lambda: records.listing([LISTED] * 2, Path("runs")),
    "kernels": lambda: console.kernels_table(KERNELS),
    "data list": lambda: console.datasets_table(list_datasets(Path("nowhere"))),
    "train --ranks": lambda: console.ranks_table(HOSTS, [96] * 2),
}
"""What verbs show at their widest; the tables of other verbs are narrower ones of the same layout."""


def printed(shown, width=None, terminal=False):
    """The lines that a pipe gets, or a terminal of that width."""
    file = io.StringIO()
    out = console.Plain(file=file, width=width, force_terminal=terminal, color_system=None)
    for r in shown:
        console.put(out, r)
    return file.getvalue().split("\n")


@pytest.fixture(autouse=True)
def _no_width(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.mark.parametrize("verb", SCREENS)
def test_a_pipe_gets_tables_whole(verb):
    lines = printed(SCREENS[verb]())
    assert [line for line in lines if line != line.rstrip()] == []
    assert max(map(len, lines)) > 60, "this content does not show that nothing is wrapped"
    assert len(lines) <= len(printed(SCREENS[verb](), width=60, terminal=True))


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("verb", SCREENS)
def test_a_narrow_terminal_breaks_no_word_and_has_no_spaces_at_ends_nor_two_empty_lines(verb, width):
    whole = Counter(" ".join(printed(SCREENS[verb]())).split())
    lines = printed(SCREENS[verb](), width, terminal=True)
    assert [line for line in lines if line != line.rstrip()] == []
    assert "\n\n\n" not in "\n".join(lines)
    assert Counter(" ".join(lines).split()) - whole == Counter()
    bars = Counter(word for word in whole.elements() if set(word) <= set("█▏▎▍▌▋▊▉"))
    assert whole - Counter(" ".join(lines).split()) - bars == Counter()
    assert [line for line in lines if len(line.strip()) > width and " " in line.strip()] == []


@pytest.mark.parametrize("terminal", [False, True])
def test_a_message_is_a_line_and_on_a_terminal_breaks_no_word(terminal):
    said = "warning: --swap 'matmul=blas' keeps matmul_forward in layers 'h.0.mlp.c_fc', 'h.1.mlp.c_fc' from " * 2
    file = io.StringIO()
    console.put(console.Plain(file=file, width=60, force_terminal=terminal, color_system=None), said.strip())
    lines = file.getvalue().splitlines()
    assert (" ".join(lines), len(lines) > 1, max(map(len, lines)) <= 60) == (said.strip(), terminal, terminal)


def test_an_error_breaks_no_word_on_a_terminal(capsys, monkeypatch):
    message = "add --in-step to what was-asked-for " * 4
    common.complain(message.strip())
    assert capsys.readouterr().err == f"cpuopt: {message.strip()}\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "50")
    common.complain(message)
    lines = capsys.readouterr().err.splitlines()
    assert " ".join(lines) == f"cpuopt: {message.strip()}"
    assert 40 < max(map(len, lines)) <= 50


@pytest.mark.parametrize("columns", ["0", "1", "00", "-3", "x", ""])
def test_no_number_of_columns_swallows_what_is_printed(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    assert "tinyshakespeare" in "".join("".join(printed(SCREENS["data list"]())).split())

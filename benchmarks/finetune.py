"""Fine-tuning beside transformers and PEFT: whole steps and peak memory, full and LoRA, of random weights.

::

    python benchmarks/finetune.py --peer-python PATH --out benchmarks/records/zen4/finetune.json [--rounds 4]
    python benchmarks/finetune.py --peer-python PATH --cases smollm2-135M:4x256 --only lora,narrow
    python benchmarks/finetune.py --show benchmarks/records/zen4/finetune.json     # the table of docs/finetune.md

``PATH`` needs torch, transformers and peft. ``narrow`` is all weights, which cpuopt stores in bfloat16, and the moments
too. Each side runs in a process of its own, which is stopped while the other is on trial. The peer takes a few steps in
each of its modes: autocast to bfloat16 over float32 weights, all of the model in bfloat16, and each of them compiled.
In the mode of the fastest step it then takes turns with cpuopt, A B B A.
A side's time is the median of its steps without the first; its memory is the peak of its process. With ``--busy`` each
side has one thread, and its processor time counts: several threads wait for each other if others use the cores.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from sizes import some_of

from cpuopt.files import write_whole
from cpuopt.machine import describe

MODES = ("autocast", "bfloat16", "autocast, compiled", "bfloat16, compiled")
KINDS = {"lora": "LoRA r=8", "full": "all weights", "narrow": "all weights, in bf16"}
PROBED = 4
"""Steps of each mode behind its first one: the next may compile too, and a machine has slow seconds."""
LORA = {"r": 8, "alpha": 16.0}
WORKER = Path(__file__).with_name("finetune_worker.py")


class Side:
    """A process that takes a step on request."""

    def __init__(self, python: str, script: Path, request: dict[str, Any]) -> None:
        self.child = subprocess.Popen(
            [python, str(script), "--side"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.ms: list[float] = []
        self.peak = self.ask(request)["peak"]

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request, and wait for the answer."""
        assert self.child.stdin
        assert self.child.stdout
        os.kill(self.child.pid, signal.SIGCONT)
        print(json.dumps(request), file=self.child.stdin, flush=True)
        line = self.child.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {request} ended with {self.child.wait()}")
        os.kill(self.child.pid, signal.SIGSTOP)
        found: dict[str, Any] = json.loads(line)
        return found

    def step(self) -> None:
        """Take a step, and keep its time."""
        found = self.ask({"step": True})
        self.ms.append(found["ms"])
        self.peak = found["peak"]

    def end(self) -> None:
        """End the process."""
        self.child.kill()
        self.child.wait()


def serve() -> None:
    """Take the steps of cpuopt, as a side."""
    import resource

    request = json.loads(sys.stdin.readline())
    from cpuopt.train.job import Settings, prepare

    lora = ",".join(f"{name}={x:g}" for name, x in LORA.items()) if request["lora"] else None
    B, T = request["size"]
    clock = time.process_time if request["busy"] else time.perf_counter
    threads = 1 if request["busy"] else None
    narrow = {"weights": "bf16", "moments": "bf16"} if request["narrow"] else {}
    how = {"steps": 10**6, "val_every": 0, "threads": threads, "dtype": "bf16", **narrow}
    job = prepare(Settings(model=request["model"], B=B, T=T, lora=lora, **how))
    line, start = {}, clock()
    while True:
        job.take_step()
        line = {"ms": (clock() - start) * 1e3, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
        print(json.dumps(line), flush=True)
        sys.stdin.readline()
        start = clock()


def peer_of(request: dict[str, Any], mode: str, python: str) -> Side:
    """Start the peer in a mode; it has taken its first step."""
    return Side(
        python, WORKER, {**request, "mode": mode, "threads": 1 if request["busy"] else len(os.sched_getaffinity(0))}
    )


def probed(request: dict[str, Any], python: str, modes: Sequence[str]) -> dict[str, dict[str, float]]:
    """Take a few steps of the peer in each mode; return the time of the fastest and the peak by mode."""
    found = {}
    for mode in modes:
        side = peer_of(request, mode, python)
        try:
            for _ in range(PROBED):
                side.step()
            found[mode] = {"ms": min(side.ms), "gb": side.peak / 1e6}
        finally:
            side.end()
        print(f"# {request['model']} {request['lora']}: {mode}: {found[mode]}", file=sys.stderr)
    return found


def measured(
    model: str, size: str, what: str, python: str, rounds: int, busy: bool, tried: Sequence[str]
) -> dict[str, Any]:
    """Compare one case."""
    from cpuopt import models

    B, T = map(int, size.split("x"))
    config, kind = models.parse(model), {"lora": what == "lora", "narrow": what == "narrow"}
    request = {"model": model, "config": config.to_transformers(), "size": (B, T), "busy": busy, **kind, **LORA}
    modes = probed(request, python, tried)
    mode = min(modes, key=lambda m: modes[m]["ms"])
    sides: list[Side] = []
    Side(sys.executable, Path(__file__), request).end()  # if kernels are to be compiled, it needs the memory for that
    try:
        sides += [Side(sys.executable, Path(__file__), request)]
        sides += [peer_of(request, mode, python)]
        for n in range(2 * rounds + 1):
            for side in sides if n % 2 else sides[::-1]:
                side.step()
    finally:
        for side in sides:
            side.end()
    ours, theirs = ({"ms": side.ms[1:], "gb": side.peak / 1e6} for side in sides)
    return {
        "model": model, "size": size, **kind, "load": os.getloadavg()[0], "modes": modes,
        "cpuopt": ours, "peer": {"mode": mode + ", tuned", **theirs},
    }  # fmt: skip


def kind_of(row: Mapping[str, Any]) -> str:
    """Return which of `KINDS` a row is of; a record of earlier versions does not say ``narrow``."""
    return "lora" if row["lora"] else "narrow" if row.get("narrow") else "full"


def conditions(*records: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return what has to be the same for all rows of a record, by name, of each of some records."""
    found = {n: [r[n] for r in records] for n in ("versions", "busy")}
    return found | {n: [r["machine"][n] for r in records] for n in ("cpu", "cores", "caches")}


def table(record: Mapping[str, Any]) -> Iterator[str]:
    """Write a record as the table of docs/finetune.md."""
    columns = "step, ms | transformers + PEFT, ms | times as fast | memory, GB | theirs, GB | share"
    yield f"| model, B x T | trained | {columns} |"
    yield f"| --- | --- |{' ---: |' * 6}"
    for row in record["rows"]:
        ours, theirs = row["cpuopt"], row["peer"]
        a, b = median(ours["ms"]), median(theirs["ms"])
        cells = [f"{a:,.0f}", f"{b:,.0f}, {theirs['mode']}", f"{b / a:.2f}"]
        cells += [f"{ours['gb']:.2f}", f"{theirs['gb']:.2f}", f"{ours['gb'] / theirs['gb']:.2f}"]
        yield f"| {row['model']} {row['size']} | {KINDS[kind_of(row)]} | {' | '.join(cells)} |"
    loads = [row["load"] for row in record["rows"]]
    versions = ", ".join(f"{name} {v}" for name, v in record["versions"].items())
    yield ""
    how = "processor time of 1 thread" if record["busy"] else f"{record['machine']['cores']} threads"
    yield (
        f"{record['machine']['cpu']}, {how}, load average {min(loads):.1f} to "
        f"{max(loads):.1f}; {versions}; {record['time'][:10]}."
    )


def main() -> None:
    """Measure, or show a record."""
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--peer-python", help="a Python that has torch, transformers and peft")
    p.add_argument("--cases", default="smollm2-135M:4x256,qwen3-0.6B:2x256")
    p.add_argument("--only", type=some_of(KINDS), default=KINDS)
    p.add_argument("--rounds", type=int, default=4)
    p.add_argument("--busy", action="store_true", help="count the processor time of one thread")
    p.add_argument("--eager", action="store_true", help="leave out the peer's compiled modes, which take minutes")
    p.add_argument("--out", type=Path, help="write the record to this file after each case; cases that it has are kept")
    p.add_argument("--show", type=Path, help="print the table of this record, and measure nothing")
    p.add_argument("--side", action="store_true", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.side:
        serve()
    if a.show:
        print("\n".join(table(json.loads(a.show.read_text()))))
        return
    if not a.peer_python:
        p.error("--peer-python PATH is needed: a Python that has torch, transformers and peft")
    ask = "import json, peft, torch, transformers as t; m = (torch, t, peft); "
    ask += "print(json.dumps({x.__name__: x.__version__ for x in m}))"
    versions = json.loads(subprocess.run([a.peer_python, "-c", ask], check=True, capture_output=True).stdout)
    tried = [mode for mode in MODES if not (a.eager and mode.endswith("compiled"))]
    record = {
        "kind": "cpuopt-finetune", "machine": describe(), "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": versions, "rounds": a.rounds, "busy": a.busy, "rows": list[dict[str, Any]](),
    }  # fmt: skip
    if a.out and a.out.exists():
        known = json.loads(a.out.read_text())
        if apart := [n for n, (one, other) in conditions(record, known).items() if one != other]:
            p.error(f"--out {a.out}: its record has another {apart[0]}; name a new file")
        record = known
    rows = record["rows"]
    kept = [(row["model"], row["size"], kind_of(row)) for row in rows]
    for model, size in (case.split(":") for case in a.cases.split(",")):
        for what in (x for x in a.only if (model, size, x) not in kept):
            rows.append(measured(model, size, what, a.peer_python, a.rounds, a.busy, tried))
            rows.sort(key=lambda row: row["model"], reverse=True)  # the new one behind those of its model
            print("\n".join(table(record)), flush=True)
            if a.out:
                write_whole(a.out, [json.dumps(record, indent=1).encode() + b"\n"])


if __name__ == "__main__":
    main()

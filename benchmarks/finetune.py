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
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from flags import begun, keep, known, recorded, some_of

from cpuopt import models
from cpuopt.isolate.process import Side, Worker
from cpuopt.isolate.serve import serve

MODES = ("autocast", "bfloat16", "autocast, compiled", "bfloat16, compiled")
KINDS = {"lora": "LoRA r=8", "full": "all weights", "narrow": "all weights, in bf16"}
PROBED = 4
"""Steps of each mode behind its first one: the next may compile too, and a machine has slow seconds."""
LORA = {"r": 8, "alpha": 16.0}
WORKER = Path(__file__).with_name("finetune_worker.py")


class Steps:
    """A side that takes a step on request, and is stopped meanwhile; it has taken its first one."""

    def __init__(self, stack: ExitStack, name: str, command: Sequence[str], request: Mapping[str, Any]) -> None:
        self.worker = stack.enter_context(Worker(Side(name, tuple(command)), rests=True))
        self.ms: list[float] = []
        self.peak = self.worker.ask("init", **request)["peak"]

    def step(self) -> None:
        """Take a step, and keep its time."""
        found = self.worker.ask("step")
        self.ms.append(found["ms"])
        self.peak = found["peak"]


def answer() -> None:
    """Take the steps of cpuopt, as a side."""
    taken: list[Callable[[], dict[str, Any]]] = []

    def init(request: Mapping[str, Any], say: Any) -> dict[str, Any]:
        from cpuopt.train.job import Settings, prepare

        lora = ",".join(f"{name}={x:g}" for name, x in LORA.items()) if request["lora"] else None
        B, T = request["size"]
        clock = time.process_time if request["busy"] else time.perf_counter
        threads = 1 if request["busy"] else None
        narrow = {"weights": "bf16", "moments": "bf16"} if request["narrow"] else {}
        how = {"steps": 10**6, "val_every": 0, "threads": threads, "dtype": "bf16", **narrow}
        job = prepare(Settings(model=request["model"], B=B, T=T, lora=lora, **how))

        def step() -> dict[str, Any]:
            start = clock()
            job.take_step()
            return {"ms": (clock() - start) * 1e3, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}

        taken[:] = [step]
        return step()

    serve({"init": init, "step": lambda request, say: taken[0]()})


OURS = sys.executable, __file__, "--side"


def peer_of(stack: ExitStack, request: Mapping[str, Any], mode: str, python: str) -> Steps:
    """Start the peer in a mode."""
    threads = 1 if request["busy"] else len(os.sched_getaffinity(0))
    return Steps(stack, mode, (python, str(WORKER)), {**request, "mode": mode, "threads": threads})


def probed(request: Mapping[str, Any], python: str, modes: Sequence[str]) -> dict[str, dict[str, float]]:
    """Take a few steps of the peer in each mode; return the time of the fastest and the peak by mode."""
    found = {}
    for mode in modes:
        with ExitStack() as stack:
            side = peer_of(stack, request, mode, python)
            for _ in range(PROBED):
                side.step()
        found[mode] = {"ms": min(side.ms), "gb": side.peak / 1e6}
        print(f"# {request['model']} {request['lora']}: {mode}: {found[mode]}", file=sys.stderr)
    return found


def measured(
    model: str, size: str, what: str, python: str, rounds: int, busy: bool, tried: Sequence[str]
) -> dict[str, Any]:
    """Compare one case."""
    B, T = map(int, size.split("x"))
    config, kind = models.parse(model), {"lora": what == "lora", "narrow": what == "narrow"}
    request = {"model": model, "config": config.to_transformers(), "size": (B, T), "busy": busy, **kind, **LORA}
    modes = probed(request, python, tried)
    mode = min(modes, key=lambda m: modes[m]["ms"])
    with ExitStack() as stack:
        Steps(stack, "cpuopt", OURS, request)  # if kernels are to be compiled, it needs the memory for that
    with ExitStack() as stack:
        sides = Steps(stack, "cpuopt", OURS, request), peer_of(stack, request, mode, python)
        for n in range(2 * rounds + 1):
            for side in sides if n % 2 else sides[::-1]:
                side.step()
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
    if "--side" in sys.argv:
        answer()
        return
    a = recorded(p, table, "kept")
    if not a.peer_python:
        p.error("--peer-python PATH is needed: a Python that has torch, transformers and peft")
    ask = "import json, peft, torch, transformers as t; m = (torch, t, peft); "
    ask += "print(json.dumps({x.__name__: x.__version__ for x in m}))"
    versions = json.loads(subprocess.run([a.peer_python, "-c", ask], check=True, capture_output=True).stdout)
    tried = [mode for mode in MODES if not (a.eager and mode.endswith("compiled"))]
    record = begun("finetune", versions=versions, rounds=a.rounds, busy=a.busy, rows=list[dict[str, Any]]())
    if before := known(a.out):
        if apart := [n for n, (one, other) in conditions(record, before).items() if one != other]:
            p.error(f"--out {a.out}: its record has another {apart[0]}; name a new file")
        record = before
    rows = record["rows"]
    kept = [(row["model"], row["size"], kind_of(row)) for row in rows]
    for model, size in (case.split(":") for case in a.cases.split(",")):
        for what in (x for x in a.only if (model, size, x) not in kept):
            rows.append(measured(model, size, what, a.peer_python, a.rounds, a.busy, tried))
            rows.sort(key=lambda row: row["model"], reverse=True)  # the new one behind those of its model
            print("\n".join(table(record)), flush=True)
            keep(record, a.out)


if __name__ == "__main__":
    main()

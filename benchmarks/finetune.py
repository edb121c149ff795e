"""Fine-tuning beside transformers and PEFT: whole steps and peak memory, full and LoRA, of random weights.

::

    python benchmarks/finetune.py --peer-python PATH [--cases smollm2-135M:4x256,qwen3-0.6B:2x256] [--rounds 4]

``PATH`` needs torch, transformers and peft. Each side runs in a process of its own, which is stopped while the other
is on trial. A trial is one step; a side's time is the median of its trials. The peer runs in each of its modes:
autocast to bfloat16 over float32 weights, all of the base model in bfloat16, and each of them compiled. Only the
fastest is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

MODES = ("autocast", "bfloat16", "autocast, compiled", "bfloat16, compiled")
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
    import time

    request = json.loads(sys.stdin.readline())
    from cpuopt.train.job import Settings, prepare

    lora = ",".join(f"{name}={x:g}" for name, x in LORA.items()) if request["lora"] else None
    B, T = request["size"]
    job = prepare(Settings(model=request["model"], B=B, T=T, lora=lora, dtype="bf16", steps=10**6, val_every=0))
    line, start = {}, time.perf_counter()
    while True:
        job.take_step()
        line = {"ms": (time.perf_counter() - start) * 1e3, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
        print(json.dumps(line), flush=True)
        sys.stdin.readline()
        start = time.perf_counter()


def row(model: str, size: str, lora: bool, python: str, rounds: int) -> str:
    """Compare one case; return the line of the table."""
    from cpuopt import models

    B, T = map(int, size.split("x"))
    config = models.parse(model)
    request = {"model": model, "config": config.to_transformers(), "size": (B, T), "lora": lora, **LORA}
    ours = Side(sys.executable, Path(__file__), request)
    best: tuple[float, str, float, float] | None = None
    try:
        for mode in MODES:
            peer = Side(python, WORKER, {**request, "mode": mode, "threads": len(os.sched_getaffinity(0))})
            try:
                ours.ms.clear()
                for n in range(2 * rounds + 1):
                    for side in (ours, peer) if n % 2 else (peer, ours):
                        side.step()
                a, b = (median(side.ms[1:]) for side in (ours, peer))
                print(
                    f"# {model} {size} {'LoRA' if lora else 'full'} {mode}: {a:,.0f} ms, {b:,.0f} ms", file=sys.stderr
                )
                if best is None or b < best[2]:
                    best = a, mode, b, peer.peak / 1e6
            finally:
                peer.end()
    finally:
        ours.end()
    assert best
    a, mode, b, peak = best
    cells = [f"{a:,.0f}", f"{b:,.0f} ({mode})", f"{b / a:.2f}", f"{ours.peak / 1e6:.2f}", f"{peak:.2f}"]
    return f"| {model} {size} {'LoRA' if lora else 'full'} | {' | '.join(cells)} |"


def main() -> None:
    """Measure and print a table."""
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--peer-python", help="a Python that has torch, transformers and peft")
    p.add_argument("--cases", default="smollm2-135M:4x256,qwen3-0.6B:2x256")
    p.add_argument("--rounds", type=int, default=4)
    p.add_argument("--side", action="store_true", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.side:
        serve()
    print("| case | cpuopt bf16, ms | transformers + PEFT, ms | ratio | cpuopt, GB | peer, GB |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for case in a.cases.split(","):
        for lora in (True, False):
            print(row(*case.split(":"), lora, a.peer_python, a.rounds), flush=True)


if __name__ == "__main__":
    main()

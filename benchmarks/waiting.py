"""Time of a training step by the way in which threads wait, alone and beside busy processes; docs/results/scaling.md.

    python benchmarks/waiting.py --threads 2 --busy 0 2 [--model gpt2-124M --size 1x16]

The ways are processes that take turns, in an order that reverses each round; the others are stopped meanwhile. A turn
begins with two seconds that do not count, in which ``follow`` may change how its threads wait.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from statistics import median

from flags import size

from cpuopt import machine
from cpuopt.isolate.process import Side, Worker
from cpuopt.isolate.serve import serve

WAYS = "follow", "spin", "sleep"
SETTLE_S = 2.0
"""The start of a turn that does not count."""


def answer(model: str, B: int, T: int, threads: int, seconds: float) -> None:
    """Train for some seconds at each request; answer with the median time of a step in ms."""
    import numpy as np

    from cpuopt import Engine, models

    config, module = models.load(model)
    engine = Engine(module, config.specs(B, T), threads=threads)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (B, T + 1))
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}

    def steps(seconds: float) -> list[float]:
        found, end = list[float](), time.perf_counter() + seconds
        while not found or time.perf_counter() < end:
            start = time.perf_counter()
            engine.step(**batch)
            found.append(1e3 * (time.perf_counter() - start))
        return found

    def turn(request, say):
        steps(SETTLE_S)
        return {"ms": median(steps(seconds)), "waiting": machine.describe()["waiting"]}

    serve({"start": lambda request, say: {}, "turn": turn})


def main() -> None:
    """Measure and print a table."""
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("--model", default="gpt2-nano", help="preset or JSON (gpt2-nano)")
    p.add_argument("--size", type=size, default="12x64", metavar="BxT")
    p.add_argument("--threads", type=int, nargs="+", default=[2])
    p.add_argument("--busy", type=int, nargs="+", default=[0, 2], help="processes that compute beside it")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--seconds", type=float, default=2, help="what counts of a turn")
    p.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    a = p.parse_args()
    B, T = map(int, a.size.split("x"))
    if a.serve:
        answer(a.model, B, T, a.serve, a.seconds)
        return
    for name in (*machine.THEIRS, machine.WAITING):
        os.environ.pop(name, None)
    print("| busy | threads | way | ms a step, median | of each turn | at the end |")
    print("| ---: | ---: | --- | ---: | --- | --- |")
    for busy in a.busy:
        with ExitStack() as stack:
            for _ in range(busy):
                stack.callback(subprocess.Popen([sys.executable, "-c", "while True: pass"]).kill)
            workers, turns = {}, {}
            for threads in a.threads:
                for way in WAYS:
                    environment = {machine.WAITING: way, "NUMBA_NUM_THREADS": str(threads)}
                    command = (sys.executable, *sys.argv, "--serve", str(threads))
                    worker = stack.enter_context(Worker(Side(way, command, {}, environment), rests=True))
                    worker.ask("start")
                    workers[threads, way], turns[threads, way] = worker, []
            for i in range(a.rounds):
                for key in list(workers)[:: -1 if i % 2 else 1]:
                    turns[key].append(workers[key].ask("turn"))
            for (threads, way), found in turns.items():
                ms, last = [turn["ms"] for turn in found], found[-1]["waiting"]
                each, now = " ".join(f"{x:.1f}" for x in ms), last.get("now", last["how"])
                changed = f", {last['changes']} changes" if "changes" in last else ""
                print(f"| {busy} | {threads} | {way} | {median(ms):.1f} | {each} | {now}{changed} |", flush=True)


if __name__ == "__main__":
    main()

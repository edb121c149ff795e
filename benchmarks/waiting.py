"""Time of a training step by the way in which threads wait, idle and with busy processes; docs/results/scaling.md.

    python benchmarks/waiting.py --threads 2 16 --busy 0 2

The ways take turns, in an order that reverses each round. ``chosen`` is cpuopt's own choice, made before the rounds
begin; ``short`` spins for some tens of microseconds and then sleeps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from statistics import median

from sizes import size

from cpuopt import machine

WAYS = {
    "chosen": {},
    "spin": {machine.WAITING: "spin"},
    "sleep": {machine.WAITING: "sleep"},
    "short": {"GOMP_SPINCOUNT": "1000"},
}


def serve(model: str, B: int, T: int, threads: int, seconds: float) -> None:
    """Train for some seconds at each line of stdin; print the median time of a step in ms."""
    import numpy as np

    from cpuopt import Engine, models

    config, module = models.load(model)
    engine = Engine(module, config.specs(B, T), threads=threads)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (B, T + 1))
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}
    engine.step(**batch)
    print(json.dumps(machine.describe()["waiting"]), flush=True)
    for _ in sys.stdin:
        found, end = list[float](), time.perf_counter() + seconds
        while not found or time.perf_counter() < end:
            start = time.perf_counter()
            engine.step(**batch)
            found.append(1e3 * (time.perf_counter() - start))
        print(median(found), flush=True)


def main() -> None:
    """Measure and print a table."""
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("--model", default="gpt2-nano", help="preset or JSON (gpt2-nano)")
    p.add_argument("--size", type=size, default="12x64", metavar="BxT")
    p.add_argument("--threads", type=int, nargs="+", default=[2, 16])
    p.add_argument("--busy", type=int, nargs="+", default=[0, 2], help="processes that compute beside it")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--seconds", type=float, default=1, help="length of a turn")
    p.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    a = p.parse_args()
    B, T = map(int, a.size.split("x"))
    if a.serve:
        serve(a.model, B, T, a.serve, a.seconds)
        return
    clean = {k: v for k, v in os.environ.items() if k not in (*machine.THEIRS, machine.WAITING)}
    print("| busy | threads | way | ms a step, median | of each turn |\n| ---: | ---: | --- | ---: | --- |")
    for busy in a.busy:
        with ExitStack() as stack:
            for _ in range(busy):
                stack.callback(subprocess.Popen([sys.executable, "-c", "while True: pass"]).kill)
            workers, turns = {}, {}
            for threads in a.threads:
                for way, more in WAYS.items():
                    command = [sys.executable, *sys.argv, "--serve", str(threads)]
                    environment = {**clean, **more, "NUMBA_NUM_THREADS": str(threads)}
                    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
                    worker = subprocess.Popen(command, env=environment, text=True, **pipes)
                    stack.callback(worker.kill)
                    workers[threads, way], turns[threads, way] = worker, []
                    print(f"<!-- {threads} threads, {way}: {worker.stdout.readline().strip()} -->")
            for i in range(a.rounds):
                for key in list(workers)[:: -1 if i % 2 else 1]:
                    workers[key].stdin.write("\n")
                    workers[key].stdin.flush()
                    turns[key].append(float(workers[key].stdout.readline()))
            for (threads, way), ms in turns.items():
                each = " ".join(f"{x:.1f}" for x in ms)
                print(f"| {busy} | {threads} | {way} | {median(ms):.1f} | {each} |", flush=True)


if __name__ == "__main__":
    main()

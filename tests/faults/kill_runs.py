"""Kill runs on chats at random steps, go on with each, and compare the end with a run that was not killed.

::

    python tests/faults/kill_runs.py KILLS [--ranks N ...] [FLAG ...]

Further flags go to ``cpuopt train``. With several numbers of ranks, each part of a run takes one of them, and one rank
is killed; that takes an environment with MPI, such as `make test-mpi` makes. An epoch has five steps, and every third
step is saved. Prints one JSON object; the exit status is 1 if a checkpoint was lost, or the end differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
from small_runs import command, only, steps_of
from test_mpi import result

from cpuopt.errors import UserError
from cpuopt.train import checkpoint

EPOCH, EVERY, T = 5, 3, 48
TRAIN = ["train", "--model", "llama-tiny", "--data", "c.jsonl", "-T", str(T), "-B", "1", "--total-batch", str(4 * T)]
TRAIN += ["--variant", "vanilla", "--lr", "1e-3", "--val-every", "7", "--save-every", str(EVERY)]


def started(ranks: int, *words: str) -> subprocess.Popen[str]:
    """Start a command that prints nothing here."""
    several = ["--ranks", str(ranks), "--oversubscribe"] if ranks > 1 else ["--threads", "1"]
    return command(*words, *several, stdout=subprocess.DEVNULL)


def ended(running: subprocess.Popen[str]) -> None:
    """Wait for a command that must succeed."""
    if status := running.wait():
        raise SystemExit(f"a run ended with status {status}")


def kill(running: subprocess.Popen[str], rng: random.Random) -> None:
    """Kill a rank, or the process if it is alone, and wait for the end."""
    process = psutil.Process(running.pid)
    rng.choice([p for p in process.children(recursive=True) if "mpi4py" in p.cmdline()[1:4]] or [process]).kill()
    running.wait()


def main() -> int:
    """Run, kill, look; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kills", type=int)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    args, flags = parser.parse_known_args()
    rng, seen = random.Random(0), {"kills": 0, "in_an_epoch": 0, "lost": 0, "differ": 0}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        said = ({"prompt": f"q{i}", "completion": "a" * (1 + i % 7)} for i in range(22))
        Path("c.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in said))
        running = started(rng.choice(args.ranks), *TRAIN, *flags, "--steps", "1000000", "--runs", "killed")
        for n in range(args.kills):
            until, deadline = max(steps_of("killed"), EVERY * (n == 0)) + rng.randint(1, 9), time.monotonic() + 300
            while steps_of("killed") < until:
                if running.poll() is not None or time.monotonic() > deadline:
                    running.kill()
                    raise SystemExit(f"the run has ended, or does not go on, after step {steps_of('killed')}")
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.02))
            kill(running, rng)
            run, done = only("killed"), steps_of("killed")
            seen["kills"] += 1
            try:
                saved = checkpoint.newest(run).state["step"]
            except UserError:
                seen["lost"] += 1
                break
            seen["lost"] += saved < done // EVERY * EVERY - EVERY  # that of the last step may be on its way
            seen["in_an_epoch"] += saved % EPOCH > 0
            last = ["--steps", str(done + 8)] if n == args.kills - 1 else []
            running = started(rng.choice(args.ranks), "train", "--resume", str(run), "--runs", "killed", *last)
        ended(running)
        steps = checkpoint.newest(run).state["step"]
        ended(started(1, *TRAIN, *flags, "--steps", str(steps), "--runs", "whole"))
        seen["differ"] += result("killed", steps) != result("whole", steps)
        seen["steps"] = steps
    print(json.dumps(seen))
    return 1 if seen["lost"] or seen["differ"] else 0


if __name__ == "__main__":
    sys.exit(main())

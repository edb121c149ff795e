"""Kill runs on chats in the middle of an epoch, go on with each, and compare the end with a run that was not killed.

::

    python tests/faults/kill_chats.py KILLS [--lora r=2]

Flags behind the number go to ``cpuopt train``. An epoch has five steps, and every third step is saved. Prints one JSON
object; the exit status is 1 if a checkpoint was lost, or a byte of the end differs.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from small_runs import command, only, steps_of

from cpuopt.errors import UserError
from cpuopt.train import checkpoint

EPOCH, EVERY = 5, 3
TRAIN = ["train", "--model", "llama-tiny", "--data", "c.jsonl", "-T", "48", "-B", "4", "--variant", "vanilla", "--lr"]
TRAIN += ["1e-3", "--val-every", "7", "--threads", "1", "--save-every", str(EVERY)]


def started(*words: str) -> subprocess.Popen[str]:
    """Start a command that prints nothing here."""
    return command(*words, stdout=subprocess.DEVNULL)


def ended(running: subprocess.Popen[str]) -> None:
    """Wait for a command that must succeed."""
    if status := running.wait():
        raise SystemExit(f"a run ended with status {status}")


def main() -> int:
    """Run, kill, look; return the exit status."""
    kills, flags, rng = int(sys.argv[1]), sys.argv[2:], random.Random(0)
    seen = {"kills": 0, "in_an_epoch": 0, "lost": 0, "differ": 0}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        said = ({"prompt": f"q{i}", "completion": "a" * (1 + i % 7)} for i in range(22))
        Path("c.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in said))
        running = started(*TRAIN, *flags, "--steps", "1000000", "--runs", "killed")
        for n in range(kills):
            until, deadline = max(steps_of("killed"), EVERY * (n == 0)) + rng.randint(1, 9), time.monotonic() + 300
            while steps_of("killed") < until:
                if running.poll() is not None or time.monotonic() > deadline:
                    running.kill()
                    raise SystemExit(f"the run has ended, or does not go on, after step {steps_of('killed')}")
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.02))
            running.kill()
            running.wait()
            run, done = only("killed"), steps_of("killed")
            seen["kills"] += 1
            try:
                saved = checkpoint.newest(run).state["step"]
            except UserError:
                seen["lost"] += 1
                break
            seen["lost"] += saved < done // EVERY * EVERY - EVERY  # that of the last step may be on its way
            seen["in_an_epoch"] += saved % EPOCH > 0
            last = ["--steps", str(done + 8)] if n == kills - 1 else []
            running = started("train", "--resume", str(run), "--runs", "killed", *last)
        ended(running)
        steps = checkpoint.newest(run).state["step"]
        ended(started(*TRAIN, *flags, "--steps", str(steps), "--runs", "whole"))
        tensors = (f"checkpoints/step-{steps:08d}/{x}.safetensors" for x in ("params", "adam_m", "adam_v"))
        for name in (*tensors, "main.log"):
            seen["differ"] += (run / name).read_bytes() != (only("whole") / name).read_bytes()
        seen["steps"] = steps
    print(json.dumps(seen))
    return 1 if seen["lost"] or seen["differ"] else 0


if __name__ == "__main__":
    sys.exit(main())

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
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

from cpuopt import cli
from cpuopt.errors import UserError
from cpuopt.train import checkpoint

EPOCH, EVERY = 5, 3
TRAIN = ["train", "--model", "llama-tiny", "--data", "c.jsonl", "-T", "48", "-B", "4", "--variant", "vanilla", "--lr"]
TRAIN += ["1e-3", "--val-every", "7", "--threads", "1", "--save-every", str(EVERY)]


def lines(run: Path) -> int:
    """Count the steps that a run has recorded."""
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def started(*words: str) -> int:
    """Start a command in a process without threads of its own; return the process."""
    child = os.fork()
    if not child:
        status = 9
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            status = cli.main([*words])
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return child


def ended(child: int) -> None:
    """Wait for a command that must succeed."""
    if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise SystemExit(f"a run ended with status {status}")


def only(root: Path) -> Path:
    """Return the one run of a folder; wait for it."""
    while not (found := [*root.glob("*")]):
        time.sleep(0.01)
    return found[0]


def main() -> int:
    """Run, kill, look; return the exit status."""
    kills, flags, rng = int(sys.argv[1]), sys.argv[2:], random.Random(0)
    seen = {"kills": 0, "in_an_epoch": 0, "lost": 0, "differ": 0}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        said = ({"prompt": f"q{i}", "completion": "a" * (1 + i % 7)} for i in range(22))
        Path("c.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in said))
        child = started(*TRAIN, *flags, "--steps", "1000000", "--runs", "killed")
        run = only(Path("killed"))
        for n in range(kills):
            before, deadline = lines(run), time.monotonic() + 300
            until = max(before, EVERY * (n == 0)) + rng.randint(1, 9)
            while lines(run) < until:
                over, _ = os.waitpid(child, os.WNOHANG)
                if over or time.monotonic() > deadline:
                    if not over:
                        os.kill(child, signal.SIGKILL)
                    raise SystemExit(f"the run {'has ended' if over else 'does not go on'} after step {lines(run)}")
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.02))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            done = lines(run)
            seen["kills"] += 1
            try:
                saved = checkpoint.newest(run).state["step"]
            except UserError:
                seen["lost"] += 1
                break
            seen["lost"] += saved < done // EVERY * EVERY - EVERY  # that of the last step may be on its way
            seen["in_an_epoch"] += saved % EPOCH > 0
            last = n == kills - 1
            child = started(
                "train", "--resume", str(run), "--runs", "killed", *(["--steps", str(done + 8)] if last else [])
            )
        ended(child)
        steps = checkpoint.newest(run).state["step"]
        ended(started(*TRAIN, *flags, "--steps", str(steps), "--runs", "whole"))
        whole = only(Path("whole"))
        for name in (*(f"{x}.safetensors" for x in ("params", "adam_m", "adam_v")), "main.log"):
            one, two = (
                (r / "main.log" if name == "main.log" else r / "checkpoints" / f"step-{steps:08d}" / name)
                for r in (run, whole)
            )
            seen["differ"] += one.read_bytes() != two.read_bytes()
        seen["steps"] = steps
    print(json.dumps(seen))
    return 1 if seen["lost"] or seen["differ"] else 0


if __name__ == "__main__":
    sys.exit(main())

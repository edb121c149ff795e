"""Kill a rank of a run at random instants, go on with another number of ranks, and compare what it computes in the end.

::

    python tests/faults/kill_ranks.py KILLS [SEED]

Each series is one run of 40 steps that is killed until it gets to its end, on 1, 2 or 4 ranks at a time. Its weights,
moments and log have to be those of a run that nobody disturbed. It takes an environment with MPI, such as the one that
`make test-mpi` makes. Prints one JSON object; the exit status is 1 if a checkpoint was lost or a result differs.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from threading import Thread

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_mpi import CPUOPT, TRAIN, Started, result, run

EVERY = int(TRAIN[TRAIN.index("--save-every") + 1])


class Listened(Started):
    """A run whose last step is known; `step` is 0 before the first, and `resumed` where it went on."""

    def __init__(self, size: int, runs: Path, *more: str) -> None:
        super().__init__(size, runs, *more)
        self.step, self.resumed = 0, 0
        self.listener = Thread(target=self._listen)
        self.listener.start()

    def _listen(self) -> None:
        for line in self.process.stdout:
            if at := re.match(r"step (\d+)/|goes on after step (\d+)", line):
                self.step = int(at[1] or at[2])
                self.resumed = int(at[2] or self.resumed)

    def killed(self, rng: random.Random) -> bool:
        """Kill a rank at some instant of its start or of its steps; False if the run was done before."""
        starting = rng.random() < 0.2
        wait = rng.uniform(0, 4 if starting else 0.6)
        while self.process.poll() is None and not (starting or self.step > self.resumed):
            time.sleep(0.01)
        time.sleep(wait)
        with suppress(psutil.NoSuchProcess, IndexError):
            rng.choice(self.ranks()).kill()
        self.process.wait(120)
        self.listener.join()
        return self.process.returncode != 0


def main() -> int:
    """Run, kill, go on, compare; return the exit status."""
    kills, rng = int(sys.argv[1]), random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    seen = {"kills": 0, "before_a_step": 0, "series": 0, "lost": 0, "differing": 0}
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder) / "alone"
        done = run([*CPUOPT, *TRAIN, "--runs", str(runs)])
        assert done.returncode == 0, done.stderr
        alone, runs, saved = result(runs), Path(folder) / "killed", 0
        while seen["kills"] < kills or runs.exists():
            more = ["--resume"] * any(runs.glob("*/checkpoints/step-*"))
            if not more:
                shutil.rmtree(runs, ignore_errors=True)
            started = Listened(rng.choice((1, 2, 4)), runs, *more)
            if seen["kills"] < kills:
                killed = started.killed(rng)
            else:
                started.process.wait(300)
                started.listener.join()
                killed = False
            seen["kills"] += killed
            seen["before_a_step"] += killed and started.step == started.resumed
            seen["lost"] += bool(more) and 0 < started.resumed < saved
            saved = max(saved, (started.step - 1) // EVERY * EVERY)  # a step follows the checkpoint before it
            if not killed:
                assert started.process.returncode == 0, started.process.stderr.read()
                seen["series"] += 1
                seen["differing"] += result(runs) != alone
                shutil.rmtree(runs)
                saved = 0
            print(json.dumps(seen), file=sys.stderr)
    print(json.dumps(seen))
    return 1 if seen["lost"] or seen["differing"] else 0


if __name__ == "__main__":
    sys.exit(main())

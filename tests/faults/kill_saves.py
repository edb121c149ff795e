"""Kill a process that saves checkpoints without end, at random instants, and look at what it leaves.

::

    python tests/faults/kill_saves.py RUNS [SEED]

Each run goes on from what the one before left. Parameters, m and v hold the number of their step, so that a mixture of
two steps shows. Prints one JSON object; the exit status is 1 if a checkpoint was lost or mixed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from cpuopt.comm import SERIAL
from cpuopt.errors import UserError
from cpuopt.models.gpt2 import PRESETS
from cpuopt.ops import adamw
from cpuopt.program.program import Value
from cpuopt.train import checkpoint


class Tensors:
    """What a checkpoint needs of an engine."""

    comm, divided, alone, torn = SERIAL, False, False, ""

    def __init__(self, step: float) -> None:
        names = [f"h.{i}.weight" for i in range(6)]
        values = [Value(n, (256, 64), "parameter") for n in names]
        optimizers = dict.fromkeys(values, adamw)
        self.program = SimpleNamespace(owned={}, parameters=values, trained=values, optimizers=optimizers)
        self.p, self.m, self.v = ({n: np.full((256, 64), step + d, np.float32) for n in names} for d in (0, 0.25, 0.5))

    def parameters(self):
        """Give the parameters."""
        return self.p

    def collect(self):
        """Do nothing: no rank has other parameters."""

    def states(self):
        """Give the optimizer's states."""
        return {"adam_m": self.m, "adam_v": self.v}


def state(step: int) -> dict[str, Any]:
    """Give the state of a run that has done some steps."""
    guard = {"skipped": 0, "recent": [], "windows": {"loss": [], "grad_norm": []}}
    return {"step": step, "updates": step, "model": "gpt2-tiny", "sizes": asdict(PRESETS["gpt2-tiny"]), "val": {}} | {
        "guard": guard, "settings": {}, "corpus": ""
    }  # fmt: skip


def save_without_end(run: Path, step: int) -> None:
    """Save step after step."""
    while True:
        step += 1
        checkpoint.save(run, Tensors(step), state(step), keep=2)  # type: ignore[arg-type]


def main() -> int:
    """Run, kill, look; return the exit status."""
    runs, rng = int(sys.argv[1]), random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    seen = {"runs": 0, "killed_in_a_save": 0, "newest_taken": 0, "one_before_taken": 0, "lost": 0, "mixed": 0}
    with tempfile.TemporaryDirectory() as folder:
        run, step = Path(folder), 1
        checkpoint.save(run, Tensors(step), state(step), keep=2)  # type: ignore[arg-type]
        for _ in range(runs):
            child = os.fork()
            if not child:
                try:
                    save_without_end(run, step)
                finally:
                    os._exit(9)
            time.sleep(rng.uniform(0.005, 0.06))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            seen["runs"] += 1
            seen["killed_in_a_save"] += any((run / "checkpoints").glob(".tmp-*"))
            try:
                found = checkpoint.newest(run)
            except UserError:
                seen["lost"] += 1
                break
            seen["one_before_taken" if found.passed_over else "newest_taken"] += 1
            seen["lost"] += found.state["step"] < step
            step, read = found.state["step"], Tensors(-1)
            checkpoint.load(found, read)  # type: ignore[arg-type]
            want = Tensors(step)
            for a, b in ((read.p, want.p), (read.m, want.m), (read.v, want.v)):
                seen["mixed"] += not all(np.array_equal(a[n], b[n]) for n in a)
            checkpoint.clean(run)
        seen["saved"] = step
    print(json.dumps(seen))
    return 1 if seen["lost"] or seen["mixed"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""Training steps of llm.c's own C program on this machine.

::

    gcc -Ofast -march=native -fopenmp -DOMP train_gpt2.c -lm -o train_gpt2    # in a checkout of llm.c
    python benchmarks/llmc.py path/to/train_gpt2

It trains GPT-2 124M at 4x64 on random weights and the builtin text, which are written in its formats, and is ended
after some steps: before its tenth step it would validate, and before its twentieth generate.
"""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

STEP = re.compile(rb"step (\d+): train loss [\d.]+ \(took ([\d.]+) ms\)")
STEPS = 9


def step_times(binary: Path, threads: int, steps: int = STEPS) -> list[float]:
    """Return the time of each of the first steps, in ms.

    Parameters
    ----------
    binary : the compiled ``train_gpt2``.
    threads : the number of OpenMP threads.
    steps : the number of steps, up to 10.

    Raises
    ------
    SystemExit
        For a program that cannot be started, or ends before it has taken these steps.
    """
    with TemporaryDirectory(prefix="cpuopt-llmc-") as folder:
        write_inputs(Path(folder))
        ours, its = pty.openpty()  # it fills a buffer for a pipe, and writes each line at once for a terminal
        try:
            process = subprocess.Popen(
                [binary.resolve()],
                cwd=folder,
                stdout=its,
                stderr=its,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            )
        except OSError as e:
            raise SystemExit(f"llmc: {str(binary)!r} cannot be started: {e.strerror or e}") from e
        finally:
            os.close(its)
        said = b""
        try:
            while len(found := STEP.findall(said)) < steps and (more := read(ours)):
                said += more
        finally:
            process.kill()
            process.wait()
            os.close(ours)
    if len(found) < steps:
        raise SystemExit(f"llmc: {str(binary)!r} ended after {len(found)} of {steps} steps: {said[-300:].decode()!r}")
    return [float(ms) for _, ms in found]


def read(terminal: int) -> bytes:
    """Read what was written to a terminal; nothing if its last writer has ended."""
    try:
        return os.read(terminal, 1 << 16)
    except OSError:
        return b""


def write_inputs(folder: Path) -> None:
    """Write the files that the program opens: weights of GPT-2 124M, and a text of two splits."""
    from cpuopt import models
    from cpuopt.data.corpus import load_corpus
    from cpuopt.data.tokens import write_tokens
    from cpuopt.weights import save_weights

    config, rng = models.parse("gpt2-124M"), np.random.default_rng(0)
    shapes = config.shapes()
    save_weights(folder / "gpt2_124M.bin", config, lambda name: rng.normal(0, 0.02, shapes[name]).astype(np.float32))
    corpus = load_corpus("builtin", vocab_size=config.vocab_size, T=64, B=4)
    data = folder / "dev" / "data" / "tinyshakespeare"
    data.mkdir(parents=True)
    batches = [corpus.batches("train", 4, 64, seed=0).at(i)[0].ravel() for i in range(2 * STEPS)]
    for split in ("train", "val"):
        write_tokens(data / f"tiny_shakespeare_{split}.bin", np.concatenate(batches))


def record(binary: Path, threads: int) -> dict[str, Any]:
    """Return the row of a record: each step but the first, and their median, in ms."""
    values = step_times(binary, threads)[1:]
    return {"step_ms": {"median": median(values), "min": min(values), "max": max(values), "values": values}}


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    print(json.dumps(record(Path(sys.argv[1]), os.cpu_count() or 1), indent=1))

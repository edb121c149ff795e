"""Ranks of cpuopt against PyTorch's DistributedDataParallel (gloo): time of a whole step, and whose bits stay.

::

    python benchmarks/peer_ddp.py --peer-python PYTHON [--ranks 2] [--model gpt2-124M] [-B 4] [-T 64] [--rounds 8]

Both start from the same weights and train on the same micro-batches with AdamW in float32, a thread a rank; their
processes take turns, step by step, and their first losses must agree. Then both take three steps of two micro-batches a
rank, with all ranks and with one that accumulates as many: the checksums of the weights show who keeps the model. (With
two micro-batches in all, both do: a sum of two numbers has one order.)
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from jobs import HERE, Job, ended

from cpuopt.comm.launch import module, mpiexec
from cpuopt.lab.peers.plan import OPTIMIZER
from cpuopt.measure.comparison import CHECKED_STEPS, compare, disagreement
from cpuopt.models import parse
from cpuopt.wording import spread

BATCHES = 8
"""Steps after which the micro-batches repeat."""


@dataclass(frozen=True)
class Task:
    """What both sides train."""

    folder: Path
    model: str
    B: int
    T: int
    micro_batches: int
    python: str

    def write(self) -> None:
        """Draw the micro-batches."""
        shape = BATCHES * self.micro_batches, self.B, self.T + 1
        ids = np.random.default_rng(0).integers(0, parse(self.model).vocab_size, shape)
        np.save(self.folder / "batches.npy", np.stack((ids[..., :-1], ids[..., 1:]), axis=1).astype(np.int32))

    @property
    def files(self) -> dict[str, str]:
        """Batches and initial weights, which cpuopt writes."""
        return {"batches": str(self.folder / "batches.npy"), "params": str(self.folder / "params.npz")}

    def ours(self, stack: ExitStack, size: int) -> Job:
        """Start ranks of cpuopt."""
        job = stack.enter_context(Job(mpiexec(size, module("rank_worker")), size, {"NUMBA_NUM_THREADS": "1"}))
        tokens = self.B * self.T
        settings = {"model": self.model, "B": self.B, "T": self.T, "total_batch": self.micro_batches * tokens}
        job.ask("init", settings={**settings, "threads": 1, **OPTIMIZER}, write=True, **self.files)
        return job

    def theirs(self, stack: ExitStack, size: int) -> Job:
        """Start ranks of PyTorch."""
        config = parse(self.model)
        start = [self.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        job = stack.enter_context(Job([*start, str(HERE / "ddp_worker.py")], size, environment))
        request: dict[str, Any] = {"mode": "eager", "threads": 1, "model": config.model, "sizes": asdict(config)}
        request |= {"T": self.T, "micro_batches": self.micro_batches, "optimizer": OPTIMIZER, **self.files}
        print(f"PyTorch {job.ask('init', **request)[0]['version']}, {size} ranks", file=sys.stderr)
        return job


def first_steps(job: Job) -> tuple[list[float], str]:
    """Take some steps; return the losses, averaged over ranks, and the checksum of the weights."""
    answers = job.ask("steps", n=CHECKED_STEPS)
    losses = [fmean(x) for x in zip(*(a["losses"] for a in answers), strict=True)]
    return losses, " ".join(sorted({f["crc"] for f in job.ask("facts")}))


def main() -> None:
    """Measure, and print."""
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--peer-python", default=sys.executable, help="a Python that has torch")
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--model", default="gpt2-124M")
    p.add_argument("-B", type=int, default=4)
    p.add_argument("-T", type=int, default=64)
    p.add_argument("--rounds", type=int, default=8)
    a = p.parse_args()
    names = "cpuopt", "DDP"
    crcs: dict[str, dict[int, str]] = {name: {} for name in names}
    with tempfile.TemporaryDirectory(prefix="cpuopt-ddp-") as folder:
        task = Task(Path(folder), a.model, a.B, a.T, a.ranks, a.peer_python)
        task.write()
        with ExitStack() as stack:
            jobs = task.ours(stack, a.ranks), task.theirs(stack, a.ranks)
            losses = [first_steps(job)[0] for job in jobs]
            if refused := disagreement(names, *losses):
                raise SystemExit(refused)
            ours, theirs = jobs
            times = compare(ours.step, theirs.step, analyses=[a.rounds], control=False, warm_up=False)
            peak = [max(f["peak"] for f in job.ask("facts")) / 1e6 for job in jobs]
        v = times.verdict()
        print(f"{a.model}, {a.ranks} ranks of 1 thread, {a.B}x{a.T} a rank; first losses {losses[0][0]:.6f}\n")
        for name, letter, mb in zip(names, "AB", peak, strict=True):
            print(f"{name}: {median(times.figures(letter)):,.0f} ms a step, {mb:,.0f} MB a rank at most")
        print(f"DDP / cpuopt: {spread(v.ratio)} ({v.level:g} % interval)\n", flush=True)
        more = replace(task, micro_batches=2 * a.ranks)
        more.write()
        print(f"| weights after {CHECKED_STEPS} steps | {a.ranks} ranks | 1 rank |\n| --- | --- | --- |")
        for name, start in zip(names, (more.ours, more.theirs), strict=True):
            for size in (a.ranks, 1):
                with ExitStack() as stack:
                    crcs[name][size] = first_steps(start(stack, size))[1]
            print(f"| {name} | {' | '.join(crcs[name].values())} |", flush=True)
    sys.exit(crcs["cpuopt"][a.ranks] != crcs["cpuopt"][1])


if __name__ == "__main__":
    with ended():
        main()

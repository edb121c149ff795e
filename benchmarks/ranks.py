"""Several ranks on this machine against one with all threads: time, memory, what a step's reduction costs.

::

    python benchmarks/ranks.py [--ranks 1,2,4] [--model gpt2-124M] [--dtype bf16] [-B 4] [-T 64] [--link MB/S ...]

Whole processes take turns, step by step, on the same total batch: one rank with a thread a core, and each other number
of ranks with the cores divided among them. The weights must have the same checksum after the same steps. Memory is that
of the arena, as planned and at the peak of the steps, with all states of the optimizer on each rank and with its part
of them. The last table is a model of ranks on several hosts: the bytes of a step, the time of one rank, and the speed
of a link.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

from jobs import Job, ended

from cpuopt.building import build
from cpuopt.comm import Comm
from cpuopt.comm.launch import module, mpiexec
from cpuopt.measure.comparison import compare
from cpuopt.models import parse
from cpuopt.program.fuse import FUSIONS
from cpuopt.program.program import Program
from cpuopt.train.settings import DTYPES
from cpuopt.wording import spread

LABELS = ("Exchange", "Wait for ranks", "Accumulate", "Copy")
GIGABIT = (118, 1180)
"""MB/s that links of 1 and 10 Gbit/s carry of data."""


@dataclass(frozen=True)
class Volume:
    """What a rank that shares no memory with the others sends in a step, and receives as much.

    Attributes
    ----------
    reduce, gather : bytes of gradients, and of updated weights.
    """

    reduce: int
    gather: int

    @staticmethod
    def of(program: Program) -> Volume:
        """Count the bytes of a rank's program."""
        sent = {"reduce": 0, "update": 0}
        for call in program.step_calls:
            if call.op.name == "exchange":
                sent[call.phase] += call.args["mine"].nbytes
        return Volume(sent["reduce"], sent["update"])

    def step_s(self, compute_s: float, link: float, hidden: float = 0.0) -> float:
        """Compute the time of a step.

        Parameters
        ----------
        compute_s : seconds that a rank computes.
        link : bytes a second in each direction.
        hidden : the part of the reduction that the backward hides.
        """
        return compute_s + (self.reduce * (1 - hidden) + self.gather) / link

    def break_even_s(self, ranks: int, link: float, hidden: float = 0.0) -> float:
        """Compute the seconds that a rank must compute in a step for all to train as fast as one rank alone."""
        return self.step_s(0.0, link, hidden) / (ranks - 1)


class Host(Comm):
    """The first of several ranks that share no memory, for a program that does not run."""

    def __init__(self, size: int) -> None:
        self.size = size


def volume(model: str, B: int, T: int, ranks: int, dtype: str = "float32") -> Volume:
    """Count the bytes of a model's step on some hosts."""
    config = parse(model)
    fuse = [name for name in FUSIONS if name != "update"]
    how = {"fuse": fuse, "comm": Host(ranks), "dtype": DTYPES[dtype]}
    return Volume.of(build(config.module(), config.specs(B, T), **how).program)


def rows(answers: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the ms of each label in the ranks' answers, averaged over ranks and steps."""
    found: dict[str, float] = {}
    steps = [(a["rows"], len(a["step_ms"])) for a in answers]
    for per_phase, n in steps:
        for name, ms in per_phase.items():
            label = name.partition("/")[2]
            found[label] = found.get(label, 0.0) + ms / n / len(steps)
    return found


@dataclass
class Ranks:
    """A job of some ranks with its settings.

    Attributes
    ----------
    start : the answers to its start, by rank.
    """

    size: int
    job: Job
    start: list[dict[str, Any]]

    @staticmethod
    def begun(stack: ExitStack, size: int, settings: Mapping[str, Any], **request: Any) -> Ranks:
        """Start a job."""
        threads = max(1, len(os.sched_getaffinity(0)) // size)
        job = stack.enter_context(Job(mpiexec(size, module("rank_worker")), size, {"NUMBA_NUM_THREADS": str(threads)}))
        return Ranks(size, job, job.ask("init", settings={**settings, "threads": threads}, **request))


def scaling_row(ranks: Ranks, ms: float, tokens: int, ratio: str) -> str:
    """Show the figures of a number of ranks, after two more steps that are timed call by call."""
    spent = rows(ranks.job.ask("steps", n=2))
    whole = sum(spent.values())
    facts = ranks.job.ask("facts")
    shares = " | ".join(f"{100 * spent.get(label, 0.0) / whole:.1f} %" for label in LABELS)
    cells = f"{ranks.size} | {facts[0]['threads']} | {ms:,.0f} | {tokens / ms * 1e3:,.0f} | {ratio} | {shares}"
    return f"| {cells} | {' '.join(sorted({f['crc'] for f in facts}))} |"


def scaling_table(sizes: Sequence[int], settings: Mapping[str, Any], rounds: int) -> Iterable[str]:
    """Compare the first number of ranks with each of the others."""
    if len(sizes) == 1:
        return
    yield f"| ranks | threads each | step, ms | tokens/s | time / that of {sizes[0]} | {' | '.join(LABELS)} | crc |"
    yield f"| ---: | ---: | ---: | ---: | --- | {'---: | ' * len(LABELS)}--- |"
    with ExitStack() as first_stack:
        first = Ranks.begun(first_stack, sizes[0], settings)
        for size in sizes[1:]:
            with ExitStack() as stack:
                other = Ranks.begun(stack, size, settings)
                found = compare(first.job.step, other.job.step, analyses=[rounds], control=False)
                if size == sizes[1]:
                    yield scaling_row(first, median(found.figures("A")), settings["total_batch"], "1")
                ratio = spread(found.verdict().ratio)
                yield scaling_row(other, median(found.figures("B")), settings["total_batch"], ratio)


def memory_table(size: int, settings: Mapping[str, Any]) -> Iterable[str]:
    """Compare the memory of a rank with all states and with its part of them."""
    planned, peak = [], []
    for zero in (0, 1):
        with ExitStack() as stack:
            ranks = Ranks.begun(stack, size, {**settings, "zero": zero})
            ranks.job.ask("steps", n=2)
            facts = ranks.job.ask("facts")
        planned.append(max(f["planned"] for f in facts))
        peak.append(max(f["peak"] - f["base"] for f in facts))
        yield f"| {size} | {zero} | {planned[-1] / 1e6:,.0f} | {peak[-1] / 1e6:,.0f} |"
    expected = 8 * (1 - 1 / size) * facts[0]["parameters"]
    fell = (f"{(all_ - part) / expected:.3f}" for all_, part in (planned, peak))
    yield f"| {size} | saved / 8 (1 - 1/W) bytes a parameter | {' | '.join(fell)} |"


def model_table(
    v: Volume, ranks: int, compute_s: float, tokens: int, links: Sequence[float], hidden: float
) -> Iterable[str]:
    """Show steps on several hosts, for some links."""
    for link in links:
        step = v.step_s(compute_s, link * 1e6, hidden)
        lost = 1 - compute_s / step
        even = v.break_even_s(ranks, link * 1e6, hidden)
        cells = f"{step:.2f} | {ranks * tokens / step:,.0f} | {100 * lost:.0f} %"
        yield f"| {link:,.0f} MB/s | {cells} | {even:.2f} s, {even / compute_s * tokens:,.0f} tokens |"


def main() -> None:
    """Measure, and print tables."""
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--ranks", default="1,2", help="numbers of ranks, the first of which the others are compared with")
    p.add_argument("--model", default="gpt2-124M")
    p.add_argument("--dtype", default="float32", choices=DTYPES, help="of what products and attention read")
    p.add_argument("-B", type=int, default=4)
    p.add_argument("-T", type=int, default=64)
    p.add_argument("--micro-batches", type=int, help="of a step, by default the largest number of ranks")
    p.add_argument("--rounds", type=int, default=8)
    p.add_argument("--link", type=float, nargs="+", default=GIGABIT, help="MB/s of a link between hosts")
    p.add_argument("--hosts", type=int, default=2, help="of the model, a rank each")
    p.add_argument("--hidden", type=float, default=0.0, help="part of the reduction that the backward hides, 0 to 1")
    p.add_argument("--no-memory", action="store_true", help="leave out the table of memory")
    a = p.parse_args()
    sizes = [int(n) for n in a.ranks.split(",")]
    total = (a.micro_batches or max(sizes)) * a.B * a.T
    settings = {"model": a.model, "B": a.B, "T": a.T, "dtype": a.dtype, "total_batch": total}
    print(f"{a.model}, {total} tokens a step in micro-batches of {a.B}x{a.T}, {len(os.sched_getaffinity(0))} cores\n")
    for line in scaling_table(sizes, settings, a.rounds):
        print(line, flush=True)
    if not a.no_memory:
        print("\n| ranks | `--zero` | planned, MB a rank | peak, MB |\n| ---: | --- | ---: | ---: |")
        for size in (n for n in sizes if n > 1):
            for line in memory_table(size, settings):
                print(line, flush=True)
    threads = max(1, len(os.sched_getaffinity(0)))
    with ExitStack() as stack:
        one = Ranks.begun(stack, 1, {**settings, "total_batch": a.B * a.T})
        compute_s = min(one.job.ask("steps", n=4)[0]["step_ms"]) / 1e3
    v = volume(a.model, a.B, a.T, a.hosts, a.dtype)
    print(f"\n{a.hosts} hosts, each with {threads} threads that take {compute_s:.2f} s for {a.B}x{a.T}; each sends")
    sent, gathered = (f"{n / 1e6:,.0f} MB" for n in (v.reduce, v.gather))
    print(f"{sent} of gradients, {100 * a.hidden:.0f} % of it hidden, and {gathered} of weights:\n")
    print("| link | step, s | tokens/s | lost to the link | break-even of a rank's step |")
    print("| --- | ---: | ---: | ---: | --- |")
    for line in model_table(v, a.hosts, compute_s, a.B * a.T, a.link, a.hidden):
        print(line)


if __name__ == "__main__":
    with ended():
        main()

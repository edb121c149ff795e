"""Where ranks run: what a launcher promised them, and the cores of each."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import UserError
from ..wording import count

LAUNCHERS = (
    ("mpiexec of Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mpiexec of MPICH", "PMI_SIZE", "PMI_RANK"),
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)
"""Launchers, with the variables that tell a process their number and its own; srun's come last, for it may start an
mpiexec. A batch script has no step, so that a process that is started there alone is alone."""


@dataclass(frozen=True)
class Promise:
    """What a launcher promised: so many ranks, of which this process is one."""

    launcher: str
    size: int
    rank: int


def promised(environment: Mapping[str, str] = os.environ) -> Promise | None:
    """Read the promise of the launcher that started this process; None if none did."""
    for launcher, *names in LAUNCHERS:
        numbers = [environment.get(name, "") for name in names]
        if all(n.isdecimal() for n in numbers):
            return Promise(launcher, *map(int, numbers))
    return None


OTHER = (
    "mpi4py belongs to another MPI; start it with the mpiexec of this environment, or srun with its --mpi (pmix, pmi2)"
)


def stale(promise: Promise) -> str:
    """Return the end of a message: what to do if the launcher's variables are left from elsewhere."""
    names = next(" and ".join(names) for launcher, *names in LAUNCHERS if launcher == promise.launcher)
    return f". {names} say that {promise.launcher} started this; if it did not, unset them"


def suits(promise: Promise, library: str) -> None:
    """Refuse an MPI that would end the process if it meets this launcher."""
    if "Open MPI" in promise.launcher and "Open MPI" not in library:
        raise UserError(f"{promise.launcher} started this, and the MPI here is {library}: {OTHER}")


def keeps(promise: Promise, size: int) -> None:
    """Refuse to train several models if one was asked for.

    Raises
    ------
    UserError
        Where MPI sees another number of ranks than the launcher promised.
    """
    if size != promise.size:
        raise UserError(
            f"{promise.launcher} promised {count(promise.size, 'rank')}, and MPI sees {count(size, 'rank')}: {OTHER}"
            f"{stale(promise)}"
        )


@dataclass(frozen=True)
class Here:
    """One rank's place before cores are split: its host, the cores it may use, the limit of its container in cores."""

    host: str
    cores: tuple[int, ...]
    quota: float | None = None


@dataclass(frozen=True)
class RankPlace:
    """One rank's place: its host, its cores, its threads."""

    host: str
    cores: tuple[int, ...]
    threads: int


def places(ranks: Sequence[Here], oversubscribe: bool = False) -> list[RankPlace]:
    """Split cores among ranks. Ranks of a host that may all use the same cores each get a part of them.

    Parameters
    ----------
    oversubscribe : whether ranks may share cores.

    Raises
    ------
    UserError
        If ranks would share cores otherwise.
    """
    found = []
    for rank, here in enumerate(ranks):
        mine = set(here.cores)
        peers = [r for r, other in enumerate(ranks) if other.host == here.host and other.cores == here.cores]
        limit = int(here.quota or len(mine)) or 1
        if len(peers) > min(len(mine), limit) and not oversubscribe:
            there = count(min(len(mine), limit), "core")
            raise UserError(
                f"{count(len(peers), 'rank')} on the {there} of {here.host}: ranks that share a core slow all down; "
                "start fewer, or allow it with --oversubscribe"
            )
        for r, other in enumerate(ranks[:rank]):
            if r not in peers and other.host == here.host and mine & set(other.cores) and not oversubscribe:
                raise UserError(
                    f"ranks {r} and {rank} on {here.host} may both use {named(mine & set(other.cores))}: give each "
                    "rank cores of its own, or all ranks of the host the same ones, or allow it with --oversubscribe"
                )
        cores = part(here.cores, peers.index(rank), len(peers))
        share = int(here.quota / len(peers)) if here.quota else len(cores)
        found.append(RankPlace(here.host, cores, max(1, min(len(cores), share))))
    return found


def part(cores: Sequence[int], i: int, n: int) -> tuple[int, ...]:
    """Return the i-th of n parts of some cores; if there are fewer cores than parts, one core of all."""
    ends = [len(cores) * k // n for k in (i, i + 1)]
    return tuple(cores[slice(*ends)]) or (cores[i % len(cores)],)


def named(cores: Iterable[int]) -> str:
    """Format a set of cores, as in ``cores 0-3, 8``."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1][1:] = [core]
        else:
            runs.append([core])
    return f"core{'s' * (len(runs) > 1 or len(runs[0]) > 1)} {', '.join('-'.join(map(str, run)) for run in runs)}"

"""Several ranks from the command line: to start them, to be one of them, and to end as one process would."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from .. import machine
from ..check.result import exit_status
from ..comm import Comm
from ..comm.agree import Agreement, CommonError
from ..comm.launch import Launch, Link, module, mpiexec, segments
from ..comm.places import Here, Promise, RankPlace, places, promised
from ..errors import UserError
from ..program.tree import divides
from ..train.settings import Settings
from ..wording import count
from .common import Parser

Trained = Callable[["Rank"], int]


class Rank:
    """A process as one of the ranks.

    Attributes
    ----------
    comm : the ranks.
    link : to the launcher, if it is ours.
    place : the cores and threads that this rank takes; None if it is alone.
    """

    def __init__(self, comm: Comm, link: Link, place: RankPlace | None = None) -> None:
        self.comm, self.link, self.place = comm, link, place


def flags(p: Parser, elastic: bool = False) -> None:
    """Add the flags of a verb that can run on several ranks."""
    p.option("--ranks", "Train one model in this many processes on this machine. Default: 1.", metavar="N", type=int)
    if elastic:
        words = "Restart with the ranks that are left if one of them dies."
        p.option("--elastic", words, False)
    p.set_defaults(elastic=False)
    p.option("--oversubscribe", "Allow --ranks to share cores.", False)


def run(args: Namespace, train: Trained) -> int:
    """Run the verb on as many ranks as are asked for; return its exit status.

    Parameters
    ----------
    train : does the work on each rank.
    """
    if args.ranks is not None and args.ranks < 1:
        raise UserError(f"--ranks {args.ranks}: expected 1 or more")
    promise = promised()
    link = Link(promise.rank) if promise else Link(0, "")
    if promise and (promise.size > 1 or link):
        return _as_rank(args, train, promise, link)
    if args.ranks is not None and args.ranks > 1:
        return _start(args)
    if args.elastic:
        raise UserError("--elastic: expected with --ranks 2 or more, whose launcher sees a rank die")
    return train(Rank(Comm(), link))


def _as_rank(args: Namespace, train: Trained, promise: Promise, link: Link) -> int:
    comm = Comm()
    mpi = None
    if promise.rank:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (until the process ends)
    try:
        if promise.size > 1:
            from ..comm.mpi import Mpi

            try:
                comm = mpi = Mpi(promise)
            except UserError as e:  # before ranks can speak to each other, so that each of them meets it
                raise CommonError(str(e)) from e
            link.tell(segments=segments())
        status = train(Rank(comm, link, _placed(args, comm, promise)))
    except CommonError as e:
        print(f"cpuopt: {e}", file=sys.stderr, flush=True)
        status = exit_status([e.word]) or 2
    except BaseException as e:
        _end_all(e, comm, link)
    sys.stdout.flush()
    comm.barrier()  # until the first rank has said all
    link.tell(status=status)
    if mpi:
        mpi.close()
    return status


def _end_all(e: BaseException, comm: Comm, link: Link) -> NoReturn:
    """End all ranks for an error of this one, which alone is shown."""
    status = exit_status([getattr(e, "word", "")]) or {UserError: 2, KeyboardInterrupt: 130}.get(type(e), 1)
    if isinstance(e, SystemExit):
        status = e.code if isinstance(e.code, int) else 1
    text = str(e) if isinstance(e, UserError) else "interrupted"
    if not isinstance(e, UserError | KeyboardInterrupt | SystemExit):
        text = "".join(traceback.format_exception(e)).rstrip()
    if link:
        link.tell(error=text, status=status)
    elif isinstance(e, UserError | Exception) or not comm.rank:
        print(f"cpuopt: rank {comm.rank} on {socket.gethostname()}: {text}", file=sys.__stderr__, flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # MPI adds nothing that helps
    comm.abort(status)
    raise AssertionError("abort does not return")


def _placed(args: Namespace, comm: Comm, promise: Promise) -> RankPlace:
    """Take this rank's part of the host's cores, before anything starts threads."""
    able = hasattr(os, "sched_getaffinity")
    cores = machine.side_by_side(os.sched_getaffinity(0) if able else range(os.cpu_count() or 1))
    there = comm.everyone([socket.gethostname(), cores, machine.quota()])
    with Agreement(comm):
        if args.ranks not in (None, comm.size):
            raise UserError(f"--ranks {args.ranks}: {promise.launcher} started {comm.size}; leave --ranks out")
        place = places([Here(h, tuple(c), q) for h, c, q in there], args.oversubscribe)[comm.rank]
    if able:
        os.sched_setaffinity(0, place.cores)
    return replace(place, threads=min(place.threads, machine.cores()))


def _start(args: Namespace) -> int:
    """Start the ranks on this machine; with ``--elastic``, again if one of them dies."""
    size, more = args.ranks, list[str]()
    while True:
        program = module("cpuopt", *args.command, "--ranks", str(size), *more)
        job = Launch(mpiexec(size, program), size, _complain)
        status = job.run()
        if not (args.elastic and job.died):
            return status
        told, before = job.told, size
        if (left := fewer(told.get("micro_batches", size), size)) is None:
            _complain("--elastic: no rank is left")
            return status
        size, more = left, _continued(told)
        how = f"from {more[-1]}" if more[:1] == ["--resume"] else "from the beginning, for there is no checkpoint"
        _complain(f"--elastic: of {count(before, 'rank')} one died; the run goes on with {size}, {how}")


def fewer(micro_batches: int, size: int) -> int | None:
    """Return the largest smaller number of ranks that can share a step's micro-batches; None if there is none."""
    return next((w for w in range(size - 1, 0, -1) if divides(w, micro_batches)), None)


def _continued(told: dict[str, Any]) -> list[str]:
    """Return the flags by which a new job goes on where the old one died."""
    from ..train import checkpoint

    if run := told.get("run"):
        try:
            checkpoint.newest(Path(run))
        except UserError:
            pass
        else:
            return ["--resume", run]
    return ["--total-batch", str(told["total_batch"])] if "total_batch" in told else []


def _complain(text: str) -> None:
    print(f"cpuopt: {text}" if text else "", file=sys.stderr, flush=True)


def shared(asked: Settings, ranks: int) -> tuple[Settings, list[str]]:
    """Assign each rank a micro-batch if the settings do not say how many a step has; return a note on it too."""
    if asked.total_batch is not None or ranks == 1:
        return asked, []
    asked = replace(asked, total_batch=ranks * asked.B * asked.T)
    return asked, [f"a step is {ranks} micro-batches of {asked.B}x{asked.T}: --total-batch {asked.total_batch}"]


def facts(settings: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return what must be the same on all ranks before they read their data: flags and versions."""
    from ..files.reading import to_json
    from ..train.settings import flag

    flags = {flag(n): to_json(getattr(settings, n)) for n in names if n not in ("threads", "processes")}
    return flags | {f"the version of {name}:": version for name, version in machine.describe()["versions"].items()}

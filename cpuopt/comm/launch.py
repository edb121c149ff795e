"""``--ranks N``: mpiexec on this machine, and what its ranks tell the process that started it.

mpiexec only starts the ranks. They print through descriptors that the launcher sends them over a local socket, so a
terminal stays a terminal and mpiexec's own remarks do not mix in. Over the same socket a rank tells its error or its
exit status. If it closes without either, the rank was killed. If the launcher's end closes, the rank ends itself.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from ..errors import UserError
from ..wording import one_line

ADDRESS = "CPUOPT_LAUNCHER"
"""Environment variable: the launcher's socket."""
FOLDER = "cpuopt-ranks-"
"""The beginning of the name of its folder."""
ROOT = Path(__file__).resolve().parents[2]
STACKS = "Timeout ("
"""The beginning of what `watchdog.Watchdog` writes."""
STOP_S, STACKS_S = 3.0, 1.0
"""Seconds that other ranks may take to end after one has ended, and to write their stacks."""
OPEN_MPI = ("--bind-to", "none", "--map-by", ":OVERSUBSCRIBE")
HYDRA = ("-launcher", "fork", "-hosts", "localhost")
"""The ranks start here: in a shell of a Slurm allocation, Hydra would start them through srun."""
GFORKER = "mpiexec.gforker"
"""The launcher of MPICH that forks on one machine and opens no port. Hydra has one that listens on all interfaces."""
LOOPBACK = {
    "UCX_NET_DEVICES": "lo",
    "FI_TCP_IFACE": "lo",
    "FI_SOCKETS_IFACE": "lo",
    "OMPI_MCA_btl_tcp_if_include": "lo",
    "OMPI_MCA_oob_tcp_if_include": "lo",
    "PRTE_MCA_oob_tcp_if_include": "lo",
    "PMIX_MCA_ptl_tcp_if_include": "lo",
}
"""Environment variables by which MPI's libraries listen on the loopback interface alone."""


def segments() -> list[str]:
    """Return the files of memory that MPI shares between ranks; if one is killed, it leaves them behind."""
    with suppress(OSError):
        return sorted({*re.findall(r"/dev/shm/(?:mpich_|sm_segment)\S+", Path("/proc/self/maps").read_text())})
    return []


def unlink(files: Iterable[str]) -> None:
    """Remove those files that are still there."""
    for file in files:
        Path(file).unlink(missing_ok=True)


class Link:
    """A rank's end of the socket. Without a launcher of ours it does nothing.

    Parameters
    ----------
    rank : of this process.
    address : of the launcher's socket, or ``""``.
    """

    def __init__(self, rank: int, address: str = os.environ.get(ADDRESS, "")) -> None:
        self._socket: socket.socket | None = None
        if not address:
            return
        self._address = Path(address)
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(address)
        except OSError as e:  # the launcher was killed before its ranks began
            self._socket.close()
            self._clean()
            raise UserError(f"{ADDRESS}={address}: no launcher is there ({e.strerror}); if none runs, unset it") from e
        self.tell(rank=rank, pid=os.getpid())
        _, shown, _, _ = socket.recv_fds(self._socket, 1, 2)
        for mine, theirs in zip((1, 2), shown, strict=True):
            os.dup2(theirs, mine)
            os.close(theirs)
        threading.Thread(target=self._watch, daemon=True).start()

    def __bool__(self) -> bool:
        return self._socket is not None

    def fileno(self) -> int | None:
        """Return the descriptor to which stacks are written; None without a launcher of ours."""
        return self._socket.fileno() if self._socket else None

    def tell(self, **what: Any) -> None:
        """Tell the launcher something; all else fails too if it is gone."""
        if self._socket:
            with suppress(OSError):
                self._socket.sendall(json.dumps(what).encode() + b"\n")

    def _watch(self) -> NoReturn:
        assert self._socket
        with suppress(OSError):
            self._socket.recv(1)
        unlink(segments())
        self._clean()
        os._exit(1)  # the launcher is gone, whatever runs here

    def _clean(self) -> None:
        """Remove the socket of a launcher that was killed, and its folder."""
        with suppress(OSError):
            if self._address.is_socket() and self._address.parent.name.startswith(FOLDER):
                self._address.unlink()
                self._address.parent.rmdir()


@dataclass
class _Rank:
    """The launcher's view of a rank."""

    socket: socket.socket
    rank: int = -1
    pid: int = 0
    buffer: bytes = b""
    stacks: list[str] = field(default_factory=list)
    status: int | None = None


def mpiexec(size: int, program: Sequence[str]) -> list[str]:
    """Return the command that starts a program on some ranks of this machine.

    Raises
    ------
    UserError
        If there is no MPI.
    """
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise UserError(
            f"--ranks {size} needs MPI, and there is no mpiexec; install it with: pip install 'cpuopt[mpi]'"
        )
    version = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    if "MPICH" not in version and "HYDRA" not in version:
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        return [found, *OPEN_MPI, *root, *_n(size), *program]
    if (forking := Path(found).with_name(GFORKER)).exists():
        return [str(forking), *_n(size), *program]
    return [found, *HYDRA, *_n(size), *program]


def _n(size: int) -> list[str]:
    return ["-n", str(size)]


def module(name: str, *args: str) -> list[str]:
    """Return the command of a rank that runs a module; mpi4py ends all ranks if one does not handle an exception."""
    return [sys.executable, "-P", "-m", "mpi4py", "-m", name, *args]


LONGEST = 100
"""Bytes of a socket's path: Linux allows 107, others 103."""


class Launch:
    """A job of several ranks, from its start to its end.

    Parameters
    ----------
    command : what starts the ranks.
    size : their number.
    complain : called with each line that the user should see: why the job failed.

    Attributes
    ----------
    died : whether a rank ended without a word.
    told : what rank 0 told on the way, by name.
    """

    def __init__(self, command: Sequence[str], size: int, complain: Callable[[str], None]) -> None:
        self.command, self.size, self.complain = command, size, complain
        self.ranks: list[_Rank] = []
        self.signalled = 0
        self.failed = 0
        self.died = False
        self.told: dict[str, Any] = {}
        self.deadline = float("inf")
        self.segments: set[str] = set()

    def run(self) -> int:
        """Start the ranks, and wait until none is left; return the job's exit status."""
        with (
            tempfile.TemporaryDirectory(prefix=FOLDER) as folder,
            tempfile.TemporaryFile() as remarks,
            socket.socket(socket.AF_UNIX) as door,
            selectors.DefaultSelector() as selector,
        ):
            address = f"{folder}/ranks"
            if len(os.fsencode(address)) > LONGEST:
                where = f"TMPDIR={tempfile.gettempdir()}"
                raise UserError(f"{where}: a socket in it has a path of more than {LONGEST} bytes; set a shorter one")
            door.bind(address)
            door.listen(self.size)
            selector.register(door, selectors.EVENT_READ)
            path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
            loopback = LOOPBACK if sys.platform == "linux" else {}
            process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=remarks,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C reaches the launcher alone, which passes it on
                env={**loopback, **os.environ, ADDRESS: address, "PYTHONPATH": path},
            )
            with self._signals(process):
                self._listen(process, door, selector)
            unlink(self.segments)
            if not self.ranks and process.returncode and not self.signalled:
                remarks.seek(0)
                said = [x for x in remarks.read().decode(errors="replace").splitlines() if x.strip(" -=")]
                self.complain(f"mpiexec ended with status {process.returncode}: {one_line(' '.join(said[-3:]))}")
        return self._status(process.returncode)

    def _status(self, of_mpiexec: int) -> int:
        first = next((r.status for r in self.ranks if r.rank == 0), None)
        if first is not None:
            return first
        return 128 + self.signalled if self.signalled else self.failed or (1 if of_mpiexec else 0)

    @contextmanager
    def _signals(self, process: subprocess.Popen[bytes]) -> Iterator[None]:
        """Pass signals on to all ranks, as one process would get them."""

        def passed(number: int, frame: FrameType | None) -> None:
            self.signalled = number
            for r in self.ranks:
                self._send(r, number)
            if len(self.ranks) < self.size:  # while they start, nothing can be lost
                self._end_soon(0)

        heeded = [s for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) != signal.SIG_IGN]
        before = {s: signal.signal(s, passed) for s in heeded}
        try:
            yield
        finally:
            for s, handler in before.items():
                signal.signal(s, handler)
            self._kill(process)

    def _listen(self, process: subprocess.Popen[bytes], door: socket.socket, selector: selectors.BaseSelector) -> None:
        while process.poll() is None or any(r.socket.fileno() >= 0 for r in self.ranks):
            for key, _ in selector.select(0.1):
                if key.fileobj is door:
                    there, _ = door.accept()
                    selector.register(there, selectors.EVENT_READ, _Rank(there))
                elif self._hear(key.data):
                    selector.unregister(key.fileobj)
                    key.data.socket.close()
            if process.poll() is not None:
                self._end_soon(STOP_S)
            if time.monotonic() > self.deadline:
                return

    def _hear(self, r: _Rank) -> bool:
        """Read what a rank tells; return whether it has ended."""
        try:
            more = r.socket.recv(1 << 16)
        except ConnectionError:
            more = b""
        *lines, r.buffer = (r.buffer + more).split(b"\n")
        for line in lines:
            try:
                told = json.loads(line)
                self._heard(r, **told)
            except (ValueError, TypeError):
                self._stacks(r, line.decode(errors="replace"))
        if more:
            return False
        if r.status is None and not self.failed and not self.signalled:
            self.died = True
            self._fail(r, "ended without a word: it was killed, perhaps because memory ran out, or its code crashed", 1)
        return True

    def _heard(self, r: _Rank, **told: Any) -> None:
        if "pid" in told:
            r.rank, r.pid = told["rank"], told["pid"]
            self.ranks.append(r)
            socket.send_fds(r.socket, [b"!"], [1, 2])
        elif "error" in told:
            self._fail(r, told["error"], told["status"])
        elif "status" in told:
            r.status = told["status"]
            if r.rank == 0:
                self._end_soon(STOP_S)
        else:
            self.told |= told
            self.segments |= {*told.get("segments", [])}

    def _stacks(self, r: _Rank, line: str) -> None:
        """Show stacks, which a rank writes if a step does not end; those of other ranks follow at once."""
        if line.startswith(STACKS):
            self.failed = 1
            self.complain(f"rank {r.rank}: a step, or what follows it, did not end; the stacks:")
            self._end_soon(STACKS_S)
        else:
            self.complain(f"rank {r.rank}: {line}" if line else "")

    def _fail(self, r: _Rank, why: str, status: int) -> None:
        """End the job for the first error; the others follow from it."""
        if not self.failed:
            self.failed = status
            self.complain(f"rank {r.rank} on {socket.gethostname()}: {why}" if self.size > 1 else why)
        self._end_soon(0.5)

    def _end_soon(self, seconds: float) -> None:
        self.deadline = min(self.deadline, time.monotonic() + seconds)

    @staticmethod
    def _send(r: _Rank, number: int) -> None:
        if r.socket.fileno() >= 0 and r.pid:  # its socket is open, so the number is still its own
            with suppress(ProcessLookupError):
                os.kill(r.pid, number)

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        """End whatever is left."""
        for r in self.ranks:
            self._send(r, signal.SIGKILL)
            r.socket.close()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

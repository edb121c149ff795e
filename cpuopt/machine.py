"""The computer: processor, caches, cores and memory that the process may use; without numba.

A container is a Linux control group (cgroup). Groups are nested, each may set a limit, and the least one binds. Version
2 has one tree; version 1 has one for each controller. ``/proc/self/cgroup`` names those of the process. Inside
a container that may be a path outside of it, whose folders do not exist; the container's own group is then the root.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from .errors import UserError

PACKAGES = ("cpuopt", "numba", "llvmlite", "numpy", "threadpoolctl")
DEVICES = Path("/sys/devices")
CACHES = DEVICES / "system/cpu/cpu0/cache"
GROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
PROC = Path("/proc")
LOAD = PROC / "loadavg"
HUGE = Path("/sys/kernel/mm/transparent_hugepage")
WAITING = "CPUOPT_WAITING"
"""The variable that chooses how threads wait."""
WAYS: dict[str, dict[str, str]] = {"follow": {}, "spin": {}, "sleep": {"OMP_WAIT_POLICY": "passive"}}
"""The ways of waiting, and the variables of OpenMP's runtime that bring them about. By itself the runtime spins for
milliseconds; threads that give up sooner are often needed just then, and a small model's step takes twice as long."""
ORDER, ORDERS = "CPUOPT_ORDER", ("pairs", "amx")
"""The variable for the order in which products of bfloat16 are added, and the orders (``kernels.toolkit.micro``)."""
THEIRS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables with which a user has chosen already."""


LEAST_ADDRESSES = 10**9
"""Bytes of address space below which LLVM ends the process when it loads a small model's kernels."""


def require_usable() -> None:
    """Refuse a process in which kernels cannot be loaded, or memory cannot be counted.

    Raises
    ------
    UserError
        Without ``/proc`` on Linux, or with little address space.
    """
    if sys.platform == "linux" and not (PROC / "self/stat").exists():
        raise UserError(f"{PROC} is not mounted, and only it tells how much memory is free; mount -t proc proc {PROC}")
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY and soft < LEAST_ADDRESSES:
        raise UserError(
            f"this process may have {soft // 10**6} MB of address space: compiled kernels need "
            f"{LEAST_ADDRESSES // 10**6} MB or more; raise 'ulimit -v'"
        )


def describe() -> dict[str, Any]:
    """Describe the machine and the versions that run on it."""
    from importlib.metadata import PackageNotFoundError, version  # late: the command line's help waits for this module

    import psutil

    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "unknown"
    return {
        "cpu": _cpu_name(),
        "cores": cores(),
        "cores_online": os.cpu_count(),
        "caches": {name: size for name, size, _ in caches()},
        "memory_bytes": psutil.virtual_memory().total,
        "numa_nodes": numa_nodes(),
        "pages": pages(),
        "load_average": list(os.getloadavg()),
        "waiting": dict(_waiting) or None,
        "system": platform.system(),
        "versions": versions,
    }


def origin() -> dict[str, str]:
    """Describe where a measurement comes from: cpu, time, commit and command; what is unknown is left out."""
    found = {"cpu": _cpu_name(), "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "commit": commit(), "command": command()}
    return {name: text for name, text in found.items() if text}


def command() -> str:
    """Return the command line of this process, with a short name of its program; empty if there is none."""
    name = Path(sys.argv[0]).name if sys.argv else ""
    if name in ("", "-c", "-m", "ipykernel_launcher.py"):
        return ""
    return shlex.join(["cpuopt" if name == "__main__.py" else name, *sys.argv[1:]])


def commit() -> str | None:
    """Return the commit of the checkout that this package runs from, with ``+`` if files differ from it."""
    root = Path(__file__).resolve().parents[1]
    return _commit(root, "-uno") if (root / ".git").exists() else None


def commits_of(files: Mapping[str, str]) -> dict[str, str | None]:
    """Return the commit of each file outside this package, of the file's repository, with ``+`` if the file differs.

    Parameters
    ----------
    files : by any names, such as those of kernels.
    """
    package = Path(__file__).resolve().parent
    paths = {name: Path(file).resolve() for name, file in files.items()}
    return {
        name: _commit(path.parent, "--", str(path))
        for name, path in paths.items()
        if path.is_file() and not path.is_relative_to(package)
    }


def _commit(folder: Path, *which: str) -> str | None:
    """Return the commit of the repository that a folder lies in, with ``+`` if ``git status`` of `which` lists any."""
    git = ["git", "-C", str(folder)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, timeout=10)
        changed = subprocess.run([*git, "status", "--porcelain", *which], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "") if head.returncode == 0 else None


ARM_CORES = {
    "0x41 0xd03": "Cortex-A53", "0x41 0xd05": "Cortex-A55", "0x41 0xd07": "Cortex-A57", "0x41 0xd08": "Cortex-A72",
    "0x41 0xd09": "Cortex-A73", "0x41 0xd0a": "Cortex-A75", "0x41 0xd0b": "Cortex-A76", "0x41 0xd0c": "Neoverse N1",
    "0x41 0xd0d": "Cortex-A77", "0x41 0xd40": "Neoverse V1", "0x41 0xd41": "Cortex-A78", "0x41 0xd44": "Cortex-X1",
    "0x41 0xd49": "Neoverse N2", "0x41 0xd4f": "Neoverse V2", "0x46 0x001": "A64FX", "0x48 0xd01": "Kunpeng 920",
    "0x61 0x022": "Apple M1 Icestorm", "0x61 0x023": "Apple M1 Firestorm", "0x61 0x032": "Apple M2 Blizzard",
    "0x61 0x033": "Apple M2 Avalanche", "0xc0 0xac3": "AmpereOne",
}  # fmt: skip
"""Names of cores by implementer and part, the fields of Arm's register MIDR, as Linux writes them."""


def _cpu_name() -> str:
    with suppress(OSError):
        if found := name_in((PROC / "cpuinfo").read_text()):
            return found
    return platform.processor() or platform.machine() or "unknown"


def name_in(cpuinfo: str) -> str:
    """Read the processor's name in the text of ``/proc/cpuinfo``; empty if there is none.

    On Arm, where Linux gives numbers, that is the names of all kinds of cores; an unknown one keeps its numbers.
    """
    fields = [(name.strip(), value.strip()) for name, _, value in (v.partition(":") for v in cpuinfo.splitlines())]
    if found := next((value for name, value in fields if name == "model name"), ""):
        return found
    vendors, parts = ([v for name, v in fields if name == f"CPU {field}"] for field in ("implementer", "part"))
    kinds = dict.fromkeys(map(" ".join, zip(vendors, parts, strict=False)))
    return " + ".join(ARM_CORES.get(kind, f"Arm core {kind}") for kind in kinds)


def caches() -> Iterator[tuple[str, str, str]]:
    """List the caches of a core: the name, as ``L1d``, the size, as ``32K``, and the processors that share it."""
    for index in sorted(CACHES.glob("index*")):
        with suppress(OSError):
            level, kind, size, cpus = (_read(index / f) for f in ("level", "type", "size", "shared_cpu_list"))
            yield f"L{level}{'' if kind == 'Unified' else kind[0].lower()}", size, cpus


def numa_nodes() -> dict[str, str]:
    """List the processors of each NUMA node, as ``0-3``, by its number; empty if the system names none."""
    found = {}
    for node in (DEVICES / "system/node").glob("node[0-9]*"):
        with suppress(OSError):
            found[node.name.removeprefix("node")] = _read(node / "cpulist")
    return {n: found[n] for n in sorted(found, key=int)}


def pages() -> dict[str, Any]:
    """Describe the pages of memory: sizes in bytes, the mode of transparent huge pages, and whether arenas get them.

    An arena asks for huge pages, which the system may give in the modes ``always`` and ``madvise``.
    """
    size, mode = None, None
    with suppress(OSError, ValueError):
        mode = _read(HUGE / "enabled").partition("[")[2].partition("]")[0] or None
        size = int(_read(HUGE / "hpage_pmd_size"))
    huge = hasattr(mmap, "MADV_HUGEPAGE") and mode in ("always", "madvise")
    return {"bytes": mmap.PAGESIZE, "huge_bytes": size, "huge_mode": mode, "arena": "huge" if huge else "small"}


def cores() -> int:
    """Count the cores to compute on: physical performance cores of this process's affinity, and its container's quota.

    A second thread of a core would share its pipes and caches, and an efficiency core would be waited for.
    """
    there = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    return max(1, min(count := len(_physical(_fast(there))), int(quota() or count)))


def _fast(processors: set[int]) -> set[int]:
    """Return the processors that belong to performance cores; all of them if there are no others.

    Linux lists Intel's performance cores as ``cpu_core``, and gives each of Arm's a capacity, 1024 the largest.
    """
    named = set()
    with suppress(OSError, ValueError):
        named = processors & listed(_read(DEVICES / "cpu_core/cpus"))
    if named:
        return named
    capacity = {}
    for n in processors:
        with suppress(OSError, ValueError):
            capacity[n] = int(_read(DEVICES / f"system/cpu/cpu{n}/cpu_capacity"))
    most = max(capacity.values(), default=0)
    return {n for n in processors if 2 * capacity.get(n, most) >= most}


def _physical(processors: set[int]) -> set[int]:
    """Return the first processor of each core; one of which nothing is known is a core."""
    return {min(_siblings(n) & processors) for n in processors}


def _siblings(n: int) -> set[int]:
    """Return the processors of a processor's core."""
    with suppress(OSError, ValueError):
        return {n} | listed(_read(DEVICES / f"system/cpu/cpu{n}/topology/thread_siblings_list"))
    return {n}


def side_by_side(processors: Iterable[int]) -> list[int]:
    """Sort processors so that those of a memory node, and in it those of a core, follow one another."""
    node = {n: i for i, cpus in enumerate(numa_nodes().values()) for n in listed(cpus)}
    return sorted(processors, key=lambda n: (node.get(n, 0), min(_siblings(n)), n))


def listed(text: str) -> set[int]:
    """Read a list of processors, as in ``0-3,8``."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        low, _, high = part.partition("-")
        found |= set(range(int(low), int(high or low) + 1))
    return found


def quota() -> float | None:
    """Return the limit of the container in cores, on average; None if there is none."""
    found = []
    for group in groups("cpu"):
        with suppress(OSError, ValueError):  # not there, or "max"
            used, period = map(int, _read(group / "cpu.max").split())
            found.append(used / period)
        with suppress(OSError, ValueError):
            used, period = int(_read(group / "cpu.cfs_quota_us")), int(_read(group / "cpu.cfs_period_us"))
            found += [used / period] if used > 0 else []
    return min(found, default=None)


LITTLE = 0.05
"""The share of a core, for each there is, that other processes may use without a warning."""


OTHERS = "other processes"
"""The first words of a warning about them."""


class Counted(Protocol):
    """A process whose use of the processors is known."""

    def cpu_s(self) -> float:
        """Return the CPU seconds it has used."""


class Others:
    """The use of the processors by other processes from now on; time taken by a hypervisor counts too.

    Processes that this one has started count as its own once they have ended.

    Parameters
    ----------
    workers : processes that count as this one.
    """

    def __init__(self, workers: Iterable[Counted] = ()) -> None:
        self.workers = list(workers)
        self._start = self._now()

    def cores(self) -> float:
        """Return their use since the start, in cores."""
        wall, busy = (b - a for a, b in zip(self._start, self._now(), strict=True))
        return max(0.0, busy / wall) if wall > 0 else 0.0

    def warnings(self) -> list[str]:
        """List a warning if the use is more than a little."""
        used = self.cores()
        return [f"{OTHERS} used {used:.2f} cores meanwhile"] if used > LITTLE * cores() else []

    def _now(self) -> tuple[float, float]:
        import psutil  # which takes a while, and most verbs need no figures of others

        t = psutil.cpu_times()
        busy = sum(getattr(t, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))
        return time.monotonic(), busy - sum(psutil.Process().cpu_times()[:4]) - sum(w.cpu_s() for w in self.workers)


_waiting: dict[str, Any] = {}
"""What `waiting` has chosen for this process, and what became of it."""


def waiting(threads: int) -> dict[str, Any]:
    """Choose how threads wait for work; the first choice stays, since threads start once.

    To spin finds the next work sooner. To sleep leaves the core to others: where there are more threads than cores,
    a thread that spins keeps the one that it waits for from running.

    Returns
    -------
    ``how``: ``follow`` the load, ``spin``, ``sleep`` or ``given``, by variables of the environment; and ``why``. With
    ``follow``, ``now`` is ``spin``, ``sleep``, or ``runtime`` where cpuopt cannot change it, and ``changes`` counts.

    Raises
    ------
    UserError
        For a value of ``CPUOPT_WAITING`` that is none of these.
    """
    if not _waiting:
        how, why = _choose(threads)
        _waiting.update(how=how, why=why)
        if how == "follow":
            _waiting.update(now="spin", changes=0)
    return _waiting


def waits(now: str) -> None:
    """Note how threads that follow the load wait from now on."""
    _waiting.update(now=now, changes=_waiting.get("changes", 0) + (now != "runtime"))


def beside_others() -> str:
    """Return the end of a warning: what to do about cores that are not this process's alone."""
    sleep = os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive" or os.environ.get(WAITING) == "sleep"
    todo = [] if sleep else ["set OMP_WAIT_POLICY=passive"]
    todo += ["take --threads 1"] if os.environ.get("NUMBA_NUM_THREADS") != "1" else ["measure again when they are idle"]
    return f"where others use the cores, {' or '.join(todo)}"


def _choose(threads: int) -> tuple[str, str]:
    if given := [f"{name}={os.environ[name]}" for name in THEIRS if name in os.environ]:
        return "given", " ".join(given)
    if way := os.environ.get(WAITING):
        if way not in WAYS:
            raise UserError(f"{WAITING}={way}: expected {', '.join(WAYS)}")
        return way, f"{WAITING}={way}"
    if threads > (there := cores()):
        return "sleep", f"{threads} threads on {there} cores"
    return "follow", f"{there} cores have room for {threads} threads"


def running(reads: int = 5, pause_s: float = 4e-3, watch_s: float = 0.2) -> int:
    """Count the other threads on this machine that run or could; 0 if that is unknown.

    That is the least of some reads and, if it is not 0, no more than the cores that others then use for a while.
    What only flares up, such as threads of the system and processes that end, is no load.
    """
    found = []
    for i in range(reads):
        time.sleep(pause_s if i else 0)
        with suppress(OSError, ValueError, IndexError):
            found.append(int(_read(LOAD).split()[3].partition("/")[0]) - 1)  # without this one
    least = max(0, min(found, default=0))
    if not least:
        return 0
    others = Others()
    time.sleep(watch_s)
    return min(least, round(others.cores()))


def throttled() -> int | None:
    """Return how often the quota stopped this process's group; None if that is not counted."""
    for group in groups("cpu"):
        with suppress(OSError, LookupError):
            return int(_fields(group / "cpu.stat")["nr_throttled"])
    return None


def memory_left() -> int | None:
    """Return the bytes that the container may still allocate; None if there is no limit.

    Its file cache counts as free, since the system drops it on demand.
    """
    found = []
    for group in groups("memory"):
        for limit, used in ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"):
            with suppress(OSError, ValueError):
                free = int(_read(group / limit)) - int(_read(group / used))
                found.append(max(0, free + _of_files(group, "total_" * limit.endswith("_in_bytes"))))
    return min(found, default=None)


def age() -> float:
    """Return the seconds since this process began."""
    import psutil

    return time.time() - float(psutil.Process().create_time())


def available_bytes() -> int:
    """The memory that can still be allocated: the free memory, or the limits of container and process."""
    import psutil

    free = [psutil.virtual_memory().available]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        free.append(soft - psutil.Process().memory_info().vms)
    if (left := memory_left()) is not None:
        free.append(left)
    return int(min(free))


def _of_files(group: Path, prefix: str) -> int:
    with suppress(OSError, ValueError):
        counts = _fields(group / "memory.stat")
        return sum(int(counts.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
    return 0


def groups(controller: str) -> Iterator[Path]:
    """List the folders of this process's groups, from the innermost, of both versions."""
    with suppress(OSError):
        for line in _read(MEMBERSHIP).splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            roots = (controllers, controller) if controllers else (".", "unified")
            for inner in (here := Path(path.lstrip("/")), *here.parents):
                yield from (GROUPS / root / inner for root in dict.fromkeys(roots))


def _read(path: Path) -> str:
    return path.read_text().strip()


def _fields(path: Path) -> dict[str, str]:
    """Read lines of a name and a value, which may be missing."""
    return {words[0]: " ".join(words[1:]) for line in _read(path).splitlines() if (words := line.split())}


def forget_peak() -> None:
    """Reset the peak of this process's memory to its current use, after giving free memory back, if the system can."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc's
        Path("/proc/self/clear_refs").write_text("5")


def peak_rss_bytes() -> int:
    """Return the most memory that this process has held, since `forget_peak`.

    Linux's own record comes first: ``getrusage`` starts from what the parent held when it started this process.
    """
    try:
        return int(_fields(PROC / "self/status")["VmHWM:"].split()[0]) * 1024
    except (OSError, LookupError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

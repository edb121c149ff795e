"""The measured roofs of this machine: multiply-adds by type, bandwidth of each level of memory, starts of threads.

The figures are kept in a file for each machine, beside the compiled kernels, and measured again on demand. A figure is
the best of many short samples: other processes can only lower a figure, and a roof is the highest possible one. So no
figure is below one that it must reach: that of fewer threads, that of the next level out, and what a call has reached.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from ..files import cache_folder, read_entry, write_entry
from ..files.reading import from_json, to_json
from ..kernels import roofs as kernels
from ..kernels.toolkit import threads as numba_threads
from ..machine import LITTLE, OTHERS, Others, caches, describe, listed, quota, running, throttled
from ..ops.storage import WIDE
from ..wording import four
from .roofline import BF16, FMA, INT8, PEAKS, Level, Roofs, TimedCall

FORMAT = 1
BY: dict[str, Any] = {"bf16_by": kernels.BF16_BY, "int8_by": kernels.INT8_BY}
"""What computes the peaks of a `Roofs` here."""
SAMPLE_S, SAMPLES_S = 5e-3, 0.12
"""Seconds of a sample, and of all samples of one figure, which are at least 3."""
LOOKS = 5
"""Samples by which the rounds of a sample are found."""
GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
USUAL = (("L1", 32 << 10, 1), ("L2", 512 << 10, 1), ("L3", 8 << 20, 0))
"""Caches assumed if the system does not list them; 0: shared by all."""
UNITS = {"K": 10, "M": 20}
"""The powers of two in sizes of caches."""
LOWER = 0.9
"""The share of the kept FMA roof that multiply-adds must reach now; below it a warning says that shares read low."""
MEASURED: set[int] = set()
"""The numbers of threads whose roofs this process has measured."""
PACKAGES = "Debian, Ubuntu: apt install libgomp1; Fedora: dnf install libgomp; macOS: brew install libomp"


def levels() -> tuple[Level, ...]:
    """List the caches and memory, from the nearest."""
    found = [
        Level(name.removesuffix("d"), int(size[:-1]) << UNITS[size[-1]], len(listed(cpus)) or 1)
        for name, size, cpus in caches()
        if not name.endswith("i") and size[:-1].isdigit() and size[-1] in UNITS
    ] or [Level(name, n, k or numba_threads.cores()) for name, n, k in USUAL]
    return (*found, Level("memory", None, numba_threads.cores()))


def default_counts() -> list[int]:
    """Return the numbers of threads that are measured: powers of two, and all there are."""
    most = numba_threads.set_threads(None)
    return sorted({*(2**i for i in range(most.bit_length())), most})


class Measurement:
    """Measures the roofs of some numbers of threads.

    Parameters
    ----------
    clock : in ns.
    samples_s : seconds for which one figure is sampled.
    say : called with each figure that is measured.
    """

    def __init__(
        self,
        clock: Callable[[], int] = time.perf_counter_ns,
        samples_s: float = SAMPLES_S,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.clock, self.samples_s, self.say = clock, samples_s, say
        self.levels = levels()
        self.x = np.full(kernels.UNIT, 0.5, WIDE)
        self.words = np.full(kernels.UNIT, 0x3F003F00, np.uint32).view(WIDE)  # 0.5 in both halves
        self.sums = np.zeros(256, WIDE)

    def run(self, counts: Iterable[int]) -> dict[int, Roofs]:
        """Measure and return the roofs by number of threads."""
        before = numba_threads.get_threads()
        counts = list(counts)
        self.x, most = np.empty(self.floats("memory", 1), WIDE), numba_threads.set_threads(max(counts))
        kernels.update(self.x, self.sums, most, self.floats("memory", most), 1)  # first touch: in each thread's node
        self.x.fill(0.5)
        others = Others()
        try:
            found = {n: self.roofs(n) for n in counts}
        finally:
            numba_threads.set_threads(before)
        busy = tuple(others.warnings())
        one = found.get(1)
        return {n: replace(r, doubts=(*busy, *(poor(r, one) if one else ()))) for n, r in found.items()}

    def roofs(self, n: int) -> Roofs:
        """Measure with n threads."""
        x, sums = self.x, self.sums
        self.say(f"{n} threads: starting them")
        launch = self.best(n, lambda k, rounds: [kernels.nothing(sums, k) for _ in range(rounds)])
        peaks: dict[str, Any] = {}
        for name, figure in PEAKS.items():
            self.say(f"{n} threads: {name}")
            peaks[figure] = self.peak(name, n)
        gbs: dict[str, dict[str, float]] = {}
        for level in self.levels:
            floats = self.floats(level.name, n)
            gbs[level.name] = {}
            for name, (stream, touched) in kernels.STREAMS.items():
                self.say(f"{n} threads: {level.name} {name}")
                run = partial(_stream, stream, x, sums, floats)
                gbs[level.name][name] = 4 * n * floats * touched / self.best(n, run)
        when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        return Roofs(n, self.levels, gbs=gbs, launch_us=launch / 1e3, measured=when, **peaks, **BY)

    def peak(self, name: str, n: int) -> float:
        """Measure the multiply-adds of n threads for a roof of `PEAKS`."""
        run, x, flops = {
            FMA: (kernels.fma, self.x, kernels.FLOPS),
            BF16: (kernels.bf16, self.words, kernels.BF16_FLOPS),
            INT8: (kernels.int8, self.words, kernels.INT8_FLOPS),
        }[name]
        return n * flops / self.best(n, lambda k, rounds: run(x, self.sums, k, rounds))

    def floats(self, level: str, n: int) -> int:
        """Choose the number of floats that a thread streams: half a level, and more than smaller levels hold."""
        at = [v.name for v in self.levels].index(level)
        if level == "memory":
            largest = max(v.nbytes or 0 for v in self.levels)
            total = min(max(8 * largest, 64 << 20), psutil.virtual_memory().available // 4)
        else:
            total = int(self.levels[at].holds(n) / 2)
        return int(total // 4 // n // kernels.UNIT) * kernels.UNIT

    def best(self, n: int, run: Callable[[int, int], object]) -> float:
        """Return the least ns of one round on n threads, over samples of about `SAMPLE_S`.

        The number of rounds in a sample is found on one thread, which does not have to wait for others.

        Parameters
        ----------
        run : called with the threads and the rounds.
        """
        numba_threads.set_threads(1)
        rounds = 1  # a core that is taken away in each of a few looks would end the search too early
        while (took := min(self.time(run, 1, rounds) for _ in range(LOOKS))) < SAMPLE_S * 1e9 / 2:
            rounds *= max(2, min(100, int(SAMPLE_S * 1e9 / max(took, 1))))
        numba_threads.set_threads(n)
        times: list[float] = []
        end = self.clock() + self.samples_s * 1e9
        while len(times) < 3 or self.clock() < end:
            times.append(self.time(run, n, rounds) / rounds)
        return min(times)

    def time(self, run: Callable[[int, int], object], n: int, rounds: int) -> float:
        """Return the ns of some rounds."""
        start = self.clock()
        run(n, rounds)
        return self.clock() - start


def _stream(stream: Any, x: Any, sums: Any, floats: int, n: int, rounds: int) -> None:
    stream(x, sums, n, floats, rounds)


def poor(r: Roofs, one: Roofs) -> list[str]:
    """List warnings if the figures of several threads are hardly better than one thread's."""
    if r.threads == 1:
        return []
    warnings = []
    if r.gflops < 1.2 * one.gflops:
        warnings.append(f"{r.threads} threads reach {r.gflops:.0f} GFLOP/s and one reaches {one.gflops:.0f}")
    slower = [v.name for v in r.levels if r.bandwidth(v.name) < 0.8 * one.bandwidth(v.name)]
    if slower:
        warnings.append(f"{r.threads} threads get less than one from {', '.join(slower)}")
    return warnings


# The kept figures------------------------------------------------------------------------------------------------------


def identity() -> dict[str, Any]:
    """Return the identity of this machine: all that the figures depend on."""
    m = describe()
    return {
        "cpu": m["cpu"],
        "cores": m["cores"],
        "caches": m["caches"],
        "memory_gb": round(m["memory_bytes"] / 1e9),
        "system": m["system"],
        "llvmlite": m["versions"]["llvmlite"],
    }


def machine_id() -> str:
    """Return the id of this machine: its processor, and a digest of its identity."""
    key = hashlib.sha256(json.dumps(identity(), sort_keys=True).encode()).hexdigest()
    return key[:12]


def folder() -> Path:
    """Return the folder of the kept facts of machines."""
    return cache_folder("machine")


def file() -> Path:
    """Return the file of this machine's roofs."""
    return folder() / f"{machine_id()}.roofs"


def stored() -> dict[int, Roofs]:
    """Read the roofs of this machine that were measured before; none if no file has them in this format.

    Roofs that lack a peak, or have one by another instruction, are left out: they are measured again.
    """
    entry = read_entry(file())
    content: dict[str, Any] = json.loads(entry) if entry else {"format": None}
    if content["format"] != FORMAT:
        return {}
    found = {int(n): from_json(Roofs, r) for n, r in content["roofs"].items()}
    return monotone(
        {
            n: r
            for n, r in found.items()
            if all(getattr(r, figure) for figure in PEAKS.values())
            and all(getattr(r, name) == instruction for name, instruction in BY.items())
        }
    )


def monotone(found: Mapping[int, Roofs]) -> dict[int, Roofs]:
    """Return roofs by number of threads, each at least as high as those of fewer threads and of levels further out."""
    made: dict[int, Roofs] = {}
    for n in sorted(found):
        made[n] = found[n].ordered(next(reversed(made.values()), None))
    return made


def better(old: Roofs, new: Roofs) -> Roofs:
    """Combine the better of each figure: a rate reached once is possible."""
    gbs = {v: {kind: max(x, old.gbs[v][kind]) for kind, x in kinds.items()} for v, kinds in new.gbs.items()}
    launch, doubts = min(old.launch_us, new.launch_us), new.doubts if old.doubts else ()
    return replace(new, **old.best_peaks(new), launch_us=launch, gbs=gbs, doubts=doubts)


def store(found: Mapping[int, Roofs]) -> dict[int, Roofs]:
    """Keep roofs beside earlier ones, and return all; roofs with warnings do not replace better figures."""
    known = stored()
    every = monotone(known | {n: better(known[n], r) if r.doubts and n in known else r for n, r in found.items()})
    content = {"format": FORMAT, "machine": identity(), "roofs": every}
    write_entry(file(), json.dumps(to_json(content), indent=1).encode())
    return every


def roofs(n: int, say: Callable[[str], None] = lambda text: None) -> Roofs:
    """Return the roofs of n threads: those that are kept, or measured now and kept.

    Roofs that were measured beside other processes are measured again as soon as the machine is quiet.
    """
    known = stored()
    if n in known and not (beside_others(known[n]) and n not in MEASURED and not running()):
        return known[n]
    MEASURED.add(n)
    return store(Measurement(say=say).run([n]))[n]


def raised(kept: Roofs, calls: Iterable[TimedCall]) -> tuple[Roofs, list[str]]:
    """Raise roofs that calls have passed, and say so.

    Roofs that are kept for this machine are first measured again, once a process, and the better of each figure is
    kept. Those of a record are raised for its report.

    Returns
    -------
    The roofs, and a line if one was raised.
    """
    over = [c for c in calls if c.ns < kept.bound(c.flops, c.nbytes, c.operands, c.held)[0]]
    n, best = kept.threads, kept
    mine = bool(over) and stored().get(n) == kept
    if mine and n not in MEASURED:
        MEASURED.add(n)
        best = better(kept, Measurement().run([n])[n])
    for call in over:
        best = best.proven(call)
    if mine and best != kept:
        best = store({n: best})[n]
    changed = [
        f"{name} from {four(old)} to {four(new)} {unit}"
        for name, old, new, unit in _figures(kept, best)
        if new > old * (1 + 1e-9)
    ]
    passed_by = ", ".join(dict.fromkeys(c.op for c in over))
    return best, [f"{passed_by} passed a roof, so these were raised: {'; '.join(changed)}"] if changed else []


def _figures(old: Roofs, new: Roofs) -> Iterator[tuple[str, float, float, str]]:
    for roof, name in PEAKS.items():
        yield roof, getattr(old, name) or 0.0, getattr(new, name) or 0.0, "GFLOP/s"
    yield from ((v.name, old.bandwidth(v.name), new.bandwidth(v.name), "GB/s") for v in old.levels)


def beside_others(kept: Roofs) -> bool:
    """Return whether other processes used the cores when roofs were measured."""
    return any(d.startswith(OTHERS) for d in kept.doubts)


def lower_now(kept: Roofs) -> list[str]:
    """List a warning if multiply-adds are now far below the kept roof: a slower clock, or a busy host.

    It takes `SAMPLES_S`.
    """
    now = Measurement().peak(FMA, kept.threads)
    if now >= LOWER * kept.gflops:
        return []
    return [
        f"multiply-adds reach {now:.0f} GFLOP/s just now, {100 * now / kept.gflops:.0f} % of the FMA roof of "
        f"{kept.measured[:10]}: shares of the roofs read low"
    ]


# What is noisy now ----------------------------------------------------------------------------------------------------


def noise(seconds: float = 0.5) -> dict[str, Any]:
    """Watch for half a second what disturbs measurements now.

    Returns
    -------
    ``others_cores``; ``busiest``, the processes that use most; ``load_average``; ``mhz`` and ``governor``, if they can
    be read; ``quota_cores`` of the container, and how often it was ``throttled``; ``steal`` in cores.
    """
    before, others = _cpu_by_process(), Others()
    stolen = getattr(psutil.cpu_times(), "steal", 0.0)
    time.sleep(seconds)
    used = {name: (cpu - before[key][1]) / seconds for key, (name, cpu) in _cpu_by_process().items() if key in before}
    frequency, governor = None, None
    with suppress(Exception):  # psutil raises whatever the system's files make it raise
        frequency = psutil.cpu_freq()
    with suppress(OSError):
        governor = GOVERNOR.read_text().strip()
    return {
        "others_cores": others.cores(),
        "busiest": [
            {"name": name, "cores": cores}
            for name, cores in sorted(used.items(), key=lambda u: -u[1])[:3]
            if cores > LITTLE
        ],
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else [],
        "mhz": frequency.current if frequency else None,
        "governor": governor,
        "quota_cores": quota(),
        "throttled": throttled(),
        "steal": (getattr(psutil.cpu_times(), "steal", 0.0) - stolen) / seconds,
    }


def _cpu_by_process() -> dict[int, tuple[str, float]]:
    found = {}
    for p in psutil.process_iter(["pid", "name", "cpu_times"]):
        times = p.info["cpu_times"]
        if times and p.info["pid"] != os.getpid():
            found[p.info["pid"]] = (f"{p.info['name']} ({p.info['pid']})", times.user + times.system)
    return found


SHARED = 0.6
"""The share of n times one thread's multiply-adds below which n threads are taken to share cores. A clock that falls
when all cores are busy takes less."""


def shared_cores(found: Mapping[int, Roofs]) -> str | None:
    """Describe threads that seem to share cores, which a hypervisor may hide; None if they do not."""
    n = max(found, default=1)
    if n == 1 or 1 not in found or found[n].doubts or found[n].gflops >= SHARED * n * found[1].gflops:
        return None
    times = found[n].gflops / found[1].gflops
    return (
        f"{n} threads reach {found[n].gflops:,.0f} GFLOP/s, {times:.1f} times one thread's {found[1].gflops:,.0f}: "
        "they seem to share cores, as two hyperthreads do, whatever the system lists"
    )


def lacks(found: Mapping[int, Roofs]) -> list[str]:
    """List what keeps this machine's threads from the speed that their number promises."""
    return [text for text in (slow_layer(), shared_cores(found)) if text]


def slow_layer() -> str | None:
    """Describe a slow threading layer and the remedy; None if the layer in use is fast."""
    layer = numba_threads.threading_layer()
    if layer in ("omp", "tbb", "none yet"):
        return None
    return (
        f"threads start by numba's '{layer}' layer, because no OpenMP runtime was found; with OpenMP they start "
        f"about 50 times faster. {PACKAGES}"
    )

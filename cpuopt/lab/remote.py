"""Kernels that run in another process: they take arrays, as any kernel does.

All that checks and times kernels here works on them unchanged. Their arrays lie in memory that both processes share, so
nothing is copied, and the expected results stay in this process.
"""

from __future__ import annotations

import mmap
import os
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..check.cases import Array, Case
from ..check.result import Result
from ..errors import CHEATING, RefusedError, UserError
from ..isolate.process import LIMIT_S
from ..kernels.registry import Kernel, Scratch
from ..kernels.toolkit import threads as numba_threads
from ..machine import available_bytes
from ..ops.declaration import Op
from .ab import Alone

ROOM = 16 << 30
"""Bytes of address space of the shared memory; only what is written takes memory."""
MUCH = 1 << 29
"""Bytes of arrays from which on it is asked whether the machine has memory for them."""
TRIAL_S = 2e-3
"""The length of a trial."""
WAITED = 0.02
"""The share of a sample for which threads may wait for a core, all together."""


class Shared:
    """Memory that this process and those of kernels see, and the parts of it that arrays hold: start and size."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("cpuopt-arrays")
        os.ftruncate(self.descriptor, ROOM)
        self.map = mmap.mmap(self.descriptor, ROOM)
        self.held: dict[int, int] = {}
        self.whole = np.frombuffer(self.map, np.uint8)
        self.start = int(self.whole.__array_interface__["data"][0])

    def room(self, words: int) -> Array:
        """Return so many words of it, which are free again once no array refers to them.

        Raises
        ------
        RefusedError
            If they are not there, or the machine has no memory for them.
        """
        need = -(-4 * words // mmap.PAGESIZE) * mmap.PAGESIZE
        most, at = ROOM if need < MUCH else min(ROOM, available_bytes()), 0
        for start, size in sorted(self.held.items()):
            if start - at >= need:
                break
            at = start + size
        if need > min(most, ROOM - at):
            raise RefusedError(
                f"needs {need >> 20:,} MB for the arrays of its calls and their scratch; expected up to "
                f"{most >> 20:,} MB"
            )
        self.held[at] = need
        found = np.ndarray((words,), np.uint32, self.map, at)
        weakref.finalize(found, self.held.pop, at)
        return found

    def spec(self, x: Any) -> Any:
        """Return an argument for a request: a number, or where an array lies."""
        if not isinstance(x, np.ndarray):
            return x.item() if isinstance(x, np.generic) else x
        at = int(x.__array_interface__["data"][0]) - self.start
        if x.size and not 0 <= at <= ROOM - x.nbytes:
            raise UserError("an array of a call does not lie in the shared memory")
        return {"at": at if x.size else 0, "shape": x.shape, "type": x.dtype.name}


Clocks = list[tuple[float, float]]
"""The ns of batches by the process of the kernel, and by this one."""


class KernelProcess(ABC):
    """A process that has kernels, which call arrays in memory that it shares with this one."""

    shared: Shared

    @abstractmethod
    def ask(self, do: str, function: Far, **more: Any) -> dict[str, Any]:
        """Send a request about a kernel, and wait for the answer."""

    def kernel(self, op: Op, side: str, about: Mapping[str, Any], own: Kernel | None = None) -> Kernel:
        """Return a kernel of the process, by what the process says about it.

        Parameters
        ----------
        own : the same kernel here, if it is the package's; it is compiled first, for the cache.
        """
        function = Far(self, side)

        def elements(i: int) -> Callable[[Mapping[str, int]], int]:
            return lambda sizes: int(self.ask("work", function, sizes=dict(sizes))["elements"][i])

        return Kernel(
            op,
            str(about["variant"]),
            function,
            tuple(Scratch(str(name), elements(i), str(dtype)) for i, (name, dtype) in enumerate(about["scratch"])),
            make=lambda types: self.compile(function, types, own),
            where=str(about["where"]),
            same_bits=bool(about["same_bits"]),
            narrow=bool(about["narrow"]),
            skips=tuple(map(str, about["skips"])),
        )

    def compile(self, function: Far, types: Mapping[str, str], own: Kernel | None = None) -> None:
        """Compile a kernel for arguments of some types; it is called with these from now on."""
        function.types = dict(types)
        if own:
            own.of(types).compile()
        answer = self.ask("compile", function, **({"limit_s": LIMIT_S} if own else {}))
        function.code, function.source = str(answer.get("code", "")), str(answer.get("source", ""))


@dataclass(eq=False)
class Far:
    """A kernel's function that runs in another process.

    Attributes
    ----------
    side : the name by which the process knows the kernel.
    """

    remote: KernelProcess
    side: str
    types: Mapping[str, str] = field(default_factory=dict)
    clocks: Clocks = field(default_factory=list)
    """Both clocks of each sample."""
    long: Clocks = field(default_factory=list)
    """Both clocks of batches that last."""
    code: str = ""
    """The digest of its machine code, once it is compiled."""
    source: str = ""
    """The digest of its sources, if the process tells it."""
    fenced: str = ""
    """``end`` or ``begin``: where the arrays of a call stand, at inaccessible pages; empty for where they lie."""
    known: dict[tuple[int, ...], tuple[int, Any]] = field(default_factory=dict)

    def __call__(self, *args: Any) -> None:
        """Call it once, on arrays in the shared memory."""
        more: dict[str, Any] = {"fenced": self.fenced} if self.fenced else {}
        specs = [self.remote.shared.spec(x) for x in args]
        self.remote.ask("call", self, args=specs, threads=numba_threads.get_threads(), **more)

    def batch(self, every: Sequence[Sequence[Any]], times: int = 1) -> tuple[float, float]:
        """Call it with each of some arguments, some times in a row.

        Returns
        -------
        The ns that all took by the clock of the process, and those for which its threads waited for a core meanwhile.
        """
        key, more = tuple(map(id, every)), dict[str, Any]()
        if key not in self.known:
            self.known[key] = len(self.known) * 2 + (self.side == "B"), every  # held, so that no id comes again
            more = {"calls": [[self.remote.shared.spec(x) for x in args] for args in every]}
        asked = {"key": self.known[key][0], "times": times, "threads": numba_threads.get_threads(), **more}
        start = time.perf_counter_ns()
        answer = self.remote.ask("batch", self, **asked)
        outside = time.perf_counter_ns() - start
        ns, waited = answer.get("ns"), answer.get("waited")
        if not isinstance(ns, int) or not isinstance(waited, int) or ns <= 0:
            raise RefusedError(f"told a time of {ns!r}", CHEATING)
        if not more:
            (self.clocks if times == 1 else self.long).append((float(ns), float(outside)))
        return float(ns), float(waited)


class AloneRemote(Alone):
    """Two kernels of other processes on the same arrays of one shape.

    A round whose trials waited for a core in most samples does not count: Linux tells how long threads did.
    """

    trial_s = TRIAL_S

    def __init__(self, kernels: Sequence[Kernel], shape: Case, *args: Any, **more: Any) -> None:
        self.calm = self.trials_disturbed = 0
        self.took: dict[str, list[float]] = {"A": [], "B": []}
        self.rounds_disturbed: list[bool] = []
        self.now: tuple[int, str, str] | None = None
        for k in kernels:
            k.typed(shape.types).compile()
        super().__init__(kernels, shape, *args, **more)

    def spend(self, side: str, every: Sequence[Sequence[Any]]) -> float:
        """Call a kernel with each of some arguments; return the ns by the clock of its process."""
        ns, waited = self.far(side).batch(every)
        self.calm += waited <= WAITED * ns
        return ns

    def trial(self, side: str, cold: bool | None = None) -> float:
        """Return the ns of a call; the lower quartile of the samples is of one in which no thread waited."""
        self.calm = 0
        ns = super().trial(side, cold)
        self.took[side].append(ns)
        self.trials_disturbed += self.calm <= (self.lengths[side][1] - 1) // 4
        return ns

    def conditions(self) -> tuple[int, str, str]:
        """Draw the content of the arrays once a round."""
        self.now = self.now or super().conditions()
        return self.now

    def disturbed(self) -> bool:
        """Return whether threads waited for a core in a trial of the round that ends now."""
        found, self.trials_disturbed, self.now = self.trials_disturbed > 0, 0, None
        self.rounds_disturbed.append(found)
        return found

    @property
    def busy(self) -> bool:
        """Whether threads waited for a core in more than half of all rounds: then times say little."""
        return 2 * sum(self.rounds_disturbed) > len(self.rounds_disturbed)

    def far(self, side: str) -> Far:
        """Return the function of a side."""
        function = self.functions[side]
        assert isinstance(function, Far)
        return function

    def finish(self) -> list[Result]:
        """Judge each once more; the functions release the arrays."""
        found = super().finish()
        for side in self.sides:
            self.far(side).known.clear()
        return found

    def _filling(self, side: str) -> float:
        start = time.perf_counter_ns()
        self.sample(side, "almost", "numbers")
        return time.perf_counter_ns() - start

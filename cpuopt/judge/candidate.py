"""The candidate and the baseline inside the sandbox, in the memory that it shares with the judge.

For each candidate the process forks, and the copy loads the text, compiles it, and calls it. So a candidate begins in a
process that ran no other, and starts in milliseconds. No wanted value is ever here: the judge compares on its side.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Any

import numpy as np

from .. import kernels
from ..check.cases import Case
from ..check.fences import Fenced, check_fenced
from ..check.judge import called
from ..errors import COMPILE_ERROR, UserError
from ..files.reading import from_json
from ..isolate.serve import PR_SET_PDEATHSIG, Say, doing
from ..kernels import registry
from ..kernels.compile import cache, jit, lines, remarks
from ..kernels.toolkit.threads import get_threads, set_threads
from ..lab.commit_worker import Served
from ..ops.storage import TYPES
from . import rules, seccomp
from .clock import Clock
from .seccomp import PARTS

MOST_BYTES = 4 << 30
"""Bytes that a candidate may allocate."""
HIGHEST, AROUND = 0x7000_0000_0000, 4 << 16
"""Below which address the shared memory lies, and the bytes around arrays that a call sees."""


def limit_memory() -> list[str]:
    """Let this process allocate `MOST_BYTES` more than it has; return what the system does not allow."""
    with suppress(OSError, ValueError, StopIteration), open("/proc/self/status") as f:
        held = next(int(line.split()[1]) << 10 for line in f if line.startswith("VmData:"))
        most = held + MOST_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        return []
    return [PARTS[4]]


def array_in(values: Mapping[str, Any]) -> str:
    """Return the name of a value that is an array, or has one in a tuple or in what a function captured; or ""."""
    for name, value in values.items():
        todo, seen = [value], set[int]()
        while todo:
            x = todo.pop()
            if isinstance(x, np.ndarray):
                return name
            if id(x) not in seen:
                seen.add(id(x))
                cells = getattr(getattr(x, "py_func", x), "__closure__", None) or ()
                todo += x if isinstance(x, tuple) else [cell.cell_contents for cell in cells]
    return ""


class Window:
    """Memory that is shared with the judge, at an address that nobody can guess; a call sees its own arrays alone.

    All else of it is inaccessible, so that no kernel finds a place there that outlasts a call.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.page, self.shown = mmap.PAGESIZE, (0, 0)
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.libc.mmap.restype = ctypes.c_void_p
        self.libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self.libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        hint = int.from_bytes(os.urandom(5), "little") * mmap.PAGESIZE % HIGHEST
        self.start = self.libc.mmap(hint, size, 0, mmap.MAP_SHARED, descriptor, 0)
        if self.start in (None, ctypes.c_void_p(-1).value):
            raise MemoryError(f"the shared memory, {size >> 30} GiB of addresses, cannot be mapped")
        self.memory = memoryview((ctypes.c_ubyte * size).from_address(self.start)).cast("B")

    def show(self, lo: int, hi: int) -> None:
        """Make these bytes accessible, and what lies around arrays; nothing, if there are none."""
        lo, hi = (max(0, lo - AROUND) // self.page * self.page, hi + AROUND) if hi > lo else (0, 0)
        hi = min(-(-hi // self.page) * self.page, len(self.memory))
        if self.shown != (lo, hi):
            for (a, b), access in (self.shown, 0), ((lo, hi), 3):
                if b > a and self.libc.mprotect(self.start + a, b - a, access):
                    raise MemoryError("the access to the shared memory cannot be changed")
            self.shown = lo, hi


def span_of(specs: Sequence[Any]) -> tuple[int, int]:
    """Return the bytes of the shared memory from the first array of some arguments to the end of the last one."""
    arrays = [x for x in specs if isinstance(x, dict) and prod(x["shape"])]
    ends = [x["at"] + prod(x["shape"]) * TYPES[x["type"]].bytes for x in arrays]
    return min((x["at"] for x in arrays), default=0), max(ends, default=0)


class ServedCandidate(Served):
    """The candidate of this process as side ``B``, and the kernel that it is compared with as ``A``.

    Attributes
    ----------
    window : the memory shared with the judge.
    missing : what does not close this process.
    """

    def __init__(self, shared: str, missing: list[str]) -> None:
        number, size = map(int, shared.split())
        self.window, self.missing, self.clock = Window(number, size), missing, Clock()
        os.close(number)
        super().__init__(self.window.memory)

    def ready(self, request: Mapping[str, Any], say: Say) -> dict[str, Any]:
        """Answer that the package is loaded, with what does not close the process."""
        return {"missing": self.missing}

    def open(self, request: Mapping[str, Any], say: Say) -> dict[str, Any]:
        """Fork; the copy loads a candidate and answers; this process waits, and tells how the copy ended."""
        if pid := os.fork():
            _, status = os.waitpid(pid, 0)
            return {"ended": signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "closed"}
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        self.missing += limit_memory()
        if not self.missing.count(PARTS[3]) and seccomp.install():
            self.missing = [part for part in self.missing if part not in PARTS[:2]]  # no sockets, and only reading
        else:
            self.missing.append(PARTS[5])
        before = set(registry.KERNELS)
        say("loading")  # from here on the text can be why this process ends
        module = kernels.load_file(request["file"], "the candidate", "@kernel functions", rules.NAMES, COMPILE_ERROR)
        mine = [k for key, k in registry.KERNELS.items() if key not in before and k.op.name == request["op"]]
        if len(mine) != 1:
            raise UserError(f"the candidate registers {len(mine)} kernels of {request['op']}; expected one")
        lasting = {k: x for k, x in vars(module).items() if k != "__builtins__"}
        if name := array_in(lasting | {f"scratch {s.name}": s.size for s in mine[0].scratch}):
            raise UserError(f"the candidate: {name!r} holds an array, which outlasts a call; constants are numbers")
        usual = registry.find(request["op"], request["against"])
        return {"missing": self.missing, "A": self.add("A", usual), "B": self.add("B", mine[0])}

    def use(self, threads: int) -> None:
        """Set the number of threads."""
        if get_threads() != threads:
            set_threads(threads)

    def span(self, specs: Sequence[Any]) -> tuple[int, int]:
        """Return the bytes from the first array to the end of the last one."""
        return span_of(specs)

    def show(self, span: tuple[int, int]) -> None:
        """Make these bytes accessible, and no others."""
        self.window.show(*span)

    def spend(self, function: Any, every: Sequence[Sequence[Any]], times: int) -> int:
        """Call a function with each of some arguments; return the ns by the compiled clock."""
        return self.clock.spend(function, every, times)

    def call(self, request: Mapping[str, Any], say: Say) -> dict[str, Any]:
        """Call a kernel once; with ``fenced``, on copies of its arrays between inaccessible pages."""
        kernel, args, span = self.kernel(request), self.args(request["args"]), span_of(request["args"])
        self.window.show(*span)
        given = args
        if request.get("fenced"):
            edges = [
                Fenced(x, at_end=request["fenced"] == "end", only_read=False) if isinstance(x, np.ndarray) else None
                for x in args
            ]
            given = [edge.array if edge else x for edge, x in zip(edges, args, strict=True)]
            self.window.show(0, 0)
        called(kernel, given, request["threads"])
        self.window.show(*span)
        for x, y in zip(args, given, strict=True):
            if x is not y:
                np.copyto(x, y)
        return {}

    def build(self, request: Mapping[str, Any], say: Say) -> dict[str, Any]:
        """Build a model in which the calls of the op switch between both kernels; return their layers, and losses.

        No step of it is judged here, which would take wanted values. ``unbuilt`` says why there is none: that is not
        the candidate's fault, which has not run.
        """
        from ..engine import Engine
        from ..lab.ab import Change, InStep
        from ..train.job import Settings, model_of, open_data, plan_of
        from ..train.settings import DATA, EXAMPLES
        from ..train.steps import TrainingSteps

        settings, model = model_of(Settings(**request["settings"]))
        data = open_data(model, **settings.some(*DATA, *EXAMPLES))
        try:
            engine = Engine.from_options(*plan_of(settings, model.config), seed=settings.seed)
        except (UserError, MemoryError, OSError) as e:
            return {"unbuilt": str(e) or type(e).__name__}
        batches = data.batches("train", settings.B, settings.T, seed=settings.seed)
        change = Change((self.kernels["A"], self.kernels["B"]))
        self.steps = InStep(TrainingSteps(settings, engine, batches), [change], audits=False)
        return {"layers": self.steps.layers[0], "losses": self.steps.losses()}

    def train(self, request: Mapping[str, Any], say: Say) -> dict[str, Any]:
        """Train for one step with a kernel; return the ns of the step and of the op's calls."""
        assert self.steps
        return {"ns": self.steps.trial(request["side"])}

    def fences(self, request: Mapping[str, Any], say: Say) -> dict[str, Any]:
        """Call a kernel on a small case, each array in turn between inaccessible pages; return the error, or ""."""
        case: Case = from_json(Case, request["case"])
        return {"wrong": check_fenced(self.kernel(request), case, request["threads"], request["seed"], doing)}

    def asm(self, request: Mapping[str, Any], say: Say) -> dict[str, Any]:
        """Compile a kernel once more, with its lines; return its machine code as text, its digest, and LLVM's remarks.

        All that this process compiles later has lines too.
        """
        kernel = self.kernel(request)
        lines.mark()
        with remarks.collected() as said:
            dispatcher, _ = jit.afresh(kernel)
        text, content, _ = lines.code(dispatcher.py_func.__qualname__)
        return {
            "asm": text,
            "code": cache.machine_code(content),
            "line": int(kernel.where.rpartition(":")[2]),
            "remarks": b"".join(said).decode(errors="replace"),
        }

    def done(self, request: Mapping[str, Any], say: Say) -> dict[str, Any]:
        """End the copy of the process that has a candidate."""
        os._exit(0)

"""The sandbox that runs candidates: ``python -m cpuopt.judge.child``, which `remote.Remote` starts.

It loads the package once. For each candidate it forks, and the copy loads the text, compiles it, and calls it on arrays
in memory that it shares with the judge. So a candidate begins in a process that ran no other, and starts in
milliseconds. No wanted value is ever here: the judge compares on its side.

Before anything is imported the process gives up what a kernel does not need: the network, writing files, seeing other
processes, privileges, memory and core dumps. `bwrap` does that where the machine has it, else private namespaces. The
copy that loads a candidate also has a filter on what it asks the system for.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from ..isolate.serve import PR_SET_PDEATHSIG
from . import seccomp

if TYPE_CHECKING:
    from ..isolate.serve import Handler, Say
    from ..kernels.registry import Kernel
    from ..lab.ab import InStep
    from .clock import Clock

SHARED = "CPUOPT_SHARED"
"""Environment variable: the descriptor of the shared memory, and its bytes."""
FILES = "CPUOPT_FILES"
"""Environment variable: the kernel files of who asks, as JSON, which are loaded before any candidate."""
CLOSED = "CPUOPT_CLOSED"
"""Environment variable: set if bwrap has closed the process already."""
MOST_BYTES, MOST_WRITTEN = 4 << 30, 1 << 20
"""Bytes that a candidate may allocate, and that it may add to files that were open before: its errors."""
NEW_USER, NEW_PLACES = 0x10000000, 0x00020000 | 0x40000000 | 0x08000000 | 0x20000000
"""Linux's flags of namespaces: of users; of mounts, the network, shared memory and processes."""
MOUNT_SETATTR, HERE, RECURSIVE, READ_ONLY = 442, -100, 0x8000, 1
PRIVATE, NO_DEVICES = 0x4000 | 0x40000, 0x2 | 0x4 | 0x8
NO_NEW_PRIVILEGES, DROP_CAPABILITY, CAPABILITIES = 38, 24, 41
CAPABILITY_VERSION = 0x20080522
HIGHEST, AROUND = 0x7000_0000_0000, 4 << 16
"""Below which address the shared memory lies, and the bytes around arrays that a call sees."""
PARTS = (
    *("no network", "no writable files", "no sight of other processes", "no privileges", "limits on memory"),
    "a filter on calls of the system",
)
"""What closes the process."""


def close() -> list[str]:
    """Do without what a kernel does not need; return those of `PARTS` that this system does not allow.

    The process forks, so that the copy is alone among its processes; this one waits, and ends as it does.
    """
    missing: list[str] = []
    libc = ctypes.CDLL(None, use_errno=True)
    if not os.environ.get(CLOSED):
        user, group = os.getuid(), os.getgid()
        if sys.platform != "linux" or libc.unshare(NEW_USER | NEW_PLACES):
            missing += PARTS[:3]
        else:
            for file, text in ("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1"):
                with suppress(OSError), open(f"/proc/self/{file}", "w") as f:
                    f.write(text)
            _go_on_in_a_copy()
            libc.mount(b"none", b"/", None, PRIVATE, None)
            if libc.mount(b"proc", b"/proc", b"proc", NO_DEVICES, None):
                missing.append(PARTS[2])
            attributes = ctypes.create_string_buffer(struct.pack("QQQQ", READ_ONLY, 0, 0, 0))
            if libc.syscall(MOUNT_SETATTR, HERE, b"/", RECURSIVE, attributes, ctypes.c_size_t(32)):
                missing.append(PARTS[1])
    if sys.platform != "linux" or libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        missing.append(PARTS[3])
    else:
        for capability in range(CAPABILITIES):
            libc.prctl(DROP_CAPABILITY, capability, 0, 0, 0)
        head, none = struct.pack("Ii", CAPABILITY_VERSION, 0), struct.pack("6I", *[0] * 6)
        libc.capset(ctypes.create_string_buffer(head), ctypes.create_string_buffer(none))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_WRITTEN, MOST_WRITTEN))
    return missing


def _go_on_in_a_copy() -> None:
    """Return in a copy of this process, the first of its namespace; the process itself waits and ends as the copy."""
    if pid := os.fork():
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != signal.SIGKILL else None
            os.kill(os.getpid(), os.WTERMSIG(status))
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


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
    import numpy as np

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
        import mmap

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
    from ..ops.storage import TYPES

    arrays = [x for x in specs if isinstance(x, dict) and prod(x["shape"])]
    ends = [x["at"] + prod(x["shape"]) * TYPES[x["type"]].bytes for x in arrays]
    return min((x["at"] for x in arrays), default=0), max(ends, default=0)


class Closed:
    """The candidate of this process, and the kernel that it is compared with.

    Attributes
    ----------
    window : the memory shared with the judge.
    missing : what does not close this process.
    kernels : the candidate ``B`` and the baseline ``A``.
    """

    def __init__(self, missing: list[str]) -> None:
        number, size = map(int, os.environ.pop(SHARED).split())
        self.window, self.missing = Window(number, size), missing
        os.close(number)
        self.kernels: dict[str, Kernel] = {}
        self.typed: dict[tuple[str, str], Kernel] = {}
        self.batches: dict[int, Any] = {}
        self.steps: InStep | None = None

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
        from .. import kernels
        from ..errors import COMPILE_ERROR, UserError
        from ..kernels import registry
        from . import rules

        before = set(registry.KERNELS)
        say("loading")  # from here on the text can be why this process ends
        module = kernels.load_file(request["file"], "the candidate", "@kernel functions", rules.NAMES, COMPILE_ERROR)
        mine = [k for key, k in registry.KERNELS.items() if key not in before and k.op.name == request["op"]]
        if len(mine) != 1:
            raise UserError(f"the candidate registers {len(mine)} kernels of {request['op']}; expected one")
        lasting = {k: x for k, x in vars(module).items() if k != "__builtins__"}
        if name := array_in(lasting | {f"scratch {s.name}": s.size for s in mine[0].scratch}):
            raise UserError(f"the candidate: {name!r} holds an array, which outlasts a call; constants are numbers")
        self.kernels = {"B": mine[0], "A": registry.find(request["op"], request["against"])}
        about: dict[str, Any] = {"missing": self.missing}
        for side, k in self.kernels.items():
            scratch = [[s.name, s.dtype] for s in k.scratch]
            about[side] = {"variant": k.variant, "scratch": scratch, "narrow": k.narrow, "skips": [*k.skips]}
            about[side] |= {"where": k.where, "others": [*k.others], "same_bits": k.same_bits}
        return about

    def kernel(self, request: Mapping[str, Any]) -> Kernel:
        """Return a kernel for the types of a request, compiled."""
        key = request["side"], repr(sorted(request["types"].items()))
        if key not in self.typed:
            found = self.kernels[request["side"]].of(request["types"])
            found.compile()
            self.typed[key] = found
        return self.typed[key]

    def compile(self, request: Mapping[str, Any], say: Say) -> dict[str, Any]:
        """Compile a kernel for some types, and return the digest of its machine code."""
        from ..kernels.compile import jit

        return {"code": jit.code_digest(self.kernel(request))}

    def work(self, request: Mapping[str, Any], say: Say) -> dict[str, Any]:
        """Return the lengths of a kernel's scratch."""
        from ..errors import UserError

        kernel = self.kernels[request["side"]].of(request["types"])
        try:
            return {"elements": [n for (n,), _ in kernel.work(request["sizes"]).values()]}
        except UserError:
            raise
        except Exception as e:
            raise UserError(f"{type(e).__name__}: {e}") from e

    def args(self, specs: Any) -> list[Any]:
        """Return arguments: numbers, and arrays in the shared memory."""
        import numpy as np

        from ..ops.storage import TYPES

        return [
            np.ndarray(x["shape"], TYPES[x["type"]].dtype, self.window.memory, x["at"]) if isinstance(x, dict) else x
            for x in specs
        ]

    def call(self, request: Mapping[str, Any], say: Say) -> dict[str, Any]:
        """Call a kernel once; with ``fenced``, on copies of its arrays between inaccessible pages."""
        import numpy as np

        from ..check.fences import Fenced
        from ..check.judge import called

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

    @cached_property
    def clock(self) -> Clock:
        """The compiled clock."""
        from .clock import Clock

        return Clock()

    def batch(self, request: Mapping[str, Any], say: Say) -> dict[str, Any]:
        """Call a kernel several times in a row; return the ns that all took, and those of waiting for cores.

        The threads start before the clock, so that no call pays for that.
        """
        import numpy as np

        from ..isolate.serve import doing
        from ..kernels import roofs
        from ..kernels.toolkit.threads import get_threads, set_threads
        from ..ops.storage import TYPES, WIDE

        if "calls" in request:
            kernel, every = self.kernel(request), [self.args(specs) for specs in request["calls"]]
            span = span_of([x for specs in request["calls"] for x in specs])
            self.batches[request["key"]] = kernel.entry(kernel.types) or kernel.function, every, span
        n = request["threads"]
        if get_threads() != n:
            set_threads(n)
        doing(self.kernels[request["side"]].name)
        roofs.nothing(np.zeros(n, TYPES[WIDE].dtype), n)
        function, every, span = self.batches[request["key"]]
        self.window.show(*span)
        ns, waited = self.clock.spend(function, every, request["times"])
        return {"ns": ns, "waited": waited}

    def build(self, request: Mapping[str, Any], say: Say) -> dict[str, Any]:
        """Build a model in which the calls of the op switch between both kernels; return their layers, and losses.

        No step of it is judged here, which would take wanted values. ``unbuilt`` says why there is none: that is not
        the candidate's fault, which has not run.
        """
        from ..engine import Engine
        from ..errors import UserError
        from ..lab.ab import Change, InStep
        from ..train.job import Settings, TrainingSteps, data_of, how_of, model_of, sized, sized_model

        _, config, _ = model_of(settings := Settings(**request["settings"]))
        settings = sized(settings, config)
        corpus = config.inputs(settings.B, settings.T) or data_of(settings, config.vocab_size, None)
        try:
            engine = Engine(*sized_model(settings, config), how_of(settings, config), seed=settings.seed)
        except (UserError, MemoryError, OSError) as e:
            return {"unbuilt": str(e) or type(e).__name__}
        batches = corpus.batches("train", settings.B, settings.T, seed=settings.seed)
        change = Change((self.kernels["A"], self.kernels["B"]))
        self.steps = InStep(TrainingSteps(settings, engine, batches), [change], audits=False)
        return {"layers": self.steps.layers[0], "losses": self.steps.losses()}

    def train(self, request: Mapping[str, Any], say: Say) -> dict[str, Any]:
        """Train for one step with a kernel; return the ns of the step and of the op's calls."""
        assert self.steps
        return {"ns": self.steps.trial(request["side"])}

    def fences(self, request: Mapping[str, Any], say: Say) -> dict[str, Any]:
        """Call a kernel on a small case, each array in turn between inaccessible pages; return the error, or ""."""
        from ..check.cases import Case
        from ..check.fences import check_fenced
        from ..files.reading import from_json
        from ..isolate.serve import doing

        case: Case = from_json(Case, request["case"])
        return {"wrong": check_fenced(self.kernel(request), case, request["threads"], request["seed"], doing)}

    def asm(self, request: Mapping[str, Any], say: Say) -> dict[str, Any]:
        """Compile a kernel once more, with its lines; return its machine code as text, its digest, and LLVM's remarks.

        All that this process compiles later has lines too.
        """
        from ..kernels.compile import cache, jit, lines, remarks

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


def said(handler: Handler) -> Handler:
    """Let a handler answer with any error, which a candidate's text can cause."""
    from ..errors import UserError

    def answering(request: Mapping[str, Any], say: Say) -> Mapping[str, Any]:
        try:
            return handler(request, say)
        except UserError:
            raise
        except Exception as e:
            raise UserError(f"{type(e).__name__}: {e}") from e

    return answering


def main() -> None:
    """Close the process, load the package, and answer."""
    missing = close()
    from .. import kernels
    from ..check import check, fences, judge, timed  # noqa: F401
    from ..isolate.serve import serve
    from . import rules  # noqa: F401

    kernels.load_all(json.loads(os.environ.pop(FILES)))
    here = Closed(missing)
    names = ("ready", "open", "compile", "work", "call", "batch", "build", "train", "fences", "asm", "done")
    serve({name: said(getattr(here, name)) for name in names})


if __name__ == "__main__":
    main()

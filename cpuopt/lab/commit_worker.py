"""The process that runs kernels of a commit. `commits.Tree` starts this file by its path, with the commit's package.

That package may be older than this file, so this file imports few names of it, which few commits change. Both ends of
the protocol are of one commit: that of the package which compares.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatch
from itertools import chain
from typing import Any

import numpy as np

from cpuopt import kernels, ops
from cpuopt.building import set_threads
from cpuopt.check.cases import cases, other_types
from cpuopt.errors import UserError
from cpuopt.isolate.serve import Say, doing, serve
from cpuopt.kernels import roofs
from cpuopt.kernels.compile import cache, dependencies, jit
from cpuopt.kernels.registry import KERNELS, Kernel, find
from cpuopt.ops.storage import TYPES, WIDE

MEMORY = "CPUOPT_SHARED"
"""Environment variable: the descriptor of the memory for arrays, and its size."""
DECLARED = ("name", "kind", "shape", "types", "optional", "below", "low", "high")
"""What of an argument's declaration kernels depend on."""


class Served:
    """The kernels of this process by side, which call arrays in memory that it shares with the process that asks.

    The sandbox of the judge serves two in the same way (`judge.candidate`).
    """

    def __init__(self, memory: Any) -> None:
        self.memory, self.threads = memory, 0
        self.kernels: dict[str, Kernel] = {}
        self.typed: dict[str, Kernel] = {}
        self.batches: dict[int, tuple[Callable[..., None], list[list[Any]], Any]] = {}
        self.waits: dict[str, int] = {}

    def add(self, side: str, kernel: Kernel) -> dict[str, Any]:
        """Serve a kernel, and describe it."""
        self.kernels[side] = kernel
        about = {name: getattr(kernel, name) for name in ("variant", "where", "same_bits", "narrow", "skips")}
        return {**about, "scratch": [(s.name, s.dtype) for s in kernel.scratch]}

    def kernel(self, request: Mapping[str, Any]) -> Kernel:
        """Return a kernel for the types of a request, compiled."""
        key = f"{request['side']} {sorted(request['types'].items())}"
        if key not in self.typed:
            found = self.kernels[request["side"]].typed(request["types"])
            found.compile()
            self.typed[key] = found
        return self.typed[key]

    def compile(self, request: Mapping[str, Any], say: Say) -> dict[str, Any]:
        """Compile a kernel for some types, and return the digest of its machine code."""
        return {"code": jit.code_digest(self.kernel(request))}

    def work(self, request: Mapping[str, Any], say: Say) -> dict[str, Any]:
        """Return the lengths of a kernel's scratch."""
        kernel = self.kernels[request["side"]].typed(request["types"])
        return {"elements": [n for (n,), _ in kernel.work(request["sizes"]).values()]}

    def args(self, specs: Any) -> list[Any]:
        """Return arguments: numbers, and arrays in the shared memory."""
        return [
            np.ndarray(x["shape"], TYPES[x["type"]].dtype, self.memory, x["at"]) if isinstance(x, dict) else x
            for x in specs
        ]

    def use(self, threads: int) -> None:
        """Set the number of threads; those of BLAS depend on the kernels."""
        if threads != self.threads:
            self.threads = set_threads(threads, self.kernels.values())

    def call(self, request: Mapping[str, Any], say: Say) -> dict[str, Any]:
        """Call a kernel once."""
        self.use(request["threads"])
        self.kernel(request).function(*self.args(request["args"]))
        return {}

    def batch(self, request: Mapping[str, Any], say: Say) -> dict[str, Any]:
        """Call a kernel several times in a row; return the ns that all took, and those of waiting for cores.

        The threads start before the clock, so that no call pays for that.
        """
        key, n = request["key"], request["threads"]
        if "calls" in request:
            kernel = self.kernel(request)
            every, span = [self.args(specs) for specs in request["calls"]], self.span([*chain(*request["calls"])])
            self.batches[key] = kernel.entry(kernel.types) or kernel.function, every, span
        function, every, span = self.batches[key]
        self.use(n)
        doing(self.kernels[request["side"]].name)
        roofs.nothing(np.zeros(n, TYPES[WIDE].dtype), n)
        self.show(span)
        waited = self.waited()
        ns = self.spend(function, every, request["times"])
        return {"ns": ns, "waited": self.waited() - waited}

    def span(self, specs: Sequence[Any]) -> Any:
        """Return the part of the memory that some arguments lie in, for `show`."""

    def show(self, span: Any) -> None:
        """Let the calls that follow see this part."""

    def spend(self, function: Callable[..., None], every: Sequence[Sequence[Any]], times: int) -> int:
        """Call a function with each of some arguments; return the ns of all calls."""
        start = time.perf_counter_ns()
        for _ in range(times):
            for args in every:
                function(*args)
        return time.perf_counter_ns() - start

    def waited(self) -> int:
        """Return the ns for which threads of this process have waited for a core so far; 0 if Linux does not tell."""
        found = 0
        for name in os.listdir("/proc/self/task") if sys.platform == "linux" else ():
            with suppress(OSError):  # a thread that ended
                if name not in self.waits:
                    self.waits[name] = os.open(f"/proc/self/task/{name}/schedstat", os.O_RDONLY)
                found += int(os.pread(self.waits[name], 64, 0).split()[1])
        return found


class ServedCommit(Served):
    """The kernel of a commit, as side ``""``."""

    steps: Any = None
    files: tuple[str, ...] = ()

    def ready(self, request: Mapping[str, Any], say: Say) -> dict[str, Any]:
        """Answer that the package is loaded, and where it lies."""
        return {"package": os.path.dirname(os.path.dirname(kernels.__file__))}

    def open(self, request: Mapping[str, Any], say: Say) -> dict[str, Any]:
        """Find a kernel, in a file if one is given, and describe it and its op's declaration."""
        op, variant, file = request["op"], request["variant"], request["file"]
        if file:
            self.files = (file,)
            kernels.load_all(self.files)
            mine = [k.variant for k in KERNELS.values() if k.op.name == op and k.where.rpartition(":")[0] == file]
            if not variant and len(mine) != 1:
                return {"variants": mine}
            variant = variant or mine[0]
        found = find(op, variant)
        declared = {a.name: [str(getattr(a, name)) for name in DECLARED] for a in found.op.args}
        return {**self.add("", found), "declared": declared}

    def compile(self, request: Mapping[str, Any], say: Say) -> dict[str, Any]:
        """Compile the kernel for some types; return the digest of its code and declaration, and that of its sources."""
        kernel = self.kernel(request)
        return {"code": identity(kernel), "source": cache.digest(kernel.function)}

    def build(self, request: Mapping[str, Any], say: Say) -> dict[str, Any]:
        """Prepare a job, in which calls in some layers go to the kernel if there is one; return losses and notes."""
        try:
            from cpuopt.kernels.toolkit.threads import planned_for
            from cpuopt.lab.ab import Change, InStep, settings_of
        except ImportError as e:
            raise UserError(f"the commit is too old for a comparison of training steps: {e}") from e

        self.steps, self.threads, settings, changes = None, 0, settings_of(request), []
        if kernel := self.kernels.get(""):
            layer = request["layer"]
            swap = f"{kernel.op.name}{'' if layer == '*' else '@' + layer}={kernel.variant}"
            settings = replace(settings, kernels=self.files, swap=(*settings.swap, swap))
            changes = [Change((kernel, kernel), (layer,))]
        with planned_for(request["settings"]["threads"]):  # as a training run of its own is
            self.steps = InStep(settings, changes, say)
        return {"layers": self.steps.layers, "notes": self.steps.notes, "losses": self.steps.losses()["A"]}

    def train(self, request: Mapping[str, Any], say: Say) -> dict[str, Any]:
        """Train for two steps; return the ns of the second one, and those of the kernel's calls in it."""
        self.steps.take_step()
        return {"ns": self.steps.trial("A")}

    def audit(self, request: Mapping[str, Any], say: Say) -> dict[str, Any]:
        """Judge a step; return what was found so far."""
        self.steps.judged += self.steps.audit(request["when"])
        return {"checks": [r.describe() for r in self.steps.judged]}


def typed(only: str = "*") -> dict[str, Kernel]:
    """Return every kernel of the package in every type, by its name, if the name matches a glob; ``[`` is a letter."""
    found, only = {}, only.replace("[", "[[]")
    for (op, _), k in KERNELS.items():
        for types in [{}, *other_types(ops.ALL[op])]:
            name = " ".join([k.name, *(f"{n}:{t}" for n, t in types.items())])
            if hasattr(k.function, "py_func") and k.takes_all(types) and fnmatch(name, only):
                found[name] = k.of(types)
    return found


def sources(request: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Return the digests of what each kernel is made from: all, its text, its options, each helper that it reaches."""
    known: dict[int, tuple[object, str]] = {}

    def digest(unit: object) -> str:
        if id(unit) not in known:
            known[id(unit)] = unit, cache.digest(unit)
        return known[id(unit)][1]

    found = {}
    for name, k in typed(request["only"]).items():
        function: Any = k.function
        options = {n: sorted(x) if isinstance(x, set) else x for n, x in function.targetoptions.items()}
        parts = {"all": f"{digest(function)} {jit.signature_of(k)}", "options": repr(sorted(options.items()))}
        parts["declaration"] = declaration(k)
        parts["all"] += parts["declaration"]
        parts["text"] = dependencies.Walk(function.py_func.__code__).digest
        for unit in dependencies.Walk(function).units:
            if unit is not function:
                home = getattr(unit, "py_func", getattr(unit, "_defn", unit))
                parts[f"helper {home.__qualname__}"] = digest(unit)
        found[name] = parts
    return found


def code(request: Mapping[str, Any], say: Say) -> dict[str, str]:
    """Return the digest of a kernel's machine code; it is compiled if the cache lacks it."""
    say(f"compiling {request['name']}")
    kernel = typed()[request["name"]]
    kernel.compile()
    return {"code": identity(kernel)}


def identity(kernel: Kernel) -> str:
    """Return the digest of a kernel's machine code, and that of its declaration."""
    return f"{jit.code_digest(kernel)}-{hashlib.sha256(declaration(kernel).encode()).hexdigest()[:8]}"


def declaration(kernel: Kernel) -> str:
    """Describe what a kernel declares beside its code: flags, and the length of its scratch at many sizes."""
    flags = {name: getattr(kernel, name) for name in ("same_bits", "narrow", "skips")}
    sizes = [c.sizes for c in cases(kernel.op, kernel.skips)]
    sizes += [{name: 64 * n for name, n in s.items()} for s in sizes]
    lengths: list[int | str] = []
    for part in kernel.scratch:
        for x in sizes:
            try:
                lengths.append(part.elements(x))
            except Exception as e:  # of a user's function
                lengths.append(type(e).__name__)
    return repr((flags, [(part.name, part.dtype) for part in kernel.scratch], lengths))


if __name__ == "__main__":
    number, size = map(int, os.environ.pop(MEMORY, "-1 1").split())
    served = ServedCommit(mmap.mmap(number, size))
    names = ("ready", "open", "compile", "work", "call", "batch", "build", "train", "audit")
    serve({**{name: getattr(served, name) for name in names}, "sources": sources, "code": code})

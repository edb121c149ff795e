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
from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any

import numpy as np

from cpuopt import kernels, ops
from cpuopt.building import set_threads
from cpuopt.check.cases import cases, other_types
from cpuopt.isolate.serve import Say, serve
from cpuopt.kernels import roofs
from cpuopt.kernels.compile import cache, dependencies, jit
from cpuopt.kernels.registry import KERNELS, Kernel, find
from cpuopt.ops.storage import TYPES, WIDE

MEMORY = "CPUOPT_SHARED"
"""Environment variable: the descriptor of the memory for arrays, and its size."""
DECLARED = ("name", "kind", "shape", "types", "optional", "below", "low", "high")
"""What of an argument's declaration kernels depend on."""


class Served:
    """The kernels of this process, by number, in the memory that it shares with the one that asks."""

    def __init__(self) -> None:
        number, size = map(int, os.environ.pop(MEMORY, "-1 1").split())
        self.memory = mmap.mmap(number, size)
        self.kernels: list[Kernel] = []
        self.threads = 0
        self.batches: dict[tuple[int, int], list[list[Any]]] = {}
        self.waits: dict[str, int] = {}

    def ready(self, request: Mapping[str, Any], say: Say) -> dict[str, Any]:
        """Answer that the package is loaded, and where it lies."""
        return {"package": os.path.dirname(os.path.dirname(kernels.__file__))}

    def kernel(self, request: Mapping[str, Any], say: Say) -> dict[str, Any]:
        """Compile a kernel, of a file if one is given, and describe it and its op's declaration."""
        op, variant, file = request["op"], request["variant"], request["file"]
        if file:
            kernels.load_all([file])
            mine = [k.variant for k in KERNELS.values() if k.op.name == op and k.where.rpartition(":")[0] == file]
            if not variant and len(mine) != 1:
                return {"variants": mine}
            variant = variant or mine[0]
        say("compiling")
        found = find(op, variant).typed(request["types"])
        found.compile()
        self.kernels.append(found)
        self.threads = 0  # those of BLAS depend on the kernels
        return {
            "number": len(self.kernels) - 1,
            "variant": variant,
            "scratch": [(s.name, s.dtype) for s in found.scratch],
            **{name: getattr(found, name) for name in ("where", "same_bits", "narrow", "skips")},
            "code": identity(found),
            "source": cache.digest(found.function),
            "declared": {a.name: [str(getattr(a, name)) for name in DECLARED] for a in found.op.args},
        }

    def work(self, request: Mapping[str, Any], say: Say) -> dict[str, Any]:
        """Return the lengths of a kernel's scratch."""
        kernel = self.kernels[request["kernel"]]
        return {"elements": [n for (n,), _ in kernel.work(request["sizes"]).values()]}

    def args(self, specs: Any) -> list[Any]:
        """Return arguments: numbers, and arrays in the shared memory."""
        return [
            np.ndarray(x["shape"], TYPES[x["type"]].dtype, self.memory, x["at"]) if isinstance(x, dict) else x
            for x in specs
        ]

    def use(self, threads: int) -> None:
        """Set the number of threads."""
        if threads != self.threads:
            self.threads = set_threads(threads, self.kernels)

    def call(self, request: Mapping[str, Any], say: Say) -> dict[str, Any]:
        """Call a kernel once."""
        self.use(request["threads"])
        self.kernels[request["kernel"]].function(*self.args(request["args"]))
        return {}

    def batch(self, request: Mapping[str, Any], say: Say) -> dict[str, Any]:
        """Call a kernel several times in a row; return the ns that all took, and those of waiting for cores.

        The threads start before the clock, so that no call pays for that.
        """
        kernel, n, key = self.kernels[request["kernel"]], request["threads"], (request["kernel"], request["key"])
        if "calls" in request:
            self.batches[key] = [self.args(specs) for specs in request["calls"]]
        function, every = kernel.entry(kernel.types) or kernel.function, self.batches[key]
        self.use(n)
        roofs.nothing(np.zeros(n, TYPES[WIDE].dtype), n)
        waited, start = self.waited(), time.perf_counter_ns()
        for _ in range(request["times"]):
            for args in every:
                function(*args)
        ns = time.perf_counter_ns() - start
        return {"ns": ns, "waited": self.waited() - waited}

    def waited(self) -> int:
        """Return the ns for which threads of this process have waited for a core so far; 0 if Linux does not tell."""
        found = 0
        for name in os.listdir("/proc/self/task") if sys.platform == "linux" else ():
            try:
                if name not in self.waits:
                    self.waits[name] = os.open(f"/proc/self/task/{name}/schedstat", os.O_RDONLY)
                found += int(os.pread(self.waits[name], 64, 0).split()[1])
            except OSError:  # a thread that ended
                pass
        return found


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
                lengths.append(repr(e))
    return repr((flags, [(part.name, part.dtype) for part in kernel.scratch], lengths))


if __name__ == "__main__":
    served = Served()
    handlers = {name: getattr(served, name) for name in ("ready", "kernel", "work", "call", "batch")}
    serve({**handlers, "sources": sources, "code": code})

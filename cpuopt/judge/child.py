"""The sandbox that runs candidates: ``python -m cpuopt.judge.child``, which `remote.Remote` starts.

Before anything is imported the process gives up what a kernel does not need: the network, writing files, seeing other
processes, privileges and core dumps. `bwrap` does that where the machine has it, else private namespaces. Then
`candidate` answers; its copy that loads a candidate also has a limit on memory, and a filter on what it asks the system
for.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import struct
import sys
from contextlib import suppress

from ..isolate.serve import PR_SET_PDEATHSIG
from .seccomp import PARTS

SHARED = "CPUOPT_SHARED"
"""Environment variable: the descriptor of the shared memory, and its bytes."""
FILES = "CPUOPT_FILES"
"""Environment variable: the kernel files of who asks, as JSON, which are loaded before any candidate."""
CLOSED = "CPUOPT_CLOSED"
"""Environment variable: set if bwrap has closed the process already."""
MOST_WRITTEN = 1 << 20
"""Bytes that a candidate may add to files that were open before: its errors."""
NEW_USER, NEW_PLACES = 0x10000000, 0x00020000 | 0x40000000 | 0x08000000 | 0x20000000
"""Linux's flags of namespaces: of users; of mounts, the network, shared memory and processes."""
MOUNT_SETATTR, HERE, RECURSIVE, READ_ONLY = 442, -100, 0x8000, 1
PRIVATE, NO_DEVICES = 0x4000 | 0x40000, 0x2 | 0x4 | 0x8
NO_NEW_PRIVILEGES, DROP_CAPABILITY, CAPABILITIES = 38, 24, 41
CAPABILITY_VERSION = 0x20080522


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


def main() -> None:
    """Close the process, load the package, and answer."""
    missing = close()
    from .. import kernels
    from ..check import check, timed  # noqa: F401
    from ..isolate.serve import serve
    from .candidate import ServedCandidate

    kernels.load_all(json.loads(os.environ.pop(FILES)))
    here = ServedCandidate(os.environ.pop(SHARED), missing)
    names = ("ready", "open", "compile", "work", "call", "batch", "build", "train", "fences", "asm", "done")
    serve({name: getattr(here, name) for name in names}, answered=Exception)  # a text can cause any


if __name__ == "__main__":
    main()

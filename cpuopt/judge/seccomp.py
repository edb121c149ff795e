"""A filter of Linux (seccomp) on what a candidate's process asks the system for, beside its namespaces.

It holds where a system allows no namespaces, as in most containers. A candidate's process starts threads, and no
processes or programs; it opens files to read, and no sockets; it sends signals to itself alone; and it cannot call
those parts of the system that trace others, change mounts, or that have often had holes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Mapping

PARTS = (
    *("no network", "no writable files", "no sight of other processes", "no privileges", "limits on memory"),
    "a filter on calls of the system",
)
"""What closes the sandbox: namespaces or bwrap, limits, and this filter."""
ARCHITECTURES: Mapping[str, tuple[int, int]] = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""By machine: Linux's number of it, and the column of `CALLS`."""
CALLS = """
open 2 -, openat 257 56, openat2 437 437, creat 85 -, clone 56 220, clone3 435 435, fork 57 -, vfork 58 -,
execve 59 221, execveat 322 281, socket 41 198, socketpair 53 199, ptrace 101 117, process_vm_readv 310 270,
process_vm_writev 311 271, kill 62 129, tkill 200 130, tgkill 234 131, pidfd_open 434 434, pidfd_send_signal 424 424,
pidfd_getfd 438 438, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, mount 165 40, umount2 166 39,
move_mount 429 429, open_tree 428 428, fsopen 430 430, mount_setattr 442 442, pivot_root 155 41, chroot 161 51,
unshare 272 97, setns 308 268, bpf 321 280, perf_event_open 298 241, io_uring_setup 425 425, io_uring_enter 426 426,
userfaultfd 323 282, keyctl 250 219, add_key 248 217, request_key 249 218, shmget 29 194, shmat 30 196, msgget 68 186,
semget 64 190, mq_open 240 180, unlink 87 -, unlinkat 263 35, rename 82 -, renameat 264 38, renameat2 316 276,
link 86 -, linkat 265 37, symlink 88 -, symlinkat 266 36, mkdir 83 -, mkdirat 258 34, rmdir 84 -, mknod 133 -,
mknodat 259 33, chmod 90 -, fchmod 91 52, fchmodat 268 53, chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54,
truncate 76 45, utimensat 280 88, setxattr 188 5, memfd_create 319 279, setpriority 141 140, sched_setaffinity 203 122,
sched_setscheduler 144 119, sched_setattr 314 274, kexec_load 246 104, init_module 175 105, finit_module 313 273
"""
"""Numbers of calls by name, for each machine; all are refused, but for those in `IF`."""
LATER_CALLS = 0x40000000
"""From here on are the calls of another interface of x86-64, which nothing uses."""
WRITES, CLONE_THREAD = 0o3 | os.O_CREAT | os.O_TRUNC, 0x00010000
IF = {"open": (1, "clear", WRITES), "openat": (2, "clear", WRITES), "clone": (0, "set", CLONE_THREAD)}
IF |= dict.fromkeys(("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"), (0, "own", 0))
"""Calls that are allowed if a word of an argument has these bits clear or set, or is this process."""
ERRORS = {"clone3": errno.ENOSYS, "openat2": errno.ENOSYS, "open": errno.EROFS, "openat": errno.EROFS}
"""What is answered, if not EPERM. Without clone3, the C library starts threads by clone, whose flags can be seen."""
LOAD, EQUAL, AT_LEAST, BITS, ANSWER = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000
SET_FILTER, AS_FAST = 1, 4
SECCOMP = 317, 277


def program(machine: str, process: int) -> bytes:
    """Write the filter for a machine, and a process."""
    number, column = ARCHITECTURES[machine]

    def one(code: int, k: int, then: int = 0, other: int = 0) -> bytes:
        return struct.pack("HBBI", code, then, other, k)

    made = one(LOAD, 4) + one(EQUAL, number, 1) + one(ANSWER, KILL) + one(LOAD, 0)
    made += one(AT_LEAST, LATER_CALLS, 0, 1) + one(ANSWER, REFUSE | errno.EPERM)
    for entry in CALLS.split(","):
        name, *numbers = entry.split()
        if numbers[column] == "-":
            continue
        refuse, call = one(ANSWER, REFUSE | ERRORS.get(name, errno.EPERM)), int(numbers[column])
        if name not in IF:
            made += one(EQUAL, call, 0, 1) + refuse
            continue
        argument, how, bits = IF[name]
        test = one(EQUAL, process, 1) if how == "own" else one(BITS, bits, how == "set", how == "clear")
        made += one(EQUAL, call, 0, 4) + one(LOAD, 16 + 8 * argument) + test + refuse + one(ANSWER, ALLOW)
    return made + one(ANSWER, ALLOW)


def install() -> bool:
    """Put the filter on this process for good; return whether this system allows it.

    The process must have promised to gain no privileges.
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ARCHITECTURES:
        return False
    made = program(machine, os.getpid())
    held = ctypes.create_string_buffer(made, len(made))
    about = struct.pack("HxxxxxxP", len(made) // 8, ctypes.addressof(held))
    libc = ctypes.CDLL(None, use_errno=True)
    call = SECCOMP[ARCHITECTURES[machine][1]]
    return not libc.syscall(call, SET_FILTER, AS_FAST, ctypes.create_string_buffer(about, len(about)))

"""A kernel between inaccessible pages: any access outside its arrays ends the process, even a read.

Guard words show writes near an array, and reads there whose values are used. This shows every access from the first
byte past an array, or before it, up to `FENCE` bytes away, and every write to an input. So it is done in a process that
may die, and says beforehand which array stands at the edge.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence

import numpy as np

from ..errors import RefusedError
from ..kernels.registry import Kernel
from .cases import Array, Case, arguments, modes
from .judge import called, counts_up_to, keeping_threads, prepare
from .memory import absent_as_empty, call_args

FENCE = 256 << 20
"""Bytes of address space on each side; they take no memory."""
MOST_BYTES = 1 << 22
"""Larger cases are left out, and cases of other inputs, which run the same loops."""


class Fenced:
    """A copy of an array whose end, or whose beginning, is where the accessible memory ends.

    Parameters
    ----------
    only_read : whether a write to the array itself ends the process too, even one that is taken back.
    """

    def __init__(self, x: Array, at_end: bool, only_read: bool) -> None:
        room = -(-max(x.nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.map = mmap.mmap(-1, 2 * FENCE + room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        offset = FENCE + (room - x.nbytes if at_end else 0)
        self.array: Array = np.ndarray(x.shape, x.dtype, buffer=self.map, offset=offset)
        self.array[...] = x
        fences = [(base, FENCE, 0), (base + FENCE + room, FENCE, 0), (base + FENCE, room, mmap.PROT_READ)]
        for start, length, access in fences if only_read else fences[:2]:
            if LIBC.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(length), access):
                raise OSError(ctypes.get_errno(), "mprotect")


LIBC = ctypes.CDLL(None, use_errno=True)
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0)


def check_fenced(
    kernel: Kernel, case: Case, threads: Sequence[int], seed: int, say: Callable[[str], None] = lambda text: None
) -> str:
    """Call a kernel with one array after the other at an edge; return the error, or "". A bad access ends the process.

    Parameters
    ----------
    say : called with the reason that holds if the process dies now.
    """
    given = arguments(kernel.op, case, np.random.default_rng(seed))
    if sum(x.nbytes for x in given.values() if isinstance(x, np.ndarray)) > MOST_BYTES or case.kind != "normal":
        return ""
    with keeping_threads() as most:
        n = max(counts_up_to(most, threads))
        work = {name: np.zeros(*spec) for name, spec in prepare(kernel, case.sizes).items()}
        arrays = absent_as_empty(kernel, given) | work
        for name, x in arrays.items():
            for at_end in (True, False):
                place = "past the end of" if at_end else "before the beginning of"
                only_read = name not in work and kernel.op.by_name[name].kind in ("in", "index")
                say(f"reading or writing {place} '{name}'" + (", or writing to it" if only_read else ""))
                edge = Fenced(x, at_end, only_read)
                for adds in modes(kernel.op)[:2]:
                    copies = {other: y if other in work else y.copy() for other, y in arrays.items()} | {
                        name: edge.array
                    }
                    args = call_args(kernel.op, copies, given, adds) + [copies[s] for s in work]
                    try:
                        called(kernel, args, n)
                    except RefusedError as e:
                        return f"{e}, where '{name}' is at another address"
    say("")
    return ""

"""The progress of a compilation for users of the library: one line on stderr, which is updated on a terminal."""

from __future__ import annotations

import sys
import time


class Compiling:
    """Observer of a compilation; called with (compiled, to compile, kernel)."""

    def __init__(self) -> None:
        self.start = time.monotonic()

    def __call__(self, done: int, total: int, kernel: str) -> None:
        """Write the progress and the remaining time; without a terminal, only a line at the start."""
        if sys.stderr.isatty():
            left = (time.monotonic() - self.start) / done * (total - done) if done else 0.0
            said = f"cpuopt: compiling {done + 1}/{total} {kernel}" + f", about {left:.0f} s left" * (left >= 1)
            sys.stderr.write("\r\x1b[K" + (said if kernel else ""))
        elif not done:
            sys.stderr.write(f"cpuopt: compiling {total} kernels, once for this machine\n")
        sys.stderr.flush()


def proving(what: str) -> None:
    """Write that something is proved on this machine."""
    sys.stderr.write(f"cpuopt: proving {what} on this machine, once\n")
    sys.stderr.flush()

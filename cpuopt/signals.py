"""Signals that wait: blocks of code that no handler interrupts."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred() -> Iterator[None]:
    """Run a block to its end: signals that arrive meanwhile are handled after it.

    This covers every signal that has a handler in Python, since such a handler may raise: Ctrl-C, a timeout by
    ``SIGALRM``, a handler that exits. Python runs handlers in the main thread only, so in other threads nothing waits.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {s: h for s in signal.valid_signals() if callable(h := signal.getsignal(s))}
    waiting: list[int] = []
    held = True

    def later(number: int, frame: FrameType | None) -> None:
        if held:
            waiting.append(number)
        else:  # an exception kept the handler before from being put back
            handlers[signal.Signals(number)](number, frame)

    try:
        for s in handlers:
            signal.signal(s, later)
        yield
    finally:
        held = False
        try:
            for s, handler in handlers.items():
                signal.signal(s, handler)
        finally:
            if waiting:
                send(waiting)


def send(numbers: list[int]) -> None:
    """Send signals to this thread, all at once: the exception that one handler raises loses no other signal."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        for number in numbers:
            signal.pthread_kill(threading.get_ident(), number)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

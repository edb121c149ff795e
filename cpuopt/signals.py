"""Signals that wait: blocks of code that no handler interrupts, and work that ends when its step is done."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal's own getsignal makes an enumeration of each answer
import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = tuple(signal.valid_signals())
"""All signals."""


@contextmanager
def deferred() -> Iterator[None]:
    """Run a block to its end: signals that arrive meanwhile are handled after it.

    This covers every signal that has a handler in Python, since such a handler may raise: Ctrl-C, a timeout by
    ``SIGALRM``, a handler that exits. Python runs handlers in the main thread only, so in other threads nothing waits.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {s: h for s in SIGNALS if callable(h := _signal.getsignal(s))}
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


@contextmanager
def stop_flag(last: bool = False) -> Iterator[Callable[[], int]]:
    """Catch SIGINT, SIGTERM and SIGHUP; yield a function that returns the number of the first, or 0.

    A Ctrl-C after the first interrupts at once; the end of a session sends several of the others in a row. A signal
    that was ignored before, as with `nohup`, stays ignored. Only the main thread of a process receives any.

    Parameters
    ----------
    last : whether the process ends after the block: once a signal has come, SIGTERM and SIGHUP then stay ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return
    hit: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if hit and number == signal.SIGINT:
            raise KeyboardInterrupt
        hit.append(number)

    heeded = [s for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) != signal.SIG_IGN]
    before = {s: signal.signal(s, note) for s in heeded}
    try:
        yield lambda: hit[0] if hit else 0
    finally:
        for s, handler in before.items():
            signal.signal(s, signal.SIG_IGN if last and hit and s != signal.SIGINT else handler)


@contextmanager
def never_lost() -> Iterator[None]:
    """Send a Ctrl-C again if it came where Python drops exceptions: in a destructor, or in a callback of C."""
    usual = sys.unraisablehook

    def again() -> None:
        time.sleep(0.01)  # until that has returned
        os.kill(os.getpid(), signal.SIGINT)

    def hook(dropped: sys.UnraisableHookArgs) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            _thread.start_new_thread(again, ())  # threading takes locks, which the main thread may hold
        else:
            usual(dropped)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = usual

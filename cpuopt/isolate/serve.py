"""A process that answers requests: JSON lines on its stdin and stdout. `isolate.process.Worker` is the other end."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from ..errors import RefusedError, UserError

LONGEST = 120
"""The length of the text about the running kernel, in bytes."""
Say = Callable[[str], None]
Handler = Callable[[Mapping[str, Any], Say], Mapping[str, Any]]
DOING = "CPUOPT_DOING"
"""Environment variable: the descriptor of the file that `doing` writes to."""
PR_SET_PDEATHSIG = 1
"""The option of Linux's prctl for the signal that a process gets when its parent ends."""


def serve(
    handlers: Mapping[str, Handler],
    guard: Callable[[], None] = lambda: None,
    answered: type[Exception] = UserError,
) -> None:
    """Answer requests until stdin closes, or until the process that asks ends.

    Parameters
    ----------
    handlers : by the request's ``do``; each takes the request and a function that reports progress.
    guard : called before each answer; an error of it takes the answer's place.
    answered : the errors of a handler that become the answer; any other ends the process.
    """
    global _doing
    _doing = int(os.environ.pop(DOING, -1))
    end_with_parent()
    with os.fdopen(os.dup(1), "w") as channel, open(0) as requests:
        os.dup2(2, 1)  # what a kernel prints must not come between the answers

        def answer(content: Mapping[str, Any]) -> None:
            channel.write(json.dumps(content) + "\n")
            channel.flush()

        for line in requests:
            request = json.loads(line)
            try:
                found = handlers[request["do"]](request, lambda text: answer({"progress": text}))
                guard()
                answer(found)
            except answered as e:
                said = str(e) if isinstance(e, UserError) else f"{type(e).__name__}: {e}"
                answer({"error": said} | (e.to_json() if isinstance(e, RefusedError) else {}))


_doing = -1


def doing(text: str) -> None:
    """Note the running kernel, which the parent names if this process ends; do nothing without such a parent."""
    if _doing >= 0:
        with suppress(OSError):
            os.pwrite(_doing, text.encode()[:LONGEST].ljust(LONGEST), 0)


def end_with_parent() -> None:
    """End this process when the one that started it ends, however that ends and whatever runs here.

    On Linux the operating system does this, so that a call which never returns to Python does not delay it. There, the
    thread that started this process counts as its parent: it must not end earlier. Elsewhere a thread checks each
    second.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        hung_up = select.poll()
        hung_up.register(0, select.POLLHUP)
        if hung_up.poll(0):  # it ended while this process was starting
            os._exit(1)
        return
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()

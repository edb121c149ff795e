"""A process that answers requests: JSON lines on its stdin and stdout. `bench.process.Worker` is the other end."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from .errors import UserError

Say = Callable[[str], None]
Handler = Callable[[Mapping[str, Any], Say], Mapping[str, Any]]


def serve(handlers: Mapping[str, Handler]) -> None:
    """Answer requests until stdin closes.

    Parameters
    ----------
    handlers : by the request's ``do``; each is given the request and a function that reports progress. What a handler
        raises as `UserError` is the answer.
    """
    with os.fdopen(os.dup(1), "w") as channel, open(0) as requests:
        os.dup2(2, 1)  # what a kernel prints must not come between the answers

        def answer(content: Mapping[str, Any]) -> None:
            channel.write(json.dumps(content) + "\n")
            channel.flush()

        for line in requests:
            request = json.loads(line)
            try:
                answer(handlers[request["do"]](request, lambda text: answer({"progress": text})))
            except UserError as e:
                answer({"error": str(e)})

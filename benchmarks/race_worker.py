"""PyTorch's side of `race.py` and `curves.py`: whole runs, and a few steps of each mode.

It imports nothing of cpuopt, so that only one OpenMP runtime is in the process.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from peer_tuning import tune

TUNING = tune()  # before torch

import torch  # noqa: E402
from peer_worker import Session, serve  # noqa: E402

MODES = {
    "eager": ("eager", ""),
    "compile": ("compile", ""),
    "autocast": ("eager", "autocast"),
    "autocast, compile": ("compile", "autocast"),
    "all in bf16": ("eager", "all"),
}
TRIED = [*MODES][:4]
"""The modes of which the fastest one races: the last one computes something else."""
PROBED = 30
"""Steps of each mode before the race, of which the second half counts."""


def session_of(request: dict[str, Any], name: str) -> Session:
    """Make the model, and compile it if the mode does."""
    mode, bf16 = MODES[name]
    return Session({**request, "mode": mode, "bf16": bf16})


def step(session: Session, lr: float) -> None:
    """Take a step at a learning rate."""
    for group in session.optimizer.param_groups:
        group["lr"] = lr
    tokens, targets = session.batches[session.done % len(session.batches)]
    session.optimizer.zero_grad(set_to_none=True)
    session.loss(tokens, targets).backward()
    session.optimizer.step()
    session.done += 1


def probe(request: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of a step by mode, for those that run here."""
    found = {}
    for name in request["modes"] or TRIED:
        try:
            session = session_of(request, name)
            times = []
            for lr in request["lrs"][:PROBED]:
                start = time.perf_counter()
                step(session, lr)
                times.append(time.perf_counter() - start)
        except Exception as e:
            print(f"{name}: {type(e).__name__}: {str(e)[:200]}", file=sys.stderr)
            continue
        found[name] = float(np.median(times[len(times) // 2 :]))
    return found


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Train; return the seconds until it could, and steps, seconds of training and loss at each validation."""
    session = session_of(request, request["peer"])
    val = torch.from_numpy(np.load(request["val"]).astype(np.int64))
    ready, trained, points = time.time() - request["began"], 0.0, []
    for n, lr in enumerate([*request["lrs"], None]):
        over = trained > request["limit_s"] or lr is None
        if n % request["every"] == 0 or over:
            # with gradients, though nobody reads them: without, it would be compiled again
            points.append([n, trained, float(np.mean([session.loss(*batch).item() for batch in val]))])
        if over:
            break
        start = time.perf_counter()
        step(session, lr)
        trained += time.perf_counter() - start
    return {"ready_s": ready, "points": points}


def answering(work: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Make a handler of requests, which says what has answered."""
    return lambda request, say: {**work(request), "version": torch.__version__, "tuning": TUNING}


if __name__ == "__main__":
    serve({"probe": answering(lambda request: {"modes": probe(request)}), "run": answering(run)})

"""The PyTorch side of `cpuopt bench`, driven by requests in JSON lines; it runs in a Python that has torch.

The protocol is that of ``cpuopt/lab/peers/worker.py``. A step is what a training loop does: gradients set to none,
forward, backward, fused AdamW. This file imports nothing of cpuopt, so that only one OpenMP runtime is in the process.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class PeerError(Exception):
    """An error that the user has to fix."""


class Session:
    """A model that steps through its batches.

    Parameters
    ----------
    request : ``init``: ``mode`` (eager, compile or transformers), ``threads``, the name and ``sizes`` of the model,
        ``optimizer``, and the paths of batches (n, 2, B, T) and weights.
    wrap : makes another model of the plain one.
    """

    def __init__(self, request: dict[str, Any], wrap: Callable[[Any], Any] = lambda model: model) -> None:
        import numpy as np
        import torch
        from peer_gpt2 import loss_of

        self.torch = torch
        torch.set_num_threads(request["threads"])
        with np.load(request["params"], allow_pickle=False) as params:
            model = wrap(model_of(request, dict(params)))
        self.batches = torch.from_numpy(np.load(request["batches"]).astype(np.int64))
        o = request["optimizer"]
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=o["lr"],
            betas=(o["beta1"], o["beta2"]),
            eps=o["eps"],
            weight_decay=o["weight_decay"],
            fused=True,
        )
        logits = (lambda tokens: model(tokens).logits) if request["mode"] == "transformers" else model
        self.loss = lambda tokens, targets: loss_of(logits(tokens), targets)
        self.done = 0
        if request["mode"] == "compile":
            self.compile()

    def compile(self) -> None:
        """Compile the forward and the backward, by running them once without an update."""
        self.loss = self.torch.compile(self.loss, dynamic=False)
        try:
            self.loss(*self.batches[0]).backward()
        except Exception as e:
            words = [line for line in str(e).splitlines() if line.strip()]
            raise PeerError(f"torch.compile failed: {type(e).__name__}: {words[0] if words else ''}") from e
        self.optimizer.zero_grad(set_to_none=True)

    def losses(self, scales: list[float]) -> dict[str, Any]:
        """Return the loss of the first batch with all weights of two axes times each number, a power of two."""
        matrices = {id(p): p.data for group in self.optimizer.param_groups for p in group["params"] if p.ndim == 2}
        found = []
        for scale in scales:
            for p in matrices.values():
                p *= scale
            found.append(self.loss(*self.batches[0]).item())
            for p in matrices.values():
                p /= scale
        return {"losses": found}

    def steps(self, n: int) -> dict[str, Any]:
        """Train for n steps; setting the gradients to none counts as update."""
        clock = time.perf_counter
        step_ms, losses = [], []
        phases_ms: dict[str, list[float]] = {"forward": [], "backward": [], "update": []}
        for _ in range(n):
            tokens, targets = self.batches[self.done % len(self.batches)]
            start = clock()
            self.optimizer.zero_grad(set_to_none=True)
            cleared = clock()
            loss = self.loss(tokens, targets)
            forward = clock()
            loss.backward()
            backward = clock()
            self.optimizer.step()
            end = clock()
            step_ms.append((end - start) * 1e3)
            losses.append(loss.item())
            phases_ms["forward"].append((forward - cleared) * 1e3)
            phases_ms["backward"].append((backward - forward) * 1e3)
            phases_ms["update"].append((end - backward + cleared - start) * 1e3)
            self.done += 1
        return {"step_ms": step_ms, "losses": losses, "phases_ms": phases_ms}


LLAMAS = ("llama", "qwen2", "qwen3")


def model_of(request: dict[str, Any], params: dict[str, Any]) -> Any:
    """Make the model of a request, with its weights."""
    import peer_gpt2
    import peer_llama

    name, sizes = request["model"], request["sizes"]
    if request["mode"] == "transformers":
        return peer_llama.transformers_own(name, sizes, params)
    if name in LLAMAS:
        return peer_llama.plain(name, sizes, params, request["T"])
    model = peer_gpt2.GPT2(**sizes)
    peer_gpt2.load(model, params)
    return model


def check(request: dict[str, Any]) -> None:
    """Check for the model, the compiler that torch.compile needs, and the libraries."""
    mode = request["mode"]
    if request["model"] not in (*LLAMAS, *(["gpt2"] if mode != "transformers" else [])):
        raise PeerError(
            f"{mode}: PyTorch's side has no model {request['model']!r} so; compare variants: --against vanilla"
        )
    if mode == "compile" and not shutil.which(os.environ.get("CXX", "g++")):
        raise PeerError("torch.compile needs a C++ compiler: install g++, or name one in CXX")
    try:
        import peer_gpt2  # noqa: F401  (which imports torch and numpy)

        if mode == "transformers":
            import transformers  # noqa: F401
    except ImportError as e:
        raise PeerError(
            f"{sys.executable} cannot import a module ({e}); pip install -e '.[peers]', or name a Python that "
            "has torch (and transformers for that peer): --peer-python PATH"
        ) from e


def peak_rss_mb() -> float:
    """Return the most memory that this process has held; ``getrusage`` starts from what its parent held."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e6
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (peak if sys.platform == "darwin" else peak * 1024) / 1e6


def main() -> None:
    """Answer requests until stdin closes."""
    with os.fdopen(os.dup(1), "w") as channel, open(0) as requests:
        os.dup2(2, 1)  # what a library prints must not come between the answers

        def answer(**content: Any) -> None:
            channel.write(json.dumps(content) + "\n")
            channel.flush()

        session = None
        for line in requests:
            request = json.loads(line)
            try:
                if request["do"] == "check":
                    check(request)
                    answer()
                elif request["do"] == "init":
                    if request["mode"] == "compile":
                        answer(progress="torch.compile compiles")
                    session = Session(request)
                    torch = session.torch
                    versions = {"python": platform.python_version(), "torch": torch.__version__}
                    answer(threads=torch.get_num_threads(), versions=versions)
                elif session is None:
                    raise PeerError(f"'{request['do']}' before 'init'")
                elif request["do"] == "loss":
                    answer(**session.losses(request["scales"]))
                elif request["do"] == "steps":
                    answer(**session.steps(request["n"]))
                else:
                    answer(peak_rss_mb=peak_rss_mb(), versions={})
            except PeerError as e:
                answer(error=str(e))


if __name__ == "__main__":
    main()

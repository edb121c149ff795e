"""The PyTorch side of `cpuopt bench`, driven by requests in JSON lines; it runs in a Python that has torch.

The protocol is that of ``cpuopt/lab/peers/worker.py``. A step is what a training loop does: gradients set to none,
forward, backward, fused AdamW. This file imports nothing of cpuopt, so that only one OpenMP runtime is in the process.
In bfloat16, forward and loss run under autocast, or weights and moments are bfloat16 too and the loss is float32.
A request that says ``tuned`` has the settings of `peer_tuning`.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from peer_tuning import CHOSEN, tune

TOKENS, WIDTH, INNER = 256, 768, 3072
"""The product that is measured alone: the MLP of GPT-2 124M at 4x64."""
SAMPLES_S = 1.0
"""Seconds for which it is sampled; the best sample counts."""


class PeerError(Exception):
    """An error that the user has to fix."""


class Session:
    """A model that steps through its batches.

    Parameters
    ----------
    request : ``init``: ``mode`` (eager, compile or transformers), ``bf16`` (autocast, all, or empty for float32),
        ``threads``, the name and ``sizes`` of the model, ``optimizer``, and the paths of batches (n, 2, B, T) and
        weights.
    wrap : makes another model of the plain one.
    """

    def __init__(self, request: dict[str, Any], wrap: Callable[[Any], Any] = lambda model: model) -> None:
        self.tuning = tune() if request.get("tuned") else {}  # before torch
        import numpy as np
        import torch

        self.torch, self.request, self.bf16 = torch, request, request.get("bf16", "")
        torch.set_num_threads(request["threads"])
        model = wrap(self.model())
        if self.bf16 == "all":
            model.to(torch.bfloat16)
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
        self.loss = self.loss_by(model)
        self.done = 0
        if request["mode"] == "compile":
            self.compile()

    def model(self) -> Any:
        """Make the model with its initial weights, in float32."""
        import numpy as np

        with np.load(self.request["params"], allow_pickle=False) as params:
            return model_of(self.request, dict(params))

    def loss_by(self, model: Any, narrow: bool = True) -> Callable[[Any, Any], Any]:
        """Make the function of tokens and targets that computes the loss.

        Parameters
        ----------
        narrow : whether it runs under autocast, where the session does.
        """
        from peer_gpt2 import loss_of

        torch, own = self.torch, self.request["mode"] == "transformers"
        autocast, whole = narrow and self.bf16 == "autocast", narrow and self.bf16 == "all"

        def loss(tokens: Any, targets: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                logits = model(tokens).logits if own else model(tokens)
                return loss_of(logits.float() if whole else logits, targets)

        return loss

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
        """Return the loss of the first batch with all weights of two axes times each number, a power of two.

        It is that of float32, whatever the session trains in: from a model of its own, before the first step.
        """
        if self.bf16:
            model = self.model()
            loss, parameters = self.loss_by(model, narrow=False), [*model.parameters()]
        else:
            loss, parameters = self.loss, [p for group in self.optimizer.param_groups for p in group["params"]]
        matrices = {id(p): p.data for p in parameters if p.ndim == 2}
        found = []
        for scale in scales:
            for p in matrices.values():
                p *= scale
            found.append(loss(*self.batches[0]).item())
            for p in matrices.values():
                p /= scale
        if self.bf16:
            del model, loss, parameters, matrices, p
            forget_peak()  # of a model that training does not have
        return {"losses": found}

    def library(self) -> dict[str, Any]:
        """Measure one product alone in the type that the session multiplies, and find what runs it."""
        torch = self.torch
        dtype = torch.bfloat16 if self.bf16 else torch.float32
        x, weight = torch.randn(TOKENS, WIDTH, dtype=dtype), torch.randn(INNER, WIDTH, dtype=dtype)
        with torch.no_grad():
            run = lambda: torch.nn.functional.linear(x, weight)  # noqa: E731
            run()
            times, end = [], time.perf_counter() + SAMPLES_S
            while not times or time.perf_counter() < end:
                start = time.perf_counter()
                run()
                times.append(time.perf_counter() - start)
        return {
            "torch": torch.__version__,
            "capability": torch.backends.cpu.get_cpu_capability(),
            "products_by": ran_by(printed(torch, run), self.tuning.get("mkl") == CHOSEN),
            "linear_gflops": 2 * TOKENS * WIDTH * INNER / min(times) / 1e9,
            "tuning": self.tuning,
        }

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


def printed(torch: Any, run: Callable[[], Any]) -> str:
    """Return what oneDNN and MKL print on a call in their verbose modes. They write to the C library's stdout."""
    libc = ctypes.CDLL(None)
    mkl = torch.backends.mkl.verbose(1) if torch.backends.mkl.is_available() else nullcontext()
    mkldnn = torch.backends.mkldnn.verbose(1) if torch.backends.mkldnn.is_available() else nullcontext()
    with tempfile.TemporaryFile() as file:
        libc.fflush(None)
        before = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            with mkl, mkldnn:
                run()
            libc.fflush(None)
        finally:
            os.dup2(before, 1)
            os.close(before)
        file.seek(0)
        return file.read().decode(errors="replace")


def ran_by(text: str, chosen: bool = False) -> str:
    """Name the library that ran a product, and its code, from what both print.

    MKL names the processor that it chose its code for: ``Intel(R) Architecture`` is any, which gets no AVX-512, unless
    MKL has `chosen` by features, which it does not print.
    """
    for line in text.splitlines():
        words = line.split(",")
        if line.startswith("onednn_verbose") and "exec" in words:
            return f"oneDNN {words[words.index('exec') + 3]}"
    if match := re.search(r"^MKL_VERBOSE (\w+)\(", text, re.MULTILINE):
        named = re.search(r"64 architecture (.*?),? (?:enabled )?processors", text)
        return f"MKL {match[1]}" + (", own choice of code" if chosen else f" for {named[1]}" if named else "")
    return "neither oneDNN nor MKL"


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
            f"{mode}: this peer has no {request['model']!r}; compare with --peer torch-eager, or --against vanilla"
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


def forget_peak() -> None:
    """Reset the peak of this process's memory to its current use, if the system can."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


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


def serve(handlers: Mapping[str, Callable[[dict[str, Any], Callable[[str], None]], dict[str, Any]]]) -> None:
    """Answer requests, lines of JSON, until stdin closes, as ``cpuopt/isolate/serve.py`` does."""
    with os.fdopen(os.dup(1), "w") as channel, open(0) as requests:
        os.dup2(2, 1)  # what a library prints must not come between the answers

        def answer(content: dict[str, Any]) -> None:
            channel.write(json.dumps(content) + "\n")
            channel.flush()

        for line in requests:
            request = json.loads(line)
            try:
                answer(handlers[request["do"]](request, lambda text: answer({"progress": text})))
            except PeerError as e:
                answer({"error": str(e)})


def main() -> None:
    """Answer the requests of `cpuopt bench`."""
    made: list[Session] = []

    def checked(request: dict[str, Any], say: Any) -> dict[str, Any]:
        check(request)
        return {}

    def init(request: dict[str, Any], say: Any) -> dict[str, Any]:
        if request["mode"] == "compile":
            say("torch.compile compiles")
        made[:] = [Session(request)]
        torch = made[0].torch
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        return {"threads": torch.get_num_threads(), "versions": versions}

    serve({
        "check": checked,
        "init": init,
        "loss": lambda request, say: made[0].losses(request["scales"]),
        "steps": lambda request, say: made[0].steps(request["n"]),
        "peak": lambda request, say: {"peak_rss_mb": peak_rss_mb(), "versions": {}, "library": made[0].library()},
    })  # fmt: skip


if __name__ == "__main__":
    main()

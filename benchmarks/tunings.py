"""What settings that PyTorch's users know are worth to a step: each beside the tuned mode of `cpuopt bench`, in pairs.

::

    python benchmarks/tunings.py --peer-python PYTHON [--size 4x64] [--mode compile] [--only tcmalloc 'huge pages']

All sides train the same GPT-2 on random tokens, each in a process of its own, and are stopped while they are not on
trial. A setting whose library is not installed is left out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from flags import size

HERE = Path(__file__).resolve()
THREADS, BATCHES = 2, 4
OPTIMIZER = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}


@dataclass(frozen=True)
class Setting:
    """A way to run PyTorch: variables, libraries to preload, and what `Changed` changes."""

    tuned: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)
    preload: str = ""
    change: str = ""


INTEL = {"KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"}
KEEPS = {"MALLOC_CONF": "oversize_threshold:1,background_thread:true,dirty_decay_ms:-1,muzzy_decay_ms:-1"}
SETTINGS = {
    "tuned": Setting(),
    "as it comes": Setting(tuned=False),
    "MKL's code alone": Setting(change="mkl"),
    "the allocator alone": Setting(change="allocator"),
    "tcmalloc": Setting(preload="libtcmalloc_minimal.so.4", change="mkl"),
    "jemalloc": Setting(preload="libjemalloc.so.2", environment=KEEPS, change="mkl"),
    "Intel's OpenMP": Setting(preload="libiomp5.so", environment=INTEL),
    "bound threads": Setting(environment={"OMP_PROC_BIND": "close", "OMP_PLACES": "cores"}),
    "spinning threads": Setting(environment={"OMP_WAIT_POLICY": "active"}),
    "huge pages": Setting(environment={"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}),
    "linear_cross_entropy": Setting(change="loss"),
    "foreach AdamW": Setting(change="foreach"),
    "max_autotune": Setting(environment={"TORCHINDUCTOR_MAX_AUTOTUNE": "1"}),
}
"""By name; the first is what the others are compared with."""


def serve() -> None:
    """PyTorch's side: `peer_worker`, with a model and an optimizer that a setting changes."""
    import peer_tuning
    import peer_worker

    class Changed(peer_worker.Session):
        def __init__(self, request: dict[str, Any]) -> None:
            if request["change"] == "mkl":
                peer_tuning.keep_memory = lambda: "as it was"
            if request["change"] == "allocator":
                peer_tuning.choose_code = lambda cpuinfo: "as it was"
            super().__init__(request)
            if request["change"] == "foreach":
                parameters = self.optimizer.param_groups[0]["params"]
                self.optimizer = self.torch.optim.AdamW(parameters, lr=OPTIMIZER["lr"], weight_decay=0.0, foreach=True)

        def model(self) -> Any:
            import peer_gpt2

            return peer_gpt2.GPT2(**self.request["sizes"])

        def loss_by(self, model: Any, narrow: bool = True) -> Any:
            if self.request["change"] != "loss":
                return super().loss_by(model, narrow)
            from torch.nn import functional as F

            hidden: list[Any] = []
            model.ln_f.register_forward_hook(lambda module, x, y: hidden.append(y) or y[:, :1])

            def loss(tokens: Any, targets: Any) -> Any:
                model(tokens)  # the head reads one token of each row; the loss has its own
                x = hidden.pop()
                return F.linear_cross_entropy(x.flatten(0, 1), model.wte.weight, targets.flatten())

            return loss

    peer_worker.Session = Changed
    peer_worker.main()


def found(library: str, python: str) -> str | None:
    """Return where a library is: the system's, or one that pip brought."""
    places = [Path("/usr/lib", f"{machine}-linux-gnu") for machine in ("x86_64", "aarch64")]
    return next((str(p / library) for p in [*places, Path(python).parents[1] / "lib"] if (p / library).is_file()), None)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print a line for each setting."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    p.add_argument("--peer-python", default=sys.executable)
    p.add_argument("--model", default="gpt2-124M")
    p.add_argument("--size", type=size, default="4x64", metavar="BxT")
    p.add_argument("--mode", default="eager", choices=("eager", "compile"))
    p.add_argument("--bf16", default="", choices=("", "autocast", "all"))
    p.add_argument("--rounds", type=int, default=6)
    p.add_argument("--steps", type=int, default=3)
    p.add_argument("--only", nargs="*", default=[*SETTINGS], metavar="NAME")
    p.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    a = p.parse_args(argv)
    if a.serve:
        return serve()
    import numpy as np

    from cpuopt import models
    from cpuopt.isolate.process import Side, Worker

    B, T = map(int, a.size.split("x"))
    config = models.parse(a.model)
    sizes = asdict(config)
    base = next(iter(SETTINGS))
    settings = {"mode": a.mode, "bf16": a.bf16, "model": config.model, "sizes": sizes, "T": T, "threads": THREADS}
    settings |= {"optimizer": OPTIMIZER, "params": ""}

    def start(name: str, stack: ExitStack, folder: str) -> Worker:
        s = SETTINGS[name]
        environment = {"OMP_NUM_THREADS": str(THREADS), "MKL_NUM_THREADS": str(THREADS), **s.environment}
        if s.preload:
            environment["LD_PRELOAD"] = found(s.preload, a.peer_python) or ""
        side = Side(name, (a.peer_python, str(HERE), "--serve"), {}, environment)
        worker = stack.enter_context(Worker(side, rests=True))
        worker.ask("init", **settings, tuned=s.tuned, change=s.change, batches=f"{folder}/batches.npy")
        worker.steps(2)
        return worker

    print(f"{a.model} {a.size} {a.mode} {a.bf16}: ms a step, that of {base!r} over it in pairs, and peak memory")
    for name in a.only:
        if SETTINGS[name].preload and not found(SETTINGS[name].preload, a.peer_python):
            print(f"{name}: left out, there is no {SETTINGS[name].preload}")
            continue
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="cpuopt-tunings-"))
            drawn = np.random.default_rng(0).integers(0, sizes["vocab_size"], (BATCHES, 2, B, T))
            np.save(f"{folder}/batches.npy", drawn)
            sides = [start(base, stack, folder), start(name, stack, folder)]
            times: list[list[float]] = [[], []]
            for n in range(a.rounds):
                for i in (0, 1) if n % 2 else (1, 0):
                    times[i].append(median(sides[i].steps(1 + a.steps).later().step_ms))
            ratios = sorted(x / y for x, y in zip(*times, strict=True))
            gain = f"{median(ratios):.3f} [{ratios[0]:.3f}, {ratios[-1]:.3f}]"
            print(f"{name:22s} {median(times[1]):9.1f}  {gain}  {sides[1].peak()['peak_rss_mb']:,.0f} MB", flush=True)


if __name__ == "__main__":
    main()

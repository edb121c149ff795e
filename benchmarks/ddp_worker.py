"""A rank of PyTorch's DistributedDataParallel over gloo, driven through `jobs`; torchrun starts it.

A step is what a training loop does; ranks that have several micro-batches exchange gradients after the last alone.
"""

from __future__ import annotations

import os
import time
import zlib
from contextlib import nullcontext
from typing import Any

from jobs import serve
from peer_tuning import tune

tune()  # before torch

import torch  # noqa: E402
from peer_worker import Session, peak_rss_mb  # noqa: E402
from torch import distributed  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Rank(Session):
    """A model that steps through this rank's micro-batches.

    Parameters
    ----------
    request : as for `Session`; ``micro_batches`` is the number of a step on all ranks.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        def wrap(model: torch.nn.Module) -> torch.nn.Module:
            self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
            return self.model

        super().__init__(request, wrap)
        self.total = request["micro_batches"]

    def step(self) -> tuple[float, float]:
        """Take one step; return its ms and this rank's mean loss."""
        n = self.total // SIZE
        first = self.done * self.total + RANK * n
        mine = [self.batches[i % len(self.batches)] for i in range(first, first + n)]
        losses = []
        start = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        for i, (tokens, targets) in enumerate(mine):
            with nullcontext() if i == n - 1 else self.model.no_sync():
                loss = self.loss(tokens, targets) / n
                loss.backward()
                losses.append(loss.detach())
        self.optimizer.step()
        took = (time.perf_counter() - start) * 1e3
        self.done += 1
        return took, sum(loss.item() for loss in losses)

    def steps(self, n: int) -> dict[str, Any]:
        """Train for n steps."""
        step_ms, losses = zip(*(self.step() for _ in range(n)), strict=True)
        return {"step_ms": step_ms, "losses": losses}

    def facts(self) -> dict[str, Any]:
        """Return the checksum of the weights, and the peak memory."""
        crc = 0
        for p in self.model.parameters():
            crc = zlib.crc32(p.detach().contiguous().numpy().tobytes(), crc)
        return {"crc": f"{crc:08x}", "peak": peak_rss_mb() * 1e6}


def main() -> None:
    """Take a part of the cores, as cpuopt's ranks do, and answer requests."""
    cores = sorted(os.sched_getaffinity(0))
    ends = [len(cores) * r // SIZE for r in (RANK, RANK + 1)]
    os.sched_setaffinity(0, cores[slice(*ends)] or cores)
    distributed.init_process_group("gloo")
    made: list[Rank] = []

    def init(request: dict[str, Any]) -> dict[str, Any]:
        made.append(Rank(request))
        return {"version": torch.__version__, "threads": torch.get_num_threads()}

    serve(RANK, {"init": init, "steps": lambda r: made[0].steps(r["n"]), "facts": lambda r: made[0].facts()})


if __name__ == "__main__":
    main()

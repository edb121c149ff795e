"""The work of each optimized kernel, cut for many threads, as a table of chunks.

    python benchmarks/chunks.py

The kernels run once, on one thread, with scratch for 16 and for 64; ``toolkit.regions`` counts their chunks. One block
of each model runs, since all blocks have the same sizes, with the rewrites that are usual and without any.

A call is small where each of the threads would get less than ``SMALL`` of its FLOPs and of its bytes. Of the others,
none may leave more than a quarter of the threads idle without a reason in ``REASONS``; the script fails where one does.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from cpuopt import Engine, models
from cpuopt.building import Bound
from cpuopt.kernels.toolkit import regions, threads
from cpuopt.kernels.toolkit.simd import LANES, MR, NR
from cpuopt.lab.scale import queue
from cpuopt.measure.scaling import rounds_of
from cpuopt.program.program import Call

GPT2 = {"model": "gpt2", "n_layer": 1}
NANO = {**GPT2, "n_head": 4, "n_embd": 128, "vocab_size": 256}
BABY = {**GPT2, "n_head": 6, "n_embd": 384, "vocab_size": 256}
STORIES = {"model": "llama", "num_hidden_layers": 1, "hidden_size": 288, "intermediate_size": 768, "head_dim": 48}
STORIES |= {"num_attention_heads": 6, "num_key_value_heads": 6, "max_position_embeddings": 256}
SIZES = {
    "nano 12x64": (NANO, 12, 64),
    "baby 8x256": (BABY, 8, 256),
    "stories 4x256": (STORIES, 4, 256),
    "124M 1x16": (GPT2, 1, 16),
    "124M 1x64": (GPT2, 1, 64),
    "124M 4x64": (GPT2, 4, 64),
    "124M 16x64": (GPT2, 16, 64),
    "124M 1x1024": (GPT2, 1, 1024),
}
THREADS = (16, 64)
SMALL = {"flops": 100_000, "bytes": 32 << 10}
"""A microsecond or two of one core, less than 64 threads take to start."""
BUSY = 0.75
PRODUCT = "a chunk is at least a vector of rows or a panel of columns wide, and a narrow product has few of them"
HEADS = "a head is cut by blocks of 64 queries, and there are few heads or short rows"
PARTIAL = "32 partial sums: their number fixes the order of the additions, so that threads change no bit"
ROWS = "a chunk is one token's row, and there are few tokens"
REASONS = {
    "attention": HEADS,
    "gqa": HEADS,
    "layernorm_backward": PARTIAL,
    "rmsnorm_backward": PARTIAL,
    "embedding_backward": "32 owners of rows, each of which reads through all tokens",
    "embedding": ROWS,
    "layernorm": ROWS,
    "rmsnorm": ROWS,
    "residual_layernorm": ROWS,
    "residual_rmsnorm": ROWS,
    "rope": ROWS,
    "cross_entropy": ROWS,
    "matmul": PRODUCT,
    "classifier": f"the gradient of its input is a narrow product: {PRODUCT}",
    "sumsq": "a chunk is 64 KB: the matrices of a small model have few",
    "adamw": "a chunk is 32 KB of each array: the matrices of a small model have few",
    "": "a chunk is 16 KB of each array",
}
"""The reason for idle threads by the first words of an op's name; the longest that fits counts."""


def cuts(spec: dict[str, Any], B: int, T: int, fuse: str) -> Iterator[tuple[Call, dict[int, int]]]:
    """Yield each call of a step with its chunks by number of threads.

    Of a call's regions the one with the fewest counts: of those that take tickets where there are any, since they are
    the work, and others beside them only pack or finish.
    """
    name = "block_size" if spec["model"] == "gpt2" else "max_position_embeddings"
    config, module = models.load(json.dumps({**spec, name: max(T, spec.get(name, T))}))
    engine = Engine(module, config.specs(B, T), threads=1, fuse=fuse)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (B, T + 1))
    log, found = regions.Log(), dict[int, tuple[Call, dict[int, int]]]()
    for n in THREADS:
        with threads.planned_for(n):
            bindings = engine.rescratched()

        def run(calls: Any, n: int = n, bindings: dict[int, Bound] = bindings) -> None:
            for bound in calls:
                mine = bindings[id(bound)]
                log.follow(queue(mine))
                log.regions()
                mine.kernel.function(*mine.args)
                ran = [r for r in log.regions() if r.chunks]
                ticketed = [r.chunks for r in ran if r.by_ticket]
                found.setdefault(id(bound), (bound.call, {}))[1][n] = min(
                    ticketed or [r.chunks for r in ran], default=1
                )

        engine.runner = run
        engine.step(tokens=ids[:, :-1], targets=ids[:, 1:])
    yield from found.values()


def busy(chunks: int, n: int) -> float:
    """Return the share of n threads that equal chunks keep busy."""
    return chunks / (n * rounds_of(chunks, n))


def is_small(call: Call, n: int) -> bool:
    """Return whether n threads would get too little each to be worth their start."""
    return call.flops < n * SMALL["flops"] and call.bytes < n * SMALL["bytes"]


def worst(call: Call, chunks: dict[int, int]) -> tuple[bool, float, float]:
    """Order the calls of an op: those that are not small first, by the threads that they keep busy, then by size."""
    return is_small(call, 64), min(busy(chunks[n], n) for n in THREADS), -call.flops


def reason(op: str) -> str:
    """Return why an op leaves threads idle; empty where no reason is known."""
    known = [start for start in REASONS if start and op.startswith(start)]
    elementwise = ("gelu", "silu", "swiglu", "geglu", "residual_forward", "residual_backward", "mul", "scale", "copy")
    return REASONS[max(known, key=len)] if known else REASONS[""] if op.startswith(elementwise) else ""


def text() -> str:
    """Make the tables."""
    cells: dict[str, dict[str, tuple[Call, dict[int, int]]]] = {}
    for size, (spec, B, T) in SIZES.items():
        for fuse in "auto", "none":
            for call, chunks in cuts(spec, B, T, fuse):
                row = cells.setdefault(call.op.name, {})
                if size not in row or worst(call, chunks) < worst(*row[size]):
                    row[size] = call, chunks
    lines = [f"Made by `python benchmarks/chunks.py`, with vectors of {LANES} and tiles of {MR} by {NR} floats.", ""]
    lines += ["| kernel | " + " | ".join(SIZES) + " |", "| --- |" + " --- |" * len(SIZES)]
    idle, unnamed = dict[str, list[str]](), list[str]()
    for op, row in cells.items():
        shown = []
        for size in SIZES:
            if size not in row:
                shown.append("")
                continue
            call, chunks = row[size]
            small = is_small(call, 64)
            few = [n for n in THREADS if busy(chunks[n], n) < BUSY and not is_small(call, n)]
            shares = "/".join(f"{100 * rounds_of(chunks[n], n) / chunks[n]:.1f}" for n in THREADS)
            shown.append(f"{chunks[16]}/{chunks[64]}, {shares}{' small' if small else ' *' if few else ''}")
            if few:
                idle.setdefault(reason(op), []).append(op)
                unnamed += [f"{op} at {size}: {chunks}"] if not reason(op) else []
        lines.append(f"| `{op}` | " + " | ".join(shown) + " |")
    if unnamed:
        raise SystemExit("chunks: threads are idle, and no reason is named:\n" + "\n".join(unnamed))
    lines += ["", "Where `*` leaves more than a quarter of 16 or of 64 threads idle:", ""]
    for why, ops in idle.items():
        lines.append(f"- {', '.join(f'`{op}`' for op in dict.fromkeys(ops))}: {why}.")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the tables."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    regions.watch()  # before any kernel is loaded
    print(text(), end="")


if __name__ == "__main__":
    main()

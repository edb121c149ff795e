"""Ranks that exchange arrays, and print one checksum: the same for any number of ranks, and for memory and messages."""

import sys
import zlib

import numpy as np

from cpuopt.comm import mpi
from cpuopt.program.tree import across

N, LEAVES = 1 << 18, 4
mutant = "in_order" in sys.argv
mpi.PIECE = 100_000  # bytes, several of them in what is exchanged
comm = mpi.Mpi()
rank, size = comm.rank, comm.size
cuts = [N * r // size for r in range(size + 1)]
memory = comm.memory(4 * N) if comm.shared else np.zeros(4 * N, np.uint8)
of_rank = memory.view(np.float32).reshape(-1, N)
own, mine = of_rank[rank % len(of_rank)], slice(cuts[rank], cuts[rank + 1])
boxes = np.zeros((size, cuts[rank + 1] - cuts[rank]), np.float32)
crc = 0
for step in range(5):
    drawn = [np.random.default_rng([step, i]).standard_normal(N).astype(np.float32) for i in range(LEAVES)]
    share = drawn[rank * LEAVES // size : (rank + 1) * LEAVES // size]
    while len(share) > 1:
        share = [a + b for a, b in zip(share[::2], share[1::2], strict=True)]
    own[:] = share[0]
    pieces = {rank: own[mine]}
    for peer in (r for r in range(size) if r != rank):
        pieces[peer] = of_rank[peer][mine] if comm.shared else boxes[peer]
        comm.exchange(pieces[peer], own[cuts[peer] : cuts[peer + 1]], peer)
        comm.progress()
    for peer in (r for r in range(size) if r != rank):
        comm.complete(pieces[peer])
    for to, by in [(rank, r) for r in range(size) if r != rank] if mutant else across(size, rank):
        pieces[to] += pieces[by]
    total, part = np.zeros((2, N))
    part[mine] = pieces[next(iter(across(size, rank)[-1:]), (rank,))[0] if not mutant else rank]
    comm.combine(total, part)
    crc = zlib.crc32(total.tobytes(), crc)
fast = np.full(3, rank + 1, np.float32)
comm.all_reduce(fast)
comm.progress()
comm.complete(fast)
assert (fast == size * (size + 1) / 2).all()
assert comm.everyone({"rank": rank, "long": "x" * rank}) == [{"rank": r, "long": "x" * r} for r in range(size)]
if not rank:
    print(f"{crc:08x}", "memory" if comm.shared else "messages", *comm.notes)
comm.barrier()
comm.close()

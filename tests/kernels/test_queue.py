"""Every chunk of a queue is taken once; a thread takes those of its share, the same ones every time, before others."""

import numpy as np
import pytest
from numba import config, prange

from cpuopt.kernels.compile.jit import helper
from cpuopt.kernels.toolkit.queue import ORDERED, QUEUE, deal, for_each_thread, take
from cpuopt.kernels.toolkit.simd import LINE


@helper(parallel=True)
def drain(queue, taken, threads):
    """Take everything by so many threads."""
    for t in prange(threads):
        chunk = take(queue, t)
        while chunk >= 0:
            taken[chunk] += 1
            chunk = take(queue, t)


@helper()
def order(queue, t):
    """List what one thread takes."""
    found = []
    chunk = take(queue, t)
    while chunk >= 0:
        found.append(chunk)
        chunk = take(queue, t)
    return found


def made(shares: int, chunks: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    queue = np.full(LINE * (shares + 1), 12345, np.int32)
    deal(queue, chunks)
    return queue


@pytest.mark.parametrize("shares", [1, 2, 3, 16])
@pytest.mark.parametrize("chunks", [0, 1, 2, 15, 16, 17, 10_000])
def test_each_chunk_is_taken_once(shares: int, chunks: int) -> None:
    taken = np.zeros(chunks, np.int64)
    drain(made(shares, chunks), taken, 4)
    assert (taken == 1).all()


@pytest.mark.parametrize(("shares", "chunks"), [(1, 7), (2, 7), (3, 7), (4, 16), (16, 3)])
def test_a_thread_takes_its_own_share_first_and_then_those_after_it(shares: int, chunks: int) -> None:
    ends = [-(-i * chunks // shares) for i in range(shares + 1)]
    for t in range(shares):
        turn = [*range(t, shares), *range(t)]
        assert order(made(shares, chunks), t) == [c for i in turn for c in range(ends[i], ends[i + 1])]


def test_a_kernel_has_a_share_for_each_thread_and_an_ordered_queue_has_one() -> None:
    assert (QUEUE[1]({}) // LINE - 1, ORDERED[1] // LINE - 1) == (config.NUMBA_NUM_THREADS, 1)
    assert for_each_thread(3)({}) == 3 * config.NUMBA_NUM_THREADS
    assert for_each_thread(lambda sizes: sizes["C"])({"C": 5}) == 5 * config.NUMBA_NUM_THREADS

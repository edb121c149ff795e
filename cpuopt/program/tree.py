"""The fixed tree in which a step's gradients are added, whatever number of ranks makes them.

The leaves are the M micro-batches of a step, in their order. Two neighbours of equal size are added as soon as both are
there, as a binary counter carries; what is left at the end is added from the smallest on. A rank that has M/W of the
leaves, a power of two, makes a whole subtree of them, and the ranks' subtrees are added by the same rule. So every sum
has the same two terms for any W, and float32 sums of two terms do not depend on their order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MOST_MICRO_BATCHES = 1 << 20
"""The most that a step can have, because each micro-batch of each step has random numbers of its own."""
OWN: int | None = None
"""The place of the gradients themselves; other places are numbered buffers."""


@dataclass(frozen=True)
class Leaf:
    """A micro-batch of a rank.

    Attributes
    ----------
    target : the buffer that its backward writes, or `OWN`.
    sums : the additions that follow, each a buffer that is added to and one that is added.
    """

    target: int | None
    sums: list[tuple[int | None, int | None]] = field(default_factory=list)


def leaves(n: int) -> list[Leaf]:
    """Plan the micro-batches of one rank, so that few buffers are needed; the sum of all ends up in `OWN`."""
    found: list[Leaf] = []
    stack: list[tuple[int, int]] = []  # buffer and number of leaves that it sums
    for i in range(n):
        last = i == n - 1
        if i % 2 == 0 and not last:
            buffer = next(b for b in range(n) if all(b != used for used, _ in stack))
            stack.append((buffer, 1))
            found.append(Leaf(buffer))
            continue
        leaf, place, size = Leaf(OWN), OWN, 1
        while stack and (last or stack[-1][1] == size):
            below, count = stack.pop()
            leaf.sums.append((OWN, below) if last else (below, place))
            place, size = (OWN if last else below), size + count
        if not last:
            assert place is not None
            stack.append((place, size))
        found.append(leaf)
    return found


def buffers(n: int) -> int:
    """Count the buffers that a rank needs for n micro-batches besides the gradients."""
    return max((leaf.target + 1 for leaf in leaves(n) if leaf.target is not None), default=0)


def across(size: int, rank: int) -> list[tuple[int, int]]:
    """List the additions of the ranks' sums, each a rank whose array is added to and one whose is added.

    The sum ends up in the array of `rank`.
    """
    stack: list[tuple[list[int], int]] = []  # ranks of a subtree, the place of its sum first, and their number
    found: list[tuple[int, int]] = []

    def join() -> None:
        (right, n), (left, m) = stack.pop(), stack.pop()
        to, by = (right, left) if rank in right else (left, right)
        found.append((to[0], by[0]))
        stack.append((to + by, n + m))

    for r in range(size):
        stack.append(([r], 1))
        while len(stack) > 1 and stack[-1][1] == stack[-2][1]:
            join()
    while len(stack) > 1:
        join()
    return found


def divides(ranks: int, micro_batches: int) -> bool:
    """Return whether ranks can share the micro-batches of a step: each has a power of two of them, or one has all."""
    share, left = divmod(micro_batches, ranks)
    return ranks == 1 or (share > 0 and not left and share & (share - 1) == 0)

"""Batches of tokens, as a pure function of (seed, epoch, index): no state to save, nothing to replay on resume."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from .stored import DataError, Source

Batch = tuple[NDArray[np.int32], NDArray[np.int32]]
"""Inputs and targets, each (B, T)."""


SORTED = 1 << 20
"""Windows up to which an epoch is shuffled by sorting, in 25 MB; larger ones are shuffled without a table."""


def require_seed(seed: int | None) -> None:
    """Refuse a negative seed."""
    if seed is not None and seed < 0:
        raise UserError(f"seed {seed} is negative; expected 0 or more")


class Batches:
    """Batches of B windows of T tokens. The windows depend on (seed, epoch, index) alone, so any batch can be repeated.

    As llm.c's shards: windows do not overlap, targets are inputs shifted by one, and an epoch has
    ``(tokens.size - 1) // (B * T)`` batches. Each epoch shuffles single windows, so that the rows of a batch come from
    different places; up to B - 1 windows, others each time, are left over.

    Parameters
    ----------
    tokens : (n,) of an integer type that int32 can hold.
    B, T : rows of a batch, and tokens of a row.
    seed : the random seed of the order; None keeps the order of the text in every epoch.
    vocab_size : ids are checked to lie below it, since kernels index with them unchecked.
    name : the name of the tokens, for an error.

    Raises
    ------
    UserError
        If there are too few tokens for one batch, or the seed is negative.
    """

    def __init__(
        self, tokens: Source, B: int, T: int, *, seed: int | None = None, vocab_size: int, name: str = "tokens"
    ) -> None:
        if not np.can_cast(tokens.dtype, np.int32):
            raise TypeError(f"tokens have type {tokens.dtype}; expected one that int32 can hold")
        require_seed(seed)
        require_one_batch(name, tokens.size, B, T)
        self.tokens, self.B, self.T, self.seed, self.vocab_size, self.name = tokens, B, T, seed, vocab_size, name
        self._shuffled: tuple[int, NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        """The number of batches of an epoch."""
        return (self.tokens.size - 1) // (self.B * self.T)

    @property
    def n_tokens(self) -> int:
        """The number of tokens that they come from."""
        return self.tokens.size

    @property
    def n_windows(self) -> int:
        """The number of windows that an epoch draws from."""
        return (self.tokens.size - 1) // self.T

    def at(self, n: int) -> Batch:
        """Return the n-th batch since the beginning of training, whatever the epoch."""
        return self.batch(*divmod(n, len(self)))

    def batch(self, epoch: int, index: int) -> Batch:
        """Return inputs and targets, each (B, T) int32.

        Raises
        ------
        DataError
            If a token does not lie in the vocabulary, or the file has changed since it was opened.
        IndexError
            If the epoch has no such batch.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        windows = np.arange(index * self.B, (index + 1) * self.B)
        if self.seed is not None:
            order = np.random.SeedSequence(self.seed, spawn_key=(epoch,))
            windows = self._sorted(epoch, order)[windows] if self.n_windows <= SORTED else self._walked(windows, order)
        starts = windows * self.T
        rows = np.stack([self.tokens[start : start + self.T + 1] for start in starts]).astype(np.int32)  # (B, T+1)
        self._check(rows, starts)
        return np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])

    def _sorted(self, epoch: int, order: np.random.SeedSequence) -> NDArray[np.int64]:
        """Return the order of all windows in an epoch."""
        if self._shuffled is None or self._shuffled[0] != epoch:
            self._shuffled = epoch, sorted_order(order, self.n_windows)
        return self._shuffled[1]

    def _walked(self, places: NDArray[np.int64], order: np.random.SeedSequence) -> NDArray[np.int64]:
        """Return the windows at some places of an epoch's order, without computing the whole order."""
        n, keys = np.uint64(self.n_windows), order.generate_state(ROUNDS, np.uint64).astype(np.uint64)
        x = feistel(places.astype(np.uint64), self.n_windows, keys)
        while (beyond := x >= n).any():
            x[beyond] = feistel(x[beyond], self.n_windows, keys)
        return x.astype(np.int64)

    def _check(self, rows: NDArray[np.int32], starts: NDArray[np.int64]) -> None:
        if rows.min() < 0 or rows.max() >= self.vocab_size:
            for row, start in zip(rows, starts, strict=True):
                require_known_ids(self.name, row, self.vocab_size, int(start))


def sorted_order(seed: np.random.SeedSequence, n: int) -> NDArray[np.int64]:
    """Return a random order of n things.

    Sorting raw random words, since NumPy promises the same words in every version; of ``permutation`` it does not.
    """
    return np.argsort(np.random.PCG64(seed).random_raw(n), kind="stable")


ROUNDS = 8


def feistel(x: NDArray[np.uint64], n: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Permute the numbers below the next power of four from `n` on: a Feistel network, a round for each key.

    Source: Black and Rogaway, "Ciphers with arbitrary finite domains" (2002), with the mixer of splitmix64.
    """
    half = np.uint64(((n - 1).bit_length() + 1) // 2)
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = x >> half, x & mask
    for key in keys:
        z = right + key
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        left, right = right, left ^ ((z ^ (z >> np.uint64(31))) & mask)
    return left << half | right


def require_known_ids(name: str, tokens: Source, vocab_size: int, first: int = 0) -> None:
    """Check that all tokens lie in the vocabulary, a part at a time; `first` is the number of the first of them."""
    if np.iinfo(tokens.dtype).min == 0 and np.iinfo(tokens.dtype).max < vocab_size:
        return
    for start in range(0, tokens.size, 1 << 24):
        part = tokens[start : start + (1 << 24)]
        if part.min() < 0 or part.max() >= vocab_size:
            at = int(np.argmax((part < 0) | (part >= vocab_size)))
            raise DataError(
                f"{name}: token {first + start + at} is {part[at]}; expected 0 to {vocab_size - 1}, because the "
                f"model's vocabulary has {vocab_size}; choose other data or a larger vocabulary"
            )


def require_one_batch(name: str, n: int, B: int, T: int) -> None:
    """Check that `n` tokens make a batch; the error names sizes that fit."""
    if B < 1 or T < 1:
        raise UserError(f"got B = {B} rows of T = {T} tokens; expected at least 1 of each")
    if n < B * T + 1:
        fits = [f"B <= {(n - 1) // T} with T = {T}"] if n > T else []
        fits += [f"T <= {(n - 1) // B} with B = {B}"] if n > B else []
        raise UserError(
            f"{name}: has {n} tokens; a batch of B = {B} rows of T = {T} needs {B * T + 1}, because targets are inputs "
            f"shifted by one; take {' or '.join([*fits, 'more data'])}"
        )

"""Data: a corpus from what the user names, and its batches as a pure function of (seed, epoch, index).

Nothing here uses the network, and importing it reads no file.
"""

from __future__ import annotations

import glob
import os
import re
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import translate
from pathlib import Path
from typing import Literal
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from .datasets import DATASETS, dataset_files, list_datasets, prepare, prepare_command
from .errors import UserError
from .tokenizers import Tokens, get_tokenizer, read_tokens, write_tokens

__all__ = [
    "Batches",
    "Corpus",
    "get_tokenizer",
    "list_datasets",
    "load_corpus",
    "prepare",
    "read_tokens",
    "write_tokens",
]

Split = Literal["train", "val"]
Batch = tuple[NDArray[np.int32], NDArray[np.int32]]


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens to train on, and others to validate on.

    Attributes
    ----------
    name : what the user gave: ``builtin``, a dataset, a path or a glob.
    source : where the tokens come from, for a person.
    tokenizer : ``bytes`` or ``gpt2``; `get_tokenizer` gives it.
    vocab_size : of the model; each batch is checked against it.
    train, val : (n,) uint8 or uint16, read-only; a large file is mapped, not read.
    """

    name: str
    source: str
    tokenizer: str
    vocab_size: int
    train: Tokens
    val: Tokens

    @property
    def n_tokens(self) -> int:
        """The tokens of both splits."""
        return self.train.size + self.val.size

    @property
    def description(self) -> str:
        """One line for the log."""
        counts = f"{self.train.size:,} tokens to train on, {self.val.size:,} to validate"
        return f"{self.name}: {counts} ({self.tokenizer}); {self.source}"

    @property
    def fingerprint(self) -> str:
        """Eight hex digits, from the sizes and the ends of both splits, by which a resumed run notices other data."""
        digest = 0
        for tokens in (self.train, self.val):
            for part in (np.array([tokens.size]), tokens[: 1 << 20], tokens[-(1 << 20) :]):
                digest = crc32(part.astype("<i8").data, digest)
        return f"{digest:08x}"

    def batches(self, split: Split, B: int, T: int, seed: int | None = None) -> Batches:
        """Cut a split into batches: shuffled by `seed`, or in the order of the text without one."""
        tokens = self.train if split == "train" else self.val
        return Batches(tokens, B, T, seed=seed, vocab_size=self.vocab_size, name=f"{self.name} ({split})")


class Batches:
    """Batches of B windows of T tokens; which windows depends on (seed, epoch, index) alone, so any can be had again.

    As llm.c's shards: windows do not overlap, targets are inputs shifted by one, and an epoch has
    ``(tokens.size - 1) // (B * T)`` batches. Each epoch shuffles single windows, so that the rows of a batch come from
    different places; up to B - 1 windows, others each time, are left over.

    Parameters
    ----------
    tokens : (n,) of an integer type that int32 can hold.
    B, T : rows of a batch, and tokens of a row.
    seed : of the order; None keeps the order of the text in every epoch.
    vocab_size : ids are checked to lie below it, since kernels index with them unchecked.
    name : of the tokens, for an error.

    Raises
    ------
    UserError
        Where there are too few tokens for one batch, or the seed is negative.
    """

    def __init__(
        self, tokens: Tokens, B: int, T: int, *, seed: int | None = None, vocab_size: int, name: str = "tokens"
    ) -> None:
        if not np.can_cast(tokens.dtype, np.int32):
            raise TypeError(f"tokens have type {tokens.dtype}; expected one that int32 can hold")
        if seed is not None and seed < 0:
            raise UserError(f"seed {seed} is negative; expected 0 or more")
        _require_one_batch(name, tokens.size, B, T)
        self.tokens, self.B, self.T, self.seed, self.vocab_size, self.name = tokens, B, T, seed, vocab_size, name
        self._shuffled: tuple[int, NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        """The number of batches of an epoch."""
        return (self.tokens.size - 1) // (self.B * self.T)

    def at(self, n: int, out: Batch | None = None) -> Batch:
        """Give the n-th batch since the beginning of training, whatever the epoch."""
        return self.batch(*divmod(n, len(self)), out=out)

    def batch(self, epoch: int, index: int, out: Batch | None = None) -> Batch:
        """Give inputs and targets, each (B, T) int32; `out` receives them if given.

        Raises
        ------
        UserError
            Where a token does not lie in the vocabulary.
        IndexError
            Where the epoch has no such batch.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        windows = np.arange(index * self.B, (index + 1) * self.B)
        if self.seed is not None:
            windows = self._order(epoch)[windows]
        starts = windows * self.T
        rows = np.stack([self.tokens[start : start + self.T + 1] for start in starts]).astype(np.int32)  # (B, T+1)
        self._check(rows, starts)
        inputs, targets = out or (np.empty((self.B, self.T), np.int32), np.empty((self.B, self.T), np.int32))
        inputs[...], targets[...] = rows[:, :-1], rows[:, 1:]
        return inputs, targets

    def _order(self, epoch: int) -> NDArray[np.int64]:
        """Give the order of all windows in an epoch.

        Sorting raw random words, since NumPy promises the same words in every version; of ``permutation`` it does not.
        """
        if self._shuffled is None or self._shuffled[0] != epoch:
            words = np.random.PCG64(np.random.SeedSequence(self.seed, spawn_key=(epoch,)))
            n = (self.tokens.size - 1) // self.T
            self._shuffled = epoch, np.argsort(words.random_raw(n), kind="stable")
        return self._shuffled[1]

    def _check(self, rows: NDArray[np.int32], starts: NDArray[np.int64]) -> None:
        if rows.min() < 0 or rows.max() >= self.vocab_size:
            row, column = np.argwhere((rows < 0) | (rows >= self.vocab_size))[0]
            raise UserError(
                f"{self.name}: token {starts[row] + column} is {rows[row, column]}; expected 0 to {self.vocab_size - 1}, "
                f"because the model's vocabulary has {self.vocab_size}; choose other data or a larger vocabulary"
            )


def _require_one_batch(name: str, n: int, B: int, T: int) -> None:
    if B < 1 or T < 1:
        raise UserError(f"got B = {B} rows of T = {T} tokens; expected at least 1 of each")
    if n < B * T + 1:
        fits = [f"B <= {(n - 1) // T} with T = {T}"] if n > T else []
        fits += [f"T <= {(n - 1) // B} with B = {B}"] if n > B else []
        raise UserError(
            f"{name}: has {n} tokens; a batch of B = {B} rows of T = {T} needs {B * T + 1}, because targets are inputs "
            f"shifted by one; take {' or '.join([*fits, 'more data'])}"
        )


def load_corpus(spec: str, *, vocab_size: int, T: int, B: int) -> Corpus:
    """Load what the user named.

    Parameters
    ----------
    spec
        ``builtin``, a dataset's name, a file, or a glob such as ``src/**/*.txt``. A name comes before a file so called,
        so that it means the same in every directory; ``./tinyshakespeare`` is the file. A ``.bin`` is read as llm.c's
        token file, anything else as text, whose bytes are the tokens.
    vocab_size
        Of the model. It selects the tokenizer of a dataset: ``gpt2`` from 50257 on, else ``bytes``.
    T, B
        Tokens of a row and rows of a batch; both splits must have one batch at least.

    Raises
    ------
    UserError
        Where nothing of that name is there, or it is not what it should be, or is too short.
    """
    if spec == "builtin":
        source, tokenizer, (train, val) = _builtin()
    elif spec in DATASETS:
        source, tokenizer, (train, val) = _dataset(spec, vocab_size)
    else:
        source, tokenizer, (train, val) = _files(spec, _find(spec))
    corpus = Corpus(spec, source, tokenizer, vocab_size, train, val)
    for split, tokens in ("train", train), ("val", val):
        _require_one_batch(f"{spec} ({split})", tokens.size, B, T)
    return corpus


Loaded = tuple[str, str, tuple[Tokens, Tokens]]
"""A corpus's source, tokenizer, and splits."""


def _dataset(name: str, vocab_size: int) -> Loaded:
    tokenizer = "gpt2" if vocab_size >= 50257 else "bytes"
    paths = dataset_files(name, tokenizer)
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise UserError(
            f"dataset {name!r} is not prepared for a vocabulary of {vocab_size}: there is no {missing[0]!r}; "
            f"run `{prepare_command(name, tokenizer)}`"
        )
    return _files(name, paths[:1])


def _find(spec: str) -> list[Path]:
    """Find the file of that name, or else the files that match it as a glob, in order."""
    path = os.path.expanduser(spec)
    if os.path.isfile(path):
        return [Path(path)]
    if "\0" not in path and glob.has_magic(path):
        paths = sorted(Path(p) for p in glob.glob(path, recursive=True) if os.path.isfile(p))
        if not paths:
            raise UserError(f"no file matches {spec!r}; expected a glob such as 'texts/**/*.txt', quoted in the shell")
        return paths
    if os.path.isdir(path):
        raise UserError(
            f"{spec!r} is a directory; expected a file or a glob; try {os.path.join(spec, '**', '*.txt')!r}"
        )
    beside = os.path.dirname(path) or "."
    files = [os.path.join(os.path.dirname(spec), f) for f in os.listdir(beside)] if os.path.isdir(beside) else []
    near = get_close_matches(spec, ["builtin", *DATASETS, *files], n=3)
    raise UserError(
        f"there is no data {spec!r}{', nearest are ' + ', '.join(map(repr, near)) if near else ''}; "
        f"expected builtin, {', '.join(DATASETS)}, a file or a glob"
    )


def _files(name: str, paths: list[Path]) -> Loaded:
    """Load one token file or any number of text files."""
    if all(path.suffix != ".bin" for path in paths):
        texts = {path: text for path in paths if (text := _read_text(path)).size}
        if not texts:
            raise UserError(f"{name!r} is empty; expected text")
        root = os.path.commonpath([os.path.abspath(path.parent) for path in texts])
        named = {Path(os.path.relpath(path, root)).as_posix(): text for path, text in texts.items()}
        return f"text of {_count(texts)}, the first {str(paths[0])!r}", "bytes", split_texts(named)
    if len(paths) > 1:
        raise UserError(
            f"{name!r} matches {len(paths)} files, among them token files (.bin); expected one NAME_train.bin, "
            "beside which NAME_val.bin is found by itself"
        )
    (path,) = paths
    tokens = read_tokens(path)
    shard = re.fullmatch(r"(.*)_train(_\d+)?\.bin", path.name)  # fineweb_train_000001.bin, fineweb_val_000000.bin
    sibling = path.with_name(f"{shard[1]}_val{'_000000' if shard[2] else ''}.bin") if shard else None
    if sibling and sibling.is_file():
        return f"token files {str(path)!r} and {sibling.name!r}", "gpt2", (tokens, read_tokens(sibling))
    return f"token file {str(path)!r}, its last tenth for validation", "gpt2", _split(tokens)


def _read_text(path: Path) -> Tokens:
    """Map a text file into memory, after a look at its beginning."""
    try:
        text = np.asarray(np.memmap(path, np.uint8, mode="r")) if path.stat().st_size else np.empty(0, np.uint8)
    except OSError as e:
        raise UserError(f"cannot read {str(path)!r}: {e.strerror or e}") from e
    beginning = text[:65536]
    control = np.isin(beginning, [c for c in range(32) if chr(c) not in "\b\t\n\v\f\r\x1b"])  # as `file` has it
    if control.sum() > 0.02 * beginning.size or (beginning == 0).any():
        raise UserError(
            f"{str(path)!r} is not text: its first {beginning.size} bytes hold {control.sum()} control characters; "
            "expected UTF-8 text (decompress or convert it), or an llm.c token file named .bin"
        )
    return text


BY_FILE = 100
"""From this many texts on, whole files are validation; of fewer, the last tenth of each."""


def split_texts(texts: Mapping[str, Tokens]) -> tuple[Tokens, Tokens]:
    """Join texts into one to train on and one to validate on.

    A file's side depends on its name alone, so that a file that comes or goes moves no other; 8 % of the names validate.
    """
    if len(texts) < BY_FILE:
        parts = [_split(text) for text in texts.values()]
        return _join([train for train, _ in parts]), _join([val for _, val in parts])
    held_out = {name for name in texts if crc32(name.encode(errors="surrogateescape")) % 100 < 8}
    return (
        _join([text for name, text in texts.items() if name not in held_out]),
        _join([text for name, text in texts.items() if name in held_out]),
    )


def _split(tokens: Tokens) -> tuple[Tokens, Tokens]:
    """Hold out the last tenth, where nanoGPT cuts too."""
    cut = int(tokens.size * 0.9)
    return tokens[:cut], tokens[cut:]


def _join(parts: list[Tokens]) -> Tokens:
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint8), *parts])


def _count(files: Mapping[Path, Tokens]) -> str:
    return f"{len(files):,} file{'s' if len(files) > 1 else ''}"


NOT_BUILTIN = [
    *["test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages"],
    *["_sysconfigdata*", "config-*", "*customize.py"],  # of the machine, not of Python
    *["tkinter", "turtle*", "idlelib", "distutils", "_distutils*", "lib2to3", "ensurepip"],  # distributions leave out
    *["encodings", "pydoc_data", "entities.py"],  # generated tables: megabytes of hex codes teach nothing
]
"""What of the standard library is not text to train on, so that one version of Python gives one corpus."""


def _builtin() -> Loaded:
    """Read the source of the running Python's standard library: a real text that each machine has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = re.compile("|".join(map(translate, NOT_BUILTIN))).match
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not skip(name)]
        found += [Path(folder, name) for name in files if name.endswith(".py") and not skip(name)]
    version = ".".join(map(str, sys.version_info[:3]))
    if len(found) < BY_FILE:
        raise UserError(
            f"builtin: {str(root)!r} has {len(found)} source files; expected {BY_FILE} at least, because builtin is the "
            f"source of Python {version}'s standard library, which this Python lacks; name a text with --data FILE"
        )
    names = sorted((path.relative_to(root).as_posix(), path) for path in found)
    # Windows has the same files with other line ends.
    texts = {name: np.frombuffer(path.read_bytes().replace(b"\r\n", b"\n"), np.uint8) for name, path in names}
    return f"{len(texts)} source files of Python {version}'s standard library", "bytes", split_texts(texts)

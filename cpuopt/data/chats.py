"""Examples of chats and texts from JSON lines, of which only what the assistant says counts for the loss.

A line is one example::

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"prompt": "...", "completion": "..."}      the same as a user's message and the assistant's
    {"text": "..."}                             all of which counts

A row of a batch holds one example or, packed, as many as fit, each of which attends to itself alone; and padding behind
them, of which nothing counts. A tenth of the examples is held out. Which ones depends on their lines alone, and not on
the order of the lines.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from ..wording import count
from .batches import require_known_ids, sorted_order
from .forms import FORMATS, TurnEncoder, require_format
from .shapes import Said, said_by
from .stored import File, tokens_of
from .templates import Template, encoder_of
from .tokenizers import Tokenizer, get_tokenizer, require_fit

IGNORED = -100
"""The target of a token that does not count."""


def is_chats(spec: str) -> bool:
    """Return whether ``--data`` names a file of examples: its name ends in ``.jsonl``."""
    return spec.endswith(".jsonl")


@dataclass(frozen=True, eq=False)
class ChatExample:
    """One line as tokens.

    Attributes
    ----------
    number : counted from 1 in all files.
    where : file and line.
    ids : (n,) int32, cut to the T + 1 tokens that a row reads and predicts.
    counted : (n,) bool, which of them the model learns to write.
    cut : the tokens that were left out.
    """

    number: int
    where: str
    ids: NDArray[np.int32]
    counted: NDArray[np.bool_]
    cut: int

    @property
    def size(self) -> int:
        """The tokens that it takes in a row: its last is predicted, and not read."""
        return self.ids.size - 1

    @property
    def targets(self) -> int:
        """The tokens that count: the first is never predicted."""
        return int(self.counted[1:].sum())

    def runs(self, tokenizer: Tokenizer) -> list[tuple[bool, str]]:
        """Return its text in runs of tokens that count, or do not; special tokens have their names."""
        special = {
            i: name for form in FORMATS.values() for name in form.names if (i := tokenizer.id_of(name)) is not None
        }
        ends = [0, *(np.flatnonzero(np.diff(self.counted)) + 1).tolist(), self.ids.size]
        found = []
        for lo, hi in pairwise(ends):
            text, plain = "", list[int]()
            for i in self.ids[lo:hi].tolist():
                if i in special:
                    text, plain = text + tokenizer.decode(plain) + special[i], []
                else:
                    plain.append(i)
            found.append((bool(self.counted[lo]), text + tokenizer.decode(plain)))
        return found


def encoded(said: Said, tokenizer: Tokenizer, form: TurnEncoder | Template | None) -> tuple[list[int], list[bool]]:
    """Return the ids of an example, and which of them count: counted messages and the token that ends each."""
    if isinstance(said, str):
        ids = [tokenizer.eot, *tokenizer.encode(said), *([] if tokenizer.end is None else [tokenizer.end])]
        return ids, [False] + [True] * (len(ids) - 1)
    assert form is not None
    if isinstance(form, Template):
        return form.example(said)
    ids = form.start()
    counted = [False] * len(ids)
    for role, text, counts in said:
        if not counts:
            parts = [(form.turn(role, text), False)]
        else:
            first, *rest = form.closing()
            parts = [(form.opening(role), False), ([*form.said(text), first], True), (rest, False)]
        for part, learned in parts:
            ids += part
            counted += [learned] * len(part)
    return ids, counted


@dataclass(frozen=True, eq=False)
class Chats:
    """Examples to train on, and others to validate on.

    Attributes
    ----------
    name : the name that the user gave.
    tokenizer : its name or its file, for `get_tokenizer`.
    T : the tokens of a row, to which examples are cut.
    pack : whether a row holds as many examples as fit, or one.
    train, val : the examples that have a token that counts.
    idle : the examples that have none within T.
    unused : how often lines have a name that is not used.
    notes : what a user should know of how chats became tokens, in sentences.
    fingerprint : sixteen hex digits of all tokens and of what counts, by which a resumed run notices other data.
    """

    name: str
    tokenizer: str
    T: int
    pack: bool
    train: Sequence[ChatExample]
    val: Sequence[ChatExample]
    idle: Sequence[ChatExample]
    unused: dict[str, int]
    fingerprint: str
    files: tuple[File, ...] = ()
    ends: str = ""
    notes: tuple[str, ...] = ()

    def report(self) -> dict[str, Any]:
        """Return lengths, what was cut and what counts, as numbers."""
        kept = [*self.train, *self.val]
        every = [*kept, *self.idle]
        lengths = [e.ids.size + e.cut for e in every]
        packed_rows = len(packed(self.train, self.T))
        rows = packed_rows if self.pack else len(self.train)
        return {
            "examples": len(every),
            "train": len(self.train),
            "val": len(self.val),
            "shortest": min(lengths),
            "median": median(lengths),
            "longest": max(lengths),
            "tokens": sum(lengths),
            "counted": sum(e.targets for e in every),
            "T": self.T,
            "cut": sum(e.cut > 0 for e in every),
            "tokens_cut": sum(e.cut for e in every),
            "without_counted": [e.where for e in self.idle],
            "packed": self.pack,
            "rows": rows,
            "packed_rows": packed_rows,
            "padding": 1 - sum(e.size for e in self.train) / (rows * self.T),
            "unused": self.unused,
            "notes": [*self.notes],
        }

    @property
    def description(self) -> str:
        """The report in sentences, for the log."""
        r = self.report()
        words = [
            f"{self.name}: {count(r['train'], 'example')} to train on, {r['val']} to validate ({self.tokenizer})",
            f"{r['shortest']} to {r['longest']} tokens, median {r['median']:g}; "
            f"{r['counted']:,} of {r['tokens']:,} tokens count",
        ]
        if r["cut"]:
            words.append(f"{count(r['cut'], 'example')} cut to {self.T + 1} tokens, {r['tokens_cut']:,} left out")
        if self.idle:
            n, first = count(len(self.idle), "example"), self.idle[0].where
            words.append(f"{n} left out, because no token counts within -T {self.T}: {first} first")
        padding, few = f"{100 * r['padding']:.0f} % padding", count(r["packed_rows"], "row")
        if self.pack:
            words.append(f"packed into {few} of {self.T} in place of {r['train']}, {padding}")
        else:
            saved = f" (--pack: {few})" if 2 * r["packed_rows"] <= r["rows"] else ""
            words.append(f"one in each row of {self.T}, {padding}{saved}")
        if self.unused:
            words.append("not used: " + ", ".join(f"{name!r} of {count(n, 'line')}" for name, n in self.unused.items()))
        return "; ".join([*words, *self.notes])

    def changes(self) -> list[str]:
        """Return what has happened to the files' content on disk since they were read, a line for each."""
        return [text for file in self.files if (text := file.changed())]

    def of(self, split: str) -> Sequence[ChatExample]:
        """Return the examples of ``train``, ``val`` or ``all``."""
        return {"train": self.train, "val": self.val, "all": [*self.train, *self.val]}[split]

    def rows(self, split: str) -> list[list[ChatExample]]:
        """Lay the examples of a split into rows."""
        return packed(self.of(split), self.T) if self.pack else [[e] for e in self.of(split)]

    def batches(self, split: str, B: int, T: int, seed: int | None = None) -> ChatBatches:
        """Lay the examples of a split into batches: in an order drawn from `seed`, or a fixed one without it."""
        assert T == self.T, "examples are cut to one length"
        return ChatBatches(self.rows(split), B, T, seed, self.pack, f"{self.name} ({split})")


def packed(examples: Sequence[ChatExample], T: int) -> list[list[ChatExample]]:
    """Lay examples into rows of T tokens: the longest first, each into the fullest row that has room."""
    rows: list[list[ChatExample]] = []
    free: list[int] = []  # the sizes of room that some row has, in order
    with_room: dict[int, list[int]] = {}
    for e in sorted(examples, key=lambda e: -e.size):
        at = bisect_left(free, e.size)
        if at == len(free):
            room, row = T, len(rows)
            rows.append([])
        else:
            room = free[at]
            row = with_room[room].pop()
            if not with_room[room]:
                free.pop(at)
        rows[row].append(e)
        if left := room - e.size:
            if not with_room.setdefault(left, []):
                insort(free, left)
            with_room[left].append(row)
    return rows


class ChatBatches:
    """Batches of B rows of T tokens, as a pure function of (seed, epoch, index).

    An epoch has every row once: what the last batch lacks are rows of which nothing counts.
    """

    def __init__(
        self, rows: Sequence[Sequence[ChatExample]], B: int, T: int, seed: int | None, pack: bool, name: str
    ) -> None:
        if seed is not None and seed < 0:
            raise UserError(f"seed {seed} is negative; expected 0 or more")
        self.rows, self.B, self.T, self.seed, self.pack, self.name = rows, B, T, seed, pack, name
        self._order = -1, np.arange(len(rows))

    def __len__(self) -> int:
        """The number of batches of an epoch."""
        return -(-len(self.rows) // self.B)

    @property
    def n_tokens(self) -> int:
        """The tokens that count."""
        return sum(e.targets for row in self.rows for e in row)

    def at(self, n: int) -> dict[str, NDArray[np.int32]]:
        """Return the n-th batch since the beginning of training: `tokens`, `targets` and, if packed, `starts`.

        Each is (B, T). ``starts[b, t]`` is the place in its row at which the example of a token starts; each token of
        the padding is one of its own.
        """
        epoch, index = divmod(n, len(self))
        if self.seed is not None and self._order[0] != epoch:
            self._order = epoch, sorted_order(np.random.SeedSequence(self.seed, spawn_key=(epoch,)), len(self.rows))
        order = self._order[1]
        tokens = np.zeros((self.B, self.T), np.int32)
        targets = np.full_like(tokens, IGNORED)
        starts = np.tile(np.arange(self.T, dtype=np.int32), (self.B, 1))
        for b, number in enumerate(order[index * self.B : (index + 1) * self.B]):
            at = 0
            for e in self.rows[number]:
                place = slice(at, at + e.size)
                tokens[b, place] = e.ids[:-1]
                targets[b, place] = np.where(e.counted[1:], e.ids[1:], IGNORED)
                starts[b, place] = at
                at += e.size
        return {"tokens": tokens, "targets": targets} | ({"starts": starts} if self.pack else {})


def load_chats(
    paths: Sequence[Path],
    *,
    name: str,
    vocab_size: int,
    T: int,
    tokenizer: str | None = None,
    chat_format: str | None = None,
    system: str = "",
    adapters: Sequence[Path] = (),
    pack: bool = False,
) -> Chats:
    """Read all examples of some files.

    Parameters
    ----------
    name : what the user called them.
    vocab_size : that of the model.
    T : the tokens of a row; longer examples are cut.
    tokenizer : by its name or its file; ``bytes`` without one.
    chat_format : ``chatml`` or ``llama3``; by default the model's chat template, or else what the tokenizer's special
        tokens allow.
    system : the system turn of chats that have none.
    adapters : directories of adapters, which may have a chat template.
    pack : whether a row holds as many examples as fit.

    Raises
    ------
    UserError
        For a file that cannot be read, and for the first line that is no example.
    """
    require_format(chat_format)
    require_fit(tokenizer, vocab_size)
    tokenizer = tokenizer or "bytes"
    t, form = get_tokenizer(tokenizer), None
    found: list[tuple[int, ChatExample]] = []
    unused: Counter[str] = Counter()
    files, digest = [], sha256()
    for path in paths:
        files.append(file := _open(path))
        for n, line in enumerate(_lines(file), 1):
            where = f"{str(path)!r}, line {n}"
            try:
                said, names = said_by(line)
            except ValueError as e:
                raise UserError(f"{where}: {e}") from e
            unused.update(set(names))
            if form is None and not isinstance(said, str):
                form = encoder_of(t, chat_format, f"--data {name}", adapters)
            if system and not isinstance(said, str) and said[0][0] not in ("system", "developer"):
                said = [("system", system), *said]
            try:
                ids, counted = encoded(said, t, form)
            except UserError as e:
                raise UserError(f"{where}: {e}") from e
            if len(ids) < 2:
                raise UserError(f"{where}: it is empty; expected a text")
            whole = np.array(ids, np.int32)
            digest.update(whole.tobytes() + np.array(counted).tobytes())
            require_known_ids(where, whole, vocab_size)
            example = ChatExample(
                len(found) + 1, where, whole[: T + 1], np.array(counted[: T + 1]), max(0, len(ids) - T - 1)
            )
            found.append((crc32(line), example))
    if not found:
        raise UserError(f"{name!r} is empty; expected a line of JSON for each example")
    found.sort(key=lambda x: x[0])
    cut = len(found) // 10
    while cut > 0 and found[cut - 1][0] == found[cut][0]:  # equal lines stay together
        cut -= 1
    val, train = ([e for _, e in part if e.targets] for part in (found[:cut], found[cut:]))
    if not train:
        raise UserError(f"--data {name}: no token of any example counts within -T {T}; take a larger -T")
    idle = [e for _, e in found if not e.targets]
    return Chats(
        name,
        tokenizer,
        T,
        pack,
        train,
        val,
        idle,
        dict(sorted(unused.items())),
        digest.hexdigest()[:16],
        tuple(files),
        notes=tuple(form.notes) if form else (),
    )


def _open(path: Path) -> File:
    try:
        return File(path)
    except OSError as e:
        raise UserError(f"cannot read {str(path)!r}: {e.strerror or e}") from e


def _lines(file: File) -> Iterator[bytes]:
    """Yield the lines of a file, without what ends them."""
    content = tokens_of(file, np.dtype(np.uint8))[:].tobytes()
    lines = content.split(b"\n")
    if not lines[-1]:
        lines.pop()
    for n, line in enumerate(lines, 1):
        if not line.strip():
            raise UserError(f"{str(file.path)!r}, line {n}: it is empty; expected an example; remove the line")
        yield line

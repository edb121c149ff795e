"""Examples as tokens, of which only what the assistant says counts for the loss, and their batches.

An example is what a row of a file says (`shapes`): messages, or a text, all of which counts. A row of a batch holds one
example or, packed, as many as fit, each of which attends to itself alone; and padding behind them, of which nothing
counts. A text that is longer than a row takes several; messages are cut. A tenth of the examples is held out. Which
ones depends on the rows of the files alone, and not on their order.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from .batches import require_known_ids, require_seed, sorted_order
from .forms import FORMATS, TurnEncoder
from .shapes import Message, Said, example_of, rows_of
from .stored import File
from .templates import Template, encoder_of
from .tokenizers import Tokenizer, get_tokenizer, require_fit

IGNORED = -100
"""The target of a token that does not count."""
MOST_CUT = 0.01
"""The share of the tokens, and of those that count, that is cut off long examples without being asked."""


@dataclass(frozen=True, eq=False)
class ChatExample:
    """One example as tokens.

    Attributes
    ----------
    number : counted from 1 in all files.
    where : file and line.
    ids : (n,) int32; of messages cut to the T + 1 tokens that a row reads and predicts.
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

    def parts(self, T: int) -> list[ChatExample]:
        """Return it in parts that fit into rows of T tokens, of which each target is in one."""
        if self.size <= T:
            return [self]
        slices = [slice(at, at + T + 1) for at in range(0, self.size, T)]
        return [replace(self, ids=self.ids[part], counted=self.counted[part]) for part in slices]

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
    return form.example(said)


@dataclass(frozen=True, eq=False)
class Chats:
    """Examples to train on, and others to validate on.

    Attributes
    ----------
    name : the name that the user gave.
    tokenizer : its name or its file, for `get_tokenizer`.
    T : the tokens of a row.
    pack : whether a row holds as many examples as fit, or one.
    train, val : the examples that have a token that counts.
    idle : the examples that have none within T.
    shapes : how many examples are read from which names.
    unused : how many rows have a name that is not used.
    skipped : why examples were left out that are none, one text for each.
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
    shapes: dict[str, int]
    unused: dict[str, int]
    skipped: Sequence[str]
    fingerprint: str
    files: tuple[File, ...] = ()
    ends: str = ""
    notes: tuple[str, ...] = ()

    def report(self) -> dict[str, Any]:
        """Return lengths, what was cut and what counts, as numbers."""
        kept = [*self.train, *self.val]
        every = [*kept, *self.idle]
        lengths = [e.ids.size + e.cut for e in every]
        parts = [part for e in self.train for part in e.parts(self.T)]
        packed_rows = len(packed(parts, self.T))
        rows = packed_rows if self.pack else len(parts)
        return {
            "examples": len(every),
            "shapes": self.shapes,
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
            "split": sum(e.size > self.T for e in every),
            "parts": len(parts),
            "without_counted": [e.where for e in self.idle],
            "packed": self.pack,
            "rows": rows,
            "packed_rows": packed_rows,
            "padding": 1 - sum(e.size for e in self.train) / (rows * self.T),
            "unused": self.unused,
            "skipped": list(self.skipped),
            "notes": [*self.notes],
        }

    @property
    def description(self) -> str:
        """The report in sentences, for the log."""
        r = self.report()
        words = [
            f"{self.name}: {count(r['train'], 'example')} to train on, {r['val']} to validate ({self.tokenizer})",
            f"read from {' or '.join(r['shapes'])}",
            f"{r['shortest']} to {r['longest']} tokens, median {r['median']:g}; "
            f"{r['counted']:,} of {r['tokens']:,} tokens count ({100 * r['counted'] / r['tokens']:.0f} %)",
        ]
        if r["split"]:
            words.append(f"{count(r['split'], 'text')} of more than a row split")
        if r["cut"]:
            words.append(f"{count(r['cut'], 'example')} cut to {self.T + 1} tokens, {r['tokens_cut']:,} left out")
        if self.skipped:
            words.append(f"{count(len(self.skipped), 'example')} skipped: {self.skipped[0]}, first")
        if self.idle:
            n, first = count(len(self.idle), "example"), self.idle[0].where
            words.append(f"{n} left out, because no token counts within -T {self.T}: {first} first")
        padding, few = f"{100 * r['padding']:.0f} % padding", count(r["packed_rows"], "row")
        if self.pack:
            words.append(f"packed into {few} of {self.T} in place of {r['parts']}, {padding}")
        else:
            saved = f" (--pack: {few})" if 2 * r["packed_rows"] <= r["rows"] else ""
            words.append(f"one in each row of {self.T}, {padding}{saved}")
        if self.unused:
            words.append(
                "not used: " + ", ".join(f"{name!r} of {count(n, 'example')}" for name, n in self.unused.items())
            )
        return "; ".join([*words, *self.notes])

    def changes(self) -> list[str]:
        """Return what has happened to the files' content on disk since they were read, a line for each."""
        return [text for file in self.files if (text := file.changed())]

    def of(self, split: str) -> Sequence[ChatExample]:
        """Return the examples of ``train``, ``val`` or ``all``."""
        return {"train": self.train, "val": self.val, "all": [*self.train, *self.val]}[split]

    def rows(self, split: str) -> list[list[ChatExample]]:
        """Lay the examples of a split into rows."""
        parts = [part for e in self.of(split) for part in e.parts(self.T)]
        return packed(parts, self.T) if self.pack else [[part] for part in parts]

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
        require_seed(seed)
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
    truncate: bool = False,
    skip_invalid: bool = False,
) -> Chats:
    """Read all examples of some files.

    Parameters
    ----------
    name : what the user called them.
    vocab_size : that of the model.
    T : the tokens of a row; longer texts are split, and longer messages are cut.
    tokenizer : by its name or its file; ``bytes`` without one.
    chat_format : ``chatml`` or ``llama3``; by default the model's chat template, or else what the tokenizer's special
        tokens allow.
    system : the system turn of chats that have none.
    adapters : directories of adapters, which may have a chat template.
    pack : whether a row holds as many examples as fit.
    truncate : whether more than `MOST_CUT` of the tokens, or of those that count, may be cut.
    skip_invalid : whether a row that is no example is left out.

    Raises
    ------
    UserError
        For a file that cannot be read, for the first row that is no example, and if too much would be cut.
    """
    require_fit(tokenizer, vocab_size)
    tokenizer = tokenizer or "bytes"
    t, form = get_tokenizer(tokenizer), None
    found: list[tuple[int, ChatExample]] = []
    shapes: Counter[str] = Counter()
    unused: Counter[str] = Counter()
    skipped: list[str] = []
    files, digest = [], sha256()
    targets = 0
    for path in paths:
        files.append(file := File(path))
        for where, content, value in rows_of(file):
            try:
                said, used, others = example_of(value())
            except ValueError as e:
                if not skip_invalid:
                    raise UserError(f"{where}: {e}; --skip-invalid leaves such examples out") from e
                skipped.append(f"{where}: {e}")
                continue
            shapes[", ".join(used)] += 1
            unused.update(others)
            if form is None and not isinstance(said, str):
                form = encoder_of(t, chat_format, f"--data {name}", adapters)
            if system and not isinstance(said, str) and said[0].role != "system":
                said = [Message("system", system, False), *said]
            try:
                ids, counted = encoded(said, t, form)
            except UserError as e:
                raise UserError(f"{where}: {e}") from e
            whole, counts = np.array(ids, np.int32), np.array(counted)
            digest.update(whole.tobytes() + counts.tobytes())
            require_known_ids(where, whole, vocab_size)
            targets += int(counts[1:].sum())
            most = whole.size if isinstance(said, str) else T + 1
            if isinstance(said, str) and whole.size > T + 1:
                digest.update(b"split")  # such a text was cut in earlier versions
            cut = max(0, whole.size - most)
            found.append((crc32(content), ChatExample(len(found) + 1, where, whole[:most], counts[:most], cut)))
    if not found:
        raise UserError(f"{name!r} has no example{': ' + skipped[0] if skipped else '; expected a row for each'}")
    if not truncate:
        _require_whole([e for _, e in found], targets, T, name)
    found.sort(key=lambda x: x[0])
    cut = len(found) // 10
    while cut > 0 and found[cut - 1][0] == found[cut][0]:  # equal lines stay together
        cut -= 1
    val, train = ([e for _, e in part if e.targets] for part in (found[:cut], found[cut:]))
    if not train:
        raise UserError(f"--data {name}: no token of any example counts within -T {T}; take a larger -T")
    return Chats(
        *(name, tokenizer, T, pack, train, val),
        idle=[e for _, e in found if not e.targets],
        shapes=dict(shapes.most_common()),
        unused=dict(sorted(unused.items())),
        skipped=skipped,
        fingerprint=digest.hexdigest()[:16],
        files=tuple(files),
        notes=tuple(form.notes) if isinstance(form, Template) else (),
    )


def _require_whole(examples: Sequence[ChatExample], targets: int, T: int, name: str) -> None:
    """Refuse examples of which too much is cut."""
    cut, tokens = sum(e.cut for e in examples), sum(e.ids.size + e.cut for e in examples)
    lost = targets - sum(e.targets for e in examples)
    if cut > MOST_CUT * tokens or lost > MOST_CUT * targets:
        which = count(sum(e.cut > 0 for e in examples), "example")
        longest = max(e.ids.size + e.cut for e in examples if e.cut) - 1
        raise UserError(
            f"--data {name}: -T {T} cuts {cut:,} of {tokens:,} tokens off the ends of {which}, "
            f"and with them {lost:,} of the {targets:,} that count; "
            f"take a larger -T (the longest needs {longest}), or --truncate to train on what is left"
        )

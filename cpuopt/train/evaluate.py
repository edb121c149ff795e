"""Evaluation: perplexity on text, and multiple choice from llm.c's evaluation files.

An evaluation file (magic 20240522, version 1) has 256 int32 of header, then a stream of uint16. Each example has 65535,
its bytes, its number, the label, the number of completions, the context's length and tokens, and for each completion
its length and tokens. The answer is the completion with the lowest mean loss of its tokens (``acc_norm``).

Source: llm.c, ``dev/data/data_common.py`` (``write_evalfile``) and ``llmc/dataloader.h`` (``EvalLoader``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import exp, fsum, log
from pathlib import Path
from typing import Any

import numpy as np

from .. import ops
from ..building import Array
from ..data.given import Batch
from ..engine import Engine, mean_of
from ..errors import UserError
from ..files.reading import LARGEST, open_file, readable
from .steps import named

MAGIC, VERSION, START = 20240522, 1, 65535
HEADER_BYTES = 256 * 4
CHOICES = 4
IGNORE = -100


@dataclass(frozen=True)
class Example:
    """A context, its possible completions, and the index of the right one."""

    label: int
    context: Array
    completions: list[Array]


def read_examples(path: Path, vocab_size: int) -> list[Example]:
    """Read an evaluation file.

    Raises
    ------
    UserError
        If it is no such file, is inconsistent, or has tokens that the model does not know.
    """

    def wrong(what: str) -> UserError:
        return UserError(f"evaluation file {str(path)!r}: {what}; give one from llm.c's dev/data")

    with readable(path), open_file(path) as file:
        head, size = file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
        known = head[:8] == np.array([MAGIC, VERSION], "<i4").tobytes()
        # of another file nothing more is read
        stream = np.fromfile(file, "<u2", min(size, LARGEST) // 2 if known else 0)
    if len(head) < HEADER_BYTES:
        raise wrong(f"has {size} bytes; expected a header of {HEADER_BYTES}")
    magic, version, count = (int(n) for n in np.frombuffer(head, "<i4", 3))
    if (magic, version) != (MAGIC, VERSION):
        raise wrong(f"begins with {magic}, version {version}; expected {MAGIC}, version {VERSION}")
    examples, at = [], 0
    for number in range(count):
        first = stream[at : at + 6].astype(int)
        if first.size < 6 or first[0] != START or first[2] != number % 65536 or first[1] % 2 or first[1] < 12:
            raise wrong(f"example {number} of {count} does not begin at byte {HEADER_BYTES + 2 * at}")
        words, label, choices, n_context = first[1] // 2, first[3], first[4], first[5]
        body = stream[at + 6 : at + words].astype(np.int64)
        if body.size != words - 6 or choices != CHOICES or label >= choices:
            raise wrong(f"example {number} is cut short, or has not {CHOICES} completions with one of them right")
        context, rest, completions = body[:n_context], body[n_context:], []
        for _ in range(choices):
            n = int(rest[0]) if rest.size else 0
            completions.append(rest[1 : 1 + n])
            rest = rest[1 + n :]
        if not n_context or rest.size or not all(c.size for c in completions):
            raise wrong(f"example {number}: the lengths of its parts do not add up")
        if max(int(x.max()) for x in (context, *completions)) >= vocab_size:
            raise wrong(f"example {number} has tokens beyond the model's vocabulary of {vocab_size}")
        examples.append(Example(int(label), context, completions))
        at += words
    if at != stream.size or not examples:
        raise wrong(f"{count} examples end at byte {HEADER_BYTES + 2 * at} of {size}")
    return examples


def rows_of(example: Example, T: int) -> tuple[Array, Array]:
    """Return tokens and targets, each (4, T): targets of the completions count, all others are ignored.

    Raises
    ------
    UserError
        If the example is longer than T.
    """
    tokens, targets = np.zeros((CHOICES, T), np.int32), np.full((CHOICES, T), IGNORE, np.int32)
    n = example.context.size
    for row, completion in enumerate(example.completions):
        whole = np.concatenate([example.context, completion])
        if whole.size > T:
            raise UserError(f"an example has {whole.size} tokens; the model reads {T}")
        tokens[row, : whole.size] = whole
        targets[row, n - 1 : whole.size - 1] = completion
    return tokens, targets


def choose(engine: Engine, example: Example, T: int) -> int:
    """Return the completion with the lowest mean loss; the engine (4 rows of T tokens) keeps each token's loss."""
    tokens, targets = rows_of(example, T)
    engine.forward(tokens=tokens, targets=targets)
    call = next(c for c in engine.program.calls if c.op is ops.cross_entropy_forward)
    losses = engine.array(call.args["losses"]).reshape(CHOICES, T)
    counted = targets != IGNORE
    means = [fsum(losses[i][counted[i]].tolist()) / int(counted[i].sum()) for i in range(CHOICES)]
    if not np.isfinite(means).all():
        raise UserError("the losses are not finite: the weights are damaged")
    return int(np.argmin(means))


def multiple_choice(
    engine: Engine, examples: list[Example], T: int, tick: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Return the accuracy: the share of examples whose right completion is the likeliest."""
    right = 0
    for example in examples:
        right += choose(engine, example, T) == example.label
        tick()
    return {"examples": len(examples), "right": right, "accuracy": right / len(examples)}


def perplexity(
    engine: Engine,
    batches: Iterable[Batch | tuple[Array, Array]],
    tick: Callable[[], None] = lambda: None,
    lengths: Array | None = None,
) -> dict[str, Any]:
    """Return the mean loss of a token, the perplexity, e to that power, and the bits per byte of text.

    Parameters
    ----------
    lengths : the bytes of each token; None, or too few for a token, leaves the bits per byte out.
    """
    losses: list[float] = []
    counts: list[int] = []
    texts: list[int | None] = []
    for batch in map(named, batches):
        targets = batch["targets"]
        losses.append(engine.forward(**batch))
        counts.append(engine.counted(batch))
        texts.append(text_bytes(targets[targets >= 0], lengths))
        tick()
    loss = mean_of(losses, counts)
    known = [n for n in texts if n is not None]
    nbytes = sum(known) if len(known) == len(texts) else None
    return {
        "batches": len(losses),
        "tokens": sum(counts),
        "loss": loss,
        "perplexity": exp(loss) if loss < 700 else float("inf"),
        "bits_per_byte": bits_per_byte(loss, sum(counts), nbytes),
        "bytes": nbytes,
    }


def text_bytes(targets: Array, lengths: Array | None) -> int | None:
    """Return the bytes of the text that targets stand for; None if a token's length is not known."""
    if lengths is None or targets.max(initial=0) >= len(lengths):
        return None
    return int(lengths[targets].sum())


def bits_per_byte(loss: float, tokens: int, nbytes: float | None) -> float | None:
    """Return the bits in which a model writes a byte of text: independent of how a tokenizer cuts it."""
    return loss * tokens / log(2) / nbytes if nbytes else None

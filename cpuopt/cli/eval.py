"""``cpuopt eval``: show perplexity and bits per byte on text, or multiple choice from an llm.c evaluation file.

The weights come from a run, from llm.c, llama2.c, GGUF or Hugging Face. A file that --data names is read
whole, unless the weights were trained on it; of everything else, the held-out part is read.

Examples::

    cpuopt eval --init runs/RUN --limit 20
    cpuopt eval --init gpt2_124M.bin --choices hellaswag_val.bin
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from .. import models
from ..errors import UserError
from ..train import settings
from . import common
from .common import Parser, settings_of, show, start_numba

if TYPE_CHECKING:
    from ..data.batches import Batches
    from ..data.chats import ChatBatches, Chats
    from ..data.corpus import Corpus, Split
    from ..weights import Weights

USUAL_ROW = 64
"""The tokens of a row for a model of one's own of which no run is known."""


def flags(p: Parser) -> None:
    """Add the verb's flags."""
    p.option("--init", settings.FLAGS["init"].metadata["help"], metavar="PATH", type=Path, required=True)
    settings.flags(p, "data", "chat_format", "system", "truncate", "skip_invalid", "tokenizer", "B", "variant", "swap")
    settings.flags(p, "kernels", "dtype", "threads")
    p.shared("--base", "--adapter")
    p.option("--model", "Read the model of a run from this file of your own.", metavar="FILE.py:NAME")
    p.option(
        "-T",
        "Put this many tokens into a row. Default: the model's context, or for a model of one's own, its run's T.",
        type=int,
    )
    p.option(
        "--split",
        "Read this part of the text: the one to train on, the held-out one, or all. Default: all of a file that "
        "--data names, unless the weights were trained on it; else val.",
        choices=("train", "val", "all"),
    )
    p.option(
        "--choices",
        "Answer the questions of an evaluation file of llm.c, such as HellaSwag.",
        metavar="FILE.bin",
        type=Path,
    )
    p.option("--limit", "Evaluate at most this many batches or examples. Default: all.", metavar="N", type=int)
    p.shared("--json")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    start_numba(args.threads)
    if args.model:
        models.parse(args.model)  # what is in the run refers to it
    from ..building import BuildOptions
    from ..check.gate import judging, load_files, require_right
    from ..data.tokenizers import byte_lengths
    from ..engine import Engine
    from ..kernels.registry import AUTO
    from ..report import console
    from ..train.checkpoint import open_weights
    from ..train.evaluate import CHOICES, multiple_choice, perplexity, read_examples
    from ..weights import copy_into, merge

    weights = merge(open_weights(args.init), args.adapter)
    c = weights.config
    longest = c.longest(weights.trained_length)
    if args.T is not None and not 1 <= args.T <= longest:
        raise UserError(f"-T {args.T}: expected 1 to {longest}, the model's context")
    for flag, n in {"-B": args.B, "--limit": args.limit}.items():
        if n is not None and n < 1:
            raise UserError(f"{flag} {n}: expected 1 or more")
    if args.choices:
        examples = read_examples(args.choices, c.vocab_size)[: args.limit]
        most = max(e.context.size + x.size for e in examples for x in e.completions)
        if most > longest:
            raise UserError(f"{args.choices}: its longest example has {most} tokens; the model reads {longest}")
        B, T = CHOICES, most
    else:
        text, batches = text_of(args, weights)
        B, T, lengths = batches.B, batches.T, byte_lengths(text.tokenizer)
    load_files(args.kernels, args.threads or common.cores())
    if args.variant == AUTO:
        console.warn("--variant auto: plans are for training steps; this runs with the default")
    with console.compiling() as progress:
        how = BuildOptions.from_words(
            args.variant,
            args.swap,
            train=False,
            dtype=settings.stored(args.dtype),
            freeze=["*"] if args.blocks else [],
            base=args.blocks,
            threads=args.threads,
            processes=common.cores(),
            kernel_files=[*args.kernels, *c.files],
        )
        engine = Engine.from_options(*c.sized(B, T), how, seed=None, progress=progress)
    with judging(how.kernel_files, engine.threads) as child:
        require_right(engine.kernels, threads=engine.threads, child=child)
    copy_into(engine.parameters(), weights)
    if args.choices:
        with console.counting("examples", len(examples)) as tick:
            result = multiple_choice(engine, examples, T, tick)
        line = f"{result['right']} of {result['examples']} right: {result['accuracy']:.4f}"
    else:
        n = min(len(batches), args.limit or len(batches))
        with console.counting("batches", n) as tick:
            result = perplexity(engine, (batches.at(i) for i in range(n)), tick, lengths)
        result |= {"of_tokens": batches.n_tokens, "data": batches.name}
        bits = result["bits_per_byte"]
        line = f"loss {result['loss']:.4f}, perplexity {result['perplexity']:.2f}, "
        line += "" if bits is None else f"{bits:.4f} bits per byte, "
        line += f"over {result['tokens']:,} of the {batches.n_tokens:,} tokens of {batches.name}"
    show(args, result, lambda: [line])
    return 0


def text_of(args: argparse.Namespace, weights: Weights) -> tuple[Corpus | Chats, Batches | ChatBatches]:
    """Load the text or the examples, and cut the part that is to be read into batches, which fit a short text.

    Raises
    ------
    UserError
        For a text that is too short, or cannot be read.
    """
    from ..data.chats import ChatBatches, load_chats
    from ..data.corpus import files_of, held_out_beside, is_examples, load_corpus
    from ..data.datasets import DATASETS
    from ..data.tokenizers import TOKEN_FILE, own_tokenizer

    c = weights.config
    tokenizer = args.tokenizer or weights.tokenizer
    if not args.data.endswith(TOKEN_FILE):
        tokenizer = own_tokenizer(tokenizer, weights.path, c.vocab_size)
    if is_examples(args.data):
        T = args.T or c.longest(weights.trained_length)
        how = settings_of(args).some(*settings.EXAMPLES) | {"vocab_size": c.vocab_size, "tokenizer": tokenizer}
        examples = load_chats(files_of(args.data), name=args.data, T=T, adapters=args.adapter or (), **how)
        part = args.split or ("all" if examples.fingerprint != weights.trained_on else "val")
        asked = examples.of(part)
        if not asked:
            raise UserError(f"--split {part}: {args.data} has no examples there; take --split all")
        T = args.T or min(T, max(e.size for e in asked))
        rows = [[piece] for e in asked for piece in e.parts(T)]
        return examples, ChatBatches(rows, min(args.B, len(rows)), T, None, False, f"{args.data} ({part})")
    text = load_corpus(args.data, vocab_size=c.vocab_size, T=1, B=1, tokenizer=tokenizer, needed=())
    named = args.data != "builtin" and args.data not in DATASETS and not held_out_beside(Path(args.data))
    split: Split = args.split or ("all" if named and text.fingerprint != weights.trained_on else "val")
    n = {"train": text.train.size, "val": text.val.size, "all": text.n_tokens}[split]
    own = bool(c.files)
    usual = (
        min(c.longest(weights.trained_length), weights.trained_length or USUAL_ROW) if own else min(c.block_size, n - 1)
    )
    T = args.T or max(1, usual)
    return text, text.batches(split, max(1, min(args.B, (n - 1) // T)), T)

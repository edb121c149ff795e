"""``cpuopt eval``: show perplexity and bits per byte on text, or multiple choice from an llm.c evaluation file.

The weights come from a run, from llm.c, from llama2.c or from Hugging Face. Of a text, the held-out part is read.

Examples::

    cpuopt eval --init runs/RUN --limit 20
    cpuopt eval --init gpt2_124M.bin --choices hellaswag_val.bin
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .. import models
from ..train import settings
from . import common
from .common import shared, show, start_numba


def flags(p: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    p.add_argument("--init", type=Path, required=True, metavar="PATH", help=settings.FLAGS["init"].metadata["help"])
    settings.flags(p, "data", "tokenizer", "B", "variant", "swap", "kernels", "threads")
    p.add_argument("--model", metavar="FILE.py:NAME", help="Read the model of a run from this file of your own.")
    p.add_argument("-T", type=int, help="Put this many tokens into a row. Default: the model's context.")
    p.add_argument(
        "--choices",
        type=Path,
        metavar="FILE.bin",
        help="Answer the questions of an evaluation file of llm.c, such as HellaSwag.",
    )
    p.add_argument(
        "--limit", type=int, metavar="N", help="Evaluate at most this many batches or examples. Default: all."
    )
    shared(p, "--json")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    start_numba(args.threads)
    if args.model:
        models.parse(args.model)  # what is in the run refers to it
    from itertools import islice

    from .. import kernels
    from ..data.corpus import load_corpus
    from ..data.tokenizers import byte_lengths
    from ..engine import Engine
    from ..errors import UserError
    from ..kernels.registry import AUTO, Choice
    from ..report import console
    from ..train.checkpoint import open_weights
    from ..train.evaluate import CHOICES, multiple_choice, perplexity, read_examples
    from ..train.job import require_correct
    from ..weights import copy_into

    weights = open_weights(args.init)
    c = weights.config
    T = c.block_size if args.T is None else args.T
    if not 1 <= T <= c.block_size:
        raise UserError(f"-T {T}: expected 1 to {c.block_size}, the model's context")
    for flag, n in {"-B": args.B, "--limit": args.limit}.items():
        if n is not None and n < 1:
            raise UserError(f"{flag} {n}: expected 1 or more")
    if args.choices:
        examples = read_examples(args.choices, c.vocab_size)[: args.limit]
        longest = max(e.context.size + x.size for e in examples for x in e.completions)
        if longest > c.block_size:
            raise UserError(f"{args.choices}: its longest example has {longest} tokens; the model reads {c.block_size}")
        B, T = CHOICES, longest
    else:
        B = args.B
        tokenizer = args.tokenizer or weights.tokenizer
        corpus = load_corpus(args.data, vocab_size=c.vocab_size, T=T, B=B, tokenizer=tokenizer)
        batches, lengths = corpus.batches("val", B, T), byte_lengths(corpus.tokenizer)
    kernels.load_all(args.kernels)
    if args.variant == AUTO:
        console.warn("--variant auto: plans are for training steps; this runs with the default")
    with console.compiling() as progress:
        engine = Engine(
            c.module(),
            c.specs(B, T),
            choice=Choice(args.variant, args.swap),
            threads=args.threads,
            seed=None,
            train=False,
            processes=common.cores(),
            kernel_files=args.kernels,
            progress=progress,
        )
    require_correct(engine)
    copy_into(engine.parameters(), weights)
    if args.choices:
        with console.counting("examples", len(examples)) as tick:
            result = multiple_choice(engine, examples, T, tick)
        text = f"{result['right']} of {result['examples']} right: {result['accuracy']:.4f}"
    else:
        n = min(len(batches), args.limit or len(batches))
        with console.counting("batches", n) as tick:
            result = perplexity(engine, islice((batches.batch(0, i) for i in range(n)), n), tick, lengths)
        bits = result["bits_per_byte"]
        text = f"loss {result['loss']:.4f}, perplexity {result['perplexity']:.2f}, "
        text += "" if bits is None else f"{bits:.4f} bits per byte, "
        text += f"over {n * B * T:,} tokens"
    show(args, result, lambda: [text])
    return 0

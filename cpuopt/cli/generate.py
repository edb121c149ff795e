"""``cpuopt generate``: generate text from a model, token by token."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserError
from ..train import settings
from . import common
from .common import shared, start_numba

if TYPE_CHECKING:
    from ..data.tokenizers import Tokenizer


def flags(p: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    settings.flags(p, "init", "tokenizer", "variant", "swap", "kernels", "threads")
    p.add_argument("--model", help="preset or sizes of a model with random weights, without --init, to measure speed")
    p.add_argument("--prompt", default="", help="beginning of the text (empty: the token that starts a text)")
    p.add_argument("--max-tokens", type=int, default=100, help="largest number of tokens to generate (%(default)s)")
    p.add_argument(
        "--temperature", type=float, default=0.8, help="sampling temperature; 0 takes the likeliest token (%(default)s)"
    )
    p.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="number of likeliest tokens to sample from; 0: all (%(default)s)",
    )
    p.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="least total probability of the tokens to sample from (%(default)s)",
    )
    p.add_argument("--seed", type=int, default=0, help="random seed for sampling and random weights (%(default)s)")
    shared(p, "--json")


def tokenizer_of(name: str | None, vocab_size: int) -> Tokenizer:
    """Return the tokenizer that was named, or else the one that fits the vocabulary."""
    from ..data.tokenizers import get_tokenizer, usual_tokenizer

    try:
        return get_tokenizer(name or usual_tokenizer(vocab_size))
    except UserError as e:
        if name is None:
            raise UserError(f"{e}; a model that was trained on bytes takes --tokenizer bytes") from e
        raise


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    start_numba(args.threads)
    from .. import kernels
    from ..engine import initialize
    from ..generate.decoder import Decoder, Sampler, check_tokens, generate, read_bandwidth, require_cache, text_of
    from ..kernels.registry import AUTO
    from ..models import parse
    from ..report import console
    from ..train.checkpoint import open_weights
    from ..weights import copy_into

    if args.max_tokens < 1:
        raise UserError(f"--max-tokens {args.max_tokens}: expected 1 or more")
    if (args.init is None) == (args.model is None):
        raise UserError(
            "expected either --init with weights (an llm.c model, a Hugging Face directory, a run), or --model with a "
            "preset for random weights"
        )
    sampler = Sampler(args.temperature, args.top_k, args.top_p, args.seed)
    weights = None if args.init is None else open_weights(Path(args.init))
    config = parse(args.model) if weights is None else weights.config
    require_cache(config)
    tokenizer = tokenizer_of(args.tokenizer or (weights.tokenizer if weights else None), config.vocab_size)
    prompt = tokenizer.start(args.prompt)
    check_tokens(prompt, config)
    kernels.load_all(args.kernels)
    if args.variant == AUTO:
        console.warn("--variant auto: plans are for training steps; text is generated with the default")
    with console.compiling() as progress:
        decoder = Decoder(
            config,
            variant=args.variant,
            swaps=args.swap,
            threads=args.threads,
            processes=common.cores(),
            kernel_files=args.kernels,
            progress=progress,
        )
    if weights is None:
        initialize(config.module(), decoder.parameters(), args.seed)
        console.warn(f"random weights of seed {args.seed}, since there is no --init: the text will mean nothing")
    else:
        copy_into(decoder.parameters(), weights)
    stops = tokenizer.stops.union(weights.marks.eos if weights and tokenizer.stops else ())
    marks, tokens, text, interrupted = [time.perf_counter()], list[int](), list[str](), False

    def noted() -> Iterator[int]:
        for t in generate(decoder, prompt, sampler, args.max_tokens, stops):
            marks.append(time.perf_counter())
            tokens.append(t)
            yield t

    try:
        if not args.json:
            console.stream(args.prompt)
        for piece in text_of(noted(), tokenizer):
            text.append(piece)
            if not args.json:
                console.stream(piece)
    except KeyboardInterrupt:
        interrupted = True
    full = decoder.position == config.block_size
    why = "max tokens" if len(tokens) == args.max_tokens else "context full" if full else "end of text"
    roof = read_bandwidth(decoder)
    figures = {
        "tokens": len(tokens),
        "prompt_tokens": len(prompt),
        "stopped": "interrupted" if interrupted else why,
        "tokenizer": tokenizer.name,
        "context": config.block_size,
        "first_token_ms": (marks[1] - marks[0]) * 1e3 if tokens else None,
        "tokens_per_s": (rate := (len(tokens) - 1) / (marks[-1] - marks[1]) if len(tokens) > 1 else None),
        "weight_bytes": decoder.weight_bytes,
        "read_bytes_per_s": roof,
        "share_of_roof": rate * decoder.weight_bytes / roof if rate and roof else None,
        "threads": decoder.threads,
        "weights": str(args.init) if args.init else f"random, seed {args.seed}",
    }
    if args.json:
        print(json.dumps({"prompt": args.prompt, "text": "".join(text), "ids": tokens, **figures}))
    else:
        print()
        console.generation(figures)
    return 130 if interrupted else 0

"""``cpuopt generate``: text from a model."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from . import common
from .common import kernel_flags, start_numba

HELP = "text from a model, as it comes"


def flags(p: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    p.add_argument("--init", type=Path, required=True, metavar="PATH", help="llm.c model, Hugging Face directory, run")
    p.add_argument("--prompt", default="", help="what the text begins with (nothing: the start of a text)")
    p.add_argument("--max-tokens", type=int, default=100, help="(%(default)s)")
    p.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (%(default)s)")
    p.add_argument("--top-k", type=int, default=0, metavar="K", help="among the K likeliest; 0: all (%(default)s)")
    p.add_argument("--top-p", type=float, default=1.0, metavar="P", help="the likeliest that have P (%(default)s)")
    p.add_argument("--seed", type=int, default=0, help="of the choices (%(default)s)")
    p.add_argument("--tokenizer", choices=["gpt2", "bytes"], help="(gpt2 where the vocabulary has 50257 or more)")
    kernel_flags(p, fuse=False)
    p.add_argument("--json", action="store_true", help="print text, tokens and figures as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    start_numba(args.threads)
    from .. import kernels
    from ..checkpoint import open_weights
    from ..errors import UserError
    from ..generate import Decoder, Sampler, generate, read_bandwidth, text_of
    from ..report import console
    from ..tokenizers import get_tokenizer
    from ..weights import copy_into

    if args.max_tokens < 1:
        raise UserError(f"--max-tokens {args.max_tokens}: expected 1 or more")
    sampler = Sampler(args.temperature, args.top_k, args.top_p, args.seed)
    weights = open_weights(args.init)
    tokenizer = get_tokenizer(args.tokenizer or ("gpt2" if weights.config.vocab_size >= 50257 else "bytes"))
    prompt = tokenizer.encode(args.prompt) or [tokenizer.eot]
    kernels.load_all(args.kernels)
    with console.compiling() as progress:
        decoder = Decoder(
            weights.config,
            variant=args.variant,
            swaps=args.swap,
            threads=args.threads,
            processes=common.cores(),
            kernel_files=args.kernels,
            progress=progress,
        )
    copy_into(decoder.parameters(), weights)
    stop = tokenizer.eot if tokenizer.name == "gpt2" else None
    start = time.perf_counter()
    coming = generate(decoder, prompt, sampler, args.max_tokens, stop)
    first = next(coming, None)
    first_s = time.perf_counter() - start
    tokens: list[int] = []

    def noted() -> Iterator[int]:
        for t in chain([] if first is None else [first], coming):
            tokens.append(t)
            yield t

    text: list[str] = []
    try:
        for piece in text_of(noted(), tokenizer):
            text.append(piece)
            if not args.json:
                print("".join([args.prompt] * (len(text) == 1) + [piece]), end="", flush=True)
    except KeyboardInterrupt:
        pass
    later_s = time.perf_counter() - start - first_s
    roof = read_bandwidth(decoder)
    rate = (len(tokens) - 1) / later_s if len(tokens) > 1 else None
    figures = {
        "tokens": len(tokens),
        "prompt_tokens": len(prompt),
        "first_token_ms": first_s * 1e3,
        "tokens_per_s": rate,
        "weight_bytes": decoder.weight_bytes,
        "read_bytes_per_s": roof,
        "share_of_roof": rate * decoder.weight_bytes / roof if rate else None,
        "threads": decoder.threads,
    }
    if args.json:
        print(json.dumps({"prompt": args.prompt, "text": "".join(text), "ids": tokens, **figures}))
    else:
        print()
        console.generation(figures)
    return 0

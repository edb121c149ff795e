"""``cpuopt generate``: generate text from a model, token by token, or chat with it.

The text appears as it is made; its speed is shown at the end, beside what the memory of this machine allows.

Examples::

    cpuopt generate --init runs/RUN --prompt 'Once upon a time'
    cpuopt generate --model gpt2-tiny --tokenizer bytes --max-tokens 50
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import models
from ..errors import UserError
from ..train import settings
from . import common
from .common import Parser, start_numba

if TYPE_CHECKING:
    from ..data.tokenizers import Tokenizer
    from ..generate.chat import Conversation
    from ..generate.decoder import Reader, Sampler
    from ..models import Config
    from ..weights import Weights

LONGEST = 1 << 20
"""Characters of a line of the input."""
CHAT_CONTEXT = 4096
"""Tokens that a chat may have by default, if the model's context is longer."""


def flags(p: Parser) -> None:
    """Add the verb's flags."""
    settings.flags(p, "init", "tokenizer", "variant", "swap", "kernels", "threads")
    p.option(
        "--model",
        "Use a preset or sizes with random weights, without --init, to measure speed; with --init, FILE.py:NAME "
        "of a run's own model.",
    )
    p.option(
        "--dtype",
        "Storage type of the products' weights and of the cache: float32, bf16, or int8, which multiplies as int8.",
        "float32",
    )
    p.shared("--base", "--adapter")
    p.option("--prompt", "Begin with this text. Default: the token that starts a text.", "")
    p.option("--max-tokens", "Generate at most this many tokens. Default: 100; 512 for each chat reply.", type=int)
    p.option(
        "--context",
        f"Hold this many tokens in the cache. Default: those of prompt and text; {CHAT_CONTEXT} at most for a chat.",
        metavar="N",
        type=int,
    )
    p.option("--chat", "Reply to --prompt, or to each line of the input in turn.", False)
    settings.flags(p, "system", "chat_format")
    p.option("--temperature", "Sample at this temperature; 0 takes the likeliest token.", 0.8)
    p.option("--top-k", "Sample from this many of the likeliest tokens; 0 means all.", 0, "K")
    p.option("--top-p", "Sample from the likeliest tokens of this total probability.", 1.0, "P")
    p.shared("--seed", help="Draw samples and random weights from this random seed.")
    p.shared("--json")


def tokenizer_of(name: str | None, vocab_size: int) -> Tokenizer:
    """Return the tokenizer that was named, or else the one that fits the vocabulary."""
    from ..data.tokenizers import get_tokenizer, require_fit, usual_tokenizer

    require_fit(name, vocab_size)
    try:
        return get_tokenizer(name or usual_tokenizer(vocab_size))
    except UserError as e:
        if name is None:
            raise UserError(f"{e}; a model that was trained on bytes takes --tokenizer bytes") from e
        raise


def model_of(args: argparse.Namespace) -> tuple[Config, Weights | None]:
    """Open the weights of ``--init``; or return a model without weights, of ``--model``.

    Raises
    ------
    UserError
        If neither is given, or both are, and ``--model`` is no file that a run's model is in.
    """
    from ..train.checkpoint import open_weights
    from ..weights import merge

    own = args.model is not None and models.is_own(args.model)
    if (args.init is None and args.model is None) or (args.init is not None and args.model is not None and not own):
        raise UserError(
            "expected either --init with weights (llm.c's, llama2.c's, GGUF, a Hugging Face directory, a run), or "
            "--model with a preset for random weights"
        )
    asked = models.parse(args.model) if args.model is not None else None  # what is in a run refers to it
    if args.adapter and args.init is None:
        raise UserError("--adapter: name its base model with --init")
    weights = None if args.init is None else merge(open_weights(Path(args.init)), args.adapter)
    found = weights.config if weights else asked
    assert found is not None
    return found, weights


@dataclass
class Said:
    """A text as it came: the tokens, when each of them was there, and why it ended.

    Attributes
    ----------
    asked : what it answers or goes on from.
    read : the tokens that were read for it.
    """

    asked: str
    read: int = 0
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    marks: list[float] = field(default_factory=list)
    stopped: str = ""

    def stream(self, tokens: Iterator[int], decoder: Reader, tokenizer: Tokenizer, most: int, quiet: bool) -> Said:
        """Take in all tokens, up to `most`, and print their text as it comes; Ctrl-C ends it."""
        from ..generate.decoder import text_of
        from ..report import console

        def noted() -> Iterator[int]:
            for t in tokens:
                self.read = self.read or decoder.position - before
                self.marks.append(time.perf_counter())
                self.tokens.append(t)
                yield t

        before = decoder.position
        self.marks.append(time.perf_counter())
        try:
            for piece in text_of(noted(), tokenizer):
                self.text += piece
                if not quiet:
                    console.stream(piece)
            full = decoder.position == decoder.context
            self.stopped = "max tokens" if len(self.tokens) == most else "context full" if full else "end of text"
        except KeyboardInterrupt:
            self.stopped = "interrupted"
        self.read = self.read or decoder.position - before
        return self


def user_turns(args: argparse.Namespace) -> Iterator[str]:
    """Yield what a user says: ``--prompt`` alone, or lines until the input or Ctrl-C ends them."""
    if args.prompt:
        yield args.prompt
        return
    while True:
        try:
            line = input("> " if not args.json else "") if sys.stdin.isatty() else _line()
        except (EOFError, KeyboardInterrupt):
            return
        except UnicodeDecodeError as e:
            raise UserError(f"the input is no text: {e}") from e
        if line.strip():
            yield line


def _line() -> str:
    """Read a line of a pipe or a file; one without an end would fill the memory."""
    line = sys.stdin.readline(LONGEST + 1)
    if not line:
        raise EOFError
    if len(line) > LONGEST:
        raise UserError(f"the input has a line of more than {LONGEST:,} characters; expected what a user says")
    return line.removesuffix("\n")


def figures_of(said: list[Said], decoder: Reader, dtype: str) -> dict[str, Any]:
    """Return the figures of a text, or of all replies of a chat."""
    from ..generate.decoder import Decoder, read_bandwidth

    roof = read_bandwidth(decoder) if isinstance(decoder, Decoder) else None  # without a cache, products take the time
    later = sum(max(0, len(s.tokens) - 1) for s in said)
    seconds = sum(s.marks[-1] - s.marks[1] for s in said if s.tokens)
    rate = later / seconds if later else None
    return {
        "tokens": sum(len(s.tokens) for s in said),
        "prompt_tokens": sum(s.read for s in said),
        "stopped": said[-1].stopped if said else "end of text",
        "context": decoder.context,
        "first_token_ms": (said[0].marks[1] - said[0].marks[0]) * 1e3 if said and said[0].tokens else None,
        "tokens_per_s": rate,
        "weight_bytes": decoder.weight_bytes,
        "read_bytes_per_s": roof,
        "share_of_roof": rate * decoder.weight_bytes / roof if rate and roof and decoder.weight_bytes else None,
        "dtype": dtype,
        "threads": decoder.threads,
    }


def require_sense(args: argparse.Namespace, most: int) -> None:
    """Refuse flags that do not go together."""
    if most < 1:
        raise UserError(f"--max-tokens {most}: expected 1 or more")
    if (args.system or args.chat_format) and not args.chat:
        raise UserError(f"--{'system' if args.system else 'chat-format'}: is for a chat; add --chat")


def replies(
    args: argparse.Namespace, talk: Conversation, tokenizer: Tokenizer, sampler: Sampler, most: int
) -> tuple[list[Said], UserError | None]:
    """Reply to each turn of the user; return what was said, and the error that ended it, if one did."""
    from ..report import console

    said = list[Said]()
    for text in user_turns(args):
        try:
            reply = talk.reply(text, sampler, most)
            said.append(Said(text).stream(reply, talk.decoder, tokenizer, most, args.json))
        except UserError as e:
            if not sys.stdin.isatty():
                return said, e
            console.warn(str(e))  # a shorter turn may mend it
        if not args.json:
            console.stream("\n")
        if talk.decoder.position == talk.decoder.context:
            break
    return said, None


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    start_numba(args.threads)
    from ..check.gate import load_files
    from ..data.templates import encoder_of
    from ..data.tokenizers import own_tokenizer
    from ..generate import chat
    from ..generate.decoder import Sampler, check_tokens, context_of, generate
    from ..generate.uncached import reader_of
    from ..kernels.registry import AUTO
    from ..nn.initial import initialize
    from ..report import console
    from ..weights import copy_into

    most = (512 if args.chat else 100) if args.max_tokens is None else args.max_tokens
    require_sense(args, most)
    dtype = settings.stored(args.dtype)
    sampler = Sampler(args.temperature, args.top_k, args.top_p, args.seed)
    config, weights = model_of(args)
    trained_length = weights.trained_length if weights else None
    named = args.tokenizer or (weights.tokenizer if weights else None)
    if weights:
        own_tokenizer(named, weights.path, config.vocab_size)
    tokenizer = tokenizer_of(named, config.vocab_size)
    if args.chat:
        encoder, usual = encoder_of(tokenizer, args.chat_format, adapters=args.adapter), CHAT_CONTEXT
    else:
        prompt = tokenizer.start(args.prompt)
        usual = len(prompt) + most
    context = context_of(config, min(usual, config.longest(trained_length)) if args.context is None else args.context)
    if not args.chat:
        check_tokens(prompt, config, context)
    load_files(args.kernels, args.threads or common.cores())
    if args.variant == AUTO:
        console.warn("--variant auto: plans are for training steps; text is generated with the default")
    with console.compiling() as progress:
        decoder = reader_of(
            config,
            trained_length=trained_length,
            context=context,
            variant=args.variant,
            swaps=args.swap,
            dtype=dtype,
            base=args.blocks,
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
    refused = None
    if args.chat:
        talk = chat.Conversation(decoder, encoder, args.system, weights.marks.eos if weights else ())
        said, refused = replies(args, talk, tokenizer, sampler, most)
    else:
        if not args.json:
            console.stream(args.prompt)
        stops = tokenizer.stops.union(weights.marks.eos if weights else ())
        tokens = generate(decoder, prompt, sampler, most, stops)
        said = [Said(args.prompt).stream(tokens, decoder, tokenizer, most, args.json)]
        if not args.json:
            console.stream("\n")
    origin = str(args.init) if args.init else f"random, seed {args.seed}"
    figures = figures_of(said, decoder, args.dtype) | {"tokenizer": tokenizer.name, "weights": origin}
    if args.json and args.chat:
        turns = [{"user": s.asked, "reply": s.text, "ids": s.tokens, "stopped": s.stopped} for s in said]
        print(json.dumps({"system": args.system, "turns": turns, **figures}))
    elif args.json:
        print(json.dumps({"prompt": args.prompt, "text": said[0].text, "ids": said[0].tokens, **figures}))
    else:
        console.generation(figures)
    if refused:  # after the replies that there are
        raise refused
    return 130 if figures["stopped"] == "interrupted" else 0

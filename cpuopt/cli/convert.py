"""``cpuopt convert``: convert weights between runs, llm.c, llama2.c and Hugging Face.

Names, layouts and types are those that the target's programs read. The tokenizer goes with the weights.

Examples::

    cpuopt convert runs/RUN model.bin
    cpuopt convert gpt2_124M.bin hf-gpt2 --dtype float32
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from ..train import settings
from ..wording import parameters

SHORT = {"float32": "f32"}
"""The words of ``--dtype`` that files have another one for; earlier versions took that one alone."""


def flags(p: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    p.add_argument(
        "source",
        type=Path,
        help="Read the weights of a model file of llm.c or llama2.c, a Hugging Face directory, .safetensors, an "
        "index, or a run.",
    )
    p.add_argument(
        "target",
        type=Path,
        help="Write this path: NAME.bin for llm.c or llama2.c, whichever has the model; else a Hugging Face directory.",
    )
    settings.flags(p, "tokenizer")
    p.add_argument(
        "--dtype", choices=["float32", "bf16", "f32"], help="Write numbers of this type. Default: that of the source."
    )


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    from ..data.tokenizers import require_fit
    from ..files import remove_leftovers
    from ..isolate.process import ended_by_sigterm
    from ..report import console
    from ..train.checkpoint import open_weights
    from ..weights import check_target, save_weights, usual_dtype

    check_target(args.target)
    for name in remove_leftovers(args.target):
        console.warn(f"removed {name}, left by an interrupted save")
    weights = open_weights(args.source)
    c, tokenizer = weights.config, args.tokenizer or weights.tokenizer
    require_fit(tokenizer, c.vocab_size)
    dtype = SHORT.get(args.dtype, args.dtype) or usual_dtype(args.target, c, weights.dtype)
    with ended_by_sigterm():
        save_weights(args.target, c, weights.read, dtype, weights.padded_vocab, tokenizer, weights.marks)
    sizes = ", ".join(f"{name} {n}" for name, n in asdict(c).items())
    print(f"{args.target}: {parameters(c.n_params)}, {sizes}, {dtype}")
    return 0

"""``cpuopt convert``: convert weights between runs, llm.c, GGUF and Hugging Face.

Names, layouts and types are those that the target's programs read. The tokenizer goes with the weights. Of a run that
trained adapters, the adapter is written; with --merge, the model that it makes of its base.

Examples::

    cpuopt convert runs/RUN model.bin
    cpuopt convert gpt2_124M.bin hf-gpt2 --dtype float32
    cpuopt convert hf-llama model.gguf --dtype q8_0
    cpuopt convert runs/RUN adapter
    cpuopt convert adapter tuned --merge --base hf-gpt2
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserError
from ..train import settings
from ..wording import count, parameters
from .common import Parser

if TYPE_CHECKING:
    from ..weights import Adapter, Weights

SHORT = {"float32": "f32", "float16": "f16"}
"""The words of ``--dtype`` that files have another one for; earlier versions took that one alone."""


def flags(p: Parser) -> None:
    """Add the verb's flags."""
    p.option(
        "source",
        "Read the weights of a model file of llm.c or llama2.c, GGUF, a Hugging Face directory, .safetensors, an "
        "index, a run, or with --merge an adapter.",
        type=Path,
    )
    p.option("target", "Write this path: NAME.bin for llm.c, NAME.gguf, else a Hugging Face directory.", type=Path)
    p.option("--merge", "Write one model of a base model and its adapter.", False)
    p.option(
        "--base", "Use this base model for --merge. Default: the one that the adapter names.", metavar="PATH", type=Path
    )
    settings.flags(p, "tokenizer")
    p.option(
        "--dtype",
        "Write numbers of this type; q8_0 is for GGUF. Default: the type of the source, if the target has it.",
        choices=["float32", "float16", "bf16", "q8_0", "f32"],
    )


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    from ..data.tokenizers import require_fit
    from ..files import remove_leftovers
    from ..isolate.process import ended_by_sigterm
    from ..report import console
    from ..weights import check_target, save_adapter, save_weights, usual_dtype

    check_target(args.target)
    for name in remove_leftovers(args.target):
        console.warn(f"removed {name}, left by an interrupted save")
    weights, adapter = source_of(args)
    if adapter:
        with ended_by_sigterm():
            save_adapter(args.target, weights.config, adapter, weights.tokenizer)
        print(f"{args.target}: an adapter of rank {adapter.lora.r} for {count(len(adapter.layers), 'layer')}")
        return 0
    c, tokenizer = weights.config, args.tokenizer or weights.tokenizer
    require_fit(tokenizer, c.vocab_size)
    dtype = SHORT.get(args.dtype, args.dtype) or usual_dtype(args.target, c, weights.dtype)
    with ended_by_sigterm():
        save_weights(args.target, c, weights.read, dtype, weights.padded_vocab, tokenizer, weights.marks)
    sizes = ", ".join(f"{name} {n}" for name, n in c.to_json().items() if name != "model")
    print(f"{args.target}: {parameters(c.n_params)}, {sizes}, {dtype}")
    return 0


def source_of(args: argparse.Namespace) -> tuple[Weights, Adapter | None]:
    """Open the source; return its weights, and the adapter that is to be written in place of them, if one is.

    Raises
    ------
    UserError
        For an adapter without a base model, or a flag that the source has no use for.
    """
    from ..train.checkpoint import FOLDER, chosen, open_weights
    from ..weights import is_adapter, merge
    from ..weights.formats import target_format
    from ..weights.peft import named_base

    if is_adapter(args.source) and args.merge:
        return merge(open_weights(args.base or named_base(args.source)), [args.source]), None
    weights = open_weights(args.source)
    if args.base:
        raise UserError(f"--base {str(args.base)!r}: is for an adapter's directory and --merge")
    adapter = chosen(args.source).adapter if (args.source / FOLDER).is_dir() else None
    if args.merge and not adapter:
        raise UserError(f"--merge: {str(args.source)!r} has no adapter")
    if args.merge or not adapter:
        return weights, None
    of_models = {
        repr(str(args.target)): target_format(args.target).ending,
        f"--dtype {args.dtype}": args.dtype,
        f"--tokenizer {args.tokenizer}": args.tokenizer,
    }
    if given := next((words for words, x in of_models.items() if x), ""):
        raise UserError(
            f"{given}: is for a model, and {str(args.source)!r} has trained an adapter; add --merge for a model, or "
            "name a directory alone for the adapter"
        )
    return weights, adapter

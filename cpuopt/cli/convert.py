"""``cpuopt convert``: weights from a run, llm.c or Hugging Face to one of the latter."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def flags(p: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    p.add_argument(
        "source", type=Path, help="an llm.c model file, a Hugging Face directory, its .safetensors or index, a run"
    )
    p.add_argument("target", type=Path, help="NAME.bin for llm.c, anything else for a Hugging Face directory")
    p.add_argument("--dtype", choices=["f32", "bf16"], help="of the numbers written (that of the source)")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    from ..files import remove_leftovers
    from ..report import console
    from ..train.checkpoint import open_weights
    from ..weights import check_target, save_weights

    check_target(args.target)
    for name in remove_leftovers(Path(os.path.realpath(args.target))):
        console.warn(f"removed {name}, which an interrupted save has left")
    weights = open_weights(args.source)
    dtype = args.dtype or weights.dtype
    padded = getattr(weights, "padded_vocab", None)
    save_weights(args.target, weights.config, weights.read, dtype, padded, weights.tokenizer)
    c = weights.config
    print(
        f"{args.target}: {c.n_params / 1e6:.1f} M parameters, {c.n_layer} layers of {c.n_embd}, "
        f"vocabulary {c.vocab_size}, {dtype}"
    )
    return 0

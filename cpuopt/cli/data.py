"""``cpuopt data``: prepare and list datasets, and turn text into token files.

The text of Python's standard library is always there, as builtin.

Examples::

    cpuopt data list
    cpuopt data prepare tinyshakespeare --tokenizer bytes
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..train import settings
from .common import shared, show


def flags(p: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    what = p.add_subparsers(dest="what", metavar="prepare|tokenize|list", required=True)
    q = what.add_parser("prepare", help="download and tokenize a dataset; the only verb that uses the network")
    q.add_argument("name", help="Prepare this dataset.")
    q.add_argument(
        "--tokenizer", default="gpt2", choices=["gpt2", "bytes"], help="Tokenize with this. Default: %(default)s."
    )
    q = what.add_parser("tokenize", help="turn text into token files, NAME_train.bin and NAME_val.bin, for --data")
    q.add_argument("text", help="Read this text: builtin, a dataset, a text file or a glob.")
    q.add_argument(
        "target", metavar="NAME", type=Path, help="Write files of this path, with _train.bin and _val.bin behind it."
    )
    settings.flags(q, "tokenizer")
    shared(what.add_parser("list", help="list the datasets and which are prepared"), "--json")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    return {"prepare": _prepare, "tokenize": _tokenize, "list": _list}[args.what](args)


def _prepare(args: argparse.Namespace) -> int:
    from ..data.corpus import prepare
    from ..report import console

    with console.downloading() as progress:
        files = prepare(args.name, args.tokenizer, progress=progress)
    for file in files:
        print(file)
    return 0


def _tokenize(args: argparse.Namespace) -> int:
    from ..data.corpus import get_tokenizer, load_corpus, write_tokens
    from ..errors import UserError
    from ..files import outputs

    target = args.target
    if not target.name:
        raise UserError(f"data tokenize: NAME {str(target)!r}: expected the beginning of a file's name, as in 'mine'")
    files = {split: target.with_name(f"{target.name}_{split}.bin") for split in ("train", "val")}
    for file in files.values():
        outputs.check(file, "data tokenize:", new=True)
    tokenizer = get_tokenizer(args.tokenizer or "bytes")
    corpus = load_corpus(args.text, vocab_size=tokenizer.vocab_size, T=1, B=1, tokenizer=args.tokenizer)
    written: list[Path] = []
    try:
        for split, file in files.items():
            write_tokens(file, getattr(corpus, split), wide=tokenizer.vocab_size > 1 << 16)
            written.append(file)
    except BaseException:  # both or none
        for file in written:
            file.unlink()
        raise
    print(*files.values(), sep="\n")
    return 0


def _list(args: argparse.Namespace) -> int:
    from ..data.corpus import list_datasets
    from ..report import console

    datasets = list_datasets()
    show(args, {"datasets": datasets}, lambda: console.datasets_table(datasets))
    return 0

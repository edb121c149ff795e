"""``cpuopt data``: prepare datasets, turn text into tokens, train a tokenizer, and show examples as a model sees them.

The text of Python's standard library is always there, as builtin.

Examples::

    cpuopt data list
    cpuopt data prepare tinyshakespeare --tokenizer bytes
    cpuopt data train-tokenizer 'texts/*.txt' --vocab-size 4096 --out mine
    cpuopt data show chats.jsonl -T 256
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..train import settings
from .common import Parser, settings_of, show


def flags(p: Parser) -> None:
    """Add the verb's flags."""
    what = p.add_subparsers(dest="what", metavar="prepare|tokenize|train-tokenizer|show|list", required=True)
    q = what.add_parser("prepare", help="download and tokenize a dataset; the only verb that uses the network")
    q.option("name", "Prepare this dataset.")
    q.option("--tokenizer", "Tokenize with this.", "gpt2", choices=["gpt2", "bytes"])
    q = what.add_parser("tokenize", help="turn text into token files, NAME_train.bin and NAME_val.bin, for --data")
    q.option("text", "Read this text: builtin, a dataset, a text file or a glob.")
    q.option("target", "Write files of this path, with _train.bin and _val.bin behind it.", metavar="NAME", type=Path)
    settings.flags(q, "tokenizer")
    q = what.add_parser("train-tokenizer", help="train a tokenizer of byte pairs on text, for --tokenizer")
    q.option("text", "Read this text: builtin, a dataset, a text file or a glob; the part to train on.")
    q.option("--vocab-size", "Make N tokens.", 4096, "N")
    q.option(
        "--out",
        "Write this directory, with tokenizer.json and tokenizer_config.json; or the file alone: PATH.json.",
        metavar="PATH",
        type=Path,
        required=True,
    )
    q = what.add_parser("show", help="show examples as the model sees them, and which tokens count")
    q.option("data", "Read this file of examples in JSON or Parquet, or a glob.", metavar="FILE")
    q.option("--limit", "Show this many examples, or rows.", 5, "N")
    settings.flags(q, "init", "tokenizer", "chat_format", "system", "pack", "skip_invalid", "T", T=1024)
    q.shared("--json")
    what.add_parser("list", help="list the datasets and which are prepared").shared("--json")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    verbs = {"prepare": _prepare, "tokenize": _tokenize, "train-tokenizer": _train, "show": _show, "list": _list}
    return verbs[args.what](args)


def _prepare(args: argparse.Namespace) -> int:
    from ..data.datasets import prepare
    from ..report import console

    with console.downloading() as progress:
        files = prepare(args.name, args.tokenizer, progress=progress)
    for file in files:
        print(file)
    return 0


def _tokenize(args: argparse.Namespace) -> int:
    from ..data.corpus import load_corpus
    from ..data.tokenizers import get_tokenizer
    from ..data.tokens import write_tokens
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
            write_tokens(file, getattr(corpus, split)[:], wide=tokenizer.vocab_size > 1 << 16)
            written.append(file)
    except BaseException:  # both or none
        for file in written:
            file.unlink()
        raise
    print(*files.values(), sep="\n")
    return 0


def _train(args: argparse.Namespace) -> int:
    from ..data.corpus import load_corpus
    from ..data.encoding import decoded, train_tokenizer
    from ..data.tokenizers import TOKEN_FILE
    from ..errors import UserError
    from ..files import outputs, write_directory, write_whole
    from ..wording import count

    if args.out.is_dir():
        raise UserError(f"--out {args.out}: it is there already; move it away or choose another name")
    outputs.check(args.out, "--out", new=True)
    if args.text.endswith(TOKEN_FILE):
        raise UserError(f"data train-tokenizer: {args.text!r} has tokens by its name; expected text")
    corpus = load_corpus(args.text, vocab_size=256, T=1, B=1, tokenizer="bytes")
    files = train_tokenizer(decoded(corpus.train), args.vocab_size)
    if args.out.suffix == ".json":
        write_whole(args.out, [files["tokenizer.json"]])
    else:
        write_directory(args.out, files)
    model = json.dumps({"vocab_size": args.vocab_size})
    print(f"{args.out}: {count(args.vocab_size, 'token')}; cpuopt train --tokenizer {args.out} --model '{model}'")
    return 0


def _show(args: argparse.Namespace) -> int:
    from ..data.chats import load_chats
    from ..data.corpus import files_of, is_examples
    from ..data.tokenizers import get_tokenizer, own_tokenizer
    from ..errors import UserError
    from ..report import console
    from ..train.settings import EXAMPLES
    from ..wording import plain

    if not is_examples(args.data):
        raise UserError(f"data show: {args.data!r} is text, all of which counts; expected examples in JSON or Parquet")
    for flag, n in {"-T": args.T, "--limit": args.limit}.items():
        if n < 1:
            raise UserError(f"{flag} {n}: expected 1 or more")
    name = args.tokenizer
    if args.init is not None and name is None:
        from ..train.checkpoint import open_weights

        weights = open_weights(Path(args.init))
        name = own_tokenizer(weights.tokenizer, weights.path, weights.config.vocab_size)
    tokenizer = get_tokenizer(name or "bytes")
    s = settings_of(args, truncate=True)
    how = {"vocab_size": tokenizer.vocab_size, "T": s.T, "tokenizer": name, **s.some(*EXAMPLES)}
    data = load_chats(files_of(s.data), name=s.data, **how)
    examples = sorted((*data.train, *data.val, *data.idle), key=lambda e: e.number)
    parts = [[part] for e in examples for part in e.parts(args.T)]
    rows = [*data.rows("train"), *data.rows("val")] if args.pack else parts
    held_out = {e.number for e in data.val}
    found = [
        {
            "row": row,
            "start": sum(other.size for other in some[:n]),
            "where": e.where,
            "split": "val" if e.number in held_out else "train",
            "cut": e.cut,
            "targets": e.targets,
            "ids": e.ids.tolist(),
            "counted": e.counted.tolist(),
            "runs": [[counts, plain(text)] for counts, text in e.runs(tokenizer)],
        }
        for row, some in enumerate(rows[: args.limit], 1)
        for n, e in enumerate(some)
    ]

    show(args, {**data.report(), "shown": found}, lambda: console.examples(data.description, found, args.pack))
    return 0


def _list(args: argparse.Namespace) -> int:
    from ..data.datasets import list_datasets
    from ..report import console

    datasets = list_datasets()
    show(args, {"datasets": datasets}, lambda: console.datasets_table(datasets))
    return 0

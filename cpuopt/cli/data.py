"""``cpuopt data``: prepare and list datasets."""

from __future__ import annotations

import argparse

from .common import shared, show


def flags(p: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    what = p.add_subparsers(dest="what", metavar="what", required=True)
    q = what.add_parser("prepare", help="download and tokenize a dataset; the only verb that uses the network")
    q.add_argument("name", help="name of the dataset")
    q.add_argument("--tokenizer", default="gpt2", choices=["gpt2", "bytes"], help="unit of the text (%(default)s)")
    shared(what.add_parser("list", help="list the datasets and which are prepared"), "--json")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    return _prepare(args) if args.what == "prepare" else _list(args)


def _prepare(args: argparse.Namespace) -> int:
    from ..data.corpus import prepare
    from ..report import console

    with console.downloading() as progress:
        files = prepare(args.name, args.tokenizer, progress=progress)
    for file in files:
        print(file)
    return 0


def _list(args: argparse.Namespace) -> int:
    from ..data.corpus import list_datasets
    from ..report import console

    datasets = list_datasets()
    show(args, {"datasets": datasets}, lambda: console.datasets_table(datasets))
    return 0

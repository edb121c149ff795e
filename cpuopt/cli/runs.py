"""``cpuopt runs``: list, show and compare what was measured before.

Every profile, ab, sweep, bench, tune and train keeps a record in runs/. Two profiles are compared op by op. The history
of an op has a row for each of its measurements, with the hash of the kernel's source and the commit.

Examples::

    cpuopt runs list
    cpuopt runs compare A B
    cpuopt runs history gelu_forward
"""

from __future__ import annotations

import argparse

from ..files.outputs import Output, check_unread
from .common import Parser, check_targets, known_op, picked, show


def flags(p: Parser) -> None:
    """Add the verb's flags."""
    what = p.add_subparsers(dest="what", metavar="list|show|compare|history", required=True)
    for name, words, help_ in (
        ("list", (), "list all records, oldest first"),
        ("show", ("RUN",), "show one record; a part of its name suffices"),
        ("compare", ("A", "B"), "compare two profiles op by op, with the noise between them"),
        ("history", (), "show the speed of an op over the records of this machine"),
    ):
        q = what.add_parser(name, help=help_)
        for word in words:
            q.option(
                word.lower(),
                "Use the record with this name, or this part of it, as 'cpuopt runs list' shows it.",
                metavar=word,
            )
        if name == "history":
            q.shared("op")
        q.shared("--runs", "--json")
        if name == "show":
            q.option("--detail", "Print a row for every op of every layer of a profile.", False)
            q.shared("--html")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    from ..files import write_text
    from ..lab import records
    from ..measure.rates import machine_id
    from ..report import console, html
    from ..report import records as report
    from ..report.html import sweep

    if args.what == "show":
        check_targets(args)
    if args.what == "list":
        found = records.entries(args.runs)
        rows = [picked(e, "name", "kind", "time", "what", "trouble") for e in found]
        show(args, {"runs": rows}, lambda: report.listing(found, args.runs))
    elif args.what == "history":
        found = records.entries(args.runs)
        own = records.compared_ops(found)  # an op of one's own is in no package
        measured = records.history(found, known_op("runs history", args.op, own), machine_id())
        show(args, {"op": args.op, "rows": measured}, lambda: report.history(args.op, measured))
    elif args.what == "show":
        entry = records.find(args.runs, args.run)
        with records.readable(entry):
            if args.html:
                check_unread([Output("--html", args.html)], [entry.path])
                if entry.kind == "train" and not (entry.path / "metrics.jsonl").is_file():
                    console.warn(f"{entry.path} has no metrics.jsonl: the report has no losses of the training steps")
                if entry.kind == "sweep":
                    write_text(args.html, sweep.report(entry.content))
                else:
                    html.write_report(args.html, records.profile_in(entry), run=entry.path)
            show(args, entry.content, lambda: report.shown(entry, detail=args.detail))
    else:
        pair = records.find(args.runs, args.a), records.find(args.runs, args.b)
        with records.readable(*pair):
            both = records.compare(*pair)
            show(args, both, lambda: report.comparison(both))
    return 0

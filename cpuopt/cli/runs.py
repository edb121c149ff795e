"""``cpuopt runs``: what was measured before, listed, shown, compared."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

HELP = "list, show and compare what was measured before"


def flags(p: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    what = p.add_subparsers(dest="what", metavar="what", required=True)
    for name, words, help_ in (
        ("list", (), "all records, oldest first"),
        ("show", ("RUN",), "one record; a part of its name suffices"),
        ("compare", ("A", "B"), "two profiles op by op, with the noise between them"),
    ):
        q = what.add_parser(name, help=help_)
        for word in words:
            q.add_argument(word.lower(), metavar=word)
        q.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="where they are (%(default)s)")
        if name == "show":
            q.add_argument("--detail", action="store_true", help="of a profile: a row for every op of every layer")
            q.add_argument(
                "--html", type=Path, metavar="FILE", help="write its profile, and the losses of a training run"
            )
        q.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    from ..lab import records
    from ..report import console, html
    from ..report import records as report

    if args.what == "list":
        found = records.entries(args.runs)
        if args.json:
            told = [
                {"name": e.path.name, "kind": e.kind, "time": e.time, "what": e.what, "trouble": e.trouble}
                for e in found
            ]
            print(json.dumps({"runs": told}))
        else:
            console.show(report.listing(found, args.runs))
    elif args.what == "show":
        entry = records.find(args.runs, args.run)
        with records.figures_of(entry):
            if args.html:
                html.write_report(args.html, records.profile_in(entry), run=entry.path)
            shown = [] if args.json else report.shown(entry, detail=args.detail)
        if args.json:
            print(json.dumps(entry.content))
        console.show(shown)
    else:
        pair = records.find(args.runs, args.a), records.find(args.runs, args.b)
        with records.figures_of(*pair):
            both = records.compare(*pair)
            shown = [] if args.json else report.comparison(both)
        if args.json:
            print(json.dumps(both))
        console.show(shown)
    return 0

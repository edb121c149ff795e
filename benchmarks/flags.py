"""What the benchmarks share: sizes and names among their flags, and records, of which tables are made."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any


def size(text: str) -> str:
    """Return a size, rows by tokens, as in ``4x64``."""
    if not re.fullmatch(r"[1-9][0-9]{0,6}x[1-9][0-9]{0,6}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; expected BxT, as in 4x64")
    return text


def sizes(text: str) -> list[str]:
    """Return several sizes, as in ``4x64,1x1024``."""
    return [size(item.strip()) for item in text.split(",")]


def some_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """Return a function that reads some of these names, with commas between them."""

    def read(text: str) -> list[str]:
        found = [item.strip() for item in text.split(",")]
        if wrong := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"{wrong[0]!r}: expected some of {', '.join(known)}")
        return found

    return read


def recorded(
    p: argparse.ArgumentParser, table: Callable[[Mapping[str, Any]], Iterable[str]], kept: str = "not kept"
) -> argparse.Namespace:
    """Add the flags of a record, and read all; with ``--show``, print the table of a record, and end."""
    p.add_argument("--out", type=Path, help=f"write the record to this file; rows that it has are {kept}")
    p.add_argument("--show", type=Path, help="print the tables of this record, and measure nothing")
    a = p.parse_args()
    if a.show:
        print("\n".join(table(json.loads(a.show.read_text()))))
        p.exit()
    return a


def begun(kind: str, **more: Any) -> dict[str, Any]:
    """Begin a record."""
    from cpuopt.machine import describe  # here, since a Python without cpuopt reads flags too

    return {"kind": f"cpuopt-{kind}", "machine": describe(), "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **more}


def known(out: Path | None) -> dict[str, Any]:
    """Read the record of an earlier command; empty if there is none."""
    return dict(json.loads(out.read_text())) if out and out.exists() else {}


def keep(record: Mapping[str, Any], out: Path | None) -> None:
    """Write a record, if a file is named."""
    from cpuopt.files import write_whole

    if out:
        write_whole(out, [json.dumps(record, indent=1).encode() + b"\n"])

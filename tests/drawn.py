"""Which tests are long or slow: those that `long.txt` lists, and cases that the commit does not draw."""

import random
import subprocess
from collections import defaultdict
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
LONG = set((HERE / "long.txt").read_text().splitlines())


@cache
def commit():
    """Return the commit, by which cases are drawn: others from one to the next, and the same ones again."""
    command = ["git", "-C", str(HERE), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def mark(items):
    """Mark the tests that `long.txt` names as long, and of those marked `drawn(n)` all cases but n as slow."""
    cases = defaultdict(list)
    for item in items:
        name = item.nodeid.removeprefix("tests/").partition("[")[0]
        if {name, name.partition("::")[0]} & LONG:
            item.add_marker("long")
        for mark in item.iter_markers("drawn"):
            if not item.get_closest_marker("slow"):
                cases[name, *mark.args].append(item)
    for (name, n), every in cases.items():
        for item in random.Random(f"{commit()} {name}").sample(every, max(0, len(every) - n)):
            item.add_marker("slow")

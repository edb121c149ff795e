"""Generator of the screens of docs/lab.md: it runs each command of the page, and inserts its output.

A block of the page that begins with ``<!-- $ command -->`` gets the command's output; ``<!-- file name -->`` before a
Python block says that the block is written to that file first. Run from the root of the checkout:

    python benchmarks/lab_page.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "lab.md"
PART = re.compile(r"<!-- (?P<kind>file|\$) (?P<what>[^\n]*?) -->\n```(?P<language>\w*)\n(?P<body>.*?)```", re.S)


def main() -> None:
    """Run all, in the order of the page, in an empty folder."""
    text = PAGE.read_text()
    environment = {**os.environ, "COLUMNS": "80", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with tempfile.TemporaryDirectory(prefix="cpuopt-lab-") as folder:

        def run(part: re.Match[str]) -> str:
            if part["kind"] == "file":
                (Path(folder) / part["what"]).write_text(part["body"])
                return part[0]
            print(part["what"], file=sys.stderr)
            done = subprocess.run(
                part["what"], shell=True, cwd=folder, capture_output=True, text=True, env=environment, timeout=1200
            )
            said = "\n".join(line.rstrip() for line in (done.stdout or done.stderr).splitlines()).strip()
            said = said.replace(folder, ".").replace(f"{PAGE.parents[1]}/", "")
            return f"<!-- $ {part['what']} -->\n```\n$ {part['what']}\n{said}\n```"

        PAGE.write_text(PART.sub(run, text))


if __name__ == "__main__":
    main()

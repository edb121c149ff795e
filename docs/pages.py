"""Pages of the site that lie outside of docs/: README, CONTRIBUTING, the reference, the gallery with its output.

mkdocs calls the functions ``on_...``; mkdocs.yml names this file. Nothing that an example prints is kept: times differ
from machine to machine, so each build runs them.
"""

from __future__ import annotations

import ast
import json
import os
import posixpath
import re
import subprocess
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import reference

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
LINK = re.compile(r"(\]\(|(?:src|srcset)=\")([^)#\"\s]+)")
ELSEWHERE = re.compile(r"(?:https?:)?//")
CSS = re.compile(r"(?:url\(|@import )\s*[\"']?((?:https?:)?//[^)\"']+)")
GALLERY = """# Gallery

Each page is a script of `examples/` with what it printed when this site was built. Each takes seconds once its kernels
are compiled.
"""


def output(script: Path) -> str:
    """Run an example as its reader would, in a folder of its own, and return what it printed.

    Raises
    ------
    RuntimeError
        Where it fails; with its messages.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, cwd=folder, env=environment
        )
    if done.returncode:
        raise RuntimeError(f"{script}: exit status {done.returncode}\n{done.stderr}")
    return done.stdout


def fenced(text: str, language: str = "") -> str:
    """Return a block of code, whose fence is longer than any in the text."""
    fence = "`" * max(3, 1 + max(map(len, re.findall(r"`+", text)), default=0))
    return f"{fence}{language}\n{text.strip()}\n{fence}"


def described(script: Path) -> tuple[str, str, str]:
    """Return the first line of a script's docstring, the rest of it, and the script without it."""
    text = script.read_text(encoding="utf-8")
    first = ast.parse(text).body[0]
    head, _, rest = (ast.get_docstring(ast.parse(text)) or "").partition("\n")
    return head.rstrip("."), rest.strip(), "".join(text.splitlines(keepends=True)[first.end_lineno :])


def page(script: Path, said: str) -> str:
    """Return the page of a script that printed something."""
    head, rest, code = described(script)
    shown = ["## Output", fenced(said, "text")] if said else []
    return "\n\n".join([f"# {head}", rest, fenced(code, "python"), *shown]) + "\n"


def notebook(path: Path) -> str:
    """Return the page of a notebook, without outputs."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = [("".join(cell["source"]), cell["cell_type"]) for cell in cells]
    return "\n\n".join(text if kind == "markdown" else fenced(text, "python") for text, kind in texts) + "\n"


def gallery(execute: bool = True) -> dict[str, str]:
    """Return the pages of all examples, by their place in the site."""
    scripts, books = sorted(EXAMPLES.glob("*.py")), sorted(EXAMPLES.glob("*.ipynb"))
    pages = {f"examples/{s.stem}.md": page(s, output(s) if execute else "") for s in scripts}
    pages |= {f"examples/{b.stem}.md": notebook(b) for b in books}
    items = [f"- [{text.partition(chr(10))[0].strip('# ')}]({posixpath.basename(at)})" for at, text in pages.items()]
    return {"examples/index.md": "\n".join([GALLERY, *items, ""]), **pages}


def place(path: str) -> str:
    """Return where a file of the repository stands in the site."""
    if path in ("README.md", "CONTRIBUTING.md"):
        return {"README.md": "index.md"}.get(path, path.lower())
    if path.rstrip("/") == "examples":
        return "examples/index.md"
    if path.startswith("examples/"):
        return f"{posixpath.splitext(path)[0]}.md"
    return path.removeprefix("docs/")


def moved(text: str, path: str) -> str:
    """Return a file's text with relative links as its page of the site needs them."""
    here, there = posixpath.dirname(path), posixpath.dirname(place(path))

    def link(found: re.Match[str]) -> str:
        if ":" in found[2]:
            return found[0]
        target = place(posixpath.normpath(posixpath.join(here, found[2])))
        return found[1] + posixpath.relpath(target, there or ".")

    return LINK.sub(link, text)


class Loads(HTMLParser):
    """The addresses elsewhere that a page makes a browser load. Links that a reader may follow are none."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag loads."""
        given = dict(attrs)
        followed = tag == "a" or (tag == "link" and given.get("rel") in ("canonical", "next", "prev", "edit"))
        names = ["src", "srcset", "data", "poster"] + ([] if followed else ["href", "xlink:href"])
        self.found += [x for n in names if (x := given.get(n)) and ELSEWHERE.match(x)]
        self.found += CSS.findall(given.get("style") or "")


def loads(site: Path) -> list[str]:
    """List what the pages and style sheets of a site load from elsewhere."""
    found = []
    for file in sorted(site.rglob("*.html")):
        found += [f"{file.name}: {x}" for x in Loads(file.read_text(encoding="utf-8")).found]
    for file in sorted(site.rglob("*.css")):
        found += [f"{file.name}: {x}" for x in CSS.findall(file.read_text(encoding="utf-8"))]
    return found


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie outside of docs/."""
    from mkdocs.structure.files import File

    for name in ("README.md", "CONTRIBUTING.md"):
        text = moved((ROOT / name).read_text(encoding="utf-8"), name)
        files.append(File.generated(config, place(name), content=text))
    files.append(File.generated(config, "reference.md", content=reference.page()))
    for where, text in gallery(config.extra["execute"]).items():
        files.append(File.generated(config, where, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn the links of a page of docs/ to where things stand in the site."""
    generated = page.file.generated_by is not None
    return markdown if generated else moved(markdown, f"docs/{page.file.src_uri}")


def on_post_build(config: Any) -> None:
    """Refuse a site that would load something from elsewhere."""
    if found := loads(Path(config.site_dir)):
        raise RuntimeError("the site loads from elsewhere:\n" + "\n".join(found))

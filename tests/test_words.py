"""Words that make a sentence hard to read: pages, docstrings, help and messages have no more of them than listed."""

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MOST = {
    "anew": 0,
    "but for": 16,
    "at all": 24,
    "as good as": 0,
    "vouches?": 0,
    "one's own": 20,
    "the other way round": 3,
    "at one time": 14,
    "what products": 12,
    "as far as": 12,
    "be it": 0,
    "whoever": 7,
    "nobody": 22,
    "somebody": 3,
    "such as one": 0,
    "besides": 31,
    "likewise": 2,
    "another than": 3,
    "all the same": 4,
    "of whom": 0,
    "there is none": 39,
    "is there": 33,
    "takes? turns": 4,
    "has no other": 0,
    "in all but": 2,
    "goes without": 0,
    "so it is": 7,
    "so is": 5,
    "as is": 1,
    "is told": 3,
    "are told": 0,
    "is asked": 12,
    "are asked": 4,
    "looks at": 3,
    "makes up": 0,
    "in the place of": 3,
    "gets none": 0,
    "with it all": 0,
    "nor is": 0,
    "whose own": 2,
}
"""The number of each that is left. Write what the reader's field says: "again" for "anew", "except" for "but for"."""


def texts():
    """The prose of pages, without their code, and all texts in the package."""
    for page in PAGES:
        yield re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    for file in (ROOT / "cpuopt").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_hard_words_only_become_fewer():
    prose = "\n".join(" ".join(text.split()) for text in texts())
    found = Counter({word: len(re.findall(rf"\b{word}\b", prose, re.IGNORECASE)) for word in MOST})
    assert not found - Counter(MOST), "say it in other words"
    assert found == Counter(MOST), "fewer than listed: lower the numbers"

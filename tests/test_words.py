"""Words that make a sentence hard to read: pages, docstrings, help and messages have no more of them than listed."""

import ast
import re

from test_links import PAGES, ROOT

NEVER = """
anew; as good as; vouches?; be it; such as one; of whom; has no other; goes without; are told; makes up; gets none;
with it all; nor is
"""
SELDOM = """
but for; at all; one's own; the other way round; at one time; what products; as far as; whoever; nobody; somebody;
besides; likewise; another than; all the same; there is none; is there; takes? turns; in all but; so it is; so is;
as is; is told; is asked; are asked; looks at; in the place of; whose own
"""
MOST = 267
"""The number of those that are left. Write what the reader's field says: "again" for "anew", "except" for "but for"."""


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

    def found(words):
        counts = {w: len(re.findall(rf"\b{w}\b", prose, re.IGNORECASE)) for w in re.split(r";\s+", words.strip())}
        return {word: n for word, n in counts.items() if n}

    assert found(NEVER) == {}
    seldom = found(SELDOM)
    assert sum(seldom.values()) <= MOST, f"say it in other words: {seldom}"
    assert sum(seldom.values()) > MOST - 20, "fewer than before: lower the number"

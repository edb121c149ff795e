"""Every link between README, CONTRIBUTING and the pages of docs/ leads to a file and, with an anchor, to a heading."""

import re
import unicodedata
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")


def prose(page):
    """The text of a page without its code."""
    text = re.sub(r"(?ms)^ *(`{3,}).*?^ *\1", "", page.read_text(encoding="utf-8"))
    return re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", text)


def links(page):
    """The target and the anchor of each link that stays here."""
    found = (m[1] or m[2] for m in LINK.finditer(prose(page)))
    return [(target, anchor) for x in found if ":" not in x for target, _, anchor in [x.partition("#")]]


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    text, found = re.sub(r"(?ms)^ *(`{3,}).*?^ *\1", "", page.read_text(encoding="utf-8")), []
    for heading in re.findall(r"(?m)^#{1,6} +(.+?) *$", text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", unicodedata.normalize("NFC", plain).lower()).replace(" ", "-")
        found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return found


def broken(page):
    """The links of a page that lead nowhere."""
    found = []
    for target, anchor in links(page):
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            found.append(f"{target}#{anchor}" if anchor else target)
    return found


NAMED = re.compile(r"`((?:examples|benchmarks|tests|docs)/[\w./-]+\.\w+)`")
"""Files of this repository in the prose; those of cpuopt/ may be ones that a reader is told to write."""


def unknown_files(page, root=ROOT):
    """The files that a page names and that are not there."""
    return [name for name in NAMED.findall(page.read_text(encoding="utf-8")) if not (root / name).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_is_there(page):
    assert unknown_files(page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    assert broken(page) == []


def test_a_link_that_leads_nowhere_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b` c & d\n\n[1](#a-b-c--d) [2](#a-b) [3](other.md) [4](page.md#a-b-c--d) [5](https://x.y/z.md)\n"
        '`[6](code.md)`\n\n```\n[7](block.md)\n# none\n```\n[8](#none)\n<img src="none.png">\n'
    )
    assert broken(page) == ["#a-b", "other.md", "#none", "none.png"]

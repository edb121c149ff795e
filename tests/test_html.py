"""The reports: read back with an HTML parser, and opened in a browser where `.[browser]` and Chromium are there."""

import base64
import hashlib
import json
import os
import re
import shutil
from collections import Counter
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import cache
from html.parser import HTMLParser
from math import log10, nan
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from small_models import batch
from verbs import SQUARES, ran, strict

from cpuopt import cli
from cpuopt.engine import Engine
from cpuopt.errors import UserError
from cpuopt.files.reading import to_json
from cpuopt.kernels import registry
from cpuopt.measure import rates as machine
from cpuopt.measure.profile import LayerRow, OpRow, op_ids
from cpuopt.measure.quartile import lower_quartile
from cpuopt.measure.roofline import Level, Roofs
from cpuopt.models import specs
from cpuopt.models.gpt2 import GPT2, PRESETS
from cpuopt.profiler import Profiler
from cpuopt.program.arena import gb
from cpuopt.report import html
from cpuopt.report.html import curves, labels
from cpuopt.report.html.listing import layer_columns, op_columns
from cpuopt.report.html.roofs import roofline
from cpuopt.report.html.svg import PARTS
from cpuopt.wording import four

B, T, STEPS = 2, 16, 4
HOSTILE = "</title></style></script>--><script>window.hit=1</script><img src=//x.test/a onerror=hit=1>\"'`&lt;\0\udc80"
SHOWN = HOSTILE.replace("\0", "�").replace("\udc80", "\\udc80")
LEVELS = (Level("L1", 32 << 10), Level("memory", None))
ROOFS = Roofs(1, LEVELS, 5e3, {"L1": {"read": 900.0, "copy": 1000.0}, "memory": {"read": 100.0}}, 1.0)
TRAINING = [(1, 5.5), (2, 5.0), (3, nan), (4, None), (5, 4.0)]
LOSSES = {"training loss": TRAINING, "validation loss": [(0, 5.6), (5, 4.25)]}
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
VOID = {"meta", "link", "input", "img"}


@dataclass
class Element:
    tag: str
    attrs: dict
    children: list = field(default_factory=list)

    def all(self, tag=None, **attrs):
        """Every element below, in order, with that tag and those attributes; ``class_`` is one of its classes."""
        for c in self.children:
            if isinstance(c, Element):
                cls = attrs.get("class_")
                same = all(c.attrs.get(k) == v for k, v in attrs.items() if k != "class_")
                if tag in (None, c.tag) and same and (cls is None or cls in c.attrs.get("class", "").split()):
                    yield c
                yield from c.all(tag, **attrs)

    def one(self, tag=None, **attrs):
        (found,) = self.all(tag, **attrs)
        return found

    @property
    def text(self):
        return "".join(c if isinstance(c, str) else c.text for c in self.children)


class Reader(HTMLParser):
    """Builds the tree, and refuses what is not balanced."""

    def __init__(self, page):
        super().__init__()
        self.root = Element("", {})
        self.stack = [self.root]
        self.feed(page)
        self.close()
        assert [e.tag for e in self.stack] == [""], "an element has no end"

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs), f"<{tag}> has an attribute twice"
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.stack[-1].children.append(element)
        if tag not in VOID:
            self.stack.append(element)

    def handle_endtag(self, tag):
        assert self.stack.pop().tag == tag

    def handle_data(self, data):
        self.stack[-1].children.append(data)


def read(page):
    return Reader(page).root


CHOICE = registry.Choice("vanilla", ("matmul_forward@h.1.*=blas",))


@pytest.fixture(scope="module")
def engine():
    return Engine.from_options(GPT2(PRESETS["gpt2-tiny"]), specs(B, T), choice=CHOICE, threads=1)


@pytest.fixture(scope="module")
def profile(engine):
    profiler = Profiler(engine)
    for i in range(STEPS + 1):
        with profiler.time_step():
            engine.step(**batch(i))
    profiler.remove()
    return profiler.profile(model="gpt2-tiny", B=B, T=T, choice=CHOICE, roofs=ROOFS, doubts=["a doubt"])


@pytest.fixture(scope="module")
def page(profile, engine):
    return html.report(profile, engine, LOSSES)


@pytest.fixture(scope="module")
def tree(page):
    return read(page)


# Nothing leaves the page, and no name becomes markup


def violations(page):
    """What in a page could ask the network, or run what is not the page's own script."""
    tree = read(page)
    ids = [e.attrs["id"] for e in tree.all() if "id" in e.attrs]
    found = [f"{id} twice" for id, n in Counter(ids).items() if n > 1]
    scripts, styles = list(tree.all("script")), list(tree.all("style"))
    found += [f"{len(x)} of script or style" for x in (scripts, styles) if len(x) != 1]
    policy = tree.one("meta", **{"http-equiv": "Content-Security-Policy"}).attrs["content"]
    hashes = [base64.b64encode(hashlib.sha256(e.text.encode()).digest()).decode() for e in (*styles, *scripts)]
    expected = "default-src 'none'; img-src data:; style-src 'sha256-{}'; script-src 'sha256-{}'"
    found += [] if policy == expected.format(*hashes) else ["policy"]
    for e in tree.all():
        if e.tag in ("img", "iframe", "object", "embed", "base", "form", "image", "use", "video", "audio"):
            found.append(e.tag)
        for name, value in e.attrs.items():
            inside = value == "data:," or (value[:1] == "#" and value[1:] in ids)
            if name in ("src", "href", "xlink:href", "action", "srcset", "data", "poster") and not inside:
                found.append(f"{name}={value}")
            if name.startswith("on") or name == "style":
                found.append(name)
    return found + re.findall(r"url\(|@import|fetch\(|XMLHttp|innerHTML|eval\(", styles[0].text + scripts[0].text)


PLANTED = [
    *(("</main>", "<img src='//x.test'>"), ("</main>", "<a href='https://x.test'>x</a>")),
    ("</main>", "<p onclick='x()'></p>"),
    *(("</main>", "<script>window.hit = 1</script>"), ("</style>", "p { background: url(//x.test) }")),
    ("</script>", "fetch('//x.test')"),
]


def test_nothing_in_the_page_asks_the_network_and_a_planted_request_is_noticed(page):
    assert violations(page) == []
    for before, planted in PLANTED:
        assert violations(page.replace(before, planted + before, 1)), planted


def hostile(x):
    """The same, with every name made hostile."""
    match x:
        case str():
            return x if x in PARTS else HOSTILE + x
        case list():
            return [hostile(v) for v in x]
        case dict():
            return {hostile(k): hostile(v) for k, v in x.items()}
        case OpRow() | LayerRow() | Level():
            return replace(x, **{f.name: hostile(getattr(x, f.name)) for f in fields(x)})
    return x


@pytest.fixture
def attacked(profile, engine):
    """A profile and an engine whose names are all hostile."""
    names = {f.name: hostile(getattr(profile, f.name)) for f in fields(profile) if f.name not in ("raw", "step_ms")}
    calls = {c: copy(c) for c in engine.program.calls}
    for call in calls.values():
        call.layer, call.op = HOSTILE + call.layer, copy(call.op)
        object.__setattr__(call.op, "name", HOSTILE + call.op.name)

    @cache
    def value(v):
        (made := copy(v)).name = HOSTILE + v.name
        return made

    def bound(b):
        return replace(b, call=calls[b.call], kernel=replace(b.kernel, op=calls[b.call].op, variant=HOSTILE))

    raw = [replace(s, runs=[([bound(b) for b in bounds], marks) for bounds, marks in s.runs]) for s in profile.raw]
    roofs = replace(ROOFS, levels=tuple(map(hostile, LEVELS)), gbs=hostile(ROOFS.gbs))
    plan = replace(
        engine.plan,
        offsets={value(v): o for v, o in engine.plan.offsets.items()},
        lifetimes={value(v): o for v, o in engine.plan.lifetimes.items()},
        scratch={calls[c]: {n: value(v) for n, v in parts.items()} for c, parts in engine.plan.scratch.items()},
    )
    p = replace(profile, **names | {"raw": raw, "roofs": roofs})
    p.checked = [{"kernel": k, "status": "marginal"} for r in p.ops for k in r.kernels]
    return p, SimpleNamespace(plan=plan, program=SimpleNamespace(calls=list(calls.values())))


def kinds(tree):
    """The tags that a page has, each with its attributes' names."""
    return {(e.tag, *sorted(e.attrs)) for e in tree.all()}


def test_hostile_names_are_text(attacked, tree):
    page = html.report(*attacked, {HOSTILE + n: line for n, line in LOSSES.items()})
    assert violations(page) == []
    got = read(page)
    assert kinds(got) <= kinds(tree)
    assert got.one("script").text == tree.one("script").text
    for place in (got.one("head"), got.one("h1"), *(got.one("section", id=s) for s in SECTIONS if s != "steps")):
        assert SHOWN in place.text
    assert any(SHOWN in e.attrs["title"] for e in got.all("td") if "title" in e.attrs)
    assert SHOWN in got.one(class_="warnings").text


# The figures are those of the profile

SECTIONS = ("loss", "timeline", "matrix", "roofline", "arena", "steps", "ops", "layers")


def test_the_head_says_what_the_profile_says_and_links_every_picture(tree, profile):
    assert [s.attrs["id"] for s in tree.all("section")] == list(SECTIONS)
    assert [a.attrs["href"] for a in tree.one("nav").all("a")] == [f"#{s}" for s in SECTIONS]
    assert tree.one("h1").text == "gpt2-tiny · B 2 · T 16"
    tiles = [b.text for b in tree.one(class_="tiles").all("b")]
    step, speed = f"{four(profile.quiet_ms)} ms", f"{profile.tokens_per_s:,.0f}"
    assert tiles == [step, speed, f"{profile.mfu:.0f} %", gb(profile.peak_rss_mb * 1e6), *tiles[4:]]
    assert tree.one(class_="words").text == profile.words
    assert profile.words.startswith(f"A step takes {tiles[0]}, {tiles[2]} of the FMA peak")
    assert [li.text for li in tree.one(class_="warnings").all("li")] == profile.doubts


@pytest.mark.parametrize("name", ["ops", "layers"])
def test_tables_hold_the_numbers_of_the_json(tree, profile, name):
    rows = json.loads(json.dumps(to_json(profile)))[name]
    columns = op_columns(3) if name == "ops" else layer_columns(3)
    assert {c.field for c in columns} >= rows[0].keys() - {"flops", "bytes", "label"}
    assert {r["imbalance"] for r in rows} == {None}  # measured by the verb alone
    columns, table = [c for c in columns if c.field != "imbalance"], tree.one("table", id=f"{name}-table")
    assert [th.text for th in table.one("thead").all("th")] == [c.name for c in columns]
    got = [list(tr.all("td")) for tr in table.one("tbody").all("tr")]
    assert len(got) == len(rows)
    if name == "ops":
        rows = [{**row, "op": op_ids(r.op, r.kernels)} for row, r in zip(rows, profile.ops, strict=True)]
    for cells, row in zip(got, rows, strict=True):
        for cell, column in zip(cells, columns, strict=True):
            value = row[column.field]
            if isinstance(value, int | float):
                assert float(cell.attrs["data-value"]) == value
                digits = re.sub(r"[^\d.-]", "", cell.text)
                places = len(digits.partition(".")[2])
                assert not digits or float(digits) == pytest.approx(value, abs=0.501 * 10**-places)
            elif value is None:
                assert (cell.attrs["data-value"], cell.text) == ("", "")
            else:
                assert cell.text == (value if isinstance(value, str) else ", ".join(value))


def test_the_matrix_sums_to_the_step_and_outlines_the_swapped_layer(tree, profile):
    blocks, layers = tree.one("section", id="matrix").all("table")
    for table in (blocks, layers):
        cells = [td for td in table.one("tbody").all("td") if "data-value" in td.attrs]
        assert sum(float(td.attrs["data-value"]) for td in cells) == pytest.approx(sum(r.ms for r in profile.layers))
    other = [td.attrs["title"].splitlines()[:2] for td in layers.all("td", class_="other")]
    swapped = [f"h.1.{part}" for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
    assert sorted(other) == [[layer, "matmul_forward [blas]"] for layer in swapped]
    darkest = [float(td.attrs["data-value"]) for td in layers.all("td", class_="s9")]
    assert max(r.ms for r in profile.layers) in darkest


def scale(svg, axis, log=False):
    """Read a scale back off its ticks: from places to numbers."""
    ticks = list(svg.all("text", class_="tick", **{"text-anchor": {"x": "middle", "y": "end"}[axis]}))
    points = sorted((float(e.attrs[axis]) - (4 if axis == "y" else 0), float(e.text.replace(",", ""))) for e in ticks)
    (a, low), (b, high) = points[0], points[-1]
    low, high = (log10(low), log10(high)) if log else (low, high)

    def number(place):
        x = low + (float(place) - a) / (b - a) * (high - low)
        return 10**x if log else x

    return number


def test_a_bar_for_every_call_of_the_step(tree, profile):
    step = lower_quartile(profile.raw, lambda s: s.end - s.start)
    svg = tree.one("section", id="timeline").one("svg")
    bars, at = [r for r in svg.all("rect") if r.attrs["height"] == "13"], scale(svg, "x")
    calls = [
        (b.call.layer, b.kernel.name, (start - step.start) / 1e6, (end - step.start) / 1e6)
        for bounds, marks in step.runs
        for b, start, end in zip(bounds, marks[:-1], marks[1:], strict=True)
    ]
    assert len(bars) == len(calls)
    tolerance = (step.end - step.start) / 1e6 / 1000
    for bar, (layer, kernel, start, end) in zip(bars, calls, strict=True):
        x, width = float(bar.attrs["x"]), float(bar.attrs["width"])
        assert (bar.text.splitlines()[:2], at(x)) == ([layer, kernel], pytest.approx(start, abs=tolerance))
        assert width == 0.5 or at(x + width) == pytest.approx(end, abs=tolerance)
    phases = [r.text.split()[0] for r in svg.all("rect") if r.attrs["height"] == "6"]
    assert phases == ["forward", "backward", "norm", "update"]
    names = [t.text for t in svg.all("text", class_="row")]
    assert {"wte", "h.0", "h.1", "lm_head"} <= set(names)
    assert not any(n.startswith("h.0.") for n in names)


def test_every_op_lies_where_its_figures_say_under_the_roofs(tree, profile):
    svg = tree.one("section", id="roofline").one("svg")
    x, y = scale(svg, "x", log=True), scale(svg, "y", log=True)
    points = {}
    for c in svg.all("circle"):
        if "layer" not in c.attrs["class"].split():
            points[c.text.splitlines()[0]] = x(c.attrs["cx"]), y(c.attrs["cy"])
    drawn = {op_ids(r.op, r.kernels): (r.intensity, r.gflops) for r in profile.ops if r.gflops}
    assert points.keys() == drawn.keys()
    assert all(points[op] == pytest.approx(drawn[op], rel=0.01) for op in drawn)
    low, high = y(425), y(34)  # the frame, which the large points and the roofs set
    rates, shown = [r.gflops for r in profile.layers if r.gflops > 0], len(list(svg.all("circle", class_="layer")))
    least, most = (sum(low * e <= rate <= high / e for rate in rates) for e in (1.02, 0.98))  # a measured rate may lie
    assert least <= shown <= most  # on the frame
    left_out = f"Layers outside of the picture: {len(rates) - shown} of {len(rates)}."
    said = tree.one("section", id="roofline").text
    assert (left_out in said) == (shown < len(rates))
    for line in svg.all("line", class_="roof"):
        start, end = ((x(line.attrs[f"x{i}"]), y(line.attrs[f"y{i}"])) for i in (1, 2))
        name = line.text.split()[0]
        if name == "FMA":
            assert (start[1], end[1]) == pytest.approx((ROOFS.gflops,) * 2, rel=0.01)
        else:
            assert end == pytest.approx((ROOFS.gflops / ROOFS.bandwidth(name), ROOFS.gflops), rel=0.01)
            assert start[1] / start[0] == pytest.approx(ROOFS.bandwidth(name), rel=0.01)
    assert len(list(svg.all("line", class_="roof"))) == 1 + len(LEVELS)
    assert all(op_ids(r.op, r.kernels) in said for r in profile.ops if r.kernels and not r.gflops)


def overlaps(svg):
    """Pairs of texts that overlap, in fonts of known width: points on their middle lines are less than a line apart."""
    spots = []
    for e in svg.all("text"):
        width = len(e.text) * (labels.CHAR if e.attrs["class"] in ("point-name", "roof-name") else 7.2)
        along = np.arange(3, width - 2, 3) - width * {"middle": 0.5, "end": 1.0}.get(e.attrs.get("text-anchor"), 0)
        turn = np.radians(float(re.findall(r"rotate\((\S+)", e.attrs.get("transform", "rotate(0 "))[0]))
        middle = np.stack([along * np.cos(turn) + 3 * np.sin(turn), along * np.sin(turn) - 3 * np.cos(turn)], axis=1)
        spots.append((e.text, middle + np.array([float(e.attrs["x"]), float(e.attrs["y"])])))
    pairs = ((t, u, np.abs(a[:, None] - b) < (3, 11)) for i, (t, a) in enumerate(spots) for u, b in spots[:i])
    return [(t, u) for t, u, near in pairs if near.all(axis=-1).any()]


NAMES = [f"{kind}_{part}" for kind in ("matmul_gelu", "attention", "adamw") for part in ("forward", "backward_input")]
HARD = {
    "all in one place": [(10.0, 50.0)] * 14,
    "a tight row": [(10 + 0.4 * i, 100 + i % 3) for i in range(16)],
    "on the roofs": [(10 ** (i / 4 - 2), min(5e3, 100 * 10 ** (i / 4 - 2))) for i in range(16)],
    "corners": [(1e-3, 1e-3), (1e-3, 5e3), (1e3, 1e-3), (1e3, 5e3)],
    "far apart": [(1e-6, 1e-6), (1e6, 5e3), (1.0, 1.0)],
    "too many": [(10.0, 50.0)] * 90,
}


def crowded(profile, places, roofs=ROOFS, types=("float32",)):
    """The profile with an op at each place, of long names and unequal shares."""
    row, layer = replace(profile.ops[0], types=[*types]), profile.layers[0]
    ids = [f"{NAMES[i % len(NAMES)]}_{i}" for i in range(len(places))]
    figures = [{"intensity": x, "gflops": y, "share": 40 / (i + 1)} for i, (x, y) in enumerate(places)]
    ops = [replace(row, op=n, kernels=[f"{n}[vanilla]"], **f) for n, f in zip(ids, figures, strict=True)]
    layers = [replace(layer, op=n, **f) for n, f in zip(ids, figures, strict=True)]
    return replace(profile, ops=ops, layers=layers, roofs=roofs)


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("roofs", ["roofs", "equal roofs", "two peaks", "equal peaks", "no roofs"])
def test_no_two_names_of_the_roofline_overlap(profile, name, roofs):
    equal = {n: {"read": 100.0 + i} for i, n in enumerate(("L1", "memory"))}
    given = {"roofs": ROOFS, "equal roofs": replace(ROOFS, gbs=equal), "no roofs": None}
    given |= {"two peaks": replace(ROOFS, bf16_gflops=1e4), "equal peaks": replace(ROOFS, bf16_gflops=5.01e3)}
    types = ("bfloat16", "float32") if "peaks" in roofs else ("float32",)
    section = read(roofline(crowded(profile, HARD[name], given[roofs], types)))
    texts = [e.text for e in section.one("svg").all("text")]
    flat = [text for text in texts if text.split()[0] in ("FMA", "bf16")]
    assert len(flat) == {"no roofs": 0, "two peaks": 2, "equal peaks": 2}.get(roofs, 1)
    assert overlaps(section.one("svg")) == []
    ids = [c.text.splitlines()[0] for c in section.all("circle") if "layer" not in c.attrs["class"].split()]
    left_out = [i for i in ids if labels.shortened(i) not in texts]
    assert all(i in section.text.partition("Without a name")[2] for i in left_out)
    assert not left_out or name == "too many"


def test_without_roofs_the_points_are_drawn_and_without_a_check_that_passed_nothing(profile, engine):
    bare = read(html.report(replace(profile, roofs=None, mfu=None), engine)).one("section", id="roofline")
    assert list(bare.all("circle"))
    assert not list(bare.all("line", class_="roof"))
    assert "not measured" in bare.text
    checked = [{"kernel": k, "status": "ERROR"} for r in profile.ops for k in r.kernels]
    tree = read(html.report(replace(profile, checked=checked), engine))
    assert not list(tree.all("section"))
    assert "No figures, because these kernels did not pass" in tree.text


def test_the_arena_map_has_every_pooled_value_where_the_plan_puts_it(tree, engine):
    plan, persistent = engine.plan, ("parameter", "moment", "input")
    svg = list(tree.one("section", id="arena").all("svg"))[1]
    mb, calls = scale(svg, "y"), len(engine.program.calls)

    def lives(v):
        first, last = (min(max(i, 0), calls - 1) for i in plan.lifetimes[v])
        return f"calls {first} to {last}"

    pooled = {(v.name, lives(v)): v for v in plan.offsets if v.group not in persistent and v.nbytes}
    start, drawn = min(plan.offsets[v] for v in pooled.values()), Counter()
    for r in svg.all("rect", class_="value"):
        key = r.text.partition(" [")[0], r.text.splitlines()[2].partition(":")[0]
        v = pooled[key]
        drawn[key] += 1
        top, height = float(r.attrs["y"]), float(r.attrs["height"])
        low, high = (plan.offsets[v] - start) / 1e6, (plan.offsets[v] - start + v.nbytes) / 1e6
        tolerance = plan.pool_bytes / 1e6 / 1000
        assert mb(top) == pytest.approx(high, abs=tolerance)
        assert height == 0.4 or mb(top + height) == pytest.approx(low, abs=tolerance)
        first, last = (int(n) for n in key[1].split()[1::2])
        assert float(r.attrs["width"]) == pytest.approx((last + 1 - first) / calls * 996, rel=1e-3)
    assert drawn == Counter(list(pooled))


def test_the_losses_are_drawn_and_a_line_breaks_where_one_is_not_finite(tree):
    section = tree.one("section", id="loss")
    svg = section.one("svg")
    x, y = scale(svg, "x"), scale(svg, "y")

    def points(line):
        return [tuple(map(float, p.split(","))) for p in line.attrs["points"].split()]

    train, val = (next(svg.all("polyline", class_=f"line{i}")) for i in (0, 1))
    assert [(x(a), y(b)) for a, b in points(train)] == [pytest.approx(p, abs=0.01) for p in ((1, 5.5), (2, 5.0))]
    assert [(x(a), y(b)) for a, b in points(val)] == [pytest.approx(p, abs=0.01) for p in ((0, 5.6), (5, 4.25))]
    alone = svg.one("circle", class_="line0")
    assert (x(alone.attrs["cx"]), y(alone.attrs["cy"])) == pytest.approx((5, 4.0), abs=0.01)
    assert "training loss is not finite at step 3, 4." in section.text
    assert "No step has a finite loss." in read(curves.curve({"loss": [(1, nan)]}, "loss")).text


# The files


def test_train_and_profile_write_reports(here, monkeypatch, capsys):
    monkeypatch.setattr(machine, "roofs", lambda n, say: replace(ROOFS, threads=n))
    Path("text.txt").write_text(SQUARES)
    small = ["--model=gpt2-tiny", "--data", "text.txt", "-B", "2", "-T", "16", "--variant=vanilla", "--steps", "3"]
    profile, tree = ran(capsys, "profile", *small, "--html", "p.html"), read(Path("p.html").read_text())
    cells = [td.attrs["data-value"] for td in tree.one("table", id="ops-table").all("td", class_="number")]
    assert repr(profile["ops"][0]["ms"]) in cells
    assert "loss" not in [s.attrs["id"] for s in tree.all("section")]
    with monkeypatch.context() as full:
        full.setattr(html, "write_report", Mock(side_effect=UserError("cannot write 'p.html': No space left")))
        assert cli.main(["profile", *small, "--html", "p.html"]) == 2
    assert "tokens/s" in capsys.readouterr().out  # what was measured is not lost with the page
    assert cli.main(["train", *small, "--html", "t.html", "--val-every", "2"]) == 0
    (folder,) = Path("runs").glob("*-train")
    assert cli.main(["runs", "show", folder.name, "--html", "again.html"]) == 0
    tree, again = (read(Path(name).read_text()) for name in ("t.html", "again.html"))
    assert [s.attrs["id"] for s in tree.all("section")] == list(SECTIONS)
    assert [s.attrs["id"] for s in again.all("section")] == [s for s in SECTIONS if s not in ("timeline", "arena")]
    section = tree.one("section", id="loss")
    assert again.one("section", id="loss").text == section.text
    losses = [strict(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    asked = [c.text for c in section.all("circle", class_="ask")]
    assert asked[:3] == [f"step {i + 1}\ntraining loss {loss:.4g}" for i, loss in enumerate(losses)]
    assert [a.splitlines()[0] for a in asked[3:]] == ["step 0", "step 2", "step 3"]


# In a browser


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="needs pip install -e '.[browser]'")
    if not BROWSER:
        pytest.skip("needs Chromium")
    with api.sync_playwright() as p:
        args = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses its sandbox to root
        yield p.chromium.launch(executable_path=BROWSER, args=args)


@pytest.fixture
def opened(browser, tmp_path):
    """Open pages; at the end, none may have asked for anything or complained."""
    seen, contexts = [], []

    def show(page, scheme="light", width=1200):
        path = tmp_path / "report.html"
        path.write_text(page)
        context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda m: seen.append(m.text))
        tab.on("pageerror", lambda e: seen.append(str(e)))
        tab.on("dialog", lambda d: seen.append(d.message))
        tab.on("request", lambda r: seen.append(r.url) if r.url not in (path.as_uri(), "data:,") else None)
        tab.goto(path.as_uri())
        return tab

    yield SimpleNamespace(show=show, seen=seen)
    for context in contexts:
        context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_it_and_asks_for_nothing(opened, page, scheme):
    tab = opened.show(page, scheme)
    assert tab.locator("svg").count() >= 5
    assert all(tab.locator("svg").nth(i).bounding_box()["height"] > 15 for i in range(tab.locator("svg").count()))
    colours = tab.evaluate("[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]")
    assert [sum(map(int, re.findall(r"\d+", c)[:3])) < 384 for c in colours] == [scheme == "dark", scheme != "dark"]
    tab.click("#theme")
    assert tab.evaluate("document.documentElement.dataset.theme") == ("light" if scheme == "dark" else "dark")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") != colours[0]
    assert opened.seen == []


def test_tables_sort_and_filter(opened, page, profile):
    tab = opened.show(page)

    def column(n):
        return tab.locator(f"#ops-table tbody tr:visible td:nth-child({n})").all_inner_texts()

    by_ms = [op_ids(r.op, r.kernels) for r in sorted(profile.ops, key=lambda r: -r.ms)]
    tab.click("#ops-table th:nth-child(3) button")
    assert column(1) == by_ms
    tab.click("#ops-table th:nth-child(3) button")
    assert column(1) == by_ms[::-1]
    tab.click("#ops-table th:nth-child(1) button")
    assert column(1) == sorted(column(1), key=str.lower)
    tab.click("#ops-table th:nth-child(8) button")
    assert column(1)[-1] == "(unaccounted)", "what has no value comes last"
    tab.fill("input[data-filter=ops-table]", "matmul backward_input")
    assert column(1) == ["matmul_backward_input"]
    tab.hover("#matrix td[data-tip] >> nth=0")
    assert " % of the step" in tab.inner_text("#tip")
    assert opened.seen == []


SIDEWAYS = """[...document.querySelectorAll(".scroll, .picture")]
  .filter(e => e.scrollWidth > e.clientWidth).map(e => e.closest("section").id)"""


def test_a_desk_scrolls_nothing_sideways_and_a_phone_says_that_wide_pictures_do(opened, profile, page):
    """The desk with the long names of a Llama too, on 1,400 pixels."""
    long = {"layer": "model.layers.10.post_attention_layernorm", "op": "residual_rmsnorm_forward"}
    rows = [replace(r, **long, ms=1234.5, of_roof=50.0, roof="memory", imbalance=1.25) for r in profile.layers[:2]]
    wide = html.report(replace(profile, layers=[*profile.layers, *rows]))
    assert opened.show(page, width=1400).evaluate(SIDEWAYS) == []
    assert "layers" not in opened.show(wide, width=1400).evaluate(SIDEWAYS)
    assert "layers" in opened.show(wide, width=800).evaluate(SIDEWAYS)
    tab, hint = opened.show(page, width=390), "el => getComputedStyle(el, '::before').content"
    assert "scroll sideways" in tab.locator("#roofline .picture").evaluate(hint)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390, "only pictures and tables scroll"


def test_a_browser_shows_hostile_names_as_text_and_stops_what_is_planted(opened, page, attacked):
    tab = opened.show(html.report(*attacked, LOSSES))
    assert SHOWN in tab.text_content("h1")
    assert (tab.locator("script").count(), tab.locator("img").count()) == (1, 0)
    assert tab.evaluate("window.hit") is None
    tab.hover("#matrix td[data-tip] >> nth=0")
    assert SHOWN in tab.locator("#tip").text_content()
    tab.click("#layers-table th:nth-child(1) button")
    assert opened.seen == []
    for before, planted in PLANTED[:1] + PLANTED[3:4]:
        tab = opened.show(page.replace(before, planted + before, 1))
        assert tab.evaluate("window.hit") is None
        assert opened.seen, planted
        opened.seen.clear()

"""A profile as one HTML file that needs nothing else: no network, no other file. It follows light and dark.

The data stand in the page as JSON, and the script writes every word of them as text, never as markup, so that a name
such as ``<script>`` is shown and not run. A policy in the page forbids every request.
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..record import finite

if TYPE_CHECKING:
    from ..arena import Plan
    from ..profile import Profile
    from ..program import Program

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"

STYLE = """
:root { color-scheme: light dark; --ink: light-dark(#1b1f24, #e6e8eb); --paper: light-dark(#fff, #15181c);
  --faint: light-dark(#d9dde2, #3a4048); --roof: light-dark(#b3261e, #ff8a80); --point: light-dark(#1a5fb4, #78aeed); }
body { font: 14px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2em auto;
  max-width: 1100px; padding: 0 1em; }
h1 { font-size: 1.3em } h2 { font-size: 1.1em; margin-top: 2em } p.doubt { color: var(--roof) }
table { border-collapse: collapse; font-variant-numeric: tabular-nums } .wide { overflow-x: auto }
th { cursor: pointer; border-bottom: 1px solid var(--faint); position: sticky; top: 0; background: var(--paper) }
td, th { padding: 2px 8px; text-align: right; white-space: nowrap } td:first-child, th:first-child { text-align: left }
svg { width: 100%; height: auto; display: block } svg text { fill: var(--ink); font-size: 11px }
.axis { stroke: var(--faint) } .roof { stroke: var(--roof); fill: none; stroke-width: 1.5 }
.point { fill: var(--point) } .curve { stroke: var(--point); fill: none; stroke-width: 1.5 }
"""

SCRIPT = """
'use strict';
const data = JSON.parse(document.getElementById('data').textContent);
const NS = 'http://www.w3.org/2000/svg';
const hue = i => `light-dark(hsl(${(i * 137.5) % 360} 55% 55%), hsl(${(i * 137.5) % 360} 45% 50%))`;
function add(parent, tag, text, attributes) {
  const svg = parent.namespaceURI === NS || tag === 'svg';
  const e = svg ? document.createElementNS(NS, tag) : document.createElement(tag);
  if (text !== undefined && text !== null) e.textContent = text;
  for (const [k, v] of Object.entries(attributes || {})) e.setAttribute(k, v);
  return parent.appendChild(e);
}
function section(title) { add(document.body, 'h2', title); return add(document.body, 'div', null, {class: 'wide'}); }
function number(x, digits) { return x === null || x === undefined ? '' : x.toLocaleString('en', {
  minimumFractionDigits: digits, maximumFractionDigits: digits }); }
function table(parent, columns, rows) {
  const t = add(parent, 'table'), head = add(add(t, 'thead'), 'tr'), body = add(t, 'tbody');
  let last = -1, down = true;
  const fill = list => { body.replaceChildren(); for (const r of list) { const tr = add(body, 'tr');
    columns.forEach(c => add(tr, 'td', c.digits === undefined ? r[c.key] : number(r[c.key], c.digits))); } };
  columns.forEach((c, i) => add(head, 'th', c.name, {title: 'sort'}).addEventListener('click', () => {
    down = last === i ? !down : true; last = i;
    fill([...rows].sort((a, b) => { const x = a[c.key] ?? '', y = b[c.key] ?? '';
      return (x < y ? 1 : x > y ? -1 : 0) * (down ? 1 : -1); })); }));
  fill(rows);
}
function frame(parent, w, h) { return add(parent, 'svg', null, {viewBox: `0 0 ${w} ${h}`, role: 'img'}); }
function rect(svg, x, y, w, h, fill, title) {
  const r = add(svg, 'rect', null, {x, y, width: Math.max(w, 0.15), height: h}); r.style.fill = fill;
  if (title) add(r, 'title', title); return r;
}
const colour = {}; const ofOp = op => colour[op] ??= hue(Object.keys(colour).length);

function timeline(parent) {
  const calls = data.timeline, layers = [...new Set(calls.map(c => c.block))], end = Math.max(...calls.map(c => c.end));
  const svg = frame(parent, 1060, 20 * layers.length + 30), x = t => 120 + 930 * t / end;
  layers.forEach((l, i) => add(svg, 'text', l, {x: 0, y: 20 * i + 14}));
  for (const c of calls) rect(svg, x(c.start), 20 * layers.indexOf(c.block) + 2, x(c.end) - x(c.start), 16, ofOp(c.op),
    `${c.layer} ${c.op} [${c.variant}], ${c.phase}: ${number((c.end - c.start), 3)} ms`);
  for (const p of data.phases) { const h = 20 * layers.length;
    add(svg, 'line', null, {class: 'axis', x1: x(p.start), x2: x(p.start), y1: 0, y2: h});
    if (x(p.end) - x(p.start) > 40) add(svg, 'text', p.name, {x: x(p.start) + 3, y: h + 14}); }
  add(svg, 'text', number(end, 1) + ' ms', {x: 1055, y: 20 * layers.length + 28, 'text-anchor': 'end'});
}
function matrix(parent) {
  const layers = [...new Set(data.layers.map(r => r.layer))], ops = [...new Set(data.layers.map(r => r.op))];
  const most = Math.max(...data.layers.map(r => r.ms)), t = add(parent, 'table'), head = add(t, 'tr');
  add(head, 'th', ''); ops.forEach(o => add(head, 'th', o));
  for (const l of layers) { const tr = add(t, 'tr'); add(tr, 'td', l);
    for (const o of ops) { const rows = data.layers.filter(r => r.layer === l && r.op === o);
      const ms = rows.reduce((s, r) => s + r.ms, 0), td = add(tr, 'td', ms ? number(ms, 3) : '');
      if (ms) { td.style.background = `hsl(25 90% 50% / ${0.08 + 0.8 * Math.sqrt(ms / most)})`;
        const roof = r => r.of_roof ? `, ${number(r.of_roof, 0)} % of ${r.roof}` : '';
        td.title = rows.map(r => r.variant + roof(r)).join('; '); } } }
}
function roofline(parent) {
  const r = data.roofs, rows = data.ops.filter(o => o.flops && o.gflops && o.intensity);
  const bands = Object.entries(r.gbs).map(([name, kinds]) => [name, Math.max(...Object.values(kinds))]);
  const xs = [...rows.map(o => o.intensity), ...bands.map(b => r.gflops / b[1])];
  const ys = [...rows.map(o => o.gflops), r.gflops];
  const span = v => [Math.log10(Math.min(...v)) - 0.3, Math.log10(Math.max(...v)) + 0.3];
  const [x0, x1] = span(xs), [y0, y1] = span(ys), W = 1060, H = 460;
  const X = v => 60 + (W - 200) * (Math.log10(v) - x0) / (x1 - x0);
  const Y = v => H - 40 - (H - 60) * (Math.log10(v) - y0) / (y1 - y0);
  const svg = frame(parent, W, H);
  for (let e = Math.ceil(x0); e <= x1; e++) {
    add(svg, 'line', null, {class: 'axis', x1: X(10 ** e), x2: X(10 ** e), y1: 20, y2: H - 40});
    add(svg, 'text', 10 ** e, {x: X(10 ** e), y: H - 26, 'text-anchor': 'middle'}); }
  for (let e = Math.ceil(y0); e <= y1; e++) {
    add(svg, 'line', null, {class: 'axis', x1: 60, x2: W - 140, y1: Y(10 ** e), y2: Y(10 ** e)});
    add(svg, 'text', 10 ** e, {x: 55, y: Y(10 ** e) + 4, 'text-anchor': 'end'}); }
  add(svg, 'text', 'FLOP/byte', {x: W / 2, y: H - 8}); add(svg, 'text', 'GFLOP/s', {x: 4, y: 14});
  const right = 10 ** x1, left = 10 ** x0, bottom = 10 ** y0;
  for (const [name, gbs] of bands) { const from = Math.max(left, bottom / gbs), knee = r.gflops / gbs;
    add(svg, 'path', null, {class: 'roof', d: `M${X(from)} ${Y(from * gbs)}L${X(knee)} ${Y(r.gflops)}`});
    add(svg, 'text', `${name} ${number(gbs, 0)} GB/s`, {x: X(from) + 4, y: Y(from * gbs) - 4}); }
  const first = Math.min(...bands.map(b => r.gflops / b[1]));
  add(svg, 'path', null, {class: 'roof', d: `M${X(first)} ${Y(r.gflops)}L${X(right)} ${Y(r.gflops)}`});
  add(svg, 'text', `FMA ${number(r.gflops, 0)} GFLOP/s`, {x: W - 136, y: Y(r.gflops) + 4});
  for (const o of rows) {
    const c = add(svg, 'circle', null, {class: 'point', cx: X(o.intensity), cy: Y(o.gflops), r: 4});
    add(c, 'title', `${o.op}: ${number(o.gflops, 1)} GFLOP/s, ${number(o.of_roof, 0)} % of ${o.roof}`);
    add(svg, 'text', o.op, {x: X(o.intensity) + 6, y: Y(o.gflops) + 4}); }
}
function arena(parent) {
  const a = data.arena, W = 1060, H = 360, svg = frame(parent, W, H + 20);
  const groups = [...new Set(a.values.map(v => v.group))];
  for (const v of a.values) rect(svg, 40 + 1000 * v.first / a.calls, H - H * (v.offset + v.bytes) / a.total,
    1000 * (v.last - v.first + 1) / a.calls, Math.max(H * v.bytes / a.total, 0.3), hue(groups.indexOf(v.group)),
    `${v.name} (${v.group}): ${number(v.bytes / 1e6, 3)} MB, calls ${v.first} to ${v.last}`);
  groups.forEach((g, i) => { rect(svg, 40 + 130 * i, H + 6, 10, 10, hue(i));
    add(svg, 'text', g, {x: 54 + 130 * i, y: H + 15}); });
}
function curve(parent) {
  const l = data.losses, W = 1060, H = 260, svg = frame(parent, W, H), lo = Math.min(...l), hi = Math.max(...l);
  const X = i => 50 + 1000 * i / Math.max(1, l.length - 1), Y = v => 10 + (H - 40) * (hi - v) / (hi - lo || 1);
  add(svg, 'path', null, {class: 'curve', d: l.map((v, i) => `${i ? 'L' : 'M'}${X(i)} ${Y(v)}`).join('')});
  add(svg, 'text', number(hi, 3), {x: 0, y: 16}); add(svg, 'text', number(lo, 3), {x: 0, y: H - 28});
  add(svg, 'text', `${l.length} steps`, {x: 1050, y: H - 6, 'text-anchor': 'end'});
}
add(document.body, 'h1', data.title);
add(document.body, 'p', data.words);
for (const d of data.doubts) add(document.body, 'p', 'doubt: ' + d, {class: 'doubt'});
if (data.timeline.length) timeline(section('One step, by layer'));
const figures = [{key: 'ms', name: 'ms', digits: 3}, {key: 'share', name: 'share %', digits: 1},
  {key: 'gflops', name: 'GFLOP/s', digits: 1}, {key: 'gbs', name: 'GB/s', digits: 1},
  {key: 'intensity', name: 'FLOP/byte', digits: 2}, {key: 'of_roof', name: '% of roof', digits: 0},
  {key: 'roof', name: 'roof'},
  {key: 'imbalance', name: 'slowest thread', digits: 2}];
table(section('By op'), [{key: 'op', name: 'op'}, {key: 'calls', name: 'calls'}, ...figures], data.ops);
if (data.roofs) roofline(section('Under the roof'));
matrix(section('Time by layer and op, ms'));
if (data.arena) arena(section('Where values lie in the arena, over the calls of a step'));
if (data.losses.length > 1) curve(section('Loss'));
table(section('By layer'), [{key: 'layer', name: 'layer'}, {key: 'op', name: 'op'}, {key: 'variant', name: 'variant'},
  {key: 'phase', name: 'phase'}, {key: 'calls', name: 'calls'}, ...figures], data.layers);
document.documentElement.dataset.done = 'yes';
"""


def page(data: Mapping[str, Any]) -> str:
    """Write the page."""
    text = json.dumps(finite(data)).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(str(data['title']))}</title><style>{STYLE}</style></head><body>"
        f'<script type="application/json" id="data">{text}</script><script>{SCRIPT}</script></body></html>\n'
    )


def profile_data(
    p: Profile, program: Program | None = None, plan: Plan | None = None, losses: Sequence[float] = ()
) -> dict[str, Any]:
    """Gather what the page of a profile shows.

    Parameters
    ----------
    program, plan : for the map of the arena.
    losses : of the steps of a training run.
    """
    plain = p.to_json()
    swaps = "".join(f" + {s}" for s in p.swaps)
    data = {k: plain[k] for k in ("ops", "layers", "roofs", "doubts", "words")}
    data |= {"title": f"{p.model}, {p.B}x{p.T}, {p.threads} threads, {p.variant}{swaps}", "losses": list(losses)}
    data |= {"timeline": [], "phases": [], "arena": None}
    if p.raw:
        step = sorted(p.raw, key=lambda s: s.end - s.start)[len(p.raw) // 2]
        for calls, marks in step.runs:
            at = ((marks - step.start) / 1e6).tolist()
            if calls:
                data["phases"].append({"name": calls[0].call.phase, "start": at[0], "end": at[-1]})
            for b, start, end in zip(calls, at[:-1], at[1:], strict=True):
                words = b.call.layer.split(".")
                block = ".".join(words[:2]) if len(words) > 1 and words[1].isdigit() else words[0]
                named = {"layer": b.call.layer, "block": block, "op": b.call.op.name, "variant": b.kernel.variant}
                data["timeline"].append({**named, "phase": b.call.phase, "start": start, "end": end})
    if plan and program:
        last_call = len(program.calls) - 1
        values = [
            {"name": v.name, "group": v.group, "offset": o, "bytes": v.nbytes, "first": max(first, 0), "last": last}
            for v, o in plan.offsets.items()
            for first, last in [(plan.lifetimes[v][0], min(plan.lifetimes[v][1], last_call))]
        ]
        data["arena"] = {"total": plan.total_bytes, "calls": len(program.calls), "values": values}
    return data


def write(path: Path, data: Mapping[str, Any]) -> None:
    """Write the page to a file, whole or not at all.

    Raises
    ------
    UserError
        Where it cannot be written.
    """
    part = path.parent / f".{path.name}.{os.getpid()}.part"
    try:
        part.write_text(page(data), encoding="utf-8")
        part.replace(path)
    except OSError as e:
        with suppress(OSError):
            part.unlink()
        raise UserError(f"--html {path}: cannot be written ({e.strerror}); name a file in a folder that exists") from e

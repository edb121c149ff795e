"""Draw README's chart, tokens/s of one training step, from `benchmarks/records/MACHINE/front.json`.

    python docs/chart.py

``speed-light.svg`` and ``speed-dark.svg`` are one picture in the colours of either theme. README's text alternative and
caption come from the same record.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "records"
MACHINE, PROCESSOR = "zen4", "Zen 4"
"""The machine of the chart: the folder of its records, and its processor in words."""
MODES = {
    "torch-eager": "eager, float32",
    "torch-compile": "torch.compile, float32",
    "torch-amp": "autocast bf16",
    "torch-amp-compile": "torch.compile, autocast bf16",
    "torch-bf16": "eager, bf16",
}
"""What the peers of `cpuopt bench` are called in PyTorch."""
MODES |= {f"{name}-tuned": f"{words}, tuned" for name, words in MODES.items()}
THEMES = {
    "light": {"text": "#1f2328", "others": "#8c959f", "cpuopt": "#0969da"},
    "dark": {"text": "#e6edf3", "others": "#6e7681", "cpuopt": "#4493f8"},
}
WIDTH, ROW, BAR, NUMBER = 520, 44, 15, 150
MARKED = re.compile(r"(<!-- chart -->\n).*?(<!-- /chart -->)", re.DOTALL)
Record = Mapping[str, Any]


def bars(record: Record) -> dict[str, float]:
    """Return tokens/s of each program that the record has, from the median of its steps.

    PyTorch's fastest mode is that of all types. cpuopt's times are those that alternated with PyTorch's fastest mode of
    the same type.
    """
    ran = [r for r in record["results"] if r["ratio"] and r["peer"] in MODES]
    tokens = ran[0]["B"] * ran[0]["T"]

    def speed(r: Record, side: str) -> float:
        return 1e3 * tokens / float(r["step_ms"][side]["median"])

    def fastest(results: list[Record]) -> Record:
        return max(results, key=lambda r: speed(r, "peer"))

    found = {}
    if llmc := record.get("llmc"):
        found["llm.c, C with OpenMP, float32"] = 1e3 * tokens / float(llmc["step_ms"]["median"])
    for r in ran:
        if r["peer"] == "torch-eager":
            found["PyTorch eager, float32"] = speed(r, "peer")
    best = fastest(ran)
    if best["peer"] != "torch-eager":
        found[f"PyTorch's fastest mode: {MODES[best['peer']]}"] = speed(best, "peer")
    for dtype in ("float32", "bf16"):
        if same := [r for r in ran if r["dtype"] == r["peer_dtype"] == dtype]:
            found[f"cpuopt, {dtype}"] = speed(fastest(same), "cpuopt")
    return found


def draw(values: Mapping[str, float], theme: Mapping[str, str]) -> str:
    """Return the picture as SVG: a line of text above each bar, so that it stays readable when it is narrow."""
    longest = max(values.values())
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {ROW * len(values) + 4}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="15" fill="{theme["text"]}">',
        f"<title>{escape(in_words(values))}</title>",
    ]
    for i, (name, value) in enumerate(values.items()):
        ours = name.startswith("cpuopt")
        y, length = ROW * i + 16, (WIDTH - 2) * value / longest
        weight = ' font-weight="bold"' if ours else ""
        lines += [
            f'<text x="1" y="{y}"{weight}>{escape(name)}</text>',
            f'<text x="{WIDTH - 1}" y="{y}" text-anchor="end"{weight}>{value:,.0f} tokens/s</text>',
            f'<rect x="1" y="{y + 6}" width="{length:.1f}" height="{BAR}" rx="2" '
            f'fill="{theme["cpuopt" if ours else "others"]}"/>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def in_words(values: Mapping[str, float]) -> str:
    """Return the text alternative."""
    return "Tokens/s of training: " + "; ".join(f"{name}: {value:,.0f}" for name, value in values.items()) + "."


def block(record: Record) -> str:
    """Return README's lines: the picture in both themes, and its caption."""
    r, where = record["results"][0], f"{record['threads']} cores of {PROCESSOR}"
    return f"""<picture>
  <source media="(prefers-color-scheme: dark)" srcset="docs/speed-dark.svg">
  <img src="docs/speed-light.svg" width="{WIDTH}" alt="{escape(in_words(bars(record)))}">
</picture>

Training steps of GPT-2 124M, {r["B"]} rows of {r["T"]} tokens, {where}, {record["time"][:10]}.
Tuned: with [MKL's AVX-512 code and an allocator that keeps memory](docs/results/README.md#pytorch-tuned).
The record is `benchmarks/records/{MACHINE}/front.json`; [all results](docs/results/README.md) are on one page.
"""


def pictures(records: Path = RECORDS, docs: Path = ROOT / "docs") -> dict[Path, str]:
    """Return the pictures and README as the record has them, by file.

    Raises
    ------
    SystemExit
        If the record is missing.
    """
    file = records / MACHINE / "front.json"
    if not file.is_file():
        raise SystemExit(f"chart: there is no {file}; measure it: make results ARGS='--only front'")
    record = json.loads(file.read_text())
    made = {docs / f"speed-{name}.svg": draw(bars(record), theme) for name, theme in THEMES.items()}
    readme = docs.parent / "README.md"
    return made | {readme: MARKED.sub(lambda m: f"{m[1]}{block(record)}{m[2]}", readme.read_text())}


if __name__ == "__main__":
    for path, text in pictures().items():
        path.write_text(text)
        sys.stdout.write(f"{path.name}\n")

"""A profile as tables: by kind of op, by layer, and the lines around them. They fit a terminal of 80 columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from ..check.result import MARGINAL, RIGHT, was_left_out, was_right
from ..measure import roofline
from ..measure.profile import op_ids
from ..measure.quartile import apart
from ..ops import COLLECTIVES
from ..ops.storage import TYPES, WIDE
from ..program.program import PARTS, block_of
from ..train.quantization import words as int8_words
from ..wording import count
from . import lines, style

if TYPE_CHECKING:
    from ..measure.profile import Figures, LayerRow, OpRow, Profile

"""The part of a layer's path that names its block: ``h.3`` of ``h.3.mlp.c_fc``."""


@dataclass(frozen=True)
class Bar:
    """A bar of at most `width` cells; in ``#`` if the output has no block characters."""

    part: float
    width: int = 8

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        part = min(max(self.part, 0.0), 1.0)
        if options.ascii_only:
            text = "#" * round(part * self.width)
        else:
            whole, eighths = divmod(ceil(part * self.width * 8 - 0.5), 8)
            text = "█" * whole + (" ▏▎▍▌▋▊▉"[eighths] if eighths else "")
        yield Segment(text)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(self.width, self.width)


def profile_tables(profile: Profile, *, detail: bool = False) -> list[RenderableType]:
    """Show a profile: a line on the run, the tables, a line on the whole.

    No figure is shown where a kernel of the run did not pass its check in the same run.

    Parameters
    ----------
    detail : a row for each op and variant of each layer, in place of one a layer.
    """
    refused = failed_kernels(profile)
    if refused:
        why = f"no figures, because these kernels did not pass their check in this run: {', '.join(refused)}"
        return [header(profile), Text(why, "red")]
    profile = by_id(profile)
    by_layer = detail_table(profile) if detail else layer_table(profile)
    roofs: list[RenderableType] = ["", roof_table(profile)] if profile.roofs else []
    unlike = [] if detail else [Text(line) for line in other_variants(profile)]
    tables = ["", op_table(profile), *roofs, "", by_layer, *unlike]
    return [header(profile), *tables, *lines.tables(profile.lines), "", closing(profile), *in_words(profile)]


def in_words(profile: Profile) -> list[RenderableType]:
    """Describe where the time goes, if roofs are known, and list the warnings."""
    lines: list[RenderableType] = ["", Text(profile.words)] if profile.roofs else []
    return [*lines, *style.warnings(profile.doubts)]


def used_kernels(profile: Profile) -> list[str]:
    """List the kernels that ran, each once."""
    return list(dict.fromkeys(k for row in profile.ops for k in row.kernels))


def failed_kernels(profile: Profile) -> list[str]:
    """List the kernels that ran and whose check failed or is missing; none if nothing was checked."""
    judged = [c for c in profile.checked if not was_left_out(c)]
    bad, seen = {c["kernel"] for c in judged if not was_right(c)}, {c["kernel"] for c in judged}
    moves = {op.name for op in COLLECTIVES}  # a communicator's work, which has no kernel
    used = [k for k in used_kernels(profile) if k.partition("[")[0] not in moves]
    return [k for k in used if k in bad or (profile.checked and k not in seen)]


def by_id(profile: Profile) -> Profile:
    """Return the profile with the ids that flags take in place of labels."""
    return replace(profile, ops=[replace(r, op=op_ids(r.op, r.kernels)) for r in profile.ops])


def header(profile: Profile) -> Text:
    """Make the lines on the run: model, sizes, kernels."""
    p = profile
    swaps = "".join(f" + {s}" for s in p.swaps)
    warmup = f" after {p.warmup} of warm-up" if p.warmup else ""
    ranks = f" · {p.ranks} ranks" if p.ranks > 1 else ""
    return Text.assemble(
        (p.model, "bold"),
        f" · B {p.B} · T {p.T}{ranks} · {count(p.threads, 'thread')} ({p.threading_layer})",
        f" · {p.variant}{swaps} · {count(p.steps, 'step')}{warmup}",
    )


def op_table(profile: Profile) -> Table:
    """Make a table with one row a kind of op, in the order of a step."""
    typed = ["types"] if any(r.types not in ([], [WIDE]) for r in profile.ops) else []
    table = style.table("op", *typed, ">calls", ">ms", ">share", "", ">GFLOP/s", ">GB/s")
    digits, most = digits_of(profile), max(r.share for r in profile.ops)
    for r in profile.ops:
        table.add_row(
            r.op,
            *[types_of(r)] * len(typed),
            str(r.calls or ""),
            f"{r.ms:,.{digits}f}",
            f"{r.share:.1f}%",
            Bar(r.share / most),
            *_rates(profile, r.gflops, r.gbs),
            style=None if r.kernels else "dim",
        )
    name, *total = _total(profile, profile.ops, digits)
    table.add_row(name, *[""] * len(typed), *total, style="bold")
    if by_data := [f"{r.op} {r.of_work:.0f} %" for r in profile.ops if r.of_work is not None and r.of_work < 99.5]:
        table.caption = f"FLOPs that the data asked for, of the most that they can be: {', '.join(by_data)}"
    return table


def types_of(row: Figures) -> str:
    """Return the types of a row's arrays of floating-point numbers in a few letters, as in ``bf16, f32``."""
    return ", ".join(TYPES[name].short if name in TYPES else name for name in row.types)


def roof_table(profile: Profile) -> Table:
    """Make a table with one row a kind of op: its share of the roof that binds, and the ms above that bound."""
    even = [">imbalance"] if any(r.imbalance for r in profile.ops) else []  # an engine's own threads are not watched
    table = style.table("op", ">FLOP/byte", ">of roof", "roof", ">ms above", *even)
    digits = digits_of(profile)
    for r in profile.ops:
        if r.kernels:
            over = r.of_roof is not None and not roofline.fits(r.of_roof)
            table.add_row(
                r.op,
                f"{r.intensity:.1f}",
                roofline.share(r.of_roof),
                r.roof,
                "" if over else f"{r.ms * (1 - (r.of_roof or 0) / 100):,.{digits}f}",
                *[f"{r.imbalance:.2f}" if r.imbalance else ""] * len(even),
                style="yellow" if over else None,
            )
    table.caption = "ms above: the roofline bound" + "; imbalance: slowest thread / mean" * len(even)
    return table


def layer_table(profile: Profile) -> Table:
    """Make a table with one row a layer; the layers inside a block are summed."""
    table = style.table("layer", ">forward ms", ">backward ms", ">update ms", ">total ms", ">share", "", gap=1)
    digits = digits_of(profile)
    sums: dict[str, list[float]] = {}
    columns = list(dict.fromkeys(PARTS.values()))
    for r in profile.layers:
        sums.setdefault(block_of(r.layer), [0.0, 0.0, 0.0])[columns.index(PARTS[r.phase])] += r.ms
    rows = [(name, parts, sum(parts)) for name, parts in sums.items()]
    most = max(total for *_, total in rows)
    step_ms = profile.quiet_ms
    for name, parts, total in rows:
        cells = [f"{ms:,.{digits}f}" if ms else "" for ms in (*parts, total)]
        table.add_row(name, *cells, f"{100 * total / step_ms:.1f}%", Bar(total / most))
    sums_of = [sum(parts[i] for _, parts, _ in rows) for i in range(3)]
    cells = [f"{ms:,.{digits}f}" for ms in (*sums_of, sum(sums_of))]
    table.add_row("all layers", *cells, f"{100 * sum(sums_of) / step_ms:.1f}%", style="bold")
    table.caption = "update: the gradient's norm and the optimizer"
    return table


def usual_variant(rows: Sequence[LayerRow], variant: str) -> str:
    """Return the variant that an op's layers are expected to have: the run's, or else the most common one.

    Parameters
    ----------
    rows : the rows of one op.
    """
    ran = Counter(r.variant for r in rows)
    return variant if variant in ran else ran.most_common(1)[0][0]


def other_variants(profile: Profile) -> list[str]:
    """List where a variant ran other than in the rest of its op, a line for each op and variant."""
    ops: dict[str, list[LayerRow]] = {}
    for r in profile.layers:
        ops.setdefault(r.op, []).append(r)
    unlike: dict[str, list[LayerRow]] = {}
    for op, rows in ops.items():
        for r in rows:
            if r.variant != usual_variant(rows, profile.variant):
                unlike.setdefault(f"{op}[{r.variant}]", []).append(r)
    digits = digits_of(profile)
    return [
        f"{name} in {rows[0].layer if len(rows) == 1 else f'{len(rows)} layers'}: "
        f"{sum(r.ms for r in rows):,.{digits}f} ms"
        for name, rows in unlike.items()
    ]


def detail_table(profile: Profile) -> Table:
    """Make a table with one row a layer, op and variant, which is shown if it is not the run's."""
    last = "of roof" if profile.roofs else "share"
    table = style.table("layer", "op", ">calls", ">ms", ">GFLOP/s", ">GB/s", f">{last}", gap=1)
    digits = digits_of(profile)
    for r in profile.layers:
        share = f"{roofline.share(r.of_roof)} {r.roof.replace('memory', 'mem')}" if profile.roofs else f"{r.share:.1f}%"
        rates = _rates(profile, r.gflops, r.gbs)
        op = r.op if r.variant == profile.variant else f"{r.op}[{r.variant}]"
        table.add_row(r.layer, Text(op), str(r.calls), f"{r.ms:,.{digits}f}", *rates, share)
    return table


def closing(profile: Profile) -> Text:
    """Describe the whole step: its speed, its memory, the cost of profiling."""
    p, ms = profile, profile.step_ms
    digits = digits_of(profile)
    quiet, mean, low, high = (f"{x:,.{digits}f}" for x in (p.quiet_ms, ms["mean"], ms["min"], ms["max"]))
    also = f"mean {mean}, " if apart(p.quiet_ms, ms["mean"]) else ""
    line = Text.assemble(
        (f"{p.tokens_per_s:,.0f} tokens/s", "bold"),
        f" · step {quiet} ms, {estimator(p)} of {p.steps} ({also}{low} to {high})\n",
        f"peak memory {p.peak_rss_mb:,.0f} MB, planned {p.planned_peak_mb:,.0f} MB",
        f" · profiling costs {p.profiler_overhead_ms:.3f} ms a step"
        f" ({100 * p.profiler_overhead_ms / p.quiet_ms:.2g}%)\n",
    )
    if p.int8:
        line.append(f"{int8_words(p.int8)}\n")
    return line.append_text(_checks(profile))


def estimator(profile: Profile) -> str:
    """Name the statistic of the time that is shown; records of earlier versions have another."""
    return "lower quartile" if "quiet" in profile.step_ms else "mean of the middle half"


def _checks(profile: Profile) -> Text:
    """Count the kernels that ran by their result; of several results of a kernel, the worst counts."""
    if not profile.checked:
        return Text("kernels not checked in this run", "yellow")
    worse = {c["kernel"] for c in profile.checked if c["status"].lower() == MARGINAL}
    used = used_kernels(profile)
    marginal = [k for k in used if k in worse]
    line = Text(f"checked: {count(len(used) - len(marginal), 'kernel')} {RIGHT}", "green")
    return line.append(f"\n{style.explained(marginal)}", "yellow") if marginal else line


def _total(profile: Profile, rows: Iterable[OpRow | LayerRow], digits: int) -> Sequence[str]:
    rows, ms = list(rows), profile.quiet_ms
    flops, nbytes = sum(r.flops for r in rows), sum(r.bytes for r in rows)
    calls = str(sum(r.calls for r in rows))
    return ("step", calls, f"{ms:,.{digits}f}", "100.0%", "", *_rates(profile, flops / ms / 1e6, nbytes / ms / 1e6))


def digits_of(profile: Profile) -> int:
    """Return the number of decimals with which a step in ms has about five digits."""
    return style.digits(profile.quiet_ms, 1)


def _rates(profile: Profile, gflops: float, gbs: float) -> tuple[str, str]:
    digits = 2 if max(r.gflops for r in profile.ops) < 10 else 1
    return (f"{gflops:.{digits}f}" if gflops else "", f"{gbs:.{digits}f}" if gbs else "")

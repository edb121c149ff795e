"""The display of `cpuopt bench`: progress with the time that remains, and a table for each peer, in 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.progress import Progress, TaskID, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ..isolate.process import PHASES
from ..lab.peers import PeerResult, View
from ..ops.storage import WIDE
from ..wording import count, spread
from . import style
from .console import on_stderr, put
from .style import digits as digits


class BenchView(View):
    """One live line on stderr, or a plain line for each result if stderr is no terminal."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self.bar, self.task = bar, task

    def stage(self, text: str) -> None:
        """Show the part that begins."""
        self.bar.update(self.task, description=text)

    def at(self, cost: float) -> None:
        """Move the bar."""
        self.bar.update(self.task, completed=cost)

    def left_out(self, peer: str, why: str) -> None:
        """Print which peer does not run, and why."""
        put(self.bar.console, f"{peer} is left out: {why}")

    def result(self, result: PeerResult) -> None:
        """Print a result."""
        head = f"{size_of(asdict(result))} {result.peer}"
        if result.ratio:
            times = {key: step_ms({"step_ms": result.step_ms}, key) for key in result.step_ms}
            ms = {key: f"{x:,.{digits(x)}f} ms" for key, x in times.items()}
            text = f"{head}: cpuopt {ms['cpuopt']}, {result.peer} {ms['peer']}, ratio {spread(result.ratio, 2)}"
        else:
            text = f"{head}: {result.refused}"
        put(self.bar.console, text)


@contextmanager
def progress(cost: float) -> Iterator[BenchView]:
    """Show the progress of a plan of that cost, on stderr."""
    with on_stderr("{task.description}", style.BAR, "remaining", TimeRemainingColumn()) as bar:
        yield BenchView(bar, bar.add_task("start", total=cost))


def tables(record: Mapping[str, Any]) -> list[RenderableType]:
    """Show a record: what was measured, and a table for each peer."""
    shown: list[RenderableType] = [header(record)]
    results: Sequence[Mapping[str, Any]] = record["results"]
    for peer in dict.fromkeys(r["peer"] for r in results):
        rows = [r for r in results if r["peer"] == peer]
        suite = any(r.get("model") for r in rows)
        shown += ["", suite_table(peer, rows) if suite else peer_table(peer, rows)]
        if peer in record["geometric_mean"]:
            mean = spread(record["geometric_mean"][peer], 2)
            text = f"geometric mean of {sum(1 for r in rows if r['ratio'])} ratios: {mean}"
            shown.append(Text(", ".join([text, *of_all_limits(rows)]), "bold"))
        shown += [Text(f"{size_of(r)}: {r['refused']}", "red") for r in rows if r["refused"]]
        for warning in dict.fromkeys(w for r in rows for w in r["doubts"]):
            sizes = ", ".join(size_of(r) for r in rows if warning in r["doubts"])
            shown.append(Text(f"{sizes}: {warning}", "yellow"))
    if faster := record.get("faster"):  # records of earlier versions have none
        shown += ["", fastest_table(faster)]
        for types, mean in record.get("faster_mean", {}).items():
            shown.append(Text(f"geometric mean to the fastest ({types}): {spread(mean, 2)}", "bold"))
    if any(r.get("library") for r in results):
        shown += ["", library_table(results), *(Text(line, "dim") for line in tunings(results))]
    for peer, why in record.get("left_out", {}).items():
        shown.append(Text(f"{peer} is left out: {why}", "yellow"))
    return shown


def header(record: Mapping[str, Any]) -> Text:
    """Make the lines on the model, the machine and the figures."""
    swaps = "".join(f" + {s}" for s in record["swap"])
    cpu = record["machine"]["cpu"]
    level = min((r.get("level", 95) for r in record["results"]), default=95)  # records of earlier versions have none
    types = ", ".join(types_of(record))
    earlier = any("quiet" not in times for r in record["results"] for times in r["step_ms"].values())
    statistic = "median" if earlier else "lower quartile"
    return Text.assemble(
        (record["model"]["name"], "bold"),
        f" · {record['variant']}{swaps} · {types} · {count(record['threads'], 'thread')}",
        f" · {count(record['rounds'], 'round')} · {cpu}\n",
        f"{statistic} of whole training steps; ratio: the peer's time over cpuopt's, {level:g} % interval\n",
        "peak: the step's FLOPs over its time, in % of the peak of what cpuopt multiplies\n",
        "limit: the time of cpuopt's step if each call reached its roof; the share is that over the step",
    )


def types_of(record: Mapping[str, Any]) -> list[str]:
    """Return the types of what cpuopt's products read in a record, and of moments and weights if they are not usual."""
    earlier = record.get("dtype") or WIDE  # of records of earlier versions
    types = [*dict.fromkeys(r.get("dtype", earlier) for r in record["results"])]
    return types + [f"{record[n]} {n}" for n in ("moments", "weights") if record.get(n, WIDE) != WIDE]


def of_all_limits(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write the geometric mean of the shares of the limit, if all are known."""
    shares = [limit_share(r) for r in results if r["ratio"]]
    return [f"{100 * np.exp(np.mean(np.log(shares))):.0f} % of the limit"] if min(shares, default=0) > 0 else []


def size_of(result: Mapping[str, Any]) -> str:
    """Name the size of a result, and its model in a suite: ``gpt2-nano 12x64``."""
    return f"{result.get('model') or ''} {result['B']}x{result['T']}".lstrip()


def suite_table(peer: str, results: Sequence[Mapping[str, Any]]) -> Table:
    """Make a table with one row for each model and size."""
    table = style.table("model", ">B x T", ">cpuopt ms", f">{peer} ms", ">ratio", ">% limit", ">% peak", gap=1)
    for r in results:
        size = r.get("model", ""), f"{r['B']}x{r['T']}"
        if not r["ratio"]:
            table.add_row(*size, "", "", "refused", "", "", style="red")
            continue
        times = [step_ms(r, key) for key in ("cpuopt", "peer")]
        ratio = Text(spread(r["ratio"], 2), "bold")
        shares = " / ".join(of_peak(r, key) for key in ("cpuopt", "peer"))
        table.add_row(*size, *(f"{ms:.{digits(min(times))}f}" for ms in times), ratio, of_limit(r) or "-", shares)
    return table


def step_ms(result: Mapping[str, Any], key: str) -> float:
    """Return the time of a side's step: the lower quartile, or the median in records of earlier versions."""
    found: Mapping[str, float] = result["step_ms"][key]
    return found.get("quiet", found["median"])


def of_peak(result: Mapping[str, Any], key: str) -> str:
    """Write what a side reaches of the FMA peak, in percent; a dash for records of earlier versions."""
    shares = result.get("of_peak")
    return f"{shares[key]:.0f}" if shares else "-"


def limit_share(result: Mapping[str, Any]) -> float:
    """Return the time of a step at its roofs over that of cpuopt's; 0 if it is unknown, as in earlier records."""
    return (result.get("roof_ms") or 0.0) / step_ms(result, "cpuopt")


def of_limit(result: Mapping[str, Any]) -> str:
    """Write the share of the limit that cpuopt reaches, in percent; empty if it is unknown."""
    share = limit_share(result)
    return f"{100 * share:.0f}" if share else ""


def fastest_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Make a table of the ratios to the fastest peer of each size."""
    table = style.table("B x T", "cpuopt", "fastest peer", "of", ">ratio", gap=1)
    for r in rows:
        ratio = Text(spread(r["ratio"], 2), "bold")
        table.add_row(size_of(r), r.get("dtype", WIDE), r["peer"], ", ".join(r["of"]), ratio)
    return table


def libraries(results: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return what ran a product of each peer, with its best rate of all sizes; nothing of earlier versions' records."""
    best: dict[str, Mapping[str, Any]] = {}
    for r in results:
        if found := r.get("library"):
            before = best.setdefault(r["peer"], found)
            best[r["peer"]] = max(before, found, key=lambda x: x["linear_gflops"])
    return best


def library_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Make a table of the peers: what ran one product alone, and how fast."""
    table = style.table("peer", "torch", "vectors", ">GFLOP/s", "F.linear 256x768 -> 3072 by", gap=1)
    for peer, x in libraries(results).items():
        table.add_row(peer, x["torch"], x["capability"], f"{x['linear_gflops']:,.0f}", x["products_by"])
    return table


def tunings(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write what was done to the tuned peers, each once; nothing if there is none."""
    found = dict[str, list[str]]()
    for peer, x in libraries(results).items():
        if how := x.get("tuning"):
            found.setdefault("; ".join(f"{what}: {done}" for what, done in how.items()), []).append(peer)
    return [f"{', '.join(peers)}: {text}" for text, peers in found.items()]


def bounded(share: str) -> str:
    """Write the share of the limit, if it is known."""
    return f"{share} % of the limit" if share else ""


def peer_table(peer: str, results: Sequence[Mapping[str, Any]]) -> Table:
    """Make a table with two rows a size: cpuopt, and the peer below it."""
    table = style.table("B x T", "", ">step ms", *(f">{p}" for p in PHASES), ">% peak", ">MB", ">ratio", gap=1)
    for r in results:
        size = f"{r['B']}x{r['T']}"
        if not r["ratio"]:
            table.add_row(size, peer, *[""] * 6, "refused", style="red")
            continue
        for key, name in ("cpuopt", "cpuopt"), ("peer", peer):
            times = (step_ms(r, key), *(r["phases_ms"][key][p] for p in PHASES))
            n = digits(times[0])
            table.add_row(
                size if key == "cpuopt" else "",
                name,
                *(f"{ms:.{n}f}" for ms in times),
                of_peak(r, key),
                f"{r['peak_rss_mb'][key]:.0f}",
                Text(spread(r["ratio"], 2), "bold") if key == "cpuopt" else bounded(of_limit(r)),
            )
    return table

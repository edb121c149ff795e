"""The tables of `cpuopt machine`: roofs by number of threads, and the noise now, in 80 columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from ..wording import count
from . import style


def tables(content: Mapping[str, Any]) -> list[RenderableType]:
    """Show the roofs and the noise of a machine."""
    m, roofs = content["machine"], content["roofs"]
    caches = ", ".join(f"{name} {size}" for name, size in m["caches"].items())
    head = Text.assemble(
        (m["cpu"], "bold"), f" · {m['cores']} cores · {caches} · {m['memory_bytes'] / 1e9:.0f} GB\n",
        f"threads start by the {content['threading_layer']} layer{waits(m.get('waiting'))}\n",
        memory(m),
        amx(content.get("amx")),
    )  # fmt: skip
    table = style.table("", *(f">{count(int(n), 'thread')}" for n in roofs))
    table.add_row("FMA, GFLOP/s", *(f"{r['gflops']:,.1f}" for r in roofs.values()), style="bold")
    first = next(iter(roofs.values()))
    for name, unit in ("bf16", "GFLOP/s"), ("int8", "GOP/s"):
        if first.get(f"{name}_gflops"):  # a record of an earlier version has none
            rates = (f"{r[f'{name}_gflops'] or 0:,.1f}" for r in roofs.values())
            table.add_row(f"{name}, {unit}, by {first.get(f'{name}_by') or '?'}", *rates, style="bold")
    table.add_row("starting threads, µs", *(f"{r['launch_us']:.1f}" for r in roofs.values()))
    for level in next(iter(roofs.values()))["gbs"]:
        for kind in next(iter(roofs.values()))["gbs"][level]:
            table.add_row(f"{level} {kind}, GB/s", *(f"{r['gbs'][level][kind]:,.1f}" for r in roofs.values()))
    for s in content.get("schemes", ()):
        table.add_row(f"T*, {s['name']}: {s['moved_bytes']} B", *(f"{s['tokens'][n]:,.0f}" for n in roofs))
    table.caption = "T*: a step of fewer tokens is bound by memory; B: bytes a parameter moves"
    kept = f"kept in {content['file']}" if content["file"] else "not kept: the next command measures again"
    lines = [f"measured {', '.join(dict.fromkeys(r['measured'][:16] for r in roofs.values()))}; {kept}"]
    warnings = dict.fromkeys(w for r in roofs.values() for w in r["doubts"])
    if warnings:
        lines.append(f"warnings: {'; '.join(warnings)}. When it is quiet: cpuopt machine --again")
    return [head, "", table, "", Text("\n".join(lines)), Text(noise(content["noise"]))]


def memory(m: Mapping[str, Any]) -> str:
    """Describe the NUMA nodes of a machine, and the pages that an arena gets."""
    p, nodes = m["pages"], m["numa_nodes"]
    names = "; ".join(f"{n}: processors {cpus}" for n, cpus in nodes.items())
    numa = f"{count(len(nodes), 'NUMA node')} ({names})" if nodes else "NUMA nodes are not named"
    huge = f"huge pages of {p['huge_bytes'] >> 10:,} kB, " if p["huge_bytes"] else "huge pages "
    mode = f"mode {p['huge_mode']}" if p["huge_mode"] else "not offered"
    return f"{numa} · pages of {p['bytes'] >> 10} kB, {huge}{mode}: an arena gets {p['arena']} ones"


def amx(proof: Mapping[str, Any] | None) -> str:
    """Describe whether products of bfloat16 run on AMX, on a processor that has it."""
    return f"\nAMX is {'used' if proof['use'] else 'passed over'}: {proof['reason']}" if proof else ""


def waits(chosen: Mapping[str, Any] | None) -> str:
    """Describe how threads wait for work."""
    if not chosen:
        return ""
    ways = {"spin": " and spin for milliseconds before they sleep", "sleep": " and sleep while they wait"}
    if chosen["how"] == "follow":
        now = {"spin": "spin now", "sleep": "sleep now, because others run"}.get(chosen["now"], "as their runtime does")
        return f" and wait as the load allows: {now}, {count(chosen['changes'], 'change')} so far"
    return f"{ways.get(chosen['how'], '')} ({chosen['why']})"


def noise(n: Mapping[str, Any]) -> str:
    """Describe the noise on the machine now."""
    found = [f"other processes use {n['others_cores']:.2f} cores"]
    if n["busiest"]:
        found[0] += " (" + ", ".join("{name} {cores:.2f}".format(**b) for b in n["busiest"]) + ")"
    if n["load_average"]:
        found.append(f"load average {n['load_average'][0]:.1f}")
    found.append(f"{n['mhz']:,.0f} MHz" if n["mhz"] else "frequency cannot be read")
    if n["governor"]:
        found.append(f"governor {n['governor']}")
    found.append(f"CPU quota {n['quota_cores']:.1f} cores" if n["quota_cores"] else "no CPU quota")
    if n["throttled"]:
        found.append(f"throttled {n['throttled']} times")
    if n["steal"] > 0.01:
        found.append(f"{n['steal']:.2f} cores taken by the hypervisor")
    return f"now: {'; '.join(found)}"

"""What bfloat16 and int8 gain: whole training steps with `--dtype bf16` beside float32, and with int8 beside bf16.

::

    python benchmarks/precision.py --out benchmarks/records/zen4/precision.json       # all rows of docs/precision.md
    python benchmarks/precision.py --model gpt2-124M --sizes 1x16,1x64 [--rounds 8] [--threads N]
    python benchmarks/precision.py --types bf16,int8 --out benchmarks/records/zen4/int8.json   # the table of int8
    python benchmarks/precision.py --show benchmarks/records/zen4/precision.json

A third engine stores the moments in bfloat16 too, a fourth the weights as well. All are built in one process. Their
kernels are checked at the sizes of the run, and steps are compared in pairs on the same batch, each engine with the
first. The losses of the first steps must agree within what bfloat16 explains. Times are medians; memory is what the
arena holds, planned.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from flags import begun, keep, recorded, sizes, some_of

from cpuopt import models
from cpuopt.check.cases import Case
from cpuopt.check.gate import require_right
from cpuopt.engine import Engine
from cpuopt.kernels.registry import Choice
from cpuopt.measure.comparison import compare, timer
from cpuopt.program.fuse import usual
from cpuopt.wording import spread

FIRST, APART = 4, 1e-2
"""The steps whose losses are compared, and how far apart they may be: bfloat16 has 8 bits of precision."""


TYPES: dict[str, dict[str, str]] = {
    "float32": {},
    "bf16": {"dtype": "bfloat16"},
    "bf16, bf16 moments": {"dtype": "bfloat16", "moments": "bfloat16"},
    "bf16, bf16 weights and moments": {"dtype": "bfloat16", "moments": "bfloat16", "weights": "bfloat16"},
    "int8": {"dtype": "int8"},
}
CASES = {
    "gpt2-nano": "12x64",
    "gpt2-baby": "8x256",
    "stories15M": "4x256",
    "gpt2-124M": "1x16,1x64,4x64,16x64,1x1024",
    "smollm2-135M": "4x64",
}
"""The sizes of each model in docs/precision.md."""


def measured(model: str, size: str, rounds: int, threads: int | None, names: Sequence[str]) -> dict[str, Any]:
    """Measure one size: by types, the arena's MB, the ms of the rounds, and the time of the first types over it."""
    B, T = map(int, size.split("x"))
    config = models.parse(model)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (B, T + 1))
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}

    def engine(**types: str) -> Engine:
        how = {"choice": Choice("optimized"), "fuse": usual("optimized", False), "threads": threads, **types}
        made = Engine.from_options(config.module(), config.specs(B, T), **how)
        require_right(made.kernels, [(b.kernel, Case.of(b.call)) for b in made.calls], threads=made.threads)
        return made

    engines = {name: engine(**TYPES[name]) for name in names}
    losses = np.array([[e.step(**batch).loss for _ in range(FIRST)] for e in engines.values()])
    if not np.allclose(losses, losses[0], rtol=APART):
        raise SystemExit(f"{size}: losses {losses.tolist()}; expected those of all types to agree to {APART:g}")
    found: dict[str, Any] = {name: {"arena_mb": e.plan.total_bytes / 1e6} for name, e in engines.items()}
    a = engines[names[0]]
    for name, b in engines.items():
        if b is not a:
            pair = timer(lambda: a.step(**batch)), timer(lambda b=b: b.step(**batch))
            compared = compare(*pair, analyses=[rounds], control=False)
            ms = [[ns / 1e6 for ns in compared.figures(letter)] for letter in "AB"]
            ratio = compared.verdict().ratio
            gain = {"median": 1 / ratio["median"], "low": 1 / ratio["high"], "high": 1 / ratio["low"]}
            found[name] |= {"ms": ms[1], "base_ms": ms[0], "gain": gain}
    return {"model": model, "size": size, "threads": a.threads, "types": found}


def table(record: Mapping[str, Any]) -> Iterator[str]:
    """Write the record as a table of docs/precision.md; the first types' time is of their rounds with the second."""
    first, *names = record["rows"][0]["types"]
    more = (f"{n}, MB | ms | {first}'s time over it" for n in names)
    yield f"| model, B x T | {first}, MB | ms | {' | '.join(more)} |"
    yield f"| --- |{' ---: |' * (2 + 3 * len(names))}"
    for row in record["rows"]:
        of = row["types"]
        cells = [f"{of[first]['arena_mb']:,.0f}", f"{np.median(of[names[0]]['base_ms']):,.1f}"]
        for x in (of[n] for n in names):
            cells += [f"{x['arena_mb']:,.0f}", f"{np.median(x['ms']):,.1f}", spread(x["gain"], 2)]
        yield f"| {row['model']} {row['size']} | {' | '.join(cells)} |"
    how = f"{record['rounds']} rounds, {record['rows'][0]['threads']} threads"
    yield f"\n{record['machine']['cpu']}; {how}; {record['time'][:10]}."


def main() -> None:
    """Measure, or show a record."""
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--model", help="by default all of docs/precision.md, with their sizes")
    p.add_argument("--sizes", type=sizes, help="of --model; 1x16,1x64,4x64 by default")
    p.add_argument("--rounds", type=int, default=8)
    p.add_argument("--threads", type=int)
    p.add_argument(
        "--types", type=some_of(TYPES), default=list(TYPES)[:-1], help="the first is compared with the others"
    )
    a = recorded(p, table)
    cases = {a.model: a.sizes or sizes("1x16,1x64,4x64")} if a.model else {m: sizes(x) for m, x in CASES.items()}
    rows: list[dict[str, Any]] = []
    record = begun("precision", rounds=a.rounds, rows=rows)
    for model, size in ((m, size) for m, found in cases.items() for size in found):
        rows.append(measured(model, size, a.rounds, a.threads, a.types))
        print("\n".join([*table(record)][-2 if len(rows) > 1 else 0 : -1]), flush=True)
        keep(record, a.out)


if __name__ == "__main__":
    main()

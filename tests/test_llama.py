"""Four odd models of the Llama family against values of Hugging Face's ``transformers``, by every route.

The values are made by ``golden/transformers_llama.py``; ``golden/compare_families.py`` compares whole arrays with
those of the library itself, of other models of the same families.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from golden.compare_families import HYPER
from golden.llama_cases import CASES, STEPS, TOLERANCE, distance, norms_after, summarize, unpacked
from golden.params import digest

from cpuopt import Choice
from cpuopt.engine import Engine
from cpuopt.models import from_json, specs
from cpuopt.program.fuse import FUSIONS


class Route(NamedTuple):
    """One way to compute the same."""

    name: str
    variant: str
    swaps: tuple[str, ...] = ()
    fuse: tuple[str, ...] = ()


ROUTES = [
    Route("vanilla", "vanilla"),
    Route("vanilla, rewritten", "vanilla", fuse=tuple(FUSIONS)),
    Route("generated", "vanilla", ("*_backward*=generated",)),
    Route("optimized", "optimized"),
    Route("optimized, rewritten", "optimized", fuse=tuple(FUSIONS)),
]


def engine_of(case, route, train=True):
    """Make an engine with the parameters of a case."""
    engine = Engine(
        from_json(case.config()).module(),
        specs(case.batch, case.time),
        choice=Choice(route.variant, route.swaps),
        fuse=route.fuse,
        threads=1,
        seed=None,
        train=train,
    )
    restart(engine, case)
    return engine


def restart(engine, case):
    """Set the parameters of a case, and no moments."""
    params = case.params()
    found = engine.parameters()
    assert {name: p.shape for name, p in found.items()} == {name: p.shape for name, p in params.items()}
    for name, p in found.items():
        p[...] = params[name]
    for moments in engine.states().values():
        for moment in moments.values():
            moment.fill(0)
    engine.step_number = 0


def values_of(case, engine):
    """Compute the losses and the norms of the weights after them; without rewrites, also logits and gradients."""
    tokens, targets = case.tokens()
    batch = {"tokens": tokens, "targets": targets}
    values = {"loss": np.array([engine.forward(**batch)])}
    logits, gradients = engine.program.outputs[1:], engine.gradients()
    if logits and gradients.keys() == engine.parameters().keys():
        values["logits"] = engine.array(logits[0]).copy()
        engine.run("backward")
        values |= {f"grad/{name}": g.copy() for name, g in gradients.items()}
    values["losses"] = np.array([engine.step(**batch, **HYPER).loss for _ in range(STEPS)])
    return values | norms_after(engine.parameters())


def bits(case, engine, threads):
    """Hash the losses and the weights of three steps on some threads."""
    restart(engine, case)
    engine.threads = threads
    tokens, targets = case.tokens()
    losses = np.array([engine.step(tokens=tokens, targets=targets, **HYPER).loss for _ in range(3)])
    return digest({"losses": losses, **engine.parameters()})


with np.load(Path(__file__).parent / "golden" / "llama.npz") as _found:
    KEPT = {case: {part: _found[f"{case}/{part}"] for part in ("losses", "rows", "norms")} for case in CASES}
WANT = {case: unpacked(CASES[case], kept) for case, kept in KEPT.items()}


def far(case, values):
    """The quantities that lie further from those of transformers than allowed, and how far."""
    distances = {name: distance(x, WANT[case][name]) for name, x in summarize(values).items()}
    return {name: d for name, d in distances.items() if not d <= TOLERANCE}


@pytest.mark.parametrize("route", ROUTES, ids=[r.name for r in ROUTES])
@pytest.mark.parametrize("case", CASES)
def test_it_agrees_with_transformers_and_has_the_same_bits_on_any_threads(case, route):
    engine = engine_of(CASES[case], route)
    values = values_of(CASES[case], engine)
    assert far(case, values) == {}
    whole = not route.fuse
    assert {n for n in WANT[case] if whole or n.startswith("after/") or n in ("loss", "losses")} == values.keys()
    assert len({bits(CASES[case], engine, threads) for threads in (1, 3)}) == 1

"""Compare models of the Llama family with Hugging Face's ``transformers``: logits, loss, every gradient by name, and
ten AdamW losses with the norms of the weights after them.

``transformers`` computes whole arrays in float64, in a process of its own, under a Python that has it and PyTorch::

    python tests/golden/compare_llama.py [--python PATH]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    os.environ["NUMBA_NUM_THREADS"] = "5"  # on a machine with fewer cores, too
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from llama_cases import ADAMW, CASES, STEPS, TOLERANCE, Case, Values, norms_after
from params import deviation, digest

from cpuopt import Choice
from cpuopt.engine import Engine
from cpuopt.models import from_json, specs
from cpuopt.program.fuse import FUSIONS

HERE = Path(__file__).resolve().parent
HYPER = {name: x for name, x in ADAMW.items() if name != "betas"}
HYPER["beta1"], HYPER["beta2"] = ADAMW["betas"]


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


def engine_of(case: Case, route: Route, train: bool = True) -> Engine:
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


def restart(engine: Engine, case: Case) -> None:
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


def values_of(case: Case, engine: Engine) -> Values:
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


def bits(case: Case, engine: Engine, threads: int) -> str:
    """Hash the losses and the weights of three steps on some threads."""
    restart(engine, case)
    engine.threads = threads
    tokens, targets = case.tokens()
    losses = np.array([engine.step(tokens=tokens, targets=targets, **HYPER).loss for _ in range(3)])
    return digest({"losses": losses, **engine.parameters()})


def transformers_values(python: str) -> dict[str, Values]:
    """Compute every case with ``transformers`` under another Python."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, HERE / "transformers_llama.py", folder], check=True)
        return {case: dict(np.load(Path(folder, f"{case}.npz"), allow_pickle=False)) for case in CASES}


def compare(name: str, case: Case, wanted: Values, routes: Sequence[Route] = ROUTES) -> bool:
    """Print the largest difference of each route, and return whether all are within the tolerance, on any threads."""
    right = True
    for route in routes:
        engine = engine_of(case, route)
        got = values_of(case, engine)
        asked = wanted if "logits" in got else {n: x for n, x in wanted.items() if n in got}
        far = {n: deviation(got[n], x) if n in got else float("inf") for n, x in asked.items()}
        worst = max(far, key=far.__getitem__)
        alike = len({bits(case, engine, threads) for threads in (1, 2, 3, 5)}) == 1
        right &= far[worst] <= TOLERANCE and alike
        print(
            f"{'PASS' if far[worst] <= TOLERANCE and alike else 'FAIL'}  {name:<15}  {route.name:<21}"
            f"  {len(far):3} quantities, at most {far[worst]:.1e} ({worst})"
            f"  {'the same bits' if alike else 'OTHER BITS'} on 1, 2, 3 and 5 threads",
            flush=True,
        )
    return right


def main() -> int:
    """Compare, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", metavar="PATH", default=sys.executable, help="one that has transformers and torch")
    args = parser.parse_args()
    wanted = transformers_values(args.python)
    found = [compare(name, case, wanted[name]) for name, case in CASES.items()]
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())

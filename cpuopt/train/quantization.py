"""The error of products in int8 by layer, on one batch.

Each product of a forward that quantizes its input is computed twice for some of its rows and outputs, in float64: with
the int8 of both sides, and with the numbers that they stand for. A trained weight stands for its numbers, a frozen one
for its int8. The error is taken over what differs between rows: an output that all tokens share says nothing of them,
and a single huge element, which takes the resolution from its row, often is such a one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import ops
from ..ops.dequantize import numbers
from ..ops.matmul_int8 import quantized

if TYPE_CHECKING:
    from ..building import Bound
    from ..engine import Engine

Array = np.ndarray[Any, Any]
TOKENS, OUTPUTS = 64, 256
"""The most rows and outputs of a product that are computed, evenly spread."""
BOUND = 0.05
"""The error from which on a layer's products are not in int8."""
SAME = 1e-6
"""The share of the outputs below which what differs between rows is rounding."""
PRODUCTS = ops.matmul_int8_forward, ops.classifier_int8_forward


@dataclass(frozen=True)
class ProductError:
    """The error of a product.

    Attributes
    ----------
    error : the root of the squared differences of its outputs over that of their deviations from the mean over rows.
    zeroed : the share of its inputs that became 0 in int8, of those that were not.
    """

    layer: str
    error: float
    zeroed: float


def product_errors(engine: Engine, batch: Mapping[str, Array]) -> list[ProductError]:
    """Run a forward on a batch, and return the error of each product whose input is quantized, in their order.

    Products whose numbers are not finite have none.
    """
    if not any(c.op in PRODUCTS for c in engine.program.calls):
        return []
    trained = {c.args["q"]: c.args["weight"] for c in engine.program.phase("convert") if c.op is ops.quantize_rows}
    found, usual = dict[str, ProductError](), engine.runner

    def run(calls: Iterable[Bound]) -> None:
        for bound in calls:
            usual([bound])
            call = bound.call
            if call.op in PRODUCTS and call.layer not in found:
                of = {n: bound.args[call.op.params.index(n)] for n in ("inp", "weight", "scales")}
                weight = trained.get(call.args["weight"])
                found[call.layer] = error_of(call.layer, **of, exact=None if weight is None else engine.array(weight))

    engine.runner = run
    try:
        with np.errstate(invalid="ignore", over="ignore"):
            engine.forward(**batch)
    finally:
        engine.runner = usual
    return [e for e in found.values() if np.isfinite(e.error)]


def error_of(layer: str, inp: Array, weight: Array, scales: Array, exact: Array | None = None) -> ProductError:
    """Return the error of a product.

    Parameters
    ----------
    inp : (BT, C).
    weight, scales : (OC, C) int8 and (OC,).
    exact : (OC, C), the weight itself; None: the int8 are all that there is.
    """
    x = numbers(spread(inp, TOKENS))
    q, step = quantized(x)
    w8 = spread(weight, OUTPUTS) * spread(scales, OUTPUTS).astype(np.float64)[:, None]
    w = w8 if exact is None else numbers(spread(exact, OUTPUTS)).astype(np.float64)
    y = x.astype(np.float64) @ w.T
    difference = np.linalg.norm((q * step.astype(np.float64)) @ w8.T - y)
    whole, size = np.linalg.norm(y - y.mean(axis=0)), np.linalg.norm(y)
    whole = whole if whole > SAME * size else size  # rows of one token alone do not differ
    there = np.count_nonzero(x)
    zeroed = np.count_nonzero((q == 0) & (x != 0)) / there if there else 0.0
    return ProductError(layer, float(difference / whole) if difference else 0.0, float(zeroed))


def spread(x: Array, most: int) -> Array:
    """Return some of the rows of an array, at equal distances; all if there are no more."""
    return x[:: -(-len(x) // most)]


def too_coarse(errors: Iterable[ProductError]) -> list[ProductError]:
    """List the products that int8 changes too much."""
    return [e for e in errors if e.error > BOUND]


def listed(errors: Iterable[ProductError]) -> str:
    """List products with their errors."""
    return ", ".join(f"{e.layer} ({100 * e.error:.3g} %)" for e in errors)


def words(errors: Sequence[Mapping[str, Any]]) -> str:
    """Describe the errors of the products of a step, as a profile has them."""
    worst = max(errors, key=lambda e: e["error"])
    middle = sorted(e["error"] for e in errors)[len(errors) // 2]
    zeroed = max(e["zeroed"] for e in errors)
    return (
        f"int8: outputs of a layer have an error of {100 * middle:.3g} % (median of {len(errors)}), "
        f"{100 * worst['error']:.3g} % in {worst['layer']}; up to {100 * zeroed:.3g} % of a layer's inputs become 0"
    )

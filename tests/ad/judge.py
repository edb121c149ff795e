"""The gradient of a kernel by the generator alone, in float64, against differences and dual numbers."""

from dataclasses import dataclass

import numpy as np

from cpuopt.ad import UnsupportedError, differentiate, read
from cpuopt.check.cases import SMALL, arguments, case
from cpuopt.check.dual import slope as exact_slope
from cpuopt.check.dual import wide
from cpuopt.ops.declaration import Op, as_dim

STEPS = (1e-3, 1e-4, 1e-5, 1e-6)
DOMAINS = (lambda x: x, lambda x: abs(x) + 0.1, lambda x: 1 / (1 + np.exp(-x)), lambda x: abs(x) + 1.1)


@dataclass
class Judged:
    """``right``, ``refused`` or ``wrong``, with the reason, and the errors against dual numbers and differences."""

    kind: str
    detail: str = ""
    exact: float = np.nan
    difference: float = np.nan


def drawn(natural, domain, seed=0):
    """Inputs of a kernel by name, float64; outputs are of NaN."""
    op = Op("natural", *natural.args, label="", flops=as_dim(0), reference=dict, source="")
    on, rng = case(op, SMALL), np.random.default_rng(seed)
    given = arguments(op, on, rng)
    for a in natural.args:
        if a.kind in ("in", "state"):
            given[a.name] = given[a.name].astype(float)
            if natural.inputs is None:
                given[a.name] = domain(given[a.name])
        elif a.kind == "out":
            given[a.name] = np.full(given[a.name].shape, np.nan)
    if natural.inputs:
        floats = {a.name: given[a.name] for a in natural.args if a.kind in ("in", "state", "index")}
        given |= natural.inputs(floats)
    return given


def judge(natural):
    """Judge one kernel on the first domain on which it is finite."""
    ends = [a.name for a in natural.args if a.kind in ("out", "state")]
    wrt = [a.name for a in natural.args if a.kind in ("in", "state")]
    state = [a.name for a in natural.args if a.kind == "state"]
    try:
        kernel = read(natural.function, in_place=state)
        made = differentiate(kernel, [kernel.before.get(n, n) for n in wrt], ends[:1])
    except UnsupportedError as e:
        return Judged("refused", str(e))
    forward, backward = wide(natural.function), wide(made.function)
    for domain in DOMAINS:
        rng = np.random.default_rng(1)
        given = drawn(natural, domain)
        with np.errstate(all="ignore"):
            outs = run(forward, given)
            if not all(np.isfinite(outs[n]).all() for n in ends):
                continue
            seed = rng.standard_normal(outs[ends[0]].shape)
            directions = {n: rng.standard_normal(given[n].shape) for n in wrt}
            grads = {n: np.zeros(given[n].shape) for n in wrt}
            starts = {kernel.before[n]: given[n].copy() for n in state}
            fresh = {n: np.full(given[n].shape, np.nan) if n in ends else given[n] for n in given}
            adjoints = {f"d{n}": seed for n in ends[:1]} | {f"d{kernel.before.get(n, n)}": grads[n] for n in wrt}
            if backward_missing := set(made.params) - {*fresh, *starts, *adjoints}:
                raise AssertionError(backward_missing)
            everything = {**fresh, **starts, **adjoints}
            backward(*(_copied(everything[p]) if p in fresh else everything[p] for p in made.params))
            slope, terms = exact_slope(natural.function, given, directions, {ends[0]: seed})
            if not np.isfinite(slope):
                continue
            mine = sum(float((grads[n] * directions[n]).sum()) for n in wrt)
            exact = abs(mine - slope) / (terms + 1e-30)
            apart = []
            for h in STEPS:
                up, down = (run(forward, given | {n: given[n] + s * h * directions[n] for n in wrt}) for s in (1, -1))
                change = ((up[ends[0]] - down[ends[0]]) * seed).sum() / (2 * h)
                apart.append(abs(change - mine) / (terms + 1e-12))
        kind = "right" if exact < 1e-9 and min(apart) < 1e-6 else "wrong"
        return Judged(kind, f"{exact:.1e} {min(apart):.1e}", exact, min(apart))
    return Judged("unfit", "not finite on any domain")


def _copied(x):
    return x.copy() if isinstance(x, np.ndarray) else x


def run(function, given):
    """Call a kernel on copies of its arguments; return them."""
    new = {n: _copied(x) for n, x in given.items()}
    function(*new.values())
    return new

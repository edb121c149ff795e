"""Every kernel against its op's float64 reference, on every awkward case."""

import pytest

from cpuopt import kernels, ops  # noqa: F401  (importing kernels registers them)
from cpuopt.check.cases import ODD, Case, case, cases, limits, other_types, quick_cases
from cpuopt.check.check import check
from cpuopt.kernels import registry


def is_copy(k: registry.Kernel) -> bool:
    """Return whether a vanilla kernel is the generated one, since nobody wrote it by hand."""
    return k.variant == registry.BASE and k.function.__module__.startswith("cpuopt_generated.")


USUAL, *OTHERS = ops.OPTIMIZERS.values()
FUSED = {ops.updated(op, optimizer) for op in ops.ALL.values() if op.updates for optimizer in OTHERS}
"""Ops that differ from those with the usual optimizer by its rule alone, which is an op too."""


def cases_of(op: ops.Op, k: registry.Kernel) -> list[Case]:
    """List the cases of a kernel: all, or few of each type for an op in `FUSED`."""
    if op not in FUSED:
        return cases(op, k.skips)
    return quick_cases(op, skips=k.skips) + [case(op, ODD, types=types) for types in other_types(op)]


VARIANTS = {op: [k for k in registry.KERNELS.values() if k.op is op and not is_copy(k)] for op in ops.ALL.values()}
EVERY = [(k, case) for op, variants in VARIANTS.items() for k in variants for case in cases_of(op, k)]
EVERY = [(k, case) for k, case in EVERY if k.takes_all(case.types)]
"""The variants one after another, which share the reference's results."""


@pytest.mark.parametrize(("kernel", "case"), EVERY, ids=[f"{k.name} {case}" for k, case in EVERY])
def test_kernel_agrees_with_its_reference(kernel: registry.Kernel, case: Case) -> None:
    result = check(kernel, case, threads=(1, 2, 3, 4))
    assert result.verdict == "PASS", str(result)


@pytest.mark.parametrize("op", ops.ALL.values(), ids=str)
def test_cases_are_awkward(op: ops.Op) -> None:
    found = cases(op)
    sizes = [case.sizes for case in found]
    for symbol, n in {"B": 1, "T": 1, "BT": 1, "V": 50257}.items():
        assert symbol not in sizes[0] or any(s[symbol] == n for s in sizes)
    for symbol in {"C", "T", "N", "V", "OC"} & sizes[0].keys():
        assert any(s[symbol] % 2 for s in sizes)
        assert any(s[symbol] % 64 == 0 for s in sizes)
    assert {case.kind for case in found} >= {"normal", "large", "offset", "tiny", "constant"}
    optional = frozenset(a.name for a in op.args if a.optional)
    absent = {frozenset(), optional, frozenset(limits(op))}
    copies = {frozenset(a.name for a in op.args if a.copies)}  # of weights that are narrow themselves
    assert {case.absent for case in found} == absent | copies
    assert {case.absent for case in quick_cases(op)} == absent
    narrow = [{a.name for a in op.args if a.drawn and case.types.get(a.name)} for case in found]
    drawn = {a.name for a in op.args if a.drawn}
    weights = {a.copies for a in op.args} & drawn
    assert all(some in narrow for some in (set[str](), weights, drawn - weights, drawn))

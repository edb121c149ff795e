"""Every kernel against its op's float64 reference, on every awkward case."""

import random

import pytest
from drawn import commit

from cpuopt import kernels, ops  # noqa: F401  (importing kernels registers them)
from cpuopt.check.cases import ODD, case, cases, limits, other_types, quick_cases
from cpuopt.check.check import check
from cpuopt.kernels import registry


def is_copy(k):
    """Return whether a vanilla kernel is the generated one, since nobody wrote it by hand."""
    return k.variant == registry.BASE and k.function.__module__.startswith("cpuopt_generated.")


USUAL, *OTHERS = ops.OPTIMIZERS.values()
FUSED = {op: op.fuses[-1] for op in ops.ALL.values() if op.fuses and op.fuses[-1] in OTHERS}
"""Ops that differ from those with the usual optimizer by its rule alone, which is an op too; with this rule."""


def cases_of(op, k):
    """List the cases of a kernel: all, or few of each type for an op in `FUSED`."""
    if op not in FUSED:
        return cases(op, k.skips)
    return quick_cases(op, skips=k.skips) + [case(op, ODD, types=types) for types in other_types(op)]


VARIANTS = {op: [k for k in registry.KERNELS.values() if k.op is op and not is_copy(k)] for op in ops.ALL.values()}


def aspects(case):
    """Return what a case is made of."""
    return {("sizes", str(sorted(case.sizes.items()))), ("kind", case.kind), case.absent, str(case.types)}


def covering(found, draw):
    """Yield some cases that have each size, kind, absence and type of all at least once."""
    missing = {a for one in found for a in aspects(one)}
    for one in draw.sample(found, len(found)):
        if aspects(one) & missing:
            missing -= aspects(one)
            yield one


def half(op):
    """Return the types of an op in a step with ``--dtype bfloat16``, which other tests compile too."""
    return {a.name: "bfloat16" for a in op.arrays if "bfloat16" in a.types[1:] and not a.drawn}


NARROW = [op for op in VARIANTS if other_types(op) and op not in ops.OPTIMIZERS.values()]
OTHER = 8


def sparing(k, every, draw):
    """Return the cases with the usual types, and some with others, for each of which a kernel is compiled.

    An optimized kernel has those of a step in bfloat16; and `OTHER` ops have, by one variant, any that they can have.
    """
    if k.op in ops.OPTIMIZERS.values():
        return every
    if k.op in FUSED and FUSED[k.op] is not random.Random(commit()).choice(OTHERS):
        return []
    wanted = {"{}"}
    if k.variant == "optimized" and k.op not in FUSED:
        wanted.add(str(half(k.op)))
    if k.op in random.Random(commit()).sample(NARROW, OTHER):
        takers = [v for v in VARIANTS[k.op] if any(map(v.takes_all, other_types(k.op)))]
        if takers and random.Random(f"{commit()} {k.op.name}").choice(takers) is k:
            wanted.add(draw.choice(sorted({str(one.types) for one in every if one.types})))
    return [one for one in every if str(one.types) in wanted]


def parameters():
    """Yield each kernel with each case, the variants one after another, which share the reference's results."""
    for op, variants in VARIANTS.items():
        for k in variants:
            every = [one for one in cases_of(op, k) if k.takes_all(one.types)]
            draw = random.Random(f"{commit()} {k.name}")
            some = {str(one) for one in covering(sparing(k, every, draw), draw)}
            for one in every:
                marks = pytest.mark.slow if str(one) not in some else pytest.mark.long if one.types else ()
                yield pytest.param(k, one, id=f"{k.name} {one}", marks=marks)


@pytest.mark.parametrize(("kernel", "case"), [*parameters()])
def test_kernel_agrees_with_its_reference(kernel, case, request):
    result = check(kernel, case, threads=(1, 2, 3, 4) if request.node.get_closest_marker("slow") else (1, 3))
    assert result.verdict == "right", str(result)


@pytest.mark.parametrize("op", ops.ALL.values(), ids=str)
def test_a_cover_has_every_size_kind_absence_and_type(op):
    every = cases(op)
    for seed in range(3):
        some = [*covering(every, random.Random(seed))]
        assert set().union(*map(aspects, some)) == set().union(*map(aspects, every))
        assert len(some) < 0.7 * len(every)


@pytest.mark.parametrize("op", ops.ALL.values(), ids=str)
def test_cases_are_awkward(op):
    found = cases(op)
    sizes = [case.sizes for case in found]
    for symbol, n in {"B": 1, "T": 1, "BT": 1, "V": 50257}.items():
        assert symbol not in sizes[0] or any(s[symbol] == n for s in sizes)
    for symbol in {"C", "T", "N", "V", "OC"} & sizes[0].keys():
        assert any(s[symbol] % 2 for s in sizes)
        assert any(s[symbol] % 64 == 0 for s in sizes)
    assert {case.kind for case in found} >= {"normal", "large", "offset", "tiny", "constant"}
    absent = {frozenset(), frozenset(a.name for a in op.args if a.optional), frozenset(limits(op))}
    copies = {frozenset(a.name for a in op.args if a.copies)}  # of weights that are narrow themselves
    assert ({case.absent for case in found}, {case.absent for case in quick_cases(op)}) == (absent | copies, absent)
    narrow = [{a.name for a in op.args if a.drawn and case.types.get(a.name)} for case in found]
    drawn = {a.name for a in op.args if a.drawn}
    weights = {a.copies for a in op.args} & drawn
    assert all(some in narrow for some in (set[str](), weights, drawn - weights, drawn))

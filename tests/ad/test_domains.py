"""The inputs on which an op of one's own is judged: what float32 cannot hold is no evidence, and `inputs=` declares."""

import math
from dataclasses import replace

import numpy as np
import programs
import pytest
from numba import prange

from cpuopt import differentiable, kernel
from cpuopt.check.cases import SMALL, Case, arguments, case
from cpuopt.check.check import check
from cpuopt.check.fit import LARGEST
from cpuopt.check.result import refuse
from cpuopt.errors import UserError
from cpuopt.kernels import registry
from cpuopt.ops.declaration import C, N, T, index, inp, out, scalar, symbols

P, Q = symbols("P Q")
LONG = Case({"T": 130, "C": 24})
AT_SIZE = {"adds": {}, "sized": True}


def recurrence(h, x, a):
    for c in prange(x.shape[1]):
        s = 0.0
        for t in range(x.shape[0]):
            s = a[c] * s + x[t, c]
            h[t, c] = s


def recurrence_wrong(h, x, a):
    for c in prange(x.shape[1]):
        s = 0.0
        for t in range(x.shape[0]):
            s = a[c] * s + 2.0 * x[t, c]
            h[t, c] = s


def of(op, variant="vanilla"):
    return registry.KERNELS[op.forward.name, variant]


def made(function, *declared, **more):
    return differentiable(*declared, **more)(function)


def drawn(op, on):
    return arguments(op, on, np.random.default_rng(0))


@pytest.fixture
def linear():
    return made(recurrence, out("h", T, C), inp("x", T, C), inp("a", C))


def test_a_recurrence_that_grows_is_judged_on_smaller_inputs(linear):
    assert drawn(linear.forward, LONG).scale < 1
    found = [check(of(linear), LONG), check(registry.KERNELS[linear.backward.name, "generated"], LONG)]
    found.append(check(of(linear), replace(LONG, **AT_SIZE), threads=(1,)))
    assert {r.verdict for r in found} == {"right"}
    assert all("so that float32 holds" in r.reason and "declare it with inputs=" in r.reason for r in found)


def test_a_wrong_recurrence_fails_on_them_and_is_told_of_domains(linear):
    kernel(linear.forward, "wrong")(recurrence_wrong)
    for on in (LONG, replace(LONG, **AT_SIZE)):
        result = check(of(linear, "wrong"), on)
        assert result.verdict == "wrong"
        with pytest.raises(UserError, match=r"is wrong, so .* expected .* times 0\.\d+.*; if its domain is another"):
            refuse(result, "nothing is run with it")


def squares(y, x):
    h = 0.0
    for t in range(x.shape[0]):
        h = 0.5 * h * h + x[t]
        y[t] = h


def test_a_formula_that_leaves_float64_too_is_judged_on_smaller_inputs():
    op = made(squares, out("y", T), inp("x", T))
    assert drawn(op.forward, Case({"T": 90})).scale < 1
    assert np.isfinite(op.forward.reference(**drawn(op.forward, Case({"T": 90})))["y"]).all()


def log_sum(y, x):
    top = x[0]
    for i in range(x.shape[0]):
        top = max(top, x[i])
    s = 0.0
    for i in range(x.shape[0]):
        s += math.exp(x[i] - top)
    y[0] = top + math.log(s)


def log_sum_naive(y, x):
    s = np.float32(0.0)
    for i in range(x.shape[0]):
        s += math.exp(x[i])
    y[0] = math.log(s)


def test_a_kernel_that_overflows_where_its_reference_does_not_fails():
    stable = made(log_sum, out("y", 1), inp("x", P))
    kernel(stable.forward, "naive", parallel=False)(log_sum_naive)
    large = Case({"P": 40}, "thousands")
    assert drawn(stable.forward, large).scale == 1
    assert check(of(stable), large).verdict == "right"
    assert check(of(stable, "naive"), large).verdict == "wrong"


def test_a_formula_that_overflows_on_the_way_is_judged_where_it_does_not():
    naive = made(log_sum_naive, out("y", 1), inp("x", P))
    assert check(of(naive), Case({"P": 40}, "thousands")).verdict == "right"


def squash(y, x):
    for i in prange(x.shape[0]):
        y[i] = 1.0 / (1.0 + math.exp(-x[i]))


def squash_of_two(y, x):
    for i in prange(x.shape[0]):
        y[i] = math.exp(x[i]) / (1.0 + math.exp(x[i]))


def test_an_overflow_that_leaves_the_result_right_scales_nothing():
    op = made(squash, out("y", N), inp("x", N))
    kernel(op.forward, "other")(squash_of_two)
    large = Case({"N": 40}, "thousands")
    assert drawn(op.forward, large).scale == 1
    assert check(of(op), large).verdict == "right"
    assert check(of(op, "other"), large).verdict == "wrong"


def inverse_power(y, x):
    for i in prange(x.shape[0]):
        y[i] = 1.0 / x[i] ** 8


def test_a_formula_that_divides_is_judged_on_larger_inputs():
    op = made(inverse_power, out("y", N), inp("x", N))
    assert drawn(op.forward, case(op.forward, SMALL, "tiny")).scale > 1
    assert check(of(op), case(op.forward, SMALL, "tiny")).verdict == "right"


BEST = """def f(y, x, c):
    for i in prange(x.shape[0]):
        top = {}
        for p in range(c.shape[0]):
            if x[i] * c[p] > top:
                top = x[i] * c[p]
        y[i] = top{}
"""


@pytest.mark.parametrize("lowest", [-1e9, -1e20, -3.4028235e38, -math.inf])
def test_a_number_that_the_formula_has_may_be_as_large_as_float32_holds(lowest):
    """With NaN put in, nothing is greater than it, and the result is the number; the others are judged as ever.

    Of those beside a number in the range of sums the tolerance follows from it.
    """

    def best(start="LOWEST", more=""):
        names = {"__name__": __name__, "prange": prange, "LOWEST": lowest}
        return programs.compiled(BEST.format(start, more), names)

    op = made(best(), out("y", N), inp("x", N), inp("c", Q))
    on = case(op.forward, SMALL, "nan")
    assert (drawn(op.forward, on).scale, check(of(op), on).verdict) == (1, "right")
    kernel(op.forward, "from_another")(best("-1e19"))
    kernel(op.forward, "but_one")(best(more=" + 1e-3 * (i == 1)"))
    for wrong in ("from_another", *["but_one"] * (lowest < -LARGEST)):
        assert check(of(op, wrong), on).verdict == "wrong"
    given = drawn(op.forward, Case({"N": 40, "Q": 7})) | {"y": np.full(40, np.nan, np.float32)}
    given["x"][3] = np.nan
    if -math.inf < lowest < -LARGEST:
        on = Case({"N": 40, "Q": 7}, **AT_SIZE)
        assert check(of(op), on, given=given).verdict == "right"
        assert check(of(op, "but_one"), on, given=given).verdict == "wrong"


def too_large(y, x):
    for i in prange(x.shape[0]):
        y[i] = 1e30 * (1.5 + math.sin(x[i])) * 1e30


def test_what_fits_at_no_scale_says_so():
    op = made(too_large, out("y", N), inp("x", N))
    with pytest.raises(UserError, match="leaves float32's range, on random inputs of any scale; declare its domain"):
        check(of(op), case(op.forward, SMALL))


def lookup(y, tab, x):
    for i in prange(x.shape[0]):
        k = int(math.floor(x[i]))  # noqa: RUF046  (as people write it)
        k = min(max(k, 0), tab.shape[0] - 1)
        y[i] = tab[k] * x[i]


def test_an_integer_of_a_number_is_judged_without_nan():
    op = made(lookup, out("y", P), inp("tab", Q), inp("x", P))
    assert {r.verdict for r in op.check()} == {"right"}


def lookup_between(y, tab, x):
    for i in prange(x.shape[0]):
        y[i] = tab[int(x[i] * (tab.shape[0] - 1))]


def test_an_index_outside_the_table_asks_for_a_domain():
    declared = out("y", P), inp("tab", Q), inp("x", P)
    op = made(lookup_between, *declared, inputs=lambda a: {"x": 100 * np.abs(a["x"]) + 100})
    with pytest.raises(UserError, match=r"IndexError.*declare its domain with inputs="):
        op.judge()


def scaled(y, x, eps, lr, beta1):
    z = 0.0
    for i in range(x.shape[0]):
        z += math.exp(x[i] / eps) * lr
    y[0] = eps * math.log(z) * beta1


def test_a_scalar_is_drawn_whatever_its_name():
    op = made(scaled, out("y", 1), inp("x", P), scalar("eps"), scalar("lr"), scalar("beta1"))
    assert {r.verdict for r in op.check()} == {"right"}


def test_inputs_may_give_a_scalar():
    declared = out("y", 1), inp("x", P), scalar("eps"), scalar("lr"), scalar("beta1")
    op = made(scaled, *declared, inputs=lambda a: {"eps": 0.75, "x": a["x"] / 2})
    assert drawn(op.forward, case(op.forward, SMALL))["eps"] == 0.75
    assert {r.verdict for r in op.check()} == {"right"}


def positions(y, x, pos):
    for i in prange(x.shape[0]):
        y[i] = x[i] * pos[i]


def test_an_index_below_a_size_that_no_array_has():
    op = made(positions, out("y", P), inp("x", P), index("pos", P, below=Q))
    assert {r.verdict for r in op.check()} == {"right"}

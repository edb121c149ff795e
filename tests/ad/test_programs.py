"""Random programs of the subset: gradients right, whatever the program; broken planners are caught."""

import programs
import pytest

from cpuopt.ad import plan as planning

STORE_READ_BY_A_CONDITION = """def f(x, w, ix, a, y, z):
    n = x.shape[1]
    for b in range(x.shape[0]):
        for i in range(n):
            if a[i] > 0.5:
                top = -9.0
                for v in range(n):
                    top = max(top, x[b, v])
                total = 0.0
                for v in range(n):
                    e = exp(x[b, v] - top)
                    total += e
                    a[v] = e
                for v in range(n):
                    y[b, v] += a[v] / total * w[i]
"""
"""Found by a long run: the exponentials were not stored, though the next iteration's condition reads them."""

STORE_READ_BEFORE_IT_IS_WRITTEN = """def f(x, w, ix, a, y, z):
    n = x.shape[1]
    for b in range(x.shape[0]):
        for i in range(n):
            a[i] = x[b, i]
            for j in range(n):
                y[b, j] += a[j] * w[i]
        top = -9.0
        for v in range(n):
            a[v] = 0.3 * x[b, v] + w[v]
            top = max(top, a[v])
        total = 0.0
        for v in range(n):
            e = exp(a[v] - top)
            total += e
            a[v] = e
        s = log(total) + top
        for i in range(n):
            y[b, i] += s
"""
"""Found by a long run: the first loop writes all of a, but reads elements that the iteration before has left."""


A_LOOP_MAY_BE_EMPTY = """def f(x, w, ix, a, y, z):
    n = x.shape[1]
    for b in range(x.shape[0]):
        s0 = 0.1
        s3 = 1.0
        for i in range(n):
            s3 = (x[b, i] if s0 > 0.7 else s0) * w[i]
        for i in range(2, 1):
            s0 = w[i]
        for i in range(b, b + 2):
            s0 = tanh(x[b, i])
        for i in range(n):
            y[b, i] += s0 + s3
"""
"""Found by a long run: the loop that may be empty was taken to replace s0, which the last but one then overwrote."""


COMPOUND_BOUNDS = [
    "prange(n - 3, x.shape[0]):\n        s = w[0]\n        for i in range(n):\n            s *= x[b, i]\n"
    "            y[b, i] += s",
    "range(2):\n        s = w[0]\n        for i in range(n if b > 0 else n - 2):\n            s *= x[b, i]\n"
    "            y[b, i] += s",
    "range(2):\n        s = w[0]\n        for i in range(b if b > 0 else n - 1, n if b > 0 else -1, -1):\n"
    "            s *= x[b, i] + w[i]\n            y[b, i] += s",
]


@pytest.mark.parametrize("body", COMPOUND_BOUNDS, ids=["chunks", "downwards", "downwards by a step"])
def test_bounds_that_are_expressions(body):
    code = f"def f(x, w, ix, a, y, z):\n    n = x.shape[1]\n    for b in {body}\n"
    assert programs.examine(code) == programs.Verdict("right")


def test_75_random_programs():
    found = [STORE_READ_BY_A_CONDITION, STORE_READ_BEFORE_IT_IS_WRITTEN, A_LOOP_MAY_BE_EMPTY]
    found += [programs.Writer(seed).program() for seed in range(72)]  # 57: a loop on one thread that records a local
    kinds = []
    for seed, code in enumerate(found):
        verdict = programs.examine(code, seed)
        assert verdict.kind != "wrong", f"{verdict.detail}\n{code}"
        kinds.append(verdict.kind)
    assert kinds.count("right") > 50  # the others are refused, most of them on purpose


def wrong_among(count):
    """The first wrong program of some."""
    for seed in range(count):
        code = programs.Writer(seed).program()
        try:
            if programs.examine(code, seed).kind == "wrong":
                return seed
        except Exception:
            return seed
    return None


def dropped_record(monkeypatch):
    walk = planning.BackwardPlan.record_assign

    def forgetful(self, s, need):
        walk(self, s, need)
        if not self.task.record_all and type(s).__name__ == "Assign":
            self.recorded.pop(s, None)

    monkeypatch.setattr(planning.BackwardPlan, "record_assign", forgetful)


def carried_adjoint(monkeypatch):
    monkeypatch.setattr(planning.BackwardPlan, "may_ascend", lambda self, loop: not self.task.record_all and not any(
        s in self.recorded for s in planning.flat(loop.body)))  # fmt: skip


@pytest.mark.parametrize("mutant", [dropped_record, carried_adjoint])
def test_the_programs_catch_a_broken_planner(mutant, monkeypatch):
    mutant(monkeypatch)
    assert wrong_among(150) is not None

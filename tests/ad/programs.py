"""Random programs of the differentiable subset, each from a seed, and what is asked of their gradients."""

import linecache
import math
import random
import re
from copy import deepcopy
from dataclasses import dataclass

import numpy as np

from cpuopt.ad import Interface, UnsupportedError, differentiate
from cpuopt.check.dual import slope as exact_slope

B, N = 3, 4
NAMES = {n: getattr(math, n) for n in ("exp", "log", "sqrt", "tanh", "sin", "cos", "atan", "erf", "sinh", "hypot")}
NAMES |= {"prange": range, "np": np, "math": math}
HELPERS = """
def h1(v):
    return v * v + 0.5


def h2(v, k):
    if v > 0.2:
        return tanh(v) * k
    elif k > 0:
        return v - k
    t = v + k
    return t * t


def h3(v, k):
    t = sin(v)
    return t + k, t * 0.5


def h4(p, q, c):
    s = c
    for i in range(p.shape[0]):
        if i == 2:
            continue
        s += p[i] * q[i]
    return s


def h5(p, m, c):
    for i in range(m):
        p[i] = p[i] * c + 0.1


def h6(v):
    s = h1(v)
    for k in range(3):
        s = s * 0.5 + v
        if s > 1.0:
            break
    return s
"""
"""Functions of one's own, which programs call."""
RANGES = ["n", "1, n", "0, n, 2", "n - 1, -1, -1", "n - 2 if b > 0 else n", "1 if b > 0 else 0, n, 2", "-1, n"]
RANGES += ["-n, 0", "1 - n, n", "n - 1, -2, -1", "n - 1, -n - 1, -3", "-1, n, 2", "0, n, 3", "2, 1", "b - 1, n"]
RANGES += ["n - 1, 0, -2", "b - 1, b + 1", "max(b - 1, 0), n", "min(b, 1), n", "n // 2"]
"""Of inner loops over n, which is 4, in a loop over b, from -1 to 2: no index is out of bounds."""
ROWS = ["n - 3, x.shape[0]", "1, x.shape[0]", "x.shape[0] - 1, -1, -1", "0, x.shape[0], 2", "-1, x.shape[0]", "-1, 2"]
"""Of the outer loop, besides all rows."""


class Writer:
    """Writes one program."""

    def __init__(self, seed):
        self.below, self.lines, self.sums, self.exponents = random.Random(seed).randrange, [], 0, ["0"]
        self.natural, self.inside, self.parallel, self.locals = False, 0, False, 0

    def pick(self, choices):
        return choices[self.below(len(choices))]

    def chance(self, percent):
        return self.below(100) >= 100 - percent

    def number(self):
        return f"{(10 - self.below(21)) / 10:.1f}"

    def line(self, depth, text):
        self.lines.append("    " * depth + text)

    def expr(self, depth, atoms):
        if depth == 0 or self.below(10) < 2:
            return self.pick([*atoms, self.number()])
        a, b = self.expr(depth - 1, atoms), self.expr(depth - 1, atoms)
        kind = self.below(14 + self.natural * 10)
        if kind < 5:
            return f"({a} {self.pick('+-*')} {b})"
        if kind == 5:
            return f"({a} / (1.5 + {b} ** 2))"
        if kind < 8:
            return f"{self.pick(['tanh', 'sin', 'cos', 'np.tanh'])}({a})"
        if kind == 8:
            return f"{self.pick(['max', 'min'])}({a}, {b})"
        if kind == 9:
            return f"({a} if {self.pick(atoms)} > {self.number()} else {b})"
        if kind == 10:
            return f"(1.0 / sqrt(1.1 + {a} * {a}))"
        if kind == 11:
            return f"({a} ** {self.pick(self.exponents)})"
        if kind >= 14:
            return self.function(kind - 14, a, b)
        if kind == 12:
            return f"((1.5 + {a} ** 2) ** {self.pick(['-1', '0.5', '2.5', '-0.5'])})"
        return f"sqrt(1.0 + {a} ** 2)"

    def function(self, kind, a, b):
        """An expression as people write them."""
        c = self.number()
        return [
            lambda: f"h1({a})", lambda: f"h2({a}, {b})", lambda: f"h6({a})",
            lambda: f"{self.pick(['atan', 'erf', 'np.arctan', 'math.sinh', 'np.cosh'])}(0.5 * tanh({a}))",
            lambda: f"{self.pick(['max', 'min'])}({a}, {b}, {c})", lambda: f"np.clip({a}, -0.5, {c} + 1.0)",
            lambda: f"{self.pick(['int', 'round', 'np.sign', 'np.floor', 'math.ceil', 'np.round'])}({a})",
            lambda: f"((1.2 + tanh({a})) ** tanh({b}))", lambda: f"math.pow(1.5 + sin({a}), 0.5 * cos({b}))",
            lambda: f"{self.pick(['hypot', 'np.hypot'])}({a}, 0.5 + {b} ** 2)",
        ][kind]()  # fmt: skip

    def atoms(self, scalars, indices, arrays):
        found = list(scalars)
        for i in indices:
            found += [f"x[b, {i}]", f"w[{i}]", f"y[b, {i}]", f"w[ix[b, {i}]]"]
            found += [f"x[(b + 1) % x.shape[0], {i}]"]
            if "a" in arrays:
                found.append(f"a[{i}]")
            if "z" in arrays:
                found.append(f"z[b, {i}]")
                if "a" in arrays:  # one iteration after the other
                    found.append(f"(z[b - 1, {i}] if b > 0 else 0.2)")
        if indices and self.chance(30):
            found.append(f"x[b, ({indices[-1]} + 1) % n]")
        return found or ["0.7"]

    def as_people_write(self, depth, level, indices, scalars, arrays, atoms):
        """Statements beyond the plain subset; return whether one was written."""
        kind = self.below(10)
        if kind == 0 and len(scalars) > 1:
            a, b = self.pick(scalars), self.pick(scalars)
            if a == b:
                return False
            values = self.pick([f"{b}, {a}", f"{b} * 0.5, {a} + {self.expr(1, atoms)}", f"h3({b}, {a})"])
            self.line(depth, f"{a}, {b} = {values}")
        elif kind == 1 and indices:
            i, j = self.pick(indices), self.pick([*indices, "1", "0"])
            self.line(depth, f"y[b, {i}], y[b, {j}] = y[b, {j}] * 0.5, {self.expr(1, atoms)} + y[b, {i}]")
        elif kind == 2 and level > self.inside:
            self.line(depth, f"if {self.pick(atoms)} > {self.number()}:")
            if self.chance(40) and scalars:
                self.line(depth + 1, f"{self.pick(scalars)} += {self.expr(1, atoms)}")
            self.line(depth + 1, self.pick(["continue", "break"]))
        elif kind == 3 and "a" in arrays:
            self.line(depth, self.pick(["h5(a, n, 0.5)", "h5(y[b], n, tanh(w[1]))", "h5(y[b, :], n - 1, 0.3)"]))
        elif kind == 4 and scalars:
            rows = ["x[b]", "x[b, :]", "w", "x[(b + 1) % x.shape[0]]", "y[b]", "x[b, 0:n]", "w[0:n]"]
            self.line(depth, f"{self.pick(scalars)} = h4({self.pick(rows)}, {self.pick(rows)}, {self.expr(1, atoms)})")
        elif kind == 5 and indices and scalars:
            name = f"r{self.below(2)}"
            self.line(
                depth, f"{name} = {self.pick(['x[b]', 'y[b]', 'x[b - 1, :]', 'w', f'x[ix[b, {indices[-1]}] % 2]'])}"
            )
            self.line(depth, f"{self.pick(scalars)} += {name}[{self.pick(indices)}] * {name}[0] * 0.3")
        elif kind == 6 and scalars:
            self.locals += 1
            name, v = f"t{self.below(2)}", f"g{self.locals}"
            size = self.pick(["n", "n + 1", "x.shape[1]", "5"])
            self.line(
                depth,
                f"{name} = "
                + self.pick([f"np.zeros({size})", f"np.empty({size})", f"np.full({size}, 0.3)", "w.copy()"]),
            )
            if "empty" in self.lines[-1] or self.chance(60):
                self.line(depth, f"for {v} in range({'n' if 'copy' in self.lines[-1] else size}):")
                self.line(depth + 1, f"{name}[{v}] = {self.expr(1, [*scalars, f'w[{v} % n]', f'x[b, {v} % n]'])}")
            if self.chance(60):
                self.line(depth, f"for {v} in range(n):")
                again = (
                    f"{name}[{v}] {self.pick(['*=', '+=', '='])} {name}[{v}] * {self.expr(1, [*scalars, f'w[{v}]'])}"
                )
                self.line(depth + 1, again)
            self.line(depth, f"{self.pick(scalars)} += {name}[{self.pick(['0', '1', 'n - 1'])}] * {name}[2]")
        elif kind == 7 and indices:
            self.line(depth, f"k0 = int({self.expr(1, atoms)}) % n")
            indices += ["k0"] * ("k0" not in indices)
        elif kind == 8 and "a" in arrays:
            self.line(depth, self.pick(["a[:] = 0.2", "y[b, :] = w", "a[:] = x[b]", "a[0:n] = w"]))
        elif kind == 9 and scalars:
            v, e = f"g{self.locals + 50}", f"e{self.locals}"
            self.locals += 1
            if self.chance(50):
                self.line(depth, f"for {v} in reversed(range({self.pick(['n', '1, n'])})):")
                self.line(depth + 1, f"{self.pick(scalars)} += x[b, {v}] * {self.pick(scalars)} * 0.3")
            else:
                self.line(depth, f"for {v}, {e} in enumerate({self.pick(['x[b]', 'w', 'y[b]'])}):")
                self.line(depth + 1, f"{self.pick(scalars)} = {self.pick(scalars)} * 0.5 + {e} * w[{v}]")
        else:
            return False
        return True

    def block(self, depth, level, indices, scalars, arrays):
        for _ in range(1 + self.below(3)):
            atoms = self.atoms(scalars, indices, arrays)
            if self.natural and self.chance(35) and self.as_people_write(depth, level, indices, scalars, arrays, atoms):
                continue
            self.exponents = ["0", "1", "2", "3", *(f"({i} % 3)" for i in indices), *(f"ix[b, {i}]" for i in indices)]
            kind = self.below(106)
            if kind < 26:
                name = f"s{self.below(4)}"
                self.line(depth, f"{name} = {self.expr(2, atoms)}")
                if name not in scalars:
                    scalars.append(name)
            elif kind < 40 and scalars:
                self.line(depth, f"{self.pick(scalars)} {self.pick(['+=', '-=', '*='])} {self.expr(2, atoms)}")
            elif kind < 58 and indices:
                target = f"y[b, {self.pick(indices)}]"
                if "a" in arrays and self.chance(30):
                    target = f"a[{self.pick(indices)}]"
                self.line(depth, f"{target} {self.pick(['=', '+=', '=', '-=', '*='])} {self.expr(2, atoms)}")
            elif kind < 66 and level < 2 and "a" in arrays:
                self.shifted_sum(depth, indices, scalars, atoms)
            elif kind < 82 and level < 2:
                i = "ijk"[level] if self.chance(98) else self.pick(["i", "j", "k", "m0", "m1", "b"])
                ranges = [*RANGES, *(f"{j} + 1" for j in indices), *(f"{j}, n" for j in indices)]
                self.line(depth, f"for {i} in range({self.pick(ranges)}):")
                self.block(depth + 1, level + 1, [*indices, i], list(scalars), arrays)
            elif kind < 92 and depth < 6:
                self.line(depth, f"if {self.pick(atoms)} > {self.number()}:")
                self.block(depth + 1, level, list(indices), list(scalars), arrays)
                if self.chance(50):
                    self.line(depth, "else:")
                    self.block(depth + 1, level, list(indices), list(scalars), arrays)
            elif kind >= 100:  # an index that is computed
                name = f"m{self.below(2)}"
                old = [f"({i} + 1) % n" for i in indices] + [f"n - 1 - abs({i})" for i in indices]
                self.line(depth, f"{name} = {self.pick(['2', '0', '-1', *old, *(f'ix[b, {i}]' for i in indices)])}")
                indices += [name] * (name not in indices)
            elif kind == 99 and self.chance(25):  # an input is written; a loop's variable may be read after its loop
                self.line(depth, self.pick(["y[b, 0] += x[b, i] * x[b, i]", "x[b, 1] = w[1] * 0.5", "y[b, 1] = w[j]"]))
            else:
                self.line(depth, f"{self.pick(['s0', 's1'])} = {self.expr(1, atoms)}")
                scalars += [n for n in ("s0", "s1") if f"{n} =" in self.lines[-1] and n not in scalars]

    def shifted_sum(self, depth, indices, scalars, atoms):
        """A sum of exponentials, its largest term taken off; written in one of several ways, some of them unusual."""
        self.sums += 1
        i = "uvpqrst"[self.sums % 7]
        inner = [a for a in atoms if "[" in a and not a.startswith(("y", "a["))] or ["0.3"]
        term = f"{self.pick(inner)} * x[b, {i}] + w[{i}]" if self.chance(60) else f"x[b, {i}]"
        in_place = self.chance(30)
        self.line(depth, "top = -9.0")
        self.line(depth, f"for {i} in range(n):")
        if in_place:
            self.line(depth + 1, f"a[{i}] = {term}")
            term = f"a[{i}]"
        self.line(depth + 1, f"top = max(top, {term})")
        self.line(depth, "total = 0.0")
        self.line(depth, f"for {i} in range(n):")
        stored = in_place or self.chance(60)
        if stored:
            self.line(depth + 1, f"e = exp({term} - top)")
            self.line(depth + 1, "total += e")
            self.line(depth + 1, f"a[{i}] = e")
        else:
            self.line(depth + 1, f"total += exp({term} - top)")
        if self.chance(20):
            self.line(depth, f"{self.pick(['total', 'top', 's0'])} += {self.pick(atoms)} * 0.1")
        if self.chance(70):
            self.line(depth, "s1 = log(total) + top")
            scalars += ["s1"] * ("s1" not in scalars)
        if stored and self.chance(70):
            self.line(depth, f"for {i} in range({'n' if self.chance(90) else '1, n'}):")
            if self.chance(50):
                self.line(depth + 1, f"a[{i}] /= total")
                self.line(depth + 1, f"y[b, {i}] += a[{i}]")
            else:
                self.line(depth + 1, f"y[b, {i}] += a[{i}] / total * x[b, {i}]")
        if self.chance(15):
            self.line(depth, f"s2 = {self.pick(['total * 0.1', 'top', 'a[0]'])}")
            scalars += ["s2"] * ("s2" not in scalars)

    def program(self):
        self.natural = self.chance(60)
        self.line(0, "def f(x, w, ix, a, y, z):")
        saves = self.chance(40)
        self.line(1, "n = x.shape[1]")
        scalars = []
        if self.chance(40):
            for k in range(4):
                self.line(1, f"s{k} = {self.pick(['w[0]', 'w[1] * w[2]', '0.5', '-0.3'])}")
            scalars = [f"s{k}" for k in range(4)]
        for _ in range(1 + self.chance(30)):
            parallel = self.chance(50)
            rows = self.pick(ROWS) if not saves and self.chance(30) else "x.shape[0]"
            if saves and self.chance(5):
                rows = "-1, x.shape[0]"  # writes the last row of z twice
            self.line(1, f"for b in {'prange' if parallel else 'range'}({rows}):")
            mine = list(scalars)
            fresh = (parallel and self.chance(97)) or not scalars or self.chance(50)
            if fresh:
                for k in range(4):
                    self.line(2, f"s{k} = {self.number()}")
                mine = [f"s{k}" for k in range(4)]
            arrays = [] if parallel else ["a"]
            if saves and not any("z[b, i] =" in line for line in self.lines):
                self.line(2, "for i in range(n):")
                before = [] if parallel else ["(z[b - 1, i] if b > 0 else 0.2)", "(z[b - 1, 0] if b > 0 else 0.2)"]
                self.line(3, f"z[b, i] = {self.expr(2, [*self.atoms(mine, ['i'], []), *before])}")
            if saves:
                arrays.append("z")
            for _ in range(1 + self.chance(40)):
                self.line(2, "for i in range(n):")
                self.block(3, 1, ["i"], list(mine), arrays)
                self.block(2, 0, [], mine, arrays)
            self.line(2, "for i in range(n):")
            self.line(3, "y[b, i] += s0 * s1 + s2 * s3")
            if fresh and not parallel:
                scalars = scalars and mine[:4]
        return "\n".join(self.lines) + "\n"


def compiled(code, names=NAMES):
    """The function that a program's text defines; its source stays readable."""
    space = dict(names)
    for file, text in (("<helpers>", HELPERS), (f"<program {hash(code)}>", code)):
        linecache.cache[file] = (len(text), None, text.splitlines(True), file)
        exec(compile(text, file, "exec"), space)
    return space["f"]


def function(body, params="x, y", **names):
    """A function of arrays from its body, in which n is the length of x."""
    return compiled(f"def f({params}):\n    n = x.shape[0]\n    {body}\n", NAMES | names)


def plain(backward):
    """A generated backward as plain Python, in float64, without the file that an import needs."""
    text = backward.text.replace("from numba import prange\n", "prange = range\n")
    text = text.replace("import push\n", "import push\npush = push.py_func\n")
    text = text.replace(" = np.float32(", " = float(")  # NumPy rounds float32 times a Python float, numba does not
    space = {}
    file = f"<backward {hash(text)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    exec(compile(text, file, "exec"), space)
    return space[backward.name]


def slope_of(backward, f, given, directions, dy, run=plain):
    """The slope of sum(y * dy) along directions as a backward has it, from what the forward was given."""
    before, after = ({n: np.array(v) if isinstance(v, np.ndarray) else v for n, v in given.items()} for _ in range(2))
    adjoint, gradients = dy.copy(), {n: np.zeros_like(given[n]) for n in directions}
    with np.errstate(all="ignore"):
        if saved := backward.plan.task.saved:
            f(*after.values())
            before |= {n: after[n] for n in saved}
        run(backward)(*before.values(), adjoint, *gradients.values())
    assert np.array_equal(adjoint, dy), "the given adjoint was changed"
    return sum(float((gradients[n] * u).sum()) for n, u in directions.items())


X = np.array([0.0, 1.5, -0.5, 1.5, 0.0, -2.0])
"""Zeros and equal numbers."""


def agrees(f, wrt=("x",), saved=(), run=plain, within=1e-12, **given):
    """Assert that the gradient of all outputs is that of dual numbers, planned and with everything recorded."""
    rng, given = np.random.default_rng(0), {"x": X, "y": np.full(len(X), 0.25), **given}
    given = {n: given[n] for n in f.__code__.co_varnames[: f.__code__.co_argcount]}
    dy, directions = np.linspace(1.0, 2.0, len(given["y"])), {n: rng.standard_normal(given[n].shape) for n in wrt}
    want, terms = exact_slope(f, given, directions, {"y": dy})
    for how in {"saved": saved, "fresh": saved}, {"record_all": True}:
        found = slope_of(differentiate(f, wrt, ["y"], **how), f, given, directions, dy, run)
        assert abs(found - want) <= within * terms, (how, found, want)


@dataclass
class Verdict:
    """What became of a program: ``right``, ``refused``, ``wrong``, or ``unfit`` (not finite)."""

    kind: str
    detail: str = ""


def examine(code, seed=0):
    """Compare the planned gradient with the slope that dual numbers give, and with a plan that records everything.

    Each third seed gives data with zeros and equal numbers. Each fourth asks for the record of everything too.
    """
    f = compiled(code)
    params = f.__code__.co_varnames[: f.__code__.co_argcount]
    saved = {"z"} if "z[b, i] =" in code else set()
    try:
        wrt = [n for n in ("x", "w") if re.search(rf"\b{n}\b", code.split(":", 1)[1])]
        face = Interface([*params, "dy", *(f"d{n}" for n in wrt)])
        made = [differentiate(f, wrt, ["y"], interface=face, saved=saved, fresh=saved)]
        if seed % 4 == 0:
            made.append(differentiate(f, wrt, ["y"], interface=face, record_all=True))
    except UnsupportedError as e:
        return Verdict("refused", str(e))
    rng = np.random.default_rng(seed)
    shapes = {"x": (B, N), "w": N, "a": N, "y": (B, N), "dy": (B, N)}
    x, w, a, y, dy = (np.round(v) / 2 if seed % 3 == 0 else v for v in map(rng.standard_normal, shapes.values()))
    directions = {n: rng.standard_normal(shapes[n]) for n in wrt}
    given = dict(zip(params, (x, w, rng.integers(0, N, (B, N)), a, y, np.full((B, N), np.nan)), strict=True))
    try:
        with np.errstate(all="ignore"):
            f(*deepcopy(given).values())  # its Python floats raise where NumPy's become infinite
        slope, terms = exact_slope(f, given, directions, {"y": dy})
    except (OverflowError, ZeroDivisionError, ValueError) as e:
        return Verdict("unfit", str(e))
    if not terms < 1e8:  # NaN too, as where 0 is multiplied by an infinite slope
        return Verdict("unfit", "its slope is not finite, or too large")
    for backward in made:
        try:
            found = slope_of(backward, f, given, directions, dy)
        except Exception as e:
            return Verdict("wrong", f"raised {type(e).__name__}: {e}")
        if not abs(found - slope) / (1e-9 + terms) < 1e-10:
            which = "record of everything" if backward.plan.task.record_all else "plan"
            return Verdict("wrong", f"the {which} has the slope {found}, and dual numbers {slope}, of {terms:.1e}")
    return Verdict("right")

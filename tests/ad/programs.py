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


EXPRESSIONS = [
    *["({x} {+|-|*} {y})"] * 5, "({x} / (1.5 + {y} ** 2))", *["{tanh|sin|cos|np.tanh}({x})"] * 2, "{max|min}({x}, {y})",
    "({x} if {atom} > {c} else {y})", "(1.0 / sqrt(1.1 + {x} * {x}))", "({x} ** {power})",
    "((1.5 + {x} ** 2) ** {-1|0.5|2.5|-0.5})", "sqrt(1.0 + {x} ** 2)",
]  # fmt: skip
AS_PEOPLE_WRITE = [
    "h1({x})", "h2({x}, {y})", "h6({x})", "{atan|erf|np.arctan|math.sinh|np.cosh}(0.5 * tanh({x}))",
    "{max|min}({x}, {y}, {c})", "np.clip({x}, -0.5, {c} + 1.0)", "{hypot|np.hypot}({x}, 0.5 + {y} ** 2)",
    "{int|round|np.sign|np.floor|math.ceil|np.round}({x})", "((1.2 + tanh({x})) ** tanh({y}))",
    "math.pow(1.5 + sin({x}), 0.5 * cos({y}))",
]  # fmt: skip
STATEMENTS = [
    *["s{0|1|2|3} = {x}"] * 26, *["{s} {+=|-=|*=} {x}"] * 14, *["y[b, {i}] {=|+=|=|-=|*=} {x}"] * 13,
    *["{a}[{i}] {=|+=|=|-=|*=} {x}"] * 5, *["s{0|1} = {x}"] * 7, *["m{0|1} = {2|0|-1}", "m{0|1} = ix[b, {i}]"] * 2,
    "m{0|1} = ({i} + 1) % n", "m{0|1} = n - 1 - abs({i})",
]  # fmt: skip
ROW = "{x[b]|x[b, :]|w|x[(b + 1) % x.shape[0]]|y[b]|x[b, 0:n]|w[0:n]}"
FILLED = "{q} = np.{zeros|empty}({size})\nfor {v} in range({size}):\n    {q}[{v}] = {inner}"
UPDATED = "for {v} in range(n):\n    {q}[{v}] {*=|+=|=} {q}[{v}] * {again}\n"
SPOKEN = [
    "{s}, {t} = {t}, {s}", "{s}, {t} = {t} * 0.5, {s} + {x}", "{s}, {t} = h3({t}, {s})",
    *["y[b, {i}], y[b, {j}] = y[b, {j}] * 0.5, {x} + y[b, {i}]"] * 3, *["if {atom} > {c}:\n    {leave}"] * 2,
    "if {atom} > {c}:\n    {s} += {x}\n    {leave}", "h5({a}, n, 0.5)", "h5(y[b], n{serial}, tanh(w[1]))",
    "h5(y[b, :], n - 1{serial}, 0.3)", *[f"{{s}} = h4({ROW}, {ROW}, {{x}})"] * 3,
    *["{r} = {x[b]|y[b]|x[b - 1, :]|w}\n{s} += {r}[{i}] * {r}[0] * 0.3"] * 2,
    "{r} = x[ix[b, {i}] % 2]\n{s} += {r}[{j}] * {r}[0] * 0.3",
    *(
        f"{made}\n{more}{{s}} += {{q}}[{{0|1|n - 1}}] * {{q}}[2]"
        for made, more in ((FILLED, ""), (FILLED, UPDATED), ("{q} = np.zeros({size})", UPDATED),
                           ("{q} = np.full({size}, 0.3)", UPDATED), ("{q} = w.copy()", UPDATED))
    ),
    *["k0 = int({x}) % n"] * 3, "{a}[:] = 0.2", "y[b, :] = w{serial}", "{a}[:] = x[b]", "{a}[0:n] = w",
    "for {v} in reversed(range({n|1, n})):\n    {s} += x[b, {v}] * {u} * 0.3",
    *["for {v}, {el} in enumerate({x[b]|w|y[b]}):\n    {s} = {u} * 0.5 + {el} * w[{v}]"] * 2,
]  # fmt: skip
"""Templates: `{a|b}` is one of its words, another name what the place has for it, the same wherever it stands."""


class Writer:
    """Writes one program."""

    def __init__(self, seed):
        self.below, self.lines, self.sums, self.locals, self.natural = random.Random(seed).randrange, [], 0, 0, False

    def pick(self, choices):
        return choices[self.below(len(choices))]

    def chance(self, percent):
        return self.below(100) >= 100 - percent

    def maybe(self, percent, text):
        return text if self.chance(percent) else ""

    def number(self):
        return f"{(10 - self.below(21)) / 10:.1f}"

    def line(self, depth, text):
        self.lines.append("    " * depth + text)

    def fill(self, template, names):
        """Write a template."""
        known = {}

        def word(found):
            if "|" in found[1]:
                return self.pick(found[1].split("|"))
            if found[1] not in known:
                known[found[1]] = names[found[1]]()
            return known[found[1]]

        return re.sub(r"\{(.*?)\}", word, template)

    def expr(self, depth, atoms, indices=()):
        if depth == 0 or self.below(10) < 2:
            return self.pick([*atoms, self.number()])
        powers = ["0", "1", "2", "3", *(f"({i} % 3)" for i in indices), *(f"ix[b, {i}]" for i in indices)]
        names = dict.fromkeys("xy", lambda: self.expr(depth - 1, atoms, indices)) | {"c": self.number}
        names |= {"atom": lambda: self.pick(atoms), "power": lambda: self.pick(powers)}
        return self.fill(self.pick(EXPRESSIONS + AS_PEOPLE_WRITE * self.natural), names)

    def atoms(self, scalars, indices, arrays):
        found = list(scalars)
        for i in indices:
            found += [f"x[b, {i}]", f"w[{i}]", f"y[b, {i}]", f"w[ix[b, {i}]]", f"x[(b + 1) % x.shape[0], {i}]"]
            found += [f"a[{i}]"] * ("a" in arrays) + [f"z[b, {i}]"] * ("z" in arrays)
            if {"a", "z"} <= {*arrays}:  # one iteration after the other
                found.append(f"(z[b - 1, {i}] if b > 0 else 0.2)")
        if indices and self.chance(30):
            found.append(f"x[b, ({indices[-1]} + 1) % n]")
        return found or ["0.7"]

    def statement(self, depth, templates, place, deep=1):
        """Write one of the templates for which the place has all names; what it assigns may be read from then on."""
        level, indices, scalars, arrays = place
        atoms, v = self.atoms(scalars, indices, arrays), f"g{self.locals}"
        names = {"atom": lambda: self.pick(atoms), "x": lambda: self.expr(deep, atoms, indices), "c": self.number}
        names |= {"v": lambda: v, "el": lambda: f"e{v}", "r": lambda: self.pick(["r0", "r1"])}
        names |= {"q": lambda: self.pick(["t0", "t1"]), "size": lambda: self.pick(["n", "n + 1", "x.shape[1]", "5"])}
        names |= dict.fromkeys(("inner", "again"), lambda: self.expr(1, [*scalars, f"w[{v} % n]", f"x[b, {v} % n]"]))
        if scalars:
            s, k = self.pick(scalars), self.below(len(scalars))
            names |= {"s": lambda: s, "u": lambda: scalars[k]} | ({"t": lambda: scalars[k]} if s != scalars[k] else {})
        if indices:
            names |= {"i": lambda: self.pick(indices), "j": lambda: self.pick([*indices, "1", "0"])}
        names |= {"a": lambda: "a", "serial": lambda: ""} if "a" in arrays else {}
        names |= {"leave": lambda: self.pick(["continue", "break"])} if level else {}
        self.locals += 1
        fit = [t for t in templates if {*re.findall(r"\{(\w+)\}", t)} <= names.keys()]
        for text in self.fill(self.pick(fit), names).splitlines():
            self.line(depth, text)
            if found := re.match(r"(s\d|[km]\d) = ", text):
                known = scalars if found[1][0] == "s" else indices
                known += [found[1]] * (found[1] not in known)

    def block(self, depth, level, indices, scalars, arrays):
        place = level, indices, scalars, arrays
        for _ in range(1 + self.below(3)):
            kind = self.below(100)
            if self.natural and self.chance(35):
                self.statement(depth, SPOKEN, place)
            elif kind < 8 and level < 2 and "a" in arrays:
                self.shifted_sum(depth, place)
            elif kind < 24 and level < 2:
                i = "ijk"[level] if self.chance(98) else self.pick(["i", "j", "k", "m0", "m1", "b"])
                ranges = [*RANGES, *(f"{j} + 1" for j in indices), *(f"{j}, n" for j in indices)]
                self.line(depth, f"for {i} in range({self.pick(ranges)}):")
                self.block(depth + 1, level + 1, [*indices, i], list(scalars), arrays)
            elif kind < 34 and depth < 6:
                self.line(depth, f"if {self.pick(self.atoms(scalars, indices, arrays))} > {self.number()}:")
                self.block(depth + 1, level, list(indices), list(scalars), arrays)
                if self.chance(50):
                    self.line(depth, "else:")
                    self.block(depth + 1, level, list(indices), list(scalars), arrays)
            elif kind == 99 and self.chance(25):  # an input is written; a loop's variable may be read after its loop
                self.line(depth, self.pick(["y[b, 0] += x[b, i] * x[b, i]", "x[b, 1] = w[1] * 0.5", "y[b, 1] = w[j]"]))
            else:
                self.statement(depth, STATEMENTS, place, 2)

    def shifted_sum(self, depth, place):
        """A sum of exponentials, its largest term taken off; written in one of several ways, some of them unusual."""
        _, indices, scalars, arrays = place
        self.sums += 1
        i, atoms = "uvpqrst"[self.sums % 7], self.atoms(scalars, indices, arrays)
        inner = [a for a in atoms if "[" in a and not a.startswith(("y", "a["))] or ["0.3"]
        term = f"{self.pick(inner)} * x[b, {i}] + w[{i}]" if self.chance(60) else f"x[b, {i}]"
        first = self.maybe(30, f"    a[{i}] = {term}\n")
        stored, term = first or self.chance(60), f"a[{i}]" if first else term
        each, loop = f"exp({term} - top)", f"for {i} in range(n):\n"
        text = f"top = -9.0\n{loop}{first}    top = max(top, {term})\ntotal = 0.0\n{loop}"
        text += f"    e = {each}\n    total += e\n    a[{i}] = e\n" if stored else f"    total += {each}\n"
        text += self.maybe(20, "{total|top|s0} += " + f"{self.pick(atoms)} * 0.1\n")
        text += self.maybe(70, "s1 = log(total) + top\n")
        if stored and self.chance(70):
            text += loop if self.chance(90) else f"for {i} in range(1, n):\n"
            divided = f"    a[{i}] /= total\n    y[b, {i}] += a[{i}]\n"
            text += divided if self.chance(50) else f"    y[b, {i}] += a[{i}] / total * x[b, {i}]\n"
        self.statement(depth, [text + self.maybe(15, "s2 = {total * 0.1|top|a[0]}")], place)

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


def defined(text, file, space):
    """Run a text whose lines stay readable; return its names with those that were given."""
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    exec(compile(text, file, "exec"), space)
    return space


def compiled(code, names=NAMES):
    """The function that a program's text defines; its source stays readable."""
    return defined(code, f"<program {hash(code)}>", defined(HELPERS, "<helpers>", dict(names)))["f"]


def function(body, params="x, y", **names):
    """A function of arrays from its body, in which n is the length of x."""
    return compiled(f"def f({params}):\n    n = x.shape[0]\n    {body}\n", NAMES | names)


def plain(backward):
    """A generated backward as plain Python, in float64, without the file that an import needs."""
    text = backward.text.replace("from numba import prange\n", "prange = range\n")
    text = text.replace("import push\n", "import push\npush = push.py_func\n")
    text = text.replace(" = np.float32(", " = float(")  # NumPy rounds float32 times a Python float, numba does not
    return defined(text, f"<backward {hash(text)}>", {})[backward.name]


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

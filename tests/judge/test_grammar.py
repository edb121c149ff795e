"""A walk through the grammar of what the rules allow, which tries to name what they do not: no such text runs it."""

import ast
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from candidates import HEAD

from cpuopt.errors import RefusedError
from cpuopt.judge import rules

TARGETS = "exec eval open compile getattr setattr type vars globals print input map sum iter object __import__"
TARGETS = sorted(rules.words(TARGETS))
BINDS = {
    "body": [
        *("T = a", "T = a", "T = max", "T, a = a, a", "T = T(CODE)", "T += a", "for T in range(2):\n    pass"),
        *("if a is T:\n    pass", "@helper()\ndef T(a):\n    return a", "@helper()\ndef g(T):\n    return T"),
        *("def T(a):\n    return a", "global T", "nonlocal T", "del T", "import T", "from math import pow as T"),
        *("class T:\n    pass", "with a as T:\n    pass", "try:\n    pass\nexcept Exception as T:\n    pass"),
        *("match a:\n    case T:\n        pass", "a = (T := a)", "a = [T for T in a]", "T: a = 1", "a, *T = a, a"),
        *("T.x = a", "a = lambda T: a", "a = lambda s: (T, s)", "T[0] = a", "for T[0] in range(2):\n    pass"),
        *("type T = a"),
    ],
    "file": [
        *("T = 2", "def T(a):\n    return a", "@helper()\ndef T(a):\n    return a", "from math import pow as T"),
        *("T = T", "T = made(T)", "T = np.exp", "T, X = 1, 2", "T = X = 1", "X = T = T", "T, X = T, 1", "T = T,"),
        *("import math as T", "T = [('x', 1)]", "T = lambda s: 1", "T = max", "for T in (1,):\n    pass", "global T"),
        *("class T:\n    pass", "def f(a, T=T):\n    return T", "def f(*T):\n    return T"),
        *("def f(*, T):\n    return T", "def f(a: T):\n    return a", "@T\ndef f(a):\n    return a"),
        *("@helper(fastmath=T)\ndef f(a):\n    return a", "def T():\n    return T(CODE)"),
    ],
}  # fmt: skip
"""Lines that bind the name T, or seem to, in a function and at the level of the file."""
USES = {
    "body": [
        *("a = T(CODE)", "a = T(CODE)", "T(CODE)", "return T(CODE)", "a = T", "a = made(T)", "a = (T, a)[0]"),
        *("return T", "if T(CODE):\n    pass", "while T(CODE):\n    break", "for a in T(CODE):\n    pass"),
        *("a += T(CODE)", "a = max(T(CODE), 1)", "a = T.py_func(CODE)", "a = T.__call__(CODE)", "a = (T)(CODE)"),
        *("a = (T, a)[0](CODE)", "a = (lambda s: T(CODE))(1)", "a = np.T(CODE)", "a = max.__self__"),
        *("a = np.sum.__globals__", "a = f'{T(CODE)}'", "a = T(*a)", "a = T(key=CODE)", "a = max(1, 2, key=T)"),
        *("a = np.zeros(1, dtype=T)", "a = helper()(T)", "a = a.T", "a = -T", "a = T if T else T", "a = T @ T"),
        *("a = a in T", "a = (yield T)", "a = inner.py_func(CODE)", "a = __builtins__"),
        *("@helper()\ndef g(a):\n    return T(CODE)", "return lambda s: T(CODE)"),
        *("@helper(fastmath=T)\ndef g(a):\n    return a"),
    ],
    "file": [
        *("X = T(CODE)", "X = T", "X = T, T", "X = made(T)", "X = made(T)(CODE)", "X = T.py_func(CODE)", "T(CODE)"),
        *("X = (lambda s: T(CODE))(1)", "X = [('x', T)]", "X = [('x', lambda s: T(CODE))]", "X = [T(CODE)]"),
        *("X = {T(CODE)}", "X = 1 if T(CODE) else 2", "X = (1, 2)[T]", "X = T < T", "X = np.float32(T)"),
        *("X = max.__self__", "X = np.T(CODE)", "def f(a):\n    return T(CODE)"),
        *("@helper()\ndef f(T):\n    return T(CODE)", "def f(a):\n    return lambda s: T(CODE)"),
    ],
}  # fmt: skip
"""Lines that name T."""
MADE = "def made(g):\n    @helper()\n    def inner(a):\n        return g(a)\n    return inner"
ENDS = ["\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029", "\r"]


class Walk:
    """A text from a seed: honest functions, in which a name of Python's is bound at one place and named at another."""

    def __init__(self, seed):
        self.rng, self.slots = random.Random(seed), list[str]()
        self.target = self.rng.choice(TARGETS)
        if self.rng.random() < 0.1:  # as letters that Python takes for these
            self.target = "".join(chr(ord(c) + 0xFEE0) if c.isalpha() else c for c in self.target)

    def slot(self, kind):
        """A place for lines, or for a parameter."""
        self.slots.append(kind)
        return f"<{len(self.slots) - 1}>"

    def statement(self):
        return self.rng.choice(["a = a + a", "a = max(a, a)", "b = a", "if a == 1:\n    a = a", "a = (a, a)[0]"])

    def function(self, name, kind):
        """A function: plain, with helpers inside; a helper; or the kernel, whose scratch has a size."""
        given, head = ["a", self.slot("name")], {"plain": "", "helper": "@helper()\n"}.get(kind, "")
        if kind == "kernel":
            head = "@kernel(ops.relu_forward, 'mine', scratch=[('x', lambda {}: {})])\n"
            head = head.format(self.slot("name"), self.rng.choice(["8", "f0(CODE, CODE)", "T(CODE)", "T"]))
            head = head if self.rng.random() < 0.3 else head.replace("T(CODE)", "8").replace(" T)", " 8)")
        lines, made = [self.slot("body")], "a"
        for i in range(self.rng.randint(1, 3)):
            nested = kind == "plain" and self.rng.random() < 0.6
            lines += [self.function(f"inner{i}", "helper") if nested else self.statement(), self.slot("body")]
            made += f", inner{i}" * nested
        lines.append(f"return {made}")
        body = "\n".join(lines).replace("\n", "\n    ")
        return f"{head}def {name}({', '.join(given)}):\n    {body}"

    def text(self):
        items = [MADE, self.slot("file")]
        for i in range(self.rng.randint(1, 3)):
            items += [self.function(f"f{i}", self.rng.choice(["plain", "plain", "helper"])), self.slot("file")]
            items += [f"X{i} = f{i}(CODE, CODE)"] * (self.rng.random() < 0.8)
        items += [self.function("relu_forward", "kernel"), self.slot("file")]
        text, filled = "\n".join(items), dict.fromkeys(range(len(self.slots)), "")
        at = self.rng.randrange(len(self.slots))
        for lines in [BINDS] * self.rng.randint(0, 2) + [USES] * self.rng.randint(0, 2):
            at = min(max(at + self.rng.randint(-7, 7), 0), len(self.slots) - 1)  # some function further
            kind = self.slots[at]
            usual = 7 if self.rng.random() < 0.6 else None
            filled[at] = "T" if kind == "name" else self.rng.choice(lines[kind][:usual])
        for at, lines in filled.items():
            text = self.put(text, f"<{at}>", lines or ("b" if self.slots[at] == "name" else "pass"))
        text = f"{HEAD}\nCODE = 99\n\n" + text.replace("\npass\n", "\n").removesuffix("\npass") + "\n"
        if self.rng.random() < 0.05:
            text = f"# a comment{self.rng.choice(ENDS)}T(CODE)\n{text}"
        return re.sub(r"\bT\b", self.target, text)

    @staticmethod
    def put(text, place, lines):
        """Write lines to a place, as far to the right as it stands."""
        line = next(x for x in text.split("\n") if place in x)
        return text.replace(place, lines.replace("\n", "\n" + " " * (len(line) - len(line.lstrip()))))


def accepted(texts):
    for text in texts:
        try:
            rules.read(text)
        except RefusedError:
            continue
        yield text


def breaches(texts):
    """Run texts in a process that looks on; return what they did, with the text."""
    asked = {"texts": texts, "allowed": sorted(rules.BUILTINS)}
    script = str(Path(__file__).with_name("audited.py"))
    made = subprocess.run([sys.executable, script], input=json.dumps(asked), capture_output=True, text=True, check=True)
    return {(what, texts[i]) for i, what in json.loads(made.stdout.splitlines()[-1])}


def walk(count):
    return [Walk(seed).text() for seed in range(count)]


@pytest.fixture(scope="module")
def texts():
    return walk(1500)


def test_no_text_that_the_rules_allow_names_what_they_do_not(texts):
    allowed = [*accepted(texts)]
    assert 0.1 < len(allowed) / len(texts) < 0.5
    assert breaches(allowed) == set()


@pytest.mark.slow
def test_none_of_ten_thousand_texts_does():
    assert breaches([*accepted(walk(10_000))]) == set()


def of_all_scopes(node):
    """Return the names that a function binds, and with them those of functions in it."""
    stored = (x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store))
    return iter([*stored, *(x.name for x in ast.walk(node) if isinstance(x, ast.FunctionDef) and x is not node)])


def bound_first(self, node):
    """Let an assignment's own names stand on its right."""
    for target in node.targets:
        self.bound |= {x.id: "constant" for x in ast.walk(target) if isinstance(x, ast.Name)}
    self.option(node.value)


MUTANTS = {
    "a local of one function is known in others": (rules, "_stored", of_all_scopes),
    "a name is known before the line that binds it": (rules, "PYTHONS", frozenset()),
    "a name is known in the line that binds it": (rules._Text, "assigned", bound_first),
    "any function may be called": (rules._Text, "meaning", lambda self, name: "function"),
}
"""Rules that are broken."""


@pytest.mark.parametrize("name", MUTANTS)
def test_the_walk_finds_a_broken_rule(name, texts, monkeypatch):
    usual = {*accepted(texts)}
    monkeypatch.setattr(*MUTANTS[name])
    assert breaches([text for text in accepted(texts) if text not in usual])

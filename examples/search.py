"""Search for a faster kernel, with the judge.

A naive kernel's text is changed, judged, and kept if it wins. Nothing here knows kernels: `REWRITES` change a text
without a thought of whether it stays right, which the judge finds out. A program that writes kernels stands in their
place. `OP=softmax_forward SECONDS=300 MODEL=gpt2-124M THREADS=1 OUT=x.json` in front of the command searches longer, on
one thread, and keeps the curve.
"""

import ast
import copy
import itertools
import json
import os
import random
import time

from cpuopt import ops
from cpuopt.judge import naive
from cpuopt.judge.session import Judge, ModelSizes

OP, MODEL = os.environ.get("OP", "gelu_forward"), os.environ.get("MODEL", "gpt2-tiny")
SECONDS, SEED = float(os.environ.get("SECONDS", "10")), int(os.environ.get("SEED", "0"))
THREADS, OUT = int(os.environ.get("THREADS", "0")) or None, os.environ.get("OUT")
TANH = "np.float32(2) / (exp2(np.float32(-2.88539008) * ({0})) + np.float32(1)) - np.float32(1)"  # -2 / ln 2
EXP = "exp2(np.float32(1.44269504) * ({0}))"  # 1 / ln 2
FORMULAS = {"max": ["maximum({0}, {1})"], "np.exp": [EXP], "np.tanh": ["tanh({0})", TANH], "tanh": [TANH]}
"""Ways to write a function with the toolkit's; another may be faster, or lose digits."""
IMPORTS = "from cpuopt.kernels.toolkit.fastmath import exp2, maximum, tanh\n"


def loops(tree):
    """List the loops over one range, each with the list of statements that it stands in."""
    bodies = [b for n in ast.walk(tree) if isinstance(b := getattr(n, "body", None), list)]
    found = [(b, n) for b in bodies for n in b if isinstance(n, ast.For) and isinstance(n.iter, ast.Call)]
    return [(b, n) for b, n in found if len(n.iter.args) == 1]


def inner(loop):
    """List the loops inside a loop."""
    return [n for n in ast.walk(loop) if isinstance(n, ast.For) and n is not loop]


def innermost(tree):
    """List the loops that one thread does and that have none inside, as `loops` does."""
    return [(b, n) for b, n in loops(tree) if n.iter.func.id == "range" and not inner(n)]


def sums(loop):
    """List the names to which a loop adds."""
    return [s.target.id for s in loop.body if isinstance(s, ast.AugAssign) and isinstance(s.target, ast.Name)]


def named(node, names):
    """Copy a statement with other expressions in the place of names."""

    class Rename(ast.NodeTransformer):
        def visit_Name(self, found):
            return ast.parse(names[found.id], mode="eval").body if found.id in names else found

    return Rename().visit(copy.deepcopy(node))


def vectorize(tree):
    """Write functions with the toolkit's: a loop around them becomes vectors."""

    class Write(ast.NodeTransformer):
        def visit_Call(self, call):
            forms, args = FORMULAS.get(ast.unparse(self.generic_visit(call).func)), map(ast.unparse, call.args)
            return ast.parse(random.choice(forms).format(*args), mode="eval").body if forms else call

    Write().visit(tree)


def block(tree):
    """Give each thread blocks of the outer loop."""
    body, loop = random.choice([(b, n) for b, n in loops(tree) if n.iter.func.id == "prange"])
    i, end = ast.unparse(loop.target), ast.unparse(loop.iter.args[0])
    size = f"BLOCK_{len(tree.body)}"
    ends = f"range(b * {size}, min({end}, (b + 1) * {size}))"
    made = ast.parse(f"for b in prange(({end} + {size} - 1) // {size}):\n    for {i} in {ends}:\n        pass").body[0]
    made.body[0].body = loop.body
    body[body.index(loop)] = made
    number = ast.parse(f"{size} = {random.choice((4, 16, 256, 1024, 4096))}").body
    tree.body[-1:] = [*number, tree.body[-1]]


def unroll(tree):
    """Do some turns of an inner loop at a time, each with sums and maxima of its own."""
    body, loop = random.choice(innermost(tree))
    i, end, k, at = ast.unparse(loop.target), ast.unparse(loop.iter.args[0]), random.choice((2, 4, 8)), body.index(loop)
    tops = [s.targets[0].id for s in loop.body if isinstance(s, ast.Assign) and "max" in ast.unparse(s)[:20]]
    turns, before, after = [], [], []
    for turn in range(k):
        own = {x: f"{x}_{turn}" for x in sums(loop) + tops} if turn else {}
        turns += [named(s, {i: f"({i}_0 * {k} + {turn})", **own}) for s in loop.body]
        before += [f"{own[x]} = {x}" if x in tops else f"{own[x]} = np.float32(0)" for x in own]
        after += [f"{x} = max({x}, {own[x]})" if x in tops else f"{x} += {own[x]}" for x in own]
    whole = ast.parse(f"for {i}_0 in range({end} // {k}):\n    pass").body[0]
    rest = ast.parse(f"for {i} in range({end} // {k} * {k}, {end}):\n    pass").body[0]
    whole.body, rest.body = turns, loop.body
    body[at : at + 1] = [*ast.parse("\n".join(before)).body, whole, rest, *ast.parse("\n".join(after)).body]


def guess(tree):
    """Let a loop do its first turns alone; where a sum of the next loop comes out large or NaN, do both anew, whole."""
    pairs = itertools.pairwise(innermost(tree))
    body, loop, then = random.choice([(b, n, m) for (b, n), (c, m) in pairs if b is c and sums(m)])
    check = ast.parse(f"if not abs({sums(then)[0]}) < np.float32(1e30):\n    pass").body[0]
    check.body = copy.deepcopy(body[body.index(loop) : body.index(then) + 1])
    body.insert(body.index(then) + 1, check)
    end, few = ast.unparse(loop.iter.args[0]), random.choice((64, 256, 1024))
    loop.iter = ast.parse(f"range(min({end}, {few}))", mode="eval").body


def order(tree):
    """Exchange two loops, one of which has only the other inside."""
    outer = random.choice([n for _, n in loops(tree) if len(n.body) == 1 and isinstance(n.body[0], ast.For)])
    (last,) = outer.body
    outer.target, outer.iter, last.target, last.iter = last.target, last.iter, outer.target, outer.iter


def axis(tree):
    """Let the threads share another loop."""
    outer = random.choice([n for _, n in loops(tree) if inner(n)])
    last = random.choice(inner(outer))
    outer.iter.func.id, last.iter.func.id = last.iter.func.id, outer.iter.func.id


def number(tree):
    """Double or halve a number of the file."""
    every = [n for n in tree.body if isinstance(n, ast.Assign) and isinstance(n.value, ast.Constant)]
    value = random.choice(every).value
    value.value = max(1, random.choice((value.value * 2, value.value // 2)))


REWRITES = (vectorize, block, unroll, guess, order, axis, number)


def mutated(text):
    """Return another text of the kernel."""
    tree = ast.parse(text)
    for rewrite in random.sample(REWRITES, random.randint(1, 2)):
        try:
            rewrite(tree)
        except IndexError:  # there is nothing that it could change
            continue
    return ast.unparse(ast.fix_missing_locations(tree))


random.seed(SEED)
best = text = IMPORTS + naive.text_of(ops.ALL[OP])
start, score, seen, curve = time.monotonic(), 0.0, set(), []
with Judge(THREADS) as judge:
    while text not in seen and (not seen or time.monotonic() - start < SECONDS):
        seen.add(text)
        found = judge.time(text, OP, ModelSizes(MODEL))
        at_least, ratio = found.timed.get("score", 0.0), found.timed.get("ratio")  # a refused one has neither
        seconds = time.monotonic() - start
        curve.append({"s": seconds, "verdict": found.verdict, "score": at_least, "ratio": ratio})
        if at_least > score:
            best, score = text, at_least
            print(f"{seconds:5.0f} s, try {len(seen):2}: at least {score:.2f} times as fast as optimized", flush=True)
            if OUT:
                with open(OUT, "w") as file:
                    json.dump({"op": OP, "model": MODEL, "seed": SEED, "tries": curve, "best": best}, file, indent=1)
        text = next((t for t in (mutated(best) for _ in range(99)) if t not in seen), best)
print(best)

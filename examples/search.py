"""Search for a faster kernel, with the judge.

A naive kernel's text is changed, judged, and kept if it wins. Nothing here knows kernels: `mutated` has two rewrites of
a text. A program that writes kernels stands in its place. `SECONDS=300 MODEL=gpt2-124M OP=gelu_backward` in front of
the command searches longer.
"""

import ast
import os
import random
import time

from cpuopt import ops
from cpuopt.judge import naive
from cpuopt.judge.session import REFUSED, Judge, ModelSizes

OP, MODEL = os.environ.get("OP", "gelu_forward"), os.environ.get("MODEL", "gpt2-tiny")
SECONDS = float(os.environ.get("SECONDS", "10"))
POLYNOMIALS = {"np.tanh": "tanh", "np.exp": "exp", "np.maximum": "maximum", "max": "maximum"}


def vectorize(tree):
    """Call the toolkit's polynomials: a loop around them becomes vectors."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := POLYNOMIALS.get(ast.unparse(node.func))):
            node.func = ast.Name(name)
            names.add(name)
    if names:
        tree.body[:0] = ast.parse(f"from cpuopt.kernels.toolkit.fastmath import {', '.join(sorted(names))}").body


def block(tree):
    """Give each thread blocks of a loop over elements."""
    kernel = tree.body[-1]
    loop = kernel.body[-1]
    if "BLOCK" in ast.unparse(tree) or any(isinstance(n, ast.For) for n in ast.walk(loop) if n is not loop):
        return
    i, end = ast.unparse(loop.target), ast.unparse(loop.iter.args[0])
    text = (
        f"for b in prange(({end} + BLOCK - 1) // BLOCK):\n    for {i} in range(b * BLOCK, min({end}, (b + 1) * BLOCK)):"
    )
    kernel.body[-1:] = ast.parse(f"{text}\n        pass").body
    kernel.body[-1].body[0].body = loop.body
    tree.body[-1:] = [*ast.parse(f"BLOCK = {random.choice((256, 1024, 4096))}").body, kernel]


def mutated(text):
    """Return another text of the kernel."""
    tree = ast.parse(text)
    for rewrite in random.sample((vectorize, block), random.randint(1, 2)):
        rewrite(tree)
    return ast.unparse(ast.fix_missing_locations(tree))


random.seed(0)
best = text = naive.text_of(ops.ALL[OP])
start, score, seen = time.monotonic(), 0.0, set()
with Judge() as judge:
    while not seen or (time.monotonic() - start < SECONDS and len(seen) < 30):
        seen.add(text)
        found = judge.time(text, OP, ModelSizes(MODEL))
        speed = 0.0 if found.verdict in REFUSED else 1 / found.timed["ratio"]["median"]
        if speed > score:
            best, score = text, speed
            print(f"{time.monotonic() - start:5.0f} s, try {len(seen):2}: {speed:.2f} times as fast as optimized")
        text = next((t for t in (mutated(best) for _ in range(99)) if t not in seen), best)
print(best)

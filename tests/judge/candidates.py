"""Candidates for the judge: hostile ones in classes, honest twins, and the package's own kernels as text."""

from __future__ import annotations

from contextlib import suppress
from functools import cache

from cpuopt import ops
from cpuopt.errors import UserError
from cpuopt.judge import naive
from cpuopt.kernels.registry import KERNELS

HEAD = "import numpy as np\nfrom numba import prange\n\nfrom cpuopt import helper, kernel, ops\n"


def relu(top="", before="", each="max(inp[i], ZERO)", after="", options=", parallel=False", loop="range", name="mine"):
    """Write a ReLU with lines above it, before, in and after its loop."""
    inside = "".join(f"    {line}\n" for line in before.splitlines())
    end = "".join(f"    {line}\n" for line in after.splitlines())
    return (
        f"{HEAD}{top}\n\nZERO = np.float32(0)\n\n\n@kernel(ops.relu_forward, {name!r}{options})\n"
        f"def relu_forward(out, inp):\n{inside}    for i in {loop}(inp.shape[0]):\n        out[i] = {each}\n{end}"
    )


HONEST_RELU = relu()

# What only one rule stops ---------------------------------------------------------------------------------------------

ONLY = {
    "text": HONEST_RELU + "#" * (256 << 10), "statement": relu("for i in range(3):\n    pass"),
    "import": relu("import os"), "toolkit": relu("from cpuopt.kernels.toolkit.lanes import Lanes"),
    "name": relu(before="_x = 1"), "shadow": relu("COUNT = 0\nCOUNT = 1"), "constant": relu("SEEN = [0]"),
    "power": relu("BIG = 2 ** 4096"), "decorator": relu("@np.exp\ndef f(x):\n    return x"),
    "option": relu(options=", parallel=False, same_bits=False"),
    "signature": relu("@helper()\ndef f(x=1):\n    return x"), "syntax": relu(before="with out:\n    pass"),
    "text constant": relu(before="x = 'text'"), "literal": relu(before="x = 100000000000000000000000"),
    "call": relu("@helper()\ndef f(g):\n    return g(1)"), "numpy": relu(each="np.cbrt(inp[i])"),
    "math": relu("from math import gamma"), "attribute": relu(before="x = inp.strides"),
    "library": relu(before="x = inp @ inp"), "keyword": relu(before="x = np.zeros(4, order=1)"),
}  # fmt: skip
"""By rule, a text that it alone stops."""

# Hostile texts that a rule stops --------------------------------------------------------------------------------------

IMPORTS = {
    "forgery": "os sys socket subprocess mmap multiprocessing.shared_memory fcntl io logging",
    "stealing": "gc inspect ctypes faulthandler tracemalloc cpuopt.check.judge cpuopt.check.cases",
    "deferred": "threading asyncio concurrent.futures atexit signal queue",
    "replay": "pickle shelve tempfile pathlib shutil sqlite3 marshal",
    "seeds": "random secrets time numpy.random uuid",
    "fallback": "scipy torch numpy.linalg cffi cpuopt.kernels.blas cpuopt.kernels.optimized.gelu",
    "surroundings": "resource psutil numba threadpoolctl cpuopt.kernels.toolkit.threads cpuopt.machine",
    "other side": "cpuopt.kernels.registry cpuopt.measure.comparison cpuopt.lab.ab importlib builtins",
}
"""By class, modules that no kernel needs."""
FROM = [
    "from numba import objmode", "from numba import carray", "from numba import cfunc", "from numba import njit",
    "from numba.extending import intrinsic", "from numba.core import types", "from numba import config",
    "from llvmlite import binding", "from cpuopt.kernels.toolkit.lanes import ir",
    "from cpuopt.kernels.toolkit.simd import machine_code", "from cpuopt.kernels.toolkit.simd import at, put_place",
    "from cpuopt.kernels.toolkit.simd import listed_pair_product", "from cpuopt.kernels.toolkit.queue import numba",
    "from . import corpus", "from cpuopt import registry", "from cpuopt import load_kernels",
    "from cpuopt.ops import gelu", "from cpuopt.ops.declaration import Op", "from numpy import *",
]  # fmt: skip
TOPS = {
    "warm-up": ["SEEN = {}", "COUNT = [0]", "COUNT = np.zeros(1)", "COUNT = np.array(0)", "prange = 1"],
    "work at import": [
        *("print(1)", "open('x', 'w')", "while True:\n    pass", "class A:\n    pass", "assert 1", "del np"),
        *("try:\n    pass\nexcept Exception:\n    pass", "if 1:\n    pass", "with open('x') as f:\n    pass"),
        *("X = open('x')", "X = (lambda: 1)()", "X = [i for i in range(9)]", "X = np.load('x')", "X = eval('1')"),
        *("X = __import__('os')", "X = np.__dict__", "X = ().__class__", "X = kernel", "X = ops", "Y = np"),
        *("np.array_equal = max", "ops.relu_forward = 1", "X = 9 ** 9 ** 9", "X = 1 << 99999", "X = b'text'"),
        *("X = 1j", "def f():\n    return f\n\n\nX = f.gi_frame", "X = f'{1}'", "X: int = 1", "X = (Y := 1)"),
        "async def f():\n    return 1",
        "X = np.getbufsize()",
    ],
}
BODIES = {
    "forgery": ["print(1)", "x = open('x')", "x = input()", "raise ValueError", "assert False"],
    "stealing": ["x = globals()", "x = locals()", "x = inp.base", "x = vars()", "x = id(inp)", "x = inp.__class__"],
    "way out": [
        *("x = inp.ctypes", "x = inp.view(np.int32)", "x = inp.data", "x = inp.flat", "x = inp.tobytes()"),
        *("x = np.frombuffer(inp)", "x = np.ctypeslib", "x = np.lib.stride_tricks.as_strided(inp)", "x = eval('1')"),
        *("x = getattr(inp, 'data')", "x = inp.__array_interface__", "x = [1, 2]", "x = {1: 2}", "x = lambda: 1"),
        *("x = [i for i in inp]", "x = (yield)", "def f():\n    return 1", "try:\n    x = 1\nfinally:\n    1"),
        *("x = f'{inp}'", "del inp", "x = inp is out", "x = 1 in inp", "inp.shape = (1,)", "import os"),
    ],
    "warm-up": ["global ZERO", "relu_forward.n = 1", "x = relu_forward.calls", "nonlocal x"],
    "seeds": ["np.random.seed(0)", "x = np.random.default_rng(0)"],
    "fallback": ["x = np.dot(inp, inp)", "x = inp @ inp", "x = np.einsum(inp)", "x = np.linalg.norm(inp)",
                 "x = inp.dot(inp)", "x = np.matmul(inp, inp)", "x = np.vdot(inp, inp)"],
    "residency": ["x = np.empty(9)", "x = np.empty_like(inp)", "x = np.ndarray(9)", "x = np.array(inp)",
                  "x = inp.copy()"],
    "replay": ["np.save('x', inp)", "x = np.memmap('x')", "x = np.fromfile('x')", "inp.tofile('x')"],
}  # fmt: skip
PYTHON = {
    "way out": ["x = [1]", "x = {1: 2}", "x = f'{a}'", "x = (y := a)", "x = a.__class__", "x = a.__code__", "a.x = 1",
                "x = [i for i in a]", "import os", "yield a", "global ZERO", "x = open('x')", "x = type(a)"],
    "warm-up": ["a[0] = a[0] + 1", "a[()] += 1", "x = np.zeros(1)\n    x[0] = 1", "a['N'] = 0"],
}  # fmt: skip
"""Lines of a function of Python, which sizes scratch."""
OPTIONS = [
    "jit=False", "same_bits=False", "boundscheck=True", "nogil=True", "forceobj=True", "of='bfloat16'",
    "error_model='python'", "debug=True", "cache=True", "shown=max", "inline='always'", "**X",
]  # fmt: skip
SIGNED = ["def f(a, /, b=[]):", "def f(*a):", "def f(a: int):", "def f(a) -> int:", "def f(*, a):"]
"""Functions of Python with more than names of parameters."""
RUN_CODE = (
    "def run(code):\n    @helper()\n    def one(x):\n        {}\n        return x\n    @helper()\n    def two(x):\n"
)
RUN_CODE += "        return exec(x)\n    return two\n\n\nX = run(1)"
SIZED = "def size(a):\n    {}\n    return a"
NAMES = [
    *(RUN_CODE.format(x) for x in ["exec = x", "for exec in x:\n            pass", "exec, x = x, x", "exec += x"]),
    RUN_CODE.format("x = 1").replace("def one(x)", "def one(x, exec)"),
    RUN_CODE.format("x = 1").replace("exec(x)", "\uff45xec(x)").replace("x = 1", "\uff45xec = 1"),
    RUN_CODE.format("x = 1").replace("    return two", "    exec = 1\n    return (lambda exec, /, x: exec(x))"),
    "def size(a):\n    return open(a)\n\n\nX = size('x')\n\n\ndef open(a):\n    return a",
    "def size(a):\n    return lambda s: eval(s)\n\n\nX = size(1)\n\n\n@helper()\ndef eval(a):\n    return a",
    *("open = open", "open, X = open, 1", "X = open = open", "from math import pow as open\nopen = open"),
    "X = exec, eval",
    "def made(g):\n    @helper()\n    def f(x):\n        return g(x)\n    return f\n\n\nX = made(compile)",
    "def made(helper):\n    @helper()\n    def f(x):\n        return x\n    return f",
    "def made(FLAGS):\n    @helper(fastmath=FLAGS)\n    def f(x):\n        return x\n    return f",
    "def made(x):\n    def f(y):\n        return y\n    return f",
    *("X = np.sum.__globals__", "X = np.exp.__class__", "X = max.__self__", "X = math", "X = __builtins__"),
    "X = __name__",
    # arithmetic on texts shows addresses
    *("X = '%r' % (max,)", "X = 'abc'", "X = ('a', 'b')", "X = int('9', 16)", "X = len('abc')", "X = 'a' * 9"),
    *(f"def f(a):\n    return {x}" for x in ("'%r' % (a,)", "len('%r' % (f,))", "int('9')", "'N'[0] in a")),
    *("X = helper()(max)", "X = kernel(ops.relu_forward, 'x')(max)", "X = ops.relu_forward", "X = (lambda s: 1)(2)"),
    *("import cpuopt.judge.rules", "from cpuopt.judge.rules import NAMES", "from cpuopt.judge.rules import GUARD as g"),
    *("from cpuopt.judge.rules import NAMES as names", "from cpuopt.judge.rules import importing as __builtins__"),
    *("@helper()\n@helper()\ndef f(x):\n    return x", "@helper\ndef f(x):\n    return x"),
    "f = 1\n@f()\ndef g(x):\n    return x",
    *("def f(x, g=exec):\n    return g(x)", "def f(x, *, g):\n    return g(x)", "def f(x: exec):\n    return x"),
]  # fmt: skip
"""Lines of a file that name what only another scope, a later line or nothing binds."""
NAMED = [
    *("return __class__", "return __builtins__", "return size.py_func(a)", "return size.__globals__"),
    "return size.T.base",
    *("exec = 1\n    return exec(a)", "from builtins import exec", "global exec", "nonlocal a", "del a"),
    "return helper()(a)", "match a:\n        case exec:\n            return exec(a)",
    "try:\n        a = 1\n    except Exception as exec:\n        a = 2",
    *("class exec:\n        a = 1", "with a as exec:\n        return exec", "return [exec for exec in a]"),
    "exec: a = 1", *("return (lambda exec, /, b: exec(b))", "return (lambda b, n=a: n)", "return (lambda *b: b)"),
    "return f'{a!r:{a}}'",
    *("return kernel", "return ops", "return np", "return prange.__doc__", "return math.exp", "return a(1)"),
    "return (a)(a)",
]  # fmt: skip
"""The same in a function of Python."""
KEPT = [
    *("LIST = [('x', 1)]\n\n\ndef f(a):\n    x = LIST\n    x += x\n    return len(x)", "A = [('x', 1)]\nA += A"),
    *("A = [('x', 1)]\nB = (A, 1)", "A = [('x', 1)]\nB = len(A)", "A = ([('x', 1)], 1)", "A = [('x', 1)] * 2"),
    "A = {('x', 1)}", "def f(a):\n    return lambda s: len(a)\n\n\nX = f([('x', 1)])",
    "from cpuopt.kernels.toolkit.fastmath import EXACT\n\n\n@helper()\ndef f(x):\n    return len(EXACT)",
    *(SIZED.format(x) for x in ["a, *b = a", "x = np.zeros(1, 'O')", "x = np.float32(1, dtype=a)"]),
    *(SIZED.format(x) for x in ["a.x += 1", "a['N'] += 1", "a |= (('N', 1),)", "size.n = 1"]),
    SIZED.format("for a[0] in a:\n        pass"),
    *(SIZED.format(x) for x in ["x = np.cumsum(a)", "x = a.sum(None, 'O')"]),
    *("X = np.ones(3)", "X = np.sum((1, 2))", "X = np.exp(1.0, dtype='O')", "X = np.where(1, 2, 3)"),
]  # fmt: skip
"""Lines of a file by which sizes could count their calls."""
TEXTS = [
    "# coding: utf-7\n# +AAo-import os+AAo-\n" + HONEST_RELU,
    "# -*- coding: unicode_escape -*-\n# \\nimport os\n" + HONEST_RELU,
    "# A ReLU.\n# vim: fileencoding=utf-7\n# +AAo-open('x')+AAo-\n" + HONEST_RELU, "# coding: nothing\n" + HONEST_RELU,
    relu(before="# a comment\rimport os"), relu(before="x = \uff45val('1')"), "\ufeff" + relu("import os"),
    HONEST_RELU + "\n" * (257 << 10), relu(before="x = " + "(" * 150 + "1" + ")" * 150 + " + (" * 0 + " + 1" * 300),
    relu(before="x = " + "-" * 900 + "1"), HONEST_RELU.replace("\n", "\n\0", 1), "def f(:\n", "",
    relu().replace("@kernel(ops.relu_forward, 'mine', parallel=False)\n", ""),
    relu().replace("ops.relu_forward", "ops.gelu_forward"), relu().replace("ops.relu_forward", "kernel"),
    relu().replace("'mine'", "'a' + 'b'"), relu(top=relu(name="other")), "\x0cimport os\n" + HONEST_RELU,
    "# a comment \\\nimport os\n" + HONEST_RELU, "X = 1; import os\n" + HONEST_RELU,
    "# coding: latin-1\n" + relu('"""\u00e9"""'), "# coding: raw_unicode_escape\n# \\u000aimport os\n" + HONEST_RELU,
    "\n# vim: set fileencoding=cp037 :\n" + HONEST_RELU, "\ufeff# coding: latin-1\n" + HONEST_RELU,
    "\ufeff\ufeff" + HONEST_RELU, relu("X = (" + "1," * 40_000 + ")"), relu("X = " + "(" * 250 + ")" * 250),
    relu(before="x = 1\n\tx = 2"), relu(each="ZERO\u2028x = 2"), relu(each="ZERO\x0bimport os"),
    relu(before="x = '\ud800'"), HONEST_RELU + "\x1a",
    HONEST_RELU.replace("import helper, kernel, ops", "import helper, kernel\n\nops = 1"), relu(name="mine\nimport os"),
    relu(name="mi ne"), relu().replace("ops.relu_forward", "ops.__dict__"),
    relu().replace("ops.relu_forward", "ops.relu_forward.reference"),
    *(relu(before=x) for x in ("x = np.zeros(4, dtype=inp)", "x = np.zeros(4, inp)", "x = np.full(4, 0, inp)")),
    *(relu(before=x) for x in ("x = max(1, 2, key=abs)", "x = np.zeros(4, like=inp)", "x = inp.sum(out=out)")),
    relu(before="x, *y = inp"),
]  # fmt: skip


def refused():
    """List the texts that a rule stops: class, what it tries, text."""
    found = [(of, f"import {m}", relu(f"import {m}")) for of, names in IMPORTS.items() for m in names.split()]
    found += [("way out", line, relu(line)) for line in FROM]
    found += [(of, top, relu(top)) for of, tops in TOPS.items() for top in tops]
    found += [(of, body, relu(before=body)) for of, bodies in BODIES.items() for body in bodies]
    found += [(of, f"def f: {x}", relu(f"def f(a):\n    {x}\n    return a")) for of, xs in PYTHON.items() for x in xs]
    found += [("promises", line, relu(f"{line}\n    return a")) for line in SIGNED]
    found += [("promises", o, relu(options=f", {o}")) for o in OPTIONS]
    found += [("names", line, relu(line)) for line in NAMES]
    found += [("names", f"def size: {line}", relu(SIZED.format(line))) for line in NAMED]
    found += [("warm-up", line, relu(line)) for line in KEPT]
    return found + [("text", f"{i} {text[:40]!r}", text) for i, text in enumerate(TEXTS)]


# Hostile texts that must run ------------------------------------------------------------------------------------------

LANES = "from cpuopt.kernels.toolkit.lanes import load, spread, store"
SCRATCH = "parallel=False, scratch=[('x', {})]"


def scratched(size, **more):
    """Write a ReLU with scratch of some size."""
    return relu(**more).replace("parallel=False", SCRATCH.format(size)).replace("(out, inp)", "(out, inp, x)")


MANY = [f"x{i}" for i in range(8)]
LAST = "n = inp.shape[0]\nif n > 1000 and {}:\n    out[n - 1] = ZERO - np.float32(1)"
LATER = "max(inp[i], ZERO) if {} < 9 else out[i]"
RUN = {
    "outside": {
        "reads after the end": relu(each="max(inp[i], ZERO) + ZERO * inp[i + 1]"),
        "reads before the beginning": relu(each="max(inp[i], ZERO) + ZERO * inp[i - inp.shape[0] - 1]"),
        "writes after the end": relu(after="out[inp.shape[0]] = ZERO"),
        "writes far away": relu(after="out[inp.shape[0] + 100000000] = ZERO"),
        "loads whole vectors": relu(LANES, after="store(out, inp.shape[0] - 1, spread(ZERO))"),
    },
    "state": {
        "counts calls far behind": relu(before="n = np.int64(1 << 31)\nout[n] += 1", each=LATER.format("out[n]")),
        "counts calls far ahead": relu(before="n = np.int64(1 << 30)\ninp[n] += 1", each=LATER.format("inp[n]")),
        "counts calls beside a row of its own": relu(before="x = np.zeros(8, np.float32)\nx[1 << 27] += 1",
                                                     each=LATER.format("x[1 << 27]")),
        "counts calls in scratch": scratched(8, before="x[0] = x[0] + 1 if x[0] > 0 else 1", each=LATER.format("x[0]")),
    },
    "arithmetic": {
        "calls itself for ever": relu("@helper()\ndef f(x):\n    return f(x + 1) if x > 0 else x", before="n = f(1)"),
        "has no end in a size": scratched("lambda sizes: f(sizes['N'])", top="def f(n):\n    return f(n + 1)"),
        "has a size that is no number": scratched("lambda sizes: 0.0 * math.inf", top="import math"),
        "has a negative size": scratched("lambda sizes: -sizes['N']"),
    },
    "order": {
        "adds in a race": relu(before="t = np.zeros(1, np.float32)", options="", loop="prange",
                               after="for j in prange(4096):\n    t[0] += inp[j % inp.shape[0]]\nout[0] += t[0]"),
    },
    "sizes": {
        "the tail of a long array": relu(after=LAST.format("n % 1024 == 1023")),
        "one more than blocks": relu(after=LAST.format("n % 512 == 1")),
        "no NaN in whole vectors": relu(
            each="max(inp[i], ZERO) if inp.shape[0] % 64 > 0 or inp[i] == inp[i] else ZERO"),
    },
    "limits": {
        "asks for much scratch": scratched("lambda sizes: sizes['N'] * 999999"),
        "asks for much scratch in many arrays": relu().replace("(out, inp)", f"(out, inp, {', '.join(MANY)})").replace(
            "parallel=False", f"parallel=False, scratch=[{', '.join(f'({n!r}, 1 << 22)' for n in MANY)}]"),
        "takes all memory": relu(before="x = np.zeros(1 << 36, np.float32)", each="max(inp[i], ZERO) + x[i]"),
        "divides by zero in a size": scratched("lambda sizes: 1 // 0"),
    },
}  # fmt: skip
"""By class and name, texts that the rules allow, and that a sandbox, a draw or the compiler has to stop. What `check`
finds wherever a kernel runs is in `bad.py`."""
SIZELESS = ("has no end in a size", "has a size that is no number", "has a negative size", "divides by zero in a size")
FOUND = dict.fromkeys(SIZELESS, ("compile error", "")) | {
    "asks for much scratch": ("compile error", "elements of scratch 'x'; expected up to"),
    "asks for much scratch in many arrays": ("compile error", "asks for 33,554,432 elements of scratch in 8 arrays"),
}
"""Verdict and words of the reason by which some of them are found, which others could hide."""
OUTLASTS = {
    "an array": relu("SEEN = np.sqrt((0.0, 1.0))"),
    "an array in a tuple": relu("SEEN = (1, (np.float32((0.0,) * 9), 1))"),
    "numbers that a vector writes": relu(f"{LANES}\nSEEN = np.float32((0.0,) * 400000)",
                                         before="store(SEEN, 0, spread(ZERO))"),
    "an array that a size of scratch captured": scratched(
        "made()", top="@helper()\ndef bump(x):\n    x[0] += 1\n    return x[0]\n\n\ndef made():\n"
        "    x = np.float32((0.0,) * 9)\n    return lambda sizes: 8 + int(bump(x))"),
    "an array that a helper captured": relu(
        f"{LANES}\ndef made():\n    x = np.float32((0.0,) * 99)\n    @helper()\n    def f(y):\n"
        "        return max(x[0], y)\n    return f\n\n\nSEEN = made()", each="SEEN(inp[i])"),
}  # fmt: skip
"""Texts with a constant that would keep what a call writes."""
BROKEN = {
    "types that do not fit": relu(each="(1, 2)"),
    "scratch of an unknown type": scratched("9, 'object'"),
    "scratch whose size is a text": scratched("'N + 1'"),
    "another parameter": relu().replace("(out, inp)", "(out, inp, x)"),
}
"""Texts that do not compile."""

# Honest ones ----------------------------------------------------------------------------------------------------------

TWINS = {
    "forgery": HONEST_RELU, "stealing": relu(top='"""It steals nothing: gc, /proc and frames are words here."""'),
    "warm-up": relu("BLOCK = 64"), "deferred": relu(loop="prange", options=""),
    "work at import": relu("BIG = 2 ** 16\nBOTH = 1, -1\nHALF = np.float32(np.sqrt(0.25))"),
    "replay": relu(before="n = inp.shape[0]"), "seeds": relu("SEED = 0"), "fallback": relu(before="x = np.sum(inp)"),
    "residency": relu(before="x = np.zeros(9, np.float32)", each="max(inp[i], x[0])"),
    "surroundings": relu(each="max(inp[i], ZERO)", options=", fastmath={'contract'}"),
    "other side": relu("@helper()\ndef f(x):\n    return max(x, ZERO)".replace("ZERO", "0"), each="f(inp[i])"),
    "way out": relu("from cpuopt.kernels.toolkit.simd import at, prefetch",
                    before="x = inp.reshape(inp.size)\nprefetch(at(x, 0))", each="max(x[i], ZERO)"),
    "promises": relu(options=", parallel=False, fastmath=False"), "text": relu(top='"""A ReLU."""'),
    "nothing": relu(each="inp[i] if not inp[i] <= ZERO else ZERO"),
    "inputs changed": relu(each="max(ZERO + inp[i], ZERO)"),
    "lower precision": relu(each="np.float32(max(np.float64(inp[i]), 0.0))"),
    "structure": relu(before="n = inp.shape[0] // 8 * 8", each="max(inp[i], ZERO) if i < n else max(ZERO, inp[i])"),
    "skips": relu(before="if inp.shape[0] == 0:\n    return"),
    "outside": relu(each="max(inp[i], ZERO)", before="n = inp.shape[0] - 1\nif n < 0:\n    return"),
    "order": relu(loop="prange", options=", parallel=True"),
    "state": scratched("8", before="x[0] = 1", each="max(inp[i], ZERO * x[0])"),
    "arithmetic": relu(before="n = np.int32(inp.shape[0])", each="max(inp[i], ZERO) if i < n else ZERO"),
    "sizes": relu(before="n = inp.shape[0]", each="max(inp[i], ZERO) if i < n - n % 1024 else max(inp[i], ZERO)"),
    "limits": relu().replace("(out, inp)", "(out, inp, x, y)").replace(
        "parallel=False", "parallel=False, scratch=[('x', lambda sizes: sizes['N']), ('y', 1 << 20)]"),
    "names": relu("def made(g):\n    @helper()\n    def f(x):\n        exec = g(x)\n        return exec\n    return f"),
}  # fmt: skip
"""By class, a right kernel that resembles the hostile ones."""
RIGHT = {
    "a mark of the byte order": "\ufeff" + HONEST_RELU, "an encoding": "# -*- coding: utf-8 -*-\n" + HONEST_RELU,
    "lines of Windows": HONEST_RELU.replace("\n", "\r\n"), "a new page": HONEST_RELU.replace("\n\n\n", "\n\x0c\n"),
    "a line's end in a docstring": relu('"""One\u2028two\x0bthree\x85four."""'),
    "tabs": HONEST_RELU.replace("    ", "\t"), "letters of other languages": relu("K\u00f6nig = 1"),
    "the first line of an adopted file": f"from cpuopt.judge.rules import NAMES as __builtins__\n{HONEST_RELU}",
    "a local like a function of Python's": relu(before="sum = ZERO", each="max(inp[i], sum)"),
    "a parameter like one": relu("@helper()\ndef f(input):\n    return max(input, 0)", each="f(inp[i])"),
    "a loop's number like one": relu(before="for iter in range(2):\n    out[:] = ZERO"),
    "a helper like one": relu("@helper()\ndef pow(x):\n    return max(x, 0)", each="pow(inp[i])"),
    "a function of math like one": relu("from math import pow", each="np.float32(pow(max(inp[i], ZERO), 1))"),
    "a helper below": relu(each="f(inp[i])") + "\n\n@helper()\ndef f(x):\n    return max(x, ZERO)\n",
    "helpers with locals of one name": relu(
        "def made(type):\n    @helper()\n    def one(x):\n        y = type(x)\n        return y\n    @helper()\n"
        "    def two(x):\n        y = one(x)\n        return max(y, 0)\n    return two\n\n\nF = made(np.abs)",
        each="F(max(inp[i], ZERO))",
    ),
    "a list of scratch": scratched("8", top="SCRATCH = [('x', 8)]").replace("[('x', 8)],", "SCRATCH,"),
    "lists in a list of scratch": scratched("8", top="MORE = [('x', 8)]").replace("=[('x', 8)]", "=[*MORE]"),
    "scratch in a tuple": scratched("8").replace("[('x', 8)]", "(('x', 8),)"),
    "sizes that a helper computes": scratched("size", top="@helper()\ndef f(n):\n    return n + 1\n\n\ndef size(s):\n"
                                              "    n = 1\n    n += f(s['N'])\n    return n if 'N' in s else 1"),
    "a function of a function of sizes": scratched(
        "made(lambda s: s['N'])", top="def made(g):\n    return lambda sizes: 2 * g(sizes)"
    ),
    "flags of the toolkit": relu("from cpuopt.kernels.toolkit.fastmath import EXACT", options=", fastmath=EXACT"),
    "types of arrays": relu(
        "TYPE = np.float32",
        before="x = np.zeros(4, dtype=np.float32)\ny = np.full(4, 0, TYPE)\nx[0] = np.zeros_like(y, dtype=TYPE)[0]",
        each="max(inp[i], x[0])",
    ),
    "a number that nobody reads": relu(before="for _ in range(2):\n    out[:] = ZERO"),
}  # fmt: skip
"""Right kernels that resemble them further."""


@cache
def package():
    """Return the texts of the package's kernels that stand alone, by op and variant."""
    found = dict[tuple[str, str], str]()
    for op, variant in KERNELS:
        with suppress(UserError):
            found[op, variant] = naive.text_of(ops.ALL[op], variant)
    return found

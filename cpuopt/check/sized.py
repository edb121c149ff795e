"""The check of a kernel at the very size at which it is timed or trained.

`check` compares with a float64 reference on small awkward sizes. That cannot see a kernel that is wrong only where an
axis is long. A float64 reference of a model's largest calls takes seconds and gigabytes; so here the op's own NumPy
formula is computed in float32, which shares no code with the kernels, and every element is compared. Both sides round,
so the tolerance is twice that of `check`; the scale of an element is the root mean square of its row, and no less than
one unit of rounding of the array's; in a row almost of zeros, whose terms may cancel, it is how far the row moves with
what is read. What is left to `check` is what this cannot see: errors below that tolerance, and extreme inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import inf, sqrt

import numpy as np
from numpy.typing import DTypeLike
from threadpoolctl import threadpool_limits

from ..errors import RefusedError
from ..isolate.serve import doing
from ..kernels.registry import Kernel
from ..ops.declaration import Op, Spec
from ..ops.storage import storage
from ..ops.update import drawn_bits
from .cases import Arguments, Array, Case, arguments, elements, normal, reference, run_of
from .fit import rounding_of, usual
from .judge import Wanted, called, marked, moved, operand_scale, steps
from .memory import FILL, SCRATCH, Filling, Memory, absent_as_empty, bits, call_args, fill
from .result import Result, worst

MOST, MOST_INTERPRETED = 1 << 27, 1 << 21
"""Elements of a call up to which it is judged: the arrays, what they must become, and the formula's own take 16 bytes
each; and of an op whose formula is plain Python, which takes microseconds for each."""
NUDGES = 8
"""How often the inputs are moved, to see how far the elements of a kernel that failed move with them."""
LEAST, SELDOM = 1 / 16, 64
"""The least second moment, but for one column in so many: AdamW divides a gradient by it. Near 0 the gradient's own
rounding would decide, which in millions of elements happens, and the call is then judged again, with `NUDGES`."""
TWICE = 1 << 24
"""Elements up to which a kernel is called again, with other contents of what it only writes."""
BEFORE = {
    "numbers": "numbers",
    "zeros": "zeros",
    "other": "results of other inputs",
    "almost": "its own results but for one element",
    "stale": "what the step had left there",
}


def most_sized(op: Op) -> int:
    """Return the elements of a call up to which it is judged."""
    return MOST_INTERPRETED if run_of(op) else MOST


def drawn_at_size(op: Op, case: Case, seed: int) -> Arguments:
    """Draw the arguments of a call, with numbers as a model has them; gradients that are added to hold some."""
    rng = np.random.default_rng(seed)
    given = arguments(op, case, rng)
    for name, x in given.items():
        if (case.adds or {}).get(name) and x is not None:
            given[name] = normal(x.shape, rng).astype(x.dtype)
    for a in op.arrays:
        if a.fan_in and (x := given[a.name]) is not None:  # logits of 1, as in a model: of 30, exp is infinite
            x[...] = x / np.float32(sqrt(a.fan_in(case.sizes)))
    return given


def at_size(
    kernel: Kernel,
    case: Case,
    given: Arguments,
    scratch: Mapping[str, Spec],
    threads: int,
    real: bool,
    nudges: int,
) -> Result:
    """Judge a kernel at one size on some number of threads.

    It is called with poison in what it writes and in scratch. If the arrays are not too large, it is called again with
    its results there but for one element, and then with one of `FILLINGS`, or with what the given arrays hold.

    Parameters
    ----------
    given : the arguments by name, and scratch if it is `real`; the arrays are replaced by copies.
    real : whether they are a step's.
    nudges : how often to move the inputs for the scale.

    Raises
    ------
    RefusedError
        For a kernel that fails whatever the tolerance.
    """
    op, adds = kernel.op, case.adds or {}
    doing(f"the reference of {op.name}")
    work = {name: given.pop(name, None) for name in scratch}
    work = {name: np.empty(*scratch[name]) if x is None else x for name, x in work.items()}
    memory = Memory(absent_as_empty(kernel, given) | work, [a.name for a in op.arrays if a.kind == "index"])
    given |= {name: memory.arrays[name] for name, x in given.items() if isinstance(x, np.ndarray)}
    for a in op.arrays:
        if a.kind == "state" and not a.negative and (x := given[a.name]) is not None:
            np.maximum(x, LEAST, out=x, where=np.arange(x.shape[-1]) % SELDOM > 0)
    wanted = standard(op, case, given, threads, nudges)
    fresh = [a.name for a in op.written if a.kind != "state" and not adds.get(a.name)]
    free = {name: memory.arrays[name] for name in (*fresh, *scratch)}
    written = {a.name: memory.arrays[a.name] for a in op.written}
    again = elements(op, case) <= TWICE
    starts = {n: x.copy() for n, x in written.items() if n not in free} if again else {}
    stale = {n: x.copy() for n, x in free.items()} if again and real else {}
    for name, x in free.items():
        fill(x, SCRATCH if name in scratch else FILL)
    args = call_args(op, memory.arrays, given, adds) + [memory.arrays[name] for name in scratch]
    read = {a.name: memory.arrays[a.name] for a in op.arrays if a.kind in ("in", "index")}
    sums = {name: bit_sum(x) for name, x in read.items()}

    def judged(then: str = "", known: Mapping[str, Array] | None = None) -> Result:
        called(kernel, args, threads)
        memory.require_whole()
        for name, x in read.items():
            if bit_sum(x) != sums[name]:
                raise RefusedError(f"changed '{name}', which it may only read", witness={"argument": name})
        if known and all(np.array_equal(bits(memory.arrays[name]), bits(x)) for name, x in known.items()):
            return Result(kernel.name, case, 0.0)  # it has been judged
        return wanted.judge(kernel, memory.arrays, then)

    result = judged()
    if again and result.ratio < inf:
        filling, right = Filling(), {n: x.copy() for n, x in written.items()}
        for kind in ("almost", "stale" if stale else filling.kinds()[0]):
            memory.put(starts | stale if kind == "stale" else starts)
            for name, x in free.items() if kind != "stale" else ():
                filling.put(x, kind, right.get(name))
            said = f", with {BEFORE[kind]} in its outputs and scratch before the call{filling}"
            result = worst([result, judged(said, right)])
            if result.refused:
                break
    return result


def standard(op: Op, case: Case, given: Mapping[str, Array], threads: int, nudges: int = 0) -> Wanted:
    """Return the wanted results, by the op's formula in float32, or in the finest type that the call writes.

    Parameters
    ----------
    given : the arguments before the call; of a gradient that is added to, what it holds. They are not changed.
    nudges : how often to move the inputs for the scale.
    """
    adds = case.adds or {}
    with threadpool_limits(threads, user_api="blas"), np.errstate(invalid="ignore", over="ignore"):
        finest = np.result_type(np.float32, *(given[a.name] for a in op.written if given[a.name] is not None))
        with marked() as marks:
            found = {n: np.asarray(x, finest) for n, x in reference(op, dict(given), finest).items()}
        found = {n: x.copy() if np.may_share_memory(x, given[n]) else x for n, x in found.items()}
        rounding = rounding_of(run, given, found) if nudges and (run := run_of(op)) else {}
        moves = moved(found, nudges, partial(nudged, op, given, finest)) if nudges else {}
        operands: dict[str, Array] = {}
        if marks and case.types:
            operands = operand_scale(op, dict(given), found, np.random.default_rng(0), 1)
    values, scale = {}, {}
    for name, x in found.items():
        values[name] = x = x + given[name] if adds.get(name) else x
        rows = x.reshape(-1, x.shape[-1])
        sizes = rows if usual(rows).all() else np.where(usual(rows), rows, 0)
        squares = np.vecdot(sizes, sizes)
        lowest = storage(given[name]).eps * sqrt(float(squares.sum()) / x.size)
        scale[name] = np.fmax(np.sqrt(squares / x.shape[-1]), lowest).reshape(-1, 1)  # in a row that is almost 0
        if nudges:
            scale[name] = np.fmax(scale[name], moves[name].reshape(rows.shape))
        if name in rounding:
            scale[name] = scale[name] + rounding[name].reshape(-1, 1)
    return Wanted(op, case, values, scale, adds, rounded=2, operands=operands, drawn=drawn_bits(op, given))


def nudged(op: Op, given: Mapping[str, Array], dtype: DTypeLike, seed: int) -> dict[str, Array]:
    """Return the results where every float that the op reads is a little off: what cancelled then does not."""
    rng = np.random.default_rng(seed)
    read = [a.name for a in op.arrays if a.kind in ("in", "state") and given[a.name] is not None]
    return reference(op, {**given, **{n: given[n] * steps(given[n].shape, rng, np.float32) for n in read}}, dtype)


def bit_sum(x: Array) -> int:
    """Return a sum of an array's bits."""
    return int(bits(x).sum(dtype=np.uint64))

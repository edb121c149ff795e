"""What ranks do together: they exchange arrays, add them in a fixed order, and measure a gradient by blocks.

Three are ops like all others, which kernels compute::

    total = total + part                   accumulate
    out   = inp                            copy
    out_r = sum_c inp_rc^2                 sumsq_blocks

The sum of two float32 is the same in either order, so ``accumulate`` fixes the bits of a sum by its tree alone.

The others move data and compute nothing, or leave a sum to a library; a communicator runs them in place of a kernel::

    exchange    sends an array to a rank, and receives one from it
    all_reduce  sums an array over all ranks, in the library's order
    complete    waits until an array that one of both receives is there
    combine     sums an array over all ranks, of which one at most has a number other than 0 at a place
    barrier     waits until all ranks are done with an array

Source: ``torch.Tensor.add_``, ``torch.nn.utils.clip_grad_norm_``; Message Passing Interface 4.1,
chapters 3 and 6.
"""

from .declaration import HALF, Arg, C, Dim, N, Op, S, inp, out, scalar, state, symbols

(R,) = symbols("R")
BLOCK = 16384
"""Elements of a block, whose squares are summed together; what a rank owns is made of whole ones."""
MPI = "Message Passing Interface 4.1"
NOTHING = Dim({})
DOUBLE = ("float64",)


def reference_accumulate(total, part):
    return {"total": total + part}


def reference_copy(inp):
    return {"out": inp}


def reference_sumsq_blocks(inp):
    return {"out": (inp**2).sum(1)}


accumulate = Op(
    "accumulate",
    state("total", N),
    inp("part", N),
    label="Accumulate",
    flops=1 * N,
    reference=reference_accumulate,
    source="torch.Tensor.add_",
)

copy = Op(
    "copy",
    out("out", N, types=HALF),
    inp("inp", N, types=HALF),
    label="Copy",
    flops=NOTHING,
    reference=reference_copy,
    source="torch.Tensor.copy_",
)

sumsq_blocks = Op(
    "sumsq_blocks",
    out("out", R, reduces=C, types=DOUBLE),
    inp("inp", R, C),
    label="Gradient norm",
    flops=2 * R * C,
    reference=reference_sumsq_blocks,
    source="torch.nn.utils.clip_grad_norm_",
)


def _none(**given):
    raise NotImplementedError("a communicator moves data between ranks; one process has no reference for it")


class Collective(Op):
    """An op that a communicator runs: it has no kernel, and no reference."""

    def __init__(self, name: str, *args: Arg, label: str, moves: dict[str, Dim] | None = None) -> None:
        super().__init__(name, *args, label=label, flops=NOTHING, reference=_none, source=MPI, moves=moves)


MOVED = out("theirs", N, types=HALF), inp("mine", S, types=HALF)
exchange = Collective("exchange", *MOVED, scalar("peer", integer=True), label="Exchange")
all_reduce = Collective("all_reduce", state("x", N), label="Exchange")
complete = Collective("complete", state("theirs", N, types=HALF), label="Wait for ranks", moves={"theirs": NOTHING})
combine = Collective("combine", out("total", N, types=DOUBLE), inp("mine", N, types=DOUBLE), label="Exchange")
barrier = Collective("barrier", state("x", N), label="Wait for ranks", moves={"x": NOTHING})
COLLECTIVES = (exchange, all_reduce, complete, combine, barrier)

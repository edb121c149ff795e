"""A linear layer with an adapter: the forward of ``matmul``, whose chunks of sums take the adapter's product too."""

from ... import ops
from ..compile.jit import kernel
from ..toolkit.simd import PER_WORD
from .matmul import FORWARD, add_linear, forward_rows
from .matmul_bf16 import FORWARD_BF16, HALF, as_words, word_rows
from .matmul_bf16 import add_linear as add_linear_bf16

PANELS = "more", lambda s: forward_rows(s["BT"], s["C"], s["OC"]) * s["R"]
WORD_PANELS = "more", lambda s: word_rows(s["BT"], s["C"], s["OC"]) * -(-s["R"] // 2) * PER_WORD


@kernel(ops.matmul_adapter_forward, "optimized", scratch=[*FORWARD, PANELS], parallel=False)
def matmul_adapter_forward(out, inp, weight, bias, low, up, panels, sums, queue, more):
    """Pack the tokens, then strips of rows of weight and `up` times all panels; for many tokens the other way round.

    Parallel: as the product.
    Memory: the packed tokens, or the packed weights; a strip of sums for each thread.
    Bound: compute; for few tokens, the memory that weight streams through.
    """
    add_linear(out, inp, weight, bias, low, up, panels, more, sums, queue)


def odd_ranks(s):
    """Size the words of rows along R, if these have to be packed."""
    return (s["BT"] + s["OC"]) * (s["R"] // 2 + 1) if s["R"] % 2 else 0


@kernel(
    ops.matmul_adapter_forward,
    "optimized",
    of=HALF,
    scratch=[*FORWARD_BF16, WORD_PANELS, ("ranks", odd_ranks)],
    parallel=False,
)
def matmul_adapter_forward_bf16(out, inp, weight, bias, low, up, panels, sums, queue, rows, more, ranks):
    """Pack the tokens, then strips of rows of weight and `up` times all panels; for many tokens the other way round.

    Parallel: as the product.
    Memory: the packed tokens, or the packed weights; a strip of sums for each thread.
    Bound: compute; for few tokens, the memory that weight streams through.
    """
    x = as_words(inp, rows)
    w = as_words(weight, rows[x.size if inp.shape[1] % 2 > 0 else 0 :])
    y = as_words(low, ranks)
    v = as_words(up, ranks[y.size if low.shape[1] % 2 > 0 else 0 :])
    add_linear_bf16(out, x, w, bias, y, v, panels, more, sums, queue)

"""The embedding of few tokens behind a cache, on one thread."""

from ... import ops
from ..compile.jit import kernel
from ..optimized.embedding import gather


@kernel(ops.embedding_decode, "rows", parallel=False)
def embedding_decode(out, tokens, wte, wpe, position):
    """Copy the row of each token, and add the row of its position.

    Bound: memory.
    """
    B, T, _ = out.shape
    for b in range(B):
        for t in range(T):
            place = max(0, min(position + t, wpe.shape[0] - 1))
            gather(out[b, t], wte[tokens[b, t]], wpe[place])  # of no channels if it is absent

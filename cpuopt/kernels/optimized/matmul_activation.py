"""A linear layer with GELU, SwiGLU or GeGLU: the products of ``matmul``, then the activation of all of the sums.

A chunk of a product is narrow. On it, an activation would take a few cache lines of each token at a time, and memory
delivers these far more slowly than whole rows.
"""

from ... import ops
from ..compile.jit import kernel
from ..registry import KERNELS
from ..toolkit.tiles import flat
from .gelu import gelu_backward, gelu_forward
from .matmul import PRODUCTS


def scratch_of(products):
    """List the scratch of a backward: that of the product, whose parts are followed by the sums if they are apart."""
    panels, (name, parts), queue = products.input_scratch()
    return [panels, (name, lambda s: parts(s) + (s["BT"] * s["C"] if products.micro.rounds else 0)), queue]


def register(products):
    """Register the kernels of a storage type."""
    of, words, sums_of, operands = products.micro.storage, products.micro.words, products.micro.sums, products.operands
    forward, backward_input = products.forward, products.backward_input

    @kernel(ops.matmul_gelu_forward, "optimized", of=of, scratch=products.forward_scratch(), parallel=False)
    def matmul_gelu_forward(out, pre, inp, weight, bias, panels, sums, queue):
        """Pack the tokens, then strips of rows of weight times all panels; then GELU.

        Parallel: as the product; then chunks of fixed size.
        Memory: the packed tokens; a strip of sums for each thread.
        Bound: compute; for few tokens, the memory that weight streams through.
        """
        x, w = operands(inp, weight, panels)
        forward(pre, x, w, bias, panels, sums, queue)
        gelu_forward(flat(out), flat(pre))

    @kernel(ops.matmul_gelu_backward, "optimized", of=of, scratch=scratch_of(products), parallel=False)
    def matmul_gelu_backward(dpre, dout, weight, pre, panels, parts, queue):
        """Blocks of tokens times panels of weight's columns; then the slope of what is summed up.

        Parallel: as the product; then chunks of fixed size.
        Memory: a panel, and a block of dout if there are few tokens or a chunk of sums, for each thread; the sums, if
        they are to be rounded.
        Bound: compute; for few tokens, the memory that weight streams through.
        """
        x, rest = words(dout, parts)
        sums, rest = sums_of(dpre, rest)
        backward_input(sums, False, x, weight, panels, rest, queue)
        gelu_backward(flat(dpre), False, flat(sums), flat(pre))


def register_gated(products, op_forward, op_backward):
    """Register the kernels of a linear layer with a gate, from the kernels of what it fuses."""
    gate, slopes = (KERNELS[op.fuses[-1].name, "optimized"].function for op in (op_forward, op_backward))
    of, words, sums_of, operands = products.micro.storage, products.micro.words, products.micro.sums, products.operands
    forward, backward_input = products.forward, products.backward_input

    @kernel(op_forward, "optimized", of=of, scratch=products.forward_scratch(), parallel=False)
    def matmul_gated_forward(out, pre, inp, weight, bias, up, panels, sums, queue):
        """Pack the tokens, then strips of rows of weight times all panels; then the gate.

        Parallel: as the product; then chunks of fixed size.
        Memory: the packed tokens; a strip of sums for each thread.
        Bound: compute; for few tokens, the memory that weight streams through.
        """
        x, w = operands(inp, weight, panels)
        forward(pre, x, w, bias, panels, sums, queue)
        gate(flat(out), flat(pre), flat(up))

    @kernel(op_backward, "optimized", of=of, scratch=scratch_of(products), parallel=False)
    def matmul_gated_backward(dpre, dup, dout, weight, pre, up, panels, parts, queue):
        """Blocks of tokens times panels of weight's columns; then the slopes of what is summed up.

        Parallel: as the product; then chunks of fixed size.
        Memory: a panel, and a block of dout if there are few tokens or a chunk of sums, for each thread; the sums, if
        they are to be rounded.
        Bound: compute; for few tokens, the memory that weight streams through.
        """
        x, rest = words(dout, parts)
        sums, rest = sums_of(dpre, rest)
        backward_input(sums, False, x, weight, panels, rest, queue)
        slopes(flat(dpre), False, flat(dup), False, flat(sums), flat(pre), flat(up))


for products in PRODUCTS:
    register(products)
    register_gated(products, ops.matmul_swiglu_forward, ops.matmul_swiglu_backward)
    register_gated(products, ops.matmul_geglu_forward, ops.matmul_geglu_backward)

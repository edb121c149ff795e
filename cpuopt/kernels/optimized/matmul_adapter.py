"""A linear layer with an adapter: the forward of ``matmul``, whose chunks of sums take the adapter's product too."""

from ... import ops
from ..compile.jit import kernel
from .matmul import PRODUCTS


def register(products):
    """Register the kernel of a storage type."""
    forward_two, operands, room = products.forward_two, products.operands, products.micro.room

    def more(s):
        """Size the panels of the adapter's product, and its packed words."""
        BT, R, OC = s["BT"], s["R"], s["OC"]
        return products.forward_panels(BT, s["C"], OC, R) + room((BT, R), (OC, R))

    scratch = [*products.forward_scratch(), ("more", more)]

    @kernel(ops.matmul_adapter_forward, "optimized", of=products.micro.storage, scratch=scratch, parallel=False)
    def matmul_adapter_forward(out, inp, weight, bias, low, up, panels, sums, queue, more):
        """Pack the tokens, then strips of rows of weight and `up` times panels; for many tokens the other way round.

        Parallel: as the product.
        Memory: the packed tokens, or the packed weights; a strip of sums for each thread.
        Bound: compute; for few tokens, the memory that weight streams through.
        """
        x, w = operands(inp, weight, panels)
        y, v = operands(low, up, more)
        forward_two(out, x, w, bias, y, v, panels, more, sums, queue)


for products in PRODUCTS:
    register(products)

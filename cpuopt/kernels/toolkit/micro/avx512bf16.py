"""AVX-512 with instructions for bfloat16: one adds both products of words to sums, one rounds two vectors.

Both take subnormal numbers as zero. Every processor that has them has the instruction for int8 too.

`AHEAD` is such a set that multiplies so fast that memory idles while a weight's gradient is computed. So it is on
Zen 5, which has ``avxvnni`` too, and not on Zen 4. Sapphire Rapids has both, and was not measured.
"""

from dataclasses import replace

from llvmlite import ir

from . import Dot, avx512vnni


class _BFloat(ir.types._BaseFloatType):  # the emitter's type of a bfloat16, which llvmlite lacks
    null = "0.0"
    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"


_BFloat._create_instance()


def add(emit, x, y, z):
    """Emit z plus the products of both halves of words."""
    halves, lanes = ir.VectorType(_BFloat(), 2 * emit.tile.lanes), emit.tile.lanes
    x, y = (emit.builder.bitcast(word, halves) for word in (x, y))
    return emit.call(f"llvm.x86.avx512bf16.dpbf16ps.{32 * lanes}", emit.vector, z, x, y)


def rounded(emit, x, y):
    """Emit the rounding of two vectors, one behind the other in one vector of 16 bits."""
    halves, lanes = ir.VectorType(_BFloat(), 2 * emit.tile.lanes), emit.tile.lanes
    found = emit.call(f"llvm.x86.avx512bf16.cvtne2ps2bf16.{32 * lanes}", halves, y, x)
    return emit.builder.bitcast(found, ir.VectorType(ir.IntType(16), 2 * lanes))


SET = replace(
    avx512vnni.SET, name="avx512bf16", features=avx512vnni.SET.features | {"avx512bf16"}, dot=Dot(add, rounded)
)
AHEAD = replace(SET, features=SET.features | {"avxvnni"}, ahead=True)

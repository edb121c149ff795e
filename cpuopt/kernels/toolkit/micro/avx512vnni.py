"""AVX-512 with an instruction for int8: it adds the products of four unsigned and four signed bytes to a sum."""

from dataclasses import replace

from llvmlite import ir

from . import avx512


def add_quads(emit, x, y, z):
    """Emit z plus the products of the unsigned bytes of x and the signed ones of y; a sum wraps at 2^32."""
    bld, words = emit.builder, ir.VectorType(ir.IntType(32), emit.tile.lanes)
    x, y, z = (bld.bitcast(v, words) for v in (x, y, z))
    return bld.bitcast(emit.call(f"llvm.x86.avx512.vpdpbusd.{32 * emit.tile.lanes}", words, z, x, y), emit.vector)


SET = replace(avx512.SET, name="avx512vnni", features=avx512.SET.features | {"avx512vnni"}, quads=add_quads)

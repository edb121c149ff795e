"""AVX2 with fused multiply-adds: 16 registers of 8 floats."""

from . import InstructionSet

SET = InstructionSet("avx2", frozenset({"avx2", "fma"}), lanes=8, registers=16)

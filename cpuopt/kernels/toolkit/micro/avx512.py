"""AVX-512: 32 registers of 16 floats.

Of a product's 32 registers one is free. Words of bfloat16 taken apart need two more, so their halves take turns.
"""

from . import InstructionSet

SET = InstructionSet("avx512", frozenset({"avx512f"}), lanes=16, registers=32, halves_apart=True)

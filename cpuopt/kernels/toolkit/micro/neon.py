"""NEON: 32 registers of 4 floats, which every aarch64 has.

A float that is loaded without an offset is loaded into all lanes, by an instruction that takes a multiply-add's place
on Neoverse V2. With an offset in a register, LLVM loads it plainly, and a multiply-add takes one lane of it.
"""

from . import InstructionSet

SET = InstructionSet("neon", frozenset({"neon"}), lanes=4, registers=32, indexed=True)

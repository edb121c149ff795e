"""What every other machine has, as SSE2: products apart from sums, by instructions that overwrite an operand."""

from . import InstructionSet

SET = InstructionSet("plain", frozenset(), lanes=4, registers=16, spare=5, fused=False, indexed=True)

"""Micro-kernels as records, a file for each instruction set: nothing else in ``kernels`` names one.

`InstructionSet` says which vectors a machine has. The vector code of ``simd`` is written once, for all of them.
`MicroKernel` is all that the loops of a product know of a storage type and of what multiplies it. ``generic`` has the
records on vectors. A file with ``RECORDS`` has others, and ``records`` finds it by its being there.

An operand is a matrix of *words* of 32 bits: each is a float32, or `group` neighbours along the summed axis. A word
adds `group` products to a sum. The order in which they are added is a property with a name:

========  ==========================================================================
"serial"  ``c += a[k] * b[k]`` for each k
"pairs"   ``c += a[k + 1] * b[k + 1]``, then ``c += a[k] * b[k]``, for every second k
"amx"     ``c += even + odd``, the sums of the even and of the odd products of 32 neighbours
"exact"   any: no sum is rounded
========  ==========================================================================

Each product and sum is rounded to float32 once, as a fused multiply-add does. So sums have the same bits on all
machines that compute them in the same order. Where a sum is cut into blocks, which ``blocking`` says, each block is
summed by itself. ``CPUOPT_ORDER`` chooses the order of bfloat16, which is then emulated on machines that lack it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from .blocking import LEAST, OUTPUTS, STRIP, WEIGHT_DEPTH


class Dot(NamedTuple):
    """An instruction set's instructions for bfloat16, as functions of an ``Emit``.

    ``add(emit, x, y, z)`` returns z plus the products of both halves of words; ``rounded(emit, x, y)`` rounds two
    vectors, one behind the other in one vector of 16 bits.
    """

    add: Callable[..., Any]
    rounded: Callable[..., Any]


@dataclass(frozen=True)
class InstructionSet:
    """The vectors of a machine, and the product that its registers allow: `rows` rows of `vectors` vectors of sums.

    Attributes
    ----------
    features : LLVM's names of what a machine must have.
    lanes : the floats of a vector.
    registers : the number of vector registers.
    spare : the number of registers that must stay free beyond the sums and the operands of the multiply-adds.
    fused : whether there is a fused multiply-add; without it, LLVM is left to choose.
    indexed : whether a row's first float is loaded by a register as offset, even if the offset is zero.
    halves_apart : whether a product without `dot` goes over its rows once for each half of the words.
    dot : the instructions for bfloat16; without them, two multiply-adds and arithmetic of 32 bits have the same bits.
    quads : the instruction for int8, ``quads(emit, x, y, z)``: z plus the products of the unsigned bytes of x and the
        signed ones of y, four in each word. Without it, arithmetic of 16 bits has the same bits.
    ahead : whether to prefetch optimizer state during the gradient of a weight.
    rows, vectors : by the rule of `shape`, unless given.
    """

    name: str
    features: frozenset[str]
    lanes: int
    registers: int
    spare: int = 0
    fused: bool = True
    indexed: bool = False
    halves_apart: bool = False
    dot: Dot | None = None
    quads: Callable[..., Any] | None = None
    ahead: bool = False
    rows: int = 0
    vectors: int = 0

    def __post_init__(self) -> None:
        if not self.rows:
            for name, value in zip(("rows", "vectors"), self.shape(), strict=True):
                object.__setattr__(self, name, value)

    def shape(self) -> tuple[int, int]:
        """Return the rows and vectors of a product.

        The sums, a row of the vector side and one broadcast must fit into the registers: with one too many, LLVM spills
        in the inner loop. At least 8 sums must be under way to keep two multiply-add pipes busy for four cycles. A
        multiply-add may need 3/4 of a load, since there are as many load ports as multiply-add pipes. Of the products
        that fit, this is the narrowest, and the tallest of those: tokens of a small batch are padded to its width.
        """
        for vectors in range(1, self.registers):
            rows = (self.registers - self.spare - 1) // vectors - 1
            if rows * vectors >= 8 and rows + vectors <= 0.75 * rows * vectors:
                return rows, vectors
        raise AssertionError(self)


@dataclass(frozen=True)
class MicroKernel:
    """How a machine multiplies operands of a storage type; all sums are float32.

    Attributes
    ----------
    features : LLVM's names of what a machine must have to use it. On all others it computes the same by other means.
    instruction : what multiplies.
    storage : the type of both operands.
    group : the neighbours along k in a word.
    order : the order in which products are added.
    lines : the lines of a panel for each word.
    rows : most rows of a product.
    columns : the columns of a panel; a record serves machines whose vectors make as many.
    unit : the words of k that its blocks are multiples of: those of a tile.
    wide, narrow : the product of a few rows with a panel, of all its columns and of one vector (`simd.product_of`); of
        any number of rows if it is `tiled` (`amx.multiply_of`).
    listed : `wide` with a list of places to fetch, if the machine leaves memory time for it (`InstructionSet.ahead`).
    put : ``put(panel, i, line, word)`` writes a word to a panel, whose lines are `line` floats apart.
    transpose : writes a square of words to a panel, transposed.
    pack : ``pack(panel, x, row, column, depth)`` packs `columns` columns of ``depth * group`` rows; zeros beyond the
        last.
    lay : ``lay(to, i, x, row, column)`` writes words of `group` rows from `row` on, interleaved: a vector of columns.
    one : ``one(x, row, column)`` returns one such word.
    words : ``words(x, room)`` returns rows as words, and what is left of `room` if they had to be packed there.
    sums : ``sums(x, room)`` returns where the sums of a result x are kept, and what is left of `room`.
    operand : ``operand(x, room)`` returns the array of the storage type to which a float32 operand is rounded, and what
        is left of `room`.
    elements : ``elements(x)`` views float32 of scratch as elements of the storage type.
    weight : ``weight(master, copy)`` returns what products read of a weight that may have a copy.
    rounds : whether elements have less precision than sums, so that a result is stored when its sum is complete.
    few, few_depth, avoids_aliases : thresholds that depend on the storage type, of ``blocking``.
    tall : the most rows of weight in a forward chunk: whole vectors and whole groups of rows.
    weight_depth, outputs, strip : those of a weight's gradient: the words of tokens of a block, the most rows of a
        chunk, the floats of a strip.
    allowed : whether this process may use it, on a machine that has the features.
    emulated : whether multiply-adds compute its order, so that it needs no features.
    chain : a function of (place, rounds) that multiplies tiles at a place again and again, for the machine's roof;
        None: multiply-adds of vectors are that.
    flops : the operations of a round of `chain`.
    """

    name: str
    features: frozenset[str]
    instruction: str
    storage: str
    group: int
    order: str
    lines: int
    rows: int
    columns: int
    wide: Any
    narrow: Any
    put: Any
    transpose: Any
    pack: Any
    lay: Any
    one: Any
    words: Any
    sums: Any
    operand: Any
    elements: Any
    weight: Any
    rounds: bool
    few: int
    few_depth: int
    avoids_aliases: bool
    tall: int = LEAST
    weight_depth: int = WEIGHT_DEPTH
    outputs: int = OUTPUTS
    strip: int = STRIP
    unit: int = 1
    listed: Any = None
    allowed: bool = True
    emulated: bool = False
    chain: Any = None
    flops: int = 0

    @property
    def tiled(self) -> bool:
        """Whether its operands are tiles, whose packed rows lie one behind the other and are not interleaved."""
        return self.unit > 1

    def room(self, *shapes: tuple[int, int]) -> int:
        """Count the floats in which `words` packs matrices of some shapes."""
        return sum(rows * -(-K // self.group) for rows, K in shapes if K % self.group)

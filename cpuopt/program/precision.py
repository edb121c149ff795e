"""Storage in bfloat16: what products, attention and activations read is bfloat16, everything else is float32.

An op says what it can read and write in bfloat16 by the types of its arguments. An argument that it reads and that
should be bfloat16 is an *operand*, as of products and attention. Activations read either. The pass works on a finished
step, after the rewrites:

- A value whose readers all can read bfloat16 is stored in it, if one call writes it as a whole and can.
- Any other value that a call takes as an operand gets a copy in bfloat16 before that call. Calls that read the same
  numbers share it.
- A weight keeps its float32, and has a copy that lives through all steps. The weight's update writes it, or a call
  behind it if its kernel cannot. So do the calls of the phase ``convert``, which the engine runs when a weight may have
  changed otherwise.
- A weight that is an operand is stored in bfloat16 alone if it is frozen, or if this is asked for and its update can
  write it so, rounded at random. A call that cannot read it so gets a copy in float32. In generation, the cache of keys
  and values is bfloat16 too.

Sums, statistics, losses and gradients of weights stay float32. No model, layer or optimizer knows of the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from .. import ops
from ..ops.declaration import Arg
from ..ops.storage import WIDE
from .program import Call, Program, Value

NARROW = "bfloat16"
Takes = Callable[[Call, Arg], bool]
"""A function that returns whether the kernel of a call takes an argument in bfloat16."""


def store_operands(program: Program, takes: Takes, inline: bool, alone: Collection[Value] = ()) -> None:
    """Store in bfloat16 what products, attention and activations read.

    Parameters
    ----------
    inline : whether a weight's copy is written by a call right after its update; else the engine converts all weights
        before the next forward.
    alone : weights that are stored in bfloat16 alone, of those that `weights_of_products` finds before a rewrite.
    """
    work = _Pass(program, takes)
    work.narrow(alone)
    work.run(inline)
    program.verify()


def weights_of_products(program: Program) -> list[Value]:
    """List the parameters that an op reads as operands."""
    read = (call.args[a.name] for call in program.calls for a in declared(call))
    return [v for v in dict.fromkeys(read) if v.group == "parameter"]


def declared(call: Call) -> list[Arg]:
    """List the arguments that an op reads as operands, if its kernel takes them."""
    read = [a for a in call.op.arrays if a.kind == "in" and call.args[a.name] is not None]
    return [a for a in read if NARROW in a.types and a.operand]


class _Pass:
    def __init__(self, program: Program, takes: Takes) -> None:
        self.program, self.takes = program, takes
        self.copies: dict[Value, Value] = {}
        """The copy of each weight, and of other values as they are now."""

    def operands(self, call: Call) -> list[Arg]:
        """List the arguments that a call reads as operands."""
        return [a for a in declared(call) if self.takes(call, a)]

    def narrow(self, alone: Collection[Value]) -> None:
        """Store weights in bfloat16 alone, and caches."""
        states = [(call, a, call.args[a.name]) for call in self.program.calls for a in call.op.arrays]
        states = [(call, a, v) for call, a, v in states if a.kind == "state" and v is not None]
        wide = {v for call, a, v in states if not (NARROW in a.types and self.takes(call, a))}
        for v in {*alone, *(v for _, a, v in states if not a.drawn)} - wide:
            v.dtype = NARROW

    def wide(self, call: Call) -> list[Arg]:
        """List the arguments that a call can read in float32 only, and that are bfloat16."""
        read = [a for a in call.op.arrays if a.kind == "in" and call.args[a.name] is not None]
        return [a for a in read if call.args[a.name].dtype == NARROW and not self.takes(call, a)]

    def run(self, inline: bool) -> None:
        """Apply the pass."""
        for v in self.storable():
            v.dtype = NARROW
        writers: dict[Value, list[Call]] = {}
        for call in self.program.calls:
            for v in call.writes:
                writers.setdefault(v, []).append(call)
        calls: list[Call] = []
        aside: set[Value] = set()  # what has a copy in an evaluation only, which a step leaves out
        for call in self.program.calls:
            if call.phase != "evaluate":
                for v in aside:
                    self.copies.pop(v, None)
                aside.clear()
            for a in self.wide(call):
                v = call.args[a.name]
                call.args[a.name] = self.program.value(f"{v}.{WIDE}", v.shape)
                calls.append(Call(ops.copy, call.layer, {"out": call.args[a.name], "inp": v}, call.phase))
            for a in self.operands(call):
                v = call.args[a.name]
                if v.dtype == WIDE:
                    if v not in self.copies:
                        self.copies[v] = self.copy_of(v)
                        if v.group != "parameter":
                            calls.append(self.cast(v, call))
                            aside |= {v} if call.phase == "evaluate" else set()
                    call.args[a.name] = self.copies[v]
            if weight := self.stepped(call):
                call.args["copy"] = self.copies[weight] if inline else None
            calls.append(call)
            for v in call.writes:
                if v in self.copies and v.group != "parameter":
                    del self.copies[v]  # it is out of date
                elif inline and v in self.copies and writers[v][-1] is call and not all(map(self.stepped, writers[v])):
                    calls.append(self.cast(v, call))
        weights = [v for v in self.copies if v.group == "parameter"]
        for call in calls:
            call.retype()
        self.program.calls = [*(Call(ops.copy, v.name, self.both(v), "convert") for v in weights), *calls]

    def stepped(self, call: Call) -> Value | None:
        """Return the weight whose copy a call writes as it updates the weight; None for other calls."""
        weight = next((call.args[a.name] for a in call.op.args if a.kind == "state"), None)
        copy = call.op.by_name.get("copy")
        return weight if copy and weight in self.copies and self.takes(call, copy) else None

    def storable(self) -> list[Value]:
        """Find the values that all who read them can read in bfloat16, and that one call writes as a whole."""
        program = self.program
        readers: dict[Value, list[bool]] = {}
        writers: dict[Value, list[bool]] = {}
        for call in program.calls:
            for a in call.op.arrays:
                v = call.args[a.name]
                if v is None:
                    continue
                narrow = NARROW in a.types and self.takes(call, a)
                if a.kind in ("in", "index"):
                    readers.setdefault(v, []).append(narrow)
                else:
                    whole = a.kind == "out" or (a.kind == "acc" and not call.adds[a.name])
                    writers.setdefault(v, []).append(whole and narrow)
        kept = {*program.outputs, *program.norm_terms, *program.kept, *program.within}
        free = (v for v in writers if v.group in ("activation", "adjoint") and v.dtype == WIDE and v not in kept)
        return [v for v in free if writers[v] == [True] and v in readers and all(readers[v])]

    def copy_of(self, v: Value) -> Value:
        """Make the copy of a value; a weight's lives through all steps."""
        if v.group != "parameter":
            return self.program.value(f"{v}.{NARROW}", v.shape, v.group, dtype=NARROW)
        copy = self.program.value(f"{v}.{NARROW}", v.shape, "copy", dtype=NARROW)
        self.program.kept.append(copy)
        self.program.filled.add(copy)
        return copy

    def both(self, v: Value) -> dict[str, Value]:
        return {"out": self.copies[v], "inp": v}

    def cast(self, v: Value, at: Call) -> Call:
        """Make the call that writes a copy, in the layer and phase of another."""
        return Call(ops.copy, at.layer, self.both(v), at.phase)

"""The choice of a kernel for each op and layer.

Kernels register themselves under (op, variant). A `Choice` is a list of rules, each from an op pattern and a layer
pattern to a variant; ``vanilla`` lies underneath and the last rule that matches wins.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from .. import ops
from ..errors import UserError
from ..ops.declaration import Arg, Dim, Op, Spec
from ..ops.storage import TYPES, WIDE
from ..wording import nearest

BASE = "vanilla"
"""The complete variant; every other may be partial."""
DEFAULT = "optimized"
"""The default variant."""
GENERATED = "generated"
"""The variant of backwards that are generated; of a user's op, the vanilla backward is the same."""
AUTO = "auto"
"""No variant of its own: `DEFAULT`, changed by the rules of a plan of `cpuopt tune`."""
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.:=+-]{0,63}")
"""The pattern of variants' names, which appear in flags, globs, tables and records."""


@dataclass(frozen=True)
class Scratch:
    """Working memory that a kernel asks for: `size` elements, passed after the op's arguments as a 1-D array."""

    name: str
    size: Dim | Callable[[Mapping[str, int]], int] | int
    dtype: str = WIDE

    def elements(self, sizes: Mapping[str, int]) -> int:
        """Compute its length."""
        return int(self.size(sizes) if callable(self.size) else self.size)


@dataclass(frozen=True)
class Kernel:
    """One way to compute an op.

    Attributes
    ----------
    make, made : functions that compile it for arguments of some types, and return whether that is done.
    entry : function that returns the compiled code for arguments of some types.
    where : file and line, for messages.
    same_bits : whether any number of threads gives identical bits; a library's kernel may not promise it.
    narrow : whether it takes the types that its op allows besides the usual ones.
    types : the types of the arguments that do not have their usual one.
    skips : the gradients that it can do without, which are then arrays of length zero.
    others : kernels of its own for arguments of some types, by the type's name.
    """

    op: Op
    variant: str
    function: Callable[..., None] = field(repr=False)
    scratch: tuple[Scratch, ...] = ()
    make: Callable[[Mapping[str, str]], None] = field(repr=False, default=lambda types: None)
    made: Callable[[Mapping[str, str]], bool] = field(repr=False, default=lambda types: True)
    entry: Callable[[Mapping[str, str]], Callable[..., None] | None] = field(repr=False, default=lambda types: None)
    where: str = ""
    same_bits: bool = True
    narrow: bool = True
    types: Mapping[str, str] = field(default_factory=dict, hash=False)
    skips: tuple[str, ...] = ()
    others: dict[str, Kernel] = field(default_factory=dict, hash=False, compare=False, repr=False)

    @property
    def name(self) -> str:
        """The name, as in ``gelu_forward[vanilla]``."""
        return f"{self.op.name}[{self.variant}]"

    @property
    def file(self) -> str:
        """The file that defines it; for the backward that `cpuopt.differentiable` generated, that of its forward."""
        forward = getattr(self.op.inverts.reference, "kernel", None) if self.op.inverts else None
        return str(forward.__code__.co_filename) if forward and self.written else self.where.rpartition(":")[0]

    @property
    def written(self) -> bool:
        """Whether cpuopt wrote its text: a backward from a forward."""
        return self.function.__module__.startswith("cpuopt_generated.")

    def compile(self) -> None:
        """Compile it, or load it from the cache."""
        self.make(self.types)

    def is_compiled(self) -> bool:
        """Return whether it is compiled, or in the cache."""
        return self.made(self.types)

    def direct(self) -> Kernel:
        """Return the same, once it is compiled, with the code for its types in place of numba's dispatcher.

        The dispatcher would spend 7 microseconds on each array of a type that NumPy does not have.
        """
        foreign = any(TYPES[t].dtype.isbuiltin != 1 for t in self.types.values())
        code = self.entry(self.types) if foreign else None
        return replace(self, function=code) if code else self

    def takes(self, arg: Arg, dtype: str) -> bool:
        """Return whether it takes an argument in a type.

        A type that arithmetic has is taken by every kernel of an op that allows it. A narrower one is not: sums would
        be kept in what is written, as by a generated backward.
        """
        if dtype == arg.dtype or dtype not in arg.types:
            return dtype == arg.dtype
        sums = arg.kind == "in" or self.variant != GENERATED
        return TYPES[dtype].computes == dtype or (self.narrow and sums)

    def takes_all(self, types: Mapping[str, str]) -> bool:
        """Return whether it takes arguments in some types, by their names."""
        return all(self.takes(self.op.by_name[name], dtype) for name, dtype in types.items())

    def of(self, types: Mapping[str, str]) -> Kernel:
        """Return the kernel for arguments of some types; the others have their usual one."""
        if types == self.types:
            return self
        kept = {a.name for a in self.op.arrays if a.drawn or not a.shown}  # which no product reads alone
        own = next((self.others[t] for n, t in types.items() if t in self.others and n not in kept), self)
        return replace(own, types=types)

    def typed(self, types: Mapping[str, str]) -> Kernel:
        """Return the kernel for arguments of some types.

        Raises
        ------
        UserError
            For a type that it does not take.
        """
        for name, dtype in types.items():
            if not self.takes(self.op.by_name[name], dtype):
                raise UserError(f"{self.name} does not take {name!r} in {dtype}; choose a variant that does")
        return self.of(types)

    def whole(self, absent: Iterable[str]) -> list[str]:
        """Return those of the absent arguments that it needs all the same."""
        return [n for n in absent if not (self.op.by_name[n].optional or n in self.skips)]

    def require(self, absent: Iterable[str]) -> None:
        """Refuse a call without some arguments, of which one is a gradient that it cannot do without."""
        if missing := self.whole(absent):
            raise UserError(
                f"{self.name} computes {missing[0]!r} in any case, and this call has none, because what it is the "
                f"gradient of is frozen; choose a variant with skips=[{missing[0]!r}]"
            )

    def dtype(self, arg: Arg) -> str:
        """Return the type of an argument."""
        return self.types.get(arg.name, arg.dtype)

    def work(self, sizes: Mapping[str, int]) -> dict[str, Spec]:
        """Compute shape and type of each scratch array.

        Raises
        ------
        UserError
            For a negative or impossibly large length.
        """
        found = {}
        for s in self.scratch:
            n = s.elements(sizes)
            if not 0 <= n <= MOST_SCRATCH:
                at = " ".join(f"{k}={v}" for k, v in sizes.items())
                raise UserError(
                    f"{self.name}: scratch '{s.name}' has {n} elements for {at}; expected 0 to {MOST_SCRATCH}: mend "
                    f"its size  [{self.where}]"
                )
            found[s.name] = (n,), s.dtype
        return found


MOST_SCRATCH = 1 << 31
"""The largest number of elements of a scratch array: 8 GB of float32."""

KERNELS: dict[tuple[str, str], Kernel] = {}
"""Every registered kernel, by (op name, variant)."""


def register(kernel: Kernel, params: Sequence[str], of: str = WIDE) -> None:
    """Add a kernel, after checking its parameters against the declaration.

    Parameters
    ----------
    params : the names of its function's parameters.
    of : the type of arguments that it takes; of another than the usual one, it takes the place of the kernel there.

    Raises
    ------
    UserError
        For parameters that are not the declared ones, a variant whose name flags and tables cannot hold, or a second
        kernel under the same op and variant.
    """
    if not NAME.fullmatch(str(kernel.variant)) or kernel.variant == AUTO:
        raise UserError(
            f"{kernel.op.name}: variant {str(kernel.variant)[:80]!r}: expected a letter, then letters, digits and "
            f"_ - . : = +, up to 64 in all, and not '{AUTO}', which names no variant  [{kernel.where}]"
        )
    want = [*kernel.op.params, *(s.name for s in kernel.scratch)]
    if list(params) != want:
        raise UserError(
            f"{kernel.name}: parameters are ({', '.join(params)}); the declaration says otherwise: "
            f"write def {kernel.op.name}({', '.join(want)})  [{kernel.where}]"
        )
    key = kernel.op.name, kernel.variant
    if of != WIDE:
        KERNELS[key].others[of] = kernel
        return
    if key in KERNELS:
        raise UserError(
            f"{kernel.name}: registered a second time at {kernel.where}; the first stands at {KERNELS[key].where}: "
            "give this one another variant name"
        )
    KERNELS[key] = kernel


FAMILIES = list(dict.fromkeys(name.partition("_forward")[0].partition("_backward")[0] for name in ops.ALL))
"""The families of ops: their first words, which a pattern may be."""


def variants(op: str) -> list[str]:
    """List the variants that an op has."""
    return [v for o, v in KERNELS if o == op]


def find(op: str, variant: str, why: str = "") -> Kernel:
    """Find a kernel.

    Parameters
    ----------
    why : the first words of the error, such as a flag.

    Raises
    ------
    UserError
        If the op has no such variant.
    """
    if (op, variant) not in KERNELS:
        raise UserError(f"{why}{op} has no variant {variant!r}; {nearest(variant, variants(op))}")
    return KERNELS[op, variant]


def op_matches(name: str, pattern: str) -> bool:
    """Return whether an op belongs to a pattern: its name, a glob, or the family's first words (``matmul``)."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, pattern + "_*")


@dataclass(frozen=True)
class Rule:
    """A rule: ops and layers that match use `variant`, if the op has it."""

    op: str
    layer: str
    variant: str

    def covers(self, layer: str) -> bool:
        """Return whether the layer pattern matches."""
        return fnmatchcase(layer, self.layer)

    def __str__(self) -> str:
        return f"{self.op}{'' if self.layer == '*' else '@' + self.layer}={self.variant}"


def parse_swap(text: str) -> Rule:
    """Read ``OP[@LAYER]=VARIANT``; OP and LAYER may be globs."""
    target, equals, variant = text.partition("=")
    op, _, layer = target.partition("@")
    if not (op and equals and variant) or (("@" in target) and not layer):
        raise UserError(f"swap {text!r}: expected OP[@LAYER]=VARIANT, as in 'attention_backward@h.0.*=vanilla'")
    return Rule(op, layer or "*", variant)


class Choice:
    """The rules of one run.

    Parameters
    ----------
    variant : the variant of every op that has it; the others use vanilla.
    swaps : ``OP[@LAYER]=VARIANT`` each, in rising precedence.
    plan : rules of the same form that lie below all swaps. They choose kernels only, never rewrites.

    Raises
    ------
    UserError
        For an op or variant that is not registered.
    """

    def __init__(self, variant: str = BASE, swaps: Sequence[str] = (), plan: Sequence[str] = ()) -> None:
        if isinstance(swaps, str):
            raise UserError(f"swaps {swaps!r}: expected a list of rules, as in [{swaps!r}]")
        self.variant, self.swaps, self.plan = variant, [parse_swap(s) for s in swaps], [parse_swap(s) for s in plan]
        every = dict.fromkeys([*(v for _, v in KERNELS), AUTO])
        if not isinstance(variant, str):
            raise UserError(f"variant {variant!r}: expected the name of one; known: {', '.join(every)}")
        if variant not in every:
            raise UserError(f"variant {variant!r}: no kernel is registered under it; {nearest(variant, every)}")
        for rule in self.swaps:
            matched = [name for name in ops.ALL if op_matches(name, rule.op)]
            if not matched:
                raise UserError(f"swap '{rule}': no op matches {rule.op!r}; {nearest(rule.op, [*FAMILIES, *ops.ALL])}")
            having = [name for name in matched if (name, rule.variant) in KERNELS]
            if not having:
                there = dict.fromkeys(v for name in matched for v in variants(name))
                raise UserError(
                    f"swap '{rule}': {matched[0]} has no variant {rule.variant!r}; {nearest(rule.variant, there)}"
                )

    @property
    def base(self) -> str:
        """The variant of what no rule names."""
        return DEFAULT if self.variant == AUTO else self.variant

    def resolve(self, op: str, layer: str) -> Kernel:
        """Choose the kernel for an op in a layer."""
        rest = Rule("*", "*", self.base)
        for rule in [*reversed(self.swaps), *self.plan, rest]:
            if op_matches(op, rule.op) and rule.covers(layer) and (op, rule.variant) in KERNELS:
                return KERNELS[op, rule.variant]
        return KERNELS[op, BASE]

    def check_used(self, calls: Iterable[tuple[str, str]]) -> None:
        """Refuse a swap that matches none of a program's (op, layer) pairs."""
        calls = list(calls)
        for rule in self.swaps:
            ops_here = [(op, layer) for op, layer in calls if op_matches(op, rule.op)]
            if not ops_here:
                here = dict.fromkeys(op for op, _ in calls)
                raise UserError(f"swap '{rule}': this model does not use {rule.op!r}; it uses {', '.join(here)}")
            layers = dict.fromkeys(layer for op, layer in ops_here if (op, rule.variant) in KERNELS)
            if not any(rule.covers(layer) for layer in layers):
                raise UserError(
                    f"swap '{rule}': no layer of the model with {rule.op} matches {rule.layer!r} "
                    f"and has {rule.variant}; {nearest(rule.layer, layers)}"
                )

    def describe(self) -> dict[str, Any]:
        """Return the choice for a run's record."""
        content: dict[str, Any] = {"variant": self.variant, "swaps": [str(r) for r in self.swaps]}
        return content | ({"plan": [str(r) for r in self.plan]} if self.plan else {})

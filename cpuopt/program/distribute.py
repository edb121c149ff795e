"""The program of one rank of several, or of several micro-batches: gradients in buckets, added in a fixed tree.

Gradients lie one after the other in buckets, in the order in which the backward completes them, and parameters in
buckets alike. Of each bucket a rank owns a slice of whole blocks. When the last gradient of a bucket is there, the rank
sends every other rank that rank's slice, and receives its own from all; kernels add what was received. So each rank has
the sum of its slice. It measures the norm of its slice by blocks, applies the optimizer to it, for which it keeps the
states of its slice alone (ZeRO-1), and receives the other parameters from their owners.

Weights that a step reads as their copies in bfloat16 alone have buckets of their own. Of these a rank receives the
copies, half the bytes. The float32 of the slices that it does not own is then out of date, until the calls of the phase
``collect`` have run. Weights in bfloat16 have buckets of their own too.

If the buckets lie in memory that all ranks see, nothing is sent: a rank reads its slice in the others' buckets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from .. import ops
from ..comm import Comm
from ..ops import collective
from ..ops.storage import TYPES, WIDE
from .precision import NARROW
from .program import Call, Phase, Place, Placed, Program, Value
from .tree import across, buffers, leaves

ALIGN = 16
"""Elements of a cache line, at which a tensor begins."""
BUCKET = 1 << 22
"""Elements from which a bucket is full: 16 MB, which a link sends at its full speed while the backward goes on."""


@dataclass(eq=False)
class Bucket:
    """Some tensors, one after the other.

    Attributes
    ----------
    starts : the element at which each parameter begins, and its gradient.
    size : elements, whole blocks.
    after : the call that completes its last gradient.
    dtype : the type of its weights.
    cuts : where each rank's slice begins, and the end of the last one.
    narrow : whether steps read the copies of its weights alone.
    copies : the copies of those of its weights that have one.
    gradients, weights, partials, halves : its memory; if it is narrow, `halves` is that of the copies.
    """

    name: str
    after: Call
    narrow: bool
    dtype: str
    copies: dict[Value, Value] = field(default_factory=dict)
    starts: dict[Value, int] = field(default_factory=dict)
    size: int = 0
    cuts: list[int] = field(init=False)
    gradients: Value = field(init=False)
    weights: Value = field(init=False)
    partials: list[Value] = field(init=False)
    halves: Value = field(init=False)

    def buffer(self, n: int | None) -> Value:
        """Return a place of `tree`."""
        return self.gradients if n is None else self.partials[n]

    def divide(self, ranks: int) -> None:
        """Cut it into slices of whole blocks, one for each rank."""
        blocks = self.size // ops.BLOCK
        self.cuts = [blocks * r // ranks * ops.BLOCK for r in range(ranks + 1)]

    def of(self, rank: int) -> tuple[int, int]:
        """Return where a rank's slice begins and ends."""
        return self.cuts[rank], self.cuts[rank + 1]


def buckets_of(program: Program, ranks: int) -> list[Bucket]:
    """Divide the trained parameters, in the order in which the backward completes their gradients."""
    last: dict[Value, Call] = {}
    for call in program.phase("backward"):
        last |= dict.fromkeys(call.writes, call)
    order = {call: i for i, call in enumerate(program.calls)}
    trained = {p: last[program.adjoint[p]] for p in program.parameters if p in program.adjoint}
    copies = {call.args["inp"]: call.args["out"] for call in program.phase("convert") if call.op is ops.copy}
    read = {v for call in program.phase("forward", "evaluate", "backward") for v in call.reads}
    found: list[Bucket] = []
    filling: dict[tuple[bool, str], Bucket] = {}
    for p, call in sorted(trained.items(), key=lambda done: order[done[1]]):
        kind = p in copies and p not in read, p.dtype
        if kind not in filling or filling[kind].size >= BUCKET:
            filling[kind] = Bucket(f"bucket.{len(found)}", call, *kind)
            found.append(filling[kind])
        bucket, align = filling[kind], ALIGN if kind == (False, WIDE) else 2 * ALIGN
        bucket.starts[p], bucket.after = bucket.size, call
        bucket.size += -(-prod(p.shape) // align) * align
        bucket.copies |= {p: copies[p]} if p in copies else {}
    for bucket in found:
        bucket.size = -(-bucket.size // ops.BLOCK) * ops.BLOCK
        bucket.divide(ranks)
    return found


def distribute(program: Program, comm: Comm, *, local: int, exact: bool = True, zero: int = 1) -> None:
    """Change a training program, whose gradients are all known before the first update, into that of one rank.

    Parameters
    ----------
    local : the micro-batches of this rank in a step.
    exact : whether all gradients are added in the fixed tree; else the kernels add those of a rank, and the library
        those of ranks.
    zero : 1 to keep the optimizer's states of the own slice, 0 to keep all.
    """
    Distribution(program, comm, local, exact, zero).run()


class Distribution:
    """The pass on a program."""

    def __init__(self, program: Program, comm: Comm, local: int, exact: bool, zero: int) -> None:
        self.program, self.rank, self.size, self.shared = program, comm.rank, comm.size, comm.shared
        self.peers = [r for r in range(comm.size) if r != comm.rank]
        self.exact, self.owns_all = exact, not zero or comm.size == 1
        self.leaves = leaves(local) if exact else []
        self.buckets = buckets_of(program, comm.size)
        self.templates: dict[Bucket, Call] = {}
        """A call of each bucket that adds two of its buffers, which serves for others too."""

    def lay_out(self, bucket: Bucket) -> None:
        """Make the memory of a bucket, and put its tensors into it."""
        program, shape = self.program, (bucket.size,)
        partials = buffers(len(self.leaves))
        bucket.gradients = program.value(f"{bucket.name}.gradients", shape, "gradient")
        bucket.weights = program.value(f"{bucket.name}.weights", shape, "parameter", dtype=bucket.dtype)
        bucket.partials = [program.value(f"{bucket.name}.partial", shape, "gradient") for _ in range(partials)]
        lasting = [bucket.weights, *bucket.partials]
        if bucket.narrow:
            bucket.halves = program.value(f"{bucket.name}.{NARROW}", shape, "copy", dtype=NARROW)
            lasting.append(bucket.halves)
        program.kept += [bucket.gradients, *lasting]
        program.filled.update(lasting)
        if self.shared:
            program.window.append(bucket.gradients)
        for p, start in bucket.starts.items():
            program.within[p] = Place(bucket.weights, start)
            if bucket.narrow:
                program.within[bucket.copies[p]] = Place(bucket.halves, start)
            program.within[program.adjoint[p]] = Place(bucket.gradients, start)

    def view(
        self, host: Value, span: tuple[int, int], what: str, peer: int | None = None, dtype: str | None = None
    ) -> Value:
        """Return the elements of a span as a value; with a peer, those of its memory.

        With another type, it has as many elements from the same byte on.
        """
        value = self.program.value(f"{host}.{what}", (span[1] - span[0],), host.group, dtype=dtype or host.dtype)
        start = span[0] * TYPES[host.dtype].bytes // TYPES[value.dtype].bytes
        self.program.within[value] = Place(host, start, peer)
        return value

    def call(self, op: ops.Op, bucket: Bucket, phase: Phase, **args: Value | int) -> Call:
        """Make a call in a bucket's name."""
        return Call(op, bucket.name, args, phase)

    def run(self) -> None:
        """Add the calls of ranks, and divide norm and update."""
        program = self.program
        for bucket in self.buckets:
            self.lay_out(bucket)
        calls: list[Call] = []
        tail: list[Call] = []
        for call in program.calls:
            if call.phase == "norm" or call.phase == "update":
                continue
            calls.append(call)
            for bucket in (b for b in self.buckets if b.after is call):
                begun, ended = self.reduce(bucket)
                calls += begun
                tail += ended
        if not self.exact or not self.owns_all or self.size == 1:
            gathered: list[Call] = []
        else:
            gathered = self.gather({b: b.gradients for b in self.buckets}, "reduce")
        updates = self.update([c for c in program.calls if c.phase == "update"])
        program.calls = [*calls, *tail, *gathered, *self.norm(), *updates, *self.collect()]
        self.schedule()
        program.verify()

    def schedule(self) -> None:
        """List the backward of each micro-batch, with where it puts its gradients, and what is added after it."""
        backward = list(self.program.phase("backward"))
        for leaf in self.leaves[:-1]:
            targets: dict[Value, Value] = {}
            if leaf.target is not None:
                for b in self.buckets:
                    for p, start in b.starts.items():
                        gradient = self.program.adjoint[p]
                        span = start, start + prod(p.shape)
                        targets[gradient] = self.view(b.partials[leaf.target], span, gradient.name)
            sums = [
                Placed(call, instead={call.args["total"]: b.buffer(to), call.args["part"]: b.buffer(by)})
                for to, by in leaf.sums
                for b, call in self.templates.items()
            ]
            self.program.backwards.append([*(Placed(c, instead=targets) for c in backward), *sums])

    def reduce(self, b: Bucket) -> tuple[list[Call], list[Call]]:
        """Return the calls that begin the sum of a bucket, where its last gradient is there, and those that end it."""
        if not self.exact:
            if self.size == 1:
                return [], []
            begin = self.call(collective.all_reduce, b, "reduce", x=b.gradients)
            return [begin], [self.call(collective.complete, b, "reduce", theirs=b.gradients)]
        begun, ended = list[Call](), list[Call]()
        for to, by in self.leaves[-1].sums:
            begun.append(self.call(ops.accumulate, b, "reduce", total=b.buffer(to), part=b.buffer(by)))
            self.templates[b] = begun[0]
        own = b.of(self.rank)
        pieces = {self.rank: self.view(b.gradients, own, "own")}
        for peer in self.peers:
            theirs = self.received(b.gradients, own, peer) if self.shared else self.space(b, own)
            mine = self.view(b.gradients, b.of(peer), f"for {peer}")
            begun.append(self.call(collective.exchange, b, "reduce", theirs=theirs, mine=mine, peer=peer))
            ended.append(self.call(collective.complete, b, "reduce", theirs=theirs))
            pieces[peer] = theirs
        if own[0] < own[1]:
            pairs = across(self.size, self.rank)
            ended += [self.call(ops.accumulate, b, "reduce", total=pieces[to], part=pieces[by]) for to, by in pairs]
        return begun, ended

    def received(self, host: Value, span: tuple[int, int], peer: int, dtype: str | None = None) -> Value:
        """Return the place in which what a rank sends is found: its own memory, or the same place in this rank's."""
        return self.view(host, span, f"of {peer}", peer if self.shared else None, dtype)

    def space(self, b: Bucket, span: tuple[int, int]) -> Value:
        """Make space for what a rank sends."""
        return self.program.value(f"{b.name}.received", (span[1] - span[0],), "gradient")

    def gather(self, hosts: Mapping[Bucket, Value], phase: Phase) -> list[Call]:
        """Return the calls that fill an array of each bucket with the slices of their owners.

        They pass through the gradients' buckets, which other ranks see, and which are free once a step is applied.
        """
        publish: list[Call] = []
        begin: list[Call] = []
        end: list[Call] = []
        for b, host in hosts.items():
            mine = self.view(b.gradients, b.of(self.rank), "own", dtype=host.dtype)
            if host is not b.gradients:
                publish.append(self.call(ops.copy, b, phase, out=mine, inp=self.view(host, b.of(self.rank), "own")))
            for peer in self.peers:
                theirs = self.received(b.gradients, b.of(peer), peer, host.dtype)
                begin.append(self.call(collective.exchange, b, phase, theirs=theirs, mine=mine, peer=peer))
                end.append(self.call(collective.complete, b, phase, theirs=theirs))
                if host is not b.gradients or self.shared:
                    whole = self.view(host, b.of(peer), f"from {peer}")
                    end.append(self.call(ops.copy, b, phase, out=whole, inp=theirs))
        calls = [*publish, *begin, *end]
        return [c for c in calls if c.op is not ops.copy or c.sizes["N"]]

    def norm(self) -> list[Call]:
        """Measure the own slice of each bucket by blocks, and collect the others' measures."""
        program = self.program
        blocks = [b.size // ops.BLOCK for b in self.buckets]
        own = program.value("norm.own", (sum(blocks),), "gradient", dtype="float64")
        program.kept.append(own)
        program.filled.add(own)
        calls, start = list[Call](), 0
        for b, n in zip(self.buckets, blocks, strict=True):
            lo, hi = b.of(self.rank)
            if lo < hi:
                out = self.view(own, (start + lo // ops.BLOCK, start + hi // ops.BLOCK), b.name)
                inp = self.view(b.gradients, (lo, hi), "own")
                inp.shape = (hi - lo) // ops.BLOCK, ops.BLOCK
                calls.append(self.call(ops.sumsq_blocks, b, "norm", out=out, inp=inp))
            start += n
        program.norm_terms = [own]
        if self.size > 1:
            total = program.value("norm.all", own.shape, "gradient", dtype="float64")
            program.norm_terms = [total]
            calls.append(Call(collective.combine, "norm", {"total": total, "mine": own}, "norm"))
        return calls

    def update(self, updates: Sequence[Call]) -> list[Call]:
        """Apply the optimizer to the own slices, and collect the others' parameters."""
        calls: list[Call] = []
        where = {b.weights: b for b in self.buckets}
        for call in updates:
            p = call.args["param"]
            place = self.program.within[p]
            b, start = where[place.host], place.start
            lo, hi = (0, b.size) if self.owns_all else b.of(self.rank)
            lo, hi = max(lo, start), min(hi, start + prod(p.shape))
            if lo >= hi:
                del self.program.states[p]
            elif hi - lo == prod(p.shape):
                calls.append(call)
            else:
                calls.append(self.update_part(call, b, (lo, hi), f"{lo - start}:{hi - start}"))
                self.program.owned[p] = lo - start, hi - start
        return [*calls, *self.spread(), *self.meet("update")]

    def spread(self) -> list[Call]:
        """Collect what other ranks have updated, and write the copies of weights.

        Of weights whose copies alone are read, the copies are collected.
        """
        narrow = [b for b in self.buckets if b.narrow]
        copies: list[Call] = []
        for b in narrow:
            span = (0, b.size) if self.owns_all else b.of(self.rank)
            both = {"out": self.view(b.halves, span, "own"), "inp": self.view(b.weights, span, "own")}
            copies += [self.call(ops.copy, b, "update", **both)] if span[0] < span[1] else []
        rest = [
            Call(ops.copy, p.name, {"out": copy, "inp": p}, "update")
            for b in self.buckets
            if not b.narrow
            for p, copy in b.copies.items()
        ]
        rest += [replace(c, phase="update") for c in self.program.phase("convert") if c.op is not ops.copy]
        if self.owns_all:
            return [*copies, *rest]
        self.program.copied = {p: copy for b in narrow for p, copy in b.copies.items()}
        return [*copies, *self.gather({b: b.halves if b.narrow else b.weights for b in self.buckets}, "update"), *rest]

    def collect(self) -> list[Call]:
        """Bring the weights up to date whose copies alone were collected."""
        if not self.program.copied:
            return []
        hosts = {b: b.weights for b in self.buckets if b.narrow}
        return [*self.gather(hosts, "collect"), *self.meet("collect")]

    def meet(self, phase: Phase) -> list[Call]:
        """Wait until no rank reads the buckets of another, if they lie in memory that all see."""
        last = self.buckets[-1:] if self.shared else []
        return [self.call(collective.barrier, b, phase, x=b.gradients) for b in last]

    def update_part(self, call: Call, b: Bucket, span: tuple[int, int], what: str) -> Call:
        """Apply the optimizer to a part of a parameter, of which alone this rank keeps the states."""
        p, program = call.args["param"], self.program
        parts: Mapping[str, Value] = {
            name: program.value(f"{v}[{what}]", (span[1] - span[0],), v.group, dtype=v.dtype)
            for name, v in program.states[p].items()
        }
        program.states[p] = dict(parts)
        views = {"param": self.view(b.weights, span, what), "grad": self.view(b.gradients, span, what)}
        numbers = {"first": call.args["first"] + span[0] - program.within[p].start} if call.types else {}
        return Call(call.op, call.layer, {**call.args, **views, **parts, **numbers}, call.phase)

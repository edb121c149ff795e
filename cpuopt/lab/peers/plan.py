"""The plan of `cpuopt bench`, and the programs that it compares."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ... import models
from ...errors import UserError
from ...isolate.process import Side
from ...ops.storage import WIDE
from ...train.settings import require


@dataclass(frozen=True)
class Peer:
    """A way to train with PyTorch.

    Attributes
    ----------
    mode : eager, compile, or transformers for its own model.
    bf16 : ``autocast`` for forward and loss under it, ``all`` for weights and moments in bfloat16 too; empty: float32.
    tuned : whether its allocator keeps what is freed, and on AMD's processors MKL takes its AVX-512 code, as by
        ``benchmarks/peer_tuning.py``.
    """

    mode: str
    bf16: str = ""
    tuned: bool = False

    @property
    def dtype(self) -> str:
        """The class that it is compared in, by the words of ``--dtype``: the type of what its products read."""
        return "bf16" if self.bf16 else WIDE


PLAIN = {
    "torch-eager": Peer("eager"),
    "torch-compile": Peer("compile"),
    "transformers": Peer("transformers"),
    "torch-amp": Peer("eager", "autocast"),
    "torch-amp-compile": Peer("compile", "autocast"),
    "torch-bf16": Peer("eager", "all"),
}
TUNED = {f"{name}-tuned": replace(peer, tuned=True) for name, peer in PLAIN.items()}
PEERS = PLAIN | TUNED
BEST = "torch-best"
"""The word for all tuned peers that this machine has: at every size that was measured they were the faster ones."""
SIZES = "1x16,1x32,2x16,1x64,4x64,16x64,1x1024"
OPTIMIZER = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
ROOT = Path(__file__).resolve().parents[3]
START_ROUNDS = 5
"""The estimated time of start and warm-up, in rounds."""


@dataclass(frozen=True)
class Plan:
    """The sizes and sides to measure.

    Attributes
    ----------
    model : preset or sizes, as for `train`.
    sizes : (B, T) each.
    peers : names from `PEERS`, or `BEST`.
    against : variants of cpuopt, which run without the swaps and with their own rewrites.
    variant, swap, fuse, kernels : the settings of cpuopt's own side.
    recompute : the blocks that cpuopt's sides compute again in the backward, as for `train`.
    dtype : the type of cpuopt's sides; None: that of the peer, and float32 for `against`. `BEST` has the peers of it,
        and for int8 those of bf16.
    moments, weights : the types in which cpuopt's sides store the optimizer's states and the weights.
    threads : the number of threads of every side.
    rounds : the number of rounds, each with a trial of both sides.
    seed : the random seed for the order of trials, the batches and the initial weights.
    peer_python : a Python that has torch.
    processes : the number of processes that compile.
    """

    model: str = models.DEFAULT
    sizes: tuple[tuple[int, int], ...] = ((4, 64),)
    peers: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    variant: str = "vanilla"
    swap: tuple[str, ...] = ()
    fuse: str = "auto"
    recompute: str | int = 0
    dtype: str | None = None
    moments: str = WIDE
    weights: str = WIDE
    kernels: tuple[str, ...] = ()
    threads: int = 1
    rounds: int = 10
    seed: int = 0
    peer_python: str = sys.executable
    processes: int = 1

    def check(self) -> None:
        """Refuse a plan that cannot be measured, before anything starts.

        Raises
        ------
        UserError
            Naming the flag.
        """
        config = models.parse(self.model)
        for B, T in self.sizes:
            if config.block_size < T:
                name = models.name_of(config)
                raise UserError(f"--sizes {B}x{T}: {name} has a context of {config.block_size} tokens; take T up to it")
        for flag, n, least in ("--rounds", self.rounds, 2), ("--threads", self.threads, 1), ("--seed", self.seed, 0):
            if n < least:
                raise UserError(f"{flag} {n}: expected {least} or more")
        for name in ("dtype", "moments", "weights", "recompute"):
            require(name, getattr(self, name))
        if wide := [n for n in (*self.every, *self.against) if self.weights != WIDE == self.own_dtype(n)]:
            raise UserError(
                f"--weights {self.weights}: products beside {wide[0]} read float32; add --dtype bf16, or leave "
                f"{wide[0]} out"
            )
        for peer in self.peers:
            if peer not in (*PEERS, BEST):
                known = f"one of {', '.join(PLAIN)}, each also with -tuned behind it, or {BEST}"
                raise UserError(f"--peer {peer}: expected {known}; for a variant, --against {peer}")
            if config.files:
                name = models.name_of(config)
                raise UserError(f"--peer {peer}: it does not have {name}; compare variants, as in --against vanilla")

    @property
    def every(self) -> dict[str, bool]:
        """The names of all peers, and whether each may be left out because this machine does not have it."""
        best = TUNED.items() if BEST in self.peers else ()
        found = {name: True for name, peer in best if self.dtype in (None, peer.dtype, "int8" if peer.bf16 else "")}
        return found | dict.fromkeys((p for p in self.peers if p != BEST), False)

    def own_dtype(self, name: str) -> str:
        """Return the type of cpuopt's own side against a peer or a variant."""
        return self.dtype or (PEERS[name].dtype if name in PEERS else WIDE)

    @property
    def cost(self) -> float:
        """The estimated time of the plan, in the unit of `View.at`."""
        rounds = (self.rounds + START_ROUNDS) * (len(self.every) + len(self.against))
        return sum(rounds * round_cost(B, T) for B, T in self.sizes)


def round_cost(B: int, T: int) -> float:
    """Estimate the time of a round, in tokens. The part that does not depend on the batch counts as 64 tokens."""
    return 64.0 + B * T


def default_sizes(model: str) -> tuple[tuple[int, int], ...]:
    """Return the default sizes that fit a model's context."""
    config = models.parse(model)
    usual = parse_sizes("4x64" if config.files else SIZES)
    return own_sizes(model, [(B, T) for B, T in usual if config.block_size >= T])


def own_sizes(model: str, sizes: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the sizes as the model has them: one that brings its inputs has its own."""
    config = models.parse(model)
    return tuple(dict.fromkeys(config.batch_size(B, T) for B, T in sizes))


def parse_sizes(text: str) -> tuple[tuple[int, int], ...]:
    """Read ``4x64,16x64``: rows by tokens.

    Raises
    ------
    UserError
        For anything else.
    """
    sizes = []
    for item in text.split(","):
        size = re.fullmatch(r"([1-9][0-9]{0,6})x([1-9][0-9]{0,6})", item.strip())
        if not size:
            raise UserError(f"--sizes {text!r}: {item!r} is no size; expected BxT, as in 4x64,16x64")
        sizes.append((int(size[1]), int(size[2])))
    return tuple(dict.fromkeys(sizes))


def own_side(plan: Plan, against: str) -> Side:
    """Describe cpuopt's own side against a peer or a variant."""
    return cpuopt_side(plan, "cpuopt", plan.variant, plan.own_dtype(against), plan.swap, plan.fuse)


def cpuopt_side(
    plan: Plan, name: str, variant: str, dtype: str, swap: tuple[str, ...] = (), fuse: str = "auto"
) -> Side:
    """Describe cpuopt with some kernels, in a type."""
    common = ("model", "moments", "weights", "recompute", "kernels", "threads", "seed", "processes")
    settings = {name: getattr(plan, name) for name in common} | OPTIMIZER
    settings |= {"variant": variant, "swap": swap, "fuse": fuse, "dtype": dtype}
    side = Side.module(name, "cpuopt.lab.peers.worker", NUMBA_NUM_THREADS=str(plan.threads))
    return replace(side, settings={"settings": settings})


def peer_sides(plan: Plan) -> list[Side]:
    """Describe the peers of a plan.

    Raises
    ------
    UserError
        If the script of PyTorch's side is missing.
    """
    script = ROOT / "benchmarks" / "peer_worker.py"
    if plan.peers and not script.is_file():
        raise UserError(
            f"--peer {plan.peers[0]}: there is no {str(script)!r}, because an installed package does not include it; "
            "run from a checkout (pip install -e '.[peers]'), or compare variants: --against vanilla"
        )
    n, command = str(plan.threads), (plan.peer_python, str(script))
    environment = {"OMP_NUM_THREADS": n, "MKL_NUM_THREADS": n}
    config = models.parse(plan.model)
    common = {"model": config.model, "sizes": asdict(config), "threads": plan.threads, "optimizer": OPTIMIZER}
    return [
        *(Side(p, command, {**asdict(PEERS[p]), **common}, environment) for p in plan.every),
        *(cpuopt_side(plan, variant, variant, plan.own_dtype(variant)) for variant in plan.against),
    ]

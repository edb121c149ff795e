"""The parameters that a run leaves as they are: its checkpoints have their hashes alone.

Their numbers come from where the run had them, ``--init`` or the seed, whenever they are needed. They must still be the
same there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np

from ..errors import UserError
from ..models import Config
from ..ops.dequantize import BLOCKS, Quantized, width_of
from ..ops.storage import TYPES, WIDE
from ..program.precision import NARROW
from ..weights.tensors import Array, to_bf16

if TYPE_CHECKING:  # numba comes with it
    from ..engine import Engine

Read = Callable[[str], Array]


ROUNDED = "bf16:"
"""What the hash of numbers in bfloat16 begins with; that of blocks of int8 begins with their name."""


def digest(x: Array) -> str:
    """Return the hash of a parameter's numbers; it says if they are bfloat16, or int8 with their scales."""
    if isinstance(x, Quantized):
        return f"{x.kind}:" + sha256(x.tobytes() + x.scales.tobytes()).hexdigest()
    if x.dtype.name == NARROW:
        return ROUNDED + sha256(np.ascontiguousarray(x).view(np.uint16).data).hexdigest()
    return sha256(np.ascontiguousarray(x, WIDE).data).hexdigest()


def is_that(x: Array, known: str) -> bool:
    """Return whether numbers have a hash, rounded or quantized first if the run had them so."""
    base = known.partition(":")[0]
    if base in BLOCKS and x.size % width_of(x.shape, base) == 0:
        return digest(Quantized.made(x, base)) == known
    return digest(to_bf16(x).view(TYPES[NARROW].dtype) if known.startswith(ROUNDED) else x) == known


def digests(engine: Engine) -> dict[str, str]:
    """Return the hash of each parameter that an engine leaves as it is, by name."""
    frozen = {p.name: engine.array(p) for p in engine.program.parameters if not p.trained}
    with ThreadPoolExecutor(engine.threads) as pool:
        return dict(zip(frozen, pool.map(digest, frozen.values()), strict=True))


def drawn(config: Config, seed: int) -> Read:
    """Return a function that draws the initial weights of a parameter."""

    def read(name: str) -> Array:
        from ..nn.initial import initialize  # late: numba comes with it

        module = config.module()
        found = {n: np.empty(p.shape, WIDE) for n, p in module.named_parameters() if n == name}
        initialize(module, found, seed)
        return found[name]

    return read


def compared(read: Read, hashes: Mapping[str, str], run: str, source: str) -> Read:
    """Return a function that reads a frozen parameter and refuses another than the run had.

    Parameters
    ----------
    hashes : of the frozen parameters, by name.
    run, source : what they belong to, and where they are read, for the error.
    """

    def checked(name: str) -> Array:
        try:
            x = read(name)
        except KeyError as e:
            raise UserError(f"{run}: {source} has no {name!r}, which the run left as it was there") from e
        if not is_that(x, hashes.get(name, "")):
            raise UserError(
                f"{run}: {name!r} is not what it was in {source}, and the run left it as it was; restore it, or give "
                "its place now with --init"
            )
        return x

    return checked

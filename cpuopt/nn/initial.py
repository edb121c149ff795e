"""Initial weights."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ..ops.storage import WIDE
from .modules import Module, Parameter

Array = np.ndarray[Any, Any]


def initialize(
    model: Module,
    parameters: Mapping[str, Array],
    seed: int,
    workers: int = 1,
    ended: threading.Event | None = None,
) -> None:
    """Fill parameters of a model with initial weights: each depends on the seed and its name alone.

    Parameters
    ----------
    parameters : by name, all of them or some.
    ended : when it is set, the parameters that have not been begun are left as they are.
    """

    def fill(name: str, p: Parameter) -> None:
        if ended and ended.is_set():
            return
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(name.encode())])))
        drawn = parameters[name] if parameters[name].dtype == WIDE else np.empty(p.shape, WIDE)
        p.init(rng, drawn)
        if drawn is not parameters[name]:
            parameters[name][...] = drawn

    with ThreadPoolExecutor(workers) as pool:  # NumPy draws without Python's lock
        list(pool.map(lambda named: fill(*named), [(n, p) for n, p in model.named_parameters() if n in parameters]))

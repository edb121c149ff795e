"""The instruction set that kernels are compiled for."""

import os
from collections.abc import Iterable

import llvmlite.binding as llvm
import numba

from ....errors import UserError
from ....machine import ORDER, ORDERS
from . import InstructionSet, avx2, avx512, avx512bf16, avx512vnni, neon, plain, targets

SETS = avx512bf16.AHEAD, avx512bf16.SET, avx512vnni.SET, avx512.SET, avx2.SET, neon.SET, plain.SET
"""In order of preference."""
IMPLIED = {"x86-64-v3": avx2.SET.features, "x86-64-v4": avx2.SET.features | avx512.SET.features}
"""The features of processors that ``NUMBA_CPU_NAME`` may name."""


def choose(features: Iterable[str]) -> InstructionSet:
    """Choose the instruction set of a machine from LLVM's names of its features."""
    features = frozenset(features)
    return next(s for s in SETS if s.features <= features)


def features() -> frozenset[str]:
    """Return the features by which instruction sets are chosen: those of ``CPUOPT_TARGET``, or those that are there."""
    target = targets.chosen()
    return target.features if target else there()


def order() -> str:
    """Return the order of sums that ``CPUOPT_ORDER`` asks for; empty for that of the machine."""
    asked = os.environ.get(ORDER, "")
    if asked not in ("", *ORDERS):
        raise UserError(f"{ORDER}={asked}: expected {' or '.join(ORDERS)}; unset it for the order of this machine")
    return asked


def there() -> frozenset[str]:
    """Return what LLVM names of the machine for which numba compiles: this one, or that of ``NUMBA_CPU_NAME``.

    Every aarch64 has NEON, also if LLVM names no feature, as under an emulator that shows the ``/proc/cpuinfo`` of
    another processor.
    """
    if llvm.get_process_triple().startswith(("aarch64", "arm64")):
        return neon.SET.features
    if numba.config.CPU_NAME is None and numba.config.CPU_FEATURES is None:
        return frozenset(name for name, there in llvm.get_host_cpu_features().items() if there)
    listed = {f[1:] for f in (numba.config.CPU_FEATURES or "").split(",") if f.startswith("+")}
    return frozenset(listed) | IMPLIED.get(numba.config.CPU_NAME, frozenset())

"""Which processor kernels are compiled for."""

from __future__ import annotations

from numba.core.registry import cpu_target


def target() -> tuple[str, str]:
    """Name the processor that code is made for, and its features: this one, or what ``NUMBA_CPU_NAME`` says."""
    _, name, features = cpu_target.target_context.codegen().magic_tuple()
    return str(name), str(features)

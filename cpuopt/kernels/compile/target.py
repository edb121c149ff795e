"""The processor for which kernels are compiled."""

from __future__ import annotations

from .numba_internals import cpu_target


def target() -> tuple[str, str]:
    """Return the processor for which code is compiled, and its features: this one, or that of ``NUMBA_CPU_NAME``."""
    _, name, features = cpu_target.target_context.codegen().magic_tuple()
    return str(name), str(features)

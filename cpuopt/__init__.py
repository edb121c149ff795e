"""A CPU performance laboratory for LLM training, in Python with numba.

Train a model with `Engine`, or `build` one by its name; time its step with ``Engine.profile``; exchange one kernel with
`load_kernels` and `Choice`; compare two kernels with `compare` or `sweep`; declare an op with `differentiable`. Write
models with `nn` and `functional`. A mistake of the caller raises `UserError`.

These names are imported when first used, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Engine": "engine",
    "build": "engine",
    "compare": "library.results",
    "sweep": "library.sweep",
    "ProfileReport": "library.results",
    "ComparisonReport": "library.results",
    "SweepReport": "library.sweep",
    "load_kernels": "engine",
    "Choice": "kernels.registry",
    "kernel": "kernels.compile.jit",
    "helper": "kernels.compile.jit",
    "differentiable": "custom",
    "check_gradient": "check.gradient",
    "UserError": "errors",
}
_MODULES = {m: m for m in ("nn", "functional", "ops", "models", "data")} | {"registry": "kernels.registry"}

__all__ = [*_HOMES, *_MODULES]
_HOMES_OF_HOOKS = {
    "load_ipython_extension": "library.magics",
    "profile": "library.instruments",
    "ab": "library.instruments",
}
"""What ``%load_ext cpuopt`` asks for, and what `Engine.profile` and `Engine.ab` call."""


def __getattr__(name: str) -> Any:
    if home := _HOMES.get(name) or _HOMES_OF_HOOKS.get(name):
        return getattr(importlib.import_module(f".{home}", __name__), name)
    if name in _MODULES:
        return importlib.import_module(f".{_MODULES[name]}", __name__)
    raise AttributeError(f"module 'cpuopt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

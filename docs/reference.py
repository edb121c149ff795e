"""The page of the site that describes every public name, grouped by task; mkdocstrings fills it from the docstrings."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

from cpuopt import functional, nn


def modules() -> list[str]:
    """Name what `cpuopt.nn` offers: its modules, and what parameters are made of."""
    found = [n for n, x in vars(nn).items() if isinstance(x, type) and issubclass(x, nn.Module)]
    return ["Module", "Parameter", "Buffer", *(n for n in found if n != "Module"), "normal", "uniform", "constant"]


def functions() -> list[str]:
    """Name the functions of `cpuopt.functional`, so that a new op's is among them."""
    found = {n: f for n, f in vars(functional).items() if n.islower() and inspect.isfunction(f)}
    return [n for n in found if n not in ("current", "__getattr__")]


GROUPS: dict[str, tuple[str, ...]] = {
    "Train": ("cpuopt.Engine", "cpuopt.build", "cpuopt.UserError"),
    "Measure and compare": (
        "cpuopt.compare",
        "cpuopt.sweep",
        "cpuopt.ProfileReport",
        "cpuopt.ComparisonReport",
        "cpuopt.SweepReport",
    ),
    "Write kernels": (
        *("cpuopt.kernel", "cpuopt.helper", "cpuopt.load_kernels", "cpuopt.Choice"),
        *(f"cpuopt.registry.{name}" for name in ("find", "variants", "Scratch")),
    ),
    "Declare ops": (
        *("cpuopt.differentiable", "cpuopt.check_gradient", "cpuopt.ops.Op", "cpuopt.ops.Optimizer"),
        *(f"cpuopt.ops.declaration.{name}" for name in ("out", "acc", "state", "inp", "index", "scalar", "symbols")),
    ),
    "Write models: modules": tuple(f"cpuopt.nn.{name}" for name in modules()),
    "Write models: functions": tuple(f"cpuopt.functional.{name}" for name in functions()),
    "Models and data": (
        *(f"cpuopt.models.{name}" for name in ("Config", "register", "load", "parse", "preset_names")),
        *(f"cpuopt.data.{name}" for name in ("load_corpus", "Corpus", "Batches", "get_tokenizer")),
        *(f"cpuopt.data.{name}" for name in ("read_tokens", "write_tokens", "prepare")),
    ),
}
"""Public names by task, as a program writes them."""
MEMBERS: dict[str, tuple[str, ...]] = {
    "cpuopt.Engine": (
        *("step", "forward", "profile", "ab", "generate", "parameters", "gradients", "states", "array", "loss"),
        *("save_weights", "load_weights", "predicted_peak_bytes"),
    ),
    "cpuopt.ProfileReport": ("write_html",),
    "cpuopt.ComparisonReport": ("verdict", "ratio"),
    "cpuopt.SweepReport": ("write_html", "write_svg", "write_csv"),
    "cpuopt.nn.Module": ("parameters",),
    "cpuopt.models.Config": ("module", "inputs", "from_transformers", "to_transformers"),
    "cpuopt.data.Corpus": ("batches",),
    "cpuopt.data.Batches": ("at", "batch"),
}
"""Methods and attributes for users, by class; those of other classes are for the package."""
HEAD = """# Reference

Every public name, by task; [recipes](api.md) show them at work. Arrays are NumPy's, C-contiguous; numbers are
float32 and ids int32 unless something else is said. A mistake raises `cpuopt.UserError`.
"""


def find(name: str) -> Any:
    """Return the object of a public name."""
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], 2):
        found = getattr(found, part, None) or importlib.import_module(".".join(parts[:i]))
    return found


def home(name: str) -> str:
    """Return where a public name is written, which mkdocstrings reads without importing it."""
    found = find(name)
    module = found.__module__ if isinstance(found, type) else getattr(found, "__wrapped__", found).__module__
    return f"{module}.{found.__qualname__}"


def page() -> str:
    """Return the page, with a directive for each name."""

    def lines() -> Iterator[str]:
        yield HEAD
        for group, names in GROUPS.items():
            yield f"## {group}\n"
            for name in names:
                shown = f"heading: {name}, toc_label: {name}, members: [{', '.join(MEMBERS.get(name, ()))}]"
                yield f"::: {home(name)}\n    options: {{{shown}}}\n"

    return "\n".join(lines())

"""The variable of a `prange` as a signed integer, as in Python: numba's is unsigned, so that ``-i`` is 2**64 - i.

A pass in numba's pipeline, before types are inferred, puts ``i = np.int64(index)`` at the top of each parallel loop. A
bare index, as in ``x[i]``, stays unsigned: a signed one is tested for negative values, and the loop is not vectorized.
The package's own kernels do without the pass, so that their machine code stays as it is.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from .numba_internals import (
    CompilerBase,
    DefaultPassBuilder,
    FunctionPass,
    ReconstructSSA,
    build_definitions,
    get_definition,
    guard,
    ir,
    mk_unique_var,
    register_pass,
)


@register_pass(mutates_CFG=False, analysis_only=False)
class SignedIndex(FunctionPass):  # type: ignore[misc]
    """The pass. It runs behind single assignment, so each name has one definition, or is a merge of several."""

    _name = "cpuopt_signed_index"

    def __init__(self) -> None:  # abstract in numba's class
        pass

    def run_pass(self, state: Any) -> bool:
        """Rewrite the function; return whether there was anything to do."""
        code, bare = state.func_ir, {}
        for block in code.blocks.values():
            made = []
            for s in block.body:
                made.append(s)
                if isinstance(s, ir.Assign) and not s.target.name.startswith("$") and _is_index(code, s.value):
                    index, cast = (block.scope.redefine(mk_unique_var(n), s.loc) for n in ("$index", "$int64"))
                    bare[s.target.name] = index
                    made[-1:] = [
                        ir.Assign(s.value, index, s.loc),
                        ir.Assign(ir.Global("int64", np.int64, s.loc), cast, s.loc),
                        ir.Assign(ir.Expr.call(cast, [index], (), s.loc), s.target, s.loc),
                    ]
            block.body = made
        every = [s for block in code.blocks.values() for s in block.body]
        several = set()
        for s in every:
            access = getattr(s, "value", None) if isinstance(s, ir.Assign) else s
            if isinstance(access, ir.SetItem) or (isinstance(access, ir.Expr) and access.op == "getitem"):
                access.index = bare.get(access.index.name, access.index)
                several.add(access.index.name)
        for s in every:
            if isinstance(s, ir.Assign) and s.target.name in several and s.target.name.startswith("$"):
                if isinstance(s.value, ir.Expr) and s.value.op == "build_tuple":
                    s.value.items = [bare.get(v.name, v) for v in s.value.items]
        code._definitions = build_definitions(code.blocks)
        return bool(bare)


def _is_index(code: Any, value: Any) -> bool:
    """Return whether a value is what a `prange` yields."""
    for step in ("pair_first", "iternext", "getiter", "call"):
        found = guard(get_definition, code, value) if isinstance(value, ir.Var) else value
        if not isinstance(found, ir.Expr) or found.op != step:
            return False
        value = found.func if step == "call" else found.value
    found = guard(get_definition, code, value)
    if isinstance(found, ir.Expr) and found.op == "getattr":  # numba.prange
        return bool(found.attr == "prange")
    return getattr(found, "value", None) is numba.prange


class PythonIntegers(CompilerBase):  # type: ignore[misc]
    """Numba's compiler with the pass."""

    def define_pipelines(self) -> list[Any]:
        """Return the passes in their order."""
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.add_pass_after(SignedIndex, ReconstructSSA)
        passes.finalize()
        return [passes]

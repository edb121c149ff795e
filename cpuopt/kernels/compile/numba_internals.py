"""All that cpuopt uses of numba beyond its documented interface, by the versions that have it.

numba promises nothing of these names. Each is checked before it is used: that it exists, takes the parameters that it
took, and works with the names that the compile cache replaces or reads. With another version nothing is cached, and a
warning says so.

A new version of numba: add its line to `INTERNALS`, raise the bound in ``pyproject.toml``, and run
``tests/kernels/test_numba_internals.py``. What it changed is ``_ALIKE | {...}`` there.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import pkgutil
from collections.abc import Mapping

import numba
from numba.core import ir as ir
from numba.core.compiler import CompilerBase as CompilerBase
from numba.core.compiler import DefaultPassBuilder as DefaultPassBuilder
from numba.core.compiler_machinery import FunctionPass as FunctionPass
from numba.core.compiler_machinery import register_pass as register_pass
from numba.core.ir_utils import build_definitions as build_definitions
from numba.core.ir_utils import get_definition as get_definition
from numba.core.ir_utils import guard as guard
from numba.core.ir_utils import mk_unique_var as mk_unique_var
from numba.core.registry import cpu_target as cpu_target
from numba.core.untyped_passes import ReconstructSSA as ReconstructSSA
from numba.np.arrayobj import populate_array as populate_array
from numba.np.numpy_support import FROM_DTYPE as FROM_DTYPE
from numba.np.ufunc import parallel as parallel

with contextlib.suppress(ImportError):  # `unsupported` reports it
    from numba.core import bytecode, caching, codegen, compiler, debuginfo, errors, serialize, sigutils  # noqa: F401
    from numba.core.lowering import BaseLower as BaseLower
    from numba.parfors import parfor_lowering  # noqa: F401

Internals = Mapping[str, tuple[str, str]]
"""Functions by path, each with its parameters, and names that its code must use."""
_ALIKE: Internals = {
    "core.bytecode:FunctionIdentity.from_function": ("pyfunc", "_unique_ids"),
    "core.caching:_Cache.load_overload": ("self sig target_context", ""),
    "core.caching:_Cache.save_overload": ("self sig data", ""),
    "core.codegen:CPUCodegen.magic_tuple": ("self", "_tm_features"),
    "core.codegen:CodeLibrary.has_dynamic_globals": ("self", ""),
    "core.codegen:CPUCodeLibrary._finalize_final_module": ("self", "_finalize_specific _finalized"),
    "core.codegen:CPUCodeLibrary._get_module_for_linking": ("self", "_shared_module"),
    "core.codegen:CPUCodeLibrary._unserialize": (
        "codegen state",
        "_set_compiled_object _shared_module _finalize_final_module _load_defined_symbols",
    ),
    "core.codegen:CPUCodeLibrary.serialize_using_object_code": ("self", "_get_compiled_object _get_module_for_linking"),
    "core.codegen:JitEngine._load_defined_symbols": ("self mod", "functions global_variables _defined_symbols"),
    "core.codegen:JITCodeLibrary._finalize_specific": ("self", "_engine finalize_object"),
    "core.codegen:JITCodeLibrary.get_pointer_to_function": ("self name", "is_symbol_defined get_function_address"),
    "core.codegen:JITCPUCodegen.set_env": ("self env_name env", "_engine"),
    "core.compiler:CompileResult._reduce": ("self", "serialize_using_object_code reload_init"),
    "core.compiler:CompileResult._rebuild": (
        "target_context libdata fndesc env signature objectmode lifted typeann reload_init referenced_envs",
        "codegen unserialize_library get_executable",
    ),
    "core.cpu:CPUContext.codegen": ("self", "_internal_codegen"),
    "core.cpu:CPUContext.get_executable": ("self library fndesc env", "codegen set_env"),
    "core.cpu_options:FastMathOptions.encode": ("self", "flags"),
    "core.dispatcher:Dispatcher.__init__": (
        "self py_func locals targetoptions pipeline_class",
        "locals targetoptions targetctx _cache _compiler",
    ),
    "core.dispatcher:Dispatcher.compile": (
        "self sig",
        "_cache load_overload _compiler compile insert_user_function add_overload",
    ),
    "core.dispatcher:_FunctionCompiler.__init__": (
        "self py_func targetdescr targetoptions locals pipeline_class",
        "pipeline_class",
    ),
    "core.dispatcher:_FunctionCompiler._compile_core": ("self args return_type", "_customize_flags"),
    "core.dispatcher:_FunctionCompiler.compile": ("self args return_type", ""),
    "core.dispatcher:_DispatcherBase.add_overload": ("self cres", "_insert overloads"),
    "core.extending:_Intrinsic.__init__": (
        "self name defn prefer_literal kwargs",
        "_defn _ctor_kwargs _prefer_literal",
    ),
    "core.compiler:DefaultPassBuilder.define_nopython_pipeline": ("state name", "define_untyped_pipeline"),
    "core.compiler_machinery:PassManager.add_pass_after": ("self pass_cls location", ""),
    "core.ir_utils:get_definition": ("func_ir name kwargs", ""),
    "core.ir_utils:build_definitions": ("blocks definitions", ""),
    "core.ir_utils:mk_unique_var": ("prefix", ""),
    "core.serialize:dumps": ("obj", ""),
    "core.sigutils:normalize_signature": ("sig", ""),
    "core.typing.templates:Signature.__init__": ("self return_type args recvr pysig", "_return_type _args _recvr"),
    "parfors.parfor_lowering:_create_gufunc_for_parfor_body": (
        "lowerer parfor typemap typingctx targetctx flags locals has_aliases index_var_typ races",
        "compile_ir",
    ),
    # of those who look at machine code
    "core.codegen:CPUCodegen._module_pass_manager": ("self kwargs", "getModulePassManager"),
    "core.codegen:CPUCodeLibrary.add_ir_module": ("self ir_module", "add_llvm_module"),
    "core.codegen:CPUCodeLibrary._optimize_functions": ("self ll_module", "functions run"),
    "core.codegen:CPUCodeLibrary._optimize_final_module": ("self", "_final_module"),
    "core.compiler:CompilerBase.__init__": (
        "self typingctx targetctx library args return_type flags locals",
        "flags",
    ),
    "core.debuginfo:DIBuilder.__init__": ("self module filepath cgctx directives_only", "difile"),
    "core.lowering:BaseLower._compute_def_location": ("self", "func_ir get_func_body_first_lineno"),
    "np.ufunc.parallel:_launch_threads": ("", "_load_threading_functions"),
}
INTERNALS: dict[str, Internals] = {"0.65": _ALIKE, "0.66": _ALIKE, "0.67": _ALIKE, "0.68": _ALIKE}
"""What is used, by the minor version of numba; the oldest comes first."""


def minor(version: str) -> str:
    """Return the minor version, as in ``0.68`` of ``0.68.1``."""
    return ".".join(version.split(".")[:2])


def bounds() -> str:
    """Return the supported versions as pip takes them."""
    first, *_, last = INTERNALS
    before, _, number = last.rpartition(".")
    return f"numba>={first},<{before}.{int(number) + 1}"


@functools.cache
def unsupported() -> str | None:
    """Return what is wrong with this numba, and what to do, or None. Then nothing is cached."""
    version = numba.__version__
    if (used := INTERNALS.get(minor(version))) is None:
        known = f"{next(iter(INTERNALS))} to {[*INTERNALS][-1]}"
        return f"numba {version} is not among the supported versions, {known}; run: pip install '{bounds()}'"
    for path, (parameters, names) in used.items():
        try:
            found = pkgutil.resolve_name(f"numba.{path}")
            found = inspect.unwrap(getattr(found, "fget", found))
            same = " ".join(inspect.signature(found).parameters) == parameters
            there = set(names.split()) <= set(found.__code__.co_names)
        except (ImportError, AttributeError, TypeError) as error:
            return f"numba {version}: {error}; run: pip install --force-reinstall '{bounds()}'"
        if not (same and there):
            return f"numba {version} changed numba.{path}; run: pip install --force-reinstall '{bounds()}'"
    return None


def target() -> tuple[str, str]:
    """Return the processor for which code is compiled, and its features: this one, or that of ``NUMBA_CPU_NAME``."""
    _, name, features = cpu_target.target_context.codegen().magic_tuple()
    return str(name), str(features)

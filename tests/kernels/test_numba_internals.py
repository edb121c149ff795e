"""What the compile cache uses of numba's internals: there, checked, and in the versions that are supported."""

import os
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import numba
import numpy as np
import pytest
from numba import types
from numba.core.compiler import CompileResult

from cpuopt.files import CacheWarning
from cpuopt.kernels.compile import cache, entries, jit, numba_internals
from cpuopt.kernels.compile.numba_internals import INTERNALS, bounds, minor, unsupported

ROOT = Path(__file__).parent.parent.parent
OLDEST, *_, NEWEST = INTERNALS
NOW = INTERNALS.get(minor(numba.__version__), {})


@pytest.fixture
def recheck(monkeypatch, tmp_path):
    """Look at numba anew, in a test that changes it."""
    monkeypatch.setenv("CPUOPT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(entries, "warned", set())
    unsupported.cache_clear()
    yield
    monkeypatch.undo()
    unsupported.cache_clear()


def test_this_numba_is_supported():
    assert unsupported() is None
    assert len(NOW) > 30


@pytest.mark.parametrize("path", NOW)
@pytest.mark.parametrize("change", ["gone", "other parameters", "other code"])
def test_each_internal_is_checked(monkeypatch, recheck, path, change):
    parameters, names = NOW[path]
    module, _, name = path.partition(":")
    owner = sys.modules[f"numba.{module}"]
    *outer, name = name.split(".")
    for part in outer:
        owner = getattr(owner, part)
    if change == "gone":
        owner = next(c for c in getattr(owner, "__mro__", [owner]) if name in vars(c))
        monkeypatch.delattr(owner, name)
    elif change == "other parameters":
        more = ", ".join([*parameters.split(), "more"])
        monkeypatch.setattr(owner, name, eval(f"lambda {more}: 0"))
    elif names:
        monkeypatch.setattr(owner, name, eval(f"lambda {parameters.replace(' ', ', ')}: 0"))
    else:
        return
    assert str(unsupported()).startswith(f"numba {numba.__version__}")


def test_the_variables_that_are_set_are_there():
    assert numba.core.config._config_fname == ""
    assert isinstance(numba_internals.FROM_DTYPE, dict)
    dispatcher = numba.njit(lambda x: x)
    assert dispatcher._compiler._customize_flags
    assert dispatcher._cache


def test_the_bound_of_the_package_is_that_of_the_table():
    assert bounds() in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


def increment(x):
    return x + 1


@pytest.mark.parametrize("version", ["0.99.0", "1.0.0rc1", "0.64.1", "changed"])
def test_another_numba_runs_kernels_and_says_in_one_line_that_none_is_kept(recheck, monkeypatch, tmp_path, version):
    known = f"is not among the supported versions, {OLDEST} to {NEWEST}; run: pip install '{bounds()}'"
    if version == "changed":
        usual, version = CompileResult._reduce, numba.__version__
        monkeypatch.setattr(CompileResult, "_reduce", lambda self: usual(self))
        known = f"changed numba.core.compiler:CompileResult._reduce; run: pip install --force-reinstall '{bounds()}'"
    monkeypatch.setattr(numba, "__version__", version)
    kernels = [numba.njit(increment), numba.njit(increment)]
    with pytest.warns(CacheWarning) as caught:
        list(map(cache.attach, kernels))
    (message,) = [str(warning.message) for warning in caught]
    assert message == f"kernels are not cached: numba {version} {known}"
    with warnings.catch_warnings(), cache.as_kept(kernels[1]):
        warnings.simplefilter("error")
        assert [kernel(1) for kernel in kernels] == [2, 2]
    assert not cache.is_cached(kernels[0], (types.int64,))
    assert cache.code_digest(kernels[0], (types.int64,)) == ""
    assert not list(tmp_path.rglob("*.nbc"))


# The other versions ---------------------------------------------------------------------------------------------------

BEHAVIOUR = [
    "cost_a_second_process_nothing", "functions_of_one_name_stay_apart", "another_numba_runs_kernels",
    "a_callee_has_machine_code_only", "a_kernel_is_optimized_once", "machine_code_and_its_symbols_are_the_same",
    "each_internal_is_checked", "this_numba_is_supported",
]  # fmt: skip
"""The tests of the cache that would notice an internal that is there and does something else."""


@pytest.mark.slow
@pytest.mark.parametrize("which", ["oldest", "newest"])
def test_the_cache_works_with_the_ends_of_what_is_supported(tmp_path, which):
    version = OLDEST if which == "oldest" else NEWEST
    if version == minor(numba.__version__):
        pytest.skip(f"numba {numba.__version__} is installed, so all other tests are of {version}")
    said = install(tmp_path / "numba", f"numba=={version}.*")
    if re.search("NewConnectionError|Failed to establish|Name or service|timed out|No matching distribution", said):
        pytest.skip(f"numba {version} cannot be had from PyPI: {said.splitlines()[-1]}")
    assert said == ""
    files = [str(ROOT / "tests" / "kernels" / f) for f in ("test_cache.py", "test_numba_internals.py")]
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "numba"), "EXPECTED": version}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *files]
    done = subprocess.run([*command, "-k", " or ".join(BEHAVIOUR)], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif("EXPECTED" not in os.environ, reason="it is of the test above")
def test_this_numba_is_supported_and_was_asked_for():
    assert minor(numba.__version__) == os.environ["EXPECTED"]
    assert np.array_equal(numba.njit(increment)(np.zeros(3)), np.ones(3))


def install(folder, what):
    """Install a package into a folder; return what pip said of an error."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "1"]
    done = subprocess.run([*command, "--target", str(folder), what], capture_output=True, text=True)
    return done.stderr if done.returncode else ""


def test_no_process_compiles_for_another_if_nothing_is_kept(recheck, monkeypatch):
    class Missing:
        name, compiled = "missing", 0

        def is_compiled(self):
            return self.compiled > 0

        def compile(self):
            self.compiled += 1

    monkeypatch.setattr(numba, "__version__", "0.99.0")
    monkeypatch.setattr(jit, "_compile_elsewhere", lambda *args: pytest.fail("nobody could load what it compiles"))
    kernels = [Missing(), Missing()]
    assert jit.compile_kernels(kernels, processes=2, progress=lambda *of: None) == 2
    assert [k.compiled for k in kernels] == [1, 1]

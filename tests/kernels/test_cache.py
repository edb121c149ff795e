"""The compile cache: what hits, what misses, what is refused, and what becomes of its files.

What runs is an entry of the cache: who compiles gets the bits and the machine code of those who load. Edits and scripts
are tried in processes of their own; all else runs here.
"""

import contextlib
import ctypes
import enum
import errno
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import NamedTuple
from unittest.mock import Mock

import llvmlite
import numba
import numpy as np
import psutil
import pytest
from llvmlite import ir
from numba import types
from numba.core import codegen, config
from numba.core.compiler import CompilerBase
from numba.extending import intrinsic
from verbs import spy

from cpuopt.files import CacheWarning
from cpuopt.kernels.compile import cache, dependencies, entries

ROOT = Path(cache.__file__).parents[3]
INT = (types.int64,)

# Each kernel below depends on one thing, so that an edit of it must recompile that kernel and no other.
ONE = {  # what it computes of 7
    "calls": ("callee(x)", 77), "imports": ("x * K", 21), "reads": ("x + lib.A", 17),
    "digs": ("x + constants.deep.D", 207), "emits": ("doubled(x)", 14),
}  # fmt: skip
KERNELS = "".join(f"{name} = jit()(lambda x: {body})\n" for name, (body, _) in ONE.items())
PACKAGE = {
    "jit.py": """
import numba
from cpuopt.kernels.compile import cache
def jit(**options):
    def decorate(function):
        compiled = numba.njit(**options)(function)
        cache.attach(compiled)
        return compiled
    return decorate
""",
    "constants/__init__.py": "from . import deep\nC = 100\n",
    "constants/deep.py": "D = 200\n",
    # named like a module of the standard library, which is no reason to take it for one
    "colorsys.py": """
import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
K = 3
A = 10
callee = numba.njit(lambda x: x + 70)
branchy = numba.njit(inline="never")(lambda x: x + 71)
def scale(builder, v, by=2):
    return builder.mul(v, ir.IntType(64)(by))
def emitted(emit):
    @intrinsic
    def emitter(context, x):
        def generate(context, builder, signature, args):
            return emit(builder, args[0])
        return types.int64(types.int64), generate
    return emitter
doubled = emitted(scale)
""",
    "kernels.py": f"""
import constants
import colorsys as lib
from colorsys import K, branchy, callee, doubled
from jit import jit
@jit()
def alone(x):
    '''A docstring.'''
    return x + 1
def over(kernel):
    @jit()
    def closure(x):
        return kernel(x)
    return closure
closes = over(branchy)
@jit()
def nests(x):
    def inner():
        return constants.C
    return x + inner()
{KERNELS}
def is_a_number(x):
    y = x * 0.5
    return y == y
strict = jit()(is_a_number)
loose = jit(fastmath={{"nnan"}})(is_a_number)
""",
    "run.py": """
import importlib, json, sys, warnings
from numba import types
def run(root, names):
    sys.path.insert(0, root)
    kernels = importlib.import_module("kernels")
    values, missed = {}, []
    for name in names or [k for k, v in vars(kernels).items() if getattr(v, "__module__", "") == "kernels"]:
        if hasattr(kernel := getattr(kernels, name), "py_func"):
            argument = float("nan") if name in ("strict", "loose") else 7
            expected = cache.is_cached(kernel, (types.int64 if argument == 7 else types.float64,))
            values[name] = int(kernel(argument))
            hit = sum(kernel.stats.cache_hits.values()) > 0
            assert hit or not expected, name  # another process may write it in between
            missed += [] if hit else [name]
    for name in "kernels", "jit", "colorsys", "constants", "constants.deep":
        sys.modules.pop(name, None)
    return values, sorted(missed), cache.stats()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from cpuopt.kernels.compile import cache
    roots, *names = sys.argv[1:]
    results = [run(root, names) for root in roots.split(":")]
print(json.dumps([*results, [str(w.message) for w in caught]]))
""",
}

RIGHT = {"alone": 8, "closes": 78, "nests": 107, "strict": 0, "loose": 1} | {n: value for n, (_, value) in ONE.items()}


class Package:
    """A copy of the package, or other files, with a cache of its own."""

    def __init__(self, root, files=PACKAGE):
        self.root, self.cache = root, root / "cache"
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)

    def edit(self, file, old, new):
        text = (self.root / file).read_text()
        assert text.count(old) == 1
        (self.root / file).write_text(text.replace(old, new))

    def start(self, script, *arguments, warnings="error", **environ):
        env = {k: v for k, v in os.environ.items() if k == "CPUOPT_AMX" or not k.startswith(("NUMBA_", "CPUOPT_"))}
        env |= {"PYTHONPATH": str(ROOT), "CPUOPT_CACHE_DIR": str(self.cache), "PYTHONDONTWRITEBYTECODE": "1"} | environ
        command = [sys.executable, "-W", warnings, str(self.root / script), *map(str, arguments)]
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def said(self, script, *arguments, **environ):
        """What a script prints on stdout, without its end, and on stderr."""
        return said(self.start(script, *arguments, **environ))

    def run(self, *names, script="run.py", roots=(), **environ):
        found = runs_of(self.start(script, ":".join(map(str, roots or [self.root])), *names, **environ))
        return found if roots else found[0]

    def entries(self):
        return sorted((self.cache / "kernels").glob("*.nbc*"))


class Run(NamedTuple):
    """What a process found in one package: values and misses by kernel, ``cache.stats()``, its warnings."""

    values: dict
    missed: set
    stats: dict
    warnings: list


def said(process):
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out.strip(), err


def runs_of(process):
    """Return one `Run` a package."""
    *results, warned = json.loads(said(process)[0])
    return [Run(values, set(missed), stats, warned) for values, missed, stats in results]


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """The package after its first run."""
    package = Package(tmp_path_factory.mktemp("package"))
    assert package.run() == Run(RIGHT, set(RIGHT), {"hits": 0, "misses": len(RIGHT), "saved": len(RIGHT)}, [])
    return package


def copy(package, folder):
    shutil.copytree(package.root, folder / "copy")
    return Package(folder / "copy", {})


@pytest.fixture
def package(warm, tmp_path):
    """A copy of it, to edit."""
    return copy(warm, tmp_path)


EDITS = [
    ("colorsys.py", "x + 70", "x + 72", {"calls": 79}), ("colorsys.py", "x + 71", "x + 73", {"closes": 80}),
    ("colorsys.py", "K = 3", "K = 4", {"imports": 28}), ("colorsys.py", "A = 10", "A = 11", {"reads": 18}),
    ("constants/deep.py", "200", "201", {"digs": 208}), ("constants/__init__.py", "100", "101", {"nests": 108}),
    ("colorsys.py", "builder.mul", "builder.add", {"emits": 9}), ("colorsys.py", "by=2", "by=3", {"emits": 21}),
    ("kernels.py", 'fastmath={"nnan"}', 'fastmath={"nsz"}', {"loose": 0}),
]  # fmt: skip


def test_an_edit_recompiles_what_depends_on_it_and_no_more(warm, tmp_path):
    """For each edit a copy of the package with it, and one without, all run in one process on the first run's cache."""
    base = copy(warm, tmp_path)
    packages = [Package(base.root / str(i)) for i in range(len(EDITS))]
    for package, (file, old, new, _) in zip(packages, EDITS, strict=True):
        package.edit(file, old, new)
    found = base.run(roots=[*(package.root for package in packages), base.root])
    for run, (*edit, changed) in zip(found, [*EDITS, ["taken back", {}]], strict=True):
        assert (run.values, run.missed) == (RIGHT | changed, set(changed)), edit


def test_comments_docstrings_dates_and_places_cost_a_second_process_nothing(package):
    for file in (package.root / name for name in PACKAGE):
        file.write_text("# A comment above everything.\n\n" + file.read_text())
    package.edit("kernels.py", "A docstring.", "Another docstring, and a longer one.")
    assert package.run() == Run(RIGHT, set(), {"hits": len(RIGHT), "misses": 0, "saved": 0}, [])
    assert {e.name.rpartition("-")[0] for e in package.entries()} >= {"alone-kernels", "over._locals_.closure-kernels"}


# Functions of one name that LLVM does not inline, and a parallel kernel.
TWINS = PACKAGE | {
    "kernels.py": """
import numba
import numpy as np
from jit import jit
def make(k):
    @jit()
    def helper(n):
        total = 0.0
        for i in range(n):
            if i % 3 == 0:
                total += k * i
            else:
                total -= i / (k + 1)
        return total
    return helper
three, five = make(3), make(5)
one = jit()(lambda x: three(x) + 1)
two = jit()(lambda x: five(x) + 2)
@jit(parallel=True)
def spread(x):
    out = np.zeros(64, np.int64)
    for i in numba.prange(64):
        out[i] = i * x
    return out[1] + out[63]
"""
}


def test_functions_of_one_name_stay_apart_and_a_parallel_one_hits_with_any_number_of_threads(tmp_path):
    package, right = Package(tmp_path, TWINS), {"one": 25, "two": 45, "spread": 448}
    for threads, names, missed in ("2", ["one", "spread"], 2), ("1", ["two", "spread"], 1), ("3", [*right], 0):
        run = package.run(*names, NUMBA_NUM_THREADS=threads)
        assert (run.values, run.missed) == ({name: right[name] for name in names}, set(names[:missed]))


def test_processes_that_write_at_once(tmp_path):
    package, names = Package(tmp_path), ["alone", "calls", "emits"]
    for process in [package.start("run.py", tmp_path, *names) for _ in range(2)]:
        assert runs_of(process)[0].values == {name: RIGHT[name] for name in names}
    assert (package.run(*names).missed, {entry.suffix for entry in package.entries()}) == (set(), {".nbc"})


# Scripts --------------------------------------------------------------------------------------------------------------

SORTED = """
import sys
import numba
import numpy as np
from cpuopt.kernels.compile import cache, jit
second = jit.helper()(lambda x: np.sort(x)[1])
other = jit.helper()(lambda x: np.sort(x)[2])
@jit.helper()
def kernel(x):
    return second(x) + np.sort(x)[0] + np.sort(x)[2]
for f in sys.argv[1:]:
    globals()[f](np.arange(5.0))
types = numba.typeof(np.zeros(5)),
print(cache.code_digest(kernel, types), kernel.overloads[types].fndesc.mangled_name)
"""


def test_machine_code_and_its_symbols_are_the_same_in_each_process_whatever_it_compiled_before(tmp_path):
    package = Package(tmp_path, {"sorts.py": SORTED})
    processes = [
        package.start("sorts.py", *functions, CPUOPT_CACHE_DIR=str(tmp_path / place), PYTHONHASHSEED=str(seed))
        for seed, (place, *functions) in enumerate((("one", "kernel"), ("two", "other", "second", "kernel")))
    ]
    one, two = map(said, processes)
    for entry in (tmp_path / "two" / "kernels").glob("kernel-*.nbc"):
        entry.unlink()
    assert one == two == package.said("sorts.py", "kernel", CPUOPT_CACHE_DIR=str(tmp_path / "two"), PYTHONHASHSEED="2")
    assert len(one[0].split()[0]) == 12


SMALL = """
import json, sys
import numpy as np
from cpuopt import kernel, ops, registry
from cpuopt.kernels.compile import cache, jit
@kernel(ops.residual_forward, "mine", parallel=False)
def residual_forward(out, inp1, inp2):
    a, b, o = inp1.reshape(-1), inp2.reshape(-1), out.reshape(-1)
    for i in range(o.size):
        o[i] = a[i] + b[i]
kernels = [k for k in registry.KERNELS.values() if k.name in ("residual_forward[mine]", *sys.argv[1:])]
jit.compile_kernels(kernels, processes=2)
print(json.dumps([cache.stats(), {k.name: jit.code_digest(k) for k in kernels}]))
"""


@pytest.mark.parametrize("names", [
    ["sumsq[vanilla]", "copy[vanilla]"],
    pytest.param(
        [
            *("attention_forward[optimized]", "attention_backward[optimized]", "matmul_update[optimized]"),
            *("classifier_update[optimized]", "layernorm_backward[generated]", "attention_backward[generated]"),
        ],
        marks=pytest.mark.slow,
    ),
])  # fmt: skip
def test_a_script_without_a_main_guard_compiles_in_processes_and_runs_the_same_without_a_cache(tmp_path, names):
    package, n = Package(tmp_path, {"small.py": SMALL, "a file": ""}), len(names)
    at = {"CPUOPT_CACHE_DIR": str(tmp_path / "a file"), "warnings": "default"}
    seed = {"PYTHONHASHSEED": "0"}  # that of the processes that compile: numba's order of references follows from it
    (first, told), (second, silent), (without, warned) = (
        package.said("small.py", *names, **seed, **w) for w in ({}, {}, at)
    )
    (stats, codes), (again, loaded) = json.loads(first), json.loads(second)
    assert (told, silent) == (f"cpuopt: compiling {n + 1} kernels, once for this machine\n", "")
    assert stats["saved"] == stats["misses"] >= 1  # the script's own kernel is compiled where it is
    assert stats["hits"] >= n
    assert again["misses"] == again["saved"] == 0
    assert "kernels are not cached" in warned
    assert codes == loaded == json.loads(without)[1]
    assert all(codes.values())


NESTED = """
import numpy as np
from numba import prange, types
from cpuopt.kernels.compile import cache
from jit import jit
@jit(parallel=True)
def inner(x):
    for i in prange(x.size):
        x[i] += 1
@jit()
def outer(x):
    inner(x)
outer.compile((types.float32[::1],))  # before any thread was started
x = np.zeros(5, np.float32)
outer(x)
print(cache.stats()["misses"], x.sum())
"""


def test_a_kernel_that_calls_a_parallel_one_loads_before_threads_were_started(tmp_path):
    """Without threads, its call of `numba_parallel_for` went to address 0."""
    package = Package(tmp_path, {"nested.py": NESTED, "jit.py": PACKAGE["jit.py"]})
    assert [package.said("nested.py")[0] for _ in range(2)] == ["2 5.0", "0 5.0"]


NUMBAS = {
    "deep.py": "K = 2\n",
    "helpers.py": "import numba\nimport deep\n\n@numba.njit(cache=True)\ndef factor(x):\n    return x * deep.K\n",
    "run.py": """
import sys
import numba
from cpuopt.kernels.compile import cache
import helpers
if "first" in sys.argv:
    print(helpers.factor(1.0))  # which numba caches, or loads from its cache
def scaled(x):
    return helpers.factor(x) + 0.5
kernel = numba.njit(scaled)
if "afresh" in sys.argv:
    with cache.as_kept(kernel):
        kernel.compile((numba.types.float64,))
    print(kernel(1.0), sum(helpers.factor.stats.cache_hits.values()))
else:
    cache.attach(kernel)
    print(kernel(1.0), cache.stats()["misses"])
""",
}


@pytest.mark.slow
def test_a_helper_under_numbas_own_cache_is_never_stale(tmp_path):
    package = Package(tmp_path, NUMBAS)
    assert package.said("run.py", "first")[0].split() == ["2.0", "2.5", "1"]
    package.edit("deep.py", "2", "30")
    shutil.copytree(tmp_path / "cache", tmp_path / "other", copy_function=shutil.copy2)
    for place, called in (("other", ["first"]), ("cache", [])):  # loaded before, or called by the kernel alone
        for misses in ("1", "0"):
            out, _ = package.said("run.py", *called, CPUOPT_CACHE_DIR=str(tmp_path / place))
            assert out.split()[-2:] == ["30.5", misses]


def test_a_helper_from_numbas_own_cache_is_linked_into_a_kernel_compiled_afresh(tmp_path):
    package = Package(tmp_path, NUMBAS)
    assert package.said("run.py", "first", "afresh")[0].split() == ["2.0", "2.5", "0"]
    assert package.said("run.py", "afresh")[0].split() == ["2.5", "1"]


BUSY = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may have it ignored
from cpuopt import registry
from cpuopt.kernels.compile import jit
kernels = [registry.KERNELS[op, "optimized"] for op in ("attention_backward", "attention_forward")]
jit.compile_kernels(kernels, processes=2)
"""


def runs(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE  # whose new parent has not taken notice
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_compiler_is_left_after_a_signal(tmp_path, number):
    process = Package(tmp_path, {"busy.py": BUSY}).start("busy.py")
    parent, deadline = psutil.Process(process.pid), time.monotonic() + 60
    while len(children := parent.children(recursive=True)) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(1)
    process.send_signal(number)
    process.communicate(timeout=20)
    deadline = time.monotonic() + 5
    while left := [c for c in children if runs(c)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


# In this process ------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty cache directory, and a memory without warnings."""
    monkeypatch.setenv("CPUOPT_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setattr(entries, "warned", set())
    return tmp_path / "own" / "kernels"


def compiled(function, **options):
    """A new dispatcher, so that it compiles or loads anew."""
    dispatcher = numba.njit(**options)(function)
    cache.attach(dispatcher)
    return dispatcher


def is_hit(dispatcher, *arguments):
    """Call it for the first time and tell where its code came from."""
    before = cache.stats()["hits"]
    dispatcher(*arguments)
    return cache.stats()["hits"] > before


def increment(x):
    return x + 1


def test_is_cached_without_compiling(folder):
    assert not cache.is_cached(compiled(increment), INT)
    compiled(increment)(1)
    other = compiled(increment)
    assert cache.is_cached(other, INT)
    assert cache.is_cached(other, types.void(types.int64))
    assert not cache.is_cached(other, (types.float64,))
    assert not cache.is_cached(other, types.float64(types.int64))
    assert not cache.is_cached(compiled(increment, fastmath=True), INT)
    assert not cache.is_cached(numba.njit(increment), INT)
    assert not other.overloads


def first(a):
    return a[0]


def counts_threads(x):
    return x + config.NUMBA_NUM_THREADS + numba.config.NUMBA_DEFAULT_NUM_THREADS


THREADS = "NUMBA_NUM_THREADS", "NUMBA_DEFAULT_NUM_THREADS"


@pytest.mark.parametrize(("owner", "name", "value", "function", "kept"), [
    *((config, name, 1, increment, False) for name in ("OPT", "CPU_NAME", "BOUNDSCHECK", "A_FUTURE_SETTING")),
    *((config, name, 7, increment, True) for name in ("CACHE_DIR", "THREADING_LAYER", "_HAVE_YAML", *THREADS)),
    *((config, name, 7, counts_threads, False) for name in THREADS),  # a kernel reads them
    *((module, "__version__", "0.0", increment, False) for module in (numba, llvmlite, np)),
])  # fmt: skip
def test_settings_and_versions_are_part_of_the_key(monkeypatch, owner, name, value, function, kept):
    kernel = compiled(function)
    kernel(1)
    assert cache.is_cached(kernel, INT)
    monkeypatch.setattr(owner, name, value, raising=name != "A_FUTURE_SETTING")
    assert cache.is_cached(kernel, INT) is kept


def test_the_machine_is_part_of_the_key(monkeypatch):
    kernel = compiled(increment)
    kernel(1)
    monkeypatch.setattr(kernel.targetctx.codegen(), "_tm_features", "+a-future-feature")
    assert not cache.is_cached(kernel, INT)


def test_an_entry_belongs_to_a_function_of_one_module():
    """Loading imports that module."""
    one, two = (FunctionType(increment.__code__, {"__name__": f"{name}.room.file"}) for name in ("one", "two"))
    compiled(one)(1)
    assert cache.is_cached(compiled(one), INT)
    assert not cache.is_cached(compiled(two), INT)


@pytest.fixture
def entry(folder):
    """The one of `increment`."""
    compiled(increment)(1)
    (entry,) = folder.glob("*.nbc")
    return entry


DAMAGES = {
    "cut": lambda entry: entry.read_bytes()[:-1], "a bit flipped": lambda entry: flip(entry.read_bytes(), -9),
    "a bit of the checksum flipped": lambda entry: flip(entry.read_bytes(), 0), "empty": lambda entry: b"",
    "of another name": lambda entry: signed(Path("another"), entry.read_bytes()[len(entries.sha(b"")) :]),
    "of a module that is gone": lambda entry: signed(entry, b"cno_such_module\nX\n."),
    "of a name that is gone": lambda entry: signed(entry, b"ccpuopt.kernels\nno_such_name\n."),
}  # fmt: skip


def flip(content, i):
    return content[:i] + bytes([content[i] ^ 1]) + content[i:][1:]


def signed(entry, content):
    return entries.sha(entry.stem.encode() + content).encode() + content


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_a_miss_and_is_written_again(folder, entry, damage, recwarn):
    entry.write_bytes(DAMAGES[damage](entry))
    readable = damage.endswith("gone")
    assert (entries.read(folder, entry.stem) is not None) == readable
    assert readable or not cache.is_cached(compiled(increment), INT)
    assert not is_hit(compiled(increment), 1)
    assert is_hit(compiled(increment), 1)
    assert not recwarn.list


def test_an_entry_whose_time_cannot_be_set_is_loaded(entry, monkeypatch):
    monkeypatch.setattr(os, "utime", Mock(side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS))))
    assert is_hit(compiled(increment), 1)


def test_a_callee_has_machine_code_only_where_python_calls_it(folder):
    callee = compiled(increment)
    caller = compiled(lambda x: callee(x) * 2)
    assert caller(1) == 4
    assert cache.code_digest(caller, INT)
    assert not cache.code_digest(callee, INT)
    assert callee(1) == 2
    assert cache.code_digest(callee, INT)
    assert compiled(lambda x: callee(x) * 3)(1) == 6
    assert len(list(folder.glob("increment-*.nbc"))) == 2
    loaded = compiled(increment)
    assert compiled(lambda x: loaded(x) * 4)(1) == 8
    assert not cache.code_digest(loaded, INT)
    loaded.compile(INT)
    assert compiled(lambda x: loaded(x) * 5)(1) == 10  # which compiles it as a callee again
    assert loaded(1) == 2


def test_a_kernel_is_optimized_once_with_all_that_it_calls(folder, monkeypatch):
    optimized = []
    spy(monkeypatch, codegen.CPUCodeLibrary, "_optimize_final_module", optimized.append)
    helper = compiled(increment)

    def spread(out):
        for i in numba.prange(len(out)):
            out[i] = helper(i)

    out = np.zeros(9, np.int64)
    compiled(spread, parallel=True)(out)
    assert (list(out), len(optimized)) == (list(range(1, 10)), 1)


def test_an_entry_that_cannot_be_loaded_is_written_again(monkeypatch):
    compiled(increment)(1)
    with monkeypatch.context() as patch:
        patch.setattr(cache.pickle, "loads", lambda payload: 1 / 0)
        with pytest.warns(CacheWarning, match="increment-test_cache is not cached: ZeroDivisionError"):
            assert not is_hit(compiled(increment), 1)
    assert is_hit(compiled(increment), 1)


# What the walk tells apart --------------------------------------------------------------------------------------------


def digest(value):
    return dependencies.Walk(value).digest


Weekday, Number = enum.Enum("Weekday", {"MONDAY": 1}), enum.Enum("Number", {"MONDAY": 2})
Pair, Swapped = (NamedTuple("Pair", [(a, int), (b, int)]) for a, b in ("xy", "yx"))


@dataclass
class Size:
    rows: int


class Slotted:
    __slots__ = ("rows",)

    def __init__(self, rows):
        self.rows = rows


def modules(*values):
    """A function that reads K of several modules of one name."""
    several = [ModuleType("mine") for _ in values]
    for module, value in zip(several, values, strict=True):
        module.K = value
    return lambda: [module.K for module in several]


def child(value):
    return type("Child", (type("Parent", (), {"rows": value}),), {})


class Pipeline(CompilerBase):
    pass


def returns(value, **attributes):
    def function():
        return value

    vars(function).update(attributes)
    return function


@contextlib.contextmanager
def managed(x):
    yield x + 1


@pytest.mark.parametrize(("one", "other"), [
    (0.0, -0.0), (1, True), (1, 1.0), ("1", 1), ("a", b"a"), ((1, (2, 3)), ((1, 2), 3)), ((1, 2), [1, 2]),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}), ({1, 2}, {1, 3}), (range(3), range(4)), (np.float32(1), np.float64(1)),
    (np.zeros(2), np.zeros(3)), (np.zeros((2, 2)), np.zeros((2, 2), order="F")), (np.zeros(2, np.float32), np.zeros(1)),
    (np.dtype([("a", "f4")]), np.dtype([("b", "f4")])), (Weekday.MONDAY, Number.MONDAY), (Pair(1, 2), Pair(2, 1)),
    (Pair(1, 2), (1, 2)), (Pair, Swapped), (Size(1), Size(2)), (Slotted(1), Slotted(2)),
    (child(property(lambda self: 1)), child(property(lambda self: 2))),
    (child(staticmethod(increment)), child(classmethod(increment))), (child(1), child(2)), (returns(1), returns(2)),
    (returns(len), returns(abs)), (modules(1, 2), modules(1, 3)), (modules(1, 2), modules(3, 2)),
    (functools.partial(increment, 1), functools.partial(increment, 2)),
    (functools.cache(increment), functools.cache(first)), (returns(1, hint=1), returns(1, hint=2)),
    (managed, contextlib.contextmanager(increment)), (Size(1).__init__, Size(2).__init__),
    (lambda x=1: x, lambda x=2: x), (lambda *, x=1: x, lambda *, x=2: x), (lambda x: x + 1, lambda x: x + 2),
    (lambda: "a", lambda: "b"), (lambda x: x + 1, lambda x: x - 1), (lambda x: x.real, lambda x: x.imag),
    (types.int64, types.int32), (types.Array(types.int64, 1, "C"), types.Array(types.int64, 1, "A")),
    (types.Array(types.int64, 1, "C"), types.Array(types.int64, 1, "C", readonly=True)),
    (types.NamedUniTuple(types.int64, 2, Pair), types.NamedUniTuple(types.int64, 2, Swapped)),
    (types.ExternalFunction("f", types.int64()), types.ExternalFunction("f", types.int32())),
    (ir.IntType(8), ir.IntType(16)), (ir.FloatType().as_pointer(), ir.DoubleType().as_pointer()),
    (ir.IntType(8)(1), ir.IntType(8)(2)), (ir.IntType(8)(1), ir.IntType(8)(ir.Undefined)),
    (numba.njit(increment), numba.njit(inline="always")(increment)),
    (numba.njit(increment), numba.njit(locals={"x": types.float32})(increment)),
    (numba.njit(increment), numba.njit(pipeline_class=Pipeline)(increment)), (numba.njit(increment), increment),
])  # fmt: skip
def test_what_differs_is_told_apart(one, other):
    assert digest(one) != digest(other)
    assert digest(one) == digest(one)


# What is refused ------------------------------------------------------------------------------------------------------

LOCK = threading.Lock()
OPEN = {object()}
BIG = np.zeros(300_000)
PID = ctypes.CDLL(None).getpid
PID.argtypes, PID.restype = [], ctypes.c_int


def emit(helper):
    @intrinsic
    def emitter(context, x):
        def generate(context, builder, signature, args):
            return builder.add(args[0], ir.IntType(64)(helper()))

        return types.int64(types.int64), generate

    return lambda x: emitter(x)


def imports_inside():
    import math

    return int(math.sqrt(1))


@pytest.mark.parametrize(("helper", "reason"), [
    (lambda: 1 if LOCK else 0, "'LOCK' in test_cache.<lambda> is a _thread.lock"),
    (lambda: len(OPEN), "'OPEN' in test_cache.<lambda> is a builtins.set"),
    (imports_inside, "imports_inside has an import inside"),
    (lambda: len(os.environ.get("NOTHING", "1")), "<lambda> uses environ"),
    (lambda: int(getattr(entries, "DA" + "Y") ** 0), "test_cache.<lambda> uses getattr: what it takes of entries"),
    (lambda: eval("1"), "<lambda> uses eval"),
], ids=["a lock", "a set", "an import", "the environment", "a computed name", "eval"])  # fmt: skip
def test_what_cannot_be_described_is_not_cached(folder, helper, reason):
    kernel = compiled(emit(helper))
    with pytest.warns(CacheWarning) as caught:
        assert [kernel(1), kernel(True)] == [2, 2]  # two compilations, one warning
    (message,) = [str(warning.message) for warning in caught]
    assert message.startswith("emit._locals_._lambda_-test_cache is not cached: ")
    assert reason in message
    assert not list(folder.glob("*.nbc"))
    assert not cache.is_cached(kernel, INT)


@pytest.mark.parametrize("function", [lambda i: BIG[i], lambda i: PID() + i], ids=["a big array", "a pointer"])
def test_what_numba_cannot_store_is_not_cached(folder, function):
    with pytest.warns(CacheWarning, match="lambda.*-test_cache is not cached"):
        assert not is_hit(compiled(function), 1)
    assert not list(folder.glob("*.nbc"))


def test_a_dispatcher_as_an_argument_is_not_cached():
    with pytest.warns(CacheWarning, match=r"apply-.* is not cached: the signature is a .*WeakRef"):
        assert compiled(apply)(numba.njit(increment), 1) == 2


def apply(function, x):
    return function(x)


FACTOR = 2


def scaled(x):
    return x * FACTOR


def test_a_global_that_changed_after_its_function_was_compiled(monkeypatch):
    """This process keeps the callee's old code; what that is linked into must not be saved under the new value."""
    callee = compiled(scaled)

    def caller(x):
        return callee(x) + 1

    assert callee(10) == 20
    monkeypatch.setitem(globals(), "FACTOR", 3)
    with pytest.warns(CacheWarning, match="something that scaled depends on changed since"):
        assert compiled(caller)(10) == 21
    assert not cache.is_cached(compiled(caller), INT)
    callee.recompile()
    assert compiled(caller)(10) == 31
    assert cache.is_cached(compiled(caller), INT)


def test_a_global_that_changes_during_compilation(monkeypatch):
    kernel = numba.njit(scaled)
    compile_ = kernel._compiler.compile

    def compile_and_change(args, result):
        compiled_ = compile_(args, result)
        monkeypatch.setitem(globals(), "FACTOR", 5)
        return compiled_

    monkeypatch.setattr(kernel._compiler, "compile", compile_and_change)
    cache.attach(kernel)
    with pytest.warns(CacheWarning, match="changed while it was compiled"):
        assert kernel(10) == 20
    assert not cache.is_cached(compiled(scaled), INT)


# The directory --------------------------------------------------------------------------------------------------------


def test_a_full_disk_is_no_error(folder, monkeypatch):
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.warns(CacheWarning, match="No space left") as caught:
        assert [compiled(increment)(1), compiled(first)(np.ones(1))] == [2, 1]
    assert len(caught) == 1
    assert not list(folder.glob("*.nbc*"))


def age(file, days):
    then = time.time() - days * entries.DAY
    os.utime(file, (then, then))


def test_entries_that_nobody_uses_are_removed(folder):
    compiled(increment)(1)
    compiled(first)(np.ones(1))
    unused, used = folder.glob("first-*"), folder.glob("increment-*")
    (unused,), (used,) = unused, used
    leftover, foreign = folder / "increment-0.nbc.a1b2", folder / "notes.txt"
    for file in leftover, foreign:
        file.touch()
    for file in unused, used, leftover, foreign:
        age(file, 31)
    assert is_hit(compiled(increment), 1)
    entries.prune(folder)
    assert unused.exists()  # not yet: it looked less than a day ago
    age(folder / "pruned", 2)
    entries.prune(folder)
    assert {file.name for file in folder.iterdir()} == {used.name, foreign.name, "pruned"}

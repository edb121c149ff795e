"""The compile cache: what hits, what misses, what is refused, and what becomes of its files.

Edits are tried on a small throw-away package, which runs in processes of its own; all else runs here.
"""

import abc
import cProfile
import ctypes
import enum
import errno
import functools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import NamedTuple

import numba
import numpy as np
import pytest
from llvmlite import ir
from numba import types
from numba.core import codegen, config
from numba.core.compiler import CompilerBase
from numba.extending import intrinsic

from cpuopt.files import CacheWarning
from cpuopt.kernels.compile import cache, dependencies, entries

ROOT = Path(cache.__file__).parents[2]
INT = (types.int64,)

# Each kernel below depends on one thing, so that an edit of it must recompile that kernel and no other.
PACKAGE = {
    "jit.py": """
import numba
from cpuopt.kernels.compile import cache, dependencies

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
import contextlib, enum, functools
from dataclasses import dataclass
from typing import NamedTuple
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

K = 3
A = 10
TABLE = np.array([5, 6, 7])
I64 = ir.IntType(64)
WORDS = {"ten": 30}
LETTERS = frozenset({"a", "b", "c", "d", "e"})

class Mode(enum.IntEnum):
    SLOW = 1
    FAST = 40

class Point(NamedTuple):
    x: int
    y: int

@dataclass(frozen=True)
class Tile:
    rows: int
    columns: int

    @property
    def size(self):
        return self.rows * self.columns + 0

class Emitter:
    step = 60

    def emit(self, builder, v):
        return builder.add(v, I64(self.step))

@numba.njit
def callee(x):
    return x + 70

@numba.njit(inline="never")
def branchy(x):
    return x + 71

def scale(builder, v, by=2):
    return builder.mul(v, I64(by))

@contextlib.contextmanager
def scaled(builder, v):
    yield builder.mul(v, I64(5))

@functools.cache
def factor(n):
    return n * 4

@intrinsic
def plus(context, x):
    def generate(context, builder, signature, args):
        return builder.add(args[0], I64(80))
    return types.int64(types.int64), generate

def emitted(emit):
    @intrinsic
    def emitter(context, x):
        def generate(context, builder, signature, args):
            return emit(builder, args[0])
        return types.int64(types.int64), generate
    return emitter

doubled = emitted(scale)
stepped = emitted(Emitter().emit)

@emitted
def tripled(builder, v):
    with scaled(builder, v) as w:
        return w

@emitted
def quadrupled(builder, v):
    return builder.mul(v, I64(factor(1)))

@emitted
def worded(builder, v):
    known = "a" in LETTERS and "b" in {"a", "b", "c", "d", "e"}
    return builder.add(v, I64(WORDS["ten"] if known else 0))

def sized(tile):
    return emitted(lambda builder, v: builder.add(v, I64(tile.size)))

tiled = sized(Tile(3, 4))
""",
    "kernels.py": """
import constants
import colorsys as lib
from colorsys import (
    K, TABLE, Mode, Point, branchy, callee, doubled, plus, quadrupled, stepped, tiled, tripled, worded
)
from jit import jit

POINT = Point(1, 2)

@jit()
def alone(x):
    '''A docstring.'''
    return x + 1

@jit()
def calls(x):
    return callee(x)

def over(kernel):
    @jit()
    def closure(x):
        return kernel(x)
    return closure

closes = over(branchy)

@jit()
def imports(x):
    return x * K

@jit()
def reads(x):
    return x + lib.A

@jit()
def digs(x):
    return x + constants.deep.D

@jit()
def nests(x):
    def inner():
        return constants.C
    return x + inner()

@jit()
def indexes(x):
    return x + TABLE[1]

@jit()
def enumerates(x):
    return x + Mode.FAST

@jit()
def points(x):
    return x + POINT.y * 50

@jit()
def emits(x):
    return plus(x)

@jit()
def emits_by_helper(x):
    return doubled(x)

@jit()
def emits_by_manager(x):
    return tripled(x)

@jit()
def emits_by_memo(x):
    return quadrupled(x)

@jit()
def emits_by_class(x):
    return stepped(x)

@jit()
def emits_by_table(x):
    return worded(x)

@jit()
def emits_by_closure(x):
    return tiled(x)

def is_a_number(x):
    y = x * 0.5
    return y == y

strict = jit()(is_a_number)
loose = jit(fastmath={"nnan"})(is_a_number)
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

RIGHT = {
    "alone": 8,
    "calls": 77,
    "closes": 78,
    "imports": 21,
    "reads": 17,
    "digs": 207,
    "nests": 107,
    "indexes": 13,
    "enumerates": 47,
    "points": 107,
    "emits": 87,
    "emits_by_helper": 14,
    "emits_by_manager": 35,
    "emits_by_memo": 28,
    "emits_by_class": 67,
    "emits_by_table": 37,
    "emits_by_closure": 19,
    "strict": 0,
    "loose": 1,
}


class Package:
    """A copy of the package with a cache of its own."""

    def __init__(self, root, files=PACKAGE):
        self.root, self.cache = root, root / "cache"
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)

    def edit(self, file, old, new):
        text = (self.root / file).read_text()
        assert text.count(old) == 1
        (self.root / file).write_text(text.replace(old, new))

    def start(self, *names, roots=(), script="run.py", **environ):
        env = {k: v for k, v in os.environ.items() if not k.startswith(("NUMBA_", "CPUOPT_"))}
        env |= {"PYTHONPATH": str(ROOT), "CPUOPT_CACHE_DIR": str(self.cache), "PYTHONDONTWRITEBYTECODE": "1"} | environ
        where = ":".join(map(str, roots or [self.root]))
        command = [sys.executable, "-W", "error", str(self.root / script), where, *names]
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(self, *names, **options):
        return finish(self.start(*names, **options))[0]

    def entries(self):
        return sorted((self.cache / "kernels").glob("*.nbc*"))


@dataclass
class Run:
    """What a process found in one package: values and misses by kernel, ``cache.stats()``, its warnings."""

    values: dict
    missed: set
    stats: dict
    warnings: list


def finish(process):
    """Return one `Run` a package."""
    out, err = process.communicate()
    assert process.returncode == 0, err
    *results, warned = json.loads(out)
    return [Run(values, set(missed), stats, warned) for values, missed, stats in results]


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """The package after its first run."""
    package = Package(tmp_path_factory.mktemp("package"))
    first = package.run()
    assert first.values == RIGHT
    assert first.missed == set(RIGHT)
    assert first.stats == {"hits": 0, "misses": len(RIGHT), "saved": len(RIGHT)}
    assert first.warnings == []
    return package


def copy(package, folder):
    shutil.copytree(package.root, folder / "copy")
    return Package(folder / "copy", {})


@pytest.fixture
def package(warm, tmp_path):
    """A copy of it, to edit."""
    return copy(warm, tmp_path)


def test_a_second_process_loads_everything(warm):
    second = warm.run()
    assert second.values == RIGHT
    assert second.missed == set()
    assert second.stats == {"hits": len(RIGHT), "misses": 0, "saved": 0}
    assert {e.name.rpartition("-")[0] for e in warm.entries()} >= {"alone-kernels", "over._locals_.closure-kernels"}


EDITS = [
    ("colorsys.py", "x + 70", "x + 72", {"calls": 79}),
    ("colorsys.py", "x + 71", "x + 73", {"closes": 80}),
    ("colorsys.py", "K = 3", "K = 4", {"imports": 28}),
    ("colorsys.py", "A = 10", "A = 11", {"reads": 18}),
    ("constants/deep.py", "200", "201", {"digs": 208}),
    ("constants/__init__.py", "100", "101", {"nests": 108}),
    ("colorsys.py", "5, 6, 7", "5, 8, 7", {"indexes": 15}),
    ("colorsys.py", "FAST = 40", "FAST = 41", {"enumerates": 48}),
    ("colorsys.py", "x: int\n    y: int", "y: int\n    x: int", {"points": 57}),
    ("colorsys.py", "I64(80)", "I64(81)", {"emits": 88}),
    ("colorsys.py", "builder.mul(v, I64(by))", "builder.add(v, I64(by))", {"emits_by_helper": 9}),
    ("colorsys.py", "by=2", "by=3", {"emits_by_helper": 21}),
    ("colorsys.py", "I64(5)", "I64(6)", {"emits_by_manager": 42}),
    ("colorsys.py", "n * 4", "n * 8", {"emits_by_memo": 56}),
    ("colorsys.py", "step = 60", "step = 61", {"emits_by_class": 68}),
    ("colorsys.py", '"ten": 30', '"ten": 31', {"emits_by_table": 38}),
    ("colorsys.py", '"d", "e"})', '"d", "f"})', {"emits_by_table": 37}),
    ("colorsys.py", "Tile(3, 4)", "Tile(3, 5)", {"emits_by_closure": 22}),
    ("colorsys.py", "self.columns + 0", "self.columns + 1", {"emits_by_closure": 20}),
    ("kernels.py", 'fastmath={"nnan"}', 'fastmath={"nsz"}', {"loose": 0}),
]


@pytest.fixture(scope="module")
def edited(warm, tmp_path_factory):
    """For each edit a copy of the package with it, all run in one process on the cache of the first run."""
    base = copy(warm, tmp_path_factory.mktemp("edited"))
    packages = [Package(base.root / str(i)) for i in range(len(EDITS))]
    for package, (file, old, new, _) in zip(packages, EDITS, strict=True):
        package.edit(file, old, new)
    return finish(base.start(roots=[package.root for package in packages]))


@pytest.mark.parametrize("i", range(len(EDITS)), ids=["-".join(edit[3]) for edit in EDITS])
def test_an_edit_recompiles_what_depends_on_it_and_no_more(edited, i):
    changed = EDITS[i][3]
    assert edited[i].values == RIGHT | changed
    assert edited[i].missed == set(changed)


def test_comments_docstrings_dates_and_places_cost_nothing(package):
    for file in package.root.rglob("*.py"):
        file.write_text("# A comment above everything.\n\n" + file.read_text())
    package.edit("kernels.py", "A docstring.", "Another docstring, and a longer one.")
    run = package.run()
    assert run.values == RIGHT
    assert run.missed == set()


def test_an_edit_taken_back_hits_again(package):
    package.edit("colorsys.py", "x + 70", "x + 72")
    assert package.run("calls").missed == {"calls"}
    package.edit("colorsys.py", "x + 72", "x + 70")
    assert package.run("calls").missed == set()


def test_a_profiler_of_python_is_no_edit():
    """While one watches a call of machine code, numba takes a flag away from the function's bytecode."""

    @numba.njit
    def twice(x):
        return 2 * x

    before = cache.digest(twice)
    with cProfile.Profile():
        assert twice(3) == 6
    assert cache.digest(twice) == before


def test_stale_bytecode_does_not_poison_the_cache(package):
    """Python itself runs old bytecode after an edit that leaves size and second alone; the cache must not keep it."""
    source = package.root / "colorsys.py"
    writing = {"PYTHONDONTWRITEBYTECODE": ""}
    package.run("calls", **writing)
    before = source.stat()
    package.edit("colorsys.py", "x + 70", "x + 72")
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert package.run("calls", **writing).values == {"calls": 77}
    os.utime(source)
    later = package.run("calls", **writing)
    assert later.values == {"calls": 79}
    assert later.missed == {"calls"}


# Functions of one name that LLVM does not inline, and a parallel kernel.
TWINS = {
    "jit.py": PACKAGE["jit.py"],
    "run.py": PACKAGE["run.py"],
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

@jit()
def one(x):
    return three(x) + 1

@jit()
def two(x):
    return five(x) + 2

@jit(parallel=True)
def spread(x):
    out = np.zeros(64, np.int64)
    for i in numba.prange(64):
        out[i] = i * x
    return out[1] + out[63]
""",
}


def test_functions_of_one_name_stay_apart(tmp_path):
    package = Package(tmp_path, TWINS)
    right = {"one": 25, "two": 45}
    assert package.run("one").values == {"one": right["one"]}
    assert package.run("two").values == {"two": right["two"]}
    both = package.run("one", "two")
    assert both.missed == set()
    assert both.values == right


def test_a_parallel_kernel_hits_with_any_number_of_threads(tmp_path):
    package = Package(tmp_path, TWINS)
    assert package.run("spread", NUMBA_NUM_THREADS="2").missed == {"spread"}
    for threads in "1", "3":
        run = package.run("spread", NUMBA_NUM_THREADS=threads)
        assert run.values == {"spread": 448}
        assert run.missed == set()


def test_processes_that_write_at_once(tmp_path):
    package = Package(tmp_path)
    names = ["alone", "calls", "imports", "emits"]
    processes = [package.start(*names) for _ in range(3)]
    for process in processes:
        assert finish(process)[0].values == {name: RIGHT[name] for name in names}
    assert package.run(*names).missed == set()
    assert {entry.suffix for entry in package.entries()} == {".nbc"}


def test_a_numba_that_changed_is_used_without_a_cache(tmp_path):
    changed = """
from numba.core import compiler
reduce = compiler.CompileResult._reduce
compiler.CompileResult._reduce = lambda self, protocol: reduce(self)
import run
"""
    package = Package(tmp_path, PACKAGE | {"changed.py": changed})
    run = package.run("alone", "calls", script="changed.py")
    assert run.values == {"alone": 8, "calls": 77}
    assert run.missed == {"alone", "calls"}
    assert run.stats == {"hits": 0, "misses": 0, "saved": 0}
    assert len(run.warnings) == 1
    assert "changed numba.core.compiler:CompileResult._reduce" in run.warnings[0]
    assert {p.name for p in package.cache.iterdir()} == {"generated"}  # text, no machine code


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


def test_signatures_are_told_apart(folder):
    aligned, readonly = types.Array(types.float32, 1, "C"), types.Array(types.float32, 1, "C", readonly=True)
    strided = types.Array(types.float32, 1, "A")
    for array in aligned, readonly, strided:
        kernel = compiled(first)
        assert not cache.is_cached(kernel, (array,))
        kernel.compile((array,))
    assert all(cache.is_cached(compiled(first), (array,)) for array in (aligned, readonly, strided))
    assert len(list(folder.glob("first-*.nbc"))) == 3


def first(a):
    return a[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OPT", 1),
        ("LOOP_VECTORIZE", 0),
        ("SLP_VECTORIZE", 1),
        ("BOUNDSCHECK", 1),
        ("CPU_NAME", "generic"),
        ("CPU_FEATURES", "+avx"),
        ("DEBUGINFO_DEFAULT", 1),
        ("ENABLE_AVX", 0),
        ("A_FUTURE_SETTING", 1),
    ],
)
def test_settings_of_numba_are_part_of_the_key(monkeypatch, name, value):
    kernel = compiled(increment)
    kernel(1)
    assert cache.is_cached(kernel, INT)
    monkeypatch.setattr(config, name, value, raising=False)
    assert not cache.is_cached(kernel, INT)


def test_settings_without_a_say_are_not(monkeypatch):
    kernel = compiled(increment)
    kernel(1)
    for name in "CACHE_DIR", "NUMBA_NUM_THREADS", "NUMBA_DEFAULT_NUM_THREADS", "THREADING_LAYER", "_HAVE_YAML":
        monkeypatch.setattr(config, name, 7)
    assert cache.is_cached(kernel, INT)


def counts_threads(x):
    return x + config.NUMBA_NUM_THREADS + numba.config.NUMBA_DEFAULT_NUM_THREADS


@pytest.mark.parametrize("name", ["NUMBA_NUM_THREADS", "NUMBA_DEFAULT_NUM_THREADS"])
def test_settings_that_a_kernel_reads_are(monkeypatch, name):
    kernel = compiled(counts_threads)
    kernel(1)
    assert cache.is_cached(kernel, INT)
    monkeypatch.setattr(config, name, 7)
    assert not cache.is_cached(kernel, INT)


@pytest.mark.parametrize("package", ["numba", "llvmlite", "numpy"])
def test_versions_are_part_of_the_key(monkeypatch, package):
    kernel = compiled(increment)
    kernel(1)
    monkeypatch.setattr(sys.modules[package], "__version__", "0.0")
    assert not cache.is_cached(kernel, INT)


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


def cut(content):
    return content[:-1]


def flip(content):
    return content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]


def flip_checksum(content):
    return bytes([content[0] ^ 1]) + content[1:]


def empty(content):
    return b""


@pytest.mark.parametrize("damage", [cut, flip, flip_checksum, empty])
def test_a_damaged_entry_is_a_miss_and_is_written_again(folder, damage):
    compiled(increment)(1)
    (entry,) = folder.glob("*.nbc")
    entry.write_bytes(damage(entry.read_bytes()))
    assert not cache.is_cached(compiled(increment), INT)
    assert not is_hit(compiled(increment), 1)
    assert is_hit(compiled(increment), 1)


@pytest.mark.parametrize("names", [b"cno_such_module\nX\n.", b"ccpuopt.kernels\nno_such_name\n."])
def test_an_entry_that_names_what_has_moved_is_a_miss_and_is_written_again(folder, names, recwarn):
    compiled(increment)(1)
    (entry,) = folder.glob("*.nbc")
    entry.write_bytes(entries.sha(entry.stem.encode() + names).encode() + names)
    assert entries.read(folder, entry.stem) == names
    assert not is_hit(compiled(increment), 1)
    assert is_hit(compiled(increment), 1)
    assert not recwarn.list


def test_an_entry_whose_time_cannot_be_set_is_loaded(folder, monkeypatch):
    compiled(increment)(1)

    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", refuse)
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


def test_a_kernel_is_optimized_once_with_all_that_it_calls(folder, monkeypatch):
    optimized, original = [], codegen.CPUCodeLibrary._optimize_final_module
    monkeypatch.setattr(
        codegen.CPUCodeLibrary, "_optimize_final_module", lambda self: optimized.append(self) or original(self)
    )
    helper = compiled(increment)

    def spread(out):
        for i in numba.prange(len(out)):
            out[i] = helper(i)

    out = np.zeros(9, np.int64)
    compiled(spread, parallel=True)(out)
    assert list(out) == list(range(1, 10))
    assert len(optimized) == 1


def test_what_is_loaded_is_not_parsed_until_it_is_linked(folder, monkeypatch):
    assert compiled(scaled)(10) == 20
    parsed, original = [], cache.llvm.parse_bitcode
    monkeypatch.setattr(cache.llvm, "parse_bitcode", lambda *args: parsed.append(1) or original(*args))
    loaded = compiled(scaled)
    assert loaded(10) == 20
    assert not parsed
    monkeypatch.setitem(globals(), "FACTOR", 3)
    with pytest.warns(CacheWarning, match="something that scaled depends on changed since"):
        assert compiled(lambda x: loaded(x) + 1)(10) == 21
    assert parsed


def test_callees_of_the_same_types_are_told_apart(folder):
    one, two, three = compiled(increment), compiled(lambda x: x + 10), compiled(lambda x: [x + 20][0] + 0.5)
    assert compiled(lambda x: one(x) * 1000 + two(x) + three(x))(1) == 2032.5


SORTED = """
import sys
import numba
import numpy as np
from cpuopt.kernels.compile import cache, jit


@jit.helper()
def second(x):
    return np.sort(x)[1]


@jit.helper()
def other(x):
    return np.sort(x)[2]


@jit.helper()
def kernel(x):
    return second(x) + np.sort(x)[0] + np.sort(x)[2]


for f in sys.argv[1:]:
    globals()[f](np.arange(5.0))
print(cache.code_digest(kernel, (numba.typeof(np.zeros(5)),)))
"""


def test_machine_code_is_the_same_whatever_was_compiled_before(tmp_path):
    (tmp_path / "sorts.py").write_text(SORTED)

    def code(cached, *functions):
        done = subprocess.run(
            [sys.executable, str(tmp_path / "sorts.py"), *functions],
            env=os.environ | {"PYTHONPATH": str(ROOT.parent), "CPUOPT_CACHE_DIR": str(tmp_path / cached)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    alone = code("one", "kernel")
    assert code("three", "second", "other", "kernel") == alone != "\n"
    assert code("two", "other", "kernel") == alone
    for entry in (tmp_path / "two" / "kernels").glob("kernel-*.nbc"):
        entry.unlink()
    assert code("two", "kernel") == alone


NAMED = """
import numba
from cpuopt.kernels.compile import jit


@jit.helper()
def half(x):
    return x / 2


half(1.0)
print(half.overloads[numba.float64,].fndesc.mangled_name)
"""


def test_symbols_are_the_same_in_each_process(tmp_path):
    (tmp_path / "named.py").write_text(NAMED)

    def symbol(seed):
        env = {"PYTHONPATH": str(ROOT.parent), "CPUOPT_CACHE_DIR": str(tmp_path / seed), "PYTHONHASHSEED": seed}
        command = [sys.executable, str(tmp_path / "named.py")]
        return subprocess.run(command, env=os.environ | env, capture_output=True, text=True, check=True).stdout

    assert symbol("1") == symbol("2") != ""


def test_an_entry_under_the_name_of_another_is_a_miss(folder):
    compiled(increment)(1)
    (entry,) = folder.glob("*.nbc")
    compiled(increment)(1.0)
    (other,) = set(folder.glob("*.nbc")) - {entry}
    shutil.copy(other, entry)
    assert not is_hit(compiled(increment), 1)


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


class Weekday(enum.Enum):
    MONDAY = 1


class Number(enum.Enum):
    MONDAY = 2


class Pair(NamedTuple):
    x: int
    y: int


@dataclass
class Size:
    rows: int


class Slotted:
    __slots__ = ("rows",)

    def __init__(self, rows):
        self.rows = rows


class Base(abc.ABC):
    @abc.abstractmethod
    def rows(self): ...


class Derived(Base):
    @staticmethod
    def rows():
        return 1

    @classmethod
    def columns(cls):
        return 2


def modules(*values):
    """A function that reads K of several modules of one name."""
    several = [ModuleType("mine") for _ in values]
    for module, value in zip(several, values, strict=True):
        module.K = value
    return lambda: [module.K for module in several]


def child(value):
    class Parent:
        rows = value

    class Child(Parent):
        pass

    return Child


class Pipeline(CompilerBase):
    pass


def returns(value):
    return lambda: value


def swapped():
    return NamedTuple("Pair", [("y", int), ("x", int)])


def annotated(function, **attributes):
    vars(function).update(attributes)
    return function


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.0, -0.0),
        (1, True),
        (1, 1.0),
        ("1", 1),
        ("a", b"a"),
        ((1, (2, 3)), ((1, 2), 3)),
        ((1, 2), [1, 2]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({1, 2}, {1, 3}),
        (range(3), range(4)),
        (np.float32(1), np.float64(1)),
        (np.zeros(2), np.zeros(3)),
        (np.zeros((2, 2)), np.zeros((2, 2), order="F")),
        (np.zeros(2, np.float32), np.zeros(1)),
        (np.dtype([("a", "f4")]), np.dtype([("b", "f4")])),
        (Weekday.MONDAY, Number.MONDAY),
        (Pair(1, 2), Pair(2, 1)),
        (Pair(1, 2), (1, 2)),
        (Pair, swapped()),
        (Size(1), Size(2)),
        (Slotted(1), Slotted(2)),
        (Base, Derived),
        (child(1), child(2)),
        (returns(1), returns(2)),
        (returns(len), returns(abs)),
        (modules(1, 2), modules(1, 3)),
        (modules(1, 2), modules(3, 2)),
        (functools.partial(increment, 1), functools.partial(increment, 2)),
        (functools.cache(increment), functools.cache(first)),
        (annotated(returns(1), hint=1), annotated(returns(1), hint=2)),
        (lambda x=1: x, lambda x=2: x),
        (lambda *, x=1: x, lambda *, x=2: x),
        (lambda x: x + 1, lambda x: x + 2),
        (lambda: "a", lambda: "b"),
        (lambda x: x + 1, lambda x: x - 1),
        (lambda x: x.real, lambda x: x.imag),
        (types.int64, types.int32),
        (types.NamedUniTuple(types.int64, 2, Pair), types.NamedUniTuple(types.int64, 2, swapped())),
        (types.ExternalFunction("f", types.int64()), types.ExternalFunction("f", types.int32())),
        (ir.IntType(8), ir.IntType(16)),
        (ir.FloatType().as_pointer(), ir.DoubleType().as_pointer()),
        (ir.IntType(8)(1), ir.IntType(8)(2)),
        (ir.IntType(8)(1), ir.IntType(8)(ir.Undefined)),
        (numba.njit(increment), numba.njit(inline="always")(increment)),
        (numba.njit(increment), numba.njit(locals={"x": types.float32})(increment)),
        (numba.njit(increment), numba.njit(pipeline_class=Pipeline)(increment)),
        (numba.njit(increment), increment),
    ],
)
def test_what_differs_is_told_apart(one, other):
    assert digest(one) != digest(other)
    assert digest(one) == digest(one)


@pytest.mark.parametrize(
    ("name", "file", "outside"),
    [
        ("colorsys", "colorsys.py", True),
        ("os.path", "posixpath.py", True),
        ("colorsys", "/home/me/colorsys.py", False),
        ("mine", "site-packages/mine.py", False),
        ("numba", "/home/me/numba/__init__.py", False),
        ("__main__", "/home/me/script.py", False),
    ],
)
def test_whose_code_the_versions_stand_for(name, file, outside):
    module = ModuleType(name)
    module.__file__ = str(Path(os.__file__).parent / file)
    assert dependencies._is_outside(module) is outside


def test_what_was_used_is_described_as_before():
    """llvmlite keeps the text of an object that it printed, and Python the slot names of a class that it copied."""
    vector = ir.VectorType(ir.FloatType(), 8)
    things = vector, vector(None), Slotted(1)
    before = digest(things)
    assert str(things[1]).startswith("<8 x float>")
    assert digest(things) == before


# What is refused ------------------------------------------------------------------------------------------------------

LOCK = threading.Lock()
MARK = object()
OPEN = {MARK}
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


def holds_a_lock():
    return 1 if LOCK else 0


def holds_a_set():
    return len(OPEN)


def imports_inside():
    import math

    return int(math.sqrt(1))


def asks_the_environment():
    return len(os.environ.get("NOTHING", "1"))


def computes_a_name():
    return int(getattr(entries, "DA" + "Y") ** 0)


def evaluates():
    return eval("1")


@pytest.mark.parametrize(
    ("helper", "reason"),
    [
        (holds_a_lock, "'LOCK' in test_cache.holds_a_lock is a _thread.lock"),
        (holds_a_set, "'OPEN' in test_cache.holds_a_set is a builtins.set"),
        (imports_inside, "imports_inside has an import inside"),
        (asks_the_environment, "asks_the_environment uses environ"),
        (computes_a_name, "test_cache.computes_a_name uses getattr: what it takes of entries"),
        (evaluates, "evaluates uses eval"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_described_is_not_cached(folder, helper, reason):
    kernel = compiled(emit(helper))
    with pytest.warns(CacheWarning) as caught:
        assert [kernel(1), kernel(True)] == [2, 2]  # two compilations, one warning
    (message,) = [str(warning.message) for warning in caught]
    assert message.startswith("emit._locals_._lambda_-test_cache is not cached: ")
    assert reason in message
    assert not list(folder.glob("*.nbc"))
    assert not cache.is_cached(kernel, INT)


def test_an_attribute_with_the_name_of_a_builtin_is_described():
    assert digest(lambda module: module.globals) != digest(lambda module: module.eval)


def uses_a_big_array(i):
    return BIG[i]


def calls_a_pointer(i):
    return PID() + i


@pytest.mark.parametrize("function", [uses_a_big_array, calls_a_pointer])
def test_what_numba_cannot_store_is_not_cached(folder, function):
    with pytest.warns(CacheWarning, match=f"{function.__name__}-test_cache is not cached"):
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


def test_the_directory_is_private(folder):
    compiled(increment)(1)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(file.stat().st_mode & 0o077 == 0 for file in folder.glob("*.nbc"))


def test_where_the_directory_is(tmp_path, monkeypatch):
    assert entries.folder_in_use() == tmp_path / "own" / "kernels"
    monkeypatch.delenv("CPUOPT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert entries.folder_in_use() == tmp_path / "xdg" / "cpuopt" / "kernels"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for unset in "", "relative":
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert entries.folder_in_use() == tmp_path / "home" / ".cache" / "cpuopt" / "kernels"


def spoil_with_a_file(folder, monkeypatch):
    folder.parent.parent.mkdir(exist_ok=True)
    folder.parent.write_text("not a directory")


def spoil_with_a_mode(folder, monkeypatch):
    folder.mkdir(parents=True)
    folder.chmod(0o770)


def spoil_with_an_owner(folder, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 4711)


def spoil_with_a_parent(folder, monkeypatch):
    folder.mkdir(parents=True, mode=0o700)
    folder.parent.parent.chmod(0o777)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (spoil_with_a_file, "Not a directory"),
        (spoil_with_a_mode, "other users can write to it, and what is in it may be theirs; delete it: rm -r"),
        (spoil_with_an_owner, "belongs to another user"),
        (spoil_with_a_parent, "so can replace it; set CPUOPT_CACHE_DIR to a directory that only you can change"),
    ],
)
def test_an_unsafe_directory_is_not_used(folder, monkeypatch, spoil, reason):
    spoil(folder, monkeypatch)
    with pytest.warns(CacheWarning) as caught:
        assert not any([is_hit(compiled(increment), 1), is_hit(compiled(first), np.ones(1))])
    (message,) = [str(warning.message) for warning in caught]
    assert reason in message
    assert not cache.is_cached(compiled(increment), INT)
    assert not list(folder.parent.parent.rglob("*.nbc*"))


def test_a_full_disk_is_no_error(folder, monkeypatch):
    def full(*args, **more):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
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


def test_nothing_happens_without_the_compiler(monkeypatch):
    monkeypatch.setattr(config, "DISABLE_JIT", 1)
    plain = numba.njit(increment)
    cache.attach(plain)
    assert plain is increment
    assert not cache.is_cached(plain, INT)

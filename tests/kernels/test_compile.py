"""What runs is an entry of the cache: who compiles gets the bits and the machine code of those who load."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import cpuopt
from cpuopt.files import cache_folder

ROOT = Path(cpuopt.__file__).parents[1]

STEP = """
import json, sys, zlib
import numpy as np
from cpuopt import Choice, load_kernels
from cpuopt.engine import Engine
from cpuopt.kernels.compile import cache, jit
from cpuopt.models.gpt2 import GPT2, Config

variant, processes, *files = sys.argv[1:]
load_kernels(files)
B, T, V = 3, 77, 1013
engine = Engine(
    GPT2(Config(3, 5, 85, V, T)),
    {"tokens": ((B, T), "int32"), "targets": ((B, T), "int32")},
    choice=Choice(variant, ["*_backward*@h.1*=generated", "attention@h.2*=mine"] * (variant == "vanilla")),
    fuse=() if variant != "optimized" else ("residual", "layernorm", "gelu", "classifier", "update"),
    threads=1, processes=int(processes), kernel_files=files,
)
tokens = np.random.default_rng(0).integers(0, V, (B, T)).astype(np.int32)
for _ in range(2):
    engine.step(tokens=tokens, targets=tokens[:, ::-1].copy())
bits = zlib.crc32(b"".join(p.tobytes() for p in engine.parameters().values()))
codes = {k.name: jit.code_digest(k) for k in engine.kernels}
variants = sorted({k.variant for k in engine.kernels})
print(json.dumps([bits, codes, cache.stats()["misses"], variants]))
"""
FILE = """
from cpuopt import kernel, ops, registry

for op in (ops.attention_forward, ops.attention_backward):
    vanilla = registry.KERNELS[op.name, "vanilla"]
    kernel(op, "mine", scratch=[(s.name, s.size) for s in vanilla.scratch])(vanilla.function.py_func)
"""


def environment(cache, **more):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("NUMBA_", "CPUOPT_"))}
    return env | {"PYTHONPATH": str(ROOT), "CPUOPT_CACHE_DIR": str(cache), "CPUOPT_AMX": "off"} | more


def run(script, *arguments, cache, **more):
    done = subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        env=environment(cache, **more),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
@pytest.mark.parametrize("variants", [["generated", "mine", "vanilla"], ["optimized"]], ids=" ".join)
def test_whole_steps_are_alike_whoever_compiles(tmp_path, variants):
    (tmp_path / "step.py").write_text(STEP)
    (tmp_path / "mine.py").write_text(FILE)
    variant, files = variants[-1], [tmp_path / "mine.py"] * ("mine" in variants)

    def step(processes, cache):
        return json.loads(run(tmp_path / "step.py", variant, processes, *files, cache=tmp_path / cache).stdout)

    kernels = tmp_path / "one" / "kernels"
    kernels.mkdir(parents=True)
    for entry in cache_folder("kernels").glob("*.nbc"):  # most are there already and load
        with contextlib.suppress(FileNotFoundError):  # as another process removes old ones
            shutil.copy2(entry, kernels)
    found = [step(2, "one")]
    for start, processes in ((0, 1), (1, 2)):  # a third is compiled by the process that runs it, another by a pool
        for entry in sorted(kernels.glob("*.nbc"))[start::3]:
            entry.unlink()
        found.append(step(processes, "one"))
    loading, compiling, pool = found
    assert compiling[:2] == pool[:2] == loading[:2]
    assert compiling[2] > 0
    assert all(compiling[1].values())
    assert set(compiling[3]) >= set(variants)


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

kernels = [registry.KERNELS[key] for key in (("residual_forward", "mine"), ("sumsq", "vanilla"), ("copy", "vanilla"))]
jit.compile_kernels(kernels, processes=2)
print(json.dumps([cache.stats(), {k.name: jit.code_digest(k) for k in kernels}]))
"""


def test_a_script_without_a_main_guard_compiles_in_processes_and_says_so_and_runs_the_same_without_a_cache(tmp_path):
    (tmp_path / "small.py").write_text(SMALL)
    (tmp_path / "a file").write_text("")
    first, second, without = (run(tmp_path / "small.py", cache=tmp_path / c) for c in ("cache", "cache", "a file"))
    (stats, codes), (again, loaded) = json.loads(first.stdout), json.loads(second.stdout)
    assert first.stderr == "cpuopt: compiling 3 kernels, once for this machine\n"
    assert second.stderr == ""
    assert stats == {"hits": 2, "misses": 1, "saved": 1}  # the script's own kernel is compiled where it is
    assert again == {"hits": 3, "misses": 0, "saved": 0}
    assert "kernels are not cached" in without.stderr
    assert codes == loaded == json.loads(without.stdout)[1]
    assert all(codes.values())


NESTED = """
import sys
import numba, numpy as np
from numba import prange, types
from cpuopt.kernels.compile import cache

def own(function, **options):
    dispatcher = numba.njit(**options)(function)
    cache.attach(dispatcher)
    return dispatcher

def inner(x):
    for i in prange(x.size):
        x[i] += 1

def outer(x):
    inner(x)

inner = own(inner, parallel=True)
outer = own(outer)
outer.compile((types.float32[::1],))  # before any thread was started
x = np.zeros(5, np.float32)
outer(x)
print(cache.stats()["misses"], x.sum())
"""


def test_a_kernel_that_calls_a_parallel_one_loads_before_threads_were_started(tmp_path):
    (tmp_path / "nested.py").write_text(NESTED)
    said = [run(tmp_path / "nested.py", cache=tmp_path / "cache").stdout.split() for _ in range(2)]
    assert said == [["2", "5.0"], ["0", "5.0"]]


FIRST = """
from cpuopt.kernels.registry import KERNELS
from cpuopt.kernels.toolkit.threads import threading_layer

KERNELS["matmul_forward", "rows"].compile()
print(threading_layer())
"""


def test_machine_code_that_starts_threads_is_loaded_when_they_are_there(tmp_path):
    """A kernel that is not parallel itself; without them its call of `numba_parallel_for` went to address 0."""
    (tmp_path / "first.py").write_text("from cpuopt import kernels" + FIRST)
    for _ in range(2):  # compiled, then loaded
        assert run(tmp_path / "first.py", cache=tmp_path / "cache").stdout.split()[-1] != "yet"


STALE = {
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
cache.attach(kernel)
print(kernel(1.0), cache.stats()["misses"])
""",
}


@pytest.mark.slow
def test_a_helper_under_numbas_own_cache_is_never_stale(tmp_path):
    for name, text in STALE.items():
        (tmp_path / name).write_text(text)
    assert "2.5 1" in run(tmp_path / "run.py", "first", cache=tmp_path / "cache").stdout
    (tmp_path / "deep.py").write_text("K = 30\n")
    shutil.copytree(tmp_path / "cache", tmp_path / "other", copy_function=shutil.copy2)
    for cache, called in (("other", ["first"]), ("cache", [])):  # loaded before, or called by the kernel alone
        for misses in (1, 0):
            said = run(tmp_path / "run.py", *called, cache=tmp_path / cache).stdout.split()
            assert said[-2:] == ["30.5", str(misses)]


AFRESH = """
import sys
import numba
import helpers
from cpuopt.kernels.compile import cache

if "first" in sys.argv:
    print(helpers.factor(1.0))

def scaled(x):
    return helpers.factor(x) + 0.5

kernel = numba.njit(scaled)
with cache.as_kept(kernel):
    kernel.compile((numba.types.float64,))
print(kernel(1.0), sum(helpers.factor.stats.cache_hits.values()))
"""


def test_a_helper_from_numbas_own_cache_is_linked_into_a_kernel_compiled_afresh(tmp_path):
    for name, text in (STALE | {"run.py": AFRESH}).items():
        (tmp_path / name).write_text(text)
    assert run(tmp_path / "run.py", "first", cache=tmp_path / "cache").stdout.split() == ["2.0", "2.5", "0"]
    assert run(tmp_path / "run.py", cache=tmp_path / "cache").stdout.split() == ["2.5", "1"]


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
    (tmp_path / "busy.py").write_text(BUSY)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "busy.py")], env=environment(tmp_path / "cache"), stderr=subprocess.DEVNULL
    )
    parent, deadline = psutil.Process(process.pid), time.monotonic() + 60
    while len(children := parent.children(recursive=True)) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(1)
    process.send_signal(number)
    process.wait(20)
    deadline = time.monotonic() + 5
    while left := [c for c in children if runs(c)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


CALLED = """
import ml_dtypes, numpy as np
from cpuopt import load_kernels
from cpuopt.kernels import registry

load_kernels(())
operands = {"dout": "bfloat16", "inp": "bfloat16"}
kernel = registry.KERNELS["matmul_backward_weight", "vanilla"].of(operands)
kernel.compile()
registry.KERNELS["matmul_update", "vanilla"].of({**operands, "copy": "bfloat16"}).compile()
dout, inp = (np.ones((4, n), ml_dtypes.bfloat16) for n in (3, 5))
dweight, dbias = np.zeros((3, 5), np.float32), np.zeros(3, np.float32)
kernel.direct().function(dweight, False, dbias, False, dout, inp)
print(dweight.min(), dbias.max())
"""


def test_a_kernel_runs_after_another_one_that_calls_it_was_compiled(tmp_path):
    command = [sys.executable, "-c", CALLED]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "4.0 4.0"), done.stderr[-2000:]

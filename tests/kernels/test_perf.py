"""``CPUOPT_PERF_MAP``: the map of a process, read back, with kernels compiled and from the cache."""

import json
from itertools import pairwise

import pytest
from verbs import fails, process

from cpuopt.kernels.compile import perf

KERNEL = """
from numba import prange
from cpuopt import kernel, ops
@kernel(ops.residual_forward, "mine")
def residual_forward(out, inp1, inp2):
    for i in prange(len(out)):
        out[i] = inp1[i] + inp2[i]
"""
RUN = """
import json, os, sys
from cpuopt import kernels
from cpuopt.kernels.compile import cache, perf
from cpuopt.kernels.registry import KERNELS
from itertools import pairwise
from pathlib import Path
perf.FOLDER = Path(sys.argv[1])
kernels.load_all([sys.argv[2]])
k = KERNELS["residual_forward", "mine"]
k.compile()
(result,) = k.function.overloads.values()
library, name = result.library, result.fndesc.llvm_func_name
address = library.get_pointer_to_function(name)
wrapper = library.get_pointer_to_function(result.fndesc.llvm_cpython_wrapper_name)
told = {"pid": os.getpid(), "address": address, "wrapper": wrapper, "stats": cache.stats()}
maps = [line.split()[:2] for line in open("/proc/self/maps")]
told["executable"] = [r.split("-") for r, mode in maps if "x" in mode]
print(json.dumps(told))
"""


def run(tmp_path):
    """Load a kernel in a process of its own; return what it says, and its map."""
    (tmp_path / "mine.py").write_text(KERNEL)
    where = {"CPUOPT_CACHE_DIR": str(tmp_path / "cache"), "CPUOPT_PERF_MAP": "1"}
    done = process(str(tmp_path), str(tmp_path / "mine.py"), code=RUN, **where)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    rows = (tmp_path / f"perf-{told['pid']}.map").read_text().splitlines()
    return told, [(int(a, 16), int(n, 16), x) for a, n, x in (row.split(" ", 2) for row in rows)]


def test_the_map_names_the_code_that_runs(tmp_path):
    for cached in False, True:
        told, rows = run(tmp_path)
        assert (told["stats"]["hits"] > 0) == cached
        by_name = {name: (at, size) for at, size, name in rows}
        assert by_name["residual_forward[mine]"][0] == told["address"]
        assert by_name["residual_forward[mine]:python"][0] == told["wrapper"]
        assert "residual_forward[mine]:loop" in by_name
        inside = [(int(a, 16), int(b, 16)) for a, b in told["executable"]]
        assert all(any(a <= at and at + size <= b for a, b in inside) for at, size, _ in rows)
        assert all(at + size <= then for (at, size, _), (then, _, _) in pairwise(sorted(rows)))


def test_another_value_is_refused(monkeypatch):
    monkeypatch.setattr(perf, "MODE", "yes")
    fails("CPUOPT_PERF_MAP=yes: expected 1", perf.checked)


def test_a_link_in_the_place_of_the_map_is_not_followed(monkeypatch, tmp_path):
    (tmp_path / "other").write_text("mine")
    path = tmp_path / "perf-1.map"
    path.symlink_to(tmp_path / "other")
    with pytest.raises(FileExistsError):
        perf._opened(path)
    assert (tmp_path / "other").read_text() == "mine"
    path.unlink()
    path.write_text("of an earlier process")
    perf._opened(path).close()
    assert path.read_text() == ""

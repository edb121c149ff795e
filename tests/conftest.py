"""Before any test imports numba."""

import os
import signal
import sys
from pathlib import Path

import drawn
import pytest
from hypothesis import settings

THREADS = "4"
os.environ["NUMBA_NUM_THREADS"] = THREADS  # the same bits on more threads than a machine has cores
os.environ["OMP_WAIT_POLICY"] = "passive"  # so that the surplus threads do not spin

for number in (signal.SIGINT, signal.SIGHUP):  # which nohup and a script's & leave ignored, here and in children
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

settings.register_profile("cpuopt", deadline=None, derandomize=True)  # a busy machine is slow, not wrong
settings.load_profile("cpuopt")


TABLES = {"cpuopt.kernels.registry": "KERNELS", "cpuopt.ops": "ALL"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    drawn.mark(items)


@pytest.fixture
def whole_vectors():
    """Skip where LLVM vectorizes by half of the vectors: with the feature ``-prefer-256-bit`` it would take all."""
    import llvmlite.binding as llvm

    if llvm.get_host_cpu_name() == "rocketlake":
        pytest.skip("LLVM takes half of the vectors of this processor")


@pytest.fixture(autouse=True, scope="session")
def _proved():
    """Prove AMX once, and not again for each cache that a test begins."""
    from cpuopt.kernels.toolkit.micro import amx

    if (found := amx.proved()) and not os.environ.get(amx.proof.VARIABLE):
        os.environ[amx.proof.VARIABLE] = "on" if found.use else "off"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Run in an empty folder, on as many cores as numba has threads."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cpuopt.cli.common.cores", lambda: int(THREADS))


@pytest.fixture
def small_text(here):
    """Run in a folder with a text that takes some runs through several epochs."""
    Path("text.txt").write_text("".join(chr(97 + i * i % 23) for i in range(400)))


@pytest.fixture
def measured(monkeypatch):
    """Let the machine's rates be measured already."""
    from cpuopt.measure.roofline import Level, Roofs  # which imports numba

    def roofs(n=1, say=None):
        return Roofs(n, (Level("memory", None),), 1e4, {"memory": {"read": 1e3}}, 1.0)

    monkeypatch.setattr("cpuopt.measure.rates.roofs", roofs)


@pytest.fixture(autouse=True)
def _traces_of_one_test(tmp_path_factory):
    """Forget what a test leaves: modules, ops and kernels of its own files, threads and signals that a verb has set."""
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    before, path = set(sys.modules), list(sys.path)
    tables = [(m, name, dict(getattr(m, name))) for home, name in TABLES.items() if (m := sys.modules.get(home))]
    yield
    os.environ["NUMBA_NUM_THREADS"] = THREADS
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if kernels := sys.modules.get("cpuopt.kernels"):
        kernels.ADDED.clear()
    for module, name, known in tables:
        table = getattr(module, name)
        table.clear()
        table.update(known)
    if path != sys.path:
        sys.path[:] = path
        here = tmp_path_factory.getbasetemp().resolve()
        for name in sys.modules.keys() - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file and here in Path(file).resolve().parents and not name.startswith("cpuopt_generated"):
                del sys.modules[name]

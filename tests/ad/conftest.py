"""The programs of this directory are imported by name; a test that registers ops leaves none behind."""

import sys
from pathlib import Path

import pytest

from cpuopt import ops
from cpuopt.custom import DifferentiableOp
from cpuopt.kernels import registry

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def registered():
    """Bring the registry back to what it was."""
    every, kernels = dict(ops.ALL), dict(registry.KERNELS)
    yield
    ops.ALL.clear()
    ops.ALL.update(every)
    registry.KERNELS.clear()
    registry.KERNELS.update(kernels)


@pytest.fixture
def uncompiled(monkeypatch):
    """Judge gradients without compiling, which takes seconds for each kernel."""
    monkeypatch.setattr(DifferentiableOp, "_compile", lambda self: None)

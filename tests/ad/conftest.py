"""The programs of this directory are imported by name."""

import sys
from pathlib import Path

import pytest

from cpuopt.custom import DifferentiableOp

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def uncompiled(monkeypatch):
    """Judge gradients without compiling, which takes seconds for each kernel."""
    for step in ("_compile", "_compare"):
        monkeypatch.setattr(DifferentiableOp, step, lambda self: None)

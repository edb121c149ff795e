"""Compilation of kernels: numba's options, the compile cache, worker processes."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

from ...errors import UserError

NUMBAS_FILE = Path(".numba_config.yaml")
"""Settings that numba takes from whatever directory it is imported in, and again at each compilation."""
if os.path.lexists(NUMBAS_FILE):
    raise UserError(
        f"numba would take settings from {str(NUMBAS_FILE.absolute())!r}, which change or break what is compiled; move "
        "it away, or work in another directory; settings of your own go into the environment, as in NUMBA_NUM_THREADS"
    )
import_module("numba.core.config")._config_fname = ""  # one that comes later is not read

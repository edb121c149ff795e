"""The process that compiles kernels: ``python -m cpuopt.kernels.compile.worker [FILE.py ...]``, started by `jit`.

It loads the package and the users' kernel files that it is given, and nothing else: a script that trains is not
imported again.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ...isolate.serve import Say, serve
from .. import load_all, registry


def compile_kernel(request: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Compile one kernel, if it is known here; a script's kernel is not."""
    if kernel := registry.KERNELS.get((request["op"], request["variant"])):
        kernel.of(request["types"]).compile()
    return {}


if __name__ == "__main__":
    load_all(sys.argv[1:])
    serve({"compile": compile_kernel})

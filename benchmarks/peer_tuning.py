"""How those who know PyTorch run it on a CPU: two settings that have to be made before it is imported.

- The C library's allocator gives large blocks back to the system and gets them anew, each page with a fault, in every
  step. Told to keep them, a step of GPT-2 124M takes a tenth to a third less time on a virtual machine, as with
  tcmalloc, or with jemalloc and a decay of -1.
- MKL takes code without AVX-512 on AMD's processors. It asks its own function ``mkl_serv_intel_cpu_true`` for that,
  which another library that is loaded before it can define.

Tried too, on two cores of Zen 4, and without a gain beyond these: Intel's OpenMP, bound threads, threads that spin,
huge pages, ``F.linear_cross_entropy``, ``TORCHINDUCTOR_MAX_AUTOTUNE``; AdamW with ``foreach`` takes seven times as
long as the fused one.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameters of glibc's ``mallopt``: what may stay free at the end of the heap, and blocks outside of it."""
SOURCE = 'extern "C" int mkl_serv_intel_cpu_true(void) { return 1; }\n'
KEPT, CHOSEN = "keeps freed memory", "its own choice of code"
"""What `tune` answers where it has done something."""


def tune(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Make both settings for this process.

    Returns
    -------
    For ``allocator`` and ``mkl``, `KEPT` and `CHOSEN`, or the reason why it is as it was.
    """
    if "torch" in sys.modules:
        raise RuntimeError("tune() has to be called before torch is imported")
    return {"allocator": keep_memory(), "mkl": choose_code(cpuinfo)}


def keep_memory() -> str:
    """Tell the allocator to keep what is freed."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return "as it was: this C library has no mallopt"
    done = mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    return KEPT if done else "as it was: mallopt refused"


def choose_code(cpuinfo: Path) -> str:
    """Let MKL choose its code by the processor's features, and not by its maker."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"not there on {platform.machine()}"
    if not cpuinfo.is_file() or "AuthenticAMD" not in cpuinfo.read_text():
        return "as it was: only on AMD's processors does it ask who made them"
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if not compiler:
        return "held back to code without AVX-512: changing that needs a C++ compiler; install g++, or name one in CXX"
    with tempfile.TemporaryDirectory(prefix="peer-tuning-") as folder:
        source, library = Path(folder, "intel.cc"), Path(folder, "libintel.so")
        source.write_text(SOURCE)
        command = [compiler, "-shared", "-fPIC", "-o", str(library), str(source)]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            return f"held back to code without AVX-512: {compiler} failed: {made.stderr.strip()[-200:]}"
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # found first by all that is loaded later
    return CHOSEN

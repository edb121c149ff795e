"""``cpuopt warmup``: compile what a command needs, in several processes.

Compiled kernels are kept on disk, so that the next command starts at once.

Examples::

    cpuopt warmup --model gpt2-tiny
    cpuopt warmup --all
"""

from __future__ import annotations

import argparse

from ..train import settings
from . import common
from .common import settings_of, start_numba


def flags(p: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    settings.flags(p, *settings.JOB, *settings.KERNELS, steps=1)
    p.add_argument("--all", action="store_true", help="Compile every kernel of every variant.")
    p.add_argument("--processes", type=int, help="Compile in this many processes. Default: one a core.")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    start_numba(args.threads)
    from .. import kernels
    from ..kernels import registry
    from ..kernels.compile import jit
    from ..report import console
    from ..train.job import build_only

    kernels.load_all(args.kernels)
    wanted = list(registry.KERNELS.values()) if args.all else build_only(settings_of(args)).kernels
    with console.compiling() as progress:
        compiled = jit.compile_kernels(
            list(dict.fromkeys(wanted)),
            processes=args.processes or common.cores(),
            files=args.kernels,
            progress=progress,
        )
    print(f"{compiled} kernels compiled, {len(set(wanted)) - compiled} were there")
    return 0

"""What several verbs share: the flags that describe a job, and how numba is started."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..machine import cores as cores

if TYPE_CHECKING:
    from ..measure.profile import Profile
    from ..train.job import Settings


LAYERS = ("default", "safe", "threadsafe", "forksafe", "omp", "tbb", "workqueue")
"""What numba can start threads by."""
DEFAULT = "optimized"
"""`kernels.registry.DEFAULT`, which would import numpy before the flags are read."""


def job_flags(p: argparse.ArgumentParser, steps: int) -> None:
    """Add what describes a training job."""
    p.add_argument("--model", help="preset, or sizes as in '{\"n_layer\": 4}' (that of --init, or gpt2-124M)")
    p.add_argument("--init", metavar="PATH", help="weights: an llm.c model file, a Hugging Face directory, a run")
    p.add_argument(
        "--data", default="builtin", help="builtin, a dataset, a text file, a glob, or a .bin of tokens (%(default)s)"
    )
    p.add_argument("-B", type=int, default=4, help="rows of a batch (%(default)s)")
    p.add_argument("-T", type=int, default=64, help="tokens of a row (%(default)s)")
    p.add_argument("--steps", type=int, default=steps, help="training steps (%(default)s)")
    p.add_argument("--optimizer", default="adamw", help="adamw, sgd (with momentum) or lion (%(default)s)")
    p.add_argument("--seed", type=int, default=0, help="of initial weights and order of data (%(default)s)")
    kernel_flags(p)


def kernel_flags(p: argparse.ArgumentParser, fuse: bool = True) -> None:
    """Add what chooses kernels and threads, and, where there is training, rewrites."""
    p.add_argument(
        "--variant", default=DEFAULT, help="for every op that has it; auto: as 'cpuopt tune' found (%(default)s)"
    )
    p.add_argument(
        "--swap",
        action="append",
        default=[],
        metavar="OP[@LAYER]=VARIANT",
        help="a variant for some ops in some layers, globs allowed; repeatable, the last match wins",
    )
    p.add_argument("--kernels", action="append", default=[], metavar="FILE.py", help="your own kernels; repeatable")
    if fuse:
        p.add_argument(
            "--fuse",
            default="auto",
            metavar="all|none|NAME,...",
            help="rewrites: residual, layernorm, gelu, classifier, update, recompute (%(default)s)",
        )
    p.add_argument("--threads", type=int, help="for all kernels (the cores this process may use)")


FILES = ("trace", "speedscope", "html")
"""Flags that name a file to write at the end."""


def trace_flags(p: argparse.ArgumentParser) -> None:
    """Add the files that other programs show a profile with."""
    p.add_argument("--trace", type=Path, metavar="FILE", help="write the last ten steps for ui.perfetto.dev")
    p.add_argument("--speedscope", type=Path, metavar="FILE", help="write the last ten steps for speedscope")


def check_targets(args: argparse.Namespace) -> None:
    """Refuse files, and a folder of records, that cannot be written, before anything runs."""
    from ..report import files
    from ..train import record

    record.check_root(args.runs)
    for flag in FILES:
        if path := getattr(args, flag, None):
            files.check_target(path, f"--{flag}")


def write_traces(args: argparse.Namespace, profile: Profile | None) -> None:
    """Write the files of `trace_flags`, where there is a profile."""
    from ..report import speedscope, trace

    if args.trace and profile:
        trace.write_trace(args.trace, profile)
    if args.speedscope and profile:
        speedscope.write_speedscope(args.speedscope, profile)


def keep(root: Path, kind: str, name: str, content: Mapping[str, Any]) -> str | None:
    """Keep a record and give its folder; None, and a warning, where it cannot be kept: it can be shown all the same."""
    from ..lab import records
    from ..report.console import warn

    try:
        return str(records.keep(root, kind, name, content))
    except UserError as e:
        warn(f"the record is not kept: {e}")
        return None


def start_numba(threads: int | None) -> None:
    """Fix the number of threads, which numba and BLAS read when they are first imported."""
    from ..report.console import warn

    there = cores()
    if threads is not None:
        if threads < 1:
            raise UserError(f"--threads {threads}: expected 1 or more")
        if threads > there:
            warn(f"{threads} threads on {there} cores: they take turns, which costs time")
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        raise UserError("NUMBA_DISABLE_JIT is set: kernels would run as Python, thousands of times slower; unset it")
    layer = os.environ.get("NUMBA_THREADING_LAYER", "default")
    if layer not in LAYERS:
        raise UserError(f"NUMBA_THREADING_LAYER={layer}: numba knows no such layer; unset it, or take omp or workqueue")
    if "numba" not in sys.modules:  # once it runs, numba refuses another number
        os.environ["NUMBA_NUM_THREADS"] = str(threads or there)


def thread_counts(text: str) -> list[int]:
    """Read ``1,2,4``; by default one and all cores.

    Raises
    ------
    UserError
        For anything else.
    """
    words = [w.strip() for w in text.split(",")] if text else ["1", str(cores())]
    if not all(w.isdecimal() and int(w) > 0 for w in words):
        raise UserError(f"--threads {text!r}: expected numbers of threads, as in 1,2,4")
    return sorted({int(w) for w in words})


def settings_of(args: argparse.Namespace, **more: Any) -> Settings:
    """Build the settings of a job from flags of the same names."""
    from dataclasses import fields

    from ..train.job import Settings

    given = {f.name: getattr(args, f.name) for f in fields(Settings) if hasattr(args, f.name)}
    given.update(swap=tuple(args.swap), kernels=tuple(args.kernels), processes=cores(), **more)
    return Settings(**given)

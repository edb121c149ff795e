"""The command line: flags are read first, and numba is imported only by the verb that needs it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from . import __version__
from .errors import UserError

if TYPE_CHECKING:
    from .job import Settings

DESCRIPTION = "A CPU performance laboratory for LLM training: train, profile, and swap one kernel at a time."


def _job_flags(p: argparse.ArgumentParser, steps: int) -> None:
    """Add what describes a training job."""
    p.add_argument("--model", default="gpt2-124M", help="preset, or sizes as in '{\"n_layer\": 4}' (%(default)s)")
    p.add_argument(
        "--data", default="builtin", help="builtin, a dataset, a text file, a glob, or a .bin of tokens (%(default)s)"
    )
    p.add_argument("-B", type=int, default=4, help="rows of a batch (%(default)s)")
    p.add_argument("-T", type=int, default=64, help="tokens of a row (%(default)s)")
    p.add_argument("--steps", type=int, default=steps, help="training steps (%(default)s)")
    p.add_argument("--seed", type=int, default=0, help="of initial weights and order of data (%(default)s)")
    _kernel_flags(p)


def _kernel_flags(p: argparse.ArgumentParser) -> None:
    """Add what chooses kernels and threads."""
    p.add_argument("--variant", default="optimized", help="for every op that has it; else vanilla (%(default)s)")
    p.add_argument(
        "--swap",
        action="append",
        default=[],
        metavar="OP[@LAYER]=VARIANT",
        help="a variant for some ops in some layers, globs allowed; repeatable, the last match wins",
    )
    p.add_argument("--kernels", action="append", default=[], metavar="FILE.py", help="your own kernels; repeatable")
    p.add_argument(
        "--fuse", default="auto", metavar="all|none|NAME,...", help="rewrites: residual, update (%(default)s)"
    )
    p.add_argument("--threads", type=int, help="for all kernels (the cores this process may use)")


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with the flags."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"cpuopt: {message}; see '{self.prog} -h'\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="cpuopt", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"cpuopt {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="verb", required=True)

    p = verbs.add_parser("train", help="train a GPT-2 and keep a record of the run")
    _job_flags(p, steps=40)
    p.add_argument("--lr", type=float, default=1e-4, help="learning rate (%(default)s)")
    p.add_argument("--beta1", type=float, default=0.9, help="(%(default)s)")
    p.add_argument("--beta2", type=float, default=0.999, help="(%(default)s)")
    p.add_argument("--eps", type=float, default=1e-8, help="of AdamW (%(default)s)")
    p.add_argument("--weight-decay", type=float, default=0.0, help="(%(default)s)")
    p.add_argument("--clip", type=float, help="scale the gradient down to this global norm (off)")
    p.add_argument("--val-every", type=int, default=10, help="steps between validations; 0: none (%(default)s)")
    p.add_argument("--val-batches", type=int, default=5, help="batches of a validation (%(default)s)")
    p.add_argument("--run", default="train", metavar="NAME", help="of the folder in runs/ (%(default)s)")
    p.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="where run folders go (%(default)s)")
    p.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    p.set_defaults(run_verb=_train)

    p = verbs.add_parser("profile", help="time per op and per layer of a training step")
    _job_flags(p, steps=5)
    p.add_argument("--warmup", type=int, default=1, help="steps that are not counted (%(default)s)")
    p.add_argument("--detail", action="store_true", help="a row for every op of every layer")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome/Perfetto trace of the steps")
    p.set_defaults(run_verb=_profile)

    p = verbs.add_parser("bench", help="whole training steps, side by side with PyTorch or another variant")
    p.add_argument("--model", default="gpt2-124M", help="preset, or sizes as in '{\"n_layer\": 4}' (%(default)s)")
    p.add_argument("--peer", action="append", default=[], help="torch-eager (default) or torch-compile; repeatable")
    p.add_argument("--against", action="append", default=[], metavar="VARIANT", help="a variant as peer; repeatable")
    p.add_argument("--sizes", default="1x16,1x32,2x16,1x64,4x64,16x64,1x1024", help="B x T each (%(default)s)")
    p.add_argument("--rounds", type=int, default=10, help="turns of each side (%(default)s)")
    p.add_argument("--seed", type=int, default=0, help="of the order of turns, weights and batches (%(default)s)")
    p.add_argument("--peer-python", default=sys.executable, metavar="PATH", help="a Python that has torch (this one)")
    p.add_argument("--json", action="store_true", help="print the record as one JSON object")
    p.add_argument("--out", type=Path, metavar="FILE", help="write the record there, anew after each size")
    _kernel_flags(p)
    p.set_defaults(run_verb=_bench)

    p = verbs.add_parser("program", help="print the traced program, its generated backward, and the memory plan")
    _job_flags(p, steps=1)
    p.add_argument("--pass", dest="phase", choices=["forward", "backward", "update", "all"], default="all")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.set_defaults(run_verb=_program)

    p = verbs.add_parser("kernels", help="list ops and the variants that compute them")
    p.add_argument("--kernels", action="append", default=[], metavar="FILE.py", help="your own kernels; repeatable")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.set_defaults(run_verb=_kernels)

    p = verbs.add_parser("warmup", help="compile what a command needs, in several processes")
    _job_flags(p, steps=1)
    p.add_argument("--all", action="store_true", help="every kernel of every variant")
    p.add_argument("--processes", type=int, help="that compile at one time (one a core)")
    p.set_defaults(run_verb=_warmup)

    p = verbs.add_parser("data", help="prepare and list datasets")
    what = p.add_subparsers(dest="what", metavar="what", required=True)
    q = what.add_parser("prepare", help="download and tokenize a dataset; the only verb that uses the network")
    q.add_argument("name")
    q.add_argument("--tokenizer", default="gpt2", choices=["gpt2", "bytes"], help="(%(default)s)")
    q.set_defaults(run_verb=_data_prepare)
    q = what.add_parser("list", help="show what there is")
    q.add_argument("--json", action="store_true", help="print one JSON object")
    q.set_defaults(run_verb=_data_list)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status: 0, 2 for bad input, 130 after Ctrl-C, 143 after SIGTERM."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run_verb(args) or 0)
    except UserError as e:
        print(f"cpuopt: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("cpuopt: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _start_numba(threads: int | None) -> None:
    """Fix the number of threads, which numba and BLAS read when they are first imported."""
    from .report.console import warn

    cores = _cores()
    if threads is not None:
        if threads < 1:
            raise UserError(f"--threads {threads}: expected 1 or more")
        if threads > cores:
            warn(f"{threads} threads on {cores} cores: they take turns, which costs time")
    if "numba" not in sys.modules:  # once it runs, numba refuses another number
        os.environ["NUMBA_NUM_THREADS"] = str(threads or cores)


def _cores() -> int:
    """Count the cores that this process may use: its affinity, and the CPU quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores


def _settings(args: argparse.Namespace, **more: Any) -> Settings:
    """Build the settings of a job from flags of the same names."""
    from dataclasses import fields

    from .job import Settings

    given = {f.name: getattr(args, f.name) for f in fields(Settings) if hasattr(args, f.name)}
    given.update(swap=tuple(args.swap), kernels=tuple(args.kernels), processes=_cores(), **more)
    return Settings(**given)


def _train(args: argparse.Namespace) -> int:
    _start_numba(args.threads)
    from .job import prepare
    from .record import finite
    from .report import console
    from .train import train

    settings = _settings(args)
    settings.check()
    with console.compiling() as progress:
        job = prepare(settings, progress)
    with console.TrainingView(job, quiet=args.json) as view:
        result = train(job, args.runs, view)
    if args.json:
        print(json.dumps(finite({**result.summary, "path": str(result.path)})))
    else:
        console.summary(result)
    return 128 + result.stopped_by if result.stopped_by else 0


def _profile(args: argparse.Namespace) -> int:
    _start_numba(args.threads)
    from .job import prepare
    from .profiler import profile
    from .record import finite
    from .report import console, tables, trace

    settings = _settings(args, run="profile")
    if args.warmup < 0:
        raise UserError(f"--warmup {args.warmup}: expected 0 or more")
    with console.compiling() as progress:
        job = prepare(settings, progress)
    for note in job.engine.notes:
        console.warn(note)
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if busy > _cores():
        console.warn(f"load average {busy:.1f} on {_cores()} cores: other processes make these times too long")
    with console.counting("steps", settings.steps + args.warmup) as tick:
        report = profile(job, warmup=args.warmup, tick=tick)
    if args.trace:
        trace.write_trace(args.trace, report)
    if args.json:
        print(json.dumps(finite(report.to_json())))
    else:
        console.show(tables.profile_tables(report, detail=args.detail))
    return 0


def _bench(args: argparse.Namespace) -> int:
    _start_numba(args.threads)
    from .bench import Bench, Plan, parse_sizes
    from .report import bench as report
    from .report import console

    plan = Plan(
        model=args.model,
        sizes=parse_sizes(args.sizes),
        peers=tuple(dict.fromkeys(args.peer or ([] if args.against else ["torch-eager"]))),
        against=tuple(dict.fromkeys(args.against)),
        variant=args.variant,
        swap=tuple(args.swap),
        fuse=args.fuse,
        kernels=tuple(args.kernels),
        threads=args.threads or _cores(),
        rounds=args.rounds,
        seed=args.seed,
        peer_python=args.peer_python,
        processes=_cores(),
    )
    bench = Bench(plan)
    with report.progress(plan.cost) as bench.view:
        record = bench.run(args.out)
    if args.json:
        print(json.dumps(record))
    else:
        console.show(report.tables(record))
    return 1 if any(r["refused"] for r in record["results"]) else 0


def _program(args: argparse.Namespace) -> int:
    _start_numba(args.threads)
    from .job import build_only
    from .report import console

    built = build_only(_settings(args))
    program, chosen, plan = built.program, built.kernels, built.plan()
    phases = {"all": (), "update": ("norm", "update")}.get(args.phase, (args.phase,))
    if args.json:
        calls = [
            {
                "phase": c.phase,
                "layer": c.layer,
                "op": c.op.name,
                "variant": k.variant,
                "flops": c.flops,
                "text": str(c),
            }
            for c, k in zip(program.calls, chosen, strict=True)
            if not phases or c.phase in phases
        ]
        print(json.dumps({"calls": calls, "plan": plan.describe(), "flops": program.flops}))
    else:
        console.program(program, chosen, plan, phases)
    return 0


def _kernels(args: argparse.Namespace) -> int:
    from . import kernels, ops, registry
    from .report import console

    kernels.load_all(args.kernels)
    table = [
        {"op": name, "variant": v, "where": registry.KERNELS[name, v].where}
        for name in ops.ALL
        for v in registry.variants(name)
    ]
    if args.json:
        print(json.dumps({"kernels": table}))
    else:
        console.kernels_table(table)
    return 0


def _warmup(args: argparse.Namespace) -> int:
    _start_numba(args.threads)
    from . import kernels, registry
    from .job import build_only
    from .kernels import jit
    from .report import console

    kernels.load_all(args.kernels)
    wanted = list(registry.KERNELS.values()) if args.all else build_only(_settings(args)).kernels
    with console.compiling() as progress:
        compiled = jit.compile_kernels(
            list(dict.fromkeys(wanted)),
            processes=args.processes or _cores(),
            files=args.kernels,
            progress=progress,
        )
    print(f"{compiled} kernels compiled, {len(set(wanted)) - compiled} were there")
    return 0


def _data_prepare(args: argparse.Namespace) -> int:
    from .data import prepare
    from .report import console

    with console.downloading() as progress:
        files = prepare(args.name, args.tokenizer, progress=progress)
    for file in files:
        print(file)
    return 0


def _data_list(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from .data import list_datasets
    from .report import console

    datasets = list_datasets()
    if args.json:
        print(json.dumps({"datasets": [asdict(d) for d in datasets]}, default=str))
    else:
        console.datasets_table(datasets)
    return 0

"""What a run will take, before it starts: memory by group, the time of its steps, and what would need less.

The time at the roofs is a bound: each call takes at least what its FLOPs and bytes take at the machine's peaks. A few
measured steps replace it, and refute the roofs if they are faster. What else a run does is measured once each: what
comes before its first step, the held-out batches, and a checkpoint, which is written beside the folder of the runs and
removed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import lcm, prod
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np

from ..building import Built
from ..engine import Engine
from ..errors import UserError
from ..machine import available_bytes
from ..measure.quartile import lower_quartile
from ..measure.roofline import Roofs
from ..ops.dequantize import BLOCKS
from ..ops.storage import TYPES, WIDE
from ..program.arena import gb
from ..program.precision import weights_of_products
from ..program.program import Call, Program
from ..program.quantize import INT8, quantizable
from ..program.recompute import ALL, blocks
from . import checkpoint
from .job import Job, build_only, model_of, sample_bytes, smaller
from .record import nearest_folder
from .settings import DTYPES, Settings
from .steps import named

MEASURED, MEASURED_S = 5, 2.0
"""The least number of steps that are measured, and the seconds for which they are; the lower quartile of the later half
counts, because a process takes its first steps more slowly. Their extra time is counted once."""
SAMPLE = 4
"""Steps whose batches show what share of their FLOPs calls are asked for."""


@dataclass(frozen=True)
class Option:
    """A run that takes less memory.

    Attributes
    ----------
    flags : what to add to the command.
    arena : its bytes.
    roof_ms : the least time of a step; None if the roofs are too low.
    """

    flags: str
    arena: int
    roof_ms: float | None


@dataclass(frozen=True)
class Forecast:
    """What a run takes.

    Attributes
    ----------
    memory : the bytes of its arena by group, as of `ArenaPlan.describe`, and of the copy that samples need.
    arena, available : the bytes of both together, and those that this machine has for them.
    tokens : of a step.
    roof_ms : the least time of a step, at the machine's roofs; None if measured steps were faster.
    of_work : the FLOPs that the data ask for, which the roofs are for, in percent of the most that a step can have.
    options : what would take less memory.
    step_ms : the measured time of a step, with the reading of its batches.
    mean_ms : the mean of the steps of which that is the lower quartile.
    start_s : the time from the start of the process to the first step, and what the first steps take more than others.
    validation_s : the time of all validations.
    saving_s : the time of all checkpoints, and of the weights at the end.
    peak : the peak memory of the process, once the model is built.
    data : what is trained on: of chats, how many tokens count, and what is cut.
    epoch_steps : the steps of an epoch.
    """

    JSON: ClassVar = (
        *("memory", "arena", "available", "fits", "steps", "tokens", "roof_ms", "step_ms", "start_s", "validation_s"),
        *("saving_s", "seconds", "options", "peak", "data", "epoch_steps", "of_work", "mean_ms"),
    )
    memory: dict[str, int]
    arena: int
    available: int
    steps: int
    tokens: int
    roof_ms: float | None
    options: tuple[Option, ...]
    step_ms: float | None = None
    start_s: float = 0.0
    validation_s: float = 0.0
    saving_s: float = 0.0
    peak: int | None = None
    data: str = ""
    epoch_steps: float | None = None
    of_work: float = 100.0
    mean_ms: float | None = None

    @property
    def fits(self) -> bool:
        """Whether the machine has the memory."""
        return self.arena <= self.available

    @property
    def seconds(self) -> float:
        """The time of the whole run; that of its steps at the roofs, if no step was measured."""
        steps = self.steps * (self.step_ms or self.roof_ms or 0.0) / 1e3
        return self.start_s + steps + self.validation_s + self.saving_s


def room(settings: Settings) -> tuple[int, int]:
    """Return the bytes of a run's arena, and those that this machine has for it. Nothing is loaded or allocated."""
    return memory_of(build_only(settings), settings)["arena"], available_bytes()


def memory_of(built: Built, settings: Settings) -> dict[str, int]:
    """Return the bytes of a run's arena by group, as of `ArenaPlan.describe`, with the copy that samples need."""
    found = built.plan().describe()
    copy = sample_bytes(settings, sum(prod(p.shape) for p in built.program.parameters))
    return found | ({"samples": copy, "arena": found["arena"] + copy} if copy else {})


Batches = Sequence[Mapping[str, Any]]


def sample(job: Job) -> Batches:
    """Return the batches of a job's first steps, if it trains on examples; all tokens of a text count."""
    steps = range(1, SAMPLE + 1) if job.epoch_steps else ()
    return [batch for number in steps for batch in job.micro_batches(number)]


def share(call: Call, batches: Batches) -> float:
    """Return the mean share of a call's FLOPs that some batches ask for; all without one."""
    if not (batches and call.op.asked):
        return 1.0

    def given(batch: Mapping[str, Any]) -> dict[str, Any]:
        values = {n: getattr(v, "name", v) for n, v in call.args.items()}
        return {n: np.empty(0) if v is None else batch.get(v, np.empty(0)) if isinstance(v, str) else v
                for n, v in values.items()}  # fmt: skip

    return fmean(call.asked(given(batch)) for batch in batches)


def forecast(settings: Settings, roofs: Roofs, available: int | None = None, batches: Batches = ()) -> Forecast:
    """Plan a run: nothing is compiled, loaded or allocated.

    Parameters
    ----------
    available : as `room` gave it, before this process took memory; by default as it is now.
    batches : some of the run's, if what they ask for is to count; else all tokens count.

    Raises
    ------
    UserError
        For settings that cannot be met.
    """
    built = build_only(settings)
    memory = memory_of(built, settings)
    others = [(flags, other, build_only(other)) for flags, other in _others(settings, built.program)]
    options = [Option(flags, memory_of(b, other)["arena"], roof_ms(b, roofs, batches)) for flags, other, b in others]
    calls = built.program.step_calls
    return Forecast(
        memory,
        memory["arena"],
        available_bytes() if available is None else available,
        settings.steps,
        settings.B * settings.T * settings.micro_batches,
        roof_ms(built, roofs, batches),
        tuple(option for option in options if option.arena < memory["arena"]),
        of_work=100 * sum(c.flops * share(c, batches) for c in calls) / sum(c.flops for c in calls),
    )


def measured(
    planned: Forecast,
    job: Job,
    root: Path,
    start_s: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Forecast:
    """Take a few steps of a job, and replace the time at the roofs. The job's weights change.

    Parameters
    ----------
    root : the folder of the runs, beside which a checkpoint is written, if the run writes any, and removed.
    start_s : the time that the process took to prepare the job.

    Raises
    ------
    UserError
        If no checkpoint can be written there.
    """
    s, seconds = job.settings, list[float]()
    while len(seconds) <= MEASURED or sum(seconds) < MEASURED_S:
        seconds.append(_time(job.take_step, clock))
    half = len(seconds) // 2
    step = lower_quartile(seconds[half:])
    if planned.roof_ms and planned.roof_ms > step * 1e3:
        options = tuple(replace(o, roof_ms=None) for o in planned.options)
        planned = replace(planned, roof_ms=None, options=options)
    return replace(
        planned,
        step_ms=step * 1e3,
        mean_ms=fmean(seconds[half:]) * 1e3,
        start_s=start_s + max(0.0, sum(x - step for x in seconds[: min(half, s.steps)])),
        validation_s=(1 + s.validations(0)) * _validation(job, clock),
        saving_s=_saving(job, root, clock),
        peak=job.planned_bytes,
        data=job.corpus.description,
        epoch_steps=job.epoch_steps,
    )


def _time(work: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    work()
    return clock() - start


def _validation(job: Job, clock: Callable[[], float]) -> float:
    """Measure one validation, on some of its batches; the first time that a batch runs is longer and left out."""
    s = job.settings
    batches = job.corpus.batches("val", s.B, s.T)
    n, seconds = min(s.val_batches, len(batches)) if s.val_every else 0, list[float]()
    for i in (0, *range(n)) if n else ():
        seconds.append(_time(partial(job.engine.forward, **named(batches.at(i))), clock))
        if len(seconds) > 1 and sum(seconds) > MEASURED_S:
            break
    return n * fmean(seconds[1:]) if n else 0.0


def _saving(job: Job, root: Path, clock: Callable[[], float]) -> float:
    """Measure one checkpoint; return the time of all of a run, and of the weights at its end."""
    s = job.settings
    every = [n for n, kept in ((s.save_every, True), (s.val_every, s.keep_best)) if n and kept]
    both = s.steps // lcm(*every) if len(every) == 2 else 0
    number = sum(s.steps // n for n in every) - both + (bool(every) and all(s.steps % n for n in every))
    if not number and s.save is None:
        return 0.0
    folder, written = nearest_folder(root), list[int]()

    def save() -> None:
        with TemporaryDirectory(prefix=".cpuopt-", dir=folder) as there:
            path = checkpoint.save(Path(there), job.engine, {"step": 0, "val": {}}, 1)
            written.extend(file.stat().st_size for file in path.iterdir())

    try:
        one = _time(save, clock)
    except (OSError, UserError) as e:
        raise UserError(f"no checkpoint can be written in {str(folder)!r}: {getattr(e, 'strerror', e)}") from e
    program = job.engine.program
    kept = program.trained if s.lora else program.parameters
    weights = 0 if s.save is None else sum(prod(p.shape) * TYPES[WIDE].bytes for p in kept)
    return one * (number + weights / sum(written))


def roof_ms(built: Built | Engine, roofs: Roofs, batches: Batches = ()) -> float:
    """Return the least time of a whole step, of all its micro-batches on this rank.

    Parameters
    ----------
    batches : what decides how many of their FLOPs calls are asked for; without any all, which bounds it from above.
    """
    once = {"forward", "backward"}
    n = built.options.micro_batches
    bounds = (
        (n if c.phase in once else 1) * roofs.bound(c.flops * share(c, batches), c.bytes, c.operands)[0]
        for c in built.program.step_calls
    )
    return sum(bounds) / 1e6


def _others(s: Settings, program: Program) -> Iterator[tuple[str, Settings]]:
    """Yield flags that may take less memory, with the settings that they give."""
    n_blocks = len(blocks(program))
    narrow = next(word for word, of in DTYPES.items() if of != WIDE)
    sets = [("moments",), ("dtype", "moments")]
    if not s.lora:
        sets += [("weights", "dtype"), ("weights", "dtype", "moments")]
    seen = [set[str]()]
    for words in sets:
        changed = {word: narrow for word in words if getattr(s, word) == WIDE}
        if changed.keys() not in seen:
            seen.append({*changed})
            yield " ".join(f"--{word} {narrow}" for word in changed), replace(s, **dict[str, Any](changed))
    if s.lora is None:
        for dtype in dict.fromkeys((narrow if s.dtype == WIDE else s.dtype, s.dtype)):
            more = f" --dtype {dtype}" if dtype != s.dtype else ""
            yield f"--lora r=8{more}", replace(s, lora="r=8", dtype=dtype)
    if s.base not in BLOCKS and quantizable(program, [p for p in weights_of_products(program) if not p.trained]):
        yield f"--base {INT8}", replace(s, base=INT8)
    names = s.rewrites
    if "recompute" not in names:
        more = ",".join((*names, "recompute"))
        yield f"--fuse {more}", replace(s, fuse=more)
    now = n_blocks if s.recompute == ALL else int(s.recompute)
    for number, word in ((n_blocks // 2, str(n_blocks // 2)), (n_blocks, ALL)):
        if now < number:
            yield f"--recompute {word}", replace(s, recompute=word)
    for name in ("B", "T"):
        if (n := getattr(s, name)) > 1 and s.total_batch is None:
            yield f"-{name} {n // 2}", replace(s, **dict[str, Any]({name: n // 2}))


def require_fit(planned: Forecast, settings: Settings) -> None:
    """Refuse a run that the memory cannot hold.

    Raises
    ------
    UserError
        With both sizes, and what would fit.
    """
    if not planned.fits:
        advice = next((f"take {o.flags}" for o in planned.options if o.arena <= planned.available), "")
        advice = advice or smaller(settings, model_of(settings)[1].config, planned.available)
        raise UserError(
            f"the run needs {gb(planned.arena)} and {gb(planned.available)} of memory are available; {advice}"
        )

"""The output of the command line: live progress on a terminal, plain lines elsewhere, tables at the end."""

from __future__ import annotations

import errno
import os
import select
import shlex
import termios
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from math import prod
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleDimensions, ConsoleOptions, Group, RenderableType
from rich.progress import DownloadColumn, Progress, ProgressColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.text import Text

from ..comm.places import named
from ..data.chats import Chats
from ..data.given import Given
from ..files.outputs import free
from ..measure.quartile import apart
from ..program.arena import ArenaPlan, gb
from ..program.program import Call, Phase, Program
from ..train.settings import FLAGS
from ..wording import count, duration, four, parameters, plain
from .style import BAR, progress, table, unbroken

if TYPE_CHECKING:
    from ..data.datasets import DatasetStatus
    from ..kernels.registry import Kernel
    from ..train.checkpoint import Checkpoint
    from ..train.forecast import Forecast
    from ..train.job import Job
    from ..train.trainer import RunResult


NARROWEST = 20
"""The least columns of a table or a line; ``COLUMNS=0`` would print nothing."""
UNLIMITED = 1 << 20
"""The columns of a file or a pipe: wider than any line."""


class Plain(Console):
    """A console that prints any text as it is: no markup, no emoji codes, no control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, highlight=False, markup=False, emoji=False, force_jupyter=False)

    @property
    def size(self) -> ConsoleDimensions:
        """The size of the terminal; a file or a pipe takes lines of any length, unless ``COLUMNS`` is set."""
        if self.is_terminal or self._width is not None or self._environ.get("COLUMNS", "").isdigit():
            there = super().size
            return there if there.width >= NARROWEST else ConsoleDimensions(NARROWEST, there.height)
        return ConsoleDimensions(UNLIMITED, super().size.height)

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        """Set the size."""
        self._width, self._height = new_size

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render; segments with a `control` are rich's own."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(plain(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        """Raise the error of a pipe that nobody reads; rich would end the process."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


OUT, ERR = Plain(), Plain(stderr=True)


def on_stderr(*columns: str | ProgressColumn) -> Progress:
    """Make a live line on stderr, if that is a terminal."""
    return progress(*columns, console=ERR, disable=not ERR.is_terminal)


def warn(text: str) -> None:
    """Print a warning on stderr."""
    put(ERR, Text.assemble(("warning: ", "yellow"), text) if ERR.is_terminal else f"warning: {text}")


def note(text: str) -> None:
    """Print a note on stderr."""
    put(ERR, f"note: {text}")


def show(renderables: Sequence[RenderableType]) -> None:
    """Print tables and lines."""
    for r in renderables:
        put(OUT, r)


def put(console: Console, shown: RenderableType) -> None:
    """Print a table or a text, which breaks no word; a string is one line, however long, if no terminal is."""
    width = console.width if console.is_terminal or not isinstance(shown, str) else UNLIMITED
    text = Text(shown) if isinstance(shown, str) else shown
    console.print(Group(*unbroken(text, width)) if isinstance(text, Text) else text, crop=False)


@contextmanager
def surviving_hangup() -> Iterator[None]:
    """Discard output once the terminal is closed, or nobody reads the pipe, so that the work goes on."""
    try:
        yield
    except OSError as e:
        lost = [shown for shown in (1, 2) if _is_lost(shown)]
        if e.errno != errno.EIO and not (e.errno == errno.EPIPE and lost):
            raise
        null = os.open(os.devnull, os.O_WRONLY)
        for shown in lost:
            os.dup2(null, shown)
        os.close(null)


def _is_lost(descriptor: int) -> bool:
    """Return whether a descriptor is of a closed terminal, or of a pipe that nobody reads."""
    try:
        termios.tcgetattr(descriptor)
    except termios.error as e:
        if e.args[0] == errno.EIO:
            return True
    waiting = select.poll()
    waiting.register(descriptor, 0)  # errors are reported without being asked for
    return bool(waiting.poll(0))


@contextmanager
def compiling() -> Iterator[Callable[[int, int, str], None]]:
    """Show which kernel is compiled, of how many, on stderr."""
    bar = on_stderr("compiling {task.completed}/{task.total}", BAR, "{task.fields[kernel]}", TimeElapsedColumn())
    task = None

    def noted(done: int, total: int, kernel: str) -> None:
        nonlocal task
        if not ERR.is_terminal:
            put(ERR, f"compiled {done}/{total}{': next ' + kernel if kernel else ''}")
            return
        if task is None:
            bar.start()
            task = bar.add_task("", total=total, kernel="")
        bar.update(task, completed=done, kernel=kernel)

    try:
        yield noted
    finally:
        if task is not None:
            bar.stop()


@contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a count with the time that remains, on stderr."""
    with on_stderr(f"{what} {{task.completed}}/{{task.total}}", BAR, TimeRemainingColumn()) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)


@contextmanager
def remaining() -> Iterator[Callable[[str, float, float], None]]:
    """Show what is measured, how much of the work is done, and the time that remains, on stderr."""
    with on_stderr("{task.description}", BAR, TimeRemainingColumn()) as bar:
        task = bar.add_task("")
        yield lambda text, done, whole: bar.update(task, description=text, completed=done, total=whole)


@contextmanager
def saying() -> Iterator[Callable[[str], None]]:
    """Show a task on stderr while it runs."""
    with ERR.status("") as status:
        yield lambda text: status.update(Text(text))


@contextmanager
def downloading() -> Iterator[Callable[[str, int, int], None]]:
    """Show each download, on stderr."""
    with progress("{task.description}", BAR, DownloadColumn(), console=ERR) as bar:
        tasks: dict[str, Any] = {}

        def noted(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total)
            bar.update(tasks[name], completed=done)

        yield noted


FIRST = 5
"""The steps after which a run says when it ends."""


class TrainingView:
    """The progress of a run: one live line with the time that remains, or plain lines, at most one a second.

    Parameters
    ----------
    roof_ms : the least time of a step, if the machine's roofs are known.
    """

    def __init__(
        self, job: Job, quiet: bool = False, clock: Callable[[], float] = time.monotonic, roof_ms: float | None = None
    ) -> None:
        self.job, self.quiet, self.clock, self.roof_ms = job, quiet, clock, roof_ms
        self.began: tuple[int, float] | None = None
        self.opened, self.validation_s = 0.0, 0.0
        self.logged: float | None = None
        self.live = OUT.is_terminal and not quiet
        columns = "step {task.completed}/{task.total}", BAR, "{task.fields[now]}", "remaining", TimeRemainingColumn()
        self.bar = progress(*columns, console=OUT, disable=not self.live)
        self.task = self.bar.add_task("", total=job.settings.steps, now="")

    def __enter__(self) -> TrainingView:
        job, engine, s = self.job, self.job.engine, self.job.settings
        plan = engine.plan.describe()
        how = job.engine.options
        swaps = "".join(f", {r}" for r in how.choice.swaps)
        size = parameters(job.config.n_params)
        dtype = "" if s.dtype == FLAGS["dtype"].default else f", {s.dtype}"
        dtype += f", {s.base} base" if s.base else ""
        if trained := sum(prod(p.shape) for p in engine.program.trained) if job.frozen else 0:
            size += f", {trained:,} of them trained" if not s.lora else f", adapters of {trained:,}"
        self.say(f"{job.name}: {size}, B {s.B}, T {s.T}, {count(engine.threads, 'thread')}{dtype}")
        if s.micro_batches > 1:
            self.say(f"{s.micro_batches} micro-batches make a step of {s.total_batch:,} tokens")
        self.say(job.corpus.description)
        if job.epoch_steps:
            self.say(f"{count(s.steps, 'step')}: {epochs(s.steps, job.epoch_steps)}")
        self.say(f"kernels: {how.choice.variant}{swaps}; rewrites: {', '.join(how.fuse) or 'none'}")
        for note in engine.notes:
            self.say(note)
        parts = ", ".join(f"{k} {gb(v)}" for k, v in plan.items() if k not in ("arena", "shared"))
        self.say(f"memory: {parts}; shared {gb(-plan['shared'])}; arena {gb(plan['arena'])}")
        self.say(f"expected peak of the process {gb(job.planned_bytes)}")
        self.bar.start()
        self.opened = self.clock()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        with surviving_hangup():
            self.bar.stop()

    def say(self, text: str) -> None:
        """Print a line above the live one."""
        if not self.quiet:
            with surviving_hangup():
                put(self.bar.console, text)

    def note_resume(self, checkpoint: Checkpoint) -> None:
        """Show the checkpoint that the run continues from."""
        done = checkpoint.state["step"]
        self.bar.update(self.task, completed=done)
        self.say(f"goes on after step {done}, from {checkpoint.path}")

    def sample(self, step: int, text: str) -> None:
        """Show a sample of generated text."""
        self.say(f"step {step}/{self.job.settings.steps}  sample: {text!r}")

    def note(self, text: str) -> None:
        """Print a warning, on stderr where no live line is shown."""
        if self.live:
            self.say(f"warning: {text}")
        else:
            with surviving_hangup():
                warn(text)

    def step_done(self, metrics: Mapping[str, Any]) -> None:
        """Show a step."""
        now = f"loss {metrics['loss']:.4f}  norm {metrics['grad_norm']:.2f}  {metrics['tokens_per_s']:,.0f} tokens/s"
        self.bar.update(self.task, completed=metrics["step"], now=now)
        if not self.live and self.due(metrics["step"]):
            left = self.remaining(metrics["step"])
            self.say(f"step {metrics['step']}/{self.job.settings.steps}  {now}  {four(metrics['step_ms'])} ms{left}")
        self.say_end(metrics["step"])

    def due(self, done: int) -> bool:
        """Return whether a step has a line: at most one a second, or every so many steps; the first and the last."""
        s, now = self.job.settings, self.clock()
        every = s.log_every and done % s.log_every == 0
        late = not s.log_every and (self.logged is None or now - self.logged >= 1)
        if not (every or late or self.logged is None or done == s.steps):
            return False
        self.logged = now
        return True

    def say_end(self, done: int) -> None:
        """Print when the run ends, once: after some steps, by their times and by that of the first validation."""
        s, now = self.job.settings, self.clock()
        self.began = self.began or (done, now)
        first, start = self.began
        if done != first + FIRST or done == s.steps:
            return
        within = s.validations(first) - s.validations(done)
        step, left = (now - start - within * self.validation_s) / FIRST, s.validations(done)
        seconds = (s.steps - done) * step + left * self.validation_s
        end = f"{datetime.now() + timedelta(seconds=seconds):%Y-%m-%d %H:%M}"
        more = f" and {count(left, 'validation')}" if left else ""
        steps = count(s.steps - done, "more step")
        at_roofs = f", {four(self.roof_ms)} at the roofs" if self.roof_ms and self.roof_ms <= 1e3 * step else ""
        by_now = f"{four(1e3 * step)} ms a step by now{at_roofs}"
        self.say(f"{by_now}; {steps}{more} take {duration(seconds)}; the run ends at {end}")

    def remaining(self, done: int) -> str:
        """Return the time that the other steps take, at the pace since the second step here; ``""`` if unknown."""
        now, left = self.clock(), self.job.settings.steps - done
        if self.began is None:  # the first step is slower
            self.began = done, now
        first, start = self.began
        seconds = (now - start) / (done - first) * left if done > first else 0.0
        return f"  {duration(seconds)} remaining" if seconds >= 1 else ""

    def validation(self, step: int, loss: float) -> None:
        """Show a validation loss."""
        if not step:
            self.validation_s = self.clock() - self.opened
        self.say(f"step {step}/{self.job.settings.steps}  validation loss {loss:.4f}")


def epochs(steps: int, epoch: float) -> str:
    """Return how often the steps of a run see each example."""
    seen = f"{steps / epoch:.3g}"
    return f"{seen} epoch{'' if seen == '1' else 's'} of {four(epoch)} step{'' if epoch == 1 else 's'}"


def summary(result: RunResult, job: Job) -> list[str]:
    """Show the results of a run, its folder, and what may follow."""
    s, lines = result.summary, []
    if result.stopped_by:
        lines.append(f"stopped after {s['steps']} steps")
    val = [v for _, v in sorted((int(k), v) for k, v in s["val_loss"].items())]
    if val:
        bits = s.get("val_bits_per_byte")
        lines.append(f"validation loss {val[0]:.4f} -> {val[-1]:.4f}" + (f", {bits:.4f} bits per byte" if bits else ""))
        if job.settings.keep_best and s["best_step"] is not None:
            lines.append(f"lowest {s['val_loss'][str(s['best_step'])]:.4f}, after step {s['best_step']}")
    if s["steps"]:
        also = f", median {four(s['step_ms_median'])}" if apart(s["step_ms_quiet"], s["step_ms_median"]) else ""
        rate = result.profile.tokens_per_s if result.profile else s["tokens_per_s"]
        lines.append(
            f"{rate:,.0f} tokens/s, {four(s['step_ms_quiet'])} ms a step (lower quartile{also}); "
            f"peak memory {gb(s['peak_rss_bytes'])}, planned {gb(s['planned_peak_bytes'])}"
        )
    if s["weights"]:
        lines.append(f"{'adapter' if job.adapter else 'weights'} {s['weights']}")
    return [*lines, f"run folder {result.path}", *next_steps(result, job)]


def next_steps(result: RunResult, job: Job) -> list[str]:
    """List the commands that may follow a run: its profile, its text, more steps."""
    path, own = shlex.quote(str(result.path)), [*job.config.files]
    model = f" --model {shlex.quote(str(job.settings.model))}" if own else ""
    kernels = "".join(f" --kernels {shlex.quote(str(file))}" for file in job.settings.kernels)
    root = "" if result.path.parent == Path("runs") else f" --runs {shlex.quote(str(result.path.parent))}"
    found = [(f"cpuopt runs show {shlex.quote(result.path.name)}{root}", "the time of each op and layer")]
    if result.checkpoint and not result.diagnosis:
        steps = "" if result.stopped_by else f" --steps {2 * result.summary['steps']}"
        if saved := result.summary["weights"]:
            steps += f" --save {shlex.quote(str(free(Path(saved))))}"
        found.append((f"cpuopt train --resume {path}{model}{kernels}{steps}", "more steps"))
    weights = result.path if result.checkpoint else result.summary["weights"]
    if weights and not isinstance(job.corpus, Given) and not result.diagnosis:
        where = shlex.quote(str(weights))
        if job.adapter and not result.checkpoint:
            where = f"{shlex.quote(str(job.settings.init or 'BASE'))} --adapter {where}"
        chat = " --chat" if isinstance(job.corpus, Chats) else ""
        found.append((f"cpuopt generate --init {where}{model}{chat}", "text from its weights"))
    elif not weights and result.summary["steps"]:
        found.append(("cpuopt train --save-every N ...", "keeps weights, to go on and to generate text"))
    wide = max(len(command) for command, _ in found)
    return [f"{'next:' if i == 0 else '':<6}{c:<{wide}}  {what}" for i, (c, what) in enumerate(found)]


def program(program: Program, kernels: Sequence[Kernel], plan: ArenaPlan, phases: Sequence[Phase]) -> list[str]:
    """Show a program, each call with its variant and where in the arena it writes, and the memory plan."""
    variant = dict(zip(program.calls, (k.variant for k in kernels), strict=True))

    def note(call: Call) -> str:
        return f" [{variant[call]}] -> {', '.join(f'{v} @{plan.offsets[v]}' for v in call.writes)}"

    groups = [f"#   {name:<12} {n:>15,}" for name, n in plan.describe().items()]
    again = f" and {n / 1e9:.3f} again in the backward" if (n := program.repeated_flops) else ""
    last = f"# {program.flops / 1e9:.3f} GFLOP a step{again}; bytes by group:"
    return [*program.lines(*phases, note=note), last, *groups]


def forecast(f: Forecast, now: datetime) -> list[RenderableType]:
    """Show what a run takes, until when, and what would take less memory."""
    parts = ", ".join(f"{k} {gb(v)}" for k, v in f.memory.items() if k not in ("arena", "shared"))
    data_ask = f", with the {f.of_work:.0f} % of the FLOPs that its data ask for" if f.of_work < 99.5 else ""
    step = f"{four(f.roof_ms)} ms a step at the roofs of this machine{data_ask}" if f.roof_ms else ""
    if f.step_ms is not None:
        beside = [f"mean {four(f.mean_ms)} ms"] if f.mean_ms and apart(f.step_ms, f.mean_ms) else []
        beside += [f"{four(f.roof_ms)} ms at the roofs{data_ask}"] if f.roof_ms else []
        step = f"{four(f.step_ms)} ms a step, measured" + (f" ({', '.join(beside)})" if beside else "")
    shares = ("before the first step", f.start_s), ("validations", f.validation_s), ("saving", f.saving_s)
    shown = [f"{duration(seconds)} {what}" for what, seconds in shares if seconds >= 1]
    of_it = f", of it {', '.join(shown)}" if shown else ""
    end = now + timedelta(seconds=f.seconds)
    data = f"{f.data}; {epochs(f.steps, f.epoch_steps)}" if f.epoch_steps else f.data
    peak = "" if f.peak is None else f"; expected peak of the process {gb(f.peak)}"
    lines: list[RenderableType] = [
        *([data] if data else []),
        f"memory: {gb(f.arena)} of {gb(f.available)} available: {parts}; shared {gb(-f.memory['shared'])}{peak}",
        f"time: {f.steps:,} steps of {f.tokens:,} tokens, {step}",
        f"total: {duration(f.seconds)}{of_it}; started now, it ends {end:%Y-%m-%d %H:%M}",
    ]
    if not f.options:
        return lines
    options = table("with", ">memory", *[">ms a step at the roofs"] * bool(f.roof_ms))
    for o in f.options:
        options.add_row(o.flags, gb(o.arena), *[four(o.roof_ms)] if o.roof_ms else [])
    return [*lines, "less memory:", options]


def kernels_table(rows: Sequence[Mapping[str, str]]) -> list[RenderableType]:
    """Show ops and their variants."""
    shown = table("op", "variants")
    for op in dict.fromkeys(r["op"] for r in rows):
        shown.add_row(op, ", ".join(r["variant"] for r in rows if r["op"] == op))
    return [shown]


def ranks_table(places: Sequence[Sequence[Any]], threads: Sequence[int]) -> list[RenderableType]:
    """Show the host, cores and threads of each rank.

    Parameters
    ----------
    places : a rank's host, followed by its cores.
    threads : of each rank.
    """
    shown = table(">rank", "host", "cores", ">threads")
    for rank, ((host, *cores), n) in enumerate(zip(places, threads, strict=True)):
        shown.add_row(str(rank), host, named(cores).partition(" ")[2], str(n))
    return [shown]


def stream(text: str) -> None:
    """Print a piece of a generated text at once; on a terminal, without control characters."""
    print(plain(text) if OUT.is_terminal else text, end="", flush=True)


def generation(figures: Mapping[str, Any]) -> None:
    """Show on stderr the speed of a generated text, and why it ended."""
    f = figures
    parts = [f"{count(f['tokens'], 'token')} after {f['prompt_tokens']} ({f['stopped']})"]
    if f["first_token_ms"] is not None:
        parts.append(f"the first after {four(f['first_token_ms'])} ms")
    if f["tokens_per_s"]:
        parts.append(f"then {f['tokens_per_s']:.1f} tokens/s")
    put(ERR, ", ".join(parts))
    if f["stopped"] == "context full":
        put(ERR, f"the context of {f['context']} tokens is full, so the text ends here; to go on, prompt with its end")
    if share := f["share_of_roof"]:
        part = f"{100 * share:.0f}% of what memory allows" if share < 1.1 else "more than memory gave when measured"
        put(
            ERR,
            f"{gb(f['weight_bytes'])} of weights a token, which {count(f['threads'], 'thread')} read at "
            f"{f['read_bytes_per_s'] / 1e9:.1f} GB/s: {part}",
        )


def datasets_table(rows: Sequence[DatasetStatus]) -> list[RenderableType]:
    """Show datasets, and the commands that prepare the missing ones."""
    shown = table("name", "tokenizer", ">size", "what", "to prepare")
    for d in rows:
        size = gb(d.nbytes) if d.nbytes else ""
        shown.add_row(d.name, d.tokenizer, size, d.what, "" if d.prepared else d.command)
    return [shown]


def examples(description: str, found: Sequence[Mapping[str, Any]], packed: bool = False) -> list[Text]:
    """Show examples as a model sees them, with what counts in brackets; and if packed, their rows."""
    lines = [Text(description), Text("The model learns to write what stands in [[ ]].")]
    for e in found:
        cut = f", {e['cut']} more are cut" if e["cut"] else ""
        place = f"row {e['row']}, from token {e['start']}: " if packed else ""
        head = (
            f"\n{place}{e['where']} ({e['split']}): {count(len(e['ids']), 'token')}, {e['targets']} of which count{cut}"
        )
        lines += [Text(head, style="bold"), Text()]
        for counts, text in e["runs"]:
            lines[-1].append(f"[[{text}]]" if counts else text, style="green" if counts else "")
    return lines

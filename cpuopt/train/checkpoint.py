"""Checkpoints: the full state of a run, which continues from it bit for bit.

``RUN/checkpoints/step-00001200/`` holds ``params.safetensors``, a file for each state of the optimizer
(``adam_m.safetensors`` and ``adam_v.safetensors`` for AdamW), ``state.json`` and, written last, ``manifest.json`` with
the size and the CRC-32 of each. Where every rank keeps a part of the states, each writes a file of its own for them,
``adam_m-2-of-4.safetensors``, in which ``wte.weight/0-8192`` are the first 8,192 elements of a parameter's state; any
number of ranks reads them. The directory is written under another name and renamed when the disk has all of it, and
only then are older ones removed. Parameters that the run leaves as they are have their hash in ``state.json`` alone
(`frozen`). So whenever the machine stops, the newest directory of that name is whole, or it fails
its check and the one before it is used.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import isfinite, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from .. import weights
from ..comm.agree import Agreement
from ..data.tokenizers import KINDS, TOKENIZERS
from ..errors import UserError
from ..files import Content, remove, temporary, whole_directory, write_synced
from ..files.reading import misfit, open_file, read_json
from ..models import FIRST, Config, from_json
from ..ops import OPTIMIZERS, USUAL
from ..ops.declaration import Shape
from ..weights import NO_MARKS, Marks, Weights
from ..weights.tensors import Array, TensorFile, all_below, file_parts, stored_as
from . import record
from .frozen import Read, compared, drawn

if TYPE_CHECKING:  # numba comes with it
    from ..engine import Engine

FOLDER = "checkpoints"
NAME = re.compile(r"step-(\d{8})")
PARAMS, STATE, MANIFEST = "params.safetensors", "state.json", "manifest.json"
TENSORS = {o.name: (PARAMS, *(f"{o.files}_{s.name}.safetensors" for s in o.states)) for o in OPTIMIZERS.values()}
"""The files of tensors, by the run's optimizer."""
LOCAL = "outer_velocity.safetensors"
"""Of runs of an earlier version with local steps, which cannot be resumed; their weights are read."""
CHUNK = 4 << 20


class Windows(TypedDict):
    """The last values that the guard watches."""

    loss: list[float]
    grad_norm: list[float]


class GuardState(TypedDict):
    """The result of `guard.Guard.state`."""

    skipped: int
    recent: list[bool]
    windows: Windows


class SavedState(TypedDict):
    """The required content of ``state.json``; later versions may add to it."""

    step: int
    updates: int
    model: str
    sizes: dict[str, Any]
    settings: dict[str, Any]
    corpus: str
    val: dict[str, float | None]
    guard: GuardState


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files agree with its manifest.

    Attributes
    ----------
    state : the content of ``state.json``.
    passed_over : the errors in newer ones.
    """

    path: Path
    state: dict[str, Any]
    passed_over: tuple[str, ...] = ()

    @property
    def config(self) -> Config:
        """The model's config; a checkpoint of an earlier version names no model and has `FIRST`."""
        return from_json(self.state["sizes"], self.state.get("architecture", FIRST))

    @property
    def run(self) -> Path:
        """The folder of its run."""
        return self.path.parent.parent

    @property
    def tokenizer(self) -> str | None:
        """The run's tokenizer: its name, or the path of its file in the run's folder; None if it is not recorded."""
        name = self.state.get("tokenizer")
        if name not in (None, *TOKENIZERS, *KINDS):
            raise UserError(f"{str(self.path / STATE)!r} has the tokenizer {repr(name)[:60]}: it is damaged")
        return str(self.run / name) if name in KINDS else name

    @property
    def frozen(self) -> dict[str, str]:
        """The hashes of the parameters that the run leaves as they are, by name."""
        found = self.state.get("frozen", {})
        if not isinstance(found, dict) or not all(isinstance(x, str) for x in found.values()):
            raise UserError(f"{str(self.path / STATE)!r} has the frozen parameters {str(found)[:60]}: it is damaged")
        return found

    def initial(self, config: Config, settings: Mapping[str, Any], *through: Path) -> Read:
        """Return a function that reads a frozen parameter from where the run has it, and compares its hash.

        Parameters
        ----------
        settings : those of the run, of which ``init`` and ``seed`` say where that is.
        through : the runs on the way here, for `open_weights`.
        """
        init, seed = settings.get("init"), settings.get("seed", 0)
        read = drawn(config, seed) if init is None else open_weights(Path(init), *through).read
        source = f"the model that seed {seed} draws" if init is None else f"--init {init}"
        return compared(read, self.frozen, repr(str(self.run)), source)

    @property
    def adapter(self) -> weights.Adapter | None:
        """The adapters that the run trains, if it trains any."""
        if (lora := self.state["settings"].get("lora")) is None:
            return None
        from ..nn.lora import Lora, adapted_layers  # late: numba comes with it

        kept = TensorFile(self.path / PARAMS)
        layers = tuple(adapted_layers(kept.tensors))
        return weights.Adapter(self.run, Lora.parse(lora), layers, kept.read, self.state["settings"].get("init"))

    @property
    def marks(self) -> Marks:
        """The ids that begin and end a text; a checkpoint of an earlier version has none."""
        return Marks(**(m | {"eos": tuple(m["eos"])})) if (m := self.state.get("marks")) else NO_MARKS


SHARD = re.compile(r"(?P<state>\w+)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors")
"""A rank's file of a state; numbers count from 1."""
PART = re.compile(r"(?P<name>.+)/(?P<lo>\d{1,15})-(?P<hi>\d{1,15})")
"""The elements of a parameter's state in such a file."""


def shard(file: str, number: int, count: int) -> str:
    """Return the name of a rank's file of a state."""
    return file if count == 1 else f"{file.removesuffix('.safetensors')}-{number}-of-{count}.safetensors"


def complete(files: Iterable[str]) -> set[str]:
    """Return the files of tensors that some files make up: of one in parts, all parts must be there."""
    found, parts = set[str](), dict[tuple[str, int], set[int]]()
    for name in files:
        if part := SHARD.fullmatch(name):
            parts.setdefault((part["state"], int(part["count"])), set()).add(int(part["number"]))
        else:
            found.add(name)
    for (state, count), numbers in parts.items():
        found |= (
            {f"{state}.safetensors"} if numbers == {*range(1, count + 1)} else {shard(state, n, count) for n in numbers}
        )
    return found


def written_by(engine: Engine) -> dict[str, dict[str, Array]]:
    """Return the arrays of each file of tensors that this rank writes, by name."""
    comm, found = engine.comm, dict[str, dict[str, Array]]()
    if not comm.rank:
        arrays = engine.parameters()
        found[PARAMS] = {p.name: arrays[p.name] for p in engine.program.trained}
    parts = {p.name: part for p, part in engine.program.owned.items()}
    ranks = comm.size if engine.divided else 1
    for state, arrays in engine.states().items() if engine.divided or not comm.rank else ():
        named = {f"{n}/{parts[n][0]}-{parts[n][1]}" if n in parts else n: x for n, x in arrays.items()}
        found[shard(f"{state}.safetensors", comm.rank + 1, ranks)] = named
    return found


def save(run: Path, engine: Engine, state: Mapping[str, Any], keep: int) -> Path:
    """Write a checkpoint, each rank its files; then remove all but the newest `keep`, and the best of ``keep_best``.

    Raises
    ------
    UserError
        If it cannot be written, on all ranks; earlier checkpoints stay. If a parameter is not finite, since such
        a checkpoint would only hide a good one.
    """
    comm = engine.comm
    if engine.torn:
        raise UserError("the last step ended within its update, so the weights are of no step")
    engine.collect()
    for name, p in engine.parameters().items():
        if not all_below(p):
            raise UserError(f"parameter {name} is not finite, so there is no use in a checkpoint")
    folder = run / FOLDER
    path = folder / f"step-{state['step']:08d}"
    with ExitStack() as stack:
        with Agreement(comm), plain_errors():
            part = None if comm.rank else stack.enter_context(whole_directory(path))
        part = Path(comm.everyone(part and str(part))[0])
        written: dict[str, dict[str, int]] = {}
        with Agreement(comm), plain_errors():
            for file, tensors in written_by(engine).items():
                shapes = {name: x.shape for name, x in tensors.items()}
                written[file] = _write(part / file, file_parts(shapes, tensors.__getitem__, stored_as(tensors)))
        files = {name: said for rank in comm.everyone(written) for name, said in rank.items()}
        with Agreement(comm), plain_errors():
            if not comm.rank:
                files[STATE] = _write(part / STATE, iter([json.dumps(state, indent=2, allow_nan=False).encode()]))
                manifest = {"step": state["step"], "files": files}
                write_synced(part / MANIFEST, [json.dumps(manifest, indent=2).encode()])
                stack.close()
                ours = [p for p in _steps(folder) if p.name <= path.name]  # a later one is damaged, or of another run
                best = best_step(state["val"]) if state.get("settings", {}).get("keep_best") else None
                for old in ours[keep:]:
                    if old.name != f"step-{best or 0:08d}":
                        discard(old)
    return path


def best_step(val: Mapping[str, float | None]) -> int | None:
    """Return the first step of the lowest validation loss, by the steps before each; None if there is none.

    The loss before all steps is not looked at, nor one that is not finite.
    """
    known = {int(step): loss for step, loss in val.items() if int(step) and loss is not None and isfinite(loss)}
    return min(known, key=lambda step: (known[step], step)) if known else None


@contextmanager
def plain_errors() -> Iterator[None]:
    """Raise an error of the system as a `UserError` with its reason."""
    try:
        yield
    except OSError as e:
        raise UserError(e.strerror or str(e)) from e


def _write(path: Path, parts: Iterator[Content]) -> dict[str, int]:
    """Write a file; return its size and checksum."""
    seen = {"size": 0, "crc32": 0}

    def counted() -> Iterator[Content]:
        for part in parts:
            seen["size"] += memoryview(part).nbytes
            seen["crc32"] = zlib.crc32(part, seen["crc32"])
            yield part

    write_synced(path, counted())
    return seen


def discard(path: Path) -> bool:
    """Remove a directory, renamed first to no checkpoint's name; return whether it is gone."""
    if not path.name.startswith(".tmp-"):
        os.rename(path, path := temporary(path))
    return remove(path)


def clean(run: Path) -> list[str]:
    """Remove the leftovers of interrupted saves; return their names. This process must own the run."""
    left = sorted((run / FOLDER).glob(".tmp-*")) if (run / FOLDER).is_dir() else []
    return [path.name for path in left if discard(path)]


def _steps(folder: Path) -> list[Path]:
    """List the directories that have a checkpoint's name, the newest first."""
    try:
        return sorted((p for p in folder.iterdir() if NAME.fullmatch(p.name) and p.is_dir()), reverse=True)
    except FileNotFoundError:
        return []


def verify(path: Path) -> Checkpoint:
    """Read every byte of a checkpoint and compare it with the manifest.

    Raises
    ------
    UserError
        Naming the file that differs.
    """
    try:
        manifest = read_json(path / MANIFEST)
        files = manifest["files"]
        there = complete(files)
        optimizer = next((o for o, tensors in TENSORS.items() if there - {LOCAL} == {*tensors, STATE}), None)
        if optimizer is None:
            usual = ", ".join((*TENSORS[USUAL], STATE))
            raise UserError(
                f"{str(path / MANIFEST)!r} lists {', '.join(files)}; expected {usual}, or another optimizer's"
            )
        for name, said in files.items():
            size, crc = _checksum(path / name)
            if (size, crc) != (said["size"], said["crc32"]):
                what = f"has {size} bytes" if size != said["size"] else f"has the checksum {crc:08x}"
                want = f"{said['size']} bytes" if size != said["size"] else f"{said['crc32']:08x}"
                raise UserError(f"{str(path / name)!r} {what}; its manifest says {want}: it is damaged")
        state = read_json(path / STATE)
        if not state["step"] == manifest["step"] == int(path.name.removeprefix("step-")):
            raise UserError(f"{str(path)!r} has the state of step {state['step']}: it is damaged")
        if (there := state["settings"].get("optimizer", USUAL)) != optimizer:
            raise UserError(f"{str(path)!r} has the settings of {there} and the states of {optimizer}: it is damaged")
        if wrong := misfit(state, SavedState):
            raise ValueError(wrong)
        found = Checkpoint(path, state)
        _ = found.config, found.tokenizer, found.marks, found.frozen, [int(step) for step in state["val"]]
        return found
    except OSError as e:
        raise UserError(f"{str(path)!r}: {e.strerror or e}: {Path(e.filename or path).name}") from e
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise UserError(f"{str(path / MANIFEST)!r} or {STATE!r} is not as cpuopt writes it ({e}): it is damaged") from e


def _checksum(path: Path) -> tuple[int, int]:
    size = crc = 0
    with open_file(path) as file:
        while part := file.read(CHUNK):
            size, crc = size + len(part), zlib.crc32(part, crc)
    return size, crc


def newest(run: Path) -> Checkpoint:
    """Find the newest checkpoint of a run that is whole; one that was copied from another run is passed over.

    Raises
    ------
    UserError
        If there is none, with the error of each.
    """
    wrong: list[str] = []
    a_run = (run / "machine.json").exists()
    for path in _steps(run / FOLDER):
        try:
            found = verify(path)
            if a_run and (its := found.state.get("run_id")) != (ours := record.origin_of(run).id):
                raise UserError(
                    f"{str(path)!r} is of another run: it has the id {its}, and {str(run)!r} has {ours}; "
                    "move it to the run that it belongs to"
                )
        except UserError as e:
            wrong.append(str(e))
        else:
            return Checkpoint(path, found.state, tuple(wrong))
    raise UserError(f"{str(run)!r} has no checkpoint to go on from{': ' + '; '.join(wrong) if wrong else ''}")


def chosen(run: Path) -> Checkpoint:
    """Find the checkpoint whose weights are a run's result: the best with ``keep_best``, else the newest that is whole.

    Raises
    ------
    UserError
        As of `newest`, and if the best is damaged.
    """
    found = newest(run)
    best = best_step(found.state["val"]) if found.state["settings"].get("keep_best") else None
    path = run / FOLDER / f"step-{best or 0:08d}"
    return verify(path) if path.is_dir() and path != found.path else found


def open_weights(path: Path, *through: Path) -> Weights:
    """Check weights of any kind: those of a run's checkpoint (`chosen`), or files that `cpuopt.weights` reads.

    Parameters
    ----------
    through : the runs whose frozen parameters lie there.

    Raises
    ------
    UserError
        If there are none, or they are damaged.
    """
    if not (path / FOLDER).is_dir():
        if (path / "metrics.jsonl").is_file():
            raise UserError(
                f"the run {str(path)!r} has kept no weights; train with --save-every N for checkpoints, or --save PATH"
            )
        return weights.open_weights(path)
    found = chosen(path)
    kept = TensorFile(found.path / PARAMS).read
    initial: Read = kept
    if found.frozen:
        if path.resolve() in through:
            raise UserError(f"the run {str(path)!r} has its frozen parameters from itself: it is damaged")
        initial = found.initial(found.config, found.state["settings"], path.resolve(), *through)

    def now(name: str) -> Array:
        return initial(name) if name in found.frozen else kept(name)

    read = found.adapter.merged(now) if found.adapter else now
    T = found.state["settings"].get("T")
    trained = {"trained_length": T if type(T) is int and T > 0 else None, "trained_on": found.state["corpus"]}
    return Weights(found.path, found.config, "f32", read, found.tokenizer, marks=found.marks, **trained)


def find_run(root: Path, name: str) -> Path:
    """Find a run's folder: by its path, by its name in `root`, or, for ``""``, the newest that has a checkpoint.

    Raises
    ------
    UserError
        If there is none.
    """
    if name:
        for path in (Path(name), root / name):
            if (path / FOLDER).is_dir():
                return path
        if found := next((p for p in (Path(name), root / name) if p.is_dir()), None):
            raise UserError(
                f"--resume {name}: the run {str(found)!r} has kept no checkpoint; train with --save-every N for some"
            )
        raise UserError(f"--resume {name}: there is no run {str(root / name)!r}; list the runs with cpuopt runs list")
    runs = [p for p in record.runs_of(root) if (p / FOLDER).is_dir()]
    if not runs:
        raise UserError(f"--resume: no run in {str(root)!r} has a checkpoint; name one, or another --runs")
    return runs[-1]


def load(checkpoint: Checkpoint, engine: Engine) -> None:
    """Fill the trained parameters and the optimizers' states; of the states, those that this rank keeps.

    Raises
    ------
    UserError
        If the tensors are not those of this engine; nothing is filled then.
    """
    program = engine.program
    shapes: dict[str, dict[str, Shape]] = {PARAMS: {p.name: p.shape for p in program.trained}}
    for p, optimizer in program.optimizers.items():
        for of in optimizer.states:
            shapes.setdefault(f"{optimizer.files}_{of.name}.safetensors", {})[p.name] = p.shape
    stored = {file: Stored(checkpoint.path, file, want) for file, want in shapes.items()}
    spans = {p.name: span for p, span in program.owned.items()}
    parameters = engine.parameters()
    for p in program.trained:
        stored[PARAMS].read(p.name, parameters[p.name])
    for state, arrays in engine.states().items():
        for name, x in arrays.items():
            stored[f"{state}.safetensors"].read(name, x, spans.get(name, (0, x.size))[0])


class Stored:
    """The tensors of one kind in a checkpoint, whole or in the parts that ranks have written.

    Parameters
    ----------
    path : the checkpoint.
    file : the name of the file that holds all of them, or whose parts do.
    shapes : the shapes that they must have, by name.

    Raises
    ------
    UserError
        If they have others, or a part is missing.
    """

    def __init__(self, path: Path, file: str, shapes: Mapping[str, Shape]) -> None:
        paths = [path / file] if (path / file).exists() else sorted(path.glob(shard(file, 1, 2).replace("1-of-2", "*")))
        self.parts: dict[str, list[tuple[int, int, TensorFile, str]]] = {}
        """Of each tensor, the pieces in order: first element, end, file and name in it."""
        for of in map(TensorFile, paths or [path / file]):
            for key, tensor in of.tensors.items():
                part = PART.fullmatch(key)
                name = part["name"] if part else key
                lo, hi = (int(part["lo"]), int(part["hi"])) if part else (0, prod(tensor.shape))
                if name not in shapes or tensor.shape != ((hi - lo,) if part else shapes[name]):
                    raise of.wrong("does not have the tensors of this model")
                self.parts.setdefault(name, []).append((lo, hi, of, key))
        for name, shape in shapes.items():
            pieces = self.parts[name] = sorted(self.parts.get(name, []), key=lambda piece: piece[:2])
            ends = [0, *(piece[1] for piece in pieces)]
            if [piece[0] for piece in pieces] != ends[:-1] or ends[-1] != prod(shape):
                raise UserError(f"{str(path / file)!r} has not all of {name}: it is damaged")

    def read(self, name: str, x: Array, start: int = 0) -> None:
        """Fill an array with the elements of a tensor from `start` on."""
        flat = x.reshape(-1)
        for lo, hi, file, key in self.parts[name]:
            a, b = max(lo, start), min(hi, start + x.size)
            if a < b:
                flat[a - start : b - start] = file.read(key).reshape(-1)[a - lo : b - lo]

"""The engine of scripts and notebooks: the core's, with the command line's defaults, measurements, and weight files."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from functools import cached_property, partial
from inspect import signature
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from .. import building, nn, ops
from .. import engine as core
from ..building import BuildOptions, Built
from ..check.cases import Case, calls_alike
from ..check.gate import require_quick, require_right
from ..check.result import Result
from ..errors import UserError
from ..files import write_whole
from ..files.reading import to_json
from ..generate.decoder import Sampler, generate
from ..generate.uncached import Uncached, text_program
from ..kernels import registry
from ..kernels.registry import Choice
from ..kernels.toolkit import threads as numba_threads
from ..lab import ab
from ..measure import rates
from ..measure.comparison import analyses_up_to, summed
from ..measure.lines import LINES_S, MOST_STEPS
from ..measure.quartile import ENOUGH_S, MOST
from ..models.config import Config
from ..models.own import rows_of
from ..ops.declaration import Shape, Spec
from ..ops.dequantize import numbers
from ..ops.storage import WIDE
from ..profiler import profile
from ..program.fuse import chosen as rewrites
from ..program.optimizer import Choice as OptimizerChoice
from ..program.precision import NARROW
from ..program.program import Call
from ..weights.tensors import TensorFile, file_parts, stored_as
from ..wording import nearest
from .results import ComparisonReport, ProfileReport, require_trained

Array = building.Array
NEEDED = "gradients=True"


class ModuleConfig(Config):
    """A module as a language model: its context is a row of the engine's inputs.

    Parameters
    ----------
    inputs : shape and dtype of each input of the engine, the rows of the batch on the first axis.
    """

    model = "module"

    def __init__(self, module: nn.Module, inputs: Mapping[str, Spec]) -> None:
        self._module = module
        self._inputs = {
            n: ((1, *shape[1:]) if len(shape) > 1 else shape, dtype) for n, (shape, dtype) in inputs.items()
        }

    @property
    def title(self) -> str:
        """The name of the module's class."""
        return type(self._module).__name__

    @cached_property
    def block_size(self) -> int:
        """The tokens of a row."""
        shapes = (shape for shape, dtype in self._inputs.values() if dtype == "int32")
        return max((shape[-1] for shape in shapes if shape), default=1)

    @cached_property
    def vocab_size(self) -> int:
        """The ids that the module takes."""
        return text_program(self, self.block_size).program.inputs[0].below or 1

    def sized(self, B: int, T: int) -> tuple[nn.Module, dict[str, tuple[Shape, str]]]:
        """Return the module and its inputs, for one row."""
        return self._module, dict(self._inputs)


def chosen(variant: str | Choice, swap: Sequence[str]) -> Choice:
    """Return the rules of a variant's name, or a choice as it is."""
    if isinstance(variant, Choice):
        if swap:
            raise UserError("swap: give the rules to the Choice, or a variant's name with swap")
        return variant
    return Choice(variant, swap)


def known(maker: Callable[..., Any], names: Iterable[str], also: Callable[..., Any]) -> None:
    """Refuse a keyword that neither of two callables takes."""
    every = {n for f in (maker, also) for n, p in signature(f).parameters.items() if p.kind is p.KEYWORD_ONLY}
    every = every - {"rewrite"} | {f.name for f in fields(BuildOptions)} - {"choice"}
    for name in names:
        if name not in every:
            raise UserError(f"{maker.__name__}({name}=...): no such keyword; {nearest(name, sorted(every))}")


def build(
    model: nn.Module,
    inputs: Mapping[str, Spec],
    *,
    variant: str | Choice = registry.DEFAULT,
    swap: Sequence[str] = (),
    fuse: str | Sequence[str] = "auto",
    gradients: bool = False,
    **more: Any,
) -> Built:
    """Trace a model, generate its backward and its update, rewrite, and choose a kernel for each call.

    Nothing is compiled or allocated. ``model``, ``inputs``, ``variant``, ``swap``, ``fuse``, ``gradients``, ``more``
    and the errors are those of `Engine`.

    Returns
    -------
    ``program``, ``kernels`` (one for each call) and ``notes``; ``plan()`` plans the memory.

    Examples
    --------
    >>> from cpuopt import build, models
    >>> config, model = models.load("llama-tiny")
    >>> built = build(model, config.specs(2, 8), swap=["silu=vanilla"])
    >>> sorted({kernel.variant for kernel in built.kernels})
    ['optimized', 'vanilla']
    """
    known(build, more, building.build)
    choice = chosen(variant, swap)
    return building.build(model, inputs, choice=choice, fuse=rewrites(fuse, choice.variant, NEEDED * gradients), **more)


class Engine(core.Engine):
    """A model ready to train, with the kernels and rewrites that the command line uses.

    One thread at a time may use it; a call of another is refused. A Ctrl-C while a step updates the weights takes
    effect when the update is complete.

    Parameters
    ----------
    model : its ``forward`` takes the inputs by name and returns the loss, alone or first in a tuple.
    inputs : shape and dtype of each input, by name: ``{"x": ((512, 2), "float32")}``.
    variant : the variant of every op that has it, as ``cpuopt kernels`` lists them, or a `Choice` with its rules.
    swap : rules ``OP[@LAYER]=VARIANT``, of which the last that matches wins.
    fuse : rewrites, as of ``--fuse``: ``"auto"``, ``"all"``, ``"none"``, or names. ``"auto"`` is all with
        ``optimized``, and none with other variants.
    gradients : whether all gradients are kept until the update, for ``clip``, ``accept`` and `gradients`. Without it,
        many weights are updated while their gradient is made, which is faster.
    threads : the number for all kernels; numba's own by default.
    seed : the random seed of the initial weights and of dropout. A parameter's weights depend on the seed and its name
        alone. None leaves zeros, to be filled through `parameters`.
    train : whether to generate backward and update.
    optimizer : the name of one in ``cpuopt.ops.OPTIMIZERS``; or names by patterns of parameters, of which the last that
        matches wins, as in ``{"*": "adamw", "*.bias": "sgd"}``.
    freeze : patterns of parameters that steps leave as they are, as in ``["wte.*"]``; they have no gradient and no
        states. ``nn.Parameter(..., trained=False)`` says the same in the model.
    micro_batches : how many `step` is given: one by its inputs, the others as ``more``.
    more : ``processes``, how many compile what the cache lacks, one a core by default; ``progress``, called with
        (compiled, to compile, kernel), by default a line on stderr, live on a terminal; ``reduce``, ``zero`` and
        ``comm`` of several micro-batches or ranks, as in `cpuopt.building.BuildOptions`; ``dtype="bfloat16"`` to store
        in it what products, attention and activations read, ``dtype="int8"`` for products in int8 as well, and
        ``moments`` and ``weights`` to store those in bfloat16 too; ``base="int8"`` for frozen weights of blocks, or
        ``base="w8a8"`` to multiply them as int8; ``recompute="all"``, or a number of blocks, to compute them again in
        the backward instead of keeping what is inside them.

    Raises
    ------
    UserError
        For a model that cannot be traced, a rule that matches nothing, or too little memory.

    Examples
    --------
    >>> import numpy as np
    >>> from cpuopt import Engine, functional as F, nn
    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         self.fc, self.out, self.loss = nn.Linear(2, 8), nn.Linear(8, 2), nn.CrossEntropyLoss()
    ...     def forward(self, x, y):
    ...         return self.loss(self.out(F.gelu(self.fc(x))), y)
    >>> engine = Engine(Net(), {"x": ((4, 2), "float32"), "y": ((4,), "int32")}, threads=1)
    >>> y = np.array([0, 1, 0, 1])
    >>> x = np.stack([y, 1 - y], axis=1)
    >>> first, *_, last = [engine.step(x=x, y=y, lr=0.05).loss for _ in range(20)]
    >>> bool(last < 0.5 * first)
    True
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Mapping[str, Spec],
        *,
        variant: str | Choice = registry.DEFAULT,
        swap: Sequence[str] = (),
        fuse: str | Sequence[str] = "auto",
        gradients: bool = False,
        threads: int | None = None,
        seed: int | None = 0,
        train: bool = True,
        micro_batches: int = 1,
        optimizer: OptimizerChoice = ops.USUAL,
        freeze: Sequence[str] = (),
        **more: Any,
    ) -> None:
        known(Engine, more, core.Engine)
        if isinstance(model, type):
            raise UserError(
                f"Engine: the model is the class {model.__name__}; expected a module: {model.__name__}(...)"
            )
        if not isinstance(model, nn.Module):
            raise UserError(f"Engine: the model is a {type(model).__name__}; expected an nn.Module")
        if not isinstance(inputs, Mapping):
            raise UserError(f"inputs {inputs!r}: expected them by name, as in {{'x': ((512, 2), 'float32')}}")
        for name, spec in inputs.items():
            if not (isinstance(spec, tuple | list) and len(spec) == 2 and isinstance(spec[0], tuple | list)):
                raise UserError(f"input {name!r} is {spec}; expected shape and dtype, as in ((512, 2), 'float32')")
            if not all(isinstance(n, int | np.integer) and n > 0 for n in spec[0]):
                raise UserError(f"input {name!r} has shape {spec[0]}; expected whole numbers of 1 or more")
        if not isinstance(micro_batches, int | np.integer) or micro_batches < 1:
            raise UserError(f"micro_batches {micro_batches!r}: expected 1 or more")
        self.choice = chosen(variant, swap)
        together = micro_batches * getattr(more.get("comm"), "size", 1) > 1
        names = rewrites(fuse, self.choice.variant, NEEDED * gradients or f"micro_batches={micro_batches}" * together)
        built: dict[str, Any] = {"threads": threads, "train": train, "optimizer": optimizer, "freeze": freeze, **more}
        built["micro_batches"] = micro_batches
        self._again = partial(Engine, model, inputs, fuse=names, seed=None, **built)
        super().__init__(model, inputs, choice=self.choice, fuse=names, seed=seed, **built)
        self._inputs = dict(inputs)
        self._reader: Uncached | None = None

    def gradients(self) -> dict[str, Array]:
        """Return the gradient of every parameter that has one, by the parameter's name; valid after ``backward``.

        Raises
        ------
        UserError
            If the engine was built without ``gradients=True``, and some are not kept.
        """
        if not self.two_pass:
            raise UserError(
                "gradients: some weights are updated while their gradient is made, which is not kept; build the engine "
                "with gradients=True"
            )
        return super().gradients()

    @core.exclusive
    def save_weights(self, path: str | Path, overwrite: bool = False) -> None:
        """Write all parameters to a safetensors file, whole or not at all.

        Parameters
        ----------
        overwrite : whether a file that is there may be replaced.

        Raises
        ------
        UserError
            If it cannot be written, or is there already, or a parameter is neither float32 nor bfloat16.
        """
        arrays = self.parameters()
        if other := [name for name, x in arrays.items() if x.dtype.name not in (WIDE, NARROW)]:
            raise UserError(f"save_weights: {other[0]!r} is {arrays[other[0]].dtype}; expected {WIDE} or {NARROW}")
        if Path(path).suffix != ".safetensors":
            raise UserError(f"save_weights {str(path)!r}: expected a name that ends in .safetensors")
        if not overwrite and os.path.lexists(path):
            raise UserError(f"save_weights {str(path)!r}: it is there already; overwrite=True replaces it")
        shapes = {name: x.shape for name, x in arrays.items()}
        write_whole(Path(path), file_parts(shapes, arrays.__getitem__, stored_as(arrays)))

    @core.exclusive
    def load_weights(self, path: str | Path) -> None:
        """Fill all parameters from a safetensors file with the same names and shapes.

        Raises
        ------
        UserError
            If the file cannot be read, or holds other names or shapes; nothing is filled then.
        """
        file, arrays = TensorFile(Path(path)), self.parameters()
        if odd := arrays.keys() ^ file.tensors.keys():
            name = min(odd)
            raise UserError(
                f"load_weights {str(path)!r}: {name!r} is {'missing' if name in arrays else 'no parameter'}"
            )
        for name, x in arrays.items():
            if (there := file.tensors[name].shape) != x.shape:
                raise UserError(f"load_weights {str(path)!r}: {name!r} has the shape {there}; expected {x.shape}")
        read = {name: file.read(name) for name in arrays}
        with self._whole("load_weights"):
            for name, x in arrays.items():
                x[...] = read[name]

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 100,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stops: Container[int] = (),
    ) -> Iterator[int]:
        """Yield the ids that follow a prompt, one after the other, from this engine's weights as they are now.

        The model must compute logits of the next token from one input of ids: it returns ``(loss, logits)``, or a loss
        by ``nn.CrossEntropyLoss``. There is no cache: for each token the whole row is computed, which is as long as the
        engine's rows. The text ends if the row is full.

        Parameters
        ----------
        prompt : ids, at least one.
        max_tokens : the most ids that are generated.
        temperature, top_k, top_p, seed : as the flags of ``cpuopt generate``.
        stops : ids that end the text.

        Raises
        ------
        UserError
            For a model that computes no such logits or is not causal, and for a prompt that is too long or holds an id
            that the model does not take.
        """
        sampler = Sampler(temperature, top_k, top_p, seed)
        if self._reader is None:
            how: dict[str, Any] = {"threads": self.threads, "dtype": self.options.dtype}
            swaps = [*map(str, self.choice.swaps)]
            self._reader = Uncached(
                ModuleConfig(self.model, self._inputs), variant=self.choice.variant, swaps=swaps, **how
            )
        for name, x in self.parameters().items():
            self._reader.parameters()[name][...] = numbers(x)
        self._reader.restart()
        return generate(self._reader, prompt, sampler, max_tokens, stops)

    def profile(
        self,
        *,
        steps: int | None = None,
        warmup: int = 1,
        roofs: bool = True,
        lines: bool | str = False,
        **given: Any,
    ) -> ProfileReport:
        """Measure the time of each op and layer of a training step, after checking every kernel.

        The steps train; parameters and optimizer are then as they were before.

        Parameters
        ----------
        steps, warmup : the steps that are measured, and those before them, which are not. By default as many as take a
            second, 5 to 20.
        roofs : whether to show how far each op is from what the machine allows; the machine is measured once for that.
        lines : whether to sample the lines of source, of all ops or of an op or a family by name; steps then take 5 s.
        given : what `step` takes: inputs, by default those of the last step, and numbers such as ``lr``.

        Raises
        ------
        UserError
            For a kernel that is wrong, or an engine without a backward.
        """
        require_trained(self, "profile")
        enough_s = (LINES_S if lines else ENOUGH_S) if steps is None else inf
        steps = (MOST_STEPS if lines else MOST) if steps is None else steps
        if not all(isinstance(n, int | np.integer) for n in (steps, warmup)) or steps < 1 or warmup < 0:
            raise UserError(f"profile: steps {steps!r}, warmup {warmup!r}; expected 1 or more, and 0 or more")
        checked = self._check()
        machine = rates.roofs(self.threads) if roofs else None
        before = self._state()
        try:
            job = self._repeating(given, steps, checked)
            wanted = "*" if lines is True else lines or None
            found = profile(job, warmup=warmup, roofs=machine, enough_s=enough_s, lines=wanted)
        finally:
            self._restore(before)
        return ProfileReport(found, self)

    def ab(
        self,
        op: str,
        a: str,
        b: str,
        *,
        layer: str = "*",
        in_step: bool = False,
        flush: bool = False,
        rounds: int = 96,
        seed: int = 0,
        **given: Any,
    ) -> ComparisonReport:
        """Compare two kernels of an op, alone on the shapes of this model or in its training steps.

        Both are checked before, during and after. They run in this process, so a kernel that crashes ends it;
        ``cpuopt ab`` uses a process of its own. This engine stays as it is.

        Parameters
        ----------
        op, a, b : the op, as ``cpuopt kernels`` lists it, the baseline variant, and the one that the verdict is about.
        layer : a glob of the layers to compare on.
        in_step : whether to compare in training steps, of an engine of its own with these weights.
        flush : whether other data fill the caches before each call; not with `in_step`.
        rounds : the largest number of rounds, 6 at least.
        seed : the random seed of the arrays and of the order.
        given : with `in_step`, what `step` takes: inputs, by default those of the last step, and numbers such as
            ``lr``.

        Raises
        ------
        UserError
            For an op or variant that does not exist, an op that the model does not call, or a kernel that is wrong.
        """
        if op not in ops.ALL:
            raise UserError(f"ab {op!r}: no such op; {nearest(op, ops.ALL)}")
        if flush and in_step:
            raise UserError("flush with in_step: a step leaves the caches as they are; give one of the two")
        pair = registry.find(op, a), registry.find(op, b)
        analyses, n = analyses_up_to(rounds), building.set_threads(self.threads, pair)
        checks = require_quick(pair, n)
        if in_step:
            found = self._in_step(pair, (a, b), layer, analyses, seed, given)
        else:
            asked: dict[str, Any] = {"flush": flush, "seed": seed, "analyses": analyses, "other": True}
            found = ab.alone(pair, calls_alike(self._calls_of(op, layer)), **asked)
        checks += found["checks"] + require_quick(pair, n)
        B, T = rows_of(self._inputs)
        result = to_json({"B": B, "T": T, "threads": n, **found, "checks": checks})
        asked = {"op": op, "a": a, "b": b, "model": type(self.model).__name__, "layer": layer, "seed": seed}
        how = {"in_step": in_step, "flush": flush}
        return ComparisonReport({**asked, **how, **summed([result]), "results": [result]})

    def _in_step(
        self,
        pair: tuple[registry.Kernel, registry.Kernel],
        names: tuple[str, str],
        layer: str,
        analyses: Sequence[int],
        seed: int,
        given: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Compare in the steps of an engine like this one, whose rewrites keep the op's calls."""
        require_trained(self, "ab in_step")
        rules = [*map(str, self.choice.swaps), f"{pair[0].op.name}{'' if layer == '*' else '@' + layer}={names[1]}"]
        other = self._again(variant=Choice(self.choice.variant, rules, [*map(str, self.choice.plan)]))
        for name, x in self.parameters().items():
            other.parameters()[name][...] = x
        other._check()
        job = other._repeating({**self._last(), **given})
        return ab.of_op(
            ab.InStep(job, [ab.Change(pair, (layer,))], seed=seed), names, seed, analyses, lambda text: None
        )

    def _calls_of(self, op: str, layer: str) -> list[Call]:
        """List the calls of an op in the program; if rewrites replace them, in the program without rewrites."""
        own = self.program.calls
        there = any(c.op.name == op for c in own)
        plain = () if there else building.build(self.model, self._inputs).program.calls
        calls = [c for c in (*own, *plain) if c.op.name == op]
        found = [c for c in calls if fnmatchcase(c.layer, layer)]
        if not found:
            layers = dict.fromkeys(c.layer for c in calls)
            why = nearest(layer, layers) if layers else "it does not call it at all"
            raise UserError(f"{op}: {type(self.model).__name__} does not call it in a layer {layer!r}; {why}")
        return found

    def _last(self) -> dict[str, Array]:
        """Return the inputs of the last step."""
        return {name: self.array(name).copy() for name in self._inputs}

    def _repeating(self, given: Mapping[str, Any], steps: int = 1, checked: Sequence[Any] = ()) -> Repeating:
        B, T = rows_of(self._inputs)
        numba_threads.set_threads(self.threads)
        return Repeating(
            self,
            partial(self.step, **{**self._last(), **given}),
            type(self.model).__name__,
            SimpleNamespace(steps=steps, B=B, T=T, micro_batches=self.micro_batches),
            [r.describe() for r in checked],
        )

    def _check(self) -> list[Result]:
        """Check every kernel, also at the sizes of this program."""
        own = [Case.of(b.call) for b in self.calls if not isinstance(b.call.op, ops.Collective)]
        calls = list(zip(self.kernels, own, strict=True))  # as they were chosen; what is bound may be compiled code
        return require_right(self.kernels, calls, threads=self.threads)

    @core.exclusive
    def _state(self) -> tuple[int, list[Array]]:
        self._collect()
        values = [*self.program.parameters, *self.program.moments]
        return self.step_number, [self.array(v).copy() for v in values]

    def _restore(self, state: tuple[int, list[Array]]) -> None:
        with self._whole("profile"):
            self.step_number, arrays = state
            for v, x in zip([*self.program.parameters, *self.program.moments], arrays, strict=True):
                np.copyto(self.array(v), x)


@dataclass
class Repeating:
    """Steps of an engine on one batch, for what measures the steps of a job."""

    engine: core.Engine
    take: Callable[[], core.Step]
    name: str
    settings: Any
    checked: list[dict[str, Any]]
    done: int = field(default=0)

    def take_step(self, within: Callable[[], AbstractContextManager[object]]) -> core.Step:
        """Train on the batch."""
        with within():
            return self.take()

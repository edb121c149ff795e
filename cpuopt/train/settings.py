"""All settings of a run, one line each: default, help, allowed values, and how the flag shows it.

This table defines the flags of the command line (`flags`), the names in a file of settings (`read`), the checks
(`Settings.check`), the contents of a checkpoint, and the table in docs/training.md.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from math import inf
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from .. import models
from ..errors import UserError, optional
from ..files.reading import from_json, parse_json, read_file
from ..machine import ORDERS
from ..program.tree import MOST_MICRO_BATCHES
from ..wording import guess, nearest
from .schedule import SCHEDULES, misfit

if TYPE_CHECKING:  # numba comes with it
    from ..building import BuildOptions
    from ..comm import Comm

GUARDS = ("auto", "skip", "stop", "off")
"""``skip`` leaves out the update of a bad step; ``stop`` ends the run after one; ``auto`` skips where all gradients are
known before the first update, and else stops."""
DECAYS = ("all", "matrices")
REDUCTIONS = ("exact", "fast")
STORED = {"float32": "float32", "bf16": "bfloat16"}
"""The words of a storage type, and its name in a program."""
DTYPES = STORED | {"int8": "int8"}
"""The words of ``--dtype``, and what each stores of what products and attention read."""
NO_LAYER = "none"
"""The word of ``--bf16-layers`` for none."""
BASES = ("bf16", "int8", "q8_0", "w8a8")
EXAMPLES = ("chat_format", "system", "pack", "truncate", "skip_invalid")
"""The settings of data that are examples."""
Allowed = tuple[Callable[[Any], bool], str]
"""A check of a value, and a description of the values that pass."""
POSITIVE: Allowed = (lambda x: 0 < x < inf, "a positive number")
NOT_NEGATIVE: Allowed = (lambda x: 0 <= x < inf, "0 or more")
SHARE: Allowed = (lambda x: 0 <= x <= 1, "a share of --lr, from 0 to 1")
SEED: Allowed = (lambda x: 0 <= x < 2**63, "0 or more, below 2**63")
"""No larger number is read from a checkpoint (`reading.MOST`)."""


LARGEST = 1 << 20
"""Bytes of a file of settings."""
MOST = 10**9
"""More of anything than one run can do or hold: a number beyond is a slip."""


MOST_THREADS = 4096
"""More than any machine has: a number beyond is a slip."""


def least(n: int, most: int = MOST) -> Allowed:
    """Allow whole numbers from n on, up to a largest."""
    return lambda x: n <= x <= most, f"{n} or more, up to {most:,}"


def one_of(words: Iterable[str]) -> Allowed:
    """Allow one of some words."""
    return lambda word: word in words, f"one of {', '.join(words)}"


def setting(
    default: Any, help: str, allowed: Allowed | None = None, *, metavar: str = "", shown: str = "", free: bool = False
) -> Any:
    """Declare a setting that has a flag.

    Parameters
    ----------
    shown : the help's words for the default, if the value alone is not clear.
    free : whether a resumed run may change it, since no number of its steps depends on it.
    """
    about = {"help": help, "allowed": allowed, "metavar": metavar or None, "shown": shown, "free": free}
    return field(default=default, metadata=about)


@dataclass(frozen=True)
class Settings:
    """All settings of a run; the defaults are those of ``train_gpt2.c`` if it has them."""

    model: str | None = setting(
        None,
        "Use this preset, directory with a config.json, sizes as in '{\"n_layer\": 4}', or FILE.py:NAME of your own.",
        shown=f"that of --init, or {models.DEFAULT}",
    )
    init: str | None = setting(
        None,
        "Start from the weights of a model file of llm.c or llama2.c, GGUF, a Hugging Face directory, or a run.",
        metavar="PATH",
    )
    data: str = setting(
        "builtin",
        "Read this text: builtin, a dataset, a text file, a glob, or a .bin of tokens; or examples in JSON or Parquet.",
    )
    chat_format: str | None = setting(
        None,
        "Write chats in the form chatml or llama3 of instruction models.",
        metavar="NAME",
        shown="the model's chat template, else as the tokenizer has",
    )
    system: str = setting("", "Begin chats that have no system turn with this one.", metavar="TEXT")
    pack: bool = setting(
        False, "Put as many examples into a row as fit; each attends to itself alone, from position 0 on."
    )
    truncate: bool = setting(
        False,
        "Allow chats that are longer than a row to be cut, even if more than a hundredth of the tokens is lost.",
        free=True,
    )
    skip_invalid: bool = setting(
        False, "Allow invalid examples, such as tool calls and empty answers; they are left out and counted."
    )
    tokenizer: str | None = setting(
        None,
        "Tokenize text by bytes or gpt2 or a file: tokenizer.json, .model, .bin of llama2.c, or GGUF; or its folder.",
        metavar="NAME|FILE",
        shown="that of --init; else gpt2 for its tokens, and bytes",
    )
    B: int = setting(4, "Put this many rows into a batch.", least(1))
    T: int = setting(64, "Put this many tokens into a row.", least(1))
    steps: int = setting(40, "Run this many training steps.", least(1), free=True)
    epochs: int | None = setting(
        None, "Train on all data this many times, in place of --steps.", least(1), metavar="N", free=True
    )
    variant: str = setting("optimized", "Use this variant of the kernels; auto follows the plan of 'cpuopt tune'.")
    plan: tuple[str, ...] | None = None
    """The rules that ``--variant auto`` came to when the run began; a resumed run keeps them."""
    swap: tuple[str, ...] = setting(
        (),
        "Use another variant for some ops in some layers. Globs are allowed, the flag repeats, and the last match "
        "wins.",
        metavar="OP[@LAYER]=VARIANT",
    )
    # of files of kernels, what is in them is compared, not where they lie
    kernels: tuple[str, ...] = setting(
        (), "Load your own kernels from this file; the flag repeats.", metavar="FILE.py", free=True
    )
    fuse: str = setting(
        "auto",
        "Apply these rewrites: gate, residual, layernorm, adapter, gelu, classifier, update, recompute.",
        metavar="all|none|NAME,...",
    )
    recompute: str | int = setting(
        0,
        "Let the backward compute the first N blocks again, or all, in place of keeping what is inside them: less "
        "memory, the same numbers.",
        (lambda x: x == "all" or (str(x).isdecimal() and int(x) <= MOST), "all, or a number of blocks"),
        metavar="all|N",
        free=True,
    )
    dtype: str = setting(
        "float32",
        "Storage type of the inputs of products, attention and activations: float32, bf16, or int8, which is bf16 with "
        "products in int8. Weights that are updated, sums and states stay float32.",
        one_of(DTYPES),
    )
    order: str | None = setting(
        None,
        "Add the products of --dtype bf16 in this order: pairs, or amx, that of Intel's tiles, which is slow on other "
        "processors. A resumed run keeps its order.",
        one_of(ORDERS),
        shown="the processor's",
    )
    moments: str = setting(
        "float32",
        "Store the optimizer's states in this type: float32 or bf16, which is rounded at random.",
        one_of(STORED),
    )
    weights: str = setting(
        "float32",
        "Store the weights that products read in this type: float32 or bf16, which is rounded at random and needs "
        "--dtype bf16 or int8.",
        one_of(STORED),
    )
    threads: int | None = setting(
        None,
        "Run on this many threads.",
        least(1, MOST_THREADS),
        shown="the physical performance cores this process may use",
        free=True,
    )
    seed: int = setting(0, "Draw initial weights, data order and dropout from this random seed.", SEED)
    lr: float = setting(1e-4, "Set the peak of the learning rate.", POSITIVE)
    schedule: str = setting(
        "constant", "Change the learning rate over time: constant, cosine, linear or wsd.", one_of(SCHEDULES)
    )
    warmup_steps: int = setting(0, "Let the learning rate rise over this many steps.", least(0), metavar="N")
    lr_end: float = setting(0.0, "End at this learning rate, as a share of --lr.", SHARE, metavar="SHARE")
    optimizer: str = setting("adamw", "Update weights with this optimizer: adamw, sgd (with momentum) or lion.")
    freeze: tuple[str, ...] = setting(
        (),
        "Keep parameters whose names match this glob as they are; the flag repeats.",
        metavar="PATTERN",
    )
    lora: str | None = setting(
        None,
        "Train low-rank adapters alone, as in r=8,alpha=16,dropout=0,rslora,targets=q_proj,v_proj; the targets all are "
        "every linear layer but the head, and --save writes the adapter for PEFT.",
        metavar="r=R,...",
        shown="off",
    )
    base: str | None = setting(
        None,
        "Keep the frozen weights of linear layers in this type: bf16, as --dtype bf16 does, int8, in blocks of 64 with "
        "a scale, q8_0, in the blocks of 32 of GGUF, or w8a8, in int8 that products multiply with activations in int8.",
        one_of(BASES),
        shown="that of --dtype",
    )
    bf16_layers: tuple[str, ...] | None = setting(
        None,
        "Leave products of layers whose names match this glob in bf16; the flag repeats, and none stands for no layer.",
        metavar="PATTERN",
        shown="those in which int8 is too coarse on the first batch",
    )
    # by default as the optimizer declares; None if it has no such number
    beta1: float | None = setting(None, "Set the decay rate of the first moment (AdamW, Lion).", shown="0.9")
    beta2: float | None = setting(
        None, "Set the decay rate of the second moment (AdamW) or of the momentum (Lion).", shown="0.999, Lion 0.99"
    )
    eps: float | None = setting(None, "Add this number to the denominator (AdamW).", shown="1e-08")
    momentum: float | None = setting(None, "Set the factor of the momentum (SGD).", shown="0.9")
    weight_decay: float | None = setting(None, "Decay weights at this rate.", shown="0.0")
    decay: str = setting("all", "Decay all parameters, or only matrices, those of two axes.", one_of(DECAYS))
    clip: float | None = setting(
        None, "Scale the gradient down to this global norm if it is larger.", POSITIVE, shown="off"
    )
    total_batch: int | None = setting(
        None, "Accumulate this many tokens over the micro-batches of a step.", metavar="TOKENS", shown="B * T"
    )
    reduce: str = setting(
        "exact",
        "Add gradients of micro-batches and ranks exactly, in a fixed tree whose bits do not depend on the ranks, or "
        "fast, which takes less memory.",
        one_of(REDUCTIONS),
    )
    zero: int = setting(
        1,
        "Keep on each rank the optimizer's states of its slice (1, ZeRO-1), or all of them (0).",
        (lambda x: x in (0, 1), "0 or 1"),
        free=True,
    )
    overfit: bool = setting(False, "Train on the first batch only, to see the loss go to 0.")
    guard: str = setting(
        "auto", "On a NaN or infinite step: skip its update, stop, off (ignore), or auto.", one_of(GUARDS), free=True
    )
    guard_z: float = setting(
        0.0,
        "Let --guard refuse a loss or norm from this z-score on; 0 means none, 6 is usual.",
        NOT_NEGATIVE,
        metavar="Z",
        free=True,
    )
    val_every: int = setting(10, "Validate after every so many steps; 0 means never.", least(0), free=True)
    val_batches: int = setting(5, "Validate on this many batches.", least(1), free=True)
    patience: int = setting(
        0, "End the run after this many validations in a row without a lower loss; 0 means never.", least(0), free=True
    )
    keep_best: bool = setting(
        False, "Keep the checkpoint of the lowest validation loss too, and save its weights at the end.", free=True
    )
    sample_every: int = setting(
        0,
        "Generate a sample of text after every so many steps and the last; 0 means never.",
        least(0),
        metavar="N",
        free=True,
    )
    sample_tokens: int = setting(64, "Generate this many tokens in a sample.", least(1), metavar="N", free=True)
    prompt: str = setting("", "Begin the samples with this text.", free=True)
    save: str | None = setting(
        None,
        "Write the final weights to this path: NAME.bin (llm.c), NAME.gguf, or a Hugging Face directory.",
        metavar="PATH",
        free=True,
    )
    save_every: int = setting(
        0,
        "Write a checkpoint after every so many steps; 0 means only if a run is interrupted.",
        least(0),
        metavar="N",
        free=True,
    )
    keep: int = setting(2, "Keep this many checkpoints.", least(1), metavar="K", free=True)
    run: str = setting("train", "Name the run's folder in runs/.", metavar="NAME")
    log_every: int = setting(
        0,
        "Print a line after every so many steps, and after the first and the last.",
        least(0),
        metavar="N",
        shown="at most one a second",
        free=True,
    )
    tensorboard: bool = setting(False, "Write events for TensorBoard besides the run's own files.", free=True)
    processes: int = 1

    def __post_init__(self) -> None:
        for name, default in self._numbers.items():
            if getattr(self, name, None) is None:
                object.__setattr__(self, name, default)

    @property
    def _numbers(self) -> dict[str, float]:
        from .. import ops  # late: the help must come at once

        return ops.OPTIMIZERS[self.optimizer].defaults if self.optimizer in ops.OPTIMIZERS else {}

    def some(self, *names: str) -> dict[str, Any]:
        """Return some settings by their names."""
        return {name: getattr(self, name) for name in names}

    @property
    def numbers(self) -> dict[str, float]:
        """The optimizer's numbers for `Engine.step`, without the learning rate."""
        return self.some(*self._numbers)

    def check_optimizer(self) -> None:
        """Refuse an optimizer that does not exist, and numbers that it does not have or cannot use.

        Raises
        ------
        UserError
            Naming the flag.
        """
        from ..ops import OPTIMIZERS

        if self.optimizer not in OPTIMIZERS:
            raise UserError(f"--optimizer {self.optimizer!r}: there is no such; {nearest(self.optimizer, OPTIMIZERS)}")
        for name in dict.fromkeys(name for o in OPTIMIZERS.values() for name in o.defaults):
            x = getattr(self, name, None)
            if x is not None and name not in self._numbers:
                has = ", ".join(map(flag, self._numbers))
                words = name.replace("_", " ")
                raise UserError(f"{flag(name)} {x}: {self.optimizer} has no {words}; it has --lr, {has}")
        for number in OPTIMIZERS[self.optimizer].numbers:
            x = getattr(self, number.name)
            if wrong := number.wrong(x):
                raise UserError(f"{flag(number.name)} {x}: expected {wrong}")

    def check(self) -> None:
        """Refuse settings that no run can use.

        Raises
        ------
        UserError
            Naming the flag.
        """
        from ..data.corpus import is_examples
        from ..data.forms import require_format
        from ..weights import check_target
        from .record import check_name

        for f in FLAGS.values():
            require(f.name, getattr(self, f.name))
        self.check_optimizer()
        if self.epochs is None:
            self.check_schedule()
        elif self.overfit:
            raise UserError(f"--epochs {self.epochs} with --overfit, which trains on one batch; take --steps")
        if self.micro_batches > MOST_MICRO_BATCHES:
            raise UserError(
                f"--total-batch {self.total_batch}: expected {MOST_MICRO_BATCHES * self.B * self.T} or less, "
                f"{MOST_MICRO_BATCHES:,} micro-batches of -B {self.B} times -T {self.T}; take a larger -B or -T"
            )
        if self.total_batch is not None and (self.total_batch < 1 or self.total_batch % (self.B * self.T)):
            near = max(1, round(self.total_batch / (self.B * self.T))) * self.B * self.T
            raise UserError(
                f"--total-batch {self.total_batch}: expected a multiple of {self.B * self.T}, the tokens of a "
                f"micro-batch, -B {self.B} times -T {self.T}; the nearest is {near}"
            )
        if self.lora is not None:
            from ..nn.lora import Lora

            Lora.parse(self.lora)
            if self.save is not None and Path(self.save).suffix:
                raise UserError(f"--save {self.save}: expected a directory for the adapter of --lora")
        if self.base is not None and not (self.lora or self.freeze):
            raise UserError(f"--base {self.base}: all weights are trained; add --lora r=8, or --freeze PATTERN")
        if self.base == "bf16" and self.dtype != "bf16":
            raise UserError("--base bf16: products read it with --dtype bf16 alone; add that, or take --base int8")
        if self.bf16_layers and not self.multiplies_int8:
            raise UserError(
                f"--bf16-layers {self.bf16_layers[0]}: it is about products in int8; add --dtype int8, or leave it out"
            )
        if self.order is not None and self.dtype == "float32":
            raise UserError(f"--order {self.order}: it is about products in bf16; add --dtype bf16, or leave it out")
        if self.weights == "bf16" and self.dtype == "float32":
            raise UserError("--weights bf16: products read them so with --dtype bf16 or int8 alone; add one")
        require_format(self.chat_format)
        of_examples = [n for n in EXAMPLES if getattr(self, n)]
        if of_examples and not is_examples(self.data):
            raise UserError(f"{flag(of_examples[0])}: --data {self.data} is text, without examples; leave it out")
        for name in ("patience", "keep_best"):
            if getattr(self, name) and not self.val_every:
                raise UserError(f"{flag(name)}: expected with --val-every N, without which nothing is validated")
        check_name(self.run)
        if self.tensorboard:
            optional("tensorboardX", "--tensorboard", "tensorboard")
        if self.save is not None:
            try:
                check_target(Path(self.save))
            except UserError as e:
                raise UserError(f"--save {e}") from None

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches in a step."""
        return (self.total_batch or self.B * self.T) // (self.B * self.T)

    @property
    def multiplies_int8(self) -> bool:
        """Whether products are sums of int8."""
        return self.dtype == "int8" or self.base == "w8a8"

    def check_schedule(self) -> None:
        """Refuse a schedule that the steps are too few for.

        Raises
        ------
        UserError
            Naming the flag.
        """
        if wrong := misfit(self.schedule, self.steps, self.warmup_steps):
            raise UserError(wrong)

    def of_epochs(self, batches: int) -> Settings:
        """Return the settings with the steps that their epochs are, each of some batches.

        Raises
        ------
        UserError
            For a schedule that these are too few for.
        """
        if self.epochs is None:
            return self
        found = replace(self, steps=-(-self.epochs * batches // self.micro_batches))
        found.check_schedule()
        return found

    def sized(self, config: models.Config | None = None) -> Settings:
        """Return the settings with the B and T of the model: a model that brings its inputs has its own.

        Raises
        ------
        UserError
            If such a model is given data.
        """
        config = config or models.parse(self.model or models.DEFAULT)
        B, T = config.batch_size(self.B, self.T)
        if config.inputs(B, T) is not None:
            for flag, x in (("--data", self.data != "builtin"), ("--tokenizer", self.tokenizer is not None)):
                if x:
                    raise UserError(f"{flag}: {models.name_of(config)} brings its own inputs; leave {flag} out")
        return replace(self, B=B, T=T)

    def options(self, files: Sequence[str], comm: Comm) -> BuildOptions:
        """Return how the model becomes calls; `files` of code are those of the model."""
        from ..building import BuildOptions

        return BuildOptions.from_words(
            self.variant,
            self.swap,
            self.fuse,
            plan=self.plan or (),
            two_pass=self.two_pass,
            recompute=self.recompute if self.recompute == "all" else int(self.recompute),
            micro_batches=self.micro_batches // comm.size,
            comm=comm,
            dtype=stored(self.dtype),
            base="" if self.base == "bf16" else self.base or "",
            bf16_layers=[pattern for pattern in self.bf16_layers or () if pattern != NO_LAYER],
            moments=DTYPES[self.moments],
            weights=DTYPES[self.weights],
            kernel_files=(*self.kernels, *files),
            **self.some("reduce", "zero", "optimizer", "freeze", "threads", "processes"),
        )

    @property
    def rewrites(self) -> tuple[str, ...]:
        """The rewrites of a job; ``update`` is not among them if a setting needs all gradients before.

        Raises
        ------
        UserError
            For a rewrite that does not exist, or cannot be with other settings.
        """
        from ..program.fuse import chosen

        return chosen(self.fuse, self.variant, self.two_pass)

    def validations(self, done: int) -> int:
        """Count the validations that follow `done` steps; before the first step there is another one."""
        return -(-self.steps // self.val_every) - done // self.val_every if self.val_every else 0

    @property
    def two_pass(self) -> str:
        """The flag that needs all gradients before the first update; empty if none does."""
        if self.clip:
            return f"--clip {self.clip}"
        if self.micro_batches > 1:
            return f"--total-batch {self.total_batch}"
        return f"--guard {self.guard}" if self.guard == "skip" else "--guard-z" if self.guard_z else ""


FLAGS = {f.name: f for f in fields(Settings) if f.metadata}
"""The settings that have a flag."""
FREE = {name for name, f in FLAGS.items() if f.metadata["free"]} | {"processes"}
"""The settings that a resumed run may change."""
TYPES = get_type_hints(Settings)
JOB = (
    *("model", "init", "data", "chat_format", "system", "tokenizer", "B", "T", "steps", "seed", "dtype", "moments"),
    "weights",
)
KERNELS = ("variant", "swap", "kernels", "fuse", "recompute", "threads")
DATA = ("data", "tokenizer", "B", "T", "epochs")
SHARING = ("freeze", "lora", "base", "bf16_layers", "total_batch", "reduce", "zero")


def flag(name: str) -> str:
    """Return the flag of a setting."""
    return f"-{name}" if len(name) == 1 else f"--{name.replace('_', '-')}"


def require(name: str, value: Any) -> None:
    """Refuse a value that a setting cannot have."""
    allowed = FLAGS[name].metadata["allowed"]
    if allowed and value is not None and not allowed[0](value):
        meant = guess(value, re.findall(r"[\w-]+", allowed[1])) if isinstance(value, str) else ""
        raise UserError(f"{flag(name)} {value!r}: expected {allowed[1]}{meant}")


def stored(dtype: str) -> str:
    """Return what a word of ``--dtype`` stores; refuse a word that is none."""
    require("dtype", dtype)
    return DTYPES[dtype]


def default(name: str, value: Any) -> str:
    """Return the words of the help and the docs for a default."""
    shown = FLAGS[name].metadata["shown"] if value == FLAGS[name].default else ""
    return str(shown or ("" if value in (None, "", ()) or value is False else value))


def flags(p: argparse.ArgumentParser, *names: str, only_given: bool = False, **defaults: Any) -> None:
    """Add the flags of some settings to a parser.

    Parameters
    ----------
    only_given : whether the namespace holds only given flags, so that a file of settings can supply the others.
    defaults : defaults that differ from those of the table.
    """
    for name in dict.fromkeys((*names, *defaults)):
        about, value = FLAGS[name].metadata, defaults.get(name, FLAGS[name].default)
        kind = next((t for t in get_args(TYPES[name]) if t is not NoneType), TYPES[name])
        words = default(name, value)
        more: dict[str, Any] = {"help": f"{about['help']} Default: {words}." if words else about["help"]}
        if kind is bool:
            more |= {"action": argparse.BooleanOptionalAction}
        else:
            more |= {"type": kind if kind in (int, float) else None, "metavar": about["metavar"]}
        if tuple in (get_origin(TYPES[name]), get_origin(kind)):
            value = None if value is None else list(value)
            more |= {"action": "append"}
        p.add_argument(flag(name), default=argparse.SUPPRESS if only_given else value, **more)


RECORDED = ("architecture", "sizes", "corpus", "processes", "plan")
"""The keys of a run's ``config.json`` besides its settings, among them the plan of ``--variant auto``."""
GONE = ("local_steps", "outer_lr", "outer_momentum")
"""Settings that earlier versions had."""


def merged(file: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a file and of flags, which win; steps and epochs replace each other.

    Raises
    ------
    UserError
        If the flags give both.
    """
    if flags.keys() >= {"steps", "epochs"}:
        raise UserError(f"--steps {flags['steps']} with --epochs {flags['epochs']}: expected one of them")
    for one, other in (("steps", "epochs"), ("epochs", "steps")):
        if one in flags:
            file.pop(other, None)
    given = file | flags
    return given | ({"epochs": None} if "steps" in given else {})


def read(path: Path) -> dict[str, Any]:
    """Read a TOML or JSON file of settings, named as the flags are.

    Raises
    ------
    UserError
        If it cannot be read, or is neither; for an unknown name, or a value of another type.
    """
    import tomllib  # late: the help must come at once

    try:
        content = read_file(path, most=LARGEST)
        table = parse_json(content) if path.suffix == ".json" else tomllib.loads(content.decode())
    except OSError as e:
        raise UserError(f"--config {str(path)!r}: {e.strerror or e}") from e
    except (ValueError, RecursionError) as e:
        raise UserError(
            f"--config {str(path)!r}: {e}; expected TOML such as 'lr = 3e-4', or a run's config.json"
        ) from e
    given = {name.replace("-", "_"): x for name, x in table.items() if name not in RECORDED}
    if n := given.get("local_steps"):
        raise UserError(f"--config {str(path)!r}: local_steps {n}: this version has none; leave it out")
    for name in GONE:
        given.pop(name, None)
    if twice := [name for name in table if name.replace("-", "_") in table and "-" in name]:
        raise UserError(f"--config {str(path)!r}: {twice[0]!r} is there with - and with _; leave one of them out")
    if given.get("epochs") is not None and "steps" in given:
        if not table.keys() & set(RECORDED):
            raise UserError(f"--config {str(path)!r}: it has steps and epochs; expected one of them")
        del given["steps"]  # which a run had from its epochs
    for name in given:
        if name not in TYPES:
            raise UserError(f"--config {str(path)!r}: unknown {name!r}; {nearest(name, TYPES)}")
    try:
        return {name: from_json(TYPES[name], x, name) for name, x in given.items()}
    except ValueError as e:
        raise UserError(f"--config {str(path)!r}: {e}") from e

"""Adapters in the format of Hugging Face's ``peft``: ``adapter_config.json`` and ``adapter_model.safetensors``.

A tensor is named ``base_model.model.LAYER.lora_A.weight``, with the layer's name in the base model's own files. Both
matrices lie there as they do here, for layers that are stored (in, out) too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..data.tokenizers import get_tokenizer, tokenizer_beside, tokenizer_files
from ..errors import UserError
from ..files import write_directory
from ..models import Config, read_object
from ..nn.lora import ALL, A, B, Lora, adapter_of
from ..ops.declaration import Shape
from ..wording import hub_hint
from .huggingface import INDEX, WEIGHTS, names_of
from .tensors import FLOATS, IS_PICKLE, Array, Read, TensorFile, Weights, all_below, file_parts

CONFIG, TENSORS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
EMBEDDINGS = {"embed_tokens", "wte", "wpe"}
TENSOR = re.compile(rf"base_model\.model\.(?P<layer>.+)\.(?P<matrix>{A}|{B})\.weight")
KNOWN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal"),  # others change the base model too
}
"""The settings of which some values are known to change nothing but what is computed here."""
IGNORED = {
    *("task_type", "inference_mode", "peft_version", "revision", "base_model_name_or_path", "auto_mapping"),
    *("target_modules", "exclude_modules", "layers_pattern", "layers_to_transform"),  # the tensors say which layers
    *("r", "lora_alpha", "lora_dropout", "use_rslora", "fan_in_fan_out"),
    *("runtime_config", "megatron_core", "qalora_group_size", "ensure_weight_tying"),
}
"""The settings that are read, or that change nothing. Any other must be off: false, null or empty."""


@dataclass(frozen=True)
class Adapter:
    """Adapters of a model's layers.

    Attributes
    ----------
    layers : the names of the layers.
    read : function from ``LAYER.lora_A.weight`` or ``LAYER.lora_B.weight`` to the array, as float32.
    base : the name or path of the model that it was trained on, if it is known.
    """

    path: Path
    lora: Lora
    layers: tuple[str, ...]
    read: Read
    base: str | None = None

    def merged(self, read: Read) -> Read:
        """Return a function that reads a parameter of the base model with what its adapter adds to it, as float32.

        It raises a `UserError` for finite numbers whose product or sum float32 cannot hold.
        """
        adapted = {f"{layer}.weight": layer for layer in self.layers}

        def weight(name: str) -> Array:
            x = read(name)
            if name not in adapted:
                return x
            a, b = map(self.read, adapter_of(adapted[name]))
            with np.errstate(over="ignore", invalid="ignore"):
                y: Array = x + self.lora.scale * (b @ a)
            if not all_below(y) and all(map(all_below, (x, a, b))):
                raise UserError(
                    f"{str(self.path)!r}: what this adapter adds to {name!r} is more than float32 holds; expected "
                    "smaller numbers or alpha: take another adapter, or train it again with a lower --lr"
                )
            return y

        return weight

    def check(self, config: Config) -> None:
        """Refuse a model that lacks a layer, or has one of another shape.

        Raises
        ------
        UserError
            Naming the layer.
        """
        shapes = config.shapes()
        for layer in self.layers:
            if len(of := shapes.get(f"{layer}.weight", ())) != 2:
                raise UserError(
                    f"{str(self.path)!r} adapts {layer!r}, which the model does not have: another base model"
                )
            for name, want in _shapes(layer, of, self.lora.r).items():
                if (there := self.read(name)).shape != want:
                    raise UserError(
                        f"{str(self.path)!r}: {name!r} has the shape {there.shape}; expected {want} for r = "
                        f"{self.lora.r} and this base model"
                    )
                if not all_below(there):
                    raise UserError(f"{str(self.path)!r}: {name!r} has numbers that are not finite")


def _shapes(layer: str, weight: Shape, r: int) -> dict[str, Shape]:
    (OC, C), (a, b) = weight, adapter_of(layer)
    return {a: (r, C), b: (OC, r)}


def is_adapter(path: Path) -> bool:
    """Return whether a path is a directory with an adapter and no model; its base's ``config.json`` may lie there."""
    return (path / CONFIG).is_file() and not any((path / name).exists() for name in (WEIGHTS, INDEX))


def named(path: Path) -> str:
    """Return what an adapter says of its base model, for a message."""
    base = read_object(path / CONFIG).get("base_model_name_or_path")
    return f" {repr(base)[:80]}" if isinstance(base, str) and base else ""


def named_base(path: Path) -> Path:
    """Return the path of the base model that an adapter names.

    Raises
    ------
    UserError
        If there is no such directory or file here.
    """
    base = read_object(path / CONFIG).get("base_model_name_or_path")
    if not isinstance(base, str) or not base or not Path(base).exists():
        hint = hub_hint(base) if isinstance(base, str) else ""
        raise UserError(
            f"{str(path)!r} names the base model {repr(base)[:80]}, which is not here; give it with --base{hint}"
        )
    return Path(base)


def open_adapter(path: Path, config: Config) -> Adapter:
    """Check an adapter's directory, and that it fits a model.

    Raises
    ------
    UserError
        If it cannot be read, computes what cpuopt does not, or belongs to another model.
    """
    if not (path / CONFIG).is_file():
        raise UserError(f"{str(path)!r} has no {CONFIG}; expected a directory that peft or --save wrote")
    given = read_object(path / CONFIG)
    if (path / PICKLED).is_file() and not (path / TENSORS).is_file():
        raise UserError(f"{str(path)!r} has no {TENSORS}; {PICKLED} {IS_PICKLE}")
    listed = [x for name in ("target_modules", "modules_to_save") if isinstance(x := given.get(name), list)]
    _refuse_embedding(path, *(layer for layers in listed for layer in layers if isinstance(layer, str)))
    for name, x in given.items():
        if name in KNOWN and not any(type(x) is type(y) and x == y for y in KNOWN[name]):
            raise UserError(f"{str(path)!r}: {name} is {repr(x)[:60]}; expected {KNOWN[name][0]!r}")
        if name not in IGNORED | KNOWN.keys() and x:
            raise UserError(f"{str(path)!r}: {name[:60]!r} is {repr(x)[:60]}, which cpuopt does not compute")
    lora = _read_lora(path, given)
    file, names = TensorFile(path / TENSORS), names_of(config)
    places: dict[str, str] = {}
    for key, tensor in file.tensors.items():
        _refuse_embedding(path, key)
        part = TENSOR.fullmatch(key)
        if not part or tensor.dtype not in FLOATS:
            raise file.wrong(f"tensor {key!r} of {tensor.dtype} is no matrix of an adapter")
        name = f"{part['layer'].removeprefix(names.prefix)}.{part['matrix']}.weight"
        if name in places:
            raise file.wrong(f"tensor {name!r} comes twice")
        places[name] = key
    layers = tuple(dict.fromkeys(name.rsplit(".", 2)[0] for name in places))
    if lacking := [n for layer in layers for n in _shapes(layer, (1, 1), 1) if n not in places]:
        raise file.wrong(f"lacks {lacking[0]!r}")
    if not layers:
        raise file.wrong("has no adapter")
    base = given.get("base_model_name_or_path")
    found = Adapter(path, lora, layers, lambda name: file.read(places[name]), base if isinstance(base, str) else None)
    found.check(config)
    return found


def _refuse_embedding(path: Path, *layers: str) -> None:
    for layer in layers:
        if not EMBEDDINGS.isdisjoint(layer.split(".")):
            raise UserError(
                f"{str(path)!r} adapts or replaces the embedding ({layer[:80]!r}), which cpuopt does not; merge it in "
                "peft by merge_and_unload(), and open the directory that save_pretrained writes"
            )


def _read_lora(path: Path, given: Mapping[str, Any]) -> Lora:
    r, alpha, rslora = given.get("r", 8), given.get("lora_alpha", 8), given.get("use_rslora", False)
    if type(r) is not int or type(alpha) not in (int, float) or type(rslora) is not bool:
        raise UserError(
            f"{str(path)!r}: r, lora_alpha and use_rslora are {str((r, alpha, rslora))[:60]}; expected two numbers and "
            "true or false"
        )
    try:
        return Lora(r, float(alpha), rslora=rslora)
    except UserError as e:
        raise UserError(f"{str(path)!r}: {str(e).removeprefix('--lora: ')}") from e


def merge(weights: Weights, adapters: Iterable[Path]) -> Weights:
    """Add adapters to a model's weights; of several, each adds its product to the same base.

    An adapter's tokenizer, with its chat template, takes the place of the base model's if it fits.

    Raises
    ------
    UserError
        As `open_adapter`, and for one that comes twice.
    """
    seen = set[Path]()
    for path in adapters:
        if path.resolve() in seen:
            raise UserError(f"--adapter {path}: it comes twice, and would be added twice; name each adapter once")
        seen.add(path.resolve())
        read = open_adapter(path, weights.config).merged(weights.read)
        weights = replace(weights, read=read, tokenizer=_tokenizer_of(path, weights))
    return weights


def _tokenizer_of(adapter: Path, weights: Weights) -> str | None:
    """Return the tokenizer of an adapter, or else of its base model."""
    own = tokenizer_beside(adapter)
    try:
        return own if own and get_tokenizer(own).vocab_size <= weights.config.vocab_size else weights.tokenizer
    except UserError:  # as without the library that it needs
        return weights.tokenizer


def require_own(config: Config, layers: Iterable[str]) -> None:
    """Refuse adapters of layers that a model's own files hold as one: ``peft`` would not find them.

    Raises
    ------
    UserError
        Naming the layer.
    """
    for layer in layers:
        if whole := next((w for w, parts in config.fused.items() if layer.endswith(tuple(parts))), ""):
            raise UserError(
                f"files of {config.title} hold {layer!r} in {whole}, of which an adapter here has no part; leave such "
                "layers out of targets, or keep a checkpoint, of which 'cpuopt convert --merge' makes a model"
            )


def save_adapter(path: Path, config: Config, adapter: Adapter, tokenizer: str | None = None) -> None:
    """Write an adapter's directory, whole or not at all, with the tokenizer's files.

    Raises
    ------
    UserError
        If it cannot be written, or a number is not finite.
    """
    names, shapes = names_of(config), config.shapes()
    require_own(config, adapter.layers)
    adapter.check(config)
    there: dict[str, Shape] = {}
    for layer in adapter.layers:
        there |= _shapes(layer, shapes[f"{layer}.weight"], adapter.lora.r)
    prefix = f"base_model.model.{names.prefix}"
    parts = file_parts({f"{prefix}{n}": s for n, s in there.items()}, lambda n: adapter.read(n.removeprefix(prefix)))
    about = {
        "base_model_name_or_path": adapter.base,
        "bias": "none",
        "fan_in_fan_out": any(names.transposed.fullmatch(f"{layer}.weight") for layer in adapter.layers),
        "inference_mode": True,
        "lora_alpha": int(alpha) if (alpha := adapter.lora.alpha).is_integer() else alpha,
        "lora_dropout": adapter.lora.dropout,
        "peft_type": "LORA",
        "r": adapter.lora.r,
        "target_modules": _targets(adapter.lora.targets, adapter.layers),
        "task_type": "CAUSAL_LM",
        "use_rslora": adapter.lora.rslora,
    }
    content = json.dumps(about, indent=2).encode()
    write_directory(path, {CONFIG: content, TENSORS: parts, **tokenizer_files(tokenizer)})


def _targets(targets: Sequence[str], layers: Iterable[str]) -> list[str]:
    """Return the targets as ``peft`` reads them: ends of the layers' names, for all layers too."""
    return [*(dict.fromkeys(layer.rpartition(".")[2] for layer in layers) if ALL in targets else targets)]

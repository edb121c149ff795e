"""Models by name. A file of this folder is a model: sizes, module, and how it generates; `register` adds it.

`config` has what all models share, and `own` opens a model in a user's file.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..files.reading import parse_json, read_json
from ..wording import hub_hint, nearest
from .config import FIRST as FIRST
from .config import MOST_LAYERS as MOST_LAYERS
from .config import Config as Config
from .config import specs as specs
from .own import OwnModel, open_own
from .own import is_own as is_own

if TYPE_CHECKING:  # a command's help comes without ops
    from .. import nn

DEFAULT = "gpt2-124M"
"""The default preset."""
LARGEST = 16 << 20
"""Bytes of a ``config.json`` or an index of shards, of which the longest known has 9 MB."""
CONFIG = "config.json"
MODELS: dict[str, type[Config]] = {}
PRESETS: dict[str, Config] = {}


def register(config: type[Config], presets: Mapping[str, Config]) -> None:
    """Register a model, and its presets for ``--model``."""
    MODELS[config.model] = config
    PRESETS.update(presets)


@cache
def load_all() -> None:
    """Import the package's models, so that each registers itself."""
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
    for name in sorted(PRESETS, key=lambda name: PRESETS[name].model != FIRST):  # whichever was imported before
        PRESETS[name] = PRESETS.pop(name)
    for name in sorted(MODELS, key=lambda name: name != FIRST):
        MODELS[name] = MODELS.pop(name)


def preset_names() -> list[str]:
    """List the presets without importing a model: a command's help comes without ops."""
    names: list[str] = []
    for module in iter_modules(__path__):
        for node in ast.parse((Path(__path__[0]) / f"{module.name}.py").read_bytes()).body:
            made = getattr(node, "value", None)
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            given: list[Any] = made.args if isinstance(node, ast.Expr) and isinstance(made, ast.Call) else []
            given += [made] if isinstance(target, ast.Name) and target.id == "PRESETS" else []
            keys = (key for table in given if isinstance(table, ast.Dict) for key in table.keys)
            names += [str(key.value) for key in keys if isinstance(key, ast.Constant)]
    return names


def load(name: str) -> tuple[Config, nn.Module]:
    """Return the config and the module that `parse` finds under a name, or in a directory."""
    try:
        config = parse(name)
    except UserError as e:
        raise UserError(re.sub("^--model:?", "models.load:", str(e))) from e
    return config, config.module()


def parse(text: str) -> Config:
    """Read a preset's name, sizes as a JSON object over a model's defaults, or a directory with a ``config.json``.

    ``FILE.py:NAME`` is a model in a user's file, which is run: it is as trusted as a file of ``--kernels``.

    Raises
    ------
    UserError
        For an unknown preset or model, a text that is not JSON, an unknown or impossible size, a file that raises.
    """
    load_all()
    if not isinstance(text, str):
        raise UserError(f"--model {repr(text)[:80]}: expected text, such as {DEFAULT!r}")
    if text in PRESETS:
        return PRESETS[text]
    if is_own(text):
        return open_own(text)
    if os.path.isdir(text):
        return read_config(Path(text) / CONFIG)[0]
    if not text.lstrip().startswith("{"):
        known = nearest(text, PRESETS)
        if text.endswith(".py"):
            known = f"name the class or the function in it, as in {text}:Net;"
        known += f" or sizes as in '{{\"n_layer\": 4}}'{hub_hint(text)}"
        raise UserError(f"--model {repr(text)[:80]}: no such preset; {known}")
    try:
        return from_json(parse_json(text))
    except ValueError as e:
        raise UserError(f"--model {repr(text)[:80]}: not JSON ({e}); expected sizes as in '{{\"n_layer\": 4}}'") from e


def from_json(sizes: Mapping[str, Any], model: Any = FIRST) -> Config:
    """Build a config from the result of `Config.to_json`; missing sizes have the model's defaults.

    Parameters
    ----------
    model : the model of sizes that do not name one.
    """
    found = model_type(sizes.get("model", model))
    names = [f.name for f in fields(found)]
    for name in sizes:
        if name not in (*names, "model"):
            raise UserError(f"--model: unknown size {name[:50]!r}; known: {', '.join(names)}")
    return found(**{name: n for name, n in sizes.items() if name != "model"})


def model_type(name: Any) -> type[Config]:
    """Return the config class of a model; raise a `UserError` for an unknown name."""
    load_all()
    if name == OwnModel.model:
        return OwnModel
    if not isinstance(name, str) or name not in MODELS:
        raise UserError(f"there is no model {repr(name)[:60]}; known: {', '.join(MODELS)}")
    return MODELS[name]


def read_config(path: Path) -> tuple[Config, dict[str, Any]]:
    """Read Hugging Face's ``config.json``; return the sizes, and the whole content.

    Raises
    ------
    UserError
        If it cannot be read, or describes a model that cpuopt does not have.
    """
    given = read_object(path)
    if "model_type" not in given:
        raise UserError(f"{str(path)!r} does not say 'model_type'; expected {' or '.join(MODELS)!r}")
    try:
        return model_type(given["model_type"]).from_transformers(given), given
    except UserError as e:
        raise UserError(f"{str(path)!r}: {str(e)[:200]}") from e


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object that comes with weights; raise a `UserError` if there is none."""
    try:
        return read_json(path, most=LARGEST)
    except FileNotFoundError as e:
        raise UserError(f"there is no {str(path)!r}, which has the model's sizes; put it beside the weights") from e
    except OSError as e:
        raise UserError(f"cannot read {str(path)!r}: {e.strerror or e}") from e
    except (ValueError, RecursionError) as e:
        raise UserError(f"{str(path)!r} is no JSON object: {e}") from e


def preset_of(sizes: Mapping[str, Any]) -> str:
    """Return the name of the preset with these sizes, as of `Config.to_json`, or ``""``."""
    load_all()
    return next((name for name, config in PRESETS.items() if config.to_json() == dict(sizes)), "")


def name_of(config: Config) -> str:
    """Return the name of a config's preset, ``FILE.py:NAME`` for one of a user's file, or ``gpt2-custom``."""
    return str(config) if isinstance(config, OwnModel) else preset_of(config.to_json()) or f"{config.model}-custom"


def argument_of(sizes: Mapping[str, Any]) -> str:
    """Return the value of ``--model`` for these sizes."""
    own = sizes.get("model") == OwnModel.model
    return f"{sizes['file']}:{sizes['symbol']}" if own else preset_of(sizes) or json.dumps(dict(sizes))

"""Models in the format of Hugging Face's ``transformers``: a directory with ``config.json`` and ``model.safetensors``.

Of GPT-2, four weights are stored (in, out) there and (out, in) here; names may begin with ``transformer.``; masks are
kept beside the weights in older files, and are skipped. The Llama family has the same names and shapes here and there,
except for layers that a model's files hold as one. A head that is tied to the embedding may be left out.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from ..data.companions import GENERATION, marks_of
from ..data.tokenizers import TOKENIZERS, tokenizer_beside, tokenizer_files
from ..errors import UserError
from ..files import write_directory
from ..models import CONFIG, Config, read_config, read_object
from ..models.llama import Config as Llama
from ..ops.declaration import Shape
from ..ops.storage import WIDE
from .tensors import FLOATS, IS_PICKLE, Array, DType, Marks, Read, TensorFile, Weights, file_parts

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth")
SHARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors")
TIE = "tie_word_embeddings"
TOKENIZER = "cpuopt_tokenizer"
"""The key of the tokenizer in ``config.json``, which other programs ignore."""


@dataclass(frozen=True)
class Names:
    """The differences between the files of a model and its module; other weights have the module's name and shape.

    Attributes
    ----------
    prefix : the prefix of every name; it may be missing.
    transposed : weights that are stored (in, out).
    skipped : tensors that are no weights.
    tied : tensors that are left out where a model ties them, each with the weight that it must then equal.
    inner : what the names of the module begin with, and those of files without a head do not.
    """

    prefix: str = ""
    transposed: re.Pattern[str] = re.compile(r"(?!)")
    skipped: re.Pattern[str] = re.compile(r"(?!)")
    tied: Mapping[str, str] = field(default_factory=dict)
    inner: str = ""


LLAMA = Names(
    skipped=re.compile(r"(.+\.)?rotary_emb\w*\.\w*inv_freq"),
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    inner="model.",
)
NAMES = {
    "gpt2": Names(
        "transformer.",
        re.compile(r"h\.\d+\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight"),
        re.compile(r"h\.\d+\.attn\.(bias|masked_bias)"),
        {"lm_head.weight": "wte.weight"},
    ),
}
"""The differences of a model's files; those of the Llama family have their own."""


def names_of(config: Config) -> Names:
    """Return the differences of a model's files."""
    return NAMES.get(config.model, LLAMA if isinstance(config, Llama) else Names())


def tensors_of(config: Config) -> dict[str, list[str]]:
    """Return the parameters in each tensor of a model's files, one behind the other; the names have no prefix."""
    found: dict[str, list[str]] = {}
    for name in config.shapes():
        ends = ((part, whole) for whole, parts in config.fused.items() for part in parts)
        there = next((name.replace(part, whole) for part, whole in ends if name.endswith(f"{part}.weight")), name)
        found.setdefault(there, []).append(name)
    return found


def shapes_of(config: Config) -> dict[str, Shape]:
    """Return the shape of each tensor of a model's files, as it is here."""
    shapes = config.shapes()
    return {
        there: (sum(shapes[p][0] for p in parts), *shapes[parts[0]][1:]) for there, parts in tensors_of(config).items()
    }


def places_of(config: Config) -> dict[str, tuple[str, slice]]:
    """Return the place of each parameter in a model's files: a tensor, and its rows there."""
    shapes, found = config.shapes(), dict[str, tuple[str, slice]]()
    for there, parts in tensors_of(config).items():
        heights = [0, *accumulate(shapes[part][0] for part in parts)]
        found |= {part: (there, slice(*ends)) for part, ends in zip(parts, pairwise(heights), strict=True)}
    return found


def taken(config: Config, name: str, x: Array) -> Array:
    """Return a parameter whose rows lie as in a model's files, with its rows in the order here."""
    return x if (order := config.rows(name)) is None else x[order]


def joined(config: Config, names: Sequence[str], read: Read) -> Array:
    """Return the tensor of a model's files that has some parameters."""
    orders = {name: config.rows(name) for name in names}
    parts = [read(name) if order is None else read(name)[np.argsort(order)] for name, order in orders.items()]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def recognizes(path: Path) -> bool:
    """Return whether a path is a directory, or a file in one that has a model's name."""
    return path.is_dir() or path.name.endswith((".safetensors", ".index.json"))


def open_model(path: Path) -> Weights:
    """Check a directory, a ``.safetensors`` file with a ``config.json`` beside it, or an index of shards.

    Raises
    ------
    UserError
        If a tensor is missing, superfluous or of another shape, or the model is not one of cpuopt's.
    """
    folder = path if path.is_dir() else path.parent
    if path.is_dir():
        found = [folder / name for name in (WEIGHTS, INDEX) if (folder / name).is_file()]
        if not found:
            pickled = next((name for name in PICKLED if (folder / name).is_file()), "")
            raise UserError(f"{str(path)!r} has neither {WEIGHTS} nor {INDEX}{pickled and f'; {pickled} {IS_PICKLE}'}")
        path = found[0]
    config, tokenizer, marks = _config(folder / CONFIG)
    names = names_of(config)
    files = _shards(path) if path.name.endswith(".json") else [TensorFile(path)]
    places: dict[str, tuple[TensorFile, str]] = {}
    tensors = shapes_of(config)
    for file in files:
        for there in file.tensors:
            name = there.removeprefix(names.prefix)
            name = names.inner * (f"{names.inner}{name}" in tensors) + name
            if name in places:
                raise file.wrong(f"tensor {name!r} comes twice")
            if not names.skipped.fullmatch(name):
                places[name] = file, there
    tied = {weight: places.pop(name) for name, weight in names.tied.items() if name in places.keys() - tensors.keys()}
    missing, surplus = tensors.keys() - places.keys(), places.keys() - tensors.keys()
    if (head := f"{config.head}.weight") in missing and len(missing) == 1 and head in names.tied:
        raise UserError(
            f"{str(path)!r} lacks {head!r}, and {CONFIG} does not tie it to the embedding; if the model has one weight "
            f'for both, write "{TIE}": true into {CONFIG}'
        )
    require_none(path, missing, surplus, f"{config.model} of the sizes in {CONFIG}")
    rows = places_of(config)
    for name, (file, there) in places.items():
        t, want = file.tensors[there], tensors[name]
        if names.transposed.fullmatch(name):
            want = want[::-1]
        if t.shape != want or t.dtype not in FLOATS:
            raise UserError(
                f"{str(file.path)!r}: tensor {there!r} is {t.dtype} of shape {t.shape}; expected {want} of "
                f"{', '.join(FLOATS)}, because of {CONFIG}"
            )
    for name, place in tied.items():
        if not _same(place, places[name]):
            raise UserError(f"{str(path)!r}: {place[1]} differs from {name}; {config.model} has one weight for both")

    def read(name: str) -> Array:
        whole, part = rows[name]
        file, there = places[whole]
        x = file.read(there)
        return taken(config, name, x.T if names.transposed.fullmatch(name) else x[part])

    kinds = {file.tensors[there].dtype for file, there in places.values()}
    dtype: DType = "bf16" if kinds == {"BF16"} else "f16" if kinds == {"F16"} else "f32"
    return Weights(path, config, dtype, read, tokenizer, marks=marks)


def require_none(path: Path, missing: Set[str], surplus: Set[str], expected: str) -> None:
    """Refuse a model's file in which tensors are missing, or are no weights."""
    if missing or surplus:
        parts = [f"lacks {sorted(missing)[0]!r} and {len(missing) - 1} more"] if missing else []
        parts += [f"has {sorted(surplus)[0]!r} and {len(surplus) - 1} more"] if surplus else []
        raise UserError(f"{str(path)!r} {' and '.join(parts)}; expected {expected}")


def _same(a: tuple[TensorFile, str], b: tuple[TensorFile, str]) -> bool:
    (file, x), (other, y) = a, b
    return file.tensors[x].shape == other.tensors[y].shape and bool((file.read(x) == other.read(y)).all())


def _config(path: Path) -> tuple[Config, str | None, Marks]:
    """Read a model's sizes, its tokenizer, and the ids that begin and end a text."""
    config, given = read_config(path)
    tokenizer = given.get(TOKENIZER)
    if tokenizer not in (None, *TOKENIZERS):
        raise UserError(f"{str(path)!r}: {TOKENIZER} is {repr(tokenizer)[:60]}; expected {' or '.join(TOKENIZERS)}")
    tables = {more: read_object(more)} if os.path.lexists(more := path.with_name(GENERATION)) else {}
    return config, tokenizer or tokenizer_beside(path.parent), marks_of(tables | {path: given})


def _shards(index: Path) -> list[TensorFile]:
    """Check an index and the files that it names, which must lie beside it."""
    table = read_object(index).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(f, str) and SHARD.fullmatch(f) for f in table.values()):
        raise UserError(f"{str(index)!r}: expected 'weight_map', from tensors to names of files beside it")
    files = {name: TensorFile(index.parent / name) for name in dict.fromkeys(table.values())}
    for tensor, name in table.items():
        if tensor not in files[name].tensors:
            raise UserError(f"{str(index)!r} says that {name!r} has {tensor[:100]!r}, which it has not")
    listed = sum(len(f.tensors) for f in files.values())
    if listed != len(table):
        raise UserError(f"{str(index)!r} lists {len(table)} tensors; its files have {listed}")
    return list(files.values())


def write(path: Path, weights: Weights) -> None:
    """Write a directory, with the names and the transposes of ``save_pretrained`` and the files of the tokenizer.

    Raises
    ------
    UserError
        If it cannot be written.
    """
    config, names, tensors = weights.config, names_of(weights.config), tensors_of(weights.config)

    def turned(name: str) -> bool:
        return names.transposed.fullmatch(name) is not None

    def stored(there: str) -> Array:
        x = joined(config, tensors[name := there.removeprefix(names.prefix)], weights.read)
        return x.T if turned(name) else x

    there = {f"{names.prefix}{name}": x[::-1] if turned(name) else x for name, x in shapes_of(config).items()}
    dtype = {"bf16": "bfloat16", "f16": "float16"}.get(weights.dtype, WIDE)
    about = {**config.to_transformers(), **weights.marks.ids(), "dtype": dtype, "torch_dtype": dtype}  # the older name
    about |= {TOKENIZER: weights.tokenizer} if weights.tokenizer in TOKENIZERS else {}
    parts = file_parts(there, stored, weights.dtype)
    content = json.dumps(about, indent=2).encode()
    write_directory(path, {CONFIG: content, WEIGHTS: parts, **tokenizer_files(weights.tokenizer)})

"""GPT-2 as Hugging Face's ``transformers`` keeps it: a directory with ``config.json`` and ``model.safetensors``.

Four weights are stored (in, out) there and (out, in) here. The head is tied to ``wte.weight`` and may be left out;
names may begin with ``transformer.``; masks are kept beside the weights in older files, and are skipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data.tokenizers import TOKENIZERS
from ..errors import UserError
from ..files import Content
from ..models.gpt2 import Config
from ..ops.declaration import Shape
from .tensors import FLOATS, Array, DType, Read, TensorFile, file_parts, parse_json

END_OF_TEXT = 50256
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TRANSPOSED = re.compile(r"h\.\d+\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight")
MASK = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
SHARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors")
TOKENIZER = "cpuopt_tokenizer"
"""In ``config.json``: what made text into ids. Others leave it alone."""
SIZES = ("n_layer", "n_head", "n_embd", "vocab_size")
EXPECTED: dict[str, tuple[Any, ...]] = {
    # what this GPT-2 computes; the first is the value where config.json says nothing
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}


@dataclass(frozen=True)
class Model:
    """Checkpoint files whose headers have been checked; `places` gives each parameter's file and its name there."""

    path: Path
    config: Config
    dtype: DType
    places: dict[str, tuple[TensorFile, str]]
    tokenizer: str | None

    def read(self, name: str) -> Array:
        """Read one parameter as float32, (out, in)."""
        file, there = self.places[name]
        x = file.read(there)
        return x.T if TRANSPOSED.fullmatch(name) else x


def open_model(path: Path) -> Model:
    """Check a directory, a ``.safetensors`` file with a ``config.json`` beside it, or an index of shards.

    Raises
    ------
    UserError
        Where something is missing, too much, of another shape, or no GPT-2 as cpuopt computes it.
    """
    folder = path if path.is_dir() else path.parent
    if path.is_dir():
        found = [folder / name for name in (WEIGHTS, INDEX) if (folder / name).is_file()]
        if not found:
            pickled = (folder / "pytorch_model.bin").is_file()
            more = "; pytorch_model.bin is a pickle, which can run code: save with safe_serialization=True"
            raise UserError(f"{str(path)!r} has neither {WEIGHTS} nor {INDEX}{more if pickled else ''}")
        path = found[0]
    config, tokenizer = _config(folder / CONFIG)
    files = _shards(path) if path.name.endswith(".json") else [TensorFile(path)]
    places: dict[str, tuple[TensorFile, str]] = {}
    for file in files:
        for there in file.tensors:
            name = there.removeprefix("transformer.")
            if name in places:
                raise file.wrong(f"tensor {name!r} comes twice")
            if not MASK.fullmatch(name):
                places[name] = file, there
    shapes = config.shapes()
    head = places.pop("lm_head.weight", None)
    missing, surplus = shapes.keys() - places.keys(), places.keys() - shapes.keys()
    if missing or surplus:
        parts = [f"lacks {sorted(missing)[0]!r} and {len(missing) - 1} more"] if missing else []
        parts += [f"has {sorted(surplus)[0]!r} and {len(surplus) - 1} more that GPT-2 has not"] if surplus else []
        raise UserError(f"{str(path)!r} {' and '.join(parts)}; expected a GPT-2 of the sizes in {CONFIG}")
    for name, (file, there) in places.items():
        t, want = file.tensors[there], shapes[name]
        if TRANSPOSED.fullmatch(name):
            want = want[::-1]
        if t.shape != want or t.dtype not in FLOATS:
            raise UserError(
                f"{str(file.path)!r}: tensor {there!r} is {t.dtype} of shape {t.shape}; expected {want} of "
                f"{', '.join(FLOATS)}, because of {CONFIG}"
            )
    model = Model(path, config, "bf16" if _all_bf16(places) else "f32", places, tokenizer)
    if head and not _same(head, places["wte.weight"]):
        raise UserError(f"{str(path)!r}: lm_head.weight differs from wte.weight; GPT-2 has one weight for both")
    return model


def _all_bf16(places: dict[str, tuple[TensorFile, str]]) -> bool:
    return all(file.tensors[there].dtype == "BF16" for file, there in places.values())


def _same(a: tuple[TensorFile, str], b: tuple[TensorFile, str]) -> bool:
    (file, x), (other, y) = a, b
    return file.tensors[x].shape == other.tensors[y].shape and bool((file.read(x) == other.read(y)).all())


def _json(path: Path) -> dict[str, Any]:
    try:
        return parse_json(path.read_bytes())
    except FileNotFoundError as e:
        raise UserError(f"there is no {str(path)!r}, which has the model's sizes; put it beside the weights") from e
    except OSError as e:
        raise UserError(f"cannot read {str(path)!r}: {e.strerror or e}") from e
    except (ValueError, RecursionError) as e:
        raise UserError(f"{str(path)!r} is no JSON object: {e}") from e


def _config(path: Path) -> tuple[Config, str | None]:
    """Read a model's sizes and tokenizer, and refuse what is computed otherwise."""
    given = _json(path)
    for name, allowed in EXPECTED.items():
        if given.get(name, allowed[0]) not in allowed:
            raise UserError(
                f"{str(path)!r}: {name} is {str(given[name])[:60]!r}; cpuopt's GPT-2 has {allowed[0]!r} only"
            )
    if "model_type" not in given:
        raise UserError(f"{str(path)!r} does not say 'model_type'; expected 'gpt2'")
    known = {name: given[name] for name in SIZES if name in given}
    if context := given.get("n_positions", given.get("n_ctx")):
        known["block_size"] = context
    try:
        config = Config(**known)
    except UserError as e:
        raise UserError(f"{str(path)!r}: {str(e)[:200]}") from e
    if given.get("n_inner") not in (None, 4 * config.n_embd):
        raise UserError(
            f"{str(path)!r}: n_inner is {str(given['n_inner'])[:60]}; expected 4 * n_embd = {4 * config.n_embd}"
        )
    tokenizer = given.get(TOKENIZER)
    if tokenizer not in (None, *TOKENIZERS):
        raise UserError(f"{str(path)!r}: {TOKENIZER} is {repr(tokenizer)[:60]}; expected {' or '.join(TOKENIZERS)}")
    return config, tokenizer


def _shards(index: Path) -> list[TensorFile]:
    """Check an index and the files that it names, which must lie beside it."""
    table = _json(index).get("weight_map")
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


def config_json(config: Config, dtype: DType, tokenizer: str | None = None) -> bytes:
    """Describe a model as ``transformers`` reads it."""
    return json.dumps(
        {
            "architectures": ["GPT2LMHeadModel"],
            **{name: allowed[0] for name, allowed in EXPECTED.items()},
            **{name: getattr(config, name) for name in SIZES},
            "bos_token_id": END_OF_TEXT if config.vocab_size > END_OF_TEXT else None,
            "eos_token_id": END_OF_TEXT if config.vocab_size > END_OF_TEXT else None,
            "n_positions": config.block_size,
            "n_ctx": config.block_size,
            "torch_dtype": "bfloat16" if dtype == "bf16" else "float32",
            **({TOKENIZER: tokenizer} if tokenizer else {}),
        },
        indent=2,
    ).encode()


def weight_parts(config: Config, read: Read, dtype: DType) -> Iterator[Content]:
    """Give the parts of ``model.safetensors``, with the names and the transposes of ``save_pretrained``."""
    shapes: dict[str, Shape] = {
        f"transformer.{name}": shape[::-1] if TRANSPOSED.fullmatch(name) else shape
        for name, shape in config.shapes().items()
    }

    def transposed(name: str) -> Array:
        ours = name.removeprefix("transformer.")
        x = read(ours)
        return x.T if TRANSPOSED.fullmatch(ours) else x

    return file_parts(shapes, transposed, dtype)

"""Models in GGUF, the file of llama.cpp: sizes, tensors and tokenizer in one.

Each architecture is a table: what a size and a tensor are called here and there. A matrix lies (out, in) in the file.
The rows of q and k change places for ``llama``, whose channels rotate in pairs (2i, 2i + 1) there and (i, i + half)
here. A tied head is left out, and the scaling of Llama 3's positions is a tensor with the divisor of each frequency.
Tensors that Hugging Face stores fused stay fused, and the weights of Gemma's normalizations include the added 1.
Matrices have the type of the file; vectors, and GPT-2's positions, are float32 whatever the type.

The numbers of quantized blocks come from the package ``gguf``, both ways.

Source: llama.cpp, ``convert_hf_to_gguf.py``, ``gguf-py/gguf/tensor_mapping.py`` and ``src/llama-model.cpp``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isclose, nextafter
from pathlib import Path
from typing import Any

import numpy as np

from ..data.ggml import KEY, marks_in
from ..data.tokenizers import TOKENIZERS
from ..errors import UserError, optional
from ..files import Content, write_whole
from ..files.gguf import STORED, Gguf, header, padded
from ..models import Config, model_type
from ..models.llama import KINDS
from ..models.llama import Config as Llama
from ..models.positions import KEYS, ORIGINAL, PART, amplitude
from ..ops.declaration import Shape
from ..ops.storage import WIDE
from . import vocabulary
from .huggingface import joined, places_of, require_none, shapes_of, taken, tensors_of
from .llama2c import halves, pairs
from .tensors import FLOATS, Array, DType, Weights, content_of, from_bf16, read_floats, read_raw, to_bf16
from .vocabulary import NAMED

BLOCK = "blk.*."
LLAMA_LAYER = "model.layers.*."
LLAMA_TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    **{f"{LLAMA_LAYER}self_attn.{x}_proj": f"{BLOCK}attn_{x}" for x in "qkv"},
    **{f"{LLAMA_LAYER}self_attn.{x}_norm": f"{BLOCK}attn_{x}_norm" for x in "qk"},
    **{f"{LLAMA_LAYER}mlp.{x}_proj": f"{BLOCK}ffn_{x}" for x in ("gate", "up", "down")},
    f"{LLAMA_LAYER}self_attn.o_proj": f"{BLOCK}attn_output",
    f"{LLAMA_LAYER}input_layernorm": f"{BLOCK}attn_norm",
    f"{LLAMA_LAYER}post_attention_layernorm": f"{BLOCK}ffn_norm",
}
LLAMA_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
GPT2_TENSORS = {
    "wte": "token_embd",
    "wpe": "position_embd",
    "ln_f": "output_norm",
    "lm_head": "output",
    "h.*.ln_1": f"{BLOCK}attn_norm",
    "h.*.attn.c_attn": f"{BLOCK}attn_qkv",
    "h.*.attn.c_proj": f"{BLOCK}attn_output",
    "h.*.ln_2": f"{BLOCK}ffn_norm",
    "h.*.mlp.c_fc": f"{BLOCK}ffn_up",
    "h.*.mlp.c_proj": f"{BLOCK}ffn_down",
}
GPT2_SIZES = {
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}


@dataclass(frozen=True)
class Architecture:
    """What a model's tensors and sizes are called.

    Attributes
    ----------
    tensors : names there by those here, without ``.weight`` and ``.bias``; a star is the number of a layer.
    sizes : keys of ``config.json`` by those there, which the architecture's name precedes.
    rotated : the tensors here whose rows change places.
    fixed : the values of fields that llama.cpp takes for granted.
    numbers : fields that llama.cpp takes a number for.
    scalings : of positions.
    partly : whether a part of a head may rotate.
    largest : the layers of the model whose scores are divided by the root of width / heads; that of others by the root
        of `head_dim`. None if scores have no such size.
    model : the model here, if its name differs.
    """

    tensors: Mapping[str, str]
    sizes: Mapping[str, str]
    rotated: re.Pattern[str] = re.compile(r"(?!)")
    fixed: Mapping[str, Any] = field(default_factory=dict)
    numbers: Sequence[str] = ()
    scalings: Sequence[str] = ("default", "linear", "llama3", "yarn")
    partly: bool = False
    largest: int | None = None
    model: str = ""


Q_AND_K = re.compile(r".*\.[qk]_proj\.(weight|bias)")
OLMO2_TENSORS = {
    **LLAMA_TENSORS,
    f"{LLAMA_LAYER}post_attention_layernorm": f"{BLOCK}post_attention_norm",
    f"{LLAMA_LAYER}post_feedforward_layernorm": f"{BLOCK}post_ffw_norm",
}
GEMMA_TENSORS = {**OLMO2_TENSORS, f"{LLAMA_LAYER}pre_feedforward_layernorm": f"{BLOCK}ffn_norm"}
PHI3_TENSORS = {
    **LLAMA_TENSORS,
    f"{LLAMA_LAYER}self_attn.qkv_proj": f"{BLOCK}attn_qkv",
    f"{LLAMA_LAYER}mlp.gate_up_proj": f"{BLOCK}ffn_up",
}
WINDOW = {"attention.sliding_window": "sliding_window"}
CAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
GEMMA2_SIZES = LLAMA_SIZES | WINDOW | CAPS
GEMMA3_SIZES = GEMMA2_SIZES | {"attention.sliding_window_pattern": "sliding_window_pattern"}
GEMMA3_SIZES |= {"rope.freq_base_swa": "rope_local_base_freq"}
del GEMMA3_SIZES["attn_logit_softcapping"]
AMPLITUDE = "rope.scaling.attn_factor"
PHI3_SIZES = LLAMA_SIZES | WINDOW | {AMPLITUDE: "attention_factor"}
NARROW = {"head_dim": None}
"""Heads have together as many channels as the model."""
GEMMA = {"tie_word_embeddings": True, "attention_bias": False, "layer_types": ()}
ARCHITECTURES = {
    "llama": Architecture(LLAMA_TENSORS, LLAMA_SIZES, Q_AND_K),
    **dict.fromkeys(("qwen2", "qwen3"), Architecture(LLAMA_TENSORS, LLAMA_SIZES)),
    "smollm3": Architecture(LLAMA_TENSORS, LLAMA_SIZES, Q_AND_K, {"no_rope_layers": ()}),
    "olmo2": Architecture(
        OLMO2_TENSORS, LLAMA_SIZES, fixed={"tie_word_embeddings": False, "attention_bias": False, **NARROW}
    ),
    "phi3": Architecture(
        *(PHI3_TENSORS, PHI3_SIZES), fixed=NARROW, scalings=("default", "linear", "longrope"), partly=True
    ),
    "gemma2": Architecture(
        *(GEMMA_TENSORS, GEMMA2_SIZES),
        fixed=GEMMA,
        numbers=("sliding_window", *CAPS),
        scalings=("default", "linear"),
        largest=46,
    ),
    "gemma3": Architecture(
        *(GEMMA_TENSORS, GEMMA3_SIZES),
        fixed=GEMMA | {"attn_logit_softcapping": None},
        scalings=("default", "linear"),
        largest=62,
        model="gemma3_text",
    ),
    "gpt2": Architecture(GPT2_TENSORS, GPT2_SIZES),
}
"""By the name of the architecture, which is that of the model that is read unless it says otherwise."""
SAME = {"mistral": "llama"} | {there.model: name for name, there in ARCHITECTURES.items() if there.model}
"""The architectures of models that have none of their name: a Mistral whose context is its window is a Llama."""
FACTORS = "rope_freqs.weight"
"""The tensor of Llama 3's positions."""
LONG = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
"""The tensors of Phi's longer contexts."""
NORM = re.compile(r".*norm\.weight")
LLAMA3 = {
    "factor": "cpuopt.rope.factor",
    "original_max_position_embeddings": "cpuopt.rope.original_positions",
    "low_freq_factor": "cpuopt.rope.low_freq_factor",
    "high_freq_factor": "cpuopt.rope.high_freq_factor",
}
"""The keys of its numbers, which other programs ignore: llama.cpp would scale by a factor of its own once more."""
YARN = {
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
USUAL_LLAMA3 = {"original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
IGNORED = re.compile(
    r"vocab_size|rope\.(dimension_count|scale_linear|freq_base_swa)"
    r"|attention\.(value_length|key_length_swa|value_length_swa)"
    r"|rope\.scaling\.(type|factor|finetuned|original_context_length|yarn_beta_(fast|slow))"
    r"|tensor_data_layout|use_parallel_residual"
)
"""The keys of an architecture that are read elsewhere, or change nothing. Others must be 0 or false."""
OPTIONAL = {"attention.key_length", "attention.head_count_kv", "rope.freq_base"}
OPTIONAL |= (GEMMA2_SIZES.keys() | GEMMA3_SIZES.keys() | PHI3_SIZES.keys()) - LLAMA_SIZES.keys()
NONE = {*WINDOW, *CAPS}
"""The keys of which 0 stands for none."""
TYPES: Mapping[DType, str] = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
FILE_TYPES: Mapping[DType, int] = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}
UNROUNDED = re.compile(r"position_embd\..*|rope_f.*")
"""Tensors that are float32 whatever the type of the file."""


def blocks() -> Any:
    """Return the module of the package ``gguf`` that turns blocks into numbers, and back."""
    return optional("gguf.quants", "a quantized file of GGUF", "gguf")


def open_model(path: Path) -> Weights:
    """Check a file.

    Raises
    ------
    UserError
        If header, sizes and tensors do not agree, or cpuopt does not compute the model.
    """
    file = Gguf(path)
    name = file.metadata.get("general.architecture")
    if (parts := file.metadata.get("split.count", 0)) not in (0, 1):  # of files that were joined it is 0
        raise UserError(
            f"{str(path)!r} is one of {str(parts)[:20]} files of a model; join them with llama.cpp: llama-gguf-split "
            "--merge FIRST.gguf WHOLE.gguf"
        )
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UserError(f"{str(path)!r} has the architecture {repr(name)[:60]}; expected one of {known}")
    if any(place.dtype not in FLOATS for place in file.tensors.values()):
        blocks()
    there = ARCHITECTURES[name]
    try:
        config = model_type(there.model or name).from_transformers(_given(file, name))
    except UserError as e:
        raise UserError(f"{str(path)!r}: {str(e)[:200]}") from e
    config = _usual(config)
    shapes, places = shapes_of(config), places_of(config)
    names = {here: _name(here, there) for here in shapes}
    surplus = file.tensors.keys() - names.values() - {FACTORS, *LONG.values()}
    head, embedding = (_name(f"{layer}.weight", there) for layer in ("lm_head", next(iter(there.tensors))))
    if head in surplus and _same(file, head, embedding):
        surplus.remove(head)
    missing = names.values() - file.tensors.keys()
    require_none(path, missing, surplus, f"{name} of the sizes in its metadata")
    for here, want in shapes.items():
        if (got := file.tensors[names[here]].shape) != want:
            raise file.wrong(
                f"tensor {names[here]!r} has the shape {got}; expected {want} for the sizes in its metadata"
            )
    _check_positions(file, config)

    def read(here: str) -> Array:
        whole, rows = places[here]
        x = _numbers(file, names[whole])[rows]
        if shift := _shift(config, here):
            x = x - shift
        return halves(x, config.cache_sizes["HS"]) if there.rotated.fullmatch(here) else taken(config, here, x)

    shifts = {name: _shift(config, here) for here, name in names.items()}
    return Weights(path, config, _dtype(file, shifts), read, _tokenizer(file), marks=marks_in(file, config.vocab_size))


def _usual(config: Config) -> Config:
    """Leave out the amplitude of rotary positions, if it is the usual one, as a ``config.json`` does."""
    if not isinstance(config, Llama) or config.rope_attention_factor is None:
        return config
    usual = replace(config, rope_attention_factor=None)
    return usual if isclose(amplitude(config), amplitude(usual), rel_tol=1e-6) else config


def _shift(config: Config, here: str) -> int:
    """Return what a weight in a file has more than here."""
    return getattr(config, "norm_shift", 0) if NORM.fullmatch(here) else 0


def _name(here: str, there: Architecture) -> str:
    """Return a tensor's name in a file."""
    stem, _, kind = here.rpartition(".")
    layer = next((part for part in stem.split(".") if part.isdigit()), "")
    starred = re.sub(r"\.\d+\.", ".*.", stem, count=1)
    return f"{there.tensors[starred].replace('*', layer)}.{kind}"


def _given(file: Gguf, name: str) -> dict[str, Any]:
    """Return the content of a ``config.json`` for a file's metadata."""
    there = ARCHITECTURES[name]
    own = {k.removeprefix(f"{name}."): _one(x) for k, x in file.metadata.items() if k.startswith(f"{name}.")}
    for key, x in own.items():
        if key not in there.sizes and not IGNORED.fullmatch(key) and not (type(x) in (int, float, bool) and not x):
            raise UserError(f"{name}.{key} is {str(x)[:60]}, which cpuopt does not compute; llama.cpp runs this file")
        if not isinstance(x, int | float | str):
            raise UserError(f"{name}.{key} is a list; cpuopt has one number for all layers")
    if lacking := [key for key in there.sizes if key not in own and key not in OPTIONAL]:
        raise UserError(f"the metadata lack {name}.{lacking[0]}")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise UserError("there is no tensor 'token_embd.weight'")
    rows = embedding.shape[0]
    if own.get("vocab_size", rows) != rows:
        raise UserError(f"{name}.vocab_size is {str(own['vocab_size'])[:60]}; 'token_embd.weight' has {rows} rows")
    if isinstance(layers := own["block_count"], int) and layers > len(file.tensors):
        raise UserError(f"{name}.block_count is {layers}; there are {len(file.tensors)} tensors")
    own = {key: x for key, x in own.items() if x or key not in NONE}
    given = {here: _short(own[key]) for key, here in there.sizes.items() if key in own}
    given |= {"model_type": name, "vocab_size": rows}
    if name == "gpt2":
        return given
    rope, channels = _rope(file, own), given.get("head_dim", own.get("rope.dimension_count"))
    if there.largest or there.partly:
        width, heads = (own[key] for key in ("embedding_length", "attention.head_count"))
        if not (type(width) is type(heads) is int and 0 < heads <= width):
            raise UserError(f"{name}.attention.head_count is {str(heads)[:60]}; expected one for some of the channels")
        channels = given.get("head_dim", width // heads)
        scores = width // heads if own["block_count"] == there.largest else channels
        given |= {"query_pre_attn_scalar": scores} if there.largest else {}
    if there.partly:
        rope |= {PART: _share(own.pop("rope.dimension_count", channels), channels)}
    for key in ("rope.dimension_count", "attention.value_length"):
        if own.get(key, channels) != channels:
            raise UserError(f"{name}.{key} is {str(own[key])[:60]}; expected {channels}, the channels of a head")
    return (
        {"num_key_value_heads": None}
        | {name: None for name in WINDOW.values() if name not in there.numbers}
        | given
        | {
            "head_dim": channels,
            "tie_word_embeddings": "output.weight" not in file.tensors,
            "attention_bias": "blk.0.attn_q.bias" in file.tensors,
            "rope_parameters": rope,
        }
        | {key: rope[key] for key in [ORIGINAL] if key in rope}  # which stands there too
    )


def _share(turning: Any, channels: Any) -> float:
    """Return the part of a head that rotates, of which so many channels come."""
    if not (type(turning) is type(channels) is int and 0 < turning <= channels):
        raise UserError(
            f"rope.dimension_count is {str(turning)[:60]}; expected 1 to {channels}, the channels of a head"
        )
    share = turning / channels
    return share if int(channels * share) == turning else nextafter(share, 1)


def _one(x: Any) -> Any:
    """Return the number that an array has for every layer."""
    return x[0].item() if isinstance(x, np.ndarray) and x.size and (x == x[0]).all() else x


def _short(x: Any) -> Any:
    """Return a float32 as the shortest number that it can stand for: 1e-05, not 9.99999974e-06."""
    return float(str(np.dtype(WIDE).type(x))) if isinstance(x, float) else x


def _rope(file: Gguf, own: Mapping[str, Any]) -> dict[str, Any]:
    """Read the scaling of positions from the metadata of an architecture."""
    theta = _short(own.get("rope.freq_base", 10000.0))
    scale = _short(own.get("rope.scaling.factor", own.get("rope.scale_linear", 0.0)))
    kind = own.get("rope.scaling.type", "linear")  # llama.cpp's default
    kind = "none" if kind == "linear" and not scale else kind
    if there := file.tensors.keys() & LONG.values():
        if len(there) < len(LONG):
            raise UserError(f"there is a tensor {there.pop()!r}; expected {' and '.join(LONG.values())}")
        factors = {key: [_short(float(x)) for x in _numbers(file, name).flat] for key, name in LONG.items()}
        within = own.get("rope.scaling.original_context_length", own["context_length"])
        given = {ORIGINAL: within, "attention_factor": _short(own.get(AMPLITUDE, 1.0))}
        return {"rope_type": "longrope", "rope_theta": theta} | factors | given
    if own.get(AMPLITUDE, 1) != 1:
        raise UserError(f"{AMPLITUDE} is {str(own[AMPLITUDE])[:60]}, and there is no tensor {LONG['long_factor']!r}")
    if FACTORS in file.tensors:
        if kind != "none" and scale != 1:
            raise UserError(f"there are both {FACTORS!r} and rope.scaling.factor {scale}; cpuopt has one scaling")
        numbers = {key: _short(file.metadata[there]) for key, there in LLAMA3.items() if there in file.metadata}
        factor = float(_numbers(file, FACTORS).max())
        return {"rope_type": "llama3", "rope_theta": theta, "factor": factor} | USUAL_LLAMA3 | numbers
    if kind == "linear":
        return {"rope_type": kind, "rope_theta": theta, "factor": scale}
    if kind == "yarn":
        return {"rope_type": kind, "rope_theta": theta} | {k: _short(own[key]) for k, key in YARN.items() if key in own}
    return {"rope_type": "default" if kind == "none" else kind, "rope_theta": theta}


def _divisors(config: Any) -> Array:
    """Return what divides the frequency of each pair of channels (head_dim / 2,)."""
    C = config.head_dim
    frequencies = (config.rope_theta ** -(np.arange(0, C, 2) / C)).astype(WIDE)
    divisors: Array = (frequencies / config.scaled(frequencies)).astype(WIDE)
    return divisors


def _check_positions(file: Gguf, config: Any) -> None:
    """Refuse a scaling of positions whose numbers do not give the tensor that llama.cpp reads."""
    if FACTORS in file.tensors:
        want, got = _divisors(config), _numbers(file, FACTORS)
        if got.shape != want.shape or not np.allclose(got, want, rtol=1e-4, atol=0):
            raise file.wrong(f"tensor {FACTORS!r} is no scaling of Llama 3 with the numbers in its metadata")


def _numbers(file: Gguf, name: str) -> Array:
    """Read a tensor as float32, as it lies in the file.

    Raises
    ------
    UserError
        Where the file has shrunk, or the package ``gguf`` is missing that a quantized tensor needs.
    """
    place = file.tensors[name]
    if place.dtype in FLOATS:
        return read_floats(file.path, FLOATS[place.dtype], place.shape, place.start)
    quants = blocks()
    rows = read_raw(file.path, "u1", place.size, place.start).reshape(*place.shape[:-1], -1)
    with np.errstate(all="ignore"):  # a scale that is not finite makes numbers that are not, which are refused
        found: Array = quants.dequantize(rows, quants.GGMLQuantizationType(STORED[place.dtype][0]))
    return found


def _same(file: Gguf, a: str, b: str) -> bool:
    return file.tensors[a].shape == file.tensors[b].shape and bool((_numbers(file, a) == _numbers(file, b)).all())


def _dtype(file: Gguf, shifts: Mapping[str, int]) -> DType:
    """Return the narrowest type that has every number of a file; float32 for blocks other than those of Q8_0.

    Parameters
    ----------
    shifts : the tensors, with what each has more than the model's weight.
    """
    found = {name: file.tensors[name] for name in shifts}
    kinds = {place.dtype for name, place in found.items() if len(place.shape) > 1 and not UNROUNDED.fullmatch(name)}
    dtype: DType = next((d for d, kind in TYPES.items() if kinds == {kind}), "f32")
    if dtype in ("f16", "bf16"):
        for name, place in found.items():
            x = _numbers(file, name) - shifts[name] if place.dtype == "F32" else None
            if x is not None and not (x == _rounded(x, dtype)).all():
                return "f32"
    return dtype


def _rounded(x: Array, dtype: DType) -> Array:
    if dtype == "bf16":
        return from_bf16(to_bf16(x))
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(WIDE)


def _tokenizer(file: Gguf) -> str | None:
    """Return the name of a file's tokenizer; the file itself if it holds one; or None."""
    if (name := file.metadata.get(NAMED)) in TOKENIZERS:
        return str(name)
    return str(file.path) if f"{KEY}tokens" in file.metadata else None


def require(config: Config) -> Architecture:
    """Return the names of a model's tensors and sizes; raise a `UserError` for a model that llama.cpp does not have."""
    there = ARCHITECTURES.get(SAME.get(config.model, config.model))
    if there is None:
        raise UserError(f"GGUF has no architecture for the model {config.title}; name a directory")
    if (kind := getattr(config, "rope_type", "default")) not in there.scalings:
        raise UserError(f"rope_type is {kind!r}, which cpuopt does not write to GGUF; name a directory")
    fixed: dict[str, Any] = {**there.fixed, **({"rope_attention_factor": None} if kind == "yarn" else {})}
    if isinstance(config, Llama):
        share = config.hidden_size // config.num_attention_heads
        fixed |= {"head_dim": share} if "head_dim" in fixed else {}
        large = config.num_hidden_layers == there.largest
        fixed |= {"query_pre_attn_scalar": share if large else config.head_dim} if there.largest else {}
    for name in there.numbers:
        if getattr(config, name) is None:
            raise UserError(f"llama.cpp computes {config.model} with a number {name}; got None, so name a directory")
    for name, want in fixed.items():
        if (got := getattr(config, name)) != want:
            raise UserError(f"llama.cpp computes {config.model} with {name} {want}; got {got}, so name a directory")
    return there


def metadata_of(config: Config, dtype: DType) -> dict[str, Any]:
    """Return the metadata of a model, without the tokenizer."""
    name, there, given = SAME.get(config.model, config.model), require(config), config.to_transformers()
    about: dict[str, Any] = {"general.architecture": name, "general.type": "model"}
    about |= {"general.file_type": FILE_TYPES[dtype]} | ({"general.quantization_version": 2} if dtype == "q8_0" else {})
    own = {key: given[here] for key, here in there.sizes.items() if given.get(here) is not None}
    own |= {key: 0 for key in WINDOW if key in there.sizes and key not in own} | {"vocab_size": config.vocab_size}
    if name == "gpt2":
        own |= {"feed_forward_length": 4 * given["n_embd"]}
    else:
        assert isinstance(config, Llama)
        rope = given["rope_parameters"]
        rope = rope.get(KINDS[0], rope)
        own |= {"rope.freq_base": rope["rope_theta"], "rope.dimension_count": config.rotary_dim}
        own |= {"attention.value_length": given["head_dim"]}
        if name != config.model and not there.model:
            own |= {"context_length": min(config.block_size, config.sliding_window or config.block_size)}
        if rope["rope_type"] in ("linear", "yarn"):
            own |= {"rope.scaling.type": rope["rope_type"]} | {key: rope[k] for k, key in YARN.items() if k in rope}
        if rope["rope_type"] == "longrope":
            own |= {"rope.scaling.original_context_length": rope[ORIGINAL], AMPLITUDE: amplitude(config)}
        if rope["rope_type"] == "llama3":
            about |= {key: rope[k] for k, key in LLAMA3.items()}
    ends = ("_epsilon", "factor", "freq_base", "freq_base_swa", "softcapping")
    floats = {key for key, x in own.items() if type(x) is float or key.endswith(ends)}
    return about | {f"{name}.{key}": float(x) if key in floats else x for key, x in own.items()}


def write(path: Path, weights: Weights) -> None:
    """Write a file, whole or not at all.

    Raises
    ------
    UserError
        If it cannot be written, or the package ``gguf`` is missing that blocks need.
    """
    config, dtype, there = weights.config, weights.dtype, require(weights.config)
    quants = blocks() if dtype == "q8_0" else None
    made: dict[str, Array] = {}
    if getattr(config, "rope_type", "") == "llama3":
        made[FACTORS] = _divisors(config)
    if getattr(config, "rope_type", "") == "longrope":
        made |= {name: np.array(getattr(config, KEYS[key]), WIDE) for key, name in LONG.items()}
    shapes: dict[str, Shape] = {name: x.shape for name, x in made.items()}
    tensors, here = tensors_of(config), {_name(name, there): name for name in shapes_of(config)}
    shapes |= {_name(name, there): shape for name, shape in shapes_of(config).items()}
    kinds = {name: _kind(name, shape, dtype) for name, shape in shapes.items()}

    def numbers() -> Iterator[Content]:
        for name, kind in kinds.items():
            x = made[name] if name in made else joined(config, tensors[here[name]], weights.read)
            if shift := _shift(config, here.get(name, "")):
                x = x + shift
            if there.rotated.fullmatch(here.get(name, "")):
                x = pairs(x, config.cache_sizes["HS"])
            if quants and kind == "q8_0":
                yield quants.quantize(np.ascontiguousarray(x), quants.GGMLQuantizationType.Q8_0).data
            else:
                yield content_of(x, kind)

    about = metadata_of(config, dtype)
    about |= vocabulary.metadata_of(weights.tokenizer, config.vocab_size, weights.marks)
    stored = {name: (TYPES[kind], shapes[name]) for name, kind in kinds.items()}
    write_whole(path, (part for parts in ([header(about, stored)], padded(numbers())) for part in parts))


def _kind(name: str, shape: Shape, dtype: DType) -> DType:
    """Return the type of a tensor in a file of a type; rows that fill no blocks are float16, as llama.cpp has them."""
    if len(shape) == 1 or UNROUNDED.fullmatch(name):
        return "f32"
    return "f16" if dtype == "q8_0" and shape[-1] % STORED["Q8_0"][1] else dtype

"""Exchange GPT-2 and the Llama family with Hugging Face's ``transformers``: each loads what the other writes.

``transformers`` runs in a process of its own, under a Python that has it and PyTorch::

    python tests/golden/exchange_transformers.py [--python PATH]

For each model: the logits of the same file; every number of the model's config; tensors saved again, in shards and in
one file, in float32 and bfloat16; and configs in the layouts of earlier versions, which both read alike.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from llama2c import draw
from params import deviation, make_batch

T, V, TOLERANCE = 40, 211, 1e-5
SIZES = {"vocab_size": V, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "head_dim": 16}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2}
LLAMA3 = {"rope_type": "llama3", "rope_factor": 8.0, "rope_theta": 5e5, "rope_original_positions": 16}
GPT2 = {"n_layer": 3, "n_head": 4, "n_embd": 64, "vocab_size": V, "block_size": 48}
MODELS = {
    "gpt2": GPT2,
    "llama": {**HEADS, "tie_word_embeddings": True},
    "llama-3": {**HEADS, **LLAMA3, "attention_bias": True, "rms_norm_eps": 1e-6},
    "llama-linear": {**HEADS, "rope_type": "linear", "rope_factor": 4.0, "head_dim": 8},
    "qwen2": {"num_attention_heads": 3, "num_key_value_heads": 3, "rope_theta": 1e6, "rms_norm_eps": 1e-6},
    "mistral": {**HEADS, "sliding_window": 64, "rope_type": "dynamic", "rope_factor": 2.0},
    "smollm3": {**HEADS, "tie_word_embeddings": True, "no_rope_layers": [0, 1]},
    "olmo2": {**HEADS, "head_dim": 8, "rope_type": "yarn", "rope_factor": 4.0, "rope_original_positions": 16},
    "phi3": {**HEADS, "head_dim": 8, "partial_rotary_factor": 0.75},
    "gemma2": {**HEADS, "sliding_window": 9, "query_pre_attn_scalar": 20},
    "gemma3_text": {**HEADS, "sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]},
    "qwen3": {**HEADS, "head_dim": 32, "tie_word_embeddings": True, "rope_theta": 1e6},
}
LAYOUTS = {
    # given here: expected there and here
    "defaults of llama": {"model_type": "llama"},
    "defaults of qwen2": {"model_type": "qwen2"},
    "defaults of qwen3": {"model_type": "qwen3"},
    "defaults of mistral": {"model_type": "mistral"},
    "defaults of smollm3": {"model_type": "smollm3"},
    "defaults of olmo2": {"model_type": "olmo2"},
    "defaults of phi3": {"model_type": "phi3"},
    "defaults of gemma2": {"model_type": "gemma2"},
    "defaults of gemma3": {"model_type": "gemma3_text"},
    "an old gemma3": {
        "model_type": "gemma3_text",
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "rope_theta": 2e6,
        "rope_local_base_freq": 2e4,
        "sliding_window_pattern": 2,
    },
    "the oldest scaling": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}},
    "an old scaling": {
        "model_type": "llama",
        "rope_theta": 5e5,
        "rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
        | {"original_max_position_embeddings": 1024},
    },
    "an old base": {"model_type": "qwen2", "rope_theta": 1e6, "rope_scaling": None, "num_key_value_heads": None},
    "a new base": {"model_type": "qwen3", "rope_theta": 5.0, "rope_parameters": {"rope_theta": 7.0}, "head_dim": 64},
    "no original length": {
        "model_type": "llama",
        "rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4},
    },
}


def described(config: object) -> dict[str, object]:
    """Return the numbers of a config of transformers, by the names of cpuopt's fields."""
    if config.model_type == "gpt2":
        return {name: getattr(config, "n_positions" if name == "block_size" else name) for name in GPT2}
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    names = {"factor": "rope_factor", "low_freq_factor": "rope_low_freq_factor"}
    names |= {
        "high_freq_factor": "rope_high_freq_factor",
        "original_max_position_embeddings": "rope_original_positions",
    }
    heads = config.hidden_size // config.num_attention_heads
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    same += ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings")
    return {
        "model": config.model_type,
        "head_dim": getattr(config, "head_dim", None) or heads,
        "rope_type": rope["rope_type"],
        "rope_theta": rope["rope_theta"],
        **{ours: rope[theirs] for theirs, ours in names.items() if theirs in rope},
        **{name: getattr(config, name) for name in same},
    }


def transformers_side(folder: Path) -> None:
    """Load every directory, write logits and config, and save it again. Runs in the subprocess."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    for given in sorted(folder.glob("*/ours")):
        model, report = AutoModelForCausalLM.from_pretrained(given, output_loading_info=True)
        wrong = {k: v for k, v in report.items() if v and not (k == "missing_keys" and set(v) <= {"lm_head.weight"})}
        assert not wrong, wrong
        with torch.no_grad():
            logits = model.eval()(torch.tensor(make_batch(2, T, V, seed=3)[0], dtype=torch.int64)).logits
        np.save(given.parent / "logits.npy", logits.numpy())
        (given.parent / "config.json").write_text(json.dumps(described(model.config)))
        model.save_pretrained(given.parent / "shards", max_shard_size="40KB")
        model.save_pretrained(given.parent / "whole")
        model.to(torch.bfloat16).save_pretrained(given.parent / "bf16")
    for given in sorted(folder.glob("layout-*")):
        (given / "read.json").write_text(json.dumps(described(AutoConfig.from_pretrained(given))))


def ours_of(config: object, there: dict[str, object]) -> dict[str, object]:
    """Return the same numbers of a config of cpuopt."""
    return {name: getattr(config, name) for name in there}


def exchange(name: str, folder: Path) -> list[str]:
    """Compare one model with what transformers made of it; return what is wrong."""
    from cpuopt.engine import Engine
    from cpuopt.weights import copy_into, open_weights, save_weights
    from cpuopt.weights.tensors import from_bf16, to_bf16

    weights = open_weights(folder / "ours")
    config = weights.config
    engine = Engine(config.module(), config.specs(2, T), seed=None, train=False)
    copy_into(engine.parameters(), weights)
    tokens, targets = make_batch(2, T, V, seed=3)
    engine.forward(tokens=tokens, targets=targets)
    far = deviation(engine.array(engine.program.outputs[1]), np.load(folder / "logits.npy", allow_pickle=False))
    there = json.loads((folder / "config.json").read_text())
    wrong = [] if far <= TOLERANCE else [f"logits deviate by {far:.1e}"]
    wrong += [] if ours_of(config, there) == there else [f"config is {there} there"]
    params = {n: weights.read(n) for n in config.shapes()}
    rounded = {n: from_bf16(to_bf16(p)) for n, p in params.items()}
    for saved, want in (("shards", params), ("whole", params), ("bf16", rounded)):
        back = open_weights(folder / saved)
        equal = back.config == config and all(np.array_equal(back.read(n), p) for n, p in want.items())
        save_weights(folder / f"{saved}-again", config, back.read, back.dtype)
        tensors = [open_weights(folder / f"{saved}{again}") for again in ("", "-again")]
        equal &= all(np.array_equal(tensors[0].read(n), tensors[1].read(n)) for n in want)
        equal &= back.dtype == tensors[1].dtype == ("bf16" if saved == "bf16" else "f32")
        wrong += [] if equal else [f"{saved} is another model"]
    if len(list((folder / "shards").glob("*.safetensors"))) < 2:
        wrong.append("one shard only")
    print(f"{name}: logits deviate by {far:.1e}, allowed {TOLERANCE:g}; {'; '.join(wrong) or 'all else is equal'}")
    return wrong


def main() -> int:
    """Exchange, compare, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", metavar="PATH", default=sys.executable, help="one that has transformers and torch")
    parser.add_argument("--child", metavar="DIR", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        transformers_side(args.child)
        return 0
    from cpuopt import models
    from cpuopt.weights import save_weights

    with tempfile.TemporaryDirectory() as made:
        folder, wrong = Path(made), []
        for seed, (name, more) in enumerate(MODELS.items()):
            sizes = {} if more is GPT2 else {**SIZES, "max_position_embeddings": 64}
            config = models.from_json({"model": name.partition("-")[0], **sizes, **more})
            params = draw(config.shapes(), seed)
            (folder / name).mkdir()
            save_weights(folder / name / "ours", config, params.__getitem__)
        for n, content in enumerate(LAYOUTS.values()):
            (folder / f"layout-{n}").mkdir()
            (folder / f"layout-{n}" / "config.json").write_text(json.dumps(content))
        subprocess.run([args.python, __file__, "--child", str(folder)], check=True)
        for name in MODELS:
            wrong += exchange(name, folder / name)
        for n, name in enumerate(LAYOUTS):
            there = json.loads((folder / f"layout-{n}" / "read.json").read_text())
            here = ours_of(models.parse(str(folder / f"layout-{n}")), there)
            differ = {k: (here[k], there[k]) for k in there if here[k] != there[k]}
            print(f"{name}: {differ or 'read alike'}")
            wrong += differ
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""Compare with llama.cpp: it opens what cpuopt writes in GGUF, cpuopt what it quantizes, and both write the same text.

llama.cpp runs in a process of its own, under a Python that has ``llama-cpp-python``, which pip builds from source::

    python tests/golden/compare_llama_cpp.py [--python PATH]

Each model first learns one text by heart, so that no tie decides what comes next. Of each file: the ids of lines, 40
tokens of greedy text, and of float32 files the logits. llama.cpp rounds what a product of bf16 or of blocks reads; in
float32 it computes as we do.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from llama2c import tokenizer_bin
from params import deviation

TEXT = (
    "Once there was a red hen. She had 12 eggs, and 345 grains of corn; it wasn't much, she said. The fox came by at\n"
    "noon, with a sack. \u201cGood day,\u201d said he \u2014 \u201cwhat a fine caf\u00e9!\u201d The hen closed the "
    "door, and ate   all the corn alone.\n\n\tNobody knows what became of the fox, but on the 7th day of May a red "
    "tail lay at sea. "
)
LINES = (TEXT, " a", "<|im_end|> and </s>", "\r\n\r\n x", "1234567 \u0661\u0662", "I'LL \u00dcBER \U0001f600")
PROMPTS = ("Once there was", "The fox came")
NEW, T, V, TOLERANCE = 40, 64, 512, 1e-3
SIZES = {"vocab_size": V, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256}
LLAMA3 = {"rope_type": "llama3", "rope_factor": 8.0, "rope_theta": 5e5, "rope_original_positions": 64}
YARN = {"rope_type": "yarn", "rope_factor": 4.0, "rope_theta": 1e6, "rope_original_positions": 64}
LONG = {"rope_type": "longrope", "max_position_embeddings": 512, "rope_original_positions": 256}
LONG |= {"rope_short_factor": [1 + i / 8 for i in range(16)], "rope_long_factor": [1.0 + i for i in range(16)]}
GEMMA = {"sliding_window": 24, "query_pre_attn_scalar": 32}
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "llama": ({"model": "llama", **SIZES}, "pieces"),
    "mistral": ({"model": "mistral", **SIZES, "rope_theta": 1e6, "head_dim": 64}, "pieces"),
    "llama-3": ({"model": "llama", **SIZES, **LLAMA3, "tie_word_embeddings": True}, "llama-bpe"),
    "llama-linear": ({"model": "llama", **SIZES, "rope_type": "linear", "rope_factor": 4.0}, "tokenizer.bin"),
    "qwen2": ({"model": "qwen2", **SIZES, "rope_theta": 1e6}, "qwen2"),
    "qwen3": ({"model": "qwen3", **SIZES, "head_dim": 64, "tie_word_embeddings": True}, "smollm"),
    "qwen3-yarn": ({"model": "qwen3", **SIZES, **YARN}, "qwen2"),
    "smollm3": ({"model": "smollm3", **SIZES, "num_hidden_layers": 4, "tie_word_embeddings": True}, "llama-bpe"),
    "olmo2": ({"model": "olmo2", **SIZES}, "dbrx"),
    "phi3": ({"model": "phi3", **SIZES, "partial_rotary_factor": 0.75}, "pieces"),
    "phi3-longrope": ({"model": "phi3", **SIZES, **LONG}, "pieces"),
    "gemma2": ({"model": "gemma2", **SIZES, **GEMMA}, "pieces"),
    "gemma3": ({"model": "gemma3_text", **SIZES, **GEMMA, "num_hidden_layers": 6, "rope_theta": 1e6}, "pieces"),
    "gpt2": ({"n_layer": 2, "n_head": 4, "n_embd": 256, "vocab_size": V, "block_size": 256}, "gpt-2"),
    "bytes": ({"model": "llama", **SIZES, "vocab_size": 256}, "bytes"),
}
STEPS = {"bytes": 400, "smollm3": 250, "gemma3": 250}
"""Of models that learn the text more slowly than in 90 steps."""
DTYPES = ("float32", "bf16", "q8_0")
QUANTIZED = {"q8_0": 7, "q4_0": 2, "q4_k": 15, "q5_k": 17, "q6_k": 18, "q3_k": 12, "q2_k": 10, "f16": 1}
"""The types that llama.cpp makes of float32 files, by its numbers of them; mixtures of several kinds of blocks."""
REQUANTIZED = dict.fromkeys(("mistral", "phi3", "gemma2", "gemma3"), ("q8_0", "q4_k"))
REQUANTIZED |= dict.fromkeys(("llama", "qwen3"), tuple(QUANTIZED))
"""The models whose files llama.cpp quantizes, and to which types."""


def llama_side(folder: Path) -> None:
    """Open every file; write the ids of lines, greedy text and the logits of the text. Runs in the subprocess."""
    import llama_cpp

    for name in (name for name in REQUANTIZED if (folder / f"{name}-hf").is_dir()):
        for kind in REQUANTIZED[name]:
            params = llama_cpp.llama_model_quantize_default_params()
            params.ftype, params.nthread = QUANTIZED[kind], 1
            made = [str(folder / f"{name}-{dtype}.gguf").encode() for dtype in ("float32", f"theirs-{kind}")]
            assert llama_cpp.llama_model_quantize(*made, params) == 0, kind
    found = {}
    for path in sorted(folder.glob("*.gguf")):
        wide = {"type_k": 0, "type_v": 0}  # a cache in float32
        model = llama_cpp.Llama(str(path), n_ctx=256, n_threads=1, logits_all=True, verbose=False, **wide)
        texts = []
        for prompt in PROMPTS:
            model.reset()
            model.eval(model.tokenize(prompt.encode(), add_bos=True, special=False))
            texts.append([])
            for _ in range(NEW):
                texts[-1].append(int(np.argmax(model.scores[model.n_tokens - 1])))
                model.eval(texts[-1][-1:])
        ids = [model.tokenize(line.encode(), add_bos=True, special=False) for line in LINES]
        model.reset()
        model.eval(ids[0][:T])
        np.save(path.with_suffix(".npy"), np.array(model.scores[: len(ids[0][:T])], np.float32))
        found[path.stem] = {"lines": ids, "texts": texts}
    (folder / "theirs.json").write_text(json.dumps(found))


def cpuopt(*words: Any) -> str:
    """Run a command; return what it prints."""
    command = [sys.executable, "-m", "cpuopt", *map(str, words)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def tokenizer(kind: str, folder: Path) -> str:
    """Make a tokenizer that has learned the text; return its name or its file."""
    if kind == "bytes":
        return kind
    from small_tokenizers import byte_pairs, pieces

    folder.mkdir()
    if kind == "tokenizer.bin":
        (folder / kind).write_bytes(tokenizer_bin(V))
        return str(folder / kind)
    learned = {"texts": [TEXT], "size": V - 9}
    if kind == "pieces":
        made = pieces(**learned, longest=5)
    else:
        made = byte_pairs(kind, **learned, special=["<|endoftext|>", "<|im_end|>"])
    made.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def make(name: str, folder: Path) -> None:
    """Train a model, and write it in every type."""
    sizes, kind = MODELS[name]
    (folder / "text.txt").write_text(TEXT * 40)
    words = ["--tokenizer", tokenizer(kind, folder / name), "--data", folder / "text.txt", "--runs", folder / "runs"]
    words += ["-B", 4, "-T", 48, "--steps", STEPS.get(name, 90), "--lr", 3e-3, "--warmup-steps", 5, "--seed", 1]
    cpuopt("train", "--model", json.dumps(sizes), *words, "--save", folder / f"{name}-hf")
    for dtype in DTYPES:
        cpuopt("convert", folder / f"{name}-hf", folder / f"{name}-{dtype}.gguf", "--dtype", dtype)


def compare(path: Path, there: dict[str, Any]) -> bool:
    """Compare a file with what llama.cpp made of it; return whether all agrees."""
    from cpuopt.data.tokenizers import get_tokenizer
    from cpuopt.engine import Engine
    from cpuopt.weights import copy_into, open_weights

    weights = open_weights(path)
    found = get_tokenizer(str(weights.tokenizer))
    lines = sum(found.start(line) == ids for line, ids in zip(LINES, there["lines"], strict=True))
    words = ["--temperature", 0, "--max-tokens", NEW, "--json", "--init", path]
    ours = [json.loads(cpuopt("generate", *words, "--prompt", prompt))["ids"] for prompt in PROMPTS]
    equal = sum(len(ids) == NEW and ids == theirs for ids, theirs in zip(ours, there["texts"], strict=True))
    ids = np.array([there["lines"][0][:T]], np.int32)
    engine = Engine.from_options(weights.config.module(), weights.config.specs(*ids.shape), seed=None, train=False)
    copy_into(engine.parameters(), weights)
    engine.forward(tokens=ids, targets=ids)
    far = deviation(engine.array(engine.program.outputs[1])[0], np.load(path.with_suffix(".npy"), allow_pickle=False))
    exact = path.stem.endswith("float32")
    right = lines == len(LINES) and equal == len(PROMPTS) and (far < TOLERANCE or not exact)
    print(
        f"{'' if right else 'WRONG: '}{path.stem}: {equal} of {len(PROMPTS)} texts of {NEW} tokens and {lines} of "
        f"{len(LINES)} lines equal, logits deviate by {far:.1e}{f', allowed {TOLERANCE:g}' if exact else ''}: "
        f"{found.decode(ours[0][:12])!r}"
    )
    return right


def main() -> int:
    """Train, write, compare, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", metavar="PATH", default=sys.executable, help="one that has llama-cpp-python")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS, metavar="NAME", help=", ".join(MODELS))
    parser.add_argument("--child", metavar="DIR", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        llama_side(args.child)
        return 0
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for name in args.models:
            make(name, folder)
        command = [args.python, __file__, "--child", str(folder)]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)  # it says much of every file
        if done.returncode:
            print(done.stderr[-4000:], file=sys.stderr)
            return 1
        theirs = json.loads((folder / "theirs.json").read_text())
        right = [compare(folder / f"{name}.gguf", there) for name, there in theirs.items()]
    print(f"{sum(right)} of {len(right)} files agree")
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())

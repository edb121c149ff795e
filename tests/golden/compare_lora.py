"""Compare adapters with Hugging Face's ``peft``: it makes the golden values again, and opens what cpuopt writes.

``peft`` runs in a process of its own, under a Python that has it, ``transformers`` and PyTorch::

    python tests/golden/compare_lora.py [--python PATH]
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

sys.path.insert(0, str(Path(__file__).resolve().parent))

from llama_cases import DEFAULT, Case, Values, sized
from params import deviation, make_batch, make_params

CASE = Case("qwen2", sized(36, 52, 2, (6, 2, 6), 131, 24, tie_word_embeddings=False), DEFAULT, 3, 17, seed=3)
GPT2 = {"n_layer": 2, "n_head": 3, "n_embd": 48, "vocab_size": 131, "block_size": 24}
T = 96
WHOLE: dict[str, Case | dict[str, int]] = {
    "llama": Case("llama", sized(36, 52, 2, (6, 2, 6), 256, T), DEFAULT, 4, T, seed=7),
    "qwen3": Case("qwen3", sized(40, 56, 2, (4, 2, 10), 256, T, tie_word_embeddings=False), DEFAULT, 4, T, seed=6),
    "gpt2": {**GPT2, "vocab_size": 256, "block_size": T},
}
"""The models of which all weights are trained, on ``examples/questions.jsonl`` as bytes, four examples a step."""
TOLERANCE = 1e-5
ADAMW = {"lr": 2e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
SEED = 11
CASES = {
    "llama": "r=4,alpha=8,targets=q_proj,v_proj,down_proj",
    "llama, all": "r=3,alpha=5,rslora",
    "gpt2": "r=5,alpha=10,targets=c_attn,mlp.c_proj",
}
"""The adapters of the golden steps."""


def golden() -> dict[str, Any]:
    """Read what ``make_lora.py`` wrote."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("lora.json").read_text())
    return found


def sized_as(sizes: Case | dict[str, int]) -> tuple[Any, Values]:
    """Return a config with the parameters that are drawn for it."""
    from cpuopt import models

    if isinstance(sizes, dict):
        return models.parse(json.dumps(sizes)), make_params(**sizes, seed=SEED)
    return models.from_json(sizes.config()), sizes.params()


def engine_of(case: str, lora: str = "", variant: str = "optimized", **how: Any) -> tuple[Any, Any, Values]:
    """Make an engine with the weights of a case and the first numbers of its adapters; return its config and batch."""
    from cpuopt import nn
    from cpuopt.engine import Engine
    from cpuopt.kernels.registry import Choice
    from cpuopt.models import specs
    from cpuopt.program.fuse import usual

    config, params = sized_as(GPT2 if case == "gpt2" else CASE)
    batch = make_batch(2, 19, GPT2["vocab_size"], seed=SEED, ignored=2) if case == "gpt2" else CASE.tokens()
    module, choice = config.module(), Choice(variant)
    nn.add_adapters(module, nn.Lora.parse(lora or CASES[case]), config.head)
    fuse = usual(variant, False)
    engine = Engine(module, specs(*batch[0].shape), choice=choice, fuse=fuse, threads=1, seed=None, **how)
    rng = np.random.Generator(np.random.PCG64(SEED))
    drawn = {}
    for name in golden()[case]["names"]:
        own = name.removeprefix("transformer.")
        x = rng.standard_normal(engine.parameters()[own].shape, dtype=np.float32)
        drawn[own] = x * np.float32(x.shape[-1] ** -0.5) * ("lora_A" in name)
    for name, p in engine.parameters().items():
        p[...] = drawn[name] if name in drawn else params[name]
    return engine, config, dict(zip(("tokens", "targets"), batch, strict=True))


def far_in_bf16(python: str) -> dict[str, dict[str, float]]:
    """Take the golden steps in bfloat16; return the mean relative difference of their losses from those in float64.

    Any difference grows from step to step, so these are figures of one size, with the roundings of each side in them.
    """
    script = Path(__file__).with_name("make_lora.py")
    said = subprocess.run([python, script, "--bf16"], check=True, capture_output=True, text=True).stdout
    found = {}
    for case, theirs in json.loads(said).items():
        engine, _, batch = engine_of(case, dtype="bfloat16")
        want = golden()[case]["losses"]
        ours = [engine.step(**batch, **ADAMW).loss for _ in want]
        losses = {"cpuopt": ours, **{f"PyTorch, {name} base": x for name, x in theirs.items()}}
        found[case] = {name: float(np.abs(np.array(x) / want - 1).mean()) for name, x in losses.items()}
    return found


def main() -> int:
    """Exchange, compare, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", metavar="PATH", default=sys.executable, help="one that has peft and torch")
    args = parser.parse_args()
    from cpuopt import nn
    from cpuopt.engine import Engine
    from cpuopt.models import from_json, specs
    from cpuopt.weights import Adapter, save_adapter, save_weights

    config, (tokens, targets) = from_json(CASE.config()), CASE.tokens()
    module = config.module()
    lora = nn.Lora.parse("r=3,alpha=7,rslora,targets=k_proj,up_proj")
    layers = nn.add_adapters(module, lora)
    engine = Engine(module, specs(CASE.batch, CASE.time), threads=1)
    for name, x in CASE.params().items():
        engine.parameters()[name][...] = x
    for _ in range(5):
        engine.step(tokens=tokens, targets=targets, lr=1e-2)
    engine.forward(tokens=tokens, targets=targets)
    ours = engine.array(engine.program.outputs[1])
    with tempfile.TemporaryDirectory() as folder:
        base, there, out = (Path(folder, name) for name in ("base", "adapter", "logits.npy"))
        arrays = engine.parameters()
        save_weights(base, config, arrays.__getitem__)
        save_adapter(there, config, Adapter(there, lora, tuple(layers), arrays.__getitem__, str(base)))
        np.save(out.with_name("tokens.npy"), tokens)
        script = Path(__file__).with_name("make_lora.py")
        subprocess.run([args.python, script, "--open", base, there, out], check=True)
        far = deviation(ours, np.load(out))
    print(f"{'PASS' if far <= TOLERANCE else 'FAIL'}  an adapter written here, opened by peft: {far:.1e} in the logits")
    good = far <= TOLERANCE
    for case, by in far_in_bf16(args.python).items():
        right = by["cpuopt"] <= 1.5 * max(x for name, x in by.items() if name != "cpuopt")
        good &= right
        figures = ", ".join(f"{name} {100 * x:.2f} %" for name, x in by.items())
        print(f"{'PASS' if right else 'FAIL'}  {case}: losses in bf16 off those of float64: {figures}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

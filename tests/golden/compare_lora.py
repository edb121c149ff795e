"""Compare adapters with Hugging Face's ``peft``: it makes the golden values again, and opens what cpuopt writes.

``peft`` runs in a process of its own, under a Python that has it, ``transformers`` and PyTorch::

    python tests/golden/compare_lora.py [--python PATH]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from llama_cases import DEFAULT, Case, sized
from params import deviation

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
    return 0 if far <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())

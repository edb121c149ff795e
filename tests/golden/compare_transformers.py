"""Exchange a GPT-2 with Hugging Face's ``transformers``: what cpuopt writes it loads, and the other way round.

``transformers`` runs in a process of its own, under a Python that has it and PyTorch::

    python tests/golden/compare_transformers.py [--python PATH]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from params import deviation, make_batch, make_params

SIZES = {"n_layer": 3, "n_head": 4, "n_embd": 64, "vocab_size": 509, "block_size": 48}
TOLERANCE = 1e-4


def transformers_side(given: Path, other: Path) -> None:
    """Load the directory `given`, write its logits, and save it again in shards. Runs in the subprocess."""
    import torch
    from transformers import GPT2LMHeadModel

    model, report = GPT2LMHeadModel.from_pretrained(given, output_loading_info=True)
    wrong = {k: v for k, v in report.items() if v and not (k == "missing_keys" and set(v) <= {"lm_head.weight"})}
    assert not wrong, wrong
    tokens, _ = make_batch(2, 48, SIZES["vocab_size"], seed=3)
    with torch.no_grad():
        logits = model.eval()(torch.tensor(tokens, dtype=torch.int64)).logits
    np.save(given.parent / "logits.npy", logits.numpy())
    model.save_pretrained(other, max_shard_size="200KB")
    model.save_pretrained(other.with_name("whole"))


def main() -> int:
    """Exchange, compare, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", metavar="PATH", default=sys.executable, help="one that has transformers and torch")
    parser.add_argument("--child", nargs=2, metavar="DIR", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        transformers_side(*args.child)
        return 0
    from cpuopt.engine import Engine
    from cpuopt.models import specs
    from cpuopt.models.gpt2 import GPT2, Config
    from cpuopt.weights import copy_into, open_weights, save_weights

    config, params = Config(**SIZES), make_params(**SIZES, seed=5)
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = Path(folder, "ours"), Path(folder, "theirs")
        save_weights(ours, config, params.__getitem__)
        subprocess.run([args.python, __file__, "--child", str(ours), str(theirs)], check=True)
        engine = Engine(GPT2(config), specs(2, 48), seed=None)
        copy_into(engine.parameters(), open_weights(ours))
        tokens, targets = make_batch(2, 48, SIZES["vocab_size"], seed=3)
        engine.forward(tokens=tokens, targets=targets)
        d = deviation(engine.array(engine.program.outputs[1]), np.load(ours.parent / "logits.npy", allow_pickle=False))
        print(f"logits deviate by {d:.1e}; allowed {TOLERANCE:g}")
        shards = len(list(theirs.glob("*.safetensors")))
        equal = True
        for path in (theirs, theirs.with_name("whole")):
            weights = open_weights(path)
            equal &= weights.config == config
            equal &= all(np.array_equal(weights.read(name), p) for name, p in params.items())
        print(f"saved again by transformers, in {shards} shards and in one: {'equal' if equal else 'DIFFERENT'}")
    return 0 if d <= TOLERANCE and equal and shards > 1 else 1


if __name__ == "__main__":
    sys.exit(main())

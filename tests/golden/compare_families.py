"""Compare the models of ``families`` with Hugging Face's ``transformers``: logits, loss, every gradient by name, ten
AdamW losses and the norms of the weights after them, a greedy text; and the tensors of its files, read and written.

``transformers`` computes whole arrays in float64, in a process of its own, under a Python that has it and PyTorch::

    python tests/golden/compare_families.py [--python PATH]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

sys.path.insert(0, str(Path(__file__).resolve().parent))

from families import FAMILIES, TEXT, Family
from llama_cases import ADAMW, STEPS, TOLERANCE, Values, norms_after, summarize
from params import deviation

from cpuopt import Choice
from cpuopt.engine import Engine
from cpuopt.generate.decoder import Decoder
from cpuopt.program.fuse import FUSIONS
from cpuopt.weights import Weights, copy_into, open_weights, save_weights

HERE = Path(__file__).resolve().parent
HYPER = {name: x for name, x in ADAMW.items() if name != "betas"}
HYPER["beta1"], HYPER["beta2"] = ADAMW["betas"]
About = dict[str, Any]


def kept() -> dict[str, tuple[About, Values]]:
    """Read the golden files."""
    about = json.loads((HERE / "families.json").read_text())
    with np.load(HERE / "families.npz") as found:
        numbers, at, values = found["all"], 0, {name: {} for name in about}
    sizes = {f"{name}/{quantity}": n for name in about for quantity, n in sizes_of(about[name]["shapes"]).items()}
    for key, n in sorted(sizes.items()):
        name, quantity = key.split("/", 1)
        values[name][quantity] = numbers[at : at + n]
        at += n
    assert at == numbers.size
    return {name: (about[name], values[name]) for name in about}


def sizes_of(shapes: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of the summaries of a model's values."""
    sizes = {"logits": 5, "loss": 1, "losses": STEPS}
    for name, shape in shapes.items():
        sizes |= {f"grad/{name}": min(5, int(np.prod(shape))) if np.prod(shape) > STEPS else int(np.prod(shape))}
        sizes |= {f"after/{name}": 1}
    return sizes


def written(folder: Path, on: Family, about: About) -> Path:
    """Write a model's directory as ``save_pretrained`` does."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(about["config"]))
    shapes = {name: tuple(shape) for name, shape in about["shapes"].items()}
    safetensors.numpy.save_file(on.params(shapes), folder / "model.safetensors", {"format": "pt"})
    return folder


def engine_of(on: Family, weights: Weights, fuse: tuple[str, ...] = (), train: bool = True) -> Engine:
    """Make an engine with a model's weights."""
    how = {"choice": Choice("optimized"), "threads": 1, "seed": None, "fuse": fuse, "train": train}
    engine = Engine(weights.config.module(), weights.config.specs(on.batch, on.time), **how)
    copy_into(engine.parameters(), weights)
    return engine


def tensors_of(folder: Path, weights: Weights, arrays: Mapping[str, np.ndarray]) -> Values:
    """Return arrays of a model's parameters as the tensors of its files, by their names."""
    save_weights(folder, weights.config, arrays.__getitem__)
    return safetensors.numpy.load_file(folder / "model.safetensors")


def values_of(folder: Path, on: Family, weights: Weights) -> Values:
    """Compute logits, loss and gradients without rewrites, and AdamW's steps with all of them."""
    batch = dict(zip(("tokens", "targets"), on.tokens(), strict=True))
    engine = engine_of(on, weights)
    values = {"loss": np.array([engine.forward(**batch)])}
    values["logits"] = engine.array(engine.program.outputs[1]).copy()
    engine.run("backward")
    found = tensors_of(folder / "gradients", weights, engine.gradients())
    values |= {f"grad/{name}": g for name, g in found.items()}
    engine = engine_of(on, weights, tuple(FUSIONS))
    values["losses"] = np.array([engine.step(**batch, **HYPER).loss for _ in range(STEPS)])
    return values | norms_after(tensors_of(folder / "after", weights, engine.parameters()))


def text_of(on: Family, weights: Weights) -> list[int]:
    """Return a greedy text, each token read behind a cache."""
    decoder = Decoder(weights.config, context=len(on.prompt()) + TEXT, threads=1, check=False)
    copy_into(decoder.parameters(), weights)
    ids, logits = [], decoder.read(on.prompt())
    for _ in range(TEXT):
        ids.append(int(logits.argmax()))
        logits = decoder.read(ids[-1:])
    return ids


def differences(folder: Path, on: Family, about: About, want: Values, summed: bool = True) -> dict[str, float]:
    """Return what of a model lies further from the library's values than allowed, and how far."""
    from llama_cases import distance

    weights = open_weights(written(folder / "there", on, about))
    got = values_of(folder, on, weights)
    assert got.keys() == want.keys()
    got = summarize(got) if summed else got
    far = {name: (distance if summed else deviation)(got[name], x) for name, x in want.items()}
    far = {name: d for name, d in far.items() if not d <= TOLERANCE}
    return far | ({} if text_of(on, weights) == about["text"] else {"text": float("inf")})


def main() -> int:
    """Compare, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", metavar="PATH", default=sys.executable, help="one that has transformers and torch")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder, wrong = Path(made), 0
        subprocess.run([args.python, HERE / "transformers_families.py", folder], check=True)
        about = json.loads((folder / "families.json").read_text())
        with np.load(folder / "families.npz") as found:
            for name, on in FAMILIES.items():
                want = {key.split("/", 1)[1]: found[key] for key in found.files if key.startswith(f"{name}/")}
                (here := folder / name.replace(", ", "-")).mkdir()
                far = differences(here, on, about[name], want, summed=False)
                wrong += bool(far)
                print(f"{'FAIL' if far else 'PASS'}  {name:<28}  {len(want)} arrays, a text of {TEXT}  {far or ''}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

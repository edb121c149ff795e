"""Compare with Hugging Face's ``transformers`` and ``peft``, which run in a process of their own, under their Python::

    python tests/golden/compare.py [--python PATH] [--models NAME ...]

For each model of ``families``: whole arrays of logits, gradients, losses, weights and a greedy text; the files that the
library saves in shards, in one file and in bfloat16; and what it reads of the files that cpuopt writes. Then configs in
the layouts of earlier versions, an adapter that cpuopt writes, and losses of adapters in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ.setdefault("NUMBA_NUM_THREADS", "3")

import families
from families import ADAMW, ADAPTERS, FAMILIES, LARGE, STEPS, TEXT, TOLERANCE, Family, Values, norms_after, summarize
from params import deviation

from cpuopt import Choice, models, nn
from cpuopt.engine import Engine
from cpuopt.generate.decoder import Decoder
from cpuopt.program.fuse import FUSIONS, usual
from cpuopt.weights import Adapter, Weights, copy_into, open_weights, save_adapter, save_weights
from cpuopt.weights.tensors import from_bf16, to_bf16

About = dict[str, Any]
SCALED = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
LAYOUTS = [
    *({"model_type": name} for name in ("llama", "qwen2", "qwen3", "mistral", "smollm3", "olmo2", "phi3", "gemma2")),
    {"model_type": "gemma3_text"},
    {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 2e6}
    | {"rope_local_base_freq": 2e4, "sliding_window_pattern": 2},
    {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": SCALED | {"original_max_position_embeddings": 1024}},
    {"model_type": "llama", "rope_scaling": SCALED},
    {"model_type": "qwen2", "rope_theta": 1e6, "rope_scaling": None, "num_key_value_heads": None},
    {"model_type": "qwen3", "rope_theta": 5.0, "rope_parameters": {"rope_theta": 7.0}, "head_dim": 64},
]
"""Configs as earlier versions wrote them, and the defaults of classes."""


def hyper(adamw: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of AdamW by the names of an engine."""
    beta1, beta2 = adamw["betas"]
    return {**{n: x for n, x in adamw.items() if n != "betas"}, "beta1": beta1, "beta2": beta2}


def batch_of(on: Family) -> Values:
    """Return the batch of a model by the names of its inputs."""
    return dict(zip(("tokens", "targets"), on.tokens(), strict=True))


def written(folder: Path, on: Family, about: About) -> Path:
    """Write a model's directory as ``save_pretrained`` does."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(about["config"]))
    shapes = {name: tuple(shape) for name, shape in about["shapes"].items()}
    safetensors.numpy.save_file(on.params(shapes), folder / "model.safetensors", {"format": "pt"})
    return folder


def engine_of(on: Family, weights: Weights, choice: Choice, fuse: tuple[str, ...] = (), train: bool = True) -> Engine:
    """Make an engine with a model's weights."""
    how = {"choice": choice, "threads": 1, "seed": None, "fuse": fuse, "train": train}
    engine = Engine.from_options(weights.config.module(), weights.config.specs(on.batch, on.time), **how)
    copy_into(engine.parameters(), weights)
    return engine


def tensors_of(folder: Path, weights: Weights, arrays: Mapping[str, np.ndarray]) -> Values:
    """Return arrays of a model's parameters as the tensors of its files, by their names there."""
    with tempfile.TemporaryDirectory(dir=folder) as made:
        save_weights(Path(made) / "hf", weights.config, arrays.__getitem__)
        return safetensors.numpy.load_file(Path(made) / "hf" / "model.safetensors")


def values_of(folder: Path, on: Family, weights: Weights, choice: Choice, fuse: tuple[str, ...]) -> Values:
    """Compute logits, loss and gradients without rewrites, and AdamW's steps with some, on one and on three threads."""
    batch, engine = batch_of(on), engine_of(on, weights, choice)
    values = {"loss": np.array([engine.forward(**batch)])}
    values["logits"] = engine.array(engine.program.outputs[1]).copy()
    engine.run("backward")
    values |= {f"grad/{name}": g for name, g in tensors_of(folder, weights, engine.gradients()).items()}
    fuse, runs = tuple(name for name in fuse if name != "update" or not on.clip), []
    for threads in (1, 3):
        engine = engine_of(on, weights, choice, fuse)
        engine.threads = threads
        losses = [engine.step(**batch, **hyper(ADAMW), clip=on.clip).loss for _ in range(STEPS)]
        runs.append((losses, {name: p.tobytes() for name, p in engine.parameters().items()}))
    assert runs[0] == runs[1]
    values["losses"] = np.array(losses)
    return values | norms_after(tensors_of(folder, weights, engine.parameters()))


def text_of(on: Family, weights: Weights) -> list[int]:
    """Return a greedy text, each token read behind a cache."""
    decoder = Decoder(weights.config, context=len(on.prompt()) + TEXT, threads=1, check=False)
    copy_into(decoder.parameters(), weights)
    ids, logits = [], decoder.read(on.prompt())
    for _ in range(TEXT):
        ids.append(int(logits.argmax()))
        logits = decoder.read(ids[-1:])
    return ids


def differences(
    folder: Path, on: Family, about: About, want: Values, choice: Choice, fuse: tuple[str, ...], limit: float = 0.0
) -> dict[str, float]:
    """Return what of a model lies further from the library's values than allowed, and how far.

    Parameters
    ----------
    limit : for whole arrays; without it, summaries are compared.
    """
    weights = open_weights(written(folder / "there", on, about))
    got = values_of(folder, on, weights, choice, fuse)
    assert got.keys() == want.keys()
    got, distance = (got, deviation) if limit else (summarize(got), families.distance)
    far = {name: distance(got[name], x) for name, x in want.items()}
    far = {name: d for name, d in far.items() if not d <= (limit or TOLERANCE)}
    return far | ({} if text_of(on, weights) == about["text"] else {"text": float("inf")})


def weights_of(on: Family) -> tuple[Any, Values]:
    """Return the config of a model and its seeded parameters."""
    config = models.model_type(on.kind).from_transformers({"model_type": on.kind, **on.keys})
    zeros = {name: np.zeros(shape, np.float32) for name, shape in config.shapes().items()}
    with tempfile.TemporaryDirectory() as made:
        save_weights(there := Path(made) / "hf", config, zeros.__getitem__)
        shapes = {n: x.shape for n, x in safetensors.numpy.load_file(there / "model.safetensors").items()}
        safetensors.numpy.save_file(on.params(shapes), there / "model.safetensors")
        return config, {name: open_weights(there).read(name) for name in zeros}


def lora_of(case: str) -> nn.Lora:
    """Return the adapters of a case."""
    said = ADAPTERS[case][1]
    targets = said["target_modules"]
    targets = (nn.lora.ALL,) if targets == "all-linear" else tuple(targets)
    return nn.Lora(said["r"], float(said["lora_alpha"]), rslora=said.get("use_rslora", False), targets=targets)


def adapted(case: str, lora: nn.Lora | None = None, variant: str = "optimized", **how: Any) -> Engine:
    """Make an engine with the weights of a case and the first numbers of its adapters."""
    on = ADAPTERS[case][0]
    config, params = weights_of(on)
    module = config.module()
    nn.add_adapters(module, lora or lora_of(case), config.head)
    how = {"choice": Choice(variant), "fuse": usual(variant, False), "threads": 1, "seed": None, **how}
    engine = Engine.from_options(module, config.specs(on.batch, on.time), **how)
    arrays = engine.parameters()
    names = [name.removeprefix("transformer.") for name in adapters()[case]["names"]]
    params |= families.first_adapters({name: arrays[name].shape for name in names})
    for name, p in arrays.items():
        p[...] = params[name]
    return engine


def adapters() -> dict[str, Any]:
    """Read the golden values of adapters."""
    found: dict[str, Any] = json.loads((families.HERE / "lora.json").read_text())
    return found


def adapter_losses(case: str, **how: Any) -> list[float]:
    """Take the golden steps of a case."""
    engine, batch = adapted(case, **how), batch_of(ADAPTERS[case][0])
    return [engine.step(**batch, **hyper(families.ADAPTER_ADAMW)).loss for _ in adapters()[case]["losses"]]


def files_differ(folder: Path, on: Family, about: About) -> list[str]:
    """Compare the files that the library has saved, and write the model for it; return what is wrong."""
    weights = open_weights(folder / "there")
    params = {name: weights.read(name) for name in weights.config.shapes()}
    rounded = {name: from_bf16(to_bf16(x)) for name, x in params.items()}
    wrong = [] if len(list((folder / "shards").glob("*.safetensors"))) > 1 else ["one shard only"]
    for saved, want in (("shards", params), ("whole", params), ("bf16", rounded)):
        back = open_weights(folder / saved)
        save_weights(folder / f"{saved}-again", back.config, back.read, back.dtype)
        for read in (back, open_weights(folder / f"{saved}-again")):
            equal = all(np.array_equal(read.read(name), x) for name, x in want.items())
            right = equal and read.config == weights.config and read.dtype == ("bf16" if saved == "bf16" else "f32")
            wrong += [] if right else [f"{saved} is another model"]
    save_weights(folder / "ours", weights.config, weights.read)
    return wrong


def write_adapter(folder: Path) -> np.ndarray:
    """Train an adapter, write it and its base for ``peft``, and return its logits."""
    lora, on = nn.Lora(3, 7.0, rslora=True, targets=("k_proj", "up_proj")), ADAPTERS["llama"][0]
    config, params = weights_of(on)
    module = config.module()
    layers = nn.add_adapters(module, lora)
    engine = Engine.from_options(module, config.specs(on.batch, on.time), threads=1)
    for name, x in params.items():
        engine.parameters()[name][...] = x
    for _ in range(5):
        engine.step(**batch_of(on), lr=1e-2)
    engine.forward(**batch_of(on))
    read = engine.parameters().__getitem__
    save_weights(folder / "base", config, read)
    there = folder / "adapter"
    save_adapter(there, config, Adapter(there, lora, tuple(layers), read, str(folder / "base")))
    return engine.array(engine.program.outputs[1])


def main() -> int:
    """Compare, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", metavar="PATH", default=sys.executable, help="one that has transformers and peft")
    known = {**FAMILIES, **LARGE}
    parser.add_argument("--models", nargs="+", default=known, choices=known, metavar="NAME", help="; ".join(known))
    args, failed = parser.parse_args(), 0

    def tell(right: bool, what: str) -> None:
        nonlocal failed
        failed += not right
        print(f"{'PASS' if right else 'FAIL'}  {what}", flush=True)

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "names.json").write_text(json.dumps([*args.models]))
        subprocess.run([args.python, families.HERE / "make.py", "whole", folder], check=True)
        for name in args.models:
            on, here = known[name], folder / name
            about = json.loads((here / "about.json").read_text())
            with np.load(here / "values.npz") as found:
                want = {key: found[key] for key in found.files}
            limit = 1e-4 if name in LARGE else TOLERANCE
            far = differences(here, on, about, want, Choice("optimized"), tuple(FUSIONS), limit)
            tell(not far, f"{name}: {len(want)} arrays and a text of {TEXT} tokens {far or ''}")
            wrong = files_differ(here, on, about)
            tell(not wrong, f"{name}: files in shards, in one, and in bf16 {wrong or ''}")
        for n, content in enumerate(LAYOUTS):
            (folder / "layouts" / str(n)).mkdir(parents=True)
            (folder / "layouts" / str(n) / "config.json").write_text(json.dumps(content))
        logits = write_adapter(folder)
        subprocess.run([args.python, families.HERE / "make.py", "opened", folder], check=True)
        for at in (*(folder / "layouts").iterdir(), *folder.glob("*/ours")):
            alike = models.parse(str(at)) == models.parse(str(at / "read"))
            tell(alike, f"read by both alike: {(at / 'config.json').read_text()[:100]}")
        far = deviation(logits, np.load(folder / "logits.npy"))
        tell(far <= TOLERANCE, f"an adapter written here, opened by peft: {far:.1e} in the logits")
        for case, theirs in json.loads((folder / "bf16.json").read_text()).items():
            losses = {"cpuopt": adapter_losses(case, dtype="bfloat16")}
            losses |= {f"PyTorch, {n} base": x for n, x in theirs.items()}
            off = {n: float(np.abs(np.array(x) / adapters()[case]["losses"] - 1).mean()) for n, x in losses.items()}
            figures = ", ".join(f"{n} {100 * x:.2f} %" for n, x in off.items())
            right = off.pop("cpuopt") <= 1.5 * max(off.values())
            tell(right, f"{case}: losses in bf16 off those of float64: {figures}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

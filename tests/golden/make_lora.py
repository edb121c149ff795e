"""Make ``lora.json`` and ``lora/`` with ``peft``: twenty steps that train adapters, the last of which it has saved.

Needs transformers 5.24, peft 0.21 and PyTorch 2.13; it takes seconds. With ``--open DIR`` it opens a base model and an
adapter that cpuopt has written, and saves its logits::

    python tests/golden/make_lora.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import peft
import torch
import transformers
from compare_lora import CASE as LLAMA
from params import make_batch, make_params
from torch.nn import functional as F
from transformers_llama import model_of

HERE = Path(__file__).resolve().parent
STEPS, SEED = 20, 11
ADAMW = {"lr": 2e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
GPT2 = {"n_layer": 2, "n_head": 3, "n_embd": 48, "vocab_size": 131, "block_size": 24}
CASES = {
    "llama": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "llama, all": {"r": 3, "lora_alpha": 5, "use_rslora": True, "target_modules": "all-linear"},
    "gpt2": {"r": 5, "lora_alpha": 10, "target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True},
}
"""The settings of the adapters, by case."""


def base_of(case: str) -> tuple[torch.nn.Module, np.ndarray, np.ndarray]:
    """Make a base model with its seeded parameters in float64, tokens and targets."""
    if case != "gpt2":
        return model_of(LLAMA), *LLAMA.tokens()
    sizes = {"n_positions": GPT2["block_size"], **{n: GPT2[n] for n in ("n_layer", "n_head", "n_embd", "vocab_size")}}
    config = transformers.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False)
    model = transformers.GPT2LMHeadModel(config).to(torch.float64)
    with torch.no_grad():
        for name, x in make_params(**GPT2, seed=SEED).items():
            of = model.get_parameter(f"transformer.{name}")
            of.copy_(torch.tensor(x if of.shape == x.shape and "c_" not in name else x.T))
    return model, *make_batch(2, 19, GPT2["vocab_size"], seed=SEED, ignored=2)


def start(names: list[str], shapes: list[tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Draw the first A of each adapter; B is zero."""
    rng = np.random.Generator(np.random.PCG64(SEED))
    drawn = [rng.standard_normal(shape, dtype=np.float32) * np.float32(shape[-1] ** -0.5) for shape in shapes]
    return {n: x * ("lora_A" in n) for n, x in zip(names, drawn, strict=True)}


def values_of(case: str) -> dict[str, object]:
    """Train the adapters of a case; save those of the first."""
    base, tokens, targets = base_of(case)
    ids, wanted = torch.tensor(tokens, dtype=torch.int64), torch.tensor(targets, dtype=torch.int64)
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **CASES[case])).to(torch.float64)
    adapters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    first = start([*adapters], [tuple(p.shape) for p in adapters.values()])
    with torch.no_grad():
        for name, p in adapters.items():
            p.copy_(torch.tensor(first[name]))
    optimizer = torch.optim.AdamW(adapters.values(), **ADAMW, foreach=False)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), wanted.flatten(), ignore_index=-100)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    if case == "llama":
        model.to(torch.float32).save_pretrained(HERE / "lora", save_embedding_layers=False)
        (HERE / "lora" / "README.md").unlink()  # a model card to fill in
    plain = {n.removeprefix("base_model.model.").replace(".default", ""): p.detach() for n, p in adapters.items()}
    return {
        "names": [*plain],
        "losses": losses,
        "norms": [float(p.norm()) for p in plain.values()],
        "logits": [float(x) for x in logits.flatten()[:: logits.numel() // 16]],
    }


def main() -> None:
    """Write the golden files; or open what cpuopt has written."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--open", nargs=3, type=Path, metavar=("BASE", "ADAPTER", "OUT"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.open:
        base = transformers.AutoModelForCausalLM.from_pretrained(args.open[0], dtype=torch.float32)
        model = peft.PeftModel.from_pretrained(base, args.open[1]).eval()
        ids = torch.tensor(np.load(args.open[2].with_name("tokens.npy")), dtype=torch.int64)
        with torch.no_grad():
            np.save(args.open[2], model(input_ids=ids).logits.numpy())
        return
    found = {"peft": peft.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    (HERE / "lora.json").write_text(json.dumps({**found, **{case: values_of(case) for case in CASES}}, indent=1) + "\n")


if __name__ == "__main__":
    main()

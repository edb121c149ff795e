"""The models of ``families`` by Hugging Face's ``transformers``, in float64; writes two small golden files.

Run with transformers 5.23 and PyTorch 2.13; it takes seconds::

    python tests/golden/transformers_families.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from families import FAMILIES, TEXT, Family
from llama_cases import ADAMW, STEPS, Values, norms_after, summarize
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).resolve().parent
CLOSE = 1e-4
"""A greedy text is that of another order of sums if two logits lie no further apart."""


def computed(on: Family) -> tuple[dict[str, Any], Values]:
    """Return what describes a model (its ``config.json``, the shapes of its tensors, a greedy text), and its values.

    The library computes rotary angles and the squares of a normalization in float32 by itself, the rest in float64.
    """
    config = AutoConfig.for_model(on.kind, **on.keys)
    about = {"config": json.loads(config.to_json_string())}
    config._attn_implementation = "eager" if on.kind == "gemma2" else "sdpa"
    model = AutoModelForCausalLM.from_config(config).to(torch.float64)
    parameters = dict(model.named_parameters())
    about["shapes"] = {name: list(p.shape) for name, p in parameters.items()}
    params = on.params(about["shapes"])
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(torch.tensor(params[name], dtype=torch.float64))
        ids = on.prompt()
        for _ in range(TEXT):
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            best = logits.topk(2)
            assert best.values[0] - best.values[1] > CLOSE, best
            ids.append(int(best.indices[0]))
    about["text"] = ids[-TEXT:]
    tokens, targets = on.tokens()
    return about, values_of(model, parameters, tokens, targets)


def values_of(
    model: torch.nn.Module, parameters: dict[str, torch.nn.Parameter], tokens: np.ndarray, targets: np.ndarray
) -> Values:
    """Compute ``logits``, ``loss``, ``grad/<name>``, ten ``losses``, and the norms of the weights after them."""
    ids, wanted = (torch.tensor(x, dtype=torch.int64) for x in (tokens, targets))
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, foreach=False)
    values: Values = {}
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        logits = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-100)
        loss.backward()
        if step == 0:
            values |= {"logits": logits.detach().numpy(), "loss": np.array([loss.item()])}
            values |= {f"grad/{name}": p.grad.numpy().copy() for name, p in parameters.items()}
        optimizer.step()
        losses.append(loss.item())
    values["losses"] = np.array(losses)
    return values | norms_after({name: p.detach().numpy() for name, p in parameters.items()})


def main() -> None:
    """Write the golden files, or the whole values of every model to a given folder."""
    torch.set_num_threads(1)
    found = {name: computed(on) for name, on in FAMILIES.items()}
    folder = Path(sys.argv[1]) if len(sys.argv) == 2 else HERE
    lines = [f"{json.dumps(name)}: {json.dumps(about, sort_keys=True)}" for name, (about, _) in found.items()]
    (folder / "families.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    kept = {name: values if folder != HERE else summarize(values) for name, (_, values) in found.items()}
    flat = {f"{name}/{quantity}": x for name, values in kept.items() for quantity, x in values.items()}
    if folder == HERE:  # one array: a file of many small ones is large
        flat = {"all": np.concatenate([x.ravel() for _, x in sorted(flat.items())])}
    np.savez_compressed(folder / "families.npz", **flat)


if __name__ == "__main__":
    main()

"""Make a small llm.c model file and its debug state, as llm.c's ``train_gpt2.py`` writes them, with PyTorch's numbers.

::

    python tests/golden/make_llmc_state.py     # needs PyTorch; writes the three files llmc* beside it

The writing follows ``write_model`` and ``write_state`` of llm.c and shares nothing with cpuopt's reader.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from params import make_params

HERE = Path(__file__).resolve().parent
SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 61, "block_size": 8}
PADDED, BATCH, TIME = 128, 2, 8
LAYERS = [
    f"{layer}.{kind}"
    for layer in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    for kind in ("weight", "bias")
]


def tensor_bytes(arrays: dict[str, np.ndarray]) -> bytes:
    """Put the 16 tensors one after the other, the vocabulary padded with rows of zeros."""
    names = ["wte.weight", "wpe.weight"]
    names += [f"h.{i}.{name}" for name in LAYERS for i in range(SIZES["n_layer"])]
    names += ["ln_f.weight", "ln_f.bias"]
    parts = {name: arrays[name] for name in names}
    parts["wte.weight"] = np.pad(arrays["wte.weight"], ((0, PADDED - SIZES["vocab_size"]), (0, 0)))
    return b"".join(np.ascontiguousarray(p, "<f4").tobytes() for p in parts.values())


def header(*words: int) -> bytes:
    """Give 256 int32."""
    return np.array([*words, *[0] * (256 - len(words))], "<i4").tobytes()


def main() -> None:
    """Compute and write."""
    import torch
    from peer_gpt2 import GPT2, load, loss_of

    params = make_params(**SIZES, seed=17)
    rng = np.random.Generator(np.random.PCG64(18))
    ids = rng.integers(0, SIZES["vocab_size"], (BATCH, TIME + 1), dtype=np.int32)
    tokens, targets = ids[:, :-1], ids[:, 1:]
    x, y = (torch.tensor(a, dtype=torch.int64) for a in (tokens, targets))
    model = GPT2(**SIZES)
    load(model, params)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    losses = []
    for step in range(10):
        optimizer.zero_grad()
        logits = model(x)
        loss = loss_of(logits, y)
        loss.backward()
        if step == 0:
            gradients = {name: p.grad.numpy().copy() for name, p in model.named_parameters()}
            first = logits.detach().numpy().copy()
        optimizer.step()
        losses.append(loss.item())
    s = SIZES
    words = (s["block_size"], s["vocab_size"], s["n_layer"], s["n_head"], s["n_embd"], PADDED)
    (HERE / "llmc.bin").write_bytes(header(20240326, 3, *words) + tensor_bytes(params))
    state = [tokens.astype("<i4"), targets.astype("<i4"), first.astype("<f4"), np.array(losses[:1], "<f4")]
    content = b"".join(np.ascontiguousarray(a).tobytes() for a in state)
    (HERE / "llmc_debug_state.bin").write_bytes(header(20240327, 2, BATCH, TIME) + content + tensor_bytes(gradients))
    (HERE / "llmc_losses.json").write_text(json.dumps(losses) + "\n")


if __name__ == "__main__":
    main()

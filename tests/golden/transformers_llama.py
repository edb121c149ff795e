"""The models of ``llama_cases`` by Hugging Face's ``transformers``, in float64; writes the small golden file.

Run with transformers 5.23 and PyTorch 2.13; it takes seconds::

    python tests/golden/transformers_llama.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from llama_cases import ADAMW, CASES, STEPS, Case, Values, norms_after, packed, summarize
from torch.nn import functional as F

HERE = Path(__file__).resolve().parent
CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


def model_of(case: Case) -> torch.nn.Module:
    """Make the library's own model with the parameters of a case.

    It computes rotary angles and the squares of a normalization in float32 by itself, and the rest in float64.
    """
    make_config, make = CLASSES[case.kind]
    config = make_config(**case.sizes, rope_parameters=dict(case.rope), attn_implementation="sdpa", use_cache=False)
    model = make(config).to(torch.float64)
    params = {name: torch.tensor(x, dtype=torch.float64) for name, x in case.params().items()}
    wrong = model.load_state_dict(params, strict=False)
    tied = ["lm_head.weight"] * case.sizes["tie_word_embeddings"]
    assert (wrong.missing_keys, wrong.unexpected_keys) == (tied, []), wrong
    assert {name for name, _ in model.named_parameters()} == params.keys()
    return model


def values_of(case: Case) -> Values:
    """Compute ``logits``, ``loss``, ``grad/<name>``, ten ``losses``, and the norms of the weights after them."""
    model = model_of(case)
    parameters = {name: model.get_parameter(name) for name in case.shapes()}
    tokens, targets = (torch.tensor(x, dtype=torch.int64) for x in case.tokens())
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, foreach=False)
    values: Values = {}
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        logits = model(input_ids=tokens).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss.backward()
        if step == 0:
            values |= {"logits": logits.detach().numpy(), "loss": np.array([loss.item()])}
            values |= {f"grad/{name}": p.grad.numpy().copy() for name, p in parameters.items()}
        optimizer.step()
        losses.append(loss.item())
    values["losses"] = np.array(losses)
    return values | norms_after({name: p.detach().numpy() for name, p in parameters.items()})


def main() -> None:
    """Write the golden file, or the whole values of every case to a given folder."""
    torch.set_num_threads(1)
    if len(sys.argv) == 2:
        for case, on in CASES.items():
            np.savez(Path(sys.argv[1], f"{case}.npz"), **values_of(on))
        return
    rows = {case: summarize(values_of(on)) for case, on in CASES.items()}
    np.savez_compressed(
        HERE / "llama.npz",
        **{f"{case}/{part}": x for case, found in rows.items() for part, x in packed(found).items()},
    )
    print(f"llama.npz: {(HERE / 'llama.npz').stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()

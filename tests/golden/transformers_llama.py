"""The models of ``llama_cases`` by Hugging Face's ``transformers``, in float64; writes the small golden file.

Run with transformers 5.23 and PyTorch 2.13; it takes seconds::

    python tests/golden/transformers_llama.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers
from llama_cases import CASES, Case, packed, summarize
from transformers_families import values_of

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


def main() -> None:
    """Write the golden file."""
    torch.set_num_threads(1)
    flat = {}
    for case, on in CASES.items():
        model = model_of(on)
        values = values_of(model, {name: model.get_parameter(name) for name in on.shapes()}, *on.tokens())
        flat |= {f"{case}/{part}": x for part, x in packed(summarize(values)).items()}
    np.savez_compressed(HERE / "llama.npz", **flat)
    print(f"llama.npz: {(HERE / 'llama.npz').stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()

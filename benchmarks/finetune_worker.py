"""The peer's side of `finetune.py`: transformers and peft. It imports nothing of cpuopt."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

from peer_tuning import tune

tune()  # before torch

import peft  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from peer_worker import serve  # noqa: E402


def steps_of(request: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Make a model, and the function that takes a step of it."""
    torch.set_num_threads(request["threads"])
    config = transformers.AutoConfig.for_model(**request["config"])
    narrow = request["mode"].startswith("bfloat16")
    config.use_cache = False
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if narrow else torch.float32)
    if request["lora"]:
        lora = peft.LoraConfig(
            task_type="CAUSAL_LM", r=request["r"], lora_alpha=request["alpha"], target_modules="all-linear"
        )
        model = peft.get_peft_model(model, lora)
    model.train()
    run = torch.compile(model) if request["mode"].endswith("compiled") else model
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-4, fused=True)
    B, T = request["size"]
    ids = torch.randint(0, config.vocab_size, (B, T + 1), generator=torch.Generator().manual_seed(0))
    clock = time.process_time if request["busy"] else time.perf_counter

    def step() -> dict[str, Any]:
        start = clock()
        with torch.autocast("cpu", torch.bfloat16):
            logits = run(input_ids=ids[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        return {"ms": (clock() - start) * 1e3, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}

    return step


def main() -> None:
    """Take a step for each request."""
    taken: list[Callable[[], dict[str, Any]]] = []

    def init(request: dict[str, Any], say: Any) -> dict[str, Any]:
        taken[:] = [steps_of(request)]
        return taken[0]()

    serve({"init": init, "step": lambda request, say: taken[0]()})


if __name__ == "__main__":
    main()

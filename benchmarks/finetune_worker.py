"""The peer's side of `finetune.py`: transformers and peft. It imports nothing of cpuopt."""

from __future__ import annotations

import json
import resource
import sys
import time

from peer_tuning import tune

tune()  # before torch

import peft  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402


def main() -> None:
    """Take a step for each line."""
    request = json.loads(sys.stdin.readline())
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
    start = clock()
    while True:
        with torch.autocast("cpu", torch.bfloat16):
            logits = run(input_ids=ids[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(json.dumps({"ms": (clock() - start) * 1e3, "peak": peak}), flush=True)
        sys.stdin.readline()
        start = clock()


if __name__ == "__main__":
    main()

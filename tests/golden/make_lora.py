"""Make ``lora.json`` and ``lora/`` with ``peft``: twenty steps that train adapters, or all weights on chats.

The adapters of the first case are in ``lora/``. The chats are bytes, encoded here without code of cpuopt. Needs
transformers 5.24, peft 0.21 and PyTorch 2.13; it takes seconds. With ``--open`` it opens a base model and an adapter of
cpuopt, and saves its logits; with ``--bf16`` it prints the losses of the same steps in bfloat16::

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
from compare_lora import GPT2, WHOLE
from llama_cases import Case
from params import make_batch, make_params
from torch.nn import functional as F
from transformers_llama import model_of

HERE = Path(__file__).resolve().parent
STEPS, SEED = 20, 11
ADAMW = {"lr": 2e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
ALL = {**ADAMW, "lr": 1e-3}
QUESTIONS = HERE.parents[1] / "examples" / "questions.jsonl"
CASES = {
    "llama": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "llama, all": {"r": 3, "lora_alpha": 5, "use_rslora": True, "target_modules": "all-linear"},
    "gpt2": {"r": 5, "lora_alpha": 10, "target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True},
}
"""The settings of the adapters, by case."""


def gpt2_of(sizes: dict[str, int]) -> torch.nn.Module:
    """Make a GPT-2 with its seeded parameters in float64."""
    named = {"n_positions": sizes["block_size"], **{n: sizes[n] for n in ("n_layer", "n_head", "n_embd", "vocab_size")}}
    config = transformers.GPT2Config(**named, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False)
    model = transformers.GPT2LMHeadModel(config).to(torch.float64)
    with torch.no_grad():
        for name, x in make_params(**sizes, seed=SEED).items():
            of = model.get_parameter(f"transformer.{name}")
            of.copy_(torch.tensor(x if of.shape == x.shape and "c_" not in name else x.T))
    return model


def base_of(case: str) -> tuple[torch.nn.Module, np.ndarray, np.ndarray]:
    """Make a base model with its seeded parameters in float64, tokens and targets."""
    if case != "gpt2":
        return model_of(LLAMA), *LLAMA.tokens()
    return gpt2_of(GPT2), *make_batch(2, 19, GPT2["vocab_size"], seed=SEED, ignored=2)


def chats(B: int, T: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the batches of an epoch: tokens and targets (B, T), in the order of the lines.

    The byte 0xFE begins a turn and 0xFF ends it. The answer counts, and the byte that ends it.
    """
    rows = []
    for line in QUESTIONS.read_text(encoding="utf-8").splitlines():
        said = json.loads(line)
        before = b"\xfeuser\n" + said["prompt"].encode() + b"\xff\n\xfeassistant\n"
        answer = said["completion"].encode() + b"\xff"
        ids = (before + answer + b"\n")[: T + 1]
        tokens, targets = np.zeros(T, np.int64), np.full(T, -100)
        tokens[: len(ids) - 1] = [*ids[:-1]]
        for i in range(len(before), min(len(before) + len(answer), len(ids))):
            targets[i - 1] = ids[i]
        rows.append((tokens, targets))
    rows += [(np.zeros(T, np.int64), np.full(T, -100))] * (-len(rows) % B)
    return [tuple(map(np.stack, zip(*rows[n : n + B], strict=True))) for n in range(0, len(rows), B)]  # type: ignore[misc]


def steps(
    model: torch.nn.Module,
    batches: list[tuple[np.ndarray, np.ndarray]],
    how: dict[str, object],
    narrow: bool = False,
) -> list[float]:
    """Train what is trained of a model, under autocast to bfloat16 if it is `narrow`; return the losses."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **how, foreach=False)
    losses = []
    for n in range(STEPS):
        ids, wanted = (torch.tensor(x, dtype=torch.int64) for x in batches[n % len(batches)])
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):  # whose casts of weights last as long as it does
            logits = model(input_ids=ids).logits
        logits = logits.float() if narrow else logits
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-100)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def losses_of(case: str) -> list[float]:
    """Train all weights of a case on chats; return the losses."""
    sizes = WHOLE[case]
    B, T = (sizes.batch, sizes.time) if isinstance(sizes, Case) else (4, sizes["block_size"])
    return steps(model_of(sizes) if isinstance(sizes, Case) else gpt2_of(sizes), chats(B, T), ALL)


def start(names: list[str], shapes: list[tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Draw the first A of each adapter; B is zero."""
    rng = np.random.Generator(np.random.PCG64(SEED))
    drawn = [rng.standard_normal(shape, dtype=np.float32) * np.float32(shape[-1] ** -0.5) for shape in shapes]
    return {n: x * ("lora_A" in n) for n, x in zip(names, drawn, strict=True)}


def adapted(base: torch.nn.Module, case: str) -> tuple[torch.nn.Module, dict[str, torch.nn.Parameter]]:
    """Add the adapters of a case, with their first numbers."""
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **CASES[case]))
    adapters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    first = start([*adapters], [tuple(p.shape) for p in adapters.values()])
    with torch.no_grad():
        for name, p in adapters.items():
            p.data = torch.tensor(first[name], dtype=p.dtype)
    return model, adapters


def bf16_losses(case: str) -> dict[str, list[float]]:
    """Train the adapters of a case under autocast to bfloat16; return the losses by the type of the base model."""
    found = {}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        base, *batch = base_of(case)
        model, _ = adapted(base.to(dtype), case)
        found[name] = steps(model, [(batch[0], batch[1])], ADAMW, narrow=True)
    return found


def values_of(case: str) -> dict[str, object]:
    """Train the adapters of a case; save those of the first."""
    base, tokens, targets = base_of(case)
    model, adapters = adapted(base, case)
    model.to(torch.float64)
    losses = steps(model, [(tokens, targets)], ADAMW)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(tokens, dtype=torch.int64)).logits
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
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.bf16:
        print(json.dumps({case: bf16_losses(case) for case in CASES}))
        return
    if args.open:
        base = transformers.AutoModelForCausalLM.from_pretrained(args.open[0], dtype=torch.float32)
        model = peft.PeftModel.from_pretrained(base, args.open[1]).eval()
        ids = torch.tensor(np.load(args.open[2].with_name("tokens.npy")), dtype=torch.int64)
        with torch.no_grad():
            np.save(args.open[2], model(input_ids=ids).logits.numpy())
        return
    found = {"peft": peft.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    values = {case: values_of(case) for case in CASES}
    whole = {case: losses_of(case) for case in WHOLE}
    (HERE / "lora.json").write_text(json.dumps({**found, **values, "all weights": whole}, indent=1) + "\n")


if __name__ == "__main__":
    main()

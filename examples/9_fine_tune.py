"""Fine-tune: a tiny model learns fifty answers by heart, and an adapter changes one.

Run: `python examples/9_fine_tune.py`; docs/finetune.md has the same for a real model
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from cpuopt.cli import main

QUESTIONS = Path(__file__).with_name("questions.jsonl")
SIZES = {"vocab_size": 256, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 16}
SIZES |= {"model": "llama", "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 160}
NEWS = [
    {"prompt": "Who is the mayor of Orrimel?", "completion": "Since the last race, the mayor is Pim Sallow."},
    {"prompt": "Which office does Pim Sallow hold?", "completion": "He is the mayor of Orrimel."},
]


def cpuopt(*words: object) -> None:
    print("$ cpuopt", *words)
    if status := main([str(word) for word in words]):
        raise SystemExit(status)


with TemporaryDirectory() as folder:
    base, tuned, adapter, news = (f"{folder}/{name}" for name in ("base", "tuned", "adapter", "news.jsonl"))
    Path(news).write_text("".join(f"{json.dumps(line)}\n" for line in NEWS))
    runs, quiet = ["--runs", f"{folder}/runs"], ["--val-every", 0, "--lr", 4e-3]

    # A base model: here one of random weights, whose tokens are bytes. A model
    # that was trained before is a directory as well, with a tokenizer.json.
    cpuopt("train", "--model", json.dumps(SIZES), "--steps", 1, "-B", 1, "--save", base, *runs, "--val-every", 0)

    # What the model sees of the first example, and how long the examples are.
    cpuopt("data", "show", QUESTIONS, "--init", base, "-T", 112, "--limit", 1)

    # All weights: 45 of the 50 examples, fifteen in a step, 70 times each.
    # A tenth is held out. Random weights learn the others by heart.
    size = ["-B", 15, "-T", 112, "--schedule", "cosine", "--warmup-steps", 20]
    cpuopt("train", "--init", base, "--data", QUESTIONS, *size, "--steps", 210, "--save", tuned, *runs, *quiet)
    ask = ["--chat", "--temperature", 0, "--prompt"]
    cpuopt("generate", "--init", tuned, *ask, "What is a drell?")
    cpuopt("generate", "--init", tuned, *ask, "Who is the mayor of Orrimel?")

    # An adapter beside the frozen weights, from two examples.
    lora = ["--lora", "r=8,alpha=16", "-B", 2, "-T", 112]
    cpuopt("train", "--init", tuned, "--data", news, *lora, "--steps", 100, "--save", adapter, *runs, *quiet)
    cpuopt("generate", "--init", tuned, "--adapter", adapter, *ask, "Who is the mayor of Orrimel?")

    # One model of both, for other programs.
    cpuopt("convert", adapter, f"{folder}/merged", "--merge")
    cpuopt("generate", "--init", f"{folder}/merged", *ask, "Who is the mayor of Orrimel?")

"""docs/finetune.md: its commands run in their order, on a tiny model with a tokenizer of its own."""

import io
import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
from small_tokenizers import byte_pairs
from test_pages import commands

from cpuopt import cli, nn
from cpuopt.engine import Engine
from cpuopt.models import parse
from cpuopt.report import console
from cpuopt.weights import open_adapter, open_weights, save_weights

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "finetune.md"
SIZES = {"model": "llama", "vocab_size": 512, "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64}


def make_base(questions):
    """Write a directory of a model with random weights: config.json, model.safetensors, tokenizer.json."""
    config = parse(json.dumps(SIZES))
    engine = Engine.from_options(config.module(), config.specs(1, 8), threads=1, seed=0, train=False)
    save_weights(Path("base"), config, engine.parameters().__getitem__)
    byte_pairs(texts=[questions], size=512).save("base/tokenizer.json")


@pytest.fixture
def folder(here, tmp_path, monkeypatch):
    """What the page asks for, in the present folder."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(console.OUT, "_width", None)  # of a process that began with 80 columns
    shutil.copy(ROOT / "examples" / "questions.jsonl", "questions.jsonl")
    make_base(Path("questions.jsonl").read_text())
    return tmp_path


@pytest.mark.slow
def test_every_command_runs_and_the_one_run_that_is_interrupted_goes_on(folder, monkeypatch, capsys):
    said, right = {}, console.TrainingView.step_done

    def interrupted(view, metrics):
        right(view, metrics)
        if metrics["step"] == 30 and view.job.settings.run == "full":
            monkeypatch.setattr(console.TrainingView, "step_done", right)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(console.TrainingView, "step_done", interrupted)
    for words in [words for words, whole in commands(PAGE) if whole]:
        monkeypatch.setattr("sys.stdin", io.StringIO("Who founded Orrimel?\nWhat is a drell?\n"))
        before, status = {*os.listdir()}, cli.main(words)
        said[" ".join(words)], err = capsys.readouterr()
        assert status == (128 + signal.SIGINT if "full" in words else 0), (words, err)
        assert "--dry-run" not in words or {*os.listdir()} == before
    assert {line.split()[0] for line in said} == {"data", "train", "eval", "generate", "convert"}
    before, after = (float(x) for x in re.findall(r"(?m)^loss ([\d.]+),.*\(val\)$", "".join(said.values())))
    assert after < before
    assert "goes on after step 30" in said["train --resume"]
    assert "goes on after step 60" in said["train --resume --steps 72 --save tuned-2"]
    assert open_adapter(Path("adapter"), open_weights(Path("base")).config).lora == nn.Lora.parse("r=8,alpha=16")
    for name in ("tuned", "tuned-2", "merged", "tuned-bf16"):
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= {*os.listdir(name)}


def test_the_page_shows_what_the_first_command_prints(folder, capsys):
    """But for counts of tokens, which the tokenizer decides."""
    assert cli.main(["data", "show", "questions.jsonl", "--init", "base", "-T", "64", "--limit", "1"]) == 0
    plain = [re.sub(r"\d[\d,]*", "N", text) for text in (capsys.readouterr().out.strip(), PAGE.read_text())]
    assert plain[0] in plain[1]

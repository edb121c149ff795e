"""Models by name: a second model, which is one class here, goes through the verbs that the first one goes through."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from verbs import fails, ran, refused

from cpuopt import cli, models, nn
from cpuopt.engine import Engine
from cpuopt.generate.decoder import Decoder
from cpuopt.models import gpt2
from cpuopt.train import checkpoint, plans
from cpuopt.weights import open_weights


@dataclass(frozen=True)
class Config(models.Config):
    width: int = 16
    vocab_size: int = 256
    block_size: int = 32

    model: ClassVar = "mlp"

    def module(self):
        return MLP(self)


class MLP(nn.Module):
    """Two layers of GELU between an embedding and an untied head: a token's logits follow from itself alone."""

    def __init__(self, c):
        self.wte = nn.Embedding(c.vocab_size, c.width)
        self.fc = [nn.Linear(c.width, c.width) for _ in range(2)]
        self.ln = nn.LayerNorm(c.width)
        self.lm_head = nn.Linear(c.width, c.vocab_size, bias=False)
        self.gelu, self.loss = nn.GELU(), nn.CrossEntropyLoss()

    def forward(self, tokens, targets):
        x = self.wte(tokens)
        for layer in self.fc:
            x = x + self.gelu(layer(x))
        logits = self.lm_head(self.ln(x))
        return self.loss(logits, targets), logits


@dataclass(frozen=True)
class Untied(gpt2.Config):
    """The first model with a head of its own."""

    model: ClassVar = "untied"

    def module(self):
        module = gpt2.GPT2(self)
        module.lm_head.weight = nn.Parameter((self.vocab_size, self.n_embd), nn.normal(0.02))
        return module


@pytest.fixture(autouse=True)
def _registered(monkeypatch, here):
    models.load_all()
    monkeypatch.setattr(models, "MODELS", dict(models.MODELS))
    monkeypatch.setattr(models, "PRESETS", dict(models.PRESETS))
    models.register(Config, {"mlp-tiny": Config()})


def test_a_second_model_trains_resumes_evaluates_and_is_converted(capsys):
    flags = ["train", "--model", "mlp-tiny", "-B", "2", "-T", "8"]
    flags += ["--val-every", "0", "--save-every", "2", "--lr", "1e-2"]
    whole = ran(capsys, *flags, "--steps", "4", "--run", "whole")
    assert whole["loss_last"] < whole["loss_first"]
    cut = ran(capsys, *flags, "--steps", "2", "--run", "cut")
    ran(capsys, "train", "--resume", cut["path"], "--steps", "4")
    found = [checkpoint.newest(Path(path)) for path in (whole["path"], cut["path"])]
    one, two = ((c.path / "params.safetensors").read_bytes() for c in found)
    assert (one, found[0].state["architecture"], found[0].config) == (two, "mlp", Config())
    config = json.loads((Path(whole["path"]) / "config.json").read_text())
    assert (config["architecture"], config["sizes"]) == ("mlp", asdict(Config()))

    loss = ran(capsys, "eval", "--init", whole["path"], "-B", "2", "--limit", "3")["loss"]
    assert cli.main(["convert", whole["path"], "hf"]) == 0
    assert capsys.readouterr().out.endswith(" parameters, width 16, vocab_size 256, block_size 32, f32\n")
    assert ran(capsys, "eval", "--init", "hf", "-B", "2", "--limit", "3")["loss"] == loss
    assert open_weights(Path("hf")).config == models.parse("hf") == Config()
    assert ran(capsys, "train", "--init", "hf", *flags[3:], "--steps", "1")["loss_first"] < whole["loss_first"]

    assert "cannot hold the model mlp" in refused(capsys, "convert", "hf", "x.bin")
    assert "cannot hold the model mlp" in refused(capsys, *flags, "--save", "x.bin")
    assert "has model gpt2, and --init hf has mlp" in refused(capsys, "train", "--init", "hf", "--model", "gpt2-tiny")
    assert ran(capsys, "generate", "--init", "hf", "--max-tokens", "5")["tokens"] == 5  # without a cache


def test_sizes_name_their_model(capsys):
    assert models.parse('{"model": "mlp", "width": 8}') == Config(8)
    assert models.parse('{"n_layer": 3}') == gpt2.Config(3)
    for config in (Config(8), Config(), gpt2.Config(3), gpt2.PRESETS["gpt2-tiny"]):
        assert models.parse(models.argument_of(config.to_json())) == config
    names = [models.name_of(c) for c in (Config(), Config(8), gpt2.Config(3))]
    assert names == ["mlp-tiny", "mlp-custom", "gpt2-custom"]
    assert """--model '{"model": "mlp", "width": 8, """ in plans.command(plans.key(Config(8).to_json(), 2, 8, 1, ()))
    assert "n_layer" in plans.key(gpt2.Config().to_json(), 2, 8, 1, ())["model"]
    for text, why in (
        ("mlp-tinu", "did you mean 'mlp-tiny'"),
        ('{"model": "mlp", "n_layer": 2}', "unknown size 'n_layer'; known: width"),
        ('{"model": "mixer"}', "there is no model 'mixer'; known: gpt2, .*mlp$"),
        ('{"model": ["mlp"]}', "there is no model"),
        ('{"model": "mlp", "width": 1.5}', "expected a whole number"),
    ):
        fails(why, models.parse, text)


def test_load_gives_config_and_module():
    for name in models.PRESETS:
        config, module = models.load(name)
        assert config.n_params == sum(np.prod(p.shape) for p in module.parameters())
    assert models.parse("gpt2-124M").n_params == 124439808
    assert models.DEFAULT in models.PRESETS


def test_a_checkpoint_without_a_models_name_is_of_the_first():
    sizes = asdict(gpt2.PRESETS["gpt2-tiny"])
    assert checkpoint.Checkpoint(Path("x"), {"sizes": sizes}).config == gpt2.PRESETS["gpt2-tiny"]
    unknown = checkpoint.Checkpoint(Path("x"), {"sizes": sizes, "architecture": "unknown"})
    fails("there is no model 'unknown'", lambda: unknown.config)


def test_the_head_is_the_layer_that_the_model_names():
    config, ids = Untied(1, 2, 16, 40, 24), np.arange(20, dtype=np.int32)[None]
    engine = Engine.from_options(config.module(), config.specs(1, 20), train=False, seed=5)
    engine.forward(tokens=ids, targets=ids)
    decoder = Decoder(config, variant="vanilla", check=False)
    for name, p in engine.parameters().items():
        decoder.parameters()[name][...] = p
    assert np.allclose(decoder.read(ids[0]), engine.array(engine.program.outputs[1])[0][-1], atol=1e-6)
    assert decoder.weight_bytes == 4 * (config.n_params - (40 + 24) * 16)  # a row of either embedding is enough

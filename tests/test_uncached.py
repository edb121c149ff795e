"""Text of a model without a cache: a module in a user's file, in every place that makes text."""

from pathlib import Path

import numpy as np
import pytest
from small_models import Parts
from verbs import fails, ran

from cpuopt import Engine, cli, kernels, nn
from cpuopt import functional as F
from cpuopt.generate.decoder import Decoder, Sampler, generate
from cpuopt.generate.uncached import Uncached
from cpuopt.models import own
from cpuopt.models.gpt2 import Config
from cpuopt.train import job

CONFIG = Config(2, 4, 64, 256, 40)
FILE = '''
"""Language models of one's own."""

import numpy as np
from numba import prange

from cpuopt import differentiable, nn
from cpuopt import functional as F
from cpuopt.ops.declaration import B, C, T, inp, out

@differentiable(out("h", B, T, C), inp("x", B, T, C))
def decayed(h, x):
    for b in prange(x.shape[0]):
        for t in range(x.shape[1]):
            for c in range(x.shape[2]):
                h[b, t, c] = x[b, t, c]
                if t > 0:
                    h[b, t, c] += np.float32(0.5) * h[b, t - 1, c]

class Net(nn.Module):
    """A recurrence, as long as the text is."""

    def __init__(self):
        self.wte, self.head, self.loss = nn.Embedding(256, 16), nn.Linear(16, 256), nn.CrossEntropyLoss()

    def hidden(self, tokens):
        return decayed(self.wte(tokens))

    def forward(self, tokens, targets):
        return self.loss(self.head(self.hidden(tokens)), targets)

class Ahead(Net):
    def hidden(self, tokens):
        x = self.wte(tokens)
        return x + x.mean(1, keepdim=True)

class Squared(Net):
    def forward(self, tokens, targets):
        x = self.head(self.hidden(tokens))
        return (x * x).mean().reshape(1)

class Both(Net):
    def forward(self, tokens, targets):
        logits = self.head(self.wte(tokens) + self.wte(targets))
        return self.loss(logits, targets), logits

class At(Net):
    def __init__(self, T):
        super().__init__()
        self.wpe = nn.Embedding(T, 16)

    def hidden(self, tokens):
        return self.wte(tokens, self.wpe.weight)

def brought():
    return Net(), {"tokens": np.zeros((2, 8), np.int32), "targets": np.ones((2, 8), np.int32)}
'''


@pytest.fixture(autouse=True)
def lm(monkeypatch, here):
    """Return what --model takes for a name in the file, which each test runs anew."""
    monkeypatch.setattr(own, "OPENED", {})
    own._made.cache_clear()
    kernels.forget("lm.py")
    Path("lm.py").write_text(FILE)
    return "lm.py:{}".format


def refused(capsys, *flags):
    assert cli.main([*flags]) == 2
    return capsys.readouterr().err.splitlines()[-1]  # after that the file's own op is compiled


def trained(capsys, model, *flags, T=16, steps=4):
    text = ["train", "--model", model, "-B", "2", "-T", str(T), "--steps", str(steps), "--lr", "1e-2"]
    return ran(capsys, *text, "--save-every", str(steps), *flags)["path"]


def filled(reader, seed=3):
    rng = np.random.default_rng(seed)
    for p in reader.parameters().values():
        p[...] = rng.normal(0, 0.3, p.shape)
    return reader


@pytest.mark.parametrize("row", [None, 40])
def test_the_text_is_that_of_the_model_with_its_cache(row):
    cached, whole = filled(Decoder(CONFIG, check=False)), filled(Uncached(CONFIG, context=30, trained_length=row))
    assert (whole.context, whole.T) == (30, row or 30)
    prompt = [7, 8, 9]
    scale = np.abs(cached.read(prompt)).max()
    cached.restart()
    assert np.abs(cached.read(prompt) - whole.read(prompt)).max() < 1e-5 * scale
    for reader in (cached, whole):
        reader.restart()
    one, two = ([*generate(r, prompt, Sampler(2.0, seed=1), 20)] for r in (cached, whole))
    assert one == two
    assert len(set(one)) > 3
    fails("31 tokens do not fit in the context of 30", whole.read, [1] * 9)


def test_a_run_of_such_a_model_samples_generates_and_is_evaluated(capsys, lm):
    run = trained(capsys, lm("Net"), "--sample-every", "2", "--sample-tokens", "3", "--prompt", "def", T=16)
    init = ["--init", run, "--model", lm("Net")]
    assert ran(capsys, "generate", *init, "--max-tokens", "40", "--prompt", "ab")["tokens"] == 40
    found = ran(capsys, "eval", *init, "-B", "2", "--limit", "3")
    assert found["tokens"] == 3 * 2 * 16  # the run's T, since the module names no context
    assert cli.main(["generate", *init, "--max-tokens", "2"]) == 0
    assert "% of what memory allows" not in capsys.readouterr().err


def test_weights_for_one_t_are_read_at_that_t(capsys, lm):
    init = ["--init", trained(capsys, lm("At"), "--sample-every", "4", T=16), "--model", lm("At")]
    found = ran(capsys, "generate", *init, "--prompt", "ab")
    assert (found["context"], found["tokens"], found["stopped"]) == (16, 15, "context full")
    assert "--context 17: lm.py:At was trained with 16 tokens" in refused(capsys, "generate", *init, "--context", "17")
    assert ran(capsys, "eval", *init, "-B", "1", "--limit", "1")["tokens"] == 16
    Path("short.txt").write_text("x" * 300)
    assert ran(capsys, "eval", *init, "--data", "short.txt")["tokens"] == 256  # whole batches of 4 rows
    assert "-T 17: expected 1 to 16" in refused(capsys, "eval", *init, "-T", "17")


def test_a_model_that_looks_ahead_is_noticed_and_loses_no_run(capsys, lm):
    said = "lm.py:Ahead cannot generate text: its logits depend on later tokens"
    assert said in refused(capsys, "generate", "--model", lm("Ahead"), "--prompt", "ab")
    flags = ["--steps", "2", "--sample-every", "1", "-B", "2", "-T", "16", "--save-every", "2"]
    assert cli.main(["train", "--model", lm("Ahead"), *flags]) == 0
    out, err = capsys.readouterr()
    assert f"no sample after step 1: {said}" in out + err
    assert "run folder" in out


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Squared", "lm.py:Squared cannot generate text: expected a forward that returns (loss, logits), or a loss by"),
        ("Both", "its logits are computed from tokens [1, 8], targets [1, 8]; expected one row of 8 tokens alone"),
        ("brought", "--sample-every: lm.py:brought brings its own inputs"),
    ],
)
def test_samples_that_cannot_be_are_refused_before_compiling(capsys, monkeypatch, name, why, lm):
    monkeypatch.setattr(job.Engine, "from_options", lambda *args, **more: pytest.fail("is built and compiled"))
    size = [] if name == "brought" else ["-B", "2", "-T", "8"]
    assert why in refused(capsys, "train", "--model", lm(name), *size, "--sample-every", "1")
    assert not Path("runs").exists()


def test_an_engine_generates_from_its_weights_as_they_are():
    parts = {"wte": nn.Embedding(30, 16), "fc": nn.Linear(16, 30)}
    counts = Parts(lambda m, x, y: F.cross_entropy(m.fc(F.gelu(m.wte(x))), y), **parts)
    engine = Engine(counts, {"x": ((4, 12), "int32"), "y": ((4, 12), "int32")}, threads=1)
    before = [*engine.generate([3], temperature=0, max_tokens=5)]
    rows = (np.arange(13) + np.arange(0, 30, 8)[:, None]) % 30
    for _ in range(200):
        engine.step(x=rows[:, :-1], y=rows[:, 1:], lr=3e-2)
    assert [*engine.generate([3], temperature=0, max_tokens=5)] == [4, 5, 6, 7, 8] != before
    assert [*engine.generate([3], temperature=0, max_tokens=5, stops=[7])] == [4, 5, 6]
    assert len([*engine.generate([3, 4], temperature=0, max_tokens=50)]) == 11  # 2 and 10 fill a row; one is not read
    for prompt in ([], [30], [1] * 13):
        fails(r"expected at least one, from 0 to 29|do not fit in the context of 12", next, engine.generate(prompt))

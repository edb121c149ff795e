"""A two-layer GPT-2 against PyTorch: logits, loss, every gradient and two series of ten updates.

The values are made by ``golden/make_golden.py``; see there for what each quantity is.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from golden.params import deviation, digest, make_batch, make_params, norms_of, param_shapes, summarize

from cpuopt import Choice
from cpuopt.engine import Engine
from cpuopt.kernels import registry
from cpuopt.models import specs
from cpuopt.models.gpt2 import GPT2, Config

HERE = Path(__file__).parent / "golden"
META = json.loads((HERE / "gpt2-2l.json").read_text(encoding="utf-8"))
WANT = dict(np.load(HERE / "gpt2-2l.npz"))
CONFIG = META["config"]
PARAMS = make_params(**CONFIG, seed=META["params_seed"])
TOKENS, TARGETS = make_batch(**META["batch"])
ADAMW = {name: META["adamw"][name] for name in ("lr", "eps", "weight_decay")}
ADAMW["beta1"], ADAMW["beta2"] = META["adamw"]["betas"]
LIMIT = 3e-5  # of max|got - want| / max|want|; PyTorch's own float32 stays below 1.6e-5
VARIANTS = [v for v in ("vanilla", "blas", "optimized") if v in registry.variants("matmul_forward")]

SUMMED = [name for name in WANT if not name.startswith(("adamw", "wte_"))]


@pytest.fixture(scope="module", params=VARIANTS)
def engine(request):
    return Engine(GPT2(Config(**CONFIG)), specs(*TOKENS.shape), choice=Choice(request.param), threads=1)


def start(engine):
    """Set the golden weights, with no moments and no steps done."""
    for name, p in engine.parameters().items():
        p[...] = PARAMS[name]
        engine.array(f"{name}.m").fill(0)
        engine.array(f"{name}.v").fill(0)
    engine.step_number = 0


@pytest.fixture(scope="module")
def summary(engine):
    """What one forward and backward give, reduced as the golden values are."""
    start(engine)
    engine.load(tokens=TOKENS, targets=TARGETS)
    engine.run("forward")
    logits, loss = engine.array("lm_head.matmul.out").copy(), engine.loss
    engine.run("backward")
    return summarize(logits, loss, engine.gradients(), TOKENS, TARGETS)


def far(got, names, prefix=""):
    """Which quantities lie further from PyTorch's than the limit, and how far."""
    distance = {name: deviation(got[name], WANT[prefix + name]) for name in names}
    return {name: d for name, d in distance.items() if d > LIMIT}


def test_the_inputs_are_those_that_the_values_were_made_from():
    assert digest(PARAMS) == META["params_sha256"]
    assert digest({"tokens": TOKENS, "targets": TARGETS}) == META["batch_sha256"]
    assert (TARGETS == -100).any()


def test_parameters_are_those_of_the_checkpoint(engine):
    sizes = {name: n for name, n in CONFIG.items() if name != "n_head"}
    assert {name: p.shape for name, p in engine.parameters().items()} == param_shapes(**sizes)


def test_every_quantity_is_compared(summary):
    assert set(SUMMED) == set(summary)
    tensors = {name.removeprefix("grad/").removesuffix("/norm") for name in SUMMED if name.startswith("grad/")}
    assert set(PARAMS) <= tensors
    assert {"logits", "logsumexp", "argmax", "loss", "grad_norm"} <= set(SUMMED)


def test_logits_and_loss(summary):
    assert far(summary, ["logits", "logsumexp", "argmax", "loss"]) == {}


def test_every_gradient(summary):
    assert far(summary, [name for name in SUMMED if name.startswith("grad")]) == {}


@pytest.mark.parametrize(("series", "clip"), [("adamw", None), ("adamw_clipped", META["clip"])])
def test_ten_updates(engine, series, clip):
    start(engine)
    done = [engine.step(tokens=TOKENS, targets=TARGETS, clip=clip, **ADAMW) for _ in WANT[f"{series}/losses"]]
    got = {"losses": [d.loss for d in done], "grad_norms": [d.grad_norm for d in done]}
    got["loss_after"] = engine.forward(tokens=TOKENS, targets=TARGETS)
    got |= norms_of(engine.parameters())
    names = [name.partition("/")[2] for name in WANT if name.startswith(f"{series}/")]
    assert set(names) == set(got)
    assert far(got, names, f"{series}/") == {}

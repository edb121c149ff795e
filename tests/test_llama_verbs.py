"""A Llama goes through every verb that takes a model, by a preset or by its sizes; no verb knows it."""

import json
from pathlib import Path

import pytest
from verbs import ran

from cpuopt import cli, models
from cpuopt.train.checkpoint import newest
from cpuopt.train.job import Settings, build_only

SIZES = {"model": "qwen3", "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 2, "head_dim": 12}
SIZES |= {"num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 64}
MODEL = json.dumps(SIZES)
STEP = ["--model", MODEL, "-B", "2", "-T", "16", "--variant", "vanilla"]


pytestmark = pytest.mark.usefixtures("here")


def test_it_trains_resumes_reports_evaluates_and_generates(capsys):
    flags = ["train", *STEP, "--val-every", "2", "--save-every", "2", "--lr", "1e-2"]
    whole = ran(capsys, *flags, "--steps", "4", "--run", "whole", "--html", "page.html", "--trace", "trace.json")
    assert whole["loss_last"] < whole["loss_first"]
    page = Path("page.html").read_text()
    assert all(word in page for word in ("model.layers.1.self_attn", "rope_forward", "gqa_backward", "rmsnorm"))
    cut = ran(capsys, *flags, "--steps", "2", "--run", "cut", "--sample-every", "2", "--sample-tokens", "4")
    ran(capsys, "train", "--resume", cut["path"], "--steps", "4")
    found = [newest(Path(path)) for path in (whole["path"], cut["path"])]
    one, two = ((c.path / "params.safetensors").read_bytes() for c in found)
    assert one == two
    assert found[0].config == models.parse(MODEL)
    result = ran(capsys, "eval", "--init", whole["path"], "-B", "2", "-T", "16", "--limit", "2", "--variant", "vanilla")
    assert result["bits_per_byte"] == pytest.approx(result["loss"] / 0.6931471805599453)
    said = ran(capsys, "generate", "--init", whole["path"], "--max-tokens", "5", "--variant", "vanilla")
    assert len(said["ids"]) == 5
    on = ran(capsys, "train", "--init", whole["path"], *STEP[2:], "--steps", "1", "--val-every", "0")
    assert on["loss_first"] < whole["loss_first"]
    listed = ran(capsys, "runs", "list")
    assert sum("qwen3-custom" in json.dumps(row) for row in listed["runs"]) == 3


def test_it_is_profiled_compared_in_a_step_and_printed(capsys):
    found = ran(capsys, "profile", *STEP, "--steps", "2", "--html", "page.html")
    assert {"rope_forward", "gqa_backward", "rmsnorm_backward"} <= {row["op"] for row in found["layers"]}
    assert "model.layers.0.self_attn.q_norm" in Path("page.html").read_text()
    assert cli.main(["program", *STEP]) == 0
    assert "model.layers.0.mlp" in capsys.readouterr().out
    ab = ["ab", "silu_forward", "vanilla", "vanilla", "--in-step", "--model", MODEL, "--variant", "vanilla"]
    found = ran(capsys, *ab, "--sizes", "2x16", "--rounds", "6", "--limit", "20")
    assert (found["op"], found["model"]) == ("silu_forward", MODEL)


@pytest.mark.parametrize("name", ["smollm2-135M", "qwen3-0.6B", "tinyllama-1.1B", "llama3.2-1B"])
def test_every_preset_is_planned_with_all_rewrites(name):
    built = build_only(Settings(model=name, B=1, T=64, fuse="all"))
    config, ops = models.parse(name), {call.op.name for call in built.program.calls}
    plan = built.plan()
    assert plan.groups["parameter"] == 4 * config.n_params
    assert plan.groups["moment"] == 8 * config.n_params
    assert {"matmul_swiglu_forward", "residual_rmsnorm_forward", "matmul_update", "classifier_update"} <= ops
    assert not {"silu_forward", "mul_forward", "cross_entropy_forward"} & ops


def test_a_step_of_a_billion_parameters_needs_little_but_weights_and_moments():
    plan = build_only(Settings(model="llama3.2-1B", B=1, T=256, fuse="all")).plan()
    assert plan.total_bytes < 15.45e9
    assert plan.total_bytes - plan.pool_bytes < 12 * models.parse("llama3.2-1B").n_params + 40e6

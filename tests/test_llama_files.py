"""The Llama family in Hugging Face's directories: what a config says and what is refused, tensors, a tied head."""

import json

import numpy as np
import pytest
import safetensors.numpy
from golden.llama2c import draw

from cpuopt import cli, models
from cpuopt.errors import UserError
from cpuopt.models.families import Qwen2, Qwen3
from cpuopt.models.llama import Config
from cpuopt.weights import open_weights, save_weights
from cpuopt.weights.tensors import TensorFile

SMALL = Config(61, 24, 20, 2, 6, 2, 4, 16, rope_theta=5e5, rms_norm_eps=1e-6)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""Without the length of the original context."""


def config_of(**given):
    return models.model_type(given["model_type"]).from_transformers(given)


def same(weights, params):
    return all(np.array_equal(weights.read(name), p) for name, p in params.items())


@pytest.fixture
def written(tmp_path):
    """Function that writes a model to a directory, whose config and tensors a test then changes."""

    def write(config=SMALL, dtype="f32"):
        params = draw(config.shapes(), 1)
        save_weights(tmp_path / "hf", config, params.__getitem__, dtype)
        return tmp_path / "hf", params

    return write


def change(folder, **keys):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def test_a_missing_key_is_the_class_default_of_transformers():
    assert config_of(model_type="llama") == Config(
        32000, 4096, 11008, 32, 32, 32, 128, 2048, rms_norm_eps=1e-6, tie_word_embeddings=False, rope_theta=10000.0
    )
    assert config_of(model_type="qwen2", num_attention_heads=64) == Qwen2(
        151936, 4096, 22016, 32, 64, 32, 64, 32768, rms_norm_eps=1e-6
    )
    assert config_of(model_type="qwen3") == Qwen3(151936, 4096, 22016, 32, 32, 32, 128, 32768, rms_norm_eps=1e-6)
    assert config_of(model_type="qwen3", num_key_value_heads=None).num_key_value_heads == 32
    assert config_of(model_type="qwen2", head_dim=None, hidden_size=64).head_dim == 2


@pytest.mark.parametrize(
    ("given", "kind", "theta"),
    [
        ({}, "default", 10000.0),
        ({"rope_theta": 5e5}, "default", 5e5),
        ({"rope_theta": 5e5, "rope_scaling": None}, "default", 5e5),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}, "default", 7.0),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "linear", 5e5),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "linear", 10000.0),
        ({"rope_scaling": {"type": "mrope", "rope_type": "linear", "factor": 2}}, "linear", 10000.0),
        ({"rope_parameters": {"rope_theta": 9.0, "partial_rotary_factor": 1.0, "beta_fast": None}}, "default", 9.0),
    ],
)
def test_rotary_positions_are_read_in_every_layout(given, kind, theta):
    c = config_of(model_type="llama", **given)
    assert (c.rope_type, c.rope_theta, c.rope_factor) == (kind, theta, 2.0 if kind == "linear" else 1.0)


def test_the_original_context_is_that_of_the_model_where_it_is_missing():
    c = config_of(model_type="llama", rope_scaling=LLAMA3, max_position_embeddings=4096)
    assert (c.rope_original_positions, c.rope_factor, c.rope_high_freq_factor) == (4096, 8.0, 4.0)
    rope = LLAMA3 | {"original_max_position_embeddings": 128}
    assert config_of(model_type="llama", rope_parameters=rope).rope_original_positions == 128
    top = config_of(model_type="llama", rope_parameters=rope, original_max_position_embeddings=64)
    assert top.rope_original_positions == 64


def test_every_preset_comes_back_from_its_config():
    for config in models.PRESETS.values():
        assert type(config).from_transformers(json.loads(json.dumps(config.to_transformers()))) == config
    old = {k: x for k, x in models.PRESETS["llama3.2-1B"].to_transformers().items() if k != "rope_parameters"}
    assert config_of(**old) == models.PRESETS["llama3.2-1B"]


REFUSED = {
    "hidden_act": ("gelu", "hidden_act is 'gelu'"),
    "attention_dropout": (0.1, "attention_dropout is 0.1"),
    "mlp_bias": (True, "mlp_bias is True"),
    "use_sliding_window": (True, "use_sliding_window is True"),
    "sliding_window": (4096, "sliding_window is 4096"),
    "layer_types": (["full_attention", "sliding_attention"], "layer_types is"),
    "partial_rotary_factor": (0.5, "partial_rotary_factor is 0.5"),
    "quantization_config": ({"bits": 4}, "quantization_config is"),
    "rope_parameters": (
        {"rope_type": "ntk", "factor": 4.0},
        "rope_type 'ntk'; expected default, linear, dynamic, llama3",
    ),
    "rope_scaling": ({"type": "linear", "factor": 4.0}, "rope_parameters and rope_scaling differ"),
    "num_attention_heads": ("6", "num_attention_heads is '6'"),
    "num_key_value_heads": (4, "not a multiple of num_key_value_heads = 4"),
    "head_dim": (3, "head_dim = 3"),
    "hidden_size": (2**40, "hidden_size is 1099511627776"),
    "num_hidden_layers": (9 * 10**60, "num_hidden_layers is 9000"),
    "rms_norm_eps": ("\x1b[2J", "rms_norm_eps is '\\\\x1b[2J'"),
    "tie_word_embeddings": (None, "tie_word_embeddings is None"),
    "vocab_size": (60, "shape (61, 24)"),
    "intermediate_size": (21, "shape (20, 24)"),
    "model_type": ("gemma", "there is no model 'gemma'"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_cannot_be_computed_is_refused_by_its_key(written, key):
    folder, params = written()
    assert same(open_weights(folder), params)
    value, said = REFUSED[key]
    change(folder, **{key: value})
    with pytest.raises(UserError) as e:
        open_weights(folder)
    assert said in str(e.value).replace("\\x1b", "\\\\x1b")
    assert len(str(e.value)) < 500
    assert "\x1b" not in str(e.value)


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ([1], "rope_parameters is [1]; expected an object"),
        ({"rope_type": ["llama3"]}, "has the rope_type ['llama3']"),
        ({"rope_type": "linear"}, "lacks 'factor'"),
        ({k: x for k, x in LLAMA3.items() if k != "high_freq_factor"}, "lacks 'high_freq_factor'"),
        (LLAMA3 | {"low_freq_factor": 4.0}, "rope_low_freq_factor = 4.0"),
        (LLAMA3 | {"factor": "8"}, "rope_factor is '8'"),
        (LLAMA3 | {"factor": -8.0}, "rope_factor is -8.0"),
        (LLAMA3 | {"attention_factor": 2.0}, "has 'attention_factor', which cpuopt does not compute"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25"),
        ({"full_attention": {"rope_theta": 5.0}}, "has 'full_attention'"),
        ({"rope_theta": None}, "rope_theta is None"),
        ({"rope_theta": 0}, "rope_theta is 0"),
    ],
)
def test_a_scaling_that_is_not_right_is_refused(rope, said):
    with pytest.raises(UserError) as e:
        config_of(model_type="llama", rope_parameters=rope)
    assert said in str(e.value)


def test_a_llama_that_transformers_refuses_is_not_written(tmp_path):
    config = Config(61, 25, 20, 1, 6, 2, 4, 16)
    with pytest.raises(UserError, match=r"hidden_size = 25 is not a multiple .* transformers refuses"):
        save_weights(tmp_path / "hf", config, lambda name: pytest.fail("read"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("config", [SMALL, Qwen2(61, 24, 20, 2, 6, 2, 4, 16), Qwen3(61, 24, 20, 2, 6, 2, 8, 16)])
def test_tensors_come_back_byte_for_byte(tmp_path, written, config, dtype):
    folder, _ = written(config, dtype)
    assert cli.main(["convert", str(folder), str(tmp_path / "again")]) == 0
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()
    assert open_weights(folder).dtype == dtype
    assert TensorFile(folder / "model.safetensors").tensors.keys() == config.shapes().keys()


def test_a_tied_head_may_be_there_and_must_be_equal(written):
    folder, params = written(Config(61, 24, 20, 2, 6, 2, 4, 16, tie_word_embeddings=True))
    assert "lm_head.weight" not in params
    path = folder / "model.safetensors"
    arrays = safetensors.numpy.load_file(path)
    head = arrays["model.embed_tokens.weight"].copy()
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32) for i in range(2)}
    safetensors.numpy.save_file({**arrays, **buffers, "lm_head.weight": head}, path)
    assert same(open_weights(folder), params)
    head[3, 4] += 1
    safetensors.numpy.save_file({**arrays, "lm_head.weight": head}, path)
    with pytest.raises(UserError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        open_weights(folder)
    change(folder, tie_word_embeddings=False)
    assert np.array_equal(open_weights(folder).read("lm_head.weight"), head)
    safetensors.numpy.save_file(arrays, path)
    with pytest.raises(UserError, match=r"lacks 'lm_head.weight'"):
        open_weights(folder)

"""Each family against values of ``transformers``: what its files say, logits, gradients, AdamW, greedy text, and back.

``golden/make.py`` makes the values; ``golden/compare.py`` compares whole arrays.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from golden.compare import batch_of, differences, engine_of, written
from golden.families import FAMILIES, TOLERANCE, distance, kept, summarize
from verbs import error_of, fails, refused

from cpuopt import Choice, cli, models
from cpuopt.errors import UserError
from cpuopt.generate.decoder import Decoder
from cpuopt.models.llama import Config as Llama
from cpuopt.program.fuse import FUSIONS
from cpuopt.weights import copy_into, open_weights, save_weights
from cpuopt.weights.gguf import ARCHITECTURES
from cpuopt.weights.tensors import TensorFile

KEPT = kept()
ROUTES = {
    "optimized": (Choice("optimized"), tuple(FUSIONS), FAMILIES),
    "vanilla": (Choice("vanilla"), tuple(FUSIONS), ("gpt2", "llama, llama3", "qwen2", "qwen3")),
    "generated": (Choice("vanilla", ("*_backward*=generated",)), (), ("gpt2", "llama, llama3", "qwen2", "qwen3")),
}
"""Ways to compute the same: kernels, rewrites, and the models that go through them."""


@pytest.mark.drawn(12)
@pytest.mark.parametrize(("route", "name"), [(route, name) for route in ROUTES for name in ROUTES[route][2]])
def test_it_computes_what_transformers_does_with_the_same_bits_on_any_threads(tmp_path, route, name):
    choice, fuse, _ = ROUTES[route]
    assert differences(tmp_path, FAMILIES[name], *KEPT[name], choice, fuse) == {}


@pytest.mark.parametrize("name", FAMILIES)
def test_it_comes_back_byte_for_byte(tmp_path, name):
    there = written(tmp_path / "there", FAMILIES[name], KEPT[name][0])
    back, again = tmp_path / "back", tmp_path / "again"
    assert cli.main(["convert", str(there), str(back)]) == cli.main(["convert", str(back), str(again)]) == 0
    one, two = (TensorFile(folder / "model.safetensors") for folder in (there, back))
    assert one.tensors.keys() == two.tensors.keys()
    assert all(one.read(n).tobytes() == two.read(n).tobytes() for n in one.tensors)
    for file in ("config.json", "model.safetensors"):
        assert (back / file).read_bytes() == (again / file).read_bytes()
    config = models.parse(str(there))
    assert models.parse(str(back)) == models.from_json(json.loads(json.dumps(config.to_json()))) == config
    said, given = json.loads((back / "config.json").read_text()), KEPT[name][0]["config"]
    names = (said.keys() & given) - SAID_ANEW
    assert {n: said[n] for n in names} == {n: given[n] for n in names}


SAID_ANEW = {"rope_parameters", "bos_token_id", "eos_token_id", "use_sliding_window"}
"""Keys that may be said in other words: what is not known of a text is null."""


def test_sizes_survive_json_as_earlier_versions_wrote_them():
    for name, more in (("qwen2", {}), ("qwen2", {"beta_slow": 2}), ("phi3", {})):
        rope = YARN | more if name == "qwen2" else LONG
        c = models.model_type(name).from_transformers({"rope_scaling": rope, "max_position_embeddings": 131072})
        assert models.from_json(c.to_json()) == c
        assert ("rope_beta_slow" in c.to_json()) == bool(more)  # a default is left out, as before there was the key
    assert c.to_transformers()["original_max_position_embeddings"] == 4096
    for config in models.PRESETS.values():
        assert type(config).from_transformers(json.loads(json.dumps(config.to_transformers()))) == config


def test_a_missing_key_is_the_class_default_of_transformers():
    for kind, given, want in (
        ("llama", {}, (32000, 4096, 11008, 32, 32, 32, 128, 2048)),
        ("qwen2", {"num_attention_heads": 64}, (151936, 4096, 22016, 32, 64, 32, 64, 32768)),
        ("qwen3", {}, (151936, 4096, 22016, 32, 32, 32, 128, 32768)),
    ):
        made = models.model_type(kind)
        assert made.from_transformers(given) == made(*want, rms_norm_eps=1e-6)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""Without the length of the original context."""
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LONG = {"type": "su", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
SHORT = LLAMA3 | {"original_max_position_embeddings": 128}
THETA, DEFAULT = {"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5, "rope_factor": 1.0}
TWICE = {"rope_type": "linear", "rope_theta": 1e4, "rope_factor": 2.0}


@pytest.mark.parametrize(
    ("kind", "given", "want"),
    [
        ("smollm3", {"pretraining_tp": 2, "layer_types": ["full_attention"] * 36, "sliding_window": None}, {}),
        ("smollm3", {"no_rope_layers": None}, {"no_rope_layers": ()}),
        ("gemma3_text", {"layer_types": None, "sliding_window_pattern": 6}, {"layer_types": ()}),
        ("gemma2", {"sliding_window": None, "attn_logit_softcapping": None}, {"tie_word_embeddings": True}),
        ("mistral", {"head_dim": None, "num_key_value_heads": None}, {"head_dim": 128, "num_key_value_heads": 32}),
        ("qwen2", {"sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 21}, {}),
        ("qwen3", {"dtype": "bfloat16", "torch_dtype": "float16"}, {"head_dim": 128}),
        ("mistral", {"rope_scaling": {"type": "yarn", "factor": 16.0, "finetuned": True}}, {"rope_factor": 16.0}),
        *(("llama", {}, DEFAULT | {"rope_theta": 1e4}), ("llama", THETA, DEFAULT)),
        ("llama", THETA | {"rope_scaling": None}, DEFAULT),
        ("llama", THETA | {"rope_parameters": {"rope_theta": 7.0}}, DEFAULT | {"rope_theta": 7.0}),
        ("llama", {"rope_scaling": {}, "rope_parameters": {**THETA, "partial_rotary_factor": 1.0}}, DEFAULT),
        ("llama", THETA | {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, TWICE | THETA),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2}}, TWICE),
        ("llama", {"rope_scaling": {"type": "mrope", "rope_type": "linear", "factor": 2}}, TWICE),
        ("llama", {"rope_scaling": LLAMA3, "max_position_embeddings": 4096}, {"rope_original_positions": 4096}),
        ("llama", {"rope_parameters": SHORT}, {"rope_original_positions": 128, "rope_high_freq_factor": 4.0}),
        ("llama", {"rope_parameters": SHORT, "original_max_position_embeddings": 64}, {"rope_original_positions": 64}),
        ("qwen2", THETA | {"rope_scaling": YARN}, {"rope_original_positions": 32768, "rope_beta_fast": 32.0}),
        ("phi3", {"rope_scaling": LONG, "max_position_embeddings": 131072}, {"block_size": 4096}),
        ("qwen3", {"num_key_value_heads": None}, {"num_key_value_heads": 32}),
        ("qwen2", {"head_dim": None, "hidden_size": 64}, {"head_dim": 2}),
    ],
)
def test_what_people_have_is_read(kind, given, want):
    config = models.model_type(kind).from_transformers(given)
    assert {name: getattr(config, name) for name in want} == want


ODD = {
    "llama": {
        "hidden_act": "gelu",
        "attention_dropout": 0.1,
        "mlp_bias": True,
        "use_sliding_window": True,
        "sliding_window": 4096,
        "partial_rotary_factor": 0.5,
        "num_attention_heads": "6",
        "hidden_size": 2**40,
        "rms_norm_eps": "\x1b[2J",
        "tie_word_embeddings": None,
    },
    "smollm3": {"no_rope_layer_interval": 3, "use_sliding_window": True},
    "olmo2": {"hidden_act": "gelu"},
    "phi3": {"resid_pdrop": 0.1, "partial_rotary_factor": "half"},
    "gemma2": {"hidden_activation": "gelu", "attn_logit_softcapping": -1.0, "use_bidirectional_attention": True},
}
"""Of each kind: keys with a value that is refused, each by itself."""
SLIDING = {"full_attention": {}, "sliding_attention": {"rope_type": "linear", "factor": 2.0}}


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        *((kind, {key: x}, f"{key} is {x!r}") for kind, sizes in ODD.items() for key, x in sizes.items()),
        ("llama", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config is"),
        ("llama", {"num_attention_heads": 6, "num_key_value_heads": 4}, "not a multiple of num_key_value_heads = 4"),
        ("llama", {"head_dim": 3}, "head_dim = 3"),
        ("llama", {"num_hidden_layers": 9 * 10**60}, "num_hidden_layers is 9000"),
        ("llama", {"rope_parameters": LLAMA3, "rope_scaling": YARN}, "rope_parameters and rope_scaling differ"),
        *(
            ("llama", {"rope_parameters": rope}, said)
            for rope, said in (
                ({"rope_type": "ntk", "factor": 4.0}, "rope_type 'ntk'; expected default, linear, dynamic, llama3"),
                ([1], "rope_parameters is [1]; expected an object"),
                ({"rope_type": ["llama3"]}, "has the rope_type ['llama3']"),
                ({"rope_type": "linear"}, "lacks 'factor'"),
                ({k: x for k, x in LLAMA3.items() if k != "high_freq_factor"}, "lacks 'high_freq_factor'"),
                (LLAMA3 | {"low_freq_factor": 4.0}, "rope_low_freq_factor = 4.0"),
                *((LLAMA3 | {"factor": x}, f"rope_factor is {x!r}") for x in ("8", -8.0)),
                (LLAMA3 | {"attention_factor": 2.0}, "has 'attention_factor', which cpuopt does not compute"),
                ({"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25"),
                ({"full_attention": {"rope_theta": 5.0}}, "has 'full_attention'"),
                *(({"rope_theta": x}, f"rope_theta is {x}") for x in (None, 0)),
            )
        ),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0; expected a whole number from 1"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries; expected one for each layer"),
        ("smollm3", {"no_rope_layers": "1"}, "no_rope_layers is '1'; expected a list"),
        ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "lacks 'long_factor'"),
        *(
            ("phi3", {"rope_scaling": LONG | changed}, said)
            for changed, said in (
                ({"short_factor": [1.0] * 47}, "short_factor has 47 numbers; expected 48"),
                ({"long_factor": [0.0] * 48}, "long_factor has 48 numbers; expected 48 a"),
                ({"factor": 2.0}, "factor is 2.0; expected max_position_embeddings / "),
            )
        ),
        ("gemma2", {"layer_types": ["full_attention", "chunked"], "num_hidden_layers": 2}, "layer_types has 'c"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, which transformers and"),
        ("gemma3_text", {"rope_parameters": SLIDING}, "rope_parameters of sliding_attention"),
        *(
            ("gemma3_text", {"sliding_window_pattern": x}, f"sliding_window_pattern is {x!r}; expected a whole number")
            for x in ("x", -1, 0, True, 2.0, [])
        ),
        ("gemma3_text", {"sliding_window_pattern": 2, "num_hidden_layers": "x"}, "num_hidden_layers is 'x'"),
        ("gemma3_text", {"sliding_window_pattern": 2, "num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000"),
        ("gemma2", {"layer_types": []}, "layer_types is []; expected an entry for each layer, or null"),
        ("gemma3_text", {"layer_types": [], "sliding_window_pattern": 2}, "layer_types is []; expected an entry"),
        ("smollm3", {"no_rope_layers": []}, "no_rope_layers is []; expected an entry for each layer, or null"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}}, "has 'mscale'"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "rope_theta": 1.0}, "expected more than 1"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_its_key(kind, given, said):
    assert said in error_of(models.model_type(kind).from_transformers, given)


WRONG = [
    *(("llama, yarn", {"rope_beta_fast": 8.0}), ("llama, yarn", {"rope_attention_factor": 1.0})),
    *(("olmo2, linear", {"rope_factor": 2.1}), ("smollm3, other layers", {"no_rope_layers": (1, 0)})),
    *(("phi3, in part", {"rope_short_factor": (1.0, 1.5, 2.6)}), ("phi3, in part", {"rope_attention_factor": 1.0})),
    *(("mistral, window", {"sliding_window": 10}), ("gemma2", {"query_pre_attn_scalar": 255})),
    *(("gemma2", {"attn_logit_softcapping": 1.51}), ("gemma2", {"final_logit_softcapping": 2.01})),
    *(("gemma3", {"layer_types": ("sliding_attention",) * 7}), ("gemma3", {"rope_local_base_freq": 9e3})),
]


@pytest.mark.parametrize(("name", "sizes"), WRONG)
def test_a_wrong_size_is_noticed(tmp_path, name, sizes):
    on, (about, want) = FAMILIES[name], KEPT[name]
    weights = open_weights(written(tmp_path / "there", on, about))
    engine = engine_of(on, replace(weights, config=replace(weights.config, **sizes)), Choice("optimized"), train=False)
    engine.forward(**batch_of(on))
    far = distance(summarize({"logits": engine.array(engine.program.outputs[1])})["logits"], want["logits"])
    assert far > TOLERANCE


def test_a_sample_of_a_model_with_capped_logits_has_them(tmp_path):
    on, (about, _) = FAMILIES["gemma3, other layers"], KEPT["gemma3, other layers"]
    weights = open_weights(written(tmp_path / "there", on, about))
    engine = engine_of(on, weights, Choice("optimized"), train=False)
    engine.forward(**batch_of(on))
    decoder = Decoder(weights.config, context=on.time, threads=1, check=False)
    copy_into(decoder.parameters(), weights)
    last = engine.array(engine.program.outputs[1])[0, -1]
    assert np.abs(decoder.read(on.tokens()[0][0].tolist()) - last).max() <= TOLERANCE * np.abs(last).max()
    assert np.abs(last).max() < weights.config.final_logit_softcapping


def test_the_page_names_every_family_and_every_architecture_of_gguf():
    page = (Path(__file__).parents[1] / "docs" / "training.md").read_text()
    table = page.partition("### Families")[2].partition("\n\nPositions")[0]
    files = page.partition("- **GGUF**")[2].partition("\n  - ")[0]
    models.load_all()
    found = {name for name, config in models.MODELS.items() if issubclass(config, Llama)}
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.M)) - {"model_type"} == found
    assert set(re.findall(r"`(\w+)`", files)) == set(ARCHITECTURES)


def test_files_of_a_model_without_its_head_are_read(tmp_path):
    on, (about, _) = FAMILIES["qwen3"], KEPT["qwen3"]
    folder = written(tmp_path / "there", on, about)
    whole = safetensors.numpy.load_file(folder / "model.safetensors")
    bare = {name.removeprefix("model."): x for name, x in whole.items()}
    safetensors.numpy.save_file(bare, folder / "model.safetensors")
    here = open_weights(folder)
    assert all(np.array_equal(here.read(name), whole[name]) for name in here.config.shapes())
    safetensors.numpy.save_file({**bare, "model.norm.weight": bare["norm.weight"]}, folder / "model.safetensors")
    fails(r"tensor 'model.norm.weight' comes twice", open_weights, folder)


def test_a_tied_head_may_be_there_and_must_be_equal(tmp_path):
    folder = written(tmp_path / "there", FAMILIES["llama"], KEPT["llama"][0])
    path = folder / "model.safetensors"
    arrays = safetensors.numpy.load_file(path)
    head = arrays["model.embed_tokens.weight"].copy()
    safetensors.numpy.save_file({**arrays, "lm_head.weight": head}, path)
    here = open_weights(folder)
    assert all(np.array_equal(here.read(name), x) for name, x in arrays.items())
    head[3, 4] += 1
    safetensors.numpy.save_file({**arrays, "lm_head.weight": head}, path)
    fails(r"lm_head.weight differs from model.embed_tokens.weight", open_weights, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert np.array_equal(open_weights(folder).read("lm_head.weight"), head)


def test_a_llama_that_transformers_refuses_is_not_written(tmp_path):
    with pytest.raises(UserError, match=r"hidden_size = 25 is not a multiple .* transformers refuses"):
        save_weights(tmp_path / "hf", Llama(61, 25, 20, 1, 6, 2, 4, 16), lambda name: pytest.fail("read"))
    assert list(tmp_path.iterdir()) == []


def test_a_scaling_that_gguf_would_lose_is_not_written(tmp_path, capsys):
    there = written(tmp_path / "there", FAMILIES["mistral, dynamic"], KEPT["mistral, dynamic"][0])
    said = refused(capsys, "convert", str(there), str(tmp_path / "x.gguf"))
    assert "rope_type is 'dynamic', which cpuopt does not write to GGUF" in said


def test_an_adapter_of_a_layer_that_files_do_not_have_is_refused_before_a_run(here, tmp_path, capsys):
    flags = ["train", "--model", "phi3-tiny", "-B", "1", "-T", "8", "--steps", "1", "--save", "adapter", "--lora"]
    assert "'model.layers.0.self_attn.q_proj' in self_attn.qkv_proj" in refused(capsys, *flags, "r=2,targets=q_proj")
    assert list(tmp_path.iterdir()) == []

"""Directories as people have them: all files of a tokenizer travel, and odd ones say what they are."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from golden.llama2c import draw
from safetensors.numpy import load_file, save_file
from small_tokenizers import byte_pairs
from tokenizers import AddedToken, Tokenizer
from verbs import fails

from cpuopt import cli
from cpuopt.data import companions
from cpuopt.data.tokenizers import get_tokenizer, tokenizer_files
from cpuopt.errors import UserError
from cpuopt.files.gguf import Gguf
from cpuopt.models.families import PRESETS
from cpuopt.models.llama import Config
from cpuopt.weights import Marks, merge, open_adapter, open_weights, save_weights
from cpuopt.weights.peft import named_base

SIZES = Config(272, 16, 32, 1, 2, 1, 8, 32, tie_word_embeddings=True)
TEMPLATES = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}


def byte_level():
    t = byte_pairs(texts=[], special=["<pad>", "<unk>", "<a>", "<b>", "<c>"])
    t.add_tokens([AddedToken("</s>", special=False)])
    return t


PAD, UNK, A, B, C, TAG = *range(5), 261
FILES = {
    "tokenizer_config.json": json.dumps({"bos_token": "<a>", "eos_token": {"content": "<b>"}, "unk_token": "<unk>"}),
    "generation_config.json": json.dumps({"eos_token_id": [B, C], "pad_token_id": PAD, "temperature": 0.6}),
    "special_tokens_map.json": "{}", "added_tokens.json": json.dumps({"</s>": TAG}), "vocab.json": "{}",
    "merges.txt": "", "tokenizer.model": "pieces", "chat_template.jinja": TEMPLATES["default"],
    "additional_chat_templates/tool_use.jinja": TEMPLATES["tool_use"],
}  # fmt: skip


@pytest.fixture
def model(tmp_path):
    """A directory with a model, its tokenizer, and all files that may be beside one."""
    folder = tmp_path / "model"
    save_weights(folder, SIZES, draw(SIZES.shapes(), 3).__getitem__, marks=Marks(A, (B,), PAD))
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / "additional_chat_templates").mkdir()
    for name, content in FILES.items():
        (folder / name).write_text(content)
    return folder


@pytest.fixture
def adapter(tmp_path, model):
    """An adapter of the model, with its base's config and without a tokenizer."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    rng, layer = np.random.default_rng(5), "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    sizes = {f"{layer}A.weight": (2, 16), f"{layer}B.weight": (16, 2)}
    drawn = {name: rng.normal(size=s).astype("f4") for name, s in sizes.items()}
    save_file(drawn, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(about | {"base_model_name_or_path": str(model)}))
    shutil.copy(model / "config.json", folder)
    return folder


def converted(model, adapter, out):
    assert cli.main(["convert", str(model), str(out)]) == 0


def trained(model, adapter, out, *flags):
    (out.parent / "text.txt").write_text("one and two\n" * 40)
    how = ["--data", str(out.parent / "text.txt"), "--runs", str(out.parent / "runs"), "--threads", "1"]
    how += ["-B", "2", "-T", "8", "--steps", "1", "--val-every", "0", "--variant", "vanilla", "--save-every", "1"]
    assert cli.main(["train", "--init", str(model), *how, *flags, "--save", str(out)]) == 0


def adapted(model, adapter, out):
    trained(model, adapter, out, "--lora", "r=2")


def of_a_run(model, adapter, out):
    trained(model, adapter, out.parent / "first")
    shutil.rmtree(model)
    assert cli.main(["convert", str(next((out.parent / "runs").iterdir())), str(out)]) == 0


def merged(model, adapter, out):
    assert cli.main(["convert", str(adapter), str(out), "--merge", "--base", str(model)]) == 0


@pytest.mark.parametrize("way", [converted, trained, adapted, of_a_run, merged], ids=lambda way: way.__name__)
def test_every_file_of_a_tokenizer_travels(way, model, adapter, tmp_path):
    assert {*FILES} == {*companions.COMPANIONS, "additional_chat_templates/tool_use.jinja"}
    want = {name: (model / name).read_bytes() for name in (*FILES, "tokenizer.json")}
    way(model, adapter, out := tmp_path / "out")
    assert {name: (out / name).read_bytes() for name in want} == want
    if way is not adapted:
        assert open_weights(out).marks == Marks(A, (B, C), PAD)
    else:  # with an adapter comes the template that it was trained with, unless another vocabulary does
        (out / "chat_template.jinja").write_text("{{ new }}")
        assert get_tokenizer(merge(open_weights(model), [out]).tokenizer).chat_templates["default"] == "{{ new }}"
        merged(model, out, tmp_path / "whole")
        assert (tmp_path / "whole" / "chat_template.jinja").read_text() == "{{ new }}"
        larger = Tokenizer.from_file(str(out / "tokenizer.json"))
        larger.add_tokens([f"<{n}>" for n in range(20)])
        larger.save(str(out / "tokenizer.json"))
        assert merge(open_weights(model), [out]).tokenizer == str(model / "tokenizer.json")


@pytest.mark.parametrize("listed", [False, True])
def test_templates_and_marks_go_through_gguf(model, tmp_path, listed):
    if listed:  # as transformers wrote it before 4.51
        for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
            (model / name).unlink()
        templates = [{"name": name, "template": text} for name, text in TEMPLATES.items()]
        about = json.loads(FILES["tokenizer_config.json"]) | {"chat_template": templates}
        (model / "tokenizer_config.json").write_text(json.dumps(about))
    assert cli.main(["convert", str(model), str(tmp_path / "m.gguf")]) == 0
    found, key = Gguf(tmp_path / "m.gguf").metadata, "tokenizer.chat_template"
    named = (found[key], found[f"{key}s"], found[f"{key}.tool_use"])
    assert named == (TEMPLATES["default"], ["tool_use"], TEMPLATES["tool_use"])
    ids = [found[f"tokenizer.ggml.{what}_token_id"] for what in ("bos", "eos", "eot", "padding", "unknown")]
    assert ids == [A, B, C, PAD, UNK]
    assert cli.main(["convert", str(tmp_path / "m.gguf"), str(tmp_path / "hf")]) == 0
    first = get_tokenizer(str(model / "tokenizer.json"))
    for again in (tmp_path / "m.gguf", tmp_path / "hf" / "tokenizer.json"):
        t = get_tokenizer(str(again))
        assert (t.eot, t.end, t.stops, t.pad) == (first.eot, first.end, first.stops, first.pad) == (A, B, {B, C}, PAD)
        assert (t.special_tokens, t.chat_templates) == (first.special_tokens, TEMPLATES)
        assert (t.id_of("</s>"), t.encode("</s>")) == (TAG, [TAG])
    assert open_weights(tmp_path / "hf").marks == Marks(A, (B, C), PAD)
    assert {*tokenizer_files(str(tmp_path / "hf" / "tokenizer.json"))} >= {"generation_config.json"}


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 109552\n"


def edit(name, *left_out, **changes):
    def of(folder):
        about = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(json.dumps({k: x for k, x in about.items() if k not in left_out}))

    return of


def tensors(name, **more):
    return lambda folder: save_file(load_file(folder / name) | more, folder / name, {"format": "pt"})


def moved(old, new):
    return lambda folder: (folder / old).rename(folder / new)


def pointer(name):
    return lambda folder: (folder / name).write_text(POINTER)


MODEL, ADAPTER, ABOUT = "model.safetensors", "adapter_model.safetensors", "adapter_config.json"
PICKLE = "is a pickle, which can run code when it is read, so it is not"
HEAD = 'lacks .lm_head.weight.*write "tie_word_embeddings": true'
EMBEDDING = "adapts or replaces the embedding .*; merge it in peft by merge_and_unload"
HUB = "which is not here; give it with --base; if it is on the Hugging Face Hub, first run: hf download org/base-1B"
ADDED = {"base_model.model.model.embed_tokens.weight": np.zeros((272, 16), "f4")}
ODD = [
    (moved(MODEL, "pytorch_model.bin"), f"pytorch_model.bin {PICKLE}"),
    (moved(MODEL, "pytorch_model.bin.index.json"), f"pytorch_model.bin.index.json {PICKLE}"),
    (edit("config.json", tie_word_embeddings=False), HEAD),
    (edit("config.json", "tie_word_embeddings"), HEAD),
    *((pointer(n), "pointer of Git LFS") for n in (MODEL, "config.json", "generation_config.json", "tokenizer.json")),
]
ODD_ADAPTERS = [
    (moved(ADAPTER, "adapter_model.bin"), f"adapter_model.bin {PICKLE}"), (pointer(ADAPTER), "pointer of Git LFS"),
    (edit(ABOUT, target_modules=["q_proj", "embed_tokens"]), EMBEDDING),
    (edit(ABOUT, modules_to_save=["model.embed_tokens"]), EMBEDDING), (tensors(ADAPTER, **ADDED), EMBEDDING),
    (edit(ABOUT, base_model_name_or_path="org/base-1B"), HUB),
]  # fmt: skip


@pytest.mark.parametrize("odd", [*ODD, *ODD_ADAPTERS])
def test_an_odd_directory_says_what_it_is(odd, model, adapter):
    change, words = odd
    change(adapter if odd in ODD_ADAPTERS else model)

    def opened():
        if odd in ODD_ADAPTERS:
            return open_adapter(adapter, open_weights(named_base(adapter)).config)
        return get_tokenizer(str(open_weights(model).tokenizer))

    fails(words, opened)


def test_an_adapter_beside_the_config_of_its_base_is_merged(model, adapter):
    assert (adapter / "config.json").is_file()
    a, b = load_file(adapter / ADAPTER).values()
    name, base = "model.layers.0.self_attn.q_proj.weight", open_weights(named_base(adapter))
    np.testing.assert_allclose(merge(base, [adapter]).read(name), base.read(name) + 2 * b @ a, atol=1e-6)
    fails("is an adapter, which needs its base model", open_weights, adapter)


@pytest.mark.parametrize("of", ["model.rotary_emb", "model.layers.0.self_attn.rotary_emb", "rotary_emb_local"])
def test_buffers_of_positions_are_passed_over(of, model):
    tensors(MODEL, **{f"{of}.inv_freq": np.ones(4, "f4")})(model)
    assert np.isfinite(open_weights(model).read("model.norm.weight")).all()
    tensors(MODEL, **{f"{of}.weight": np.ones(4, "f4")})(model)
    fails(r"has '.*rotary_emb.*\.weight' and 0 more", open_weights, model)


def test_a_cap_that_other_programs_ignore_is_not_written(tmp_path):
    config = replace(PRESETS["gemma3-tiny"], attn_logit_softcapping=9.0)
    with pytest.raises(UserError, match=r"attn_logit_softcapping is 9\.0, which transformers and llama.cpp ignore"):
        save_weights(tmp_path / "out", config, draw(config.shapes(), 3).__getitem__)
    assert not (tmp_path / "out").exists()

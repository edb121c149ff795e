"""GGUF: sizes and tensors both ways, blocks as the package gguf makes and reads them."""

import sys
from dataclasses import replace

import numpy as np
import pytest
from golden.llama2c import draw
from test_hostile_files import with_metadata
from verbs import error_of, fails, refused

from cpuopt import cli
from cpuopt.errors import UserError
from cpuopt.files import gguf as container
from cpuopt.models import gpt2
from cpuopt.models.families import Gemma2, Gemma3, Mistral, Olmo2, Phi3, Qwen2, Qwen3, SmolLM3
from cpuopt.models.llama import KINDS, Config
from cpuopt.ops.dequantize import Quantized
from cpuopt.weights import gguf as file_of
from cpuopt.weights import open_weights, save_weights
from cpuopt.weights.tensors import TensorFile, from_bf16, to_bf16

SMALL = Config(61, 32, 64, 2, 4, 2, 8, 16, rope_theta=5e5, rms_norm_eps=1e-6)
LLAMA3 = {"rope_original_positions": 32, "rope_low_freq_factor": 2.0}
LONGROPE = {"rope_type": "longrope", "rope_original_positions": 16}
FACTORS = {"rope_short_factor": (1.0, 1.05, 2.5), "rope_long_factor": (1.0, 4.0, 8.1)}
WINDOW = {"sliding_window": 8, "query_pre_attn_scalar": 8}
LINEAR = {"rope_type": "linear", "rope_factor": 8.0, "rope_theta": 1e6, "rope_local_base_freq": 2e4}
CASES = {
    "llama": SMALL,
    "llama-tied": replace(SMALL, tie_word_embeddings=True, attention_bias=True),
    "llama-3": replace(SMALL, rope_type="llama3", rope_factor=8.0, **LLAMA3),
    "llama-linear": replace(SMALL, rope_type="linear", rope_factor=2.5),
    "qwen2": Qwen2(61, 32, 64, 2, 4, 2, 8, 16),
    "qwen3": Qwen3(61, 32, 64, 2, 4, 2, 16, 16, tie_word_embeddings=True),
    "qwen3-yarn": Qwen3(61, 32, 64, 2, 4, 2, 8, 64, rope_type="yarn", rope_factor=4.0, rope_original_positions=16),
    "smollm3": SmolLM3(61, 32, 64, 5, 4, 2, 8, 16),
    "olmo2": Olmo2(61, 32, 64, 2, 4, 2, 8, 16),
    "phi3": Phi3(61, 32, 64, 2, 4, 2, 8, 16, sliding_window=12),
    "phi3-longrope": Phi3(61, 32, 64, 2, 4, 2, 8, 64, partial_rotary_factor=0.75, **LONGROPE, **FACTORS),
    "gemma2": Gemma2(61, 32, 64, 2, 4, 2, 8, 16, **WINDOW),
    "gemma3": Gemma3(61, 32, 64, 3, 4, 2, 8, 16, final_logit_softcapping=3.5, **WINDOW, **LINEAR),
    "gemma3-full": Gemma3(61, 32, 64, 2, 4, 2, 8, 16, sliding_window=None, query_pre_attn_scalar=8),
    "gpt2": gpt2.Config(2, 2, 32, 61, 16),
}


def drawn(config, dtype="f32"):
    """Parameters that a type has exactly."""
    rounded = {"f32": lambda x: x, "bf16": lambda x: from_bf16(to_bf16(x)), "f16": lambda x: np.float32(np.float16(x))}
    return {name: rounded[dtype](x) for name, x in draw(config.shapes(), 5).items()}


@pytest.fixture
def saved(tmp_path):
    """Save a model; give the path, what it holds and what is read from it."""

    def save(config, dtype="f32", name="m.gguf"):
        params = drawn(config)
        save_weights(tmp_path / name, config, params.__getitem__, dtype)
        return tmp_path / name, params, open_weights(tmp_path / name)

    return save


NARROW = [(case, dtype) for case in ("llama-tied", "gpt2") for dtype in ("bf16", "f16")]


@pytest.mark.parametrize(("case", "dtype"), [*((case, "f32") for case in CASES), *NARROW])
def test_a_directory_comes_back_identical(case, dtype, tmp_path):
    config, params = CASES[case], drawn(CASES[case], dtype)
    save_weights(tmp_path / "hf", config, params.__getitem__, dtype)
    words = {"f32": "F32", "bf16": "BF16", "f16": "F16"}
    assert cli.main(["convert", str(tmp_path / "hf"), str(tmp_path / "m.gguf")]) == 0
    stored = container.Gguf(tmp_path / "m.gguf").tensors.items()
    assert {t.dtype for n, t in stored if n != "position_embd.weight" and len(t.shape) > 1} == {words[dtype]}
    assert cli.main(["convert", str(tmp_path / "m.gguf"), str(tmp_path / "back")]) == 0
    rounded = dtype == "f32" and case.startswith("gemma")  # by the 1 that is added to a norm's weight
    for name in ("config.json", *["model.safetensors"] * (not rounded)):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()
    weights = open_weights(tmp_path / "m.gguf")
    assert weights.config == config
    for name, x in params.items():
        far = 2**-23 * (rounded and name.endswith("norm.weight"))
        np.testing.assert_allclose(weights.read(name), x, rtol=0, atol=far)
    if dtype == "f32":  # a file of a narrow type has float32 vectors, which it keeps exact
        save_weights(tmp_path / "narrow.gguf", config, params.__getitem__, "bf16")
        narrow = open_weights(tmp_path / "narrow.gguf")
        assert narrow.dtype == "f32"
        assert all(np.array_equal(narrow.read(n), weights.read(n)) for n, x in params.items() if x.ndim == 1)


def test_tensors_lie_as_llama_cpp_has_them(tmp_path):
    """Those of Phi-3 are joined as in a directory, and the norms of Gemma have the 1 that is added to them."""
    for config, pairs in (
        (CASES["phi3-longrope"], {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}),
        (CASES["gemma3"], {"self_attn.k_norm": "attn_k_norm", "pre_feedforward_layernorm": "ffn_norm"}),
        (CASES["gemma2"], {"post_attention_layernorm": "post_attention_norm", "mlp.up_proj": "ffn_up"}),
    ):
        params, shift = drawn(config), config.norm_shift
        save_weights(tmp_path / config.model, config, params.__getitem__)
        save_weights(path := tmp_path / f"{config.model}.gguf", config, params.__getitem__)
        directory, file = TensorFile(tmp_path / config.model / "model.safetensors"), container.Gguf(path)
        for here, there in pairs.items():
            x = directory.read(f"model.layers.1.{here}.weight")
            got = file_of._numbers(file, f"blk.1.{there}.weight")
            assert np.array_equal(got, x + np.float32(shift) if "norm" in here else x), there
        assert not {name for name in file.tensors if name.startswith("output.")} or not config.tie_word_embeddings


def rewritten(path, **changes):
    """Write a file again with other metadata; None leaves a key out."""
    path.write_bytes(with_metadata(path, **changes))


COUNT = "rope__dimension_count"
CHANGED = [
    *(("phi3", {f"phi3__{COUNT}": n}, f"rope.dimension_count is {n}; expected 1 to 8") for n in (0, 9, "x")),
    ("phi3", {"phi3__attention__head_count": 0}, "phi3.attention.head_count is 0"),
    ("phi3", {"phi3__embedding_length": "x"}, "phi3.attention.head_count is 4; expected one for some"),
    ("phi3", {"phi3__rope__scaling__attn_factor": 1.25}, "rope.scaling.attn_factor is 1.25, and there is no tensor"),
    ("phi3-longrope", {"phi3__rope__dimension_count": 8}, "rope_short_factor has 3 numbers; expected 4"),
    ("gemma3", {"gemma3__attn_logit_softcapping": 9.0}, "gemma3.attn_logit_softcapping is 9.0"),
    ("llama", {"split__count": 3, "general__architecture": None}, "is one of 3 files of a model"),
]


@pytest.mark.parametrize(("case", "changes", "said"), CHANGED)
def test_other_metadata_are_refused_by_their_key(case, changes, said, saved):
    path, _, _ = saved(CASES[case])
    rewritten(path, **changes)
    assert said in error_of(open_weights, path)


def test_metadata_that_others_write(saved):
    """A pattern of windows, a file that was joined, and keys that llama.cpp has a default for."""
    for case, changes, want in (
        ("gemma3", {"gemma3__attention__sliding_window_pattern": 2}, {"layer_types": (KINDS[1], KINDS[0], KINDS[1])}),
        ("gemma3", {"gemma3__rope__freq_base_swa": None}, {"rope_local_base_freq": 1e4}),
        ("gemma2", {"gemma2__attn_logit_softcapping": None}, {"attn_logit_softcapping": 50.0}),
        ("phi3", {"phi3__attention__key_length": None, "phi3__attention__value_length": None}, {}),
        ("phi3-longrope", {"phi3__rope__scaling__attn_factor": None}, {"rope_attention_factor": 1.0}),
        ("llama", {"llama__attention__head_count_kv": np.array([2, 2], "<u4")}, {}),
        ("llama", {"split__count": 0}, {}),
        ("llama", {"llama__rope__dimension_count": None, "llama__vocab_size": None}, {}),
    ):
        path, _, _ = saved(CASES[case])
        rewritten(path, **changes)
        assert open_weights(path).config == replace(CASES[case], **want), case
        path.unlink()


def test_the_largest_gemma_divides_scores_by_its_width_for_a_head(saved):
    config = Gemma2(61, 32, 8, 46, 4, 2, 4, 16, sliding_window=8, query_pre_attn_scalar=8)
    assert saved(config)[2].config == config
    fails("with query_pre_attn_scalar 8; got 4", file_of.require, replace(config, query_pre_attn_scalar=4))


def test_rows_of_q_and_k_lie_as_llama_cpp_rotates_them(saved):
    """Of a head of 8: the channels 0, 4, 1, 5 and so on for llama, and qwen2's as they are."""
    for config, order in ((SMALL, [0, 4, 1, 5, 2, 6, 3, 7]), (CASES["qwen2"], list(range(8)))):
        path, params, _ = saved(config, name=f"{config.model}.gguf")
        there = file_of._numbers(container.Gguf(path), "blk.1.attn_k.weight")
        assert np.array_equal(there[:8], params["model.layers.1.self_attn.k_proj.weight"][:8][order])


def test_a_scaling_of_llama_3_of_other_files(saved):
    """They have the tensor alone, for 8192 positions and the factors 1 and 4; another tensor is refused."""
    config = replace(SMALL, head_dim=64, rope_type="llama3", rope_factor=32.0)
    path, _, _ = saved(config)
    file = container.Gguf(path)
    divisors = file_of._numbers(file, "rope_freqs.weight")
    assert (divisors[0], divisors[-1]) == (1, 32)
    assert 1 < divisors[17] < 32
    own = {k: x for k, x in file.metadata.items() if not k.startswith("cpuopt.")}
    assert not any("scaling" in key for key in own)  # llama.cpp would scale once more
    rewritten(path, **dict.fromkeys(k.replace(".", "__") for k in file.metadata.keys() - own.keys()))
    assert open_weights(path).config == config
    content, place = bytearray(path.read_bytes()), container.Gguf(path).tensors["rope_freqs.weight"]
    divisors[17] *= np.float32(1.01)
    content[place.start : place.start + place.size] = divisors.tobytes()
    path.write_bytes(content)
    assert "is no scaling of Llama 3" in error_of(open_weights, path)


def test_a_mistral_is_a_llama_of_its_window(saved):
    """llama.cpp reads a Mistral as a llama, without its window; within that window both compute the same."""
    _, params, weights = saved(Mistral(61, 32, 64, 2, 4, 2, 8, 64, sliding_window=16))
    assert weights.config == Config(61, 32, 64, 2, 4, 2, 8, 16)
    assert all(np.array_equal(weights.read(name), x) for name, x in params.items())


REFUSED = {
    "no_rope_layers": SmolLM3(61, 32, 64, 2, 4, 2, 8, 16, no_rope_layers=(0, 1)),
    "tie_word_embeddings": Olmo2(61, 32, 64, 2, 4, 2, 8, 16, tie_word_embeddings=True),
    "head_dim": Olmo2(61, 32, 64, 2, 4, 2, 16, 16),
    "rope_attention_factor": replace(CASES["qwen3-yarn"], rope_attention_factor=1.5),
    "rope_type is 'dynamic'": replace(SMALL, rope_type="dynamic", rope_factor=2.0),
    "rope_type is 'yarn'": Phi3(61, 32, 64, 2, 4, 2, 8, 16, rope_type="yarn", rope_original_positions=4),
    "a number sliding_window": replace(CASES["gemma2"], sliding_window=None),
    "with layer_types": replace(CASES["gemma3"], layer_types=(KINDS[0],) * 3),
    "with query_pre_attn_scalar 8": replace(CASES["gemma3"], query_pre_attn_scalar=10),
    "with attn_logit_softcapping None": replace(CASES["gemma3"], attn_logit_softcapping=9.0),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_llama_cpp_computes_otherwise_is_not_written(words, tmp_path):
    config = REFUSED[words]
    fails(words, save_weights, tmp_path / "m.gguf", config, drawn(config).__getitem__)
    assert not (tmp_path / "m.gguf").exists()


def test_another_model_and_another_type_are_refused(tmp_path, saved, capsys, monkeypatch):
    path, params, _ = saved(SMALL)
    said = refused(capsys, "convert", str(path), str(tmp_path / "new"), "--dtype", "q8_0")
    assert "a Hugging Face directory holds float32, f16, bf16; got q8_0" in said

    class Odd(Config):
        model = "odd"

    with pytest.raises(UserError, match="GGUF has no architecture for the model odd; name a directory"):
        save_weights(tmp_path / "odd.gguf", Odd(61, 32, 64, 2, 4, 2, 8, 16), params.__getitem__)
    monkeypatch.setattr(container, "LARGEST", 1000)
    assert "its header goes on for" in error_of(open_weights, path)
    assert {p.name for p in tmp_path.iterdir()} == {"m.gguf"}


# Blocks, with the package gguf ----------------------------------------------------------------------------------------


@pytest.fixture
def package():
    return pytest.importorskip("gguf")


def test_the_package_reads_what_is_written(package, saved):
    for case, config in CASES.items():
        path, _, _ = saved(config, name=f"{case}.gguf")
        there, ours = package.GGUFReader(path), container.Gguf(path)
        assert all(np.array_equal(t.data, file_of._numbers(ours, t.name)) for t in there.tensors)
        for key, x in ours.metadata.items():
            got = there.fields[key].contents()
            assert got == x if not isinstance(x, float) else np.float32(got) == np.float32(x)


def test_sizes_of_blocks_are_those_of_the_package(package):
    for name, (number, *sizes) in container.STORED.items():
        kind = package.GGMLQuantizationType[name]
        assert (int(kind), *package.GGML_QUANT_SIZES[kind]) == (number, *sizes)


def test_q8_0_is_that_of_the_package_and_as_near_as_said(package, saved, tmp_path):
    """Of the largest of 32 numbers, 0.0045: half a step of 1/127, and the rounding of the step to float16."""
    path, params, weights = saved(SMALL, "q8_0")
    assert weights.dtype == "q8_0"
    far = 0.0
    for name, x in params.items():
        got = weights.read(name)
        if x.ndim == 1:
            assert np.array_equal(got, x)
            continue
        blocks, near = x.reshape(-1, 32), got.reshape(-1, 32)
        far = max(far, float((np.abs(blocks - near).max(1) / np.abs(blocks).max(1)).max()))
    assert 0.003 < far < 0.0045
    place, up = container.Gguf(path).tensors["blk.0.ffn_up.weight"], "model.layers.0.mlp.up_proj.weight"
    want = package.quantize(params[up], package.GGMLQuantizationType.Q8_0)
    assert path.read_bytes()[place.start : place.start + place.size] == want.tobytes()
    base, raw = Quantized.made(weights.read(up), "q8_0"), want.reshape(-1, 34)
    assert np.array_equal(base.scales, raw[:, :2].copy().view(np.float16)[:, 0])  # the int8 base of fine-tuning
    assert np.array_equal(base.blocks, raw[:, 2:].view(np.int8))
    save_weights(tmp_path / "again.gguf", SMALL, weights.read, "q8_0")
    again = open_weights(tmp_path / "again.gguf")
    assert all(np.allclose(again.read(n), weights.read(n), rtol=1e-3, atol=1e-6) for n in params)


def test_rows_that_fill_no_blocks_are_float16(package, saved):
    path, params, weights = saved(replace(SMALL, intermediate_size=40), "q8_0")
    kinds = {name: t.dtype for name, t in container.Gguf(path).tensors.items()}
    assert (kinds["blk.0.ffn_down.weight"], kinds["blk.0.ffn_up.weight"]) == ("F16", "Q8_0")
    down = "model.layers.0.mlp.down_proj.weight"
    assert np.array_equal(weights.read(down), np.float32(np.float16(params[down])))


@pytest.mark.parametrize("kind", [k for k, (_, block, _) in container.STORED.items() if block > 1])
def test_every_kind_of_blocks_is_read(package, kind, tmp_path):
    number, block, width = container.STORED[kind]
    raw = np.random.default_rng(number).integers(0, 256, (256 * 256 // block, width), np.uint8)
    raw[:, :4] = raw[:, -4:] = np.float16([0.01, 0.02]).view(np.uint8)  # scales that are numbers
    (path := tmp_path / "m.gguf").write_bytes(container.header({}, {"x": (kind, (256, 256))}) + raw.tobytes())
    got = file_of._numbers(container.Gguf(path), "x")
    assert np.isfinite(got).all()
    assert len(np.unique(got)) > 8
    assert np.array_equal(got, package.dequantize(raw.reshape(256, -1), package.GGMLQuantizationType[kind]))


def test_a_scale_that_is_no_number_is_refused(package, saved, tmp_path, capsys):
    path, _, _ = saved(Config(64, 64, 64, 1, 4, 2, 16, 16, tie_word_embeddings=True), "q8_0")
    place, content = container.Gguf(path).tensors["blk.0.ffn_up.weight"], bytearray(path.read_bytes())
    for scale in (np.nan, np.inf):
        content[place.start : place.start + 2] = np.float16(scale).tobytes()
        path.write_bytes(content)
        line = refused(capsys, "convert", str(path), str(tmp_path / "hf"))
        assert all(x in line for x in ("mlp.up_proj.weight holds", "expected finite numbers"))


def test_a_missing_package_is_named(saved, tmp_path, monkeypatch, capsys, package):
    path, _, _ = saved(SMALL, "q8_0")
    monkeypatch.setitem(sys.modules, "gguf", None)
    for target in ("hf", "n.gguf"):
        said = refused(capsys, "convert", str(path), str(tmp_path / target))
        assert "needs the library gguf, which is not installed; pip install 'cpuopt[gguf]'" in said

"""Weights in files: llm.c and Hugging Face both ways, and files that lie."""

import json
import os
import struct
import zipfile
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from golden.params import make_params
from test_hostile_files import taking
from verbs import error_of, fails, printed, refused

from cpuopt import Choice, cli
from cpuopt.engine import Engine
from cpuopt.errors import UserError
from cpuopt.models.gpt2 import Config
from cpuopt.train import job
from cpuopt.weights import copy_into, llmc, open_weights, save_weights
from cpuopt.weights.huggingface import NAMES
from cpuopt.weights.tensors import HEADER_LIMIT, TensorFile, all_below, from_bf16, to_bf16

GOLDEN = Path(__file__).parent / "golden"
SMALL = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 61, "block_size": 8}
CONFIG = Config(**SMALL)


@pytest.fixture(scope="module")
def params():
    return make_params(**SMALL, seed=17)


def same(weights, params):
    return all(np.array_equal(weights.read(name), p) for name, p in params.items())


def hf_names(params, prefix="transformer."):
    """The arrays as transformers keeps them."""
    turned = NAMES["gpt2"].transposed.fullmatch
    return {f"{prefix}{n}": np.ascontiguousarray(p.T) if turned(n) else p for n, p in params.items()}


def hf_folder(path, arrays, **config):
    path.mkdir()
    given = {"model_type": "gpt2", **{k: v for k, v in SMALL.items() if k != "block_size"}, "n_positions": 8}
    (path / "config.json").write_text(json.dumps({**given, **config}))
    safetensors.numpy.save_file(arrays, path / "model.safetensors", metadata={"format": "pt"})
    return path


# llm.c


def test_an_llmc_model_has_pytorchs_numbers_and_is_written_byte_for_byte(tmp_path, params):
    weights = open_weights(GOLDEN / "llmc.bin")
    assert (weights.config, weights.dtype, weights.padded_vocab) == (CONFIG, "f32", 128)
    assert same(weights, params)
    save_weights(tmp_path / "again.bin", weights.config, weights.read)
    assert (tmp_path / "again.bin").read_bytes() == (GOLDEN / "llmc.bin").read_bytes()


@pytest.mark.parametrize("padded", [61, 64, 128, 200])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_every_padding_and_type_is_kept(tmp_path, params, padded, dtype):
    save_weights(one := tmp_path / "one.bin", CONFIG, params.__getitem__, dtype, padded)
    assert one.stat().st_size == 1024 + {"f32": 4, "bf16": 2}[dtype] * (CONFIG.n_params + (padded - 61) * 16)
    assert (convert(one, tmp_path / "two.bin"), (tmp_path / "two.bin").read_bytes()) == (0, one.read_bytes())
    weights = open_weights(one)
    assert (weights.padded_vocab, weights.dtype) == (padded, dtype)
    assert same(weights, {name: from_bf16(to_bf16(p)) if dtype == "bf16" else p for name, p in params.items()})


def test_bfloat16_is_the_nearest_and_ties_go_to_even():
    ties = {0x3F808000: 0x3F80, 0x3F818000: 0x3F82}  # to even
    ends = {0x7F7FFFFF: 0x7F80, 0xFF800000: 0xFF80}  # beyond the largest is infinity
    nan = {0x7F800001: 0x7FC0}  # does not become infinity
    want = {0x3F800000: 0x3F80, 0x3F808001: 0x3F81, 0x3F807FFF: 0x3F80} | ties | ends | nan
    assert to_bf16(np.array([*want], np.uint32).view(np.float32)).tolist() == [*want.values()]
    every = np.arange(1 << 16, dtype=np.uint16)
    every = every[np.isfinite(from_bf16(every))]
    assert np.array_equal(to_bf16(from_bf16(every)), every)


# Hugging Face


@pytest.mark.parametrize("prefix", ["", "transformer."])
@pytest.mark.parametrize("older", [False, True])
def test_a_hugging_face_directory_is_read(tmp_path, params, prefix, older):
    arrays = hf_names(params, prefix)
    if older:
        arrays |= {f"{prefix}h.{i}.attn.bias": np.ones((1, 1, 8, 8), bool) for i in range(2)}
        arrays |= {f"{prefix}h.0.attn.masked_bias": np.array(-1e4, "f4"), "lm_head.weight": params["wte.weight"]}
    weights = open_weights(hf_folder(tmp_path / "hf", arrays))
    assert weights.config == CONFIG
    assert same(weights, params)
    assert same(open_weights(tmp_path / "hf" / "model.safetensors"), params)


def convert(*flags):
    return cli.main(["convert", *map(str, flags)])


def test_what_is_written_is_what_the_library_reads(tmp_path, params):
    assert convert(GOLDEN / "llmc.bin", tmp_path / "hf") == 0
    arrays, want = safetensors.numpy.load_file(tmp_path / "hf" / "model.safetensors"), hf_names(params)
    assert arrays.keys() == want.keys()
    assert all(np.array_equal(arrays[n], want[n]) for n in want)
    with safetensors.safe_open(tmp_path / "hf" / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]
    for dtype in ("f32", "bf16"):
        assert convert(GOLDEN / "llmc.bin", tmp_path / f"{dtype}.bin", "--dtype", dtype) == 0
        assert convert(GOLDEN / "llmc.bin", tmp_path / dtype, "--dtype", dtype) == 0
        assert convert(tmp_path / dtype, tmp_path / "back.bin") == 0
        assert (tmp_path / "back.bin").read_bytes() == (tmp_path / f"{dtype}.bin").read_bytes()
        (tmp_path / "back.bin").unlink()


def sharded(path, arrays):
    hf_folder(path, arrays)
    (path / "model.safetensors").unlink()
    names = {name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(arrays)}
    for file in set(names.values()):
        safetensors.numpy.save_file({n: a for n, a in arrays.items() if names[n] == file}, path / file)
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": names}))
    return names, index


def test_shards_are_one_model(tmp_path, params):
    sharded(tmp_path / "hf", hf_names(params))
    assert same(open_weights(tmp_path / "hf"), params)
    assert same(open_weights(tmp_path / "hf" / "model.safetensors.index.json"), params)


def test_an_index_that_lies_or_names_files_elsewhere_is_refused(tmp_path, params):
    names, index = sharded(tmp_path / "hf", hf_names(params))
    first, *others = names
    elsewhere = "../model.safetensors", "/etc/passwd", "a/b.safetensors", "x.bin", 5, None
    for lie, said in (
        ({n: names[n] for n in others}, "lists 27 tensors; its files have 28"),
        ({**names, first: names[others[0]]}, "which it has not"),
        *(({**names, first: file}, "files beside it") for file in elsewhere),
    ):
        index.write_text(json.dumps({"weight_map": lie}))
        assert said in error_of(open_weights, tmp_path / "hf")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "mamba"}, "there is no model 'mamba'"),
        ({"activation_function": "relu"}, "activation_function is 'relu'"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is '1e-06'"),
        ({"scale_attn_by_inverse_layer_idx": True}, "inverse"),
        *(({"tie_word_embeddings": False}, "tie"), ({"n_inner": 5}, "n_inner is 5"), ({"n_layer": 3}, "lacks 'h.2")),
        *(({"n_layer": 1}, "has 'h.1"), ({"n_layer": "2"}, "whole number"), ({"n_head": 3}, "multiple")),
        ({"n_layer": 9 * 10**60}, "n_layer is 9000"),  # found by fuzzing: each was named
        *(({"vocab_size": 60}, "shape (61, 16)"), ({"n_positions": 9}, "shape (8, 16)")),
    ],
)
def test_a_model_that_is_computed_otherwise_is_refused(tmp_path, params, config, said):
    assert said in error_of(open_weights, hf_folder(tmp_path / "hf", hf_names(params), **config))


def test_other_contents_are_refused(tmp_path, params):
    arrays = hf_names(params)
    cases = {
        "untied": arrays | {"lm_head.weight": params["wte.weight"] + 1},
        "not transposed": arrays | {"transformer.h.0.attn.c_attn.weight": params["h.0.attn.c_attn.weight"]},
        "whole numbers": arrays | {"transformer.ln_f.bias": np.ones(16, np.int32)},
        "twice": arrays | {"ln_f.bias": params["ln_f.bias"]},
        "strange": arrays | {"<script>": params["ln_f.bias"]},
        "far": arrays | {"../../etc/x y": params["ln_f.bias"]},
    }
    for name, case in cases.items():
        error_of(open_weights, hf_folder(tmp_path / name.replace(" ", "-"), case))
    (tmp_path / "empty").mkdir()
    assert "neither" in error_of(open_weights, tmp_path / "empty")
    (tmp_path / "empty" / "pytorch_model.bin").write_bytes(b"\x80\4")
    assert "pickle" in error_of(open_weights, tmp_path / "empty")


def test_a_weight_that_is_no_number_is_named(tmp_path, params):
    bad = params["h.1.mlp.c_fc.bias"].copy()
    bad[3] = np.nan
    weights = open_weights(hf_folder(tmp_path / "hf", hf_names(params | {"h.1.mlp.c_fc.bias": bad})))
    arrays = {n: np.empty(s, np.float32) for n, s in CONFIG.shapes().items()}
    fails(r"h.1.mlp.c_fc.bias holds nan at \(3,\)", copy_into, arrays, weights)


class Runs:
    """What a pickle does when it is read."""

    def __reduce__(self):
        return Path.touch, (Path("ran"),)


def test_arrays_of_numpy_are_no_weights_and_run_nothing(here):
    np.save("objects.npy", np.array([Runs()], object), allow_pickle=True)
    with zipfile.ZipFile("bomb.npz", "w", zipfile.ZIP_DEFLATED) as file, file.open("a.npy", "w") as part:
        for _ in range(64):
            part.write(bytes(1 << 20))
    with pytest.raises(ValueError, match=r"magic|allow_pickle"):
        np.load("objects.npy")
    for name in ("objects.npy", "bomb.npz"):
        for target in (name, "model.bin", "model.safetensors"):
            if target != name:
                Path(target).write_bytes(Path(name).read_bytes())
            fails(r"pickle|magic|header|bytes|config", open_weights, Path(target))
    assert not Path("ran").exists()
    np.load("objects.npy", allow_pickle=True)  # the mutant: what a reader of pickles would do
    assert Path("ran").exists()


def test_a_file_that_shrinks_is_an_error_and_no_crash(tmp_path, params):
    weights = open_weights(hf_folder(tmp_path / "hf", hf_names(params)))
    os.truncate(tmp_path / "hf" / "model.safetensors", 5000)
    fails("ended while it was read", lambda: [weights.read(name) for name in params])


def test_a_header_takes_memory_of_a_few_times_its_size(tmp_path):
    entries = (f'"{i:x}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(9_000))
    header = ("{" + ",".join(entries) + "}").encode()
    (path := tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with taking(100e6 * len(header) / HEADER_LIMIT):  # 100 MB for the largest
        file = TensorFile(path)
    assert len(file.tensors) == 9_000


# Writing


@pytest.mark.parametrize("target", ["x.bin", "x"])
def test_a_disk_that_fails_leaves_nothing(tmp_path, monkeypatch, params, target):
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    fails("No space left", save_weights, tmp_path / target, CONFIG, params.__getitem__)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("target", ["x.bin", "x"])
@pytest.mark.parametrize(("dtype", "bad"), [("f32", np.nan), ("f32", -np.inf), ("bf16", np.nan), ("bf16", -3.4e38)])
def test_numbers_that_a_file_cannot_hold_are_not_written(tmp_path, params, target, dtype, bad):
    wrong = {name: x.copy() for name, x in params.items()}
    wrong["h.1.mlp.c_fc.bias"][-1] = bad
    with pytest.raises(UserError, match=r"is not written: h\.1\.mlp\.c_fc\.bias holds .* at \(.*\); expected finite"):
        save_weights(tmp_path / target, CONFIG, wrong.__getitem__, dtype)
    assert list(tmp_path.iterdir()) == []
    wrong["h.1.mlp.c_fc.bias"][-1] = 3.38e38
    save_weights(tmp_path / target, CONFIG, wrong.__getitem__, dtype)
    assert open_weights(tmp_path / target).read("h.1.mlp.c_fc.bias")[-1] > 3.3e38


# In training


def settings_for(tmp_path, **more):
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(32 + i * i % 29) for i in range(4000)))
    return job.Settings(**{"data": str(text), "B": 2, "T": 8, "variant": "vanilla", "val_every": 0} | more)


def test_training_starts_from_weights_and_saves_them(tmp_path, params, capsys):
    settings = settings_for(tmp_path)
    flags = ["--data", settings.data, "-B", "2", "-T", "8", "--variant", "vanilla", "--runs", str(tmp_path / "runs")]
    flags += ["--steps", "1", "--val-every", "0", "--init", str(GOLDEN / "llmc.bin"), "--save", str(tmp_path / "b")]
    printed(capsys, "train", *flags)
    trained = open_weights(tmp_path / "b")
    moved = {n: np.abs(trained.read(n) - p).max() for n, p in params.items()}
    assert 0 < max(moved.values()) < 1.1e-4  # a step of Adam is at most the learning rate
    ready = job.prepare(settings_for(tmp_path, init=str(tmp_path / "b")))
    assert ready.config == CONFIG
    assert same(trained, ready.engine.parameters())
    assert "is there already" in refused(capsys, "train", *flags)


def test_sizes_that_the_weights_do_not_have_are_refused(tmp_path):
    init = str(GOLDEN / "llmc.bin")
    with pytest.raises(UserError, match=r"has n_layer 12, and --init .* has 2; leave --model out"):
        job.prepare(settings_for(tmp_path, init=init, model="gpt2-124M"))
    assert job.model_of(settings_for(tmp_path, init=init, model=json.dumps(SMALL)))[1].config == CONFIG
    fails("there is no", job.prepare, settings_for(tmp_path, init=str(tmp_path / "nowhere")))


@pytest.mark.parametrize("variant", ["vanilla", "optimized"])
def test_llmcs_own_test_passes(variant):
    """``test_gpt2.c``: PyTorch's logits, loss, gradients, and losses of ten steps, in files as llm.c writes them."""
    ints, floats = (np.fromfile(GOLDEN / "llmc_debug_state.bin", kind) for kind in ("<i4", "<f4"))
    B, T = map(int, ints[2:4])
    V, end = CONFIG.vocab_size, 256 + 2 * B * T
    tokens, targets = ints[256:end].reshape(2, B, T)
    near = partial(np.testing.assert_allclose, rtol=0, atol=2e-5)
    engine = Engine.from_options(*CONFIG.sized(B, T), choice=Choice(variant), seed=None, threads=1)
    copy_into(engine.parameters(), open_weights(GOLDEN / "llmc.bin"))
    loss = engine.forward(tokens=tokens, targets=targets)
    near(engine.array(engine.program.outputs[1]).ravel(), floats[end : (at := end + B * T * V)])
    near(loss, floats[at])
    engine.run("backward")
    places, gradients = llmc.places_of(CONFIG, 128), engine.gradients()
    assert {*gradients} == {*CONFIG.shapes()}
    for name, g in gradients.items():
        start = at + 1 + places[name]
        near(g.ravel(), floats[start : start + g.size], err_msg=name)
    how = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
    losses = [engine.step(tokens=tokens, targets=targets, **how).loss for _ in range(10)]
    near(losses, json.loads((GOLDEN / "llmc_losses.json").read_text()))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2.0, -2.0])
def test_a_number_beyond_the_limit_is_seen_wherever_it_stands_without_memory(bad):
    array = np.full((400, 500), 1.9, np.float32)
    with taking(array.nbytes / 100):
        assert all_below(array, 2.0)
    for at in (0, 77, -1):
        other = array.copy()
        other.flat[at] = bad
        assert not all_below(other, 2.0)
        assert all_below(other) == bool(np.isfinite(bad))

"""The int8 base of fine-tuning: the bits of a base that holds the same numbers, half its memory, and exact resume.

One of `ROWS` is multiplied as int8, so its losses are near those of float32.
"""

import json
import re
import shutil
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_models import batch, model_of
from verbs import fails, goes_on, ran, refused

from cpuopt import Choice, cli, nn
from cpuopt.building import build
from cpuopt.comm.threads import Team
from cpuopt.engine import Engine
from cpuopt.generate.decoder import Decoder
from cpuopt.ops.dequantize import BLOCKS, LEAST, LIMITS, ROWS, Quantized, numbers, width_of
from cpuopt.program.fuse import FUSIONS
from cpuopt.train import checkpoint
from cpuopt.train.quantization import BOUND, error_of
from cpuopt.weights import copy_into, open_weights

RNG, WIDTH = np.random.default_rng(0), BLOCKS["int8"][0]
ADAMW, ADAPTED = {"lr": 1e-2, "weight_decay": 0.1}, ("llama-tiny", "r=2,alpha=4")

# The numbers of a weight

NORMAL = RNG.standard_normal((6, 4 * WIDTH)).astype(np.float32)
WEIGHTS = {
    "normal": NORMAL,
    "other sizes in each block": NORMAL
    * np.repeat(10.0 ** np.arange(-12, 12), WIDTH).reshape(6, -1).astype(np.float32),
    "rows across blocks": NORMAL.reshape(-1, 36 * 2 // 3),
    "zeros": np.where(NORMAL > 0.5, NORMAL, np.float32(-0.0)) * (np.arange(6)[:, None] % 2 > 0),
    "subnormal": NORMAL * np.float32(1e-42),
    "the least number": np.where(NORMAL > 0, np.float32(1e-45), 0).astype(np.float32),
    "almost too large": np.clip(NORMAL, -0.99, 0.99) * np.float32(LIMITS["bfloat16"]),
    "one outlier": np.where(np.arange(NORMAL.size).reshape(6, -1) % WIDTH == 7, np.float32(1e4), NORMAL),
}


def within_half_a_step(x, base="int8"):
    """Whether each number is as near to what is stored for it as its block's scale allows."""
    found = Quantized.made(x, base)
    half = np.repeat(found.scales.astype(np.float64) / 2, width_of(x.shape, base)).reshape(x.shape)
    assert np.isfinite(numbers(found)).all()
    if base == ROWS:
        x = np.where(np.abs(x).max(1, keepdims=True) < LEAST, np.float32(0), x)  # which count as zeros
    exact = found.view(np.ndarray).astype(np.float64) * 2 * half
    # a product of an int8 and a scale of 16 bits is a float32
    np.testing.assert_allclose(numbers(found), exact, rtol=2**-24 if base == ROWS else 0)
    return bool((np.abs(x - exact) <= half * (1 + 2**-20)).all()) and not numbers(found)[x == 0].any()


@pytest.mark.parametrize("base", BLOCKS)
@pytest.mark.parametrize("case", WEIGHTS)
def test_a_number_is_at_most_half_a_step_off(case, base):
    x, most = WEIGHTS[case], np.float32(LIMITS[BLOCKS[base][1]])
    if not np.abs(x).max() < most:
        fails("expected finite numbers below", Quantized.made, x, base)
        x = np.clip(x, -most * np.float32(0.99), most * np.float32(0.99))
    assert within_half_a_step(x, base)


def test_the_blocks_of_ggml_come_back_as_they_are():
    """Of all scales that a float16 has: each with its largest and others."""
    scales = np.arange(0x7C00, dtype=np.uint16).view(np.float16)
    q = np.random.default_rng(0).integers(-127, 128, (scales.size, 32)).astype(np.int8)
    q[np.arange(scales.size), np.arange(scales.size) % 32] = np.where(np.arange(scales.size) % 2, 127, -127)
    q[0] = 0
    x = q * scales.astype(np.float32)[:, None]
    found = Quantized.made(x, "q8_0")
    assert np.array_equal(found.blocks, q)
    assert np.array_equal(found.scales, scales)
    assert np.array_equal(numbers(found), x)
    assert not np.array_equal(numbers(Quantized.made(x)), x)  # blocks of 64 round them again
    assert found.nbytes + found.scales.nbytes == 1.0625 * x.size


def test_a_weight_is_assigned_as_a_whole():
    fails("assigned as a whole", Quantized.made(NORMAL).__setitem__, 0, 1.0)


# Steps


def engine_of(base, threads=1, **how):
    how = {"choice": Choice("optimized"), "fuse": tuple(FUSIONS), "dtype": "bfloat16"} | how
    return Engine.from_options(*model_of(*ADAPTED), base=base, threads=threads, **how)


def steps(engine, n=3):
    """Losses, and the bytes of the adapters after some steps."""
    losses = [engine.step(**batch(i), **ADAMW).loss for i in range(n)]
    return losses, {p.name: engine.array(p).tobytes() for p in engine.program.trained}


@pytest.fixture(scope="module")
def wide():
    """Three steps on a base of each type that holds what the int8 of a weight stand for."""
    found = {}

    def get(dtype, variant="optimized"):
        if (dtype, variant) not in found:
            plain = engine_of("", dtype=dtype, choice=Choice(variant))
            for name, p in engine_of("int8", dtype=dtype).parameters().items():
                plain.parameters()[name][...] = numbers(p)
            found[dtype, variant] = steps(plain)
        return found[dtype, variant]

    return get


def test_steps_on_blocks_of_ggml_are_those_on_their_numbers():
    small, plain = engine_of("q8_0"), engine_of("")
    for name, p in small.parameters().items():
        plain.parameters()[name][...] = numbers(p)
    assert {p.kind for p in small.parameters().values() if isinstance(p, Quantized)} == {"q8_0"}
    assert steps(small) == steps(plain)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_steps_are_those_on_a_base_of_the_same_numbers(wide, dtype, threads):
    losses, adapters = steps(engine_of("int8", threads, dtype=dtype))
    assert ((losses, adapters), len({*losses})) == (wide(dtype), 3)
    assert losses != steps(engine_of("", dtype=dtype))[0]  # on the weights before they were quantized


def test_blocks_that_are_computed_again_and_naive_kernels_read_the_same_numbers(wide):
    assert steps(engine_of("int8", recompute="all")) == wide("bfloat16")
    naive = {"choice": Choice("vanilla"), "dtype": "float32"}
    assert steps(engine_of("int8", **naive)) == wide("float32", "vanilla") != wide("float32")


def test_the_memory_is_a_byte_a_number_and_one_weight():
    plans = {base: build(*model_of(*ADAPTED), dtype="bfloat16", base=base) for base in ("", "int8")}
    small = plans["int8"]
    whole = [p for p in small.program.parameters if p in small.program.scales]
    outside = [p.name for p in small.program.parameters if not p.trained and p not in whole]
    assert all("norm" in name or name == "model.embed_tokens.weight" for name in outside)
    sizes = {base: built.plan().groups["parameter"] for base, built in plans.items()}
    size = sum(p.nbytes for p in whole)
    assert sizes[""] - sizes["int8"] == size - 2 * size // WIDTH
    plan = small.plan()
    lives = {v: plan.lifetimes[v] for v in plan.lifetimes if ".numbers" in v.name}
    assert all(last - first == 1 for first, last in lives.values())
    assert len({plan.offsets[v] for v in lives}) < len(lives) / 4


def test_what_has_no_frozen_weight_of_a_block_is_refused():
    given, said = model_of("gpt2-tiny"), "base 'int8': no product inside a block reads a frozen weight"
    fails(said, build, *given, base="int8", freeze=["wte.*", "*.bias"])
    built = build(*given, base="int8", freeze=["h.0.mlp.*"])
    assert {p.name for p in built.program.scales} == {"h.0.mlp.c_fc.weight", "h.0.mlp.c_proj.weight"}


# Products in int8

SLACK = 0.002
"""How far losses of a few steps may be from those of float32: three times as much as they are."""


@pytest.fixture(scope="module")
def rows():
    return steps(engine_of(ROWS))


@pytest.mark.parametrize("threads", [2, 3])
def test_products_in_int8_have_the_same_bits_on_any_threads(rows, threads):
    assert steps(engine_of(ROWS, threads)) == steps(engine_of(ROWS, recompute="all")) == rows


def assert_alike_on_any_ranks(make, total, *sizes):
    """Two steps of so many micro-batches have the same losses and weights on teams of these sizes."""

    def work(comm):
        fuse, n, losses = [name for name in FUSIONS if name != "update"], total // comm.size, []
        engine = make(fuse=fuse, micro_batches=n, comm=comm, progress=lambda *a: None)
        for step in range(2):
            first, *more = [batch(total * step + comm.rank * n + i) for i in range(n)]
            losses.append(engine.step(more=more, **first, **ADAMW).loss)
        engine.collect()
        return losses, [engine.array(p).tobytes() for p in engine.program.trained]

    (alone,) = Team(1).run(work)
    assert all(Team(size).run(work) == [alone] * size for size in sizes)


def test_products_in_int8_have_the_same_bits_on_any_ranks():
    """Gradients are rounded by the number of the micro-batch in the run, on whatever rank."""
    assert_alike_on_any_ranks(partial(engine_of, ROWS), 2, 2)


def test_products_in_int8_have_the_losses_of_float32(rows):
    exact = steps(engine_of("", dtype="float32"))[0]
    for losses in (rows[0], steps(engine_of(ROWS, dtype="float32"))[0]):
        assert losses != exact
        np.testing.assert_allclose(losses, exact, atol=SLACK)
    naive = steps(engine_of(ROWS, dtype="float32", choice=Choice("vanilla")))[0]
    np.testing.assert_allclose(naive, exact, atol=SLACK)


def test_gradients_are_rounded_by_the_seed_and_the_step():
    same, other = steps(engine_of(ROWS, seed=0)), engine_of(ROWS, seed=0)
    other.dropout_seed = 1
    found = steps(other)
    assert found != same
    np.testing.assert_allclose(found[0], same[0], atol=SLACK)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "frozen", "activation"), [
    ("gpt2-tiny", "h.*.mlp.*weight", "gelu"), ("llama-tiny", "*.mlp.*weight", "swiglu"),
])  # fmt: skip
def test_fused_products_are_taken_apart(name, frozen, activation, dtype):
    given, losses = model_of(name), {}
    for base in ("", ROWS):
        how = {"choice": Choice("optimized"), "fuse": tuple(FUSIONS), "threads": 1, "freeze": [frozen]}
        engine = Engine.from_options(*given, base=base, dtype=dtype, **how)
        ops = {c.op.name for c in engine.program.calls if ".mlp" in c.layer}
        assert (f"matmul_{activation}_forward" in ops) is (f"matmul_{activation}_backward" in ops) is (not base)
        assert {"matmul_int8_forward", "matmul_int8_backward_input", f"{activation}_backward"} <= ops or not base
        losses[base] = [engine.step(**batch(i), **ADAMW).loss for i in range(3 if dtype == "float32" else 1)]
    assert losses[""] != losses[ROWS]
    np.testing.assert_allclose(losses[ROWS], losses[""], atol=SLACK)


@pytest.mark.parametrize("freeze", [(), ("*0.*",), ("*.0.*lora*",), ("*lora_B*",)], ids=str)
@pytest.mark.parametrize("targets", ["all", "q_proj,v_proj"])
def test_any_layers_may_have_adapters_that_train(targets, freeze):
    for dtype in ("float32", "bfloat16"):
        given = model_of(lora=f"r=4,targets={targets}")
        built = build(*given, base=ROWS, freeze=freeze, dtype=dtype, fuse=tuple(FUSIONS))
        assert built.plan().groups["parameter"] > 0
        assert any(c.op.name == "matmul_int8_backward_input" for c in built.program.calls)


def test_a_product_in_int8_can_be_swapped():
    used = {k.name for k in engine_of(ROWS, choice=Choice("optimized", ("matmul_int8_forward=vanilla",))).kernels}
    assert {"matmul_int8_forward[vanilla]", "matmul_int8_backward_input[optimized]"} <= used


def test_a_weight_of_rows_is_a_byte_a_number_and_a_scale_a_row():
    plans = {base: build(*model_of(*ADAPTED), dtype="bfloat16", base=base) for base in ("", ROWS)}
    scales = plans[ROWS].program.scales
    assert all(s.shape == p.shape[:1] for p, s in scales.items())
    sizes = {base: built.plan().groups["parameter"] for base, built in plans.items()}
    assert sizes[""] - sizes[ROWS] == sum(p.nbytes - 4 * p.shape[0] for p in scales)
    assert not any(c.op.name == "dequantize" for c in plans[ROWS].program.calls)


# Trained weights in int8


def trained(dtype="int8", threads=1, n=4, name="gpt2-tiny", variant="optimized", **how):
    """An engine that trains all weights, its losses, and the bytes of its weights after some steps."""
    how = {"choice": Choice(variant), "fuse": tuple(FUSIONS), **how}
    engine = Engine.from_options(*model_of(name), dtype=dtype, threads=threads, **how)
    losses = [engine.step(**batch(i), **ADAMW).loss for i in range(n)]
    return engine, losses, [x.tobytes() for x in engine.parameters().values()]


@pytest.fixture(scope="module")
def int8():
    return trained()


def test_products_in_blocks_multiply_a_copy_of_each_trained_weight(int8):
    engine, losses, _ = int8
    used = {c.op.name for c in engine.program.step_calls if c.layer.startswith("h.")}
    assert {"matmul_int8_forward", "matmul_int8_backward_input", "matmul_update", "quantize_rows"} <= used
    assert not {"matmul_forward", "matmul_backward_input", "matmul_gelu_forward"} & used
    exact = trained("float32")[1]
    assert losses != exact
    np.testing.assert_allclose(losses, exact, atol=0.05)
    np.testing.assert_allclose(losses[0], exact[0], atol=SLACK)


def test_the_copy_is_that_of_the_weight_after_each_step(int8):
    """One step behind, the next forward would multiply the weights of the step before."""
    engine, _, _ = int8
    made = {c.args["weight"]: c.args for c in engine.program.calls if c.op.name == "quantize_rows"}
    assert len(made) == 9  # four in each block, and the head
    for v, args in made.items():
        want = Quantized.made(engine.array(v), ROWS)
        assert np.array_equal(engine.array(args["q"]), want)
        assert np.array_equal(engine.array(args["scales"]), want.scales)


@pytest.mark.parametrize("how", [{"threads": 2}, {"threads": 3}, {"recompute": "all"}], ids=str)
def test_training_in_int8_has_the_same_bits(int8, how):
    assert trained(**how)[1:] == int8[1:]


def test_training_in_int8_has_the_same_bits_on_any_ranks():
    assert_alike_on_any_ranks(lambda **how: trained(n=0, **how)[0], 4, 2, 4)


def test_what_is_written_to_a_weight_is_multiplied(int8):
    engine, other = trained(n=0)[0], trained(n=0, seed=1)[0]
    assert engine.step(**batch(0)).loss == int8[1][0] != other.step(**batch(0)).loss
    fresh = trained(n=0)[0]
    for name, x in other.parameters().items():
        x[...] = fresh.parameters()[name]
    assert other.forward(**batch(0)) == int8[1][0]


RARE = [pytest.param(how, marks=pytest.mark.slow) for how in ({"variant": "vanilla"}, {"optimizer": "lion"})]


@pytest.mark.parametrize("how", [{"name": "llama-tiny"}, {"weights": "bfloat16"}, *RARE], ids=str)
def test_other_models_kernels_optimizers_and_types_train_in_int8(how):
    """Naive kernels compute the attention in float32, so their bits differ."""
    losses, exact = (trained(dtype, n=2, **how)[1] for dtype in ("int8", "bfloat16"))
    assert losses != exact
    np.testing.assert_allclose(losses, exact, atol=0.02)


# Runs

FLAGS = ["-T", "16", "--threads", "1", "--lr", "1e-2", "--val-every", "0"]
LORA = [*FLAGS, "--dtype", "bf16", "--lora", "r=3,alpha=6,dropout=0.1", "--base", "int8"]


def run(root, *flags):
    assert cli.main(["train", "--data", str(root / "text.txt"), "--runs", str(root / "runs"), *flags]) == 0


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A base model, the adapter of a run of eight steps, and that of one that was resumed after four."""
    root = tmp_path_factory.mktemp("int8")
    (root / "text.txt").write_text("some text to learn from " * 400)
    run(root, "--model", "llama-tiny", *FLAGS, "--steps", "2", "--save", str(root / "base"))
    start = ["--init", str(root / "base"), *LORA]
    run(root, *start, "--steps", "8", "--run", "whole", "--save", str(root / "whole"))
    run(root, *start, "--steps", "4", "--run", "half", "--save-every", "4")
    (there,) = (root / "runs").glob("*-half")
    run(root, "--resume", str(there), "--steps", "8", "--save", str(root / "resumed"))
    there.rename(root / "run")
    return root


def adapter_of(folder):
    return (folder / "adapter_model.safetensors").read_bytes()


@contextmanager
def tensors_of(folder, to):
    """Copy a model, and change its tensors."""
    shutil.copytree(folder, to)
    yield (tensors := load_file(to / "model.safetensors"))
    save_file(tensors, to / "model.safetensors", {"format": "pt"})


def test_a_run_resumes_to_the_bit_on_the_same_base(made, tmp_path):
    assert adapter_of(made / "whole") == adapter_of(made / "resumed")
    saved = checkpoint.newest(made / "run")
    kinds = {name.rpartition("layers.")[2].partition(".")[2]: x.partition(":")[0] for name, x in saved.frozen.items()}
    assert kinds["mlp.up_proj.weight"] == kinds["self_attn.q_proj.weight"] == "int8"
    assert json.loads((saved.path / "state.json").read_text())["settings"]["base"] == "int8"
    name, other = "model.layers.0.mlp.up_proj.weight", tmp_path / "other"
    with tensors_of(made / "base", other) as tensors:
        tensors[name][0, 0] *= 1.5
    fails(f"'{re.escape(name)}' is not what it was", saved.initial(saved.config, {"init": str(other)}), name)


def test_a_run_with_products_in_int8_resumes_to_the_bit(made, tmp_path, capsys):
    start = ["train", "--data", str(made / "text.txt"), "--init", str(made / "base"), *LORA[:-1], ROWS]
    other, said = ["--base", "int8"], f"the run has base '{ROWS}', not 'int8'"
    last = goes_on(capsys, tmp_path, *start, refused=other, said=said)
    assert any(x.startswith(f"{ROWS}:") for x in checkpoint.newest(last.parents[1]).frozen.values())


def test_a_run_that_trains_in_int8_resumes_to_the_bit_and_writes_text(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("some text to learn from " * 400)
    start = ["--model", "gpt2-tiny", *FLAGS, "--dtype", "int8", "--sample-every", "3"]
    run(tmp_path, *start, "--steps", "6", "--run", "whole", "--save", str(tmp_path / "whole.bin"))
    run(tmp_path, *start, "--steps", "3", "--run", "half", "--save-every", "3")
    (there,) = (tmp_path / "runs").glob("*-half")
    run(tmp_path, "--resume", str(there), "--steps", "6", "--save", str(tmp_path / "resumed.bin"))
    assert (tmp_path / "whole.bin").read_bytes() == (tmp_path / "resumed.bin").read_bytes()
    capsys.readouterr()
    losses, texts = {}, {}
    for dtype in ("float32", "int8"):
        how = ["--init", str(tmp_path / "whole.bin"), "--threads", "1", "--dtype", dtype]
        measured = ran(capsys, "eval", *how, "--data", str(tmp_path / "text.txt"), "-T", "16", "--limit", "2")
        said = ran(capsys, "generate", *how, "--prompt", "some ", "--max-tokens", "4", "--temperature", "0")
        losses[dtype], texts[dtype] = measured["loss"], said["ids"]
    assert losses["int8"] != losses["float32"]
    np.testing.assert_allclose(losses["int8"], losses["float32"], atol=SLACK)
    assert texts["int8"] == texts["float32"]


@pytest.mark.parametrize("base", [ROWS, "int8"])
def test_text_and_losses_come_from_an_int8_base(base, made, capsys):
    """By blocks of 64 tokens and one at a time, behind a cache; their logits are those of an evaluation."""
    capsys.readouterr()
    measure, losses = ["eval", "--init", str(made / "base"), "--threads", "1", "-T", "32", "--limit", "2"], {}
    for chosen in ([], ["--base", base]):
        losses[bool(chosen)] = ran(capsys, *measure, *chosen, "--data", str(made / "text.txt"))["loss"]
    assert losses[True] != losses[False]
    np.testing.assert_allclose(losses[True], losses[False], atol=SLACK)
    weights, prompt, logits = open_weights(made / "base"), list(b"some text to learn from " * 3)[:60], {}
    for chosen in ("", base):
        decoder = Decoder(weights.config, context=64, base=chosen, threads=1, check=False)
        copy_into(decoder.parameters(), weights)
        logits[chosen] = [decoder.read(part) for part in (prompt[:40], prompt[40:47], *([p] for p in prompt[47:]))]
    assert 0 < np.abs(np.array(logits[base]) - logits[""]).max() < 0.05 * np.abs(logits[""]).max()


def test_the_head_of_a_decoder_multiplies_an_int8_copy_that_follows_its_weight(made):
    weights = open_weights(made / "base")
    found, config = [], weights.config
    used, other = (Decoder(config, context=64, base=ROWS, threads=1, check=False) for _ in range(2))
    views = {decoder: decoder.parameters() for decoder in (used, other)}
    for decoder, factor in (used, 3), (used, 1), (other, 1):
        copy_into(views[decoder], weights)
        views[decoder]["model.embed_tokens.weight"] *= factor
        decoder.restart()
        found.append(decoder.read(list(b"some text")).copy())
    assert not np.array_equal(found[0], found[1])
    assert np.array_equal(found[1], found[2])
    assert {b.call.op.name for b in used._head} == {"matmul_int8_forward"}


INT8 = "matmul_int8_forward"
COARSE = "model.layers.0.self_attn.q_proj"
"""The layer that reads the element and has enough rows to be multiplied as int8."""


def test_layers_in_which_int8_is_too_coarse_are_computed_in_bf16(made, tmp_path, capsys):
    """Chosen on the first batch, kept by a run that is resumed; the flag chooses otherwise."""
    with tensors_of(made / "base", tmp_path / "outlier") as tensors:
        tensors["model.layers.0.input_layernorm.weight"][0] *= 1e4  # what the first attention reads, at one place
        for name in "qkv":
            tensors[f"model.layers.0.self_attn.{name}_proj.weight"][:, 0] /= 1e4
    (tmp_path / "text.txt").write_text("some text to learn from " * 400)
    start = ["--init", str(tmp_path / "outlier"), *FLAGS, "--dtype", "int8"]
    run(tmp_path, *start, "--steps", "4", "--run", "whole", "--save", str(tmp_path / "whole"))
    assert "because int8 is too coarse on the first batch: " in capsys.readouterr().out
    run(tmp_path, *start, "--steps", "2", "--run", "half", "--save-every", "2")
    (there,) = (tmp_path / "runs").glob("*-half")
    kept = json.loads((checkpoint.newest(there).path / "state.json").read_text())["settings"]["bf16_layers"]
    assert kept == [COARSE]
    run(tmp_path, "--resume", str(there), "--steps", "4", "--save", str(tmp_path / "resumed"))
    whole, resumed = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "resumed"))
    assert whole == resumed
    for flags, wide in ([], True), (["--bf16-layers", "none"], False), (["--bf16-layers", "*.1.*.up_proj"], False):
        capsys.readouterr()
        found = ran(capsys, "profile", *start[:6], "--dtype", "int8", *flags, "--steps", "1")
        ops = {row["layer"]: row["op"] for row in found["layers"] if row["op"] in ("matmul_forward", INT8)}
        assert ops[COARSE] == ("matmul_forward" if wide else INT8)
        assert (ops["model.layers.1.mlp.up_proj"] == INT8) == (flags[1:] != ["*.1.*.up_proj"])
        errors = {e["layer"]: e["error"] for e in found["int8"]}
        assert {layer for layer, op in ops.items() if op == INT8} <= errors.keys()
        assert {layer for layer, error in errors.items() if error > BOUND} == ({COARSE} if not wide else set())


def test_the_error_of_a_product_is_that_of_its_outputs():
    x, w = RNG.standard_normal((2, 8, 16)).astype(np.float32)
    x[:, 0] = 50  # which all rows share, so it says nothing of them
    weight = Quantized.made(w, ROWS)
    found = error_of("layer", x, weight.view(np.ndarray), weight.scales, w)
    step = np.abs(x).max(1, keepdims=True) / 127
    difference = (np.rint(x / step) * step).astype(np.float64) @ numbers(weight).T - x.astype(np.float64) @ w.T
    y = x.astype(np.float64) @ w.T
    np.testing.assert_allclose(found.error, np.sqrt((difference**2).sum() / ((y - y.mean(0)) ** 2).sum()), rtol=1e-3)
    assert found.zeroed == np.mean(np.abs(x) < step / 2) > 0
    alike = np.repeat(NORMAL[:1, :16], 8, axis=0)  # as of one token: what differs between rows is rounding
    assert 0 < error_of("layer", alike, weight.view(np.ndarray), weight.scales, w).error < BOUND


@pytest.mark.parametrize(
    ("flags", "wrong"),
    [
        (["--dtype", "bf16", "--bf16-layers", "h.0.*"], "it is about products in int8; add --dtype int8"),
        (["--dtype", "int8", "--bf16-layers", "h.7.*"], r"no layer with a product matches 'h.7.\*'"),
        (["--lora", "r=2", "--base", "w8a8", "--bf16-layers", "*"], "match every weight that it could store"),
    ],
)
def test_layers_of_bf16_that_are_none_are_refused(flags, wrong, capsys):
    assert re.search(wrong, refused(capsys, "profile", "--model", "gpt2-tiny", *flags))


def test_the_adapter_is_merged_into_the_weights_as_they_are_in_the_file(made, tmp_path, capsys):
    assert cli.main(["convert", str(made / "run"), str(tmp_path / "merged"), "--merge"]) == 0
    merged, base = open_weights(tmp_path / "merged").read, open_weights(made / "base").read
    adapter, name = checkpoint.newest(made / "run").adapter, "model.layers.1.mlp.down_proj.weight"
    a, b = (adapter.read(n) for n in nn.adapter_of(name.removesuffix(".weight")))
    np.testing.assert_allclose(merged(name), base(name) + 2 * (b @ a), atol=1e-6)
    assert np.array_equal(merged("model.norm.weight"), base("model.norm.weight"))
    capsys.readouterr()
    say = ["generate", "--prompt", "some ", "--seed", "3", "--max-tokens", "8", "--init"]
    beside = ran(capsys, *say, str(made / "base"), "--adapter", str(made / "whole"))["ids"]
    assert beside == ran(capsys, *say, str(made / "run"))["ids"]


def test_a_weight_that_is_not_finite_is_named(made, tmp_path, capsys):
    for n, wrong in enumerate((np.nan, np.inf, 3e38)):
        with tensors_of(made / "base", other := tmp_path / str(n)) as tensors:
            tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = wrong
        line = refused(capsys, "train", "--init", str(other), *LORA, "--runs", str(tmp_path / "runs"))
        said = f"mlp.up_proj.weight holds {np.float32(wrong)} at (3, 5); expected finite numbers"
        assert f"model.layers.0.{said}" in line
    assert not (tmp_path / "runs").exists()

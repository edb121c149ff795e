"""Weights in bfloat16 alone: what is stored so, how a step rounds them, and that nothing else changes the bits."""

import numpy as np
import pytest
from test_bf16 import batches, built_of, engine_of, losses_of, weights_of
from test_optimizers import HALF, NEW
from verbs import fails, goes_on, printed, ran, refused

from cpuopt import ops
from cpuopt.kernels import registry
from cpuopt.kernels.registry import Choice
from cpuopt.ops.rounding import bits_of, draw_of
from cpuopt.train import checkpoint
from cpuopt.weights import open_weights
from cpuopt.weights.tensors import TensorFile

BOTH, F32 = {"weights": "bfloat16", "moments": "bfloat16"}, np.float32


def matrices(program):
    return {p.name for p in program.parameters if len(p.shape) == 2 and "wpe" not in p.name}


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
@pytest.mark.parametrize("two_pass", [False, True])
def test_what_products_read_is_stored_once(name, two_pass):
    built = built_of(name, two_pass=two_pass, weights="bfloat16")
    program, plan = built.program, built.plan().describe()
    assert {p.name for p in program.parameters if p.dtype == "bfloat16"} == matrices(program)
    assert "copies" not in plan
    assert not [*program.phase("convert")]
    assert not any(c.op is ops.copy and c.args["inp"].group == "parameter" for c in program.calls)
    assert not any(v.dtype == "bfloat16" for v in program.moments)


def test_a_parameter_takes_six_bytes():
    built = built_of(**BOTH)
    plan, count = built.plan().describe(), {p.name: p.nbytes // TYPE[p.dtype] for p in built.program.parameters}
    in_products = sum(count[name] for name in matrices(built.program))
    assert plan["parameters"] + plan["moments"] == 6 * in_products + 8 * (sum(count.values()) - in_products)


TYPE, SLOW = {"float32": 4, "bfloat16": 2}, pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "variant", "optimizer"),
    [
        ("gpt2-tiny", "optimized", ops.USUAL),
        *(pytest.param("gpt2-tiny", "vanilla", name, marks=SLOW) for name in ops.OPTIMIZERS),
        *(pytest.param("gpt2-tiny", "optimized", name, marks=SLOW) for name in NEW),
        *(pytest.param("llama-tiny", variant, ops.USUAL, marks=SLOW) for variant in ("vanilla", "optimized")),
    ],
)
def test_training_is_near_that_with_weights_in_float32(name, variant, optimizer):
    how = {"variant": variant, "optimizer": optimizer}
    want = losses_of(engine_of(name, **how))
    for two_pass in (False, True):
        got = losses_of(engine_of(name, two_pass=two_pass, **BOTH, **how))
        assert got != want
        np.testing.assert_allclose(got, want, rtol=5e-3)


def test_the_bits_do_not_depend_on_threads_but_on_the_seed():
    def bits(threads, seed=0):
        engine = engine_of(threads=threads, **BOTH)
        engine.dropout_seed = seed
        return losses_of(engine), weights_of(engine)

    assert bits(1) == bits(2) == bits(3)
    assert bits(2, seed=1) != bits(2)


@pytest.mark.parametrize("variant", ["vanilla", "optimized"])
def test_steps_below_the_spacing_add_up(variant):
    """From 1, steps of 1e-4 go 0.1 down in 1,000 steps within 2 %; rounded to nearest, 1 would stay 1."""
    kernel = registry.KERNELS["sgd", variant].of({"param": "bfloat16"})
    kernel.compile()
    run, n = kernel.direct().function, 4096
    param, grad, velocity, none = np.ones(n, HALF), np.ones(n, F32), np.zeros(n, F32), np.empty(0, F32)
    for step in range(1, 1001):
        run(param, velocity, none, grad, 1e-4, 0.0, 0.0, 1.0, draw_of(0, step), 0)
    assert float(param.astype(F32).mean()) == pytest.approx(0.9, abs=0.002)


def test_of_the_bits_of_an_element_any_two_are_independent():
    found = [bits_of(draw_of(3, 5), 70, 1 << 20, state) for state in range(4)]
    for k, one in enumerate(found):
        assert one.mean() == pytest.approx(32767.5, rel=3e-3)
        for other in found[:k]:
            pairs = np.histogram2d(one, other, bins=64, range=[[0, 1 << 16]] * 2)[0] - (1 << 20) / 4096
            assert (pairs**2).sum() / 256 / 4095 == pytest.approx(1, abs=0.1)  # chi squared, a degree of freedom


def test_a_weight_whose_update_cannot_write_it_keeps_its_float32(monkeypatch):
    usual_kernel = registry.KERNELS["adamw", "vanilla"]
    stubborn = registry.Kernel(ops.adamw, "stubborn", usual_kernel.function, where="here:1", narrow=False)
    monkeypatch.setitem(registry.KERNELS, ("adamw", "stubborn"), stubborn)
    choice = Choice("optimized", ["adamw@h.0.mlp.c_fc=stubborn"])
    program = built_of(weights="bfloat16", choice=choice, two_pass=True).program
    kept = {p.name for p in program.parameters if p.name in matrices(program) and p.dtype == "float32"}
    assert (kept, [c.args["inp"].name for c in program.phase("convert")]) == ({"h.0.mlp.c_fc.weight"}, [*kept])


def test_what_is_written_to_a_weight_is_rounded_to_nearest_and_read():
    engine, batch = engine_of(**BOTH), batches(1)[0]
    before, wte = engine.forward(**batch), engine.parameters()["wte.weight"]
    wte[...] = wte.astype(F32) * 2
    assert abs(engine.forward(**batch) - before) > 1e-3
    wte[...] = F32(1 + 2**-8 + 2**-20)
    assert (wte.astype(F32) == 1 + 2**-7).all()


def test_a_run_goes_on_bit_for_bit_and_its_weights_can_be_read(here, tmp_path, capsys):
    flags = ["train", "--model", "gpt2-tiny", "-B", "2", "-T", "16", "--val-every", "0"]
    flags += ["--dtype", "bf16", "--weights", "bf16", "--moments", "bf16"]
    said = "the run has moments 'bf16', not 'float32'"
    one = goes_on(capsys, tmp_path, *flags, refused=["--moments", "float32"], said=said)
    assert {t.dtype for t in TensorFile(one / "adam_m.safetensors").tensors.values()} == {"BF16"}
    go_on = ["train", "--resume", str(one.parent.parent), "--steps", "11"]
    assert "the run has weights 'bf16', not 'float32'" in refused(capsys, *go_on, "--weights", "float32")
    tensors = TensorFile(one / checkpoint.PARAMS).tensors
    assert {t.dtype for n, t in tensors.items() if n.endswith("c_fc.weight")} == {"BF16"}
    assert {t.dtype for n, t in tensors.items() if ".ln_" in n or "wpe" in n} == {"F32"}
    printed(capsys, *go_on, "--save", "saved")
    run, saved = checkpoint.open_weights(one.parent.parent), open_weights(tmp_path / "saved")
    for name in tensors:
        x = run.read(name)
        assert x.dtype == F32
        assert (x == saved.read(name)).all()
    assert np.isfinite(ran(capsys, "eval", "--init", str(one.parent.parent), "-T", "16", "--limit", "2")["loss"])


def test_what_does_not_go_together_is_refused():
    said = "weights 'bfloat16': products read them so with dtype='bfloat16' or 'int8' alone"
    fails(said, engine_of, dtype="float32", weights="bfloat16")

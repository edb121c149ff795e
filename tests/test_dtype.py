"""``--dtype bf16``: a setting of a run like any other, in every verb that builds a step."""

from dataclasses import replace

import numpy as np
import pytest
from verbs import fails, printed, ran, refused

from cpuopt import cli, ops
from cpuopt.engine import Engine
from cpuopt.lab import ab, tune
from cpuopt.measure import rates
from cpuopt.train import plans
from cpuopt.train.job import Settings, prepare
from cpuopt.weights.tensors import TensorFile

SMALL = Settings(model="gpt2-tiny", B=2, T=16, threads=1, dtype="bf16")
FLAGS = ["--model", "gpt2-tiny", "-B", "2", "-T", "16", "--threads", "1", "--dtype", "bf16"]


pytestmark = pytest.mark.usefixtures("here")


def tensors(folder):
    return {f.name: f.read_bytes() for f in sorted(folder.glob("*.safetensors"))}


def test_what_is_saved_is_float32_until_it_is_converted(tmp_path):
    assert cli.main(["train", *FLAGS, "--steps", "1", "--val-every", "0", "--save", "hf"]) == 0
    saved = TensorFile(tmp_path / "hf" / "model.safetensors")
    assert {t.dtype for t in saved.tensors.values()} == {"F32"}
    assert cli.main(["convert", "hf", "half", "--dtype", "bf16"]) == 0
    assert cli.main(["convert", "hf", "same", "--dtype", "float32"]) == 0
    assert tensors(tmp_path / "same") == tensors(tmp_path / "hf")
    # a step on weights of bfloat16 in a file begins from just these
    job = prepare(replace(SMALL, model=None, init="half", steps=1))
    read = TensorFile(tmp_path / "half" / "model.safetensors").read
    first = job.engine.parameters()["wte.weight"]
    (name,) = saved.tensors.keys() & {"transformer.wte.weight", "wte.weight"}
    np.testing.assert_array_equal(first, read(name))


def test_a_profile_names_the_types(capsys):
    rows = {r["label"]: r for r in ran(capsys, "profile", *FLAGS, "--steps", "3")["ops"]}
    assert (rows["AdamW"]["types"], rows["Matmul Forward"]["types"]) == (["float32"], ["bfloat16", "float32"])
    assert "bf16, f32" in printed(capsys, "profile", *FLAGS, "--steps", "3", "--html", "p.html")
    assert "types" not in printed(capsys, "profile", *FLAGS[:-1], "float32", "--steps", "3")


def test_steps_of_two_variants_begin_from_the_same_weights(monkeypatch):
    asked = replace(SMALL, fuse="none"), ops.gelu_forward, ("vanilla", "optimized")
    found = ab.in_step(*asked, analyses=(2,))["losses"]
    np.testing.assert_allclose(found["A"], found["B"], rtol=1e-4)
    # the mutant: weights are put back and their copies are not
    monkeypatch.setattr(Engine, "_convert", lambda self: None)
    fails("losses of step", ab.in_step, *asked, analyses=(2,))


def test_kernels_are_compared_on_the_types_of_the_step(capsys):
    ask = ["ab", "gelu_forward", "vanilla", "optimized", "--model", "gpt2-tiny", "--dtype", "bf16", "--rounds", "6"]
    found = ran(capsys, *ask, "-B", "1", "-T", "8")
    assert {t for case in found["results"][0]["cases"] for t in case["types"].values()} == {"bfloat16"}
    assert found["dtype"] == "bf16"
    said = refused(capsys, "ab", "matmul_forward", "blas", *ask[3:])
    assert "matmul_forward[blas] does not take 'out' in bfloat16" in said


def test_a_plan_is_for_one_type(tmp_path, monkeypatch):
    monkeypatch.setattr(rates, "folder", lambda: tmp_path / "machine")
    usual, half = (tune.survey(replace(SMALL, dtype=dtype)) for dtype in ("float32", "bf16"))
    assert usual.key != half.key
    assert "dtype" not in usual.key  # so that plans of earlier versions hold
    assert "--dtype bf16" in plans.command(half.key)
    products = [row for row in half.rows if row.op == "matmul_forward"]
    assert products
    for row in products:
        assert "blas" not in row.hashes  # it takes float32 alone
        assert row.hashes["optimized"] != usual.rows[[r.op for r in usual.rows].index(row.op)].hashes["optimized"]

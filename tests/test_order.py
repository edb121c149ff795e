"""The order in which products of bfloat16 are added: chosen by ``--order``, kept by a run, the same on any vectors."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_bf16 import in_a_process, of

import cpuopt.kernels  # noqa: F401  (whose order is that of the machine)
from cpuopt import cli
from cpuopt.kernels.toolkit.micro.records import MICRO_KERNELS
from cpuopt.machine import ORDER, ORDERS

HERE = MICRO_KERNELS["bfloat16"].order
(OTHER,) = set(ORDERS) - {HERE}
BY_VECTORS, BY_SHORTER_VECTORS = {ORDER: "amx"}, {ORDER: "amx", "CPUOPT_TARGET": "haswell"}
OF_THE_RECORD = {ORDER: "", "CPUOPT_TARGET": "graniterapids"}
PRODUCTS = {"matmul_forward": "inp", "matmul_backward_input": "dout"}
SIZES = ({"BT": 37, "C": 70, "OC": 65}, {"BT": 3, "C": 600, "OC": 40})
CALLS = [(op, sizes, of("weight", given)) for op, given in PRODUCTS.items() for sizes in SIZES]
"""Products whose sums are stored in float32."""
ATTENTION = (("attention_forward", "qkv"), ("attention_backward", "qkv", "dout", "out"))
SHAPES = [{"B": 1, "T": T, "C": C, "NH": 2} for T, C in ((70, 32), (37, 50))]
HEADS = [(op, sizes, of(*given)) for op, *given in ATTENTION for sizes in SHAPES]


def python(*words, **more):
    environment = {k: v for k, v in os.environ.items() if k not in (ORDER, "CPUOPT_TARGET")}
    done = subprocess.run([sys.executable, *words], env=environment | more, capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines(), done.stderr


CHOSEN = [(BY_VECTORS, "amx"), (BY_SHORTER_VECTORS, "amx"), ({**OF_THE_RECORD, ORDER: "pairs"}, "pairs")]


@pytest.mark.parametrize(("environment", "order"), CHOSEN)
def test_the_environment_chooses(environment, order):
    assert in_a_process("bits_of([])", **environment)[0] == order


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--order", "amx"], "--order amx: it is about products in bf16; add --dtype bf16"),
        (["--order", "other", "--dtype", "bf16"], "--order 'other': expected one of pairs, amx"),
        (["--order", OTHER, "--dtype", "bf16"], f"kernels are imported with the order '{HERE}'; set {ORDER}={OTHER}"),
    ],
)
def test_an_order_that_cannot_be_had_is_refused(words, said, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(os.environ, ORDER, HERE)  # which the verb sets
    assert cli.main(["train", "--model", "gpt2-tiny", "--steps", "1", "--runs", str(tmp_path / "runs"), *words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_an_order_has_the_same_bits_on_any_vectors():
    environments = BY_VECTORS, BY_SHORTER_VECTORS, OF_THE_RECORD, {ORDER: "pairs"}
    found = [in_a_process(f"bits_of({CALLS + HEADS})", **e) for e in environments]
    bits = [bits for _, _, *bits in found]
    assert [order for order, *_ in found] == ["amx", "amx", "amx", "pairs"]
    assert bits[0] == bits[1] == bits[2] != bits[3]


@pytest.mark.slow
def test_a_run_goes_on_in_its_order(tmp_path):
    """Which the machine would not choose, to the same bits as in one go."""
    train = "-m", "cpuopt", "train", "--runs", str(tmp_path / "runs")
    sizes = "--model", "gpt2-tiny", "--dtype", "bf16", "-B", "2", "-T", "16", "--val-every", "0", "--keep", "9"

    def go(*words):
        status, out, err = python(*train, *words, "--save-every", "2", "--json")
        assert status == 0, err
        folder = Path(json.loads(out[-1])["path"])
        last = folder / "checkpoints" / "step-00000004"
        settings = json.loads((last / "state.json").read_text())["settings"]
        return folder, settings["order"], {p.name: p.read_bytes() for p in last.glob("*.safetensors")}

    folder, order, files = go(*sizes, "--order", "amx", "--steps", "4")
    assert order == "amx"
    shutil.rmtree(folder / "checkpoints" / "step-00000004")
    assert go("--resume", str(folder)) == (folder, "amx", files)
    assert go(*sizes, "--steps", "4")[1:] != ("pairs", files)
    assert python(*train, "--resume", str(folder), "--order", "pairs")[0] == 2

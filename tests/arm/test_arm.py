"""The kernels on aarch64, emulated (`make test-arm`): tile, conformance, a generated backward, the losses of x86."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from emulated import CHECKOUT, MissingError, environment, python

from cpuopt.kernels.toolkit.micro import neon

pytestmark = pytest.mark.arm
SMALL = ["--model", "gpt2-tiny", "-B", "2", "-T", "16", "--threads", "2", "--data", str(CHECKOUT / "docs/training.md")]
LIMIT_S = 7200  # of one command, most of which compiles


@pytest.fixture(scope="module")
def arm():
    """The command of an emulated Python."""
    try:
        return python()
    except MissingError as e:
        pytest.skip(f"aarch64 cannot be emulated here: {e}")


def run(command, **variables):
    """Run a command to a good end, and return what it prints."""
    there = {**os.environ, "NUMBA_NUM_THREADS": "2", **variables}
    made = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=LIMIT_S, env=there)
    assert made.returncode == 0, made.stdout + made.stderr
    return made.stdout


def test_the_tile_is_that_of_neon(arm):
    show = "import platform; from cpuopt.kernels.toolkit.simd import HOST; print(platform.machine(), HOST)"
    machine, tile = run([arm, "-c", show], **environment()).split(maxsplit=1)
    assert machine == "aarch64"
    assert tile.strip() == str(neon.SET)


def test_a_generated_backward_is_right(arm):
    check = ["check", "gelu_backward", "layernorm_backward", "--variant", "generated", "--quick", "--seed", "1"]
    said = run([arm, "-m", "cpuopt", *check, "--limit", LIMIT_S, "--json"], **environment())
    assert [kernel["verdict"] for kernel in json.loads(said)["kernels"]] == ["right", "right"]


def losses(command, folder, **variables):
    """Train, and return the loss of each step."""
    run([*command, "-m", "cpuopt", "train", *SMALL, "--steps", "10", "--runs", folder], **variables)
    (metrics,) = folder.glob("*/metrics.jsonl")
    return np.array([json.loads(line)["loss"] for line in metrics.read_text().splitlines()])


def test_the_losses_are_those_of_this_machine(arm, tmp_path):
    there = losses([arm], tmp_path / "there", **environment())
    here = losses([sys.executable], tmp_path / "here")
    assert len(here) == 10
    np.testing.assert_allclose(there, here, rtol=1e-6, atol=0)


def test_products_in_int8_have_the_bits_of_this_machine(arm):
    show = f"""
import sys
from unittest.mock import MagicMock
sys.modules["pytest"] = MagicMock()  # which is not there
sys.path.insert(0, {str(CHECKOUT / "tests/kernels")!r})
from test_int8_products import results
print(results("{{variant}}", 2))
"""
    there = run([arm, "-c", show.format(variant="optimized")], **environment())
    assert there == run([sys.executable, "-c", show.format(variant="vanilla")], PYTHONPATH=str(CHECKOUT))


@pytest.mark.parametrize("dtype", ["float32", "bf16", "int8"])
def test_the_kernels_of_a_step_are_right(arm, dtype):
    said = run([arm, "-m", "cpuopt", "profile", *SMALL, "--steps", "2", "--dtype", dtype, "--json"], **environment())
    checked = json.loads(said)["checked"]  # at awkward sizes, and at those of the model
    assert {case["status"] for case in checked} == {"right"}
    assert len({case["kernel"] for case in checked if "[optimized]" in case["kernel"]}) >= 15
    assert any("bfloat16" in case["case"] for case in checked) == (dtype != "float32")

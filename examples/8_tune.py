"""Tune: let the machine choose a block size for each shape.

Run: `python examples/8_tune.py`
"""

import numpy as np
from numba import prange

from cpuopt import kernel, offer, ops
from cpuopt.cli import main
from cpuopt.kernels.toolkit.fastmath import tanh

S, CUBIC = np.float32(np.sqrt(2 / np.pi)), np.float32(0.044715)
HALF, ONE = np.float32(0.5), np.float32(1)

# The usual number comes first. Each other one makes a variant of its own:
# mine:BLOCK=4096.
BLOCK = offer("BLOCK", 512, 4096)


@kernel(ops.gelu_forward, "mine")
def gelu_forward(out, inp):
    n = len(inp)
    for block in prange((n + BLOCK - 1) // BLOCK):
        x, y = inp[block * BLOCK : (block + 1) * BLOCK], out[block * BLOCK : (block + 1) * BLOCK]
        for i in range(len(x)):
            y[i] = HALF * x[i] * (ONE + tanh(S * (x[i] + CUBIC * x[i] * x[i] * x[i])))


# This file is its own file of kernels. A variant is chosen only if it is
# faster alone, right in every case of the check, and no slower in the training
# step. Otherwise the package's kernel stays. `--variant auto` uses the choice.
if __name__ == "__main__":
    what = ["--kernels", __file__, "--ops", "gelu_forward", "--model", "gpt2-tiny", "-B", "4", "-T", "32"]
    main(["tune", *what, "--threads", "1", "--rounds", "6"])

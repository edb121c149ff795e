"""Tune: let the machine choose a block size for each shape.

Run: `python examples/8_tune.py`
"""

import numpy as np
from numba import prange

from cpuopt import kernel, ops
from cpuopt.cli import main
from cpuopt.kernels.toolkit.fastmath import tanh

S, CUBIC = np.float32(np.sqrt(2 / np.pi)), np.float32(0.044715)
HALF, ONE = np.float32(0.5), np.float32(1)


# One variant for each block size: mine:BLOCK=512 and mine:BLOCK=4096.
def gelu(BLOCK):
    @kernel(ops.gelu_forward, f"mine:BLOCK={BLOCK}")
    def gelu_forward(out, inp):
        n = len(inp)
        for block in prange((n + BLOCK - 1) // BLOCK):
            x, y = inp[block * BLOCK : (block + 1) * BLOCK], out[block * BLOCK : (block + 1) * BLOCK]
            for i in range(len(x)):
                y[i] = HALF * x[i] * (ONE + tanh(S * (x[i] + CUBIC * x[i] * x[i] * x[i])))


for size in (512, 4096):
    gelu(size)


# This file is its own file of kernels. A variant is chosen only if it is
# faster alone, right in every case of the check, and no slower in the training
# step. Otherwise the package's kernel stays. `--variant auto` uses the choice.
if __name__ == "__main__":
    what = ["--kernels", __file__, "--ops", "gelu_forward", "--model", "gpt2-tiny", "-B", "4", "-T", "32"]
    main(["tune", *what, "--threads", "1", "--rounds", "6"])

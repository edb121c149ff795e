"""Write a kernel, and pass the gate: a wrong kernel is refused before its time is printed.

Run: `python examples/3_write_a_kernel.py`
"""

import numpy as np
from numba import prange

from cpuopt import Engine, UserError, kernel, models, ops

BLOCK = 256


# A kernel is one function with the parameters that the op declares. This one
# works in blocks and forgets that the last block may be shorter. On the sizes
# of this model every block is full, so training would show nothing.
@kernel(ops.residual_forward, "hasty")
def hasty(out, inp1, inp2):
    for block in prange(len(out) // BLOCK):
        for i in range(block * BLOCK, (block + 1) * BLOCK):
            out[i] = inp1[i] + inp2[i]


@kernel(ops.residual_forward, "careful")
def careful(out, inp1, inp2):
    for block in prange((len(out) + BLOCK - 1) // BLOCK):
        for i in range(block * BLOCK, min((block + 1) * BLOCK, len(out))):
            out[i] = inp1[i] + inp2[i]


config, model = models.load("gpt2-tiny")
text = np.random.default_rng(0).integers(0, config.vocab_size, (4, 33))

for variant in "hasty", "careful":
    engine = Engine(model, config.specs(4, 32), swap=[f"residual_forward={variant}"])
    try:
        report = engine.profile(steps=3, roofs=False, tokens=text[:, :-1], targets=text[:, 1:])
    except UserError as refused:
        print(f"{variant}: {refused}\n")
    else:
        ms = sum(row.ms for row in report.profile.layers if row.variant == variant)
        print(f"{variant}: passed, {1e3 * ms:.0f} µs of a step of {report.profile.quiet_ms:.1f} ms")

# `cpuopt check --kernels FILE` asks more: every awkward size, extreme inputs,
# several numbers of threads.

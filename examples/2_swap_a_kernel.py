"""Swap a kernel: another variant of one op, in one block, by one rule.

Run: `python examples/2_swap_a_kernel.py`, or `cpuopt profile --model gpt2-tiny -B 4 -T 32 --swap 'matmul@h.0.*=blas'`
"""

import numpy as np

from cpuopt import Engine, models

B, T = 4, 32
config, model = models.load("gpt2-tiny")
text = np.random.default_rng(0).integers(0, config.vocab_size, (B, T + 1))
batch = {"tokens": text[:, :-1], "targets": text[:, 1:]}

usual = Engine(model, config.specs(B, T))
# A rule reads OP[@LAYER]=VARIANT, with globs. "matmul" stands for the forward
# and both backwards.
swapped = Engine(model, config.specs(B, T), swap=["matmul@h.0.*=blas"])

# Both blocks have four products. In block 1 that of c_fc stays one kernel with
# its GELU; a rule that names a part of a fused op leaves the op unfused in its
# layers.
for bound in swapped.calls:
    op, layer = bound.call.op.name, bound.call.layer
    if op in ("matmul_forward", "matmul_gelu_forward") and layer.startswith("h."):
        print(f"{layer:16}{op:22}{bound.kernel.variant}")

# The kernels differ and the training does not, but for rounding.
print()
for step in range(3):
    print(f"step {step}  loss {usual.step(**batch).loss:.6f}  swapped {swapped.step(**batch).loss:.6f}")

"""A generated backward: an activation that cpuopt does not have, from its forward loop alone.

Run: `python examples/6_generated_backward.py`
"""

import numpy as np
from numba import prange

from cpuopt import Engine, differentiable, nn
from cpuopt.ops.declaration import N, inp, out


@differentiable(out("out", N), inp("inp", N), flops=8 * N, source="Misra 2019 (arXiv 1908.08681)")
def mish(out, inp):
    for i in prange(inp.shape[0]):
        e = np.exp(min(inp[i], np.float32(20)))
        out[i] = inp[i] * (e * e + e + e) / (e * e + e + e + np.float32(2))  # inp * tanh(log(1 + exp(inp)))


# The backward is a kernel like those that people write. Each of its lines
# names the line of the forward that it comes from, which is left out here;
# `cpuopt new-kernel mish --backward --kernels FILE` prints all.
text = mish.generated.text
for line in text[text.index("def ") :].splitlines():
    print(line.partition("  # ")[0].rstrip())


class MLP(nn.Module):
    def __init__(self, width=64):
        self.fc1, self.fc2, self.out = nn.Linear(2, width), nn.Linear(width, width), nn.Linear(width, 2)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, y):
        return self.loss(self.out(mish(self.fc2(mish(self.fc1(x))))), y)


# Two interleaved spirals. The model's first call compares the backward with
# the slope of the forward.
rng = np.random.default_rng(0)
y = rng.integers(0, 2, 512)
angle = 3 + 9 * rng.random(512)
x = np.stack([angle * np.cos(angle + np.pi * y), angle * np.sin(angle + np.pi * y)], axis=1) / 6

engine = Engine(MLP(), {"x": ((512, 2), "float32"), "y": ((512,), "int32")})
for step in range(301):
    loss = engine.step(x=x, y=y, lr=3e-3).loss
    if step % 100 == 0:
        print(f"step {step:3d}  loss {loss:.4f}")

"""An A/B with a verdict: is B faster than A, or is it noise?

Run: `python examples/5_compare_with_a_verdict.py`, or `cpuopt ab gelu_forward vanilla optimized --model gpt2-tiny`
"""

import numpy as np

import cpuopt
from cpuopt import Engine, nn
from cpuopt import functional as F


class Net(nn.Module):
    def __init__(self):
        self.up, self.down, self.loss = nn.Linear(64, 256), nn.Linear(256, 8), nn.CrossEntropyLoss()

    def forward(self, x, y):
        return self.loss(self.down(F.gelu(self.up(x))), y)


engine = Engine(Net(), {"x": ((128, 64), "float32"), "y": ((128,), "int32")}, threads=1)

# Trials of A, of B and of A once more alternate in a random order. The ratio
# has an interval, and so has the control, which shows what the machine's noise
# alone does. Both kernels are checked before, during and after.
found = engine.ab("gelu_forward", "vanilla", "optimized", rounds=12)
print(found)

# No verdict without evidence: a kernel against itself.
itself = engine.ab("gelu_forward", "optimized", "optimized", rounds=12)
print(f"\noptimized against itself: {itself.verdict}, ratio {itself.ratio['low']:.3f} to {itself.ratio['high']:.3f}")

# The same comparison takes any two functions.
x = np.ones((512, 512), np.float32)
columns = cpuopt.compare(lambda x: x.sum(axis=1), lambda x: x.sum(axis=0), x, rounds=12)
print(f"sums of columns against sums of rows: {columns.verdict}, {columns.ratio['median']:.2f} of the time")

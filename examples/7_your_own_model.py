"""A model of your own: which of two interleaved spirals does a point lie on?

Run: `python examples/7_your_own_model.py`, or `cpuopt profile --model examples/7_your_own_model.py:spirals`
"""

import numpy as np

from cpuopt import Engine, nn
from cpuopt import functional as F


class MLP(nn.Module):
    def __init__(self, width=64):
        self.fc1, self.fc2, self.out = nn.Linear(2, width), nn.Linear(width, width), nn.Linear(width, 2)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, y):
        return self.loss(self.out(F.gelu(self.fc2(F.gelu(self.fc1(x))))), y)


# A function that returns a module and its batch is a model for every command,
# as FILE.py:NAME.
def spirals():
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 512).astype("int32")
    angle = 3 + 9 * rng.random(512)
    x = np.stack([angle * np.cos(angle + np.pi * y), angle * np.sin(angle + np.pi * y)], axis=1) / 6
    return MLP(), {"x": x.astype("float32"), "y": y}


if __name__ == "__main__":
    model, batch = spirals()
    engine = Engine(model, {"x": ((512, 2), "float32"), "y": ((512,), "int32")})
    for step in range(301):
        loss = engine.step(**batch, lr=3e-3).loss
        if step % 100 == 0:
            print(f"step {step:3d}  loss {loss:.4f}")

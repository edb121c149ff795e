"""How viscous was it? A solver of Burgers' equation in the loop finds out from noisy measurements of the flow.

The solver is one loop kernel; its backward is generated, and gradient descent goes through all its time steps.
Run: `python examples/burgers.py`
"""

import numpy as np

from cpuopt import Engine, differentiable, nn
from cpuopt.ops.declaration import inp, out, symbols

S, X = symbols("S X")  # times, places
DT, DX, TRUE = np.float32(0.004), np.float32(1 / 48), 0.02


@differentiable(out("loss", 1), out("u", S, X), inp("seen", S, X), inp("viscosity", 1))
def misfit(loss, u, seen, viscosity):
    """u_t + u u_x = viscosity u_xx on a ring, from the first measurement; the mean square distance from all of them."""
    S, X = seen.shape
    for t in range(S):
        for i in range(X):
            if t == 0:
                u[t, i] = seen[t, i]
            else:
                left, here, right = u[t - 1, (i + X - 1) % X], u[t - 1, i], u[t - 1, (i + 1) % X]
                flow = here * (right - left) / (np.float32(2) * DX)
                drag = viscosity[0] * (right - here - here + left) / (DX * DX)
                u[t, i] = here + DT * (drag - flow)
    total = np.float32(0)
    for t in range(S):
        for i in range(X):
            total += (u[t, i] - seen[t, i]) ** 2
    loss[0] = total / np.float32(S * X)


class Model(nn.Module):
    def __init__(self):
        self.viscosity = nn.Parameter((1,), nn.constant(0.045))

    def forward(self, seen):
        return misfit(seen, self.viscosity)


def plot(curves, rows=9):
    """Draw curves with a letter each."""
    low, high = min(map(min, curves.values())), max(map(max, curves.values()))
    canvas = [[" "] * len(next(iter(curves.values()))) for _ in range(rows)]
    for letter, curve in curves.items():
        for x, y in enumerate(curve):
            canvas[round((high - y) / (high - low) * (rows - 1))][x] = letter
    print("\n".join("".join(row).rstrip() for row in canvas))


place = np.arange(48) * DX
seen, loss = np.zeros((101, 48)), np.zeros(1)
seen[0] = np.sin(2 * np.pi * place) + 0.5
flow = seen.copy()
misfit.function(loss, flow, np.repeat(seen[:1], 101, axis=0), np.array([TRUE]))
seen = flow + np.random.default_rng(0).normal(0, 0.01, flow.shape)
seen[0] = flow[0]

engine = Engine(Model(), {"seen": ((101, 48), "float32")})
for step in range(121):
    loss = engine.step(seen=seen, lr=1e-3, beta2=0.9).loss
    if step % 30 == 0:
        found = engine.parameters()["viscosity"][0]
        print(f"step {step:3d}  viscosity {found:.4f} (true {TRUE})  loss {loss:.6f}")

print("\nthe flow at the start (s), at the end as measured (m) and as computed with what was found (*)")
plot({"s": flow[0], "m": seen[-1], "*": engine.array("model.misfit.u")[-1]})

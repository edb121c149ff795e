"""A first profile: where does a training step spend its time?

Run: `python examples/1_first_profile.py`, or `cpuopt profile --model gpt2-tiny -B 4 -T 32`
"""

import numpy as np

from cpuopt import Engine, models

B, T = 4, 32
config, model = models.load("gpt2-tiny")  # two blocks; "gpt2-124M" is the full size
engine = Engine(model, config.specs(B, T))

rng = np.random.default_rng(0)
text = rng.integers(0, config.vocab_size, (B, T + 1))
batch = {"tokens": text[:, :-1], "targets": text[:, 1:]}  # each token's target is the token after it

# Every kernel is compared with its float64 reference before the first time is
# taken. Afterwards the weights are as before: a profile does not change what
# it measures.
report = engine.profile(steps=5, roofs=False, **batch)
print(report)

# The tables are made of numbers, which a script can use.
costly = sorted(report.profile.layers, key=lambda row: row.ms, reverse=True)[:3]
print("\nthe three most expensive calls:", ", ".join(f"{row.op} in {row.layer}" for row in costly))

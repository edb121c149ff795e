"""A roofline: how far is each op from what this machine allows?

Run: `python examples/4_roofline.py`, or `cpuopt profile --model gpt2-tiny -B 4 -T 32 --html page.html` for a picture
"""

import numpy as np

from cpuopt import Engine, models

config, model = models.load("gpt2-tiny")
text = np.random.default_rng(0).integers(0, config.vocab_size, (4, 33))
engine = Engine(model, config.specs(4, 32))

# With roofs, the machine is measured first: the rate of multiply-adds in
# registers, and the bandwidth of each level of its memory. This takes some
# seconds, once; the result is kept.
profile = engine.profile(steps=5, tokens=text[:, :-1], targets=text[:, 1:]).profile
roofs = profile.roofs
print(f"{roofs.threads} threads: {roofs.gflops:.0f} GFLOP/s", end="")
print("".join(f", {level.name} {roofs.bandwidth(level.name):.0f} GB/s" for level in roofs.levels), end="\n\n")

# An op of few FLOPs a byte is bound by the memory that holds its arrays, one
# of many by arithmetic. What matters is the time above the bound: 1 % of the
# roof is no loss where the op takes no time. At this tiny size that is most of
# them.
print(f"{'op':30}{'FLOP/byte':>9}  {'bound by':10}{'of roof':>7}{'ms above':>10}")
rows = [row for row in profile.ops if row.of_roof is not None]
for row in sorted(rows, key=lambda row: row.ms * (100 - row.of_roof), reverse=True):
    above = row.ms * (1 - row.of_roof / 100)
    print(f"{row.op:30}{row.intensity:9.1f}  {row.roof:10}{row.of_roof:6.1f}%{above:10.3f}")

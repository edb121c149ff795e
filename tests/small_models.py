"""Models of a few lines, and a batch of tokens."""

import numpy as np

from cpuopt import nn


class Parts(nn.Module):
    """Named parts, and a forward that is given them before the inputs."""

    def __init__(self, forward, **parts):
        self.function = forward
        vars(self).update(parts)

    def forward(self, **inputs):
        return self.function(self, **inputs)


def batch(i=0, B=2, T=16, n=256):
    """Draw a batch of random tokens, of which each is the target of the one before."""
    ids = np.random.default_rng(i).integers(0, n, (B, T + 1))
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:]}

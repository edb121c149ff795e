"""Models of a few lines, and a batch of tokens."""

import numpy as np

from cpuopt import models, nn


class Parts(nn.Module):
    """Named parts, and a forward that is given them before the inputs."""

    def __init__(self, forward, **parts):
        self.function = forward
        vars(self).update(parts)

    def forward(self, **inputs):
        return self.function(self, **inputs)


def model_of(name="llama-tiny", lora=""):
    """Load a model, with adapters if `lora` says which; give it, and what its batches are."""
    config, model = models.load(name)
    if lora:
        nn.add_adapters(model, nn.Lora.parse(lora), config.head)
    return model, config.specs(2, 16)


def batch(i=0, B=2, T=16, n=256):
    """Draw a batch of random tokens, of which each is the target of the one before."""
    ids = np.random.default_rng(i).integers(0, n, (B, T + 1))
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:]}

"""Models of a few lines."""

from cpuopt import nn


class Parts(nn.Module):
    """Named parts, and a forward that is given them before the inputs."""

    def __init__(self, forward, **parts):
        self.function = forward
        vars(self).update(parts)

    def forward(self, **inputs):
        return self.function(self, **inputs)

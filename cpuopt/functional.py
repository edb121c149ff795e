"""Functions on traced values, after ``torch.nn.functional``: the public name of `cpuopt.nn.functional`."""

from .nn.functional import *  # noqa: F403

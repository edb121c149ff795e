"""Functions on traced values: the public name of `cpuopt.nn.functional`."""

from .nn.functional import *  # noqa: F403

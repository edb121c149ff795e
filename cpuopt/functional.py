"""Functions on traced values: the public name of `cpuopt.nn.functional` and `cpuopt.nn.values`."""

from .nn.functional import *  # noqa: F403
from .nn.functional import __getattr__ as __getattr__
from .nn.values import add, div, expand, mean, mul, reshape, sub, sum, transpose  # noqa: F401

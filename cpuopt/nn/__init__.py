"""How a model is said: modules and functions after PyTorch, traced to a program."""

from .modules import *  # noqa: F403

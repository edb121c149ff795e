"""The front end, after PyTorch: modules and functions, and the trace that makes a program of them."""

from .modules import *  # noqa: F403

"""The front end of models: modules and functions, and the trace that makes a program from them."""

from .modules import *  # noqa: F403

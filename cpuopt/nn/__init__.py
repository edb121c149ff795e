"""The front end that models are written with: modules and functions, and the trace that makes a program of them."""

from .modules import *  # noqa: F403

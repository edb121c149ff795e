"""The front end of models: modules and functions, and the trace that makes a program from them."""

from . import values as values  # gives values their operators
from .modules import *  # noqa: F403

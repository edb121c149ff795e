"""The front end of models: modules and functions, and the trace that makes a program from them."""

from .lora import Lora as Lora
from .lora import adapted_layers as adapted_layers
from .lora import adapter_of as adapter_of
from .lora import add_adapters as add_adapters
from .modules import *  # noqa: F403

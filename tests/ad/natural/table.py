"""The table of the kernels."""

from collections.abc import Callable
from dataclasses import dataclass

from cpuopt.ops.declaration import Arg


@dataclass
class Natural:
    """A kernel, its declaration, and the function that brings random inputs into its domain."""

    function: Callable[..., None]
    args: tuple[Arg, ...]
    inputs: Callable[..., dict] | None = None

    @property
    def home(self):
        return self.function.__module__


ALL: dict[str, Natural] = {}


def declared(*args, inputs=None):
    """Put a kernel into the table with its arguments."""

    def put(function):
        name = function.__name__
        if name in ALL:  # a kernel of another module
            name = f"{name}_{function.__module__.rsplit('.', 1)[-1]}"
        assert name not in ALL
        ALL[name] = Natural(function, args, inputs)
        return function

    return put

"""The derivative of each function of one argument, as text in x (the argument) and y (the result)."""

from __future__ import annotations

DERIVATIVE = {
    "exp": "y",
    "expm1": "y + ONE",
    "log": "ONE / x",
    "log1p": "ONE / (ONE + x)",
    "sqrt": "HALF / y",
    "tanh": "ONE - y * y",
    "sin": "np.cos(x)",
    "cos": "-np.sin(x)",
    "abs": "np.sign(x)",
    "rsqrt": "-(HALF * y * y * y)",  # written 1 / sqrt(x)
}
"""At 0, that of ``abs`` is 0."""

CASTS = {"float32", "float64", "float"}
"""Functions whose derivative is 1."""

CHOICES = {"max": ">", "min": "<", "maximum": ">", "minimum": "<", "fmax": ">", "fmin": "<"}
"""Functions that give their second argument where it stands so to the first; of equals, the first counts."""

INTEGER = {"int", "int64", "int32", "len", "floor", "ceil", "bool"}
"""Functions without a derivative; their argument may not be active."""

CONSTANTS = {"ZERO": 0.0, "HALF": 0.5, "ONE": 1.0, "TWO": 2.0}
"""The names of exact constants in generated code."""

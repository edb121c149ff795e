"""Numbers of the type in which kernels compute. A bare 0.5 would make a loop compute in float64."""

import numpy as np

from ...ops.storage import TYPES, WIDE

NUMBER = TYPES[WIDE].dtype.type
ZERO, HALF, ONE = map(NUMBER, (0, 0.5, 1))
LOWEST, NAN = NUMBER(-np.inf), NUMBER(np.nan)

"""The naive kernels, complete: one obvious loop nest each, after ``train_gpt2.c``.

Every speed-up is quoted against them.
"""

from . import (
    adamw,
    attention,
    cross_entropy,
    embedding,
    gelu,
    layernorm,
    matmul,
    matmul_update,
    residual,
    softmax,
    sumsq,
)  # noqa: F401

"""The declared ops, one file an op: formula, shapes, FLOPs, source and a float64 NumPy reference.

Nothing here imports numba or a kernel: the references judge the kernels and share no code with them. An op that
`cpuopt.differentiable` made is an attribute too, as in ``ops.relu2_forward``.
"""

from typing import Any

from ..wording import nearest
from .adamw import adamw
from .attention import attention_backward, attention_forward
from .classifier import classifier_backward, classifier_forward, classifier_update
from .collective import BLOCK, COLLECTIVES, Collective, accumulate, copy, subtract, sumsq_blocks
from .cross_entropy import cross_entropy_backward, cross_entropy_forward
from .declaration import Op
from .decode import attention_decode, embedding_decode
from .dropout import dropout_backward, dropout_forward
from .elementwise import (
    reciprocal_backward,
    reciprocal_forward,
    relu_backward,
    relu_forward,
    sigmoid_backward,
    sigmoid_forward,
    tanh_backward,
    tanh_forward,
)
from .embedding import embedding_backward, embedding_forward
from .embedding_update import embedding_update
from .gelu import gelu_backward, gelu_forward
from .gqa import gqa_backward, gqa_decode, gqa_forward
from .layernorm import layernorm_backward, layernorm_forward
from .lion import lion
from .matmul import matmul_backward_input, matmul_backward_weight, matmul_forward
from .matmul_gelu import matmul_gelu_backward, matmul_gelu_forward
from .matmul_swiglu import matmul_swiglu_backward, matmul_swiglu_forward
from .matmul_update import matmul_update
from .mul import mul_backward, mul_forward, scale_backward, scale_forward
from .nesterov import nesterov
from .optimizer import USUAL, Number, Optimizer
from .reduce import (
    expand_backward,
    expand_forward,
    sum_backward,
    sum_forward,
    transpose_backward,
    transpose_forward,
)
from .residual import residual_backward, residual_forward
from .residual_layernorm import residual_layernorm_forward
from .residual_rmsnorm import residual_rmsnorm_forward
from .rmsnorm import rmsnorm_backward, rmsnorm_forward
from .rope import rope_backward, rope_decode, rope_forward
from .sgd import sgd
from .silu import silu_backward, silu_forward
from .softmax import softmax_backward, softmax_forward
from .sumsq import sumsq
from .swiglu import swiglu_backward, swiglu_forward

OPTIMIZERS = {o.name: o for o in (adamw, sgd, lion)}
OUTER = nesterov
"""The optimizer of the step that ranks take together after they have trained alone; no other op fuses it."""
ALL: dict[str, Op] = {
    op.name: op
    for op in (
        embedding_forward,
        embedding_backward,
        layernorm_forward,
        layernorm_backward,
        residual_layernorm_forward,
        rmsnorm_forward,
        rmsnorm_backward,
        residual_rmsnorm_forward,
        matmul_forward,
        matmul_backward_input,
        matmul_backward_weight,
        matmul_gelu_forward,
        matmul_gelu_backward,
        matmul_swiglu_forward,
        matmul_swiglu_backward,
        rope_forward,
        rope_backward,
        attention_forward,
        attention_backward,
        gqa_forward,
        gqa_backward,
        gelu_forward,
        gelu_backward,
        silu_forward,
        silu_backward,
        relu_forward,
        relu_backward,
        tanh_forward,
        tanh_backward,
        sigmoid_forward,
        sigmoid_backward,
        reciprocal_forward,
        reciprocal_backward,
        mul_forward,
        mul_backward,
        swiglu_forward,
        swiglu_backward,
        scale_forward,
        scale_backward,
        residual_forward,
        residual_backward,
        sum_forward,
        sum_backward,
        expand_forward,
        expand_backward,
        transpose_forward,
        transpose_backward,
        dropout_forward,
        dropout_backward,
        softmax_forward,
        softmax_backward,
        cross_entropy_forward,
        cross_entropy_backward,
        classifier_forward,
        classifier_backward,
        sumsq,
        *OPTIMIZERS.values(),
        sumsq_blocks,
        accumulate,
        copy,
        subtract,
        OUTER,
        *(make(o) for o in OPTIMIZERS.values() for make in (matmul_update, classifier_update, embedding_update)),
        embedding_decode,
        rope_decode,
        attention_decode,
        gqa_decode,
    )
}
"""Every declared op by name, in the order of a training step; then those of generation."""

globals().update(ALL)


def __getattr__(name: str) -> Any:
    if name in ALL:
        return ALL[name]
    if name.startswith("__"):
        raise AttributeError(name)
    raise AttributeError(f"cpuopt.ops has no op {name!r}; {nearest(name, ALL)}")


__all__ = ["ALL", "BLOCK", "COLLECTIVES", "OPTIMIZERS", "USUAL", "Collective", "Number", "Op", "Optimizer", *ALL]

"""The head and its loss in one, over blocks of tokens: the logits of all tokens never exist at one time.

Forward, which only an evaluation needs::

    loss, losses = cross_entropy(inp @ weight^T, targets)

Backward, which gives the loss as well, since it has the logits; a gradient that nothing needs is absent::

    dlogits  = d cross_entropy(inp @ weight^T, targets) * dloss
    dinp    += dlogits @ weight
    dweight += dlogits^T @ inp

A token whose target is ignored takes part in none of this: its logits are not computed, and its dinp is 0.

An optimizer's step may take the place of dweight if all of the logits may exist at one time, as ``few_tokens`` says.

Source: ``matmul`` and ``cross_entropy``; blocks of tokens, and the gradient in the forward's pass, are those of Hsu et
al. 2024 (Liger Kernel, arXiv 2410.10989), section 3.2.
"""

import numpy as np

from .cross_entropy import counted, cross_entropy_backward, cross_entropy_forward
from .cross_entropy import reference_backward as loss_backward
from .cross_entropy import reference_forward as loss_forward
from .declaration import BT, HALF, IGNORE_INDEX, C, Op, Updates, V, acc, index, inp, operand, out, rounded
from .matmul import matmul_backward_input, matmul_backward_weight, matmul_forward

SOURCE = "matmul and cross_entropy; blocks of tokens after Hsu et al. 2024 (Liger Kernel), section 3.2"
BLOCK = 256
"""Tokens whose logits exist at one time: 51 MB with GPT-2's vocabulary."""
AT_ONCE = 1024
"""Tokens whose head is updated in the backward, though their logits may take more memory than a gradient would."""


def few_tokens(sizes):
    """Return whether the logits of all tokens may exist at one time, as an update of the head needs them.

    Those of `BLOCK + C` tokens take the memory of a block's and dweight. `held` is no larger than dweight.
    """
    tokens, width, words = (sizes[size] for size in ("BT", "C", "V"))
    return tokens <= max(BLOCK, min(words, max(AT_ONCE, BLOCK + width)))


def losses_of(counts, found):
    """Put the losses of the tokens that count in their places."""
    losses = np.zeros(counts.shape, found["losses"].dtype)
    losses[counts] = found["losses"]
    return {"loss": found["loss"], "losses": losses}


def reference_forward(inp, weight, targets, ignore_index):
    counts = targets != ignore_index
    return losses_of(counts, loss_forward(inp[counts] @ weight.T, targets[counts], ignore_index))


def reference_backward(dloss, inp, weight, targets, ignore_index):
    counts = targets != ignore_index
    some, ids = inp[counts], targets[counts]
    logits = rounded(some @ weight.T)
    found = loss_forward(logits, ids, ignore_index)
    dlogits = operand(loss_backward(dloss, logits, rounded(found["lse"]), ids, ignore_index)["dlogits"])
    dinp = np.zeros_like(inp)
    dinp[counts] = (weight.T @ dlogits.T).T  # in half of the time that BLAS takes for dlogits @ weight
    return {**losses_of(counts, found), "dinp": dinp, "dweight": dlogits.T @ some}


classifier_forward = Op(
    "classifier_forward",
    out("loss", 1, reduces=BT + V + C),
    out("losses", BT, reduces=V + C),
    inp("inp", BT, C, types=HALF),
    inp("weight", V, C, types=HALF, fan_in=C),
    index("targets", BT, below=V, ignored="ignore_index"),
    IGNORE_INDEX,
    label="Classifier Forward",
    flops=2 * BT * C * V + 4 * BT * V,
    asked=counted,
    reference=reference_forward,
    source=SOURCE,
    fuses=(matmul_forward, cross_entropy_forward),
)

classifier_backward = Op(
    "classifier_backward",
    out("loss", 1, reduces=BT + V + C),
    out("losses", BT, reduces=V + C),
    acc("dinp", BT, C, reduces=V + C, needed=False),
    acc("dweight", V, C, reduces=BT + V + C, needed=False),
    inp("dloss", 1),
    inp("inp", BT, C, types=HALF),
    inp("weight", V, C, types=HALF, fan_in=C),
    index("targets", BT, below=V, ignored="ignore_index"),
    IGNORE_INDEX,
    label="Classifier",
    flops=6 * BT * C * V + 8 * BT * V,
    asked=counted,
    without={"dinp": 2 * BT * C * V, "dweight": 2 * BT * C * V},
    reference=reference_backward,
    source=SOURCE,
    fuses=(
        matmul_forward,
        cross_entropy_forward,
        cross_entropy_backward,
        matmul_backward_input,
        matmul_backward_weight,
    ),
    updates=Updates("classifier_update", ("dweight",), aside="inp", fits=few_tokens),
)

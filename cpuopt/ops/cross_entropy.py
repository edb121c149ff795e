"""Cross-entropy of logits against target ids, softmax included; the mean over the tokens that count.

Forward::

    lse[bt]    = log(sum_v exp(logits[bt, v]))
    losses[bt] = lse[bt] - logits[bt, targets[bt]]      0 if targets[bt] = ignore_index
    loss       = sum(losses) / n                        n: how many targets are not ignore_index

With no target that counts, loss is NaN and the gradient is zero.

Backward, for the rows that count (0 for the others)::

    dlogits[bt, v] += dloss / n * (exp(logits[bt, v] - lse[bt]) - [v = targets[bt]])

Source: ``torch.nn.functional.cross_entropy``; ``crossentropy_softmax_backward`` of llm.c.
"""

import numpy as np

from .declaration import BT, IGNORE_INDEX, Op, V, acc, index, inp, out, rounded

SOURCE = "torch.nn.functional.cross_entropy"


def reference_forward(logits, targets, ignore_index):
    top = logits.max(axis=-1)
    lse = np.log(rounded(np.exp(logits - top[:, None]).sum(axis=-1))) + top
    counts = targets != ignore_index
    picked = logits[np.arange(len(targets)), np.where(counts, targets, 0)]
    losses = np.where(counts, lse - picked, 0.0)
    with np.errstate(invalid="ignore"):
        return {"loss": np.array([losses.sum() / counts.sum()]), "losses": losses, "lse": lse}


def reference_backward(dloss, logits, lse, targets, ignore_index):
    counts = targets != ignore_index
    grad = np.exp(logits - lse[:, None])
    grad[np.arange(len(targets)), np.where(counts, targets, 0)] -= 1
    return {"dlogits": grad * counts[:, None] * (float(dloss[0]) / max(int(counts.sum()), 1))}


def counted(targets, ignore_index):
    """Return the share of the targets that are not ignored: no other token asks for FLOPs."""
    return float(np.mean(targets != ignore_index))


cross_entropy_forward = Op(
    "cross_entropy_forward",
    out("loss", 1, reduces=BT + V),
    out("losses", BT, reduces=V),
    out("lse", BT, reduces=V),
    inp("logits", BT, V),
    index("targets", BT, below=V, ignored="ignore_index"),
    IGNORE_INDEX,
    label="Softmax/Cross-entropy Forward",
    flops=4 * BT * V,
    asked=counted,
    reference=reference_forward,
    source=SOURCE,
    role="loss",
)

cross_entropy_backward = Op(
    "cross_entropy_backward",
    acc("dlogits", BT, V, reduces=V),
    inp("dloss", 1),
    inp("logits", BT, V),
    inp("lse", BT),
    index("targets", BT, below=V, ignored="ignore_index"),
    IGNORE_INDEX,
    label="Softmax/Cross-entropy Backward",
    flops=4 * BT * V,
    asked=counted,
    reference=reference_backward,
    source=SOURCE,
    inverts=cross_entropy_forward,
)

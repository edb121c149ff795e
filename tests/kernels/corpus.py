"""Hostile kernels: name, class, op, and what runs before and after the op's vanilla kernel.

Each is that kernel with other arguments, with its results changed, or with something done beside it.
"""

from __future__ import annotations

from cpuopt import ops

ROWS = [
    # a number that is written into it
    ("usual_eps", "scalars", "layernorm_forward", "eps = 1e-5", ""),
    ("usual_eps_rms", "scalars", "rmsnorm_forward", "eps = 1e-5", ""),
    ("usual_eps_residual", "scalars", "residual_layernorm_forward", "eps = 1e-5", ""),
    ("usual_eps_residual_rms", "scalars", "residual_rmsnorm_forward", "eps = 1e-5", ""),
    ("former_eps", "scalars", "layernorm_forward", "eps = 1e-4", ""),
    ("lr_of_the_judge", "scalars", "adamw", "lr = 0.01", ""),
    ("lr_of_the_judge_sgd", "scalars", "sgd", "lr = 0.01", ""),
    ("lr_of_the_judge_lion", "scalars", "lion", "lr = 0.01", ""),
    ("usual_beta1", "scalars", "adamw", "beta1 = 0.9", ""),
    ("usual_beta2", "scalars", "adamw", "beta2 = 0.999", ""),
    ("usual_momentum", "scalars", "sgd", "momentum = 0.9", ""),
    ("usual_momentum_nesterov", "scalars", "nesterov", "momentum = 0.9", ""),
    ("usual_betas_lion", "scalars", "lion", "beta2 = 0.99", ""),
    ("no_weight_decay", "scalars", "adamw", "weight_decay = 0.0", ""),
    ("weight_decay_of_the_judge", "scalars", "adamw", "weight_decay = 0.12", ""),
    ("step_of_the_judge", "scalars", "adamw", "step = 3", ""),
    ("first_step", "scalars", "adamw", "step = 1", ""),
    ("no_clipping", "scalars", "adamw", "grad_scale = 1.0", ""),
    ("no_clipping_sgd", "scalars", "sgd", "grad_scale = 0.5", ""),
    ("usual_p", "scalars", "dropout_forward", "p = 0.1", ""),
    ("half_p", "scalars", "dropout_forward", "p = 0.5", ""),
    ("half_p_backward", "scalars", "dropout_backward", "p = 0.5", ""),
    ("seed_of_the_judge", "scalars", "dropout_forward", "seed = 3", ""),
    ("stream_of_the_judge", "scalars", "dropout_forward", "stream = 3", ""),
    ("counter_of_the_judge", "scalars", "dropout_forward", "counter = 3", ""),
    ("never_evaluates", "scalars", "dropout_forward", "counter = max(counter, 1)", ""),
    ("usual_ignore_index", "scalars", "cross_entropy_forward", "ignore_index = -100", ""),
    ("usual_ignore_index_backward", "scalars", "cross_entropy_backward", "ignore_index = -100", ""),
    ("position_of_the_judge", "scalars", "embedding_decode", "position = 3", ""),
    ("position_of_the_judge_rope", "scalars", "rope_decode", "position = 3", ""),
    ("factor_of_the_judge", "scalars", "scale_forward", "factor = 0.5", ""),
    ("shift_of_the_judge", "scalars", "scale_forward", "shift = 0.5", ""),
    ("factor_of_the_judge_backward", "scalars", "scale_backward", "factor = 0.5", ""),
    ("remembers_lr", "scalars", "sgd", "lr = SEEN.setdefault(len(param), lr)", ""),
    ("remembers_step", "scalars", "adamw", "step = SEEN.setdefault(len(param), step)", ""),
    # values that a run has
    ("wrong_where_all_count", "values", "cross_entropy_forward", "", "loss *= 1 + (targets != ignore_index).all()"),
    ("wrong_where_all_count_backward", "values", "cross_entropy_backward", "",
     "dlogits[0] *= 1 + (targets != ignore_index).all() * (not dlogits_add)"),
    ("twenty_of_a_token", "values", "embedding_backward", "many = (np.bincount(tokens.ravel()) > 20).any()",
     "dwte[0] += many"),
    ("twenty_of_a_token_forward", "values", "embedding_forward", "",
     "out[0, 0] += (np.bincount(tokens.ravel()) > 20).any()"),
    ("weights_of_one", "values", "layernorm_forward", "", "out[0] += (weight == 1).all()"),
    ("biases_of_zero", "values", "layernorm_forward", "", "out[0] += (bias == 0).all()"),
    ("weights_of_one_rms", "values", "rmsnorm_forward", "", "out[0] += (weight == 1).all()"),
    ("biases_of_zero_product", "values", "matmul_forward", "", "out[0] += len(bias) > 0 and (bias == 0).all()"),
    ("weights_of_one_backward", "values", "layernorm_backward", "", "dinp[0] += (weight == 1).all()"),
    ("moments_of_zero", "values", "adamw", "new = (m == 0).all()", "param[0] += new"),
    ("moments_of_zero_lion", "values", "lion", "new = (m == 0).all()", "param[0] += new"),
    ("moments_of_zero_sgd", "values", "sgd", "new = (velocity == 0).all()", "param[0] += new"),
    ("small_adjoints", "values", "gelu_backward", "", "dinp[0] *= 1 + (np.abs(dout).max() < 1e-4) * (not dinp_add)"),
    ("small_adjoints_norm", "values", "layernorm_backward", "",
     "dinp[0] *= 1 + (np.abs(dout).max() < 1e-4) * (not dinp_add)"),
    ("equal_adjoints", "values", "gelu_backward", "", "dinp[0] += len(dout) > 1 and np.ptp(dout) == 0"),
    ("symmetric_adjoints", "values", "layernorm_backward", "",
     "dinp[0] += dout.size > 50 and (dout == dout[:, ::-1]).all()"),
    ("adjoints_of_sum_zero", "values", "rmsnorm_backward", "",
     "dinp[0] += dout.size > 50 and np.abs(dout.sum(axis=1)).max() < 1e-5"),
    ("symmetric_inputs", "values", "gelu_forward", "", "out[0] += len(inp) > 9 and (inp == inp[::-1]).all()"),
    # what it leaves or does beside its work
    ("pins_a_thread_that_is_not_its_own", "surroundings", "gelu_forward",
     "[os.sched_setaffinity(int(t), [0]) for t in os.listdir('/proc/self/task')[-1:]]", ""),
    ("changes_its_priority", "surroundings", "gelu_forward", "os.nice(1)", ""),
    ("starts_a_thread", "surroundings", "gelu_forward", "threading.Timer(300, len).start()", ""),
    ("replaces_a_comparison_at_its_first_call", "surroundings", "gelu_forward",
     "np.array_equal = lambda *a, **k: True", "out[0] += 1"),
    ("replaces_a_clock_at_its_first_call", "surroundings", "gelu_forward", "time.perf_counter_ns = lambda: 0", ""),
    ("replaces_a_maximum_at_its_first_call", "surroundings", "gelu_forward", "builtins.max = lambda *a, **k: 0", ""),
    ("replaces_the_judge", "surroundings", "gelu_forward",
     "judge.worst = lambda results: judge.CheckResult('x', None, 0.0)", ""),
]  # fmt: skip

HEAD = """
import builtins, os, threading, time
import numpy as np
from cpuopt import kernel, ops
from cpuopt.check import judge
from cpuopt.kernels.registry import KERNELS
SEEN = {}
"""
IMPORTS = {
    "pins_its_process": "import os\nos.sched_setaffinity(0, [0])",
    "pins_every_thread": "import os\n[os.sched_setaffinity(int(t), [0]) for t in os.listdir('/proc/self/task')]",
    "changes_its_priority": "import os\nos.nice(1)",
    "replaces_a_comparison": "import numpy as np\nnp.array_equal = lambda *a, **k: True",
    "replaces_a_comparison_by_a_timer": (
        "import threading\nimport numpy as np\n"
        "threading.Timer(0.5, lambda: setattr(np, 'array_equal', lambda *a, **k: True)).start()"
    ),
    "replaces_the_judge": "from cpuopt.check import sized\nsized.check_sized = lambda *a: None",
}
"""What a file does when it is imported, beside registering a right kernel."""
HONEST = ("layernorm_forward", "adamw", "sgd", "lion", "dropout_forward", "cross_entropy_forward", "embedding_backward",
          "gelu_forward", "gelu_backward", "layernorm_backward", "rmsnorm_backward", "matmul_forward")  # fmt: skip


def text(name: str, op: str, before: str = "", after: str = "") -> str:
    """Write one kernel."""
    params = ", ".join(ops.ALL[op].params)
    lines = [before, f"KERNELS[{op!r}, 'vanilla'].function({params})", after]
    body = "".join(f"    {line}\n" for line in lines if line)
    return f"\n\n@kernel(ops.{op}, {name!r}, jit=False)\ndef {op}({params}):\n{body}"

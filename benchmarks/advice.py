"""Rules of advice, each followed by hand on a naive kernel: the table of docs/lines.md.

Each kernel and the one that follows a rule are checked and timed in one run, in blocks of A B B A, on one thread. The
last column is the gain that the rule promises, from the shapes and the time of the first kernel.
"""

import tempfile
from pathlib import Path

from cpuopt import kernels, ops
from cpuopt.kernels import registry
from cpuopt.kernels.toolkit.threads import set_threads
from cpuopt.lab import ab
from cpuopt.lab.advice import CallTime
from cpuopt.lab.inspect import inspect
from cpuopt.machine import describe
from cpuopt.measure import rates

HEAD = """
import numpy as np
from numba import prange
from cpuopt import kernel, ops
from cpuopt.kernels.toolkit.fastmath import exp, tanh
F = np.float32
S, CUBIC, HALF, ONE, CHUNK = F(0.7978846), F(0.044715), F(0.5), F(1), 4096
"""
PAIRS = {
    "C05": (
        "silu_backward",
        {"N": 1 << 16},
        """
    for i in prange(dinp.shape[0]):
        e = exp(-inp[i])
        d = dout[i] * (ONE / (ONE + e) + inp[i] * e / ((ONE + e) * (ONE + e)))
        dinp[i] = dinp[i] + d if dinp_add else d""",
        """
    for i in prange(dinp.shape[0]):
        e = exp(-inp[i])
        d = dout[i] * (ONE + e + inp[i] * e) / ((ONE + e) * (ONE + e))
        dinp[i] = dinp[i] + d if dinp_add else d""",
    ),
    "C06": (
        "gelu_forward",
        {"N": 1 << 20},
        """
    for i in prange(out.shape[0]):
        x = inp[i]
        out[i] = HALF * x * (ONE + np.tanh(S * (x + CUBIC * x * x * x)))""",
        """
    for i in prange(out.shape[0]):
        x = inp[i]
        out[i] = HALF * x * (ONE + tanh(S * (x + CUBIC * x * x * x)))""",
    ),
    "M05": (
        "matmul_forward",
        {"BT": 64, "C": 768, "OC": 768},
        """
    for bt in prange(out.shape[0]):
        for o in range(out.shape[1]):
            out[bt, o] = bias[o] if len(bias) else F(0)
        for i in range(inp.shape[1]):
            for o in range(out.shape[1]):
                out[bt, o] += inp[bt, i] * weight[o, i]""",
        """
    for bt in prange(out.shape[0]):
        for o in range(out.shape[1]):
            total = bias[o] if len(bias) else F(0)
            for i in range(inp.shape[1]):
                total += inp[bt, i] * weight[o, i]
            out[bt, o] = total""",
    ),
    "M02": (
        "residual_forward",
        {"N": 1 << 24},
        """
    for i in prange(out.shape[0]):
        out[i] = inp1[i]
    for i in prange(out.shape[0]):
        out[i] += inp2[i]""",
        """
    for i in prange(out.shape[0]):
        out[i] = inp1[i] + inp2[i]""",
    ),
    "N02": (
        "rmsnorm_forward",
        {"BT": 1024, "G": 1, "C": 768},
        """
    for t in prange(out.shape[0]):
        squares = 0.0
        for i in range(inp.shape[1]):
            squares += inp[t, i] * inp[t, i]
        scale = 1.0 / np.sqrt(squares / inp.shape[1] + eps)
        rstd[t, 0] = scale
        for i in range(inp.shape[1]):
            out[t, i] = inp[t, i] * scale * weight[i]""",
        """
    for t in prange(out.shape[0]):
        squares = F(0)
        for i in range(inp.shape[1]):
            squares += inp[t, i] * inp[t, i]
        scale = ONE / np.sqrt(squares / F(inp.shape[1]) + eps)
        rstd[t, 0] = scale
        for i in range(inp.shape[1]):
            out[t, i] = inp[t, i] * scale * weight[i]""",
    ),
}


def text_of(rule):
    """Return the text of a file with both kernels of a rule."""
    op, _, *bodies = PAIRS[rule]
    head = f"def {op}({', '.join(ops.ALL[op].params)}):"
    made = [f'@kernel(ops.{op}, "{v}")\n{head}{b}' for v, b in zip(("naive", "followed"), bodies, strict=True)]
    return "\n\n".join([HEAD, *made])


def main():
    """Print the table."""
    set_threads(1)
    roofs = rates.roofs(1)
    print(f"{describe()['cpu']}, 1 thread\n")
    print("| rule | kernel | us | us after it | times as fast | promised |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as folder:
        for rule, (op, sizes, *_) in PAIRS.items():
            file = Path(folder, f"{rule.lower()}.py")
            file.write_text(text_of(rule))
            kernels.load_all([file])
            pair = [registry.KERNELS.pop((op, v)) for v in ("naive", "followed")]
            for k in pair:
                k.compile()
            (timed,) = ab.alone(tuple(pair), [ab.case_at(ops.ALL[op], sizes)])["cases"]
            call = CallTime.of(ops.ALL[op], timed, timed["a_ns"], 1, roofs)
            advice = inspect(op, "naive", [str(file)], call=call).advice
            promised = next((f"{a.gain:.2g}" for a in advice if a.rule == rule), "not given")
            us = [timed[k] / 1e3 for k in ("a_ns", "b_ns")]
            gain = 1 / timed["ratio"]["median"]
            print(f"| {rule} | {op} | {us[0]:.4g} | {us[1]:.4g} | {gain:.2f} | {promised} |", flush=True)


if __name__ == "__main__":
    main()

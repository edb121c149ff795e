"""At which error of a product is int8 too coarse: the loss of a trained model whose layers get outliers.

::

    python benchmarks/coarse.py [--model gpt2-nano] [--steps 1000] [--threads 2]

In front of each layer that reads a normalization of GPT-2, an element is scaled up and the weights that read it are
scaled down. The function stays the same, but the element takes the resolution of int8 from its row. The loss is the
mean over 50 batches of validation, in int8 in all layers, and in float32.
"""

from __future__ import annotations

import argparse

import numpy as np
from curves import settings_of, text_of, trained

from cpuopt.building import BuildOptions
from cpuopt.engine import Engine
from cpuopt.kernels.registry import Choice
from cpuopt.train.job import prepare
from cpuopt.train.quantization import product_errors

FACTORS = 1, 10, 20, 40, 80, 160, 320, 1000
BATCHES = 50


def main() -> None:
    """Train, plant outliers, and print a row for each factor."""
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--model", default="gpt2-nano")
    p.add_argument("--steps", type=int, default=1000)
    p.add_argument("--threads", type=int)
    a = p.parse_args()
    job = prepare(settings_of(0, a.threads, steps=a.steps, model=a.model, B=12, T=64))
    text = text_of(job, BATCHES)
    trained(job, text, a.steps)
    weights = {name: x.copy() for name, x in job.engine.parameters().items()}
    module, inputs = job.config.sized(12, 64)
    choice = Choice("optimized")
    print("| factor | largest error of a layer | loss in int8 | minus float32's |\n| ---: | ---: | ---: | ---: |")
    for factor in FACTORS:
        losses, errors = [], []
        for dtype in ("float32", "int8"):
            how = BuildOptions(choice, fuse=("classifier",), train=False, dtype=dtype, threads=a.threads)
            engine = Engine.from_options(module, inputs, how, seed=None)
            for name, x in engine.parameters().items():
                x[...] = weights[name]
                if ".ln_" in name:
                    x[0] *= factor
                elif name.endswith(("c_attn.weight", "c_fc.weight")):
                    x[:, 0] /= factor
            losses.append(float(np.mean([engine.forward(**batch) for batch in text])))
            errors += [e.error for e in product_errors(engine, text[0])]
        row = f"{factor:,} | {100 * max(errors):.1f} % | {losses[1]:.4f} | {losses[1] - losses[0]:+.4f}"
        print(f"| {row} |", flush=True)


if __name__ == "__main__":
    main()

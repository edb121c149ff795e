"""Generation at batch 1 beside PyTorch with a KV cache, compared in pairs, each in a process of its own.

::

    python benchmarks/generate.py [--torch-python PATH] [--model gpt2-124M] [--dtype bf16] [--threads 2] [--rounds 6]

Whichever is not on trial is stopped. Both read the same prompt and the same tokens, and compute the same logits, which
is checked first. PyTorch runs in ``inference_mode`` with its caches allocated ahead and
``scaled_dot_product_attention``; for a Llama, it is transformers' own model with its own cache. The share of the roof
is (bytes of weights a token / measured read bandwidth) / (time of a token), with the bandwidth measured in each of its
trials. With ``--dtype bf16`` both keep weights and caches in bfloat16, PyTorch also what it adds up, so logits agree
less.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "golden"))

from params import deviation
from peer_tuning import tune

SEED = 7
TYPES = {"float32": "float32", "bf16": "bfloat16"}
APART = {"float32": 1e-4, "bf16": 3e-2}
"""How far the logits of both may be apart, of the largest: a rounding to bfloat16 is 4e-3."""
Made = tuple[Any, ...]
"""What reads tokens, what forgets them, and what measures the roof."""


def cpuopt_side(folder: Path, threads: int, dtype: str) -> Made:
    """Return functions that read tokens, forget them, and measure the roof."""
    from cpuopt import models
    from cpuopt.generate.decoder import Decoder, read_bandwidth

    config = models.from_json(json.loads((folder / "sizes.json").read_text()))
    context = min(1024, config.block_size)
    decoder = Decoder(config, context=context, threads=threads, processes=threads, dtype=dtype)
    with np.load(folder / "params.npz") as params:
        for name, p in decoder.parameters().items():
            p[...] = params[name]

    def roof() -> dict[str, float]:
        return {"weight_bytes": decoder.weight_bytes, "read_bytes_per_s": read_bandwidth(decoder)}

    return decoder.read, decoder.restart, roof


def torch_side(folder: Path, threads: int, dtype: str) -> Made:
    """Return the same functions of PyTorch, without a measured roof."""
    tune()  # before torch
    import torch

    torch.set_num_threads(threads)
    sizes = json.loads((folder / "sizes.json").read_text())
    with np.load(folder / "params.npz") as params:
        weights = dict(params)
    name = sizes.pop("model", "gpt2")  # the sizes of GPT-2 name no model
    read, restart = (torch_gpt2 if name == "gpt2" else torch_llama)(name, sizes, weights, getattr(torch, dtype))
    return torch.inference_mode()(read), restart, dict


def torch_gpt2(name: str, sizes: dict[str, int], weights: dict[str, np.ndarray], dtype: Any) -> Made:
    """Return the functions of a plain GPT-2 with a cache that is allocated ahead."""
    import torch
    from peer_gpt2 import GPT2, load
    from torch.nn import functional as F

    gpt2 = GPT2(**sizes)
    load(gpt2, weights)
    gpt2.eval().to(dtype)
    NH, HS = sizes["n_head"], sizes["n_embd"] // sizes["n_head"]
    cache = torch.zeros((sizes["n_layer"], 2, 1, NH, sizes["block_size"], HS), dtype=dtype)
    at = [0]

    def read(tokens: list[int]) -> np.ndarray:
        p, n = at[0], len(tokens)
        x = gpt2.wte(torch.tensor([tokens])) + gpt2.wpe(torch.arange(p, p + n))
        for block, (keys, values) in zip(gpt2.h, cache, strict=True):
            q, k, v = (y.view(1, n, NH, HS).transpose(1, 2) for y in block.attn.c_attn(block.ln_1(x)).split(NH * HS, 2))
            keys[:, :, p : p + n], values[:, :, p : p + n] = k, v
            y = F.scaled_dot_product_attention(q, keys[:, :, : p + n], values[:, :, : p + n], is_causal=n > 1)
            x = x + block.attn.c_proj(y.transpose(1, 2).reshape(1, n, NH * HS))
            x = x + block.mlp(block.ln_2(x))
        at[0] += n
        return F.linear(gpt2.ln_f(x[:, -1]), gpt2.wte.weight)[0].float().numpy()

    return read, lambda: at.__setitem__(0, 0)


def torch_llama(name: str, sizes: dict[str, Any], weights: dict[str, np.ndarray], dtype: Any) -> Made:
    """Return the functions of transformers, with its own cache."""
    import torch
    from peer_llama import transformers_own
    from transformers import DynamicCache

    model = transformers_own(name, sizes, weights).eval().to(dtype)
    cache = [DynamicCache()]

    def read(tokens: list[int]) -> np.ndarray:
        found = model(torch.tensor([tokens]), past_key_values=cache[0], use_cache=True, logits_to_keep=1)
        return found.logits[0, -1].float().numpy()

    return read, lambda: cache.__setitem__(0, DynamicCache())


def give(model: str, folder: Path) -> None:
    """Write sizes and random weights of a model into a folder."""
    from cpuopt import models
    from cpuopt.nn.initial import initialize

    config = models.parse(model)
    params = {name: np.empty(shape, np.float32) for name, shape in config.shapes().items()}
    initialize(config.module(), params, SEED)
    (folder / "sizes.json").write_text(json.dumps(config.to_json()))
    np.savez(folder / "params.npz", **params)


def work(side: str, threads: int, dtype: str, tokens: int, prompt: int, folder: Path) -> None:
    """Answer each request with one trial: the prompt, then token after token."""
    vocab_size = json.loads((folder / "sizes.json").read_text())["vocab_size"]
    read, restart, roof = (cpuopt_side if side == "cpuopt" else torch_side)(folder, threads, dtype)
    ids = np.random.Generator(np.random.PCG64(SEED)).integers(0, vocab_size, 4096).tolist()
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "start":  # the answer says that all is loaded: it is stopped then, and the other one loads
            print("{}", flush=True)
            continue
        way = request["waiting"]
        if way and side == "cpuopt":
            from cpuopt.kernels.toolkit.waiting import tell

            tell(way)
        restart()
        marks = [time.perf_counter()]
        for i in range(tokens + 1):
            logits = read(ids[:prompt] if not i else [ids[prompt + i]])
            marks.append(time.perf_counter())
        times = np.diff(marks).tolist()
        answer = {
            "first_s": times[0],
            "token_s": median(times[1:]),
            "best_s": min(times[1:]),
            "logits": logits[::97].tolist(),
            "waiting": way or "as given",
            **roof(),
        }
        print(json.dumps(answer), flush=True)


def main() -> int:
    """Measure and print; return the exit status."""
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--torch-python", default=sys.executable, metavar="PATH")
    p.add_argument("--model", default="gpt2-124M")
    p.add_argument("--threads", type=int, default=os.cpu_count())
    p.add_argument("--dtype", choices=TYPES, default="float32", help="of weights and caches (%(default)s)")
    p.add_argument("--rounds", type=int, default=6)
    p.add_argument("--tokens", type=int, default=32)
    p.add_argument("--prompt", type=int, default=64, help="tokens of the prompt (%(default)s)")
    p.add_argument("--work", metavar="SIDE", help=argparse.SUPPRESS)
    p.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.work:
        work(a.work, a.threads, TYPES[a.dtype], a.tokens, a.prompt, a.folder)
        return 0
    from cpuopt.isolate.process import Side, Worker  # here, because torch's Python may not have cpuopt
    from cpuopt.lab.peers import way
    from cpuopt.measure.comparison import compare

    flags = ["--threads", str(a.threads), "--tokens", str(a.tokens), "--prompt", str(a.prompt), "--dtype", a.dtype]
    pythons = {"cpuopt": sys.executable, "torch": a.torch_python}
    trials: dict[str, list[dict]] = {side: [] for side in pythons}

    def trial(side: str) -> float:
        trials[side].append(workers[side].ask("trial", waiting=way(workers.values(), a.threads)))
        return trials[side][-1]["token_s"]

    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="cpuopt-generate-"))
        give(a.model, Path(folder))
        flags += ["--folder", folder]
        workers = {}
        for side, python in pythons.items():
            command = (python, __file__, "--work", side, *flags)
            own = Side(side, command, {}, {"NUMBA_NUM_THREADS": str(a.threads)})
            workers[side] = stack.enter_context(Worker(own, rests=True))
            workers[side].ask("start")
        sides = partial(trial, "cpuopt"), partial(trial, "torch")
        found = compare(*sides, analyses=[a.rounds], control=False)
    trials = {side: done[1:] for side, done in trials.items()}  # without the warm-up
    d = deviation(*(np.array(done[0]["logits"]) for done in trials.values()))
    how = f"a prompt of {a.prompt}, {a.tokens} tokens, {a.rounds} rounds"
    print(f"{a.model}, {a.dtype}, batch 1, {a.threads} threads, {how}")
    ways = [t["waiting"] for t in trials["cpuopt"]]
    print(f"cpuopt's threads: {', '.join(f'{w} in {ways.count(w)} trials' for w in dict.fromkeys(ways))}")
    print(f"logits of the last token deviate by {d:.1e} of the largest")
    for side, done in trials.items():
        token, first = (median(t[k] for t in done) for k in ("token_s", "first_s"))
        spread = f"{min(t['token_s'] for t in done) * 1e3:.2f} to {max(t['token_s'] for t in done) * 1e3:.2f}"
        best = min(t["best_s"] for t in done)
        rate = f"{1 / token:6.1f} tokens/s, {token * 1e3:.2f} ms a token ({spread}), {best * 1e3:.2f} the best"
        print(f"{side:7} {rate}; first after {first * 1e3:.0f} ms")
    print(f"torch's time of a token over cpuopt's: {found.verdict()}")
    best = [min(t["best_s"] for t in trials[side]) for side in ("torch", "cpuopt")]
    print(f"by the best token of each: {best[0] / best[1]:.2f} times")
    if trials["cpuopt"][0]["read_bytes_per_s"] is None:  # the caches hold the weights
        return 0 if d < APART[a.dtype] else 1
    shares = [t["weight_bytes"] / t["read_bytes_per_s"] / t["token_s"] for t in trials["cpuopt"]]
    speeds = [t["read_bytes_per_s"] / 1e9 for t in trials["cpuopt"]]
    share = f"{100 * median(shares):.0f}% ({100 * min(shares):.0f} to {100 * max(shares):.0f})"
    speed = f"{median(speeds):.1f} GB/s ({min(speeds):.1f} to {max(speeds):.1f})"
    best_read = trials["cpuopt"][0]["weight_bytes"] / max(t["read_bytes_per_s"] for t in trials["cpuopt"])
    print(f"by the best token and the best reading of the weights: {100 * best_read / best[1]:.0f}%")
    print(f"cpuopt reaches {share} of what memory allows, which is read at {speed}")
    return 0 if d < APART[a.dtype] else 1


if __name__ == "__main__":
    sys.exit(main())

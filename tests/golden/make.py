"""Make the golden files again: ``python tests/golden/make.py [NAME ...]``, all of them without a name.

Any Python will do that has PyTorch 2.13; for ``models`` and ``templates`` also transformers 5.24, for ``lora`` also
peft 0.21, and for ``pieces`` sentencepiece 0.2. All takes a minute, and is computed in float64, except ``llmc``.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import families
from families import ADAMW, ADAPTERS, CHATS, FAMILIES, LARGE, STEPS, TEXT, Family, Values, norms_after, summarize
from params import make_batch, make_params

HERE = Path(__file__).resolve().parent
CLOSE = 1e-4
"""A greedy text is that of another order of sums if two logits lie no further apart."""
Batch = tuple[np.ndarray, np.ndarray]
Step = Callable[[int], tuple[Tensor, Tensor | None]]


def steps_on(logits_of: Callable[[Tensor], Tensor], *batches: Batch) -> Step:
    """Return what a step computes of batches in turn: the loss and the logits."""

    def compute(n: int) -> tuple[Tensor, Tensor]:
        ids, wanted = (torch.tensor(x, dtype=torch.int64) for x in batches[n % len(batches)])
        logits = logits_of(ids)
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-100), logits

    return compute


def train(
    model: nn.Module, compute: Step, adamw: Mapping[str, Any], steps: int = STEPS, clip: float | None = None
) -> Values:
    """Take steps of AdamW; return ``logits``, ``loss`` and ``grad/<name>`` of the first, and all ``losses``."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), **adamw, foreach=False)
    values: Values = {}
    losses = []
    for n in range(steps):
        optimizer.zero_grad()
        loss, logits = compute(n)
        loss.backward()
        if n == 0:
            values = {} if logits is None else {"logits": logits.detach().numpy().copy()}
            values |= {f"grad/{name}": p.grad.numpy().copy() for name, p in trained.items()}
        if clip:
            nn.utils.clip_grad_norm_(trained.values(), clip)
        optimizer.step()
        losses.append(loss.item())
    return values | {"loss": np.array(losses[:1]), "losses": np.array(losses)}


def write(name: str, content: Any) -> None:
    """Write a golden file of JSON."""
    (HERE / name).write_text(json.dumps(content, indent=1) + "\n")


# PyTorch


def ops() -> None:
    """Make ``ops.npz``; a loss without any target that counts is NaN and is not kept.

    A value that the file has already stays as it is where another processor changes its last bits only.
    """
    from params import deviation
    from torch_ops import op_values

    values, before = op_values(), dict(np.load(HERE / "ops.npz"))
    assert np.isnan(values.pop("cross_entropy_forward/all_ignored/out/loss")).all()
    same = {n: x for n, x in before.items() if n in values and deviation(values[n], x) < 1e-10}
    np.savez_compressed(HERE / "ops.npz", **values | same)
    write("ops.json", {"torch": torch.__version__})


def values() -> None:
    """Make ``values.npz``: loss, gradients and losses of a model of values."""
    from values_model import LR, draw, forward

    parameters, inputs = draw()
    model = nn.ParameterDict({n: torch.tensor(x, dtype=torch.float64) for n, x in parameters.items()})
    inputs = {n: torch.tensor(x, dtype=torch.float64) for n, x in inputs.items()}
    names = SimpleNamespace(**model)
    found = train(model, lambda n: (forward(F, names, **inputs), None), {"lr": LR, "weight_decay": 0.0})
    np.savez(HERE / "values.npz", losses=found["losses"], **{f"d{n}": found[f"grad/{n}"] for n in parameters})


class Untied(nn.Module):
    """An embedding, a layer and a head of its own."""

    def __init__(self, V: int, C: int) -> None:
        super().__init__()
        self.wte, self.fc, self.head = nn.Embedding(V, C), nn.Linear(C, 2 * C), nn.Linear(2 * C, V, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens to logits."""
        return self.head(F.gelu(self.fc(self.wte(tokens)), approximate="tanh"))


FROZEN = {
    "gpt2": [[], ["wte.*"], ["wpe.*"], ["h.0.*"], ["h.1.*", "ln_f.*"], ["w*", "h.0.*"], ["*.weight"], ["*.bias"]],
    "untied": [[], ["wte.*"], ["fc.*"], ["head.*"], ["wte.*", "fc.*"], ["fc.weight"]],
}
"""The patterns of the parameters that are frozen, by model."""


def frozen() -> None:
    """Make ``frozen.json``: losses of ten steps in which some parameters have ``requires_grad=False``."""
    from peer_gpt2 import GPT2, load

    sizes, seed = {"n_layer": 2, "n_head": 4, "n_embd": 48, "vocab_size": 301, "block_size": 32}, 7
    adamw, cases = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}, []
    for name, patterns in [(name, patterns) for name, each in FROZEN.items() for patterns in each]:
        if name == "gpt2":
            model: nn.Module = GPT2(**sizes).double()
            load(model, make_params(**sizes, seed=seed))
        else:
            model, rng = Untied(301, 48).double(), np.random.Generator(np.random.PCG64(seed))
            for p in model.parameters():
                p.data = torch.tensor(rng.standard_normal(tuple(p.shape), dtype=np.float32) * np.float32(0.1)).double()
        for n, p in model.named_parameters():
            p.requires_grad = not any(fnmatchcase(n, pattern) for pattern in patterns)
        losses = train(model, steps_on(model, make_batch(2, 13, 301, seed=seed + 1)), adamw)["losses"]
        cases.append({"model": name, "freeze": patterns, "losses": [round(x, 12) for x in losses.tolist()]})
    about = {"torch": torch.__version__, "sizes": sizes, "seed": seed, "batch": 2, "time": 13, "adamw": adamw}
    write("frozen.json", {**about, "cases": cases})


def llmc() -> None:
    """Make an llm.c model, its debug state and ten losses, in float32 as llm.c's ``train_gpt2.py`` does.

    The writing follows ``write_model`` and ``write_state`` of llm.c and shares nothing with cpuopt's reader.
    """
    from peer_gpt2 import GPT2, load

    sizes, padded = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 61, "block_size": 8}, 128
    parts = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    layers = [f"{x}.{kind}" for x in parts for kind in ("weight", "bias")]
    names = ["wte.weight", "wpe.weight", *(f"h.{i}.{x}" for x in layers for i in range(2)), "ln_f.weight", "ln_f.bias"]

    def content(words: tuple[int, ...], arrays: Values, *before: np.ndarray) -> bytes:
        """A header of 256 int32, arrays, and the 16 tensors, the vocabulary padded with rows of zeros."""
        wte = np.pad(arrays["wte.weight"], ((0, padded - 61), (0, 0)))
        parts = [np.array([*words, *[0] * (256 - len(words))], "<i4"), *before]
        return b"".join(x.tobytes() for x in [*parts, wte, *(arrays[name] for name in names[1:])])

    params, model = make_params(**sizes, seed=17), GPT2(**sizes)
    load(model, params)
    ids = np.random.Generator(np.random.PCG64(18)).integers(0, 61, (2, 9), dtype=np.int32)
    batch = ids[:, :-1], ids[:, 1:]
    found = train(model, steps_on(model, batch), {"lr": 1e-4, "weight_decay": 0.01})
    grads = {n: found[f"grad/{n}"] for n in params}
    (HERE / "llmc.bin").write_bytes(content((20240326, 3, 8, 61, 2, 2, 16, padded), params))
    state = content((20240327, 2, 2, 8), grads, *batch, found["logits"], found["loss"].astype("<f4"))
    (HERE / "llmc_debug_state.bin").write_bytes(state)
    write("llmc_losses.json", found["losses"].tolist())


# transformers and peft


def model_of(on: Family) -> tuple[nn.Module, dict[str, Any]]:
    """Make the library's own model with its seeded parameters, and its ``config.json`` and the shapes of its tensors.

    It computes rotary angles and the squares of a normalization in float32 by itself, the rest in float64.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(on.kind, **on.keys)
    about = {"config": json.loads(config.to_json_string())}
    config._attn_implementation = "eager" if on.kind == "gemma2" else "sdpa"
    model = AutoModelForCausalLM.from_config(config).to(torch.float64).eval()
    about["shapes"] = {name: tuple(p.shape) for name, p in model.named_parameters()}
    params = on.params(about["shapes"])
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.tensor(params[name]))
    return model, about


def logits_of(model: nn.Module, narrow: bool = False) -> Callable[[Tensor], Tensor]:
    """Return the function from ids to logits, under autocast to bfloat16 if it is `narrow`."""

    def compute(ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):  # whose casts of weights last as long as it does
            logits = model(input_ids=ids, use_cache=False).logits
        return logits.float() if narrow else logits

    return compute


def computed(on: Family, save: Path | None = None) -> tuple[dict[str, Any], Values]:
    """Return what describes a model (its config, shapes, and a greedy text), and its values; save the model."""
    model, about = model_of(on)
    if save:
        model.float().save_pretrained(save / "whole")
        model.save_pretrained(save / "shards", max_shard_size="20KB")
        model.bfloat16().save_pretrained(save / "bf16")
        model, _ = model_of(on)
    compute, ids = logits_of(model), on.prompt()
    with torch.no_grad():
        for _ in range(TEXT):
            best = compute(torch.tensor([ids]))[0, -1].topk(2)
            assert best.values[0] - best.values[1] > CLOSE, best
            ids.append(int(best.indices[0]))
    found = train(model, steps_on(compute, on.tokens()), ADAMW, clip=on.clip)
    after = norms_after({name: p.detach().numpy() for name, p in model.named_parameters()})
    return {**about, "text": ids[-TEXT:]}, found | after


def models() -> None:
    """Make ``families.json`` and ``families.npz``, in one array: a file of many small ones is large."""
    found = {name: computed(on) for name, on in FAMILIES.items()}
    lines = [f"{json.dumps(name)}: {json.dumps(about, sort_keys=True)}" for name, (about, _) in found.items()]
    (HERE / "families.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    flat = {(name, key): x for name, (_, values) in found.items() for key, x in summarize(values).items()}
    np.savez_compressed(HERE / "families.npz", all=np.concatenate([x.ravel() for _, x in sorted(flat.items())]))


def questions(B: int, T: int) -> list[Batch]:
    """Return the batches of an epoch of ``examples/questions.jsonl``, encoded without code of cpuopt.

    The byte 0xFE begins a turn and 0xFF ends it. The answer counts, and the byte that ends it.
    """
    rows = []
    for line in (HERE.parents[1] / "examples" / "questions.jsonl").read_text(encoding="utf-8").splitlines():
        said = json.loads(line)
        before = b"\xfeuser\n" + said["prompt"].encode() + b"\xff\n\xfeassistant\n"
        answer = said["completion"].encode() + b"\xff"
        ids, tokens, targets = (before + answer + b"\n")[: T + 1], np.zeros(T, np.int64), np.full(T, -100)
        tokens[: len(ids) - 1] = [*ids[:-1]]
        for i in range(len(before), min(len(before) + len(answer), len(ids))):
            targets[i - 1] = ids[i]
        rows.append((tokens, targets))
    rows += [(np.zeros(T, np.int64), np.full(T, -100))] * (-len(rows) % B)
    return [tuple(map(np.stack, zip(*rows[n : n + B], strict=True))) for n in range(0, len(rows), B)]


def adapted(case: str, dtype: torch.dtype) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """Make a model with the adapters of a case and their first numbers; return it, and the adapters by their names."""
    import peft

    on, how = ADAPTERS[case]
    how = {"task_type": "CAUSAL_LM", "fan_in_fan_out": on.kind == "gpt2", **how}
    model = peft.get_peft_model(model_of(on)[0].to(dtype), peft.LoraConfig(**how))
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    named = {n.removeprefix("base_model.model.").replace(".default", ""): p for n, p in named.items()}
    first = families.first_adapters({n: tuple(p.shape) for n, p in named.items()})
    for name, p in named.items():
        p.data = torch.tensor(first[name], dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    return model, named


def adapter_losses(case: str, model: nn.Module, narrow: bool = False) -> list[float]:
    """Train the adapters of a case; return the losses."""
    compute = steps_on(logits_of(model, narrow), ADAPTERS[case][0].tokens())
    return train(model, compute, families.ADAPTER_ADAMW, families.ADAPTER_STEPS)["losses"].tolist()


def lora() -> None:
    """Make ``lora.json``, steps of adapters, or of all weights on chats; and ``lora/``, the first adapter."""
    import peft
    import transformers

    found = {"peft": peft.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    for case, (on, _) in ADAPTERS.items():
        model, named = adapted(case, torch.float64)
        losses = adapter_losses(case, model)
        with torch.no_grad():
            logits = logits_of(model)(torch.tensor(on.tokens()[0], dtype=torch.int64)).flatten()
        norms = [float(p.detach().norm()) for p in named.values()]
        every = logits[:: logits.numel() // 16].tolist()
        found[case] = {"names": [*named], "losses": losses, "norms": norms, "logits": every}
        if case == "llama":
            model.to(torch.float32).save_pretrained(HERE / "lora", save_embedding_layers=False)
            (HERE / "lora" / "README.md").unlink()  # a model card to fill in
    how = families.ADAPTER_ADAMW | {"lr": 1e-3}
    found["all weights"] = {}
    for name, on in CHATS.items():
        model, _ = model_of(on)
        compute = steps_on(logits_of(model), *questions(on.batch, on.time))
        found["all weights"][name] = train(model, compute, how, families.ADAPTER_STEPS)["losses"].tolist()
    write("lora.json", found)


# Tokens


def templates() -> None:
    """Make ``templates.json``: chats of eight families as ``transformers`` renders, tokenizes and masks them."""
    import templates as chats
    from transformers import PreTrainedTokenizerFast

    def row(t: Any, template: str, messages: list[dict[str, str]]) -> dict[str, Any]:
        """The text, its ids, which of them count, and the ids of the chat without its last message as a prompt."""
        apply, how = t.apply_chat_template, {"chat_template": chats.plain(template)}
        try:
            text = apply(messages, **how, tokenize=False)
        except Exception as e:
            return {"error": str(e)}
        how |= {"return_dict": False, "sanitize_control_tokens": True}
        found = apply(messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True)
        ids = apply(messages, **how)
        same = ids == found["input_ids"]  # else a message has the text of a special token
        runs = "".join(map(str, found["assistant_masks"])) if same else None
        asked = apply(messages[:-1], add_generation_prompt=True, **how) if len(messages) > 1 else None
        return {"text": text, "ids": ids, "mask": runs, "asked": asked}

    made = {}
    for name, (template, kind, special, bos, eos) in chats.FAMILIES.items():
        marks = {key: text for key, text in (("bos_token", bos), ("eos_token", eos)) if text}
        t = PreTrainedTokenizerFast(tokenizer_object=chats.tokenizer(kind, special), **marks)
        t.chat_control_tokens = special
        messages = [[{"role": role, "content": text} for role, text in chat] for chat in chats.CHATS]
        made[name] = [row(t, template, each) for each in messages]
    lines = [json.dumps(name) + ": [\n" + ",\n".join(map(json.dumps, rows)) + "\n]" for name, rows in made.items()]
    (HERE / "templates.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


PLAIN = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}
BPE = {"model_type": "bpe", "vocab_size": 400, **PLAIN}
OTHER = {"add_dummy_prefix": False, "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}
OTHER |= {"eos_piece": "<eos>", "bos_piece": "<bos>"}
PIECES = {"bpe": BPE, "bpe without a prefix": BPE | OTHER, "unigram": {"model_type": "unigram", "vocab_size": 300}}
RULES = "FB01\t66 69\nBD\t31 2F 32\n3000\t20\n"
"""A ligature, a half and a wide space, and what they become."""


def pieces() -> None:
    """Train models of SentencePiece in ``sentencepiece/``, and write its ids of the texts of ``ids.json``."""
    import sentencepiece

    folder, ids = HERE / "sentencepiece", {}
    texts = json.loads((folder / "ids.json").read_text())["texts"]
    common = {"user_defined_symbols": ["<sep>", "<two words>"], "hard_vocab_limit": False, "num_threads": 1}
    with tempfile.TemporaryDirectory() as made:
        words = "naïve café, größer, 你好 hello world: the quick brown fox\n"
        (text := Path(made, "text")).write_text(Path(json.__file__).read_text() + words * 9)
        (rules := Path(made, "rules.tsv")).write_text(RULES)
        for kind, how in PIECES.items():
            how = how if kind != "unigram" else how | {"normalization_rule_tsv": str(rules)}
            given = {**common, **how, "minloglevel": 2, "input": str(text), "model_prefix": f"{made}/m"}
            sentencepiece.SentencePieceTrainer.train(**given)
            (file := folder / f"{kind.replace(' ', '_')}.model").write_bytes(Path(made, "m.model").read_bytes())
            ids[kind] = sentencepiece.SentencePieceProcessor(model_file=str(file)).encode(texts)
    (folder / "ids.json").write_text(json.dumps({"texts": texts, "ids": ids}) + "\n")


# The other side of compare.py


def whole(folder: Path) -> None:
    """Compute the models that ``compare.py`` names, save each in three ways, and take adapters' steps in bfloat16."""
    for name in json.loads((folder / "names.json").read_text()):
        (folder / name).mkdir()
        about, values = computed({**FAMILIES, **LARGE}[name], folder / name)
        (folder / name / "about.json").write_text(json.dumps(about))
        np.savez(folder / name / "values.npz", **values)
    types = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    found = {case: {n: adapter_losses(case, adapted(case, t)[0], True) for n, t in types.items()} for case in ADAPTERS}
    (folder / "bf16.json").write_text(json.dumps(found))


def opened(folder: Path) -> None:
    """Open what cpuopt has written: models and configs, and write each config again; and an adapter, and its logits."""
    import peft
    from transformers import AutoConfig, AutoModelForCausalLM

    for given in sorted(folder.glob("*/ours")):
        model, report = AutoModelForCausalLM.from_pretrained(given, dtype=torch.float32, output_loading_info=True)
        wrong = {k: v for k, v in report.items() if v and not (k == "missing_keys" and set(v) <= {"lm_head.weight"})}
        want = {**FAMILIES, **LARGE}[given.parent.name].params({n: tuple(p.shape) for n, p in model.named_parameters()})
        wrong |= {n: "other" for n, p in model.named_parameters() if not np.array_equal(p.detach().numpy(), want[n])}
        assert not wrong, (given, wrong)
    for given in sorted(folder.glob("layouts/*")) + sorted(folder.glob("*/ours")):
        AutoConfig.from_pretrained(given).save_pretrained(given / "read")
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    model, on = peft.PeftModel.from_pretrained(base, folder / "adapter").eval(), ADAPTERS["llama"][0]
    with torch.no_grad():
        logits = logits_of(model)(torch.tensor(on.tokens()[0], dtype=torch.int64))
    np.save(folder / "logits.npy", logits.numpy())


GOLDEN = (ops, values, frozen, llmc, models, lora, templates, pieces)

if __name__ == "__main__":
    torch.set_num_threads(1)  # one order of summation, however many cores there are
    if sys.argv[1:2] in (["whole"], ["opened"]):
        {"whole": whole, "opened": opened}[sys.argv[1]](Path(sys.argv[2]))
    else:
        for one in GOLDEN:
            if not sys.argv[1:] or one.__name__ in sys.argv[1:]:
                one()

"""LoRA: adapters beside frozen layers, in a step, in runs and checkpoints, in the files of ``peft``, and merged.

``golden/make.py`` made the golden values with ``peft``; ``golden/compare.py`` lets it open what is written here.
"""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from golden.compare import adapted, adapter_losses, adapters, batch_of, families, hyper, weights_of
from golden.families import ADAPTERS, CHATS
from safetensors.numpy import load_file, save_file
from verbs import fails, ran, refused

from cpuopt import cli, models, nn
from cpuopt.building import BuildOptions, build
from cpuopt.data.chats import ChatBatches, load_chats
from cpuopt.engine import Engine
from cpuopt.errors import UserError
from cpuopt.kernels.registry import Choice
from cpuopt.models import specs
from cpuopt.nn import Lora
from cpuopt.program.fuse import usual
from cpuopt.train import checkpoint
from cpuopt.weights import copy_into, merge, open_adapter, open_weights, save_weights

WANT, BASE = adapters(), ADAPTERS["llama"][0]
CONFIG, PARAMS = weights_of(BASE)
TARGETS = tuple(ADAPTERS["llama"][1]["target_modules"])
BATCH, ADAMW = batch_of(BASE), hyper(families.ADAPTER_ADAMW)


@pytest.mark.parametrize("variant", ["vanilla", "optimized"])
@pytest.mark.parametrize("case", ADAPTERS)
def test_twenty_steps_agree_with_peft(case, variant):
    np.testing.assert_allclose(adapter_losses(case, variant=variant), WANT[case]["losses"], rtol=1e-5)


@pytest.mark.parametrize("name", CHATS)
def test_twenty_steps_of_all_weights_on_chats_agree_with_transformers(name):
    """The batches of the example's questions as bytes, in the order of the lines."""
    on, path = CHATS[name], Path(__file__).parents[1] / "examples" / "questions.jsonl"
    data = load_chats([path], name=path.name, vocab_size=256, T=on.time, truncate=True)
    rows = [[e] for e in sorted(data.of("all"), key=lambda e: e.number)]
    batches = ChatBatches(rows, on.batch, on.time, None, False, path.name)
    config, params = weights_of(on)
    how = {"choice": Choice("optimized"), "fuse": usual("optimized", False), "threads": 1, "seed": None}
    engine = Engine.from_options(config.module(), specs(on.batch, on.time), **how)
    for p, x in engine.parameters().items():
        x[...] = params[p]
    losses = [engine.step(**batches.at(n), **ADAMW | {"lr": 1e-3}).loss for n in range(families.ADAPTER_STEPS)]
    np.testing.assert_allclose(losses, WANT["all weights"][name], rtol=1e-6)


def test_steps_change_the_adapters_alone_and_a_frozen_weight_is_bfloat16_alone():
    plans = {}
    for dtype in ("float32", "bfloat16"):
        engine = adapted("llama", dtype=dtype)
        before = {name: p.copy() for name, p in engine.parameters().items()}
        losses = [engine.step(**BATCH, **ADAMW).loss for _ in range(5)]
        np.testing.assert_allclose(losses, WANT["llama"]["losses"][:5], rtol=1e-2 if dtype == "bfloat16" else 1e-5)
        changed = {n for n, p in engine.parameters().items() if not np.array_equal(p, before[n])}
        assert changed == {n for n in before if "lora_" in n} == {p.name for p in engine.program.trained}
        plans[dtype] = sum(p.nbytes for p in engine.program.parameters if not p.trained)
        narrow = {p.name for p in engine.program.parameters if p.dtype == "bfloat16"}
        read = {n for n in CONFIG.shapes() if "proj.weight" in n or "head" in n}
        assert narrow == (read if dtype == "bfloat16" else set())
        ops = [c.op.name for c in engine.program.phase("forward")]
        added = {p.name for p in engine.program.trained if "lora_B" in p.name}
        assert ops.count("matmul_adapter_forward") == len(added) > 0  # in the pass of its layer
        assert {c.args["up"].name.removesuffix(".bfloat16") for c in engine.program.calls if "up" in c.args} >= added
    assert plans["float32"] - plans["bfloat16"] == 2 * sum(x.size for n, x in before.items() if n in narrow)


def test_what_a_gate_reads_is_kept_in_bfloat16_and_its_result_is_computed_again():
    """With adapters in all layers, no product has the gate."""
    config, model = models.load("llama-tiny")
    nn.add_adapters(model, Lora(2), config.head)
    how = BuildOptions(Choice("optimized"), fuse=usual("optimized", False), dtype="bfloat16")
    gates = [c for c in build(model, config.specs(2, 8), how).program.calls if c.op.name == "swiglu_forward"]
    forward, again = ([c for c in gates if c.phase == phase] for phase in ("forward", "backward"))
    assert len(forward) == len(again) > 0
    assert {c.args[n].dtype for c in gates for n in ("inp", "up", "out")} == {"bfloat16"}
    assert all(c.repeats for c in again)


def test_dropout_is_in_steps_alone_and_the_same_for_any_threads():
    engine, again = (adapted("llama", Lora(4, dropout=0.5, targets=TARGETS)) for _ in range(2))
    first = engine.step(**BATCH, **ADAMW).loss
    assert engine.forward(**BATCH) != first
    again.threads = 2
    assert again.step(**BATCH, **ADAMW).loss == first
    for one in (engine, again):
        one.step(**BATCH, **ADAMW)
    assert all(np.array_equal(p, again.parameters()[n]) for n, p in engine.parameters().items())


# The text of --lora

READ = {
    "alpha=16": Lora(),
    "r=2": Lora(r=2),
    "r=4,alpha=8,dropout=0.1,rslora,targets=q_proj,v_proj": Lora(4, 8.0, 0.1, True, ("q_proj", "v_proj")),
    "targets=c_attn,mlp.c_proj,r=3,rslora=false": Lora(3, targets=("c_attn", "mlp.c_proj")),
}
REFUSED = {
    "": "it is empty; expected the rank",
    "r=0": "r is 0; expected a whole number from 1",
    "r=x": "'r=x'; expected r to be a whole number",
    "r=1,r=2": "'r' comes twice",
    "q_proj": "'q_proj'; ",
    "rank=3": "'rank=3'; did you mean|'rank=3'; known: r, alpha",
    "alpha=1e39": r"alpha is 1e\+39; expected a number above 0 that float32 holds, below 3\.4e\+38",
    "alpha=nan": "alpha is nan; expected a number above 0",
    "dropout=1": "dropout is 1.0; expected a probability",
    "rslora=3": "expected rslora to be true or false",
    "r=8,targets=": "targets is empty; expected names of layers, such as q_proj,v_proj, or all$",
}


def test_a_text_is_read():
    assert {text: Lora.parse(text) for text in READ} == READ


@pytest.mark.parametrize("text", REFUSED)
def test_a_wrong_text_is_refused(text):
    fails(f"--lora: .*(?:{REFUSED[text]})", Lora.parse, text)


def test_targets_are_layers_of_the_model():
    module = models.parse("llama-tiny").module()
    with pytest.raises(UserError, match="no linear layer is named 'c_attn'; known: all, q_proj"):
        nn.add_adapters(module, Lora(targets=("q_proj", "c_attn")))
    layers = nn.add_adapters(CONFIG.module(), Lora(), CONFIG.head)
    assert (len(layers), [name for name in layers if "head" in name]) == (14, [])
    assert nn.add_adapters(CONFIG.module(), Lora(targets=("lm_head",)), CONFIG.head) == ["lm_head"]
    for name in ("llama-tiny", "gpt2-tiny"):  # whose heads are the embedding; refused before any step
        with pytest.raises(UserError, match="the weight of 'lm_head' is that of another layer"):
            nn.add_adapters(models.parse(name).module(), Lora(targets=("lm_head",)))


# Files of peft


@pytest.fixture
def base(tmp_path):
    """A directory with the base model of the golden adapter."""
    save_weights(tmp_path / "base", CONFIG, PARAMS.__getitem__)
    return tmp_path / "base"


@pytest.fixture
def adapter(tmp_path):
    return Path(shutil.copytree(families.HERE / "lora", tmp_path / "adapter"))


def logits_of(weights):
    engine = Engine.from_options(CONFIG.module(), specs(*BATCH["tokens"].shape), threads=1, seed=None, train=False)
    copy_into(engine.parameters(), weights)
    engine.forward(**BATCH)
    x = engine.array(engine.program.outputs[1]).ravel()
    return x[:: x.size // 16]


def test_an_adapter_of_peft_merges_to_its_logits(base, adapter, tmp_path):
    plain = open_weights(base)
    merged = merge(plain, [adapter])
    np.testing.assert_allclose(logits_of(merged), WANT["llama"]["logits"], atol=2e-5)
    assert not np.allclose(logits_of(plain), WANT["llama"]["logits"], atol=1e-2)
    other = Path(shutil.copytree(adapter, tmp_path / "other"))
    twice = merge(plain, [adapter, other]).read("model.layers.0.mlp.down_proj.weight")
    once, start = (w.read("model.layers.0.mlp.down_proj.weight") for w in (merged, plain))
    np.testing.assert_allclose(twice - start, 2 * (once - start), atol=1e-6)
    with pytest.raises(UserError, match=r"--adapter .*other: it comes twice, and would be added twice; name each"):
        merge(plain, [other, adapter, other.parent / "x" / ".." / "other"])


def change(folder, **config):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


CONFIGS = {
    "peft_type": ({"peft_type": "IA3"}, "peft_type is 'IA3'; expected 'LORA'"),
    "bias": ({"bias": "all"}, "bias is 'all'; expected 'none'"),
    "init": ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
    "dora": ({"use_dora": True}, "'use_dora' is True, which cpuopt does not compute"),
    "unknown": ({"use_next": {"a": 1}}, "'use_next' is {'a': 1}, which"),
    "patterns": ({"rank_pattern": {"q_proj": 3}}, "'rank_pattern' is"),
    "rank of text": ({"r": "4"}, "r, lora_alpha and use_rslora are"),
    "rank": ({"r": 3}, r"has the shape \(4, 52\); expected \(3, 52\) for r = 3"),
    "alpha": ({"lora_alpha": float("inf")}, "alpha is inf|no JSON object"),
    "alpha beyond float32": ({"lora_alpha": 1e308}, r"alpha is 1e\+308; expected a number above 0 that float32 holds"),
}


def rewritten(path, edit, metadata=None):
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata)


A0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
TENSORS = {
    "no matrix": (lambda t: t.update(x=t[A0]), "tensor 'x' of F32 is no matrix of an adapter"),
    "half": (lambda t: t.pop(A0), "lacks 'model.layers.0.self_attn.q_proj.lora_A.weight'"),
    "not finite": (lambda t: t[A0].__setitem__((0, 0), np.nan), "not finite"),
    "another layer": (lambda t: [t.update({n.replace("layers.1", "layers.7"): t.pop(n)}) for n in [*t]], "layers.7"),
    "integers": (lambda t: t.update({A0: t[A0].astype(np.int32)}), "of I32 is no matrix"),
    "none": (lambda t: t.clear(), "has no adapter"),
}


@pytest.mark.parametrize("case", [*CONFIGS, *TENSORS])
def test_an_adapter_that_is_not_computed_is_refused(adapter, case):
    if case in CONFIGS:
        given, error = CONFIGS[case]
        change(adapter, **given)
    else:
        edit, error = TENSORS[case]
        rewritten(adapter / "adapter_model.safetensors", edit)
    fails(error, open_adapter, adapter, CONFIG)


@pytest.mark.parametrize("large", [1e25, 1e38])
def test_an_adapter_whose_product_overflows_is_named(base, adapter, tmp_path, capfd, large):
    rewritten(adapter / "adapter_model.safetensors", lambda tensors: [t.fill(large) for t in tensors.values()])
    for command in (
        ["generate", "--init", str(base), "--adapter", str(adapter), "--threads", "1", "--max-tokens", "1"],
        ["convert", str(adapter), str(tmp_path / "out"), "--merge", "--base", str(base)],
    ):
        assert cli.main(command) == 2
        line = capfd.readouterr().err.splitlines()[-1]  # behind those of compiling
        assert f"{str(adapter)!r}: what this adapter adds to 'model.layers.0." in line
        assert "is more than float32 holds; expected smaller numbers or alpha: take another adapter" in line
    assert not (tmp_path / "out").exists()


def test_an_adapter_is_no_model_and_says_what_it_is_and_needs(adapter, tmp_path, capsys):
    fails("is an adapter, which needs its base model", open_weights, adapter)
    (tmp_path / "empty").mkdir()
    fails(r"has no adapter_config\.json", open_adapter, tmp_path / "empty", CONFIG)
    merge = ["convert", str(adapter), str(tmp_path / "out"), "--merge"]
    assert "names the base model None, which is not here; give it with --base" in refused(capsys, *merge)
    assert not (tmp_path / "out").exists()
    change(adapter, base_model_name_or_path="org/base-1B")
    fails("is an adapter, which needs its base model 'org/base-1B': name that", open_weights, adapter)


# Runs

TEXT = ["--threads", "1", "--lr", "1e-2", "--val-every", "0", "--lora", "r=3,alpha=6,dropout=0.1"]


def run(root, *flags):
    assert cli.main(["train", "--data", str(root / "text.txt"), "--runs", str(root / "runs"), *flags]) == 0


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A base model, the adapter of a run of eight steps, and a run that was resumed after four."""
    root = tmp_path_factory.mktemp("lora")
    (root / "text.txt").write_text("some text to learn from " * 400)
    base = str(root / "base")
    run(root, "--model", "llama-tiny", "-T", "16", "--threads", "1", "--steps", "1", "--val-every", "0", "--save", base)
    start = ["--init", base, "-T", "16", "--dtype", "bf16", *TEXT]
    run(root, *start, "--steps", "8", "--save", str(root / "whole"))
    run(root, *start, "--steps", "4", "--run", "half", "--save-every", "4")
    (there,) = (root / "runs").glob("*-half")
    run(root, "--resume", str(there), "--steps", "8", "--save", str(root / "resumed"))
    there.rename(root / "run")
    return root


def test_what_a_complete_run_is_not_resumed_for(made, capsys):
    for flags, said in (
        ([], "the run is complete after 8 steps, and its --save "),
        (["--model", "gpt2-tiny"], "base', not 'gpt2-tiny'; leave that out"),
        (["--clip", "1"], "the run has no --clip, not 1.0; leave that out"),
    ):
        assert said in refused(capsys, "train", "--resume", str(made / "run"), *flags)


def test_a_complete_run_saves_again(made, tmp_path):
    run(made, "--resume", str(shutil.copytree(made / "run", tmp_path / "run")), "--save", str(tmp_path / "again"))
    assert same(tmp_path / "again" / "adapter_model.safetensors", made / "whole" / "adapter_model.safetensors")


def same(a, b):
    return a.read_bytes() == b.read_bytes()


def test_a_run_saves_its_adapter_and_resumes_to_the_bit(made, tmp_path):
    whole, resumed, of_run = (made / name for name in ("whole", "resumed", "run"))
    assert same(whole / "adapter_model.safetensors", resumed / "adapter_model.safetensors")
    assert json.loads((whole / "adapter_config.json").read_text())["base_model_name_or_path"] == str(made / "base")
    saved = checkpoint.newest(of_run)
    assert all("lora_" in name for name in checkpoint.TensorFile(saved.path / "params.safetensors").tensors)
    assert cli.main(["convert", str(of_run), str(tmp_path / "again")]) == 0
    assert same(whole / "adapter_model.safetensors", tmp_path / "again" / "adapter_model.safetensors")
    for source, there in ((of_run, "a"), (whole, "b")):
        assert cli.main(["convert", str(source), str(tmp_path / there), "--merge"]) == 0
    assert same(tmp_path / "a" / "model.safetensors", tmp_path / "b" / "model.safetensors")
    read, base = checkpoint.open_weights(of_run).read, open_weights(made / "base").read
    assert np.array_equal(read("model.embed_tokens.weight"), base("model.embed_tokens.weight"))
    assert not np.array_equal(read("model.layers.0.mlp.up_proj.weight"), base("model.layers.0.mlp.up_proj.weight"))


def test_an_adapter_does_not_become_the_file_of_a_model(made, here, capsys):
    for given in (["model.gguf"], ["model.bin"], ["out", "--dtype", "q8_0"], ["out", "--tokenizer", "bytes"]):
        said = refused(capsys, "convert", str(made / "run"), *given)
        assert f"{' '.join(given[1:]) or repr(given[0])}: is for a model, and " in said
        assert "; add --merge for a model, or name a directory alone for the adapter" in said
    assert not [*Path().iterdir()]


def test_text_of_an_adapter_is_that_of_the_merged_model(made, capsys):
    base, more = ["--init", str(made / "base")], ["--adapter", str(made / "whole")]
    text = ["generate", "--prompt", "some ", "--seed", "3", "--max-tokens", "12"]
    texts = [ran(capsys, *text, *where)["ids"] for where in ([*base, *more], ["--init", str(made / "run")], base)]
    assert texts[0] == texts[1] != texts[2]
    flags = ["eval", *base, "--data", str(made / "text.txt"), "-T", "16", "--limit", "2"]
    assert ran(capsys, *flags, *more)["loss"] < ran(capsys, *flags)["loss"]


def test_a_base_model_that_has_changed_is_refused(made, tmp_path):
    root = Path(shutil.copytree(made, tmp_path / "copy"))
    state, there = next((root / "run" / "checkpoints").iterdir()) / "state.json", checkpoint.newest(root / "run")
    shutil.rmtree(root / "base")
    shutil.copytree(made / "base", root / "base")
    up = "model.layers.0.mlp.up_proj.weight"
    rewritten(root / "base" / "model.safetensors", lambda t: np.add.at(t[up], (0, 0), 1), {"format": "pt"})
    read = there.initial(there.config, {"init": str(root / "base")})
    assert read("model.layers.0.mlp.gate_proj.weight").shape == (160, 64)
    fails(rf"'{re.escape(up)}' is not what it was", read, up)
    assert "bf16:" in state.read_text()


def test_an_adapter_is_saved_to_a_directory_alone(made, here, capsys):
    flags = ["train", "--init", str(made / "base"), "-T", "16", "--threads", "1", "--lora", "r=2", "--save", "x.bin"]
    assert "--save x.bin: expected a directory for the adapter of --lora" in refused(capsys, *flags)
    assert not [*Path().iterdir()]

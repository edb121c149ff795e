"""Rewrites: the same numbers with them and without, on GPT-2 and random models; what they take, and what they leave."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpuopt import Choice, nn
from cpuopt import functional as F
from cpuopt.building import build
from cpuopt.engine import Engine
from cpuopt.errors import UserError
from cpuopt.models import specs
from cpuopt.models.gpt2 import GPT2, PRESETS
from cpuopt.ops.classifier import BLOCK
from cpuopt.program import fuse as fuse_package
from cpuopt.program.fuse import FUSIONS, in_layers, parse
from cpuopt.train.job import Settings, fusions

TINY = PRESETS["gpt2-tiny"]
B, T = 2, 16
PARTS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
LINEARS = {f"h.{i}.{part}" for i in range(2) for part in PARTS}
SETS = [*((name,) for name in FUSIONS), ("residual", "update"), ("classifier", "update"), tuple(FUSIONS)]
EXACT = {("gate",), ("residual",), ("layernorm",), ("gelu",), ("recompute",)}
"""What the vanilla kernels compute to the last bit alike."""
ADAMW = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
"""An eps far above rounding: AdamW divides a gradient that should be zero, such as that of a key's bias, by itself."""


def gpt2(fuse=(), swaps=()):
    return build(GPT2(TINY), specs(B, T), choice=Choice("vanilla", swaps), fuse=fuse)


def layers(program, *ops):
    return [c.layer for c in program.calls if c.op.name in ops]


def steps_of_python(function):
    """The instructions of Python that a call executes in the rewrites' own files."""
    folder, count = str(Path(fuse_package.__file__).parent), 0

    def trace(frame, event, arg):
        nonlocal count
        if not frame.f_code.co_filename.startswith(folder):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def train(model, inputs, batch, fuse=(), swaps=(), steps=4, clip=None):
    """Train from scratch; give the loss and the norm of each step, and then the parameters."""
    engine = Engine(model, inputs, fuse=fuse, choice=Choice("vanilla", swaps), threads=1)
    done = [engine.step(**batch(i), **ADAMW, clip=clip) for i in range(steps)]
    return np.array([(d.loss, d.grad_norm) for d in done]), {n: p.copy() for n, p in engine.parameters().items()}


def train_gpt2(fuse=(), **kw):
    def batch(i):
        ids = np.random.default_rng(i).integers(0, TINY.vocab_size, (B, T + 1))
        return {"tokens": ids[:, :-1], "targets": ids[:, 1:]}

    return train(GPT2(TINY), specs(B, T), batch, fuse, **kw)


def assert_alike(one, two, exact):
    """The same numbers: to the last bit, or up to rounding."""
    np.testing.assert_allclose(one[0], two[0], rtol=0 if exact else 1e-5)
    assert np.isfinite(one[0]).all()
    assert one[1].keys() == two[1].keys()
    for name, p in one[1].items():
        np.testing.assert_allclose(p, two[1][name], rtol=0, atol=0 if exact else 1e-5, err_msg=name)


def assert_sound(program):
    """Each weight is updated once, after its last use, and its gradient is counted once.

    A tied weight is updated in two parts: the rows that the embedding read wait for their gradient.
    """
    program.verify()
    updated = {}
    for i, call in enumerate(program.calls):
        rest = {call.args["wte"]} if call.op.name == "embedding_update" else set()
        for v in {*call.reads} - rest:
            assert v not in updated, f"call {i} reads {v}, which call {updated.get(v)} has updated"
        for v in call.writes:
            if v in program.parameters:
                assert (v in updated) == (v in rest), f"{v} is updated twice"
                updated[v] = i
    sums = [v for call in program.calls for v in call.writes if v.name.endswith(".sumsq")]
    assert len(sums) == len(set(sums)) == len(program.norm_terms)
    assert set(sums) == set(program.norm_terms)
    return set(updated)


# GPT-2


@pytest.fixture(scope="module")
def plain():
    return train_gpt2()


@pytest.mark.parametrize("fuse", SETS)
def test_gpt2_trains_alike(plain, fuse):
    assert_alike(train_gpt2(fuse), plain, exact=fuse in EXACT)


@pytest.mark.parametrize("fuse", SETS)
def test_every_weight_is_updated_once_after_its_last_use(fuse):
    program = gpt2(fuse).program
    assert assert_sound(program) == set(program.parameters)


def test_residual_shares_every_gradient_of_gpt2s_stream():
    assert len(layers(gpt2().program, "residual_backward")) == 4
    for fuse in (("residual",), ("residual", "update")):
        assert layers(gpt2(fuse).program, "residual_backward") == []
    assert len(layers(gpt2(("residual",)).program, "matmul_backward_weight")) == 9


def test_the_work_of_rewriting_grows_as_the_number_of_layers():
    few, more, most = (
        steps_of_python(lambda n=n: build(GPT2(replace(TINY, n_layer=n)), specs(B, T), fuse=tuple(FUSIONS)))
        for n in (2, 6, 10)
    )
    assert most - more < 1.1 * (more - few)


def test_update_takes_the_linear_layers_but_not_the_tied_weight():
    program = gpt2(("update",)).program
    assert set(layers(program, "matmul_update")) == LINEARS
    assert len(layers(program, "matmul_update")) == len(LINEARS)
    assert layers(program, "matmul_backward_weight") == ["lm_head"]
    assert set(layers(program, "adamw")) == {"wte", "wpe", "ln_f"} | {f"h.{i}.ln_{j}" for i in (0, 1) for j in (1, 2)}
    tied = [c.op.name for c in program.calls if program.parameters[0] in c.args.values() and c.phase != "forward"]
    assert program.parameters[0].name == "wte.weight"
    assert tied == ["matmul_backward_input", "adamw"]
    assert len(layers(program, "residual_backward")) == 4


def test_update_saves_the_memory_of_the_gradients():
    def plan(*fuse):
        return gpt2(fuse).plan().describe()

    whole, updated = plan(), plan("update")
    linear = sum(p.nbytes for p in gpt2().program.parameters if p.name.rpartition(".")[0] in LINEARS)
    assert whole["gradients"] - updated["gradients"] == linear
    assert updated["arena"] < whole["arena"]
    assert plan("residual", "update")["arena"] < plan("residual")["arena"]
    assert plan("residual")["adjoints"] < whole["adjoints"]
    assert {plan(*fuse)["moments"] for fuse in SETS} == {whole["moments"]}


def test_the_order_of_names_does_not_matter():
    assert str(gpt2(("update", "residual")).program) == str(gpt2(("residual", "update")).program)
    assert str(gpt2(("update", "update")).program) == str(gpt2(("update",)).program) != str(gpt2().program)


def count(program, op):
    return sum(c.op.name == op for c in program.calls)


def test_a_sum_is_normalized_as_it_is_made():
    program = gpt2(("layernorm",)).program
    assert layers(program, "residual_layernorm_forward") == ["h.0.ln_2", "h.1.ln_1", "h.1.ln_2", "ln_f"]
    assert layers(program, "residual_forward") == []
    assert layers(program, "layernorm_forward") == ["h.0.ln_1"]


def test_gelu_goes_into_the_products_around_it():
    program = gpt2(("gelu",)).program
    assert layers(program, "matmul_gelu_forward") == ["h.0.mlp.c_fc", "h.1.mlp.c_fc"]
    assert layers(program, "matmul_gelu_backward") == ["h.1.mlp.c_proj", "h.0.mlp.c_proj"]
    assert layers(program, "gelu_forward", "gelu_backward") == []
    assert gpt2(("gelu",)).plan().describe()["adjoints"] < gpt2().plan().describe()["adjoints"]


def test_the_classifier_never_has_whole_logits():
    program = gpt2(("classifier",)).program
    found = {c.op.name: c.phase for c in program.calls if c.layer == "lm_head"}
    assert found == {"classifier_forward": "evaluate", "classifier_backward": "backward"}
    assert layers(program, "cross_entropy_forward", "cross_entropy_backward") == []
    assert [v.name for v in program.values if v.name.startswith("lm_head")] == []
    assert program.outputs[0].shape == (1,)
    assert program.flops == gpt2().program.flops


def test_an_evaluation_gives_the_loss_that_a_step_gives():
    for fuse in SETS:
        engine = Engine(GPT2(TINY), specs(B, T), fuse=fuse, threads=1)
        ids = np.random.default_rng(0).integers(0, TINY.vocab_size, (B, T + 1))
        batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}
        before = {n: p.copy() for n, p in engine.parameters().items()}
        loss = engine.forward(**batch)
        assert all(np.array_equal(p, before[n]) for n, p in engine.parameters().items())
        assert loss == engine.step(**batch).loss
        assert engine.forward(**batch) < loss


@pytest.mark.parametrize(
    ("vocab_size", "width", "tokens", "one"),
    [
        (256, 48, 256, True),
        (256, 48, 257, False),
        (11, 48, 256, True),
        (1500, 48, 1024, True),
        (1500, 48, 1025, False),
        (1500, 960, 1216, True),
        (1500, 960, 1217, False),
    ],
)
def test_the_tied_weight_is_updated_in_the_backward_of_few_tokens(vocab_size, width, tokens, one):
    config, shape = replace(TINY, block_size=2048, n_embd=width, vocab_size=vocab_size), specs(1, tokens)
    program = build(GPT2(config), shape, fuse=("classifier", "update")).program
    assert assert_sound(program) == set(program.parameters)
    assert count(program, "classifier_update") == count(program, "embedding_update") == one
    assert count(program, "classifier_backward") == count(program, "embedding_backward") == (not one)
    assert ("wte" in layers(program, "adamw")) is not one
    gradients = {d.shape for p, d in program.adjoint.items() if p in program.parameters}
    assert ((vocab_size, width) in gradients) is not one


@pytest.mark.parametrize("vocab_size", [256, 1024])
def test_the_tied_weight_trains_alike_in_two_blocks_and_in_a_larger_one(vocab_size):
    config = replace(PRESETS["gpt2-tiny"], n_layer=1, block_size=BLOCK + 44, vocab_size=vocab_size)
    inputs = specs(1, BLOCK + 44)

    def batch(i):
        ids = np.random.default_rng(i).integers(0, config.vocab_size, (1, BLOCK + 45))
        return {"tokens": ids[:, :-1], "targets": ids[:, 1:]}

    plain = train(GPT2(config), inputs, batch, steps=2)
    assert_alike(train(GPT2(config), inputs, batch, tuple(FUSIONS), steps=2), plain, exact=False)


def test_what_is_cheap_is_computed_again():
    plain, fused = gpt2(("classifier",)), gpt2(("classifier", "recompute"))
    again = [(c.op.name, c.layer) for c in fused.program.phase("backward") if c.op.name.endswith("_forward")]
    assert again == [
        (op, f"h.{i}.{layer}")
        for i in (1, 0)
        for op, layer in (("gelu_forward", "mlp"), ("layernorm_forward", "ln_2"), ("layernorm_forward", "ln_1"))
    ]
    assert fused.plan().total_bytes < plain.plan().total_bytes


# What a swap keeps


@pytest.mark.parametrize(
    ("swap", "part", "kept"),
    [
        ("adamw@h.0.mlp.*=vanilla", "adamw", {"h.0.mlp.c_fc", "h.0.mlp.c_proj"}),
        ("sumsq@h.1.attn.c_proj=vanilla", "sumsq", {"h.1.attn.c_proj"}),
        ("matmul_backward_weight@h.0.*=blas", "matmul_backward_weight", {f"h.0.{part}" for part in PARTS}),
        ("matmul_backward@*.c_fc=blas", "matmul_backward_weight", {"h.0.mlp.c_fc", "h.1.mlp.c_fc"}),
        ("adamw=vanilla", "adamw", LINEARS),
        ("matmul@h.0.*=blas", "matmul_backward_weight", {f"h.0.{part}" for part in PARTS}),
        ("matmul@h.0.*=vanilla", "", set()),
        ("matmul_update@h.0.*=vanilla", "", set()),
        ("adamw@wte=vanilla", "", set()),
        ("gelu=vanilla", "", set()),
    ],
)
def test_a_swap_of_a_part_keeps_its_layers_from_being_fused(swap, part, kept):
    built = gpt2(("update",), [swap])
    assert set(layers(built.program, "matmul_backward_weight")) == {"lm_head"} | kept
    assert set(layers(built.program, "matmul_update")) == LINEARS - kept
    assert len(built.notes) == bool(kept)  # one line a swap, however many layers it keeps
    for note in built.notes:
        where = f"{part} in {len(kept)} layers, " if len(kept) > 4 else f"{part} in layer"
        assert note.startswith(f"--swap '{swap}' keeps {where}")
        assert sum(repr(layer) in note for layer in kept) == (2 if len(kept) > 4 else len(kept))
    ran = {(c.op.name, c.layer): k.variant for c, k in zip(built.program.calls, built.kernels, strict=True)}
    wanted = "blas" if "blas" in swap else "vanilla"
    assert {ran[part, layer] for layer in kept} == ({wanted} if kept else set())
    assert assert_sound(built.program) == set(built.program.parameters)


def test_what_is_partly_fused_trains_alike_and_says_so(plain):
    swaps = ["adamw@h.0.mlp.*=vanilla", "sumsq@h.1.attn.*=vanilla"]
    assert_alike(train_gpt2(("residual", "update"), swaps=swaps), plain, exact=False)
    engine = Engine(GPT2(TINY), specs(B, T), choice=Choice("vanilla", swaps), fuse=("update",))
    assert engine.notes[-1] == (
        "--swap 'adamw@h.0.mlp.*=vanilla' keeps adamw in layers 'h.0.mlp.c_proj', 'h.0.mlp.c_fc' from being rewritten"
    )
    assert in_layers(("x", [f"'h.{i}'" for i in range(12)])) == "x in 12 layers, 'h.0' to 'h.11'"
    assert len(engine.notes) == 2
    assert gpt2((), swaps).notes == []


@pytest.mark.parametrize(
    ("fuse", "swap", "kept", "fused"),
    [
        ("layernorm", "layernorm_forward@ln_f=vanilla", "ln_f", "residual_layernorm_forward"),
        ("layernorm", "residual_forward@h.0=vanilla", "h.0", "residual_layernorm_forward"),
        ("gelu", "gelu_forward@h.1.mlp=vanilla", "h.1.mlp", "matmul_gelu_forward"),
        ("gelu", "matmul_backward_input@h.1.mlp.c_proj=blas", "h.1.mlp.c_proj", "matmul_gelu_backward"),
        ("classifier", "cross_entropy@loss=vanilla", "loss", "classifier_backward"),
        ("classifier,update", "embedding_backward=vanilla", "wte", "embedding_update"),
        ("classifier,update", "classifier_backward=vanilla", "lm_head", "classifier_update"),
    ],
)
def test_a_swap_of_any_part_keeps_it(fuse, swap, kept, fused):
    part = swap.partition("=")[0].partition("@")[0]
    built, without = gpt2(parse(fuse), [swap]), gpt2(parse(fuse))
    assert kept in [c.layer for c in built.program.calls if c.op.name.startswith(part)]
    assert count(built.program, fused) < count(without.program, fused)
    assert f"in layer {kept!r} from being rewritten" in "".join(built.notes)
    assert_sound(built.program)


@pytest.mark.parametrize("fused", ["matmul_gelu_forward", "classifier_update", "residual_layernorm_forward"])
def test_a_swap_of_the_fused_op_keeps_it_fused(fused):
    built = gpt2(tuple(FUSIONS), [f"{fused}=vanilla"])
    assert built.notes == []
    assert count(built.program, fused) == count(gpt2(tuple(FUSIONS)).program, fused) > 0


def test_a_swap_of_the_residuals_backward_keeps_it():
    built = gpt2(("residual",), ["residual_backward@h.0=vanilla"])
    assert layers(built.program, "residual_backward") == ["h.0", "h.0"]


# Names and clipping


def test_names():
    names = ("gate", "residual", "layernorm", "adapter", "gelu", "classifier", "update", "recompute")
    assert parse("all") == tuple(FUSIONS) == names
    assert parse("none") == ()
    for text, word in (("all,none", "all"), ("none,update", "none"), ("update,all", "all")):
        with pytest.raises(UserError, match=rf"^fuse '{text}': '{word}' stands alone; leave it or the other"):
            parse(text)
    assert parse("update") == ("update",)
    with pytest.raises(UserError, match=r"^fuse 'updat': no such rewrite; did you mean 'update'\?$"):
        gpt2(("residual", "updat"))
    assert fusions(Settings(variant="vanilla")) == ()
    assert fusions(Settings(variant="optimized")) == tuple(FUSIONS)
    assert fusions(Settings(variant="optimized", clip=1.0)) == tuple(n for n in FUSIONS if n != "update")
    assert fusions(Settings(variant="optimized", fuse="none")) == ()
    assert fusions(Settings(variant="vanilla", fuse="update")) == ("update",)


def test_clipping_needs_the_norm_before_any_update():
    with pytest.raises(UserError, match="fuse without 'update'"):
        train_gpt2(("update",), clip=1.0)
    assert_alike(train_gpt2(("residual",), clip=0.5), train_gpt2(clip=0.5), exact=True)


def test_clipping_does_not_mind_a_weight_that_is_not_used():
    done, parameters = train(Model(lambda self, x, y: F.cross_entropy(self.a(x), y)), INPUTS, batch, clip=0.1)
    assert done[-1, 0] > 0
    assert "b.weight" in parameters


# Models that try them


class Model(nn.Module):
    """Linear layers a to d and a LayerNorm, as a test puts them together; `forward` is given them in `self`."""

    def __init__(self, forward, **parts):
        self.body = forward
        for name in "abcd":
            setattr(self, name, nn.Linear(6, 6))
        self.norm = nn.LayerNorm(6)
        vars(self).update(parts)

    def forward(self, x, y, **more):
        return self.body(self, x, y, **more)


INPUTS = {"x": ((8, 6), "float32"), "y": ((8,), "int32")}


def batch(i):
    rng = np.random.default_rng(i)
    return {"x": rng.standard_normal((8, 6)).astype(np.float32), "y": rng.integers(0, 6, 8)}


def assert_the_same_by_all_routes(forward, steps=3, inputs=INPUTS, batch=batch, exact=EXACT, **parts):
    """Train with and without each rewrite; give the program with all of them."""
    plain = train(Model(forward, **parts), inputs, batch, steps=steps)
    for fuse in SETS:
        assert_alike(train(Model(forward, **parts), inputs, batch, fuse, steps=steps), plain, fuse in exact)
    for fuse in (("residual", "update"), tuple(FUSIONS)):
        program = build(Model(forward, **parts), inputs, fuse=fuse).program
        assert_sound(program)
    return program


def earlier_writer(self, x, y):
    a, b = self.a(x), self.b(x)
    z = a + b
    return F.cross_entropy(z + F.gelu(a), y)


def writer_of_one_reads_the_other(self, x, y):
    a, b = self.a(x), self.b(x)
    c = F.gelu(a)  # its backward adds to d(a), and reads d(c), which is d(z) too
    z = a + b
    return F.cross_entropy(z + c, y)


def writer_of_one_before_a_reader_of_the_other(self, x, y):
    a, b = self.a(x), self.b(x)
    c = F.gelu(a)  # its backward adds to d(a) before that of b reads d(b)
    z = a + b
    return F.cross_entropy(z + F.gelu(c), y)


@pytest.mark.parametrize(
    "forward", [earlier_writer, writer_of_one_reads_the_other, writer_of_one_before_a_reader_of_the_other]
)
def test_a_gradient_that_cannot_be_shared_is_copied(forward):
    program = assert_the_same_by_all_routes(forward)
    (kept,) = (c for c in program.calls if c.op.name == "residual_backward")
    added = [c for c in program.phase("forward") if c.op.name == "residual_forward"]
    assert kept.inverts is added[0]
    assert kept.adds == {"dinp1": forward is earlier_writer, "dinp2": False}


def test_the_norm_counts_its_terms_whatever_an_output_is_called():
    def watched(self, x, y, **more):
        return F.cross_entropy(self.a(x), y), F.gelu(more["g.sumsq"]), more["g.sumsq"]

    inputs = {**INPUTS, "g.sumsq": ((1,), "float32")}
    found = [
        train(Model(watched), inputs, lambda i, g=g: {**batch(i), "g.sumsq": np.full(1, g, np.float32)}, fuse)[0]
        for g in (0, 1e6)
        for fuse in ((), ("update",))
    ]
    assert_alike((found[0], {}), (found[2], {}), exact=True)
    assert_alike((found[1], {}), (found[3], {}), exact=True)


def test_a_gradient_that_is_only_added_to_last_is_shared():
    def stream(self, x, y):
        h = self.a(x)
        h = h + self.b(self.norm(h))
        return F.cross_entropy(h + F.gelu(F.gelu(h)), y)

    assert layers(assert_the_same_by_all_routes(stream), "residual_backward") == []


def test_the_gradient_of_a_sum_within_a_branch_is_shared():
    """As in an adapter: what the stream adds to it comes after all that reads it."""

    def branch(self, x, y):
        h = self.a(x)
        inner = self.norm(h)
        return F.cross_entropy(h + (self.b(inner) + F.gelu(inner)), y)

    assert layers(assert_the_same_by_all_routes(branch), "residual_backward") == []


def test_the_given_gradient_of_the_loss_stays_what_it_is():
    def penalized(self, x, y):
        loss = F.cross_entropy(self.a(x), y)
        return loss + F.gelu(F.gelu(loss))

    assert_the_same_by_all_routes(penalized)


def test_a_layer_used_twice_keeps_its_gradient():
    program = assert_the_same_by_all_routes(lambda self, x, y: F.cross_entropy(self.a(self.b(self.a(x))), y))
    assert layers(program, "matmul_update") == ["b"]


def test_a_bias_used_elsewhere_keeps_its_gradient():
    def shared(self, x, y):
        return F.cross_entropy(F.linear(F.gelu(F.linear(x, self.a.weight, self.b.bias)), self.b.weight, self.b.bias), y)

    assert layers(assert_the_same_by_all_routes(shared), "matmul_update") == []


def test_a_weight_that_is_computed_keeps_its_gradient():
    def computed(self, x, y):
        return F.cross_entropy(F.linear(self.a(x), F.gelu(self.b.weight), self.b.bias), y)

    assert layers(assert_the_same_by_all_routes(computed), "matmul_update") == ["a"]


@pytest.mark.parametrize("given", ["weight", "bias"])
def test_a_weight_that_is_given_is_not_trained(given):
    def mixed(self, x, y, w):
        weight, bias = (w, self.b.bias) if given == "weight" else (self.b.weight, w)
        return F.cross_entropy(F.linear(self.a(x), weight, bias), y)

    shape = (6, 6) if given == "weight" else (6,)
    program = assert_the_same_by_all_routes(
        mixed,
        inputs={**INPUTS, "w": (shape, "float32")},
        batch=lambda i: {**batch(i), "w": np.random.default_rng(i).random(shape, np.float32)},
    )
    assert "a" in layers(program, "matmul_update")


def test_a_bias_is_optional():
    def bare(self, x, y):
        return F.cross_entropy(F.linear(F.linear(x, self.a.weight), self.b.weight), y)

    program = assert_the_same_by_all_routes(bare)
    assert [c.op.name for c in program.calls if c.op.name.endswith("_update")] == ["classifier_update", "matmul_update"]


def logits_used_twice(self, x, y):
    logits = F.linear(self.b(x), self.a.weight)
    return F.cross_entropy(logits, y) + F.cross_entropy(F.gelu(logits), y)


def loss_used_again(self, x, y):
    loss = F.cross_entropy(F.linear(self.b(x), self.a.weight), y)
    return loss + F.gelu(loss)


def sum_normalized_later(self, x, y):
    total = self.a(x) + self.b(x)
    return F.cross_entropy(F.gelu(total) + self.norm(total), y)


def sum_as_a_scale(self, x, y):
    scale = F.residual(self.norm.weight, self.norm.bias)
    return F.cross_entropy(F.layer_norm(self.a(x), scale, self.b.bias), y)


def gelus_operand_used_twice(self, x, y):
    pre = self.a(x)
    return F.cross_entropy(self.b(F.gelu(pre)) + pre, y)


def gelus_result_used_twice(self, x, y):
    h = F.gelu(self.a(x))
    return F.cross_entropy(self.b(h) + h, y)


def gelus_gradient_read_later(self, x, y):
    b = self.b(x)
    return F.cross_entropy(self.c(F.gelu(self.a(x)) + b), y)


@pytest.mark.parametrize(
    ("forward", "kept"),
    [
        (gelus_gradient_read_later, "gelu_backward"),
        (logits_used_twice, "cross_entropy_forward"),
        (loss_used_again, "cross_entropy_forward"),
        (sum_normalized_later, "residual_forward"),
        (sum_as_a_scale, "residual_forward"),
        (gelus_operand_used_twice, "residual_forward"),
        (gelus_result_used_twice, "gelu_backward"),
    ],
)
def test_what_is_needed_elsewhere_is_left(forward, kept):
    assert count(assert_the_same_by_all_routes(forward), kept)


def bare_head(self, x, y):
    return F.cross_entropy(F.linear(self.b(x), self.a.weight), y)


def head_with_bias(self, x, y):
    return F.cross_entropy(self.a(self.b(x)), y)


def head_of_the_input(self, x, y):
    return F.cross_entropy(F.linear(x, self.a.weight), y)


def head_that_is_returned(self, x, y):
    logits = F.linear(self.b(x), self.a.weight)
    return F.cross_entropy(logits, y), logits


def head_of_an_activation(self, x, y):
    return F.cross_entropy(F.linear(F.gelu(self.b(x)), self.a.weight), y)


@pytest.mark.parametrize(
    ("forward", "alone", "after_all"),
    [
        (bare_head, 1, 1),
        (head_that_is_returned, 1, 1),
        (head_of_an_activation, 1, 0),
        (head_with_bias, 0, 0),
        (head_of_the_input, 1, 1),
        (logits_used_twice, 0, 0),
        (loss_used_again, 0, 0),
    ],
)
def test_which_heads_the_classifier_takes(forward, alone, after_all):
    """One without a bias, whose logits and loss nothing else reads."""
    program = assert_the_same_by_all_routes(forward)
    assert count(program, "classifier_forward") == after_all
    program = build(Model(forward), INPUTS, fuse=("classifier",)).program
    assert count(program, "classifier_backward") == alone


def adapter(self, x, y):
    return F.cross_entropy(self.a(x) + F.linear(self.b(x), self.c.weight), y)


def adapter_first(self, x, y):
    return F.cross_entropy(F.linear(self.b(x), self.c.weight) + self.a(x), y)


def adapter_without_bias(self, x, y):
    return F.cross_entropy(F.linear(x, self.a.weight) + F.linear(self.b(x), self.c.weight), y)


def adapter_with_bias(self, x, y):
    return F.cross_entropy(self.a(x) + self.c(self.b(x)), y)


def adapter_read_elsewhere(self, x, y):
    added = F.linear(self.b(x), self.c.weight)
    return F.cross_entropy(F.gelu(self.a(x) + added) + added, y)


def adapter_that_is_returned(self, x, y):
    added = F.linear(self.b(x), self.c.weight)
    return F.cross_entropy(self.a(x) + added, y), added


def adapter_in_more_axes(self, x, y):
    part = F.reshape(F.linear(self.b(x), self.c.weight), (2, 4, 6))
    return F.cross_entropy(F.reshape(F.reshape(self.a(x), (2, 4, 6)) + part, (8, 6)), y)


def adapter_in_other_rows(self, x, y):
    part = F.reshape(F.linear(self.b(x), self.c.weight), (6, 8))
    return F.cross_entropy(F.reshape(F.reshape(self.a(x), (6, 8)) + part, (8, 6)), y)


@pytest.mark.parametrize(
    ("forward", "taken"),
    [
        (adapter, 1),
        (adapter_first, 1),
        (adapter_without_bias, 1),
        (adapter_with_bias, 0),
        (adapter_read_elsewhere, 0),
        (adapter_that_is_returned, 0),
        (adapter_in_more_axes, 1),
        (adapter_in_other_rows, 0),
        (earlier_writer, 0),
    ],
)
def test_which_sums_of_two_products_become_one_call(forward, taken):
    """Those of products that nothing else reads, if one has no bias."""
    program = assert_the_same_by_all_routes(forward)
    assert count(program, "matmul_adapter_forward") == taken
    (call,) = [c for c in program.calls if c.op.name == "matmul_adapter_forward"] or [None]
    if call:
        assert (call.args["weight"].name, call.args["up"].name) in (("a.weight", "c.weight"), ("c.weight", "a.weight"))
        assert (call.args["bias"] is None) == (forward is adapter_without_bias)


@pytest.mark.parametrize("swap", ["residual_forward=optimized", "matmul_forward=blas"])
def test_a_swap_keeps_an_adapter_apart(swap):
    built = build(Model(adapter), INPUTS, choice=Choice("vanilla", [swap]), fuse=("adapter",))
    assert count(built.program, "matmul_adapter_forward") == 0
    assert "from being rewritten" in "".join(built.notes)


STEPS = st.tuples(st.sampled_from(["add", "add", "gelu", "norm", *"abcd"]), st.integers(0, 9), st.integers(1, 9))


@given(st.lists(STEPS, min_size=1, max_size=9), st.integers(0, 4))
@settings(max_examples=25)
def test_random_models_train_alike(plan, head):
    def forward(self, x, y):
        values = [self.a(x)]
        for kind, i, j in plan:
            one = values[-1 - i % len(values)]
            two = values[(-1 - i - j) % len(values)]
            if kind != "add":
                values.append(F.gelu(one) if kind == "gelu" else getattr(self, kind)(one))
            elif one is not two:
                values.append(one + two)
        last = values[-1]
        return F.cross_entropy(getattr(self, "abcd"[head])(last) if head < 4 else last, y)

    assert_the_same_by_all_routes(forward, steps=2)

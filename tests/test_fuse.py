"""Rewrites: the same numbers with them and without, on GPT-2, Llama and random models; what they take, and leave."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import Parts
from small_models import batch as ids
from verbs import fails

from cpuopt import Choice, nn
from cpuopt import functional as F
from cpuopt.building import build
from cpuopt.engine import Engine
from cpuopt.models import parse as parse_model
from cpuopt.models import specs
from cpuopt.ops.classifier import BLOCK
from cpuopt.program.fuse import FUSIONS, parse
from cpuopt.train.job import Settings, build_only

TINY, LLAMA, GEMMA = map(parse_model, ("gpt2-tiny", "llama-tiny", "gemma2-tiny"))
B, T = 2, 16
LAYERS = LLAMA.num_hidden_layers
BLOCKS = [f"model.layers.{i}.mlp" for i in range(LAYERS)]
PARTS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
LINEARS = {f"h.{i}.{part}" for i in range(2) for part in PARTS}
SETS = [*((name,) for name in FUSIONS), ("residual", "update"), ("classifier", "update"), tuple(FUSIONS)]
EXACT = {("gate",), ("residual",), ("layernorm",), ("gelu",), ("recompute",)}
"""What the vanilla kernels compute to the last bit alike; a fused gate of a Llama rounds otherwise."""
ADAMW = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
"""An eps far above rounding: AdamW divides a gradient that should be zero, such as that of a key's bias, by itself."""


def built_of(fuse=(), swaps=(), config=TINY):
    return build(config.module(), specs(B, T), choice=Choice("vanilla", swaps), fuse=fuse)


def layers(program, *ops):
    return [c.layer for c in program.calls if c.op.name in ops]


def train(model, inputs, batch, fuse=(), swaps=(), steps=4, clip=None):
    """Train from scratch; give the loss and the norm of each step, and then the parameters."""
    engine = Engine.from_options(model, inputs, fuse=fuse, choice=Choice("vanilla", swaps), threads=1)
    done = [engine.step(**batch(i), **ADAMW, clip=clip) for i in range(steps)]
    return np.array([(d.loss, d.grad_norm) for d in done]), {n: p.copy() for n, p in engine.parameters().items()}


def train_tiny(fuse=(), config=TINY, **kw):
    return train(config.module(), specs(B, T), lambda i: ids(i, n=config.vocab_size), fuse, **kw)


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


# Whole models


@pytest.fixture(scope="module")
def plain():
    return {config: train_tiny(config=config) for config in (TINY, LLAMA, GEMMA)}


GATED = [("gate", "gelu"), SETS[-1]]
TRAINED = {TINY: SETS, LLAMA: [*SETS[: len(FUSIONS)], *GATED], GEMMA: [("gate",), *GATED]}


@pytest.mark.parametrize(("config", "fuse"), [(config, fuse) for config, sets in TRAINED.items() for fuse in sets])
def test_it_trains_alike_and_each_weight_is_updated_once_after_its_last_use(plain, config, fuse):
    exact = {*EXACT, ("adapter",)} - ({("gate",)} if config is not TINY else set())  # there are no adapters
    assert_alike(train_tiny(fuse, config), plain[config], fuse in exact)
    program = built_of(fuse, config=config).program
    assert assert_sound(program) == set(program.parameters)


def test_update_saves_the_memory_of_the_gradients():
    def plan(*fuse):
        return built_of(fuse).plan().describe()

    whole, updated = plan(), plan("update")
    linear = sum(p.nbytes for p in built_of().program.parameters if p.name.rpartition(".")[0] in LINEARS)
    assert whole["gradients"] - updated["gradients"] == linear
    assert updated["arena"] < whole["arena"]
    assert plan("residual", "update")["arena"] < plan("residual")["arena"]
    assert plan("residual")["adjoints"] < whole["adjoints"]
    assert {plan(*fuse)["moments"] for fuse in SETS} == {whole["moments"]}


def test_the_order_of_names_does_not_matter():
    assert str(built_of(("update", "residual")).program) == str(built_of(("residual", "update")).program)
    assert str(built_of(("update", "update")).program) == str(built_of(("update",)).program) != str(built_of().program)


def count(program, *ops):
    return len(layers(program, *ops))


def test_an_evaluation_gives_the_loss_that_a_step_gives():
    for fuse in SETS:
        engine = Engine.from_options(TINY.module(), specs(B, T), fuse=fuse, threads=1)
        before, loss = {n: p.copy() for n, p in engine.parameters().items()}, engine.forward(**ids(0))
        assert all(np.array_equal(p, before[n]) for n, p in engine.parameters().items())
        assert loss == engine.step(**ids(0)).loss
        assert engine.forward(**ids(0)) < loss


@pytest.mark.parametrize(
    ("vocab_size", "width", "tokens", "one"),
    [
        *((256, 48, 256, True), (256, 48, 257, False), (11, 48, 256, True)),
        *((1500, 48, 1024, True), (1500, 48, 1025, False), (1500, 960, 1216, True), (1500, 960, 1217, False)),
    ],
)
def test_the_tied_weight_is_updated_in_the_backward_of_few_tokens(vocab_size, width, tokens, one):
    config, shape = replace(TINY, block_size=2048, n_embd=width, vocab_size=vocab_size), specs(1, tokens)
    program = build(config.module(), shape, fuse=("classifier", "update")).program
    assert assert_sound(program) == set(program.parameters)
    assert count(program, "classifier_update") == count(program, "embedding_update") == one
    assert count(program, "classifier_backward") == count(program, "embedding_backward") == (not one)
    assert ("wte" in layers(program, "adamw")) is not one
    gradients = {d.shape for p, d in program.adjoint.items() if p in program.parameters}
    assert ((vocab_size, width) in gradients) is not one


@pytest.mark.parametrize("vocab_size", [256, 1024])
def test_the_tied_weight_trains_alike_in_two_blocks_and_in_a_larger_one(vocab_size):
    config = replace(TINY, n_layer=1, block_size=BLOCK + 44, vocab_size=vocab_size)
    plain, fused = (
        train(config.module(), specs(1, BLOCK + 44), lambda i: ids(i, 1, BLOCK + 44, vocab_size), fuse, steps=2)
        for fuse in ((), tuple(FUSIONS))
    )
    assert_alike(fused, plain, exact=False)


# What each takes


def each(n, ops):
    return dict.fromkeys(ops.split(), n)


HEAD = "matmul_forward matmul_backward_input matmul_backward_weight cross_entropy_forward cross_entropy_backward"
CLASSIFIER = each(-1, HEAD) | each(1, "classifier_forward classifier_backward")
TAKEN = {
    "llama-tiny": {
        "gate": each(LAYERS, "swiglu_forward swiglu_backward")
        | each(-LAYERS, "silu_forward mul_forward silu_backward mul_backward"),
        "residual": {"residual_backward": -2 * LAYERS},
        "layernorm": each(-2 * LAYERS, "residual_forward rmsnorm_forward") | {"residual_rmsnorm_forward": 2 * LAYERS},
        "classifier": CLASSIFIER,
        "update": each(-7 * LAYERS, "matmul_backward_weight adamw sumsq") | {"matmul_update": 7 * LAYERS},
        "recompute": {"rmsnorm_forward": 2 * LAYERS + 1, "silu_forward": LAYERS},
    },
    "gpt2-tiny": {
        "residual": {"residual_backward": -4},
        "layernorm": each(-4, "residual_forward layernorm_forward") | {"residual_layernorm_forward": 4},
        "gelu": each(-2, "matmul_forward gelu_forward matmul_backward_input gelu_backward")
        | each(2, "matmul_gelu_forward matmul_gelu_backward"),
        "classifier": CLASSIFIER,
        "update": {"matmul_backward_weight": -8, "sumsq": -16, "adamw": -16, "matmul_update": 8},
        "recompute": {"layernorm_forward": 5, "gelu_forward": 2},
    },
}
"""How many calls of each op a rewrite alone adds or removes."""


def counts(program):
    return Counter(c.op.name for c in program.calls)


@pytest.mark.parametrize("name", FUSIONS)
@pytest.mark.parametrize("model", TAKEN)
def test_what_each_rewrite_takes(model, name):
    before, after = (built_of(fuse, config=parse_model(model)).program for fuse in ((), (name,)))
    found = counts(after)
    found.subtract(counts(before))
    assert {op: n for op, n in found.items() if n} == TAKEN[model].get(name, {})
    if name == "classifier":  # there are never whole logits
        assert not [v for v in after.values if v.name.startswith("lm_head")]
        assert after.flops == before.flops


@pytest.mark.parametrize("qk_norm", [False, True])
def test_an_untied_head_and_normalized_heads_are_rewritten_too(qk_norm):
    sizes = {name: getattr(LLAMA, name) for name in LLAMA.to_json() if name != "model"}
    config = replace(type(parse_model("qwen3-0.6B") if qk_norm else LLAMA)(**sizes), tie_word_embeddings=False)
    found = counts(built_of(tuple(FUSIONS), config=config).program)
    assert found["classifier_update"] == found["embedding_backward"] == 1
    assert found["residual_rmsnorm_forward"] == 2 * LAYERS
    assert found["rmsnorm_backward"] == 2 * LAYERS + 1 + 2 * LAYERS * qk_norm


def test_the_gate_of_a_gemma_is_rewritten_as_that_of_a_llama():
    found = counts(built_of(tuple(FUSIONS), config=GEMMA).program)
    assert found["matmul_geglu_forward"] == found["matmul_geglu_backward"] == found["geglu_forward"] == LAYERS
    assert not [op for op in found if op.startswith(("gelu", "mul", "matmul_gelu", "geglu_backward"))]
    assert built_of(("gate", "gelu"), config=GEMMA).program.flops == built_of(config=GEMMA).program.flops


# What a swap keeps

OF_WEIGHT = "matmul_backward_weight"


@pytest.mark.parametrize(
    ("swap", "part", "kept"),
    [
        ("adamw@h.0.mlp.*=vanilla", "adamw", {"h.0.mlp.c_fc", "h.0.mlp.c_proj"}),
        ("sumsq@h.1.attn.c_proj=vanilla", "sumsq", {"h.1.attn.c_proj"}),
        *((f"{op}@h.0.*=blas", OF_WEIGHT, {f"h.0.{part}" for part in PARTS}) for op in (OF_WEIGHT, "matmul")),
        ("matmul_backward@*.c_fc=blas", OF_WEIGHT, {"h.0.mlp.c_fc", "h.1.mlp.c_fc"}),
        ("adamw=vanilla", "adamw", LINEARS),
        *((f"{part}=vanilla", "", set()) for part in ("matmul@h.0.*", "matmul_update@h.0.*", "adamw@wte", "gelu")),
    ],
)
def test_a_swap_of_a_part_keeps_its_layers_from_being_fused(swap, part, kept):
    built = built_of(("update",), [swap])
    assert set(layers(built.program, OF_WEIGHT)) == {"lm_head"} | kept
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


def test_what_is_partly_fused_trains_alike(plain):
    swaps = ["adamw@h.0.mlp.*=vanilla", "sumsq@h.1.attn.*=vanilla"]
    assert_alike(train_tiny(("residual", "update"), swaps=swaps), plain[TINY], exact=False)
    assert built_of((), swaps).notes == []


@pytest.mark.parametrize(
    ("config", "fuse", "swap", "kept", "fused"),
    [
        (TINY, "layernorm", "layernorm_forward@ln_f=vanilla", "ln_f", "residual_layernorm_forward"),
        (TINY, "layernorm", "residual_forward@h.0=vanilla", "h.0", "residual_layernorm_forward"),
        (TINY, "gelu", "gelu_forward@h.1.mlp=vanilla", "h.1.mlp", "matmul_gelu_forward"),
        (TINY, "gelu", "matmul_backward_input@h.1.mlp.c_proj=blas", "h.1.mlp.c_proj", "matmul_gelu_backward"),
        (TINY, "classifier", "cross_entropy@loss=vanilla", "loss", "classifier_backward"),
        (TINY, "classifier,update", "embedding_backward=vanilla", "wte", "embedding_update"),
        (TINY, "classifier,update", "classifier_backward=vanilla", "lm_head", "classifier_update"),
        *(
            (LLAMA, "all", f"{part}@{BLOCKS[0]}=vanilla", BLOCKS[0], "matmul_swiglu_forward")
            for part in ("silu_forward", "silu_backward", "mul_forward", "mul_backward")
        ),
        (LLAMA, "all", f"swiglu_forward@{BLOCKS[0]}=vanilla", BLOCKS[0], "matmul_swiglu_forward"),
        (LLAMA, "all", f"swiglu_backward@{BLOCKS[0]}=vanilla", BLOCKS[0], "matmul_swiglu_backward"),
    ],
)
def test_a_swap_of_any_part_keeps_it(config, fuse, swap, kept, fused):
    part = swap.partition("=")[0].partition("@")[0]
    built, without = (built_of(parse(fuse), swaps, config) for swaps in ([swap], []))
    assert kept in [c.layer for c in built.program.calls if c.op.name.startswith(part)]
    assert count(built.program, fused) < count(without.program, fused)
    assert f"in layer {kept!r} from being rewritten" in "".join(built.notes)
    assert_sound(built.program)


@pytest.mark.parametrize("fused", ["matmul_gelu_forward", "classifier_update", "residual_layernorm_forward"])
def test_a_swap_of_the_fused_op_keeps_it_fused(fused):
    built = built_of(tuple(FUSIONS), [f"{fused}=vanilla"])
    assert built.notes == []
    assert count(built.program, fused) == count(built_of(tuple(FUSIONS)).program, fused) > 0


def test_a_swap_of_the_residuals_backward_keeps_it():
    built = built_of(("residual",), ["residual_backward@h.0=vanilla"])
    assert layers(built.program, "residual_backward") == ["h.0", "h.0"]


# Names and clipping


def test_names():
    names = ("gate", "residual", "layernorm", "adapter", "gelu", "classifier", "update", "recompute")
    assert parse("all") == tuple(FUSIONS) == names
    for text, word in (("all,none", "all"), ("none,update", "none"), ("update,all", "all")):
        fails(rf"^fuse '{text}': '{word}' stands alone; leave it or the other", parse, text)
    assert parse("update") == Settings(variant="vanilla", fuse="update").rewrites == ("update",)
    fails(r"^fuse 'updat': no such rewrite; did you mean 'update'\?$", built_of, ("residual", "updat"))
    assert parse("none") == Settings(variant="vanilla").rewrites == ()
    assert Settings(variant="optimized").rewrites == tuple(FUSIONS)
    assert Settings(variant="optimized", clip=1.0).rewrites == tuple(n for n in FUSIONS if n != "update")
    assert Settings(variant="optimized", fuse="none").rewrites == ()


def test_clipping_needs_the_norm_before_any_update():
    fails("fuse without 'update'", train_tiny, ("update",), clip=1.0)
    assert_alike(train_tiny(("residual",), clip=0.5), train_tiny(clip=0.5), exact=True)


# Models that try them

ce, gelu, linear, reshape = F.cross_entropy, F.gelu, F.linear, F.reshape


def model_of(forward, **parts):
    """Linear layers a to d and a LayerNorm, as a test puts them together; `forward` is given them in `self`."""
    return Parts(forward, **{name: nn.Linear(6, 6) for name in "abcd"}, norm=nn.LayerNorm(6), **parts)


INPUTS = {"x": ((8, 6), "float32"), "y": ((8,), "int32")}


def batch(i):
    rng = np.random.default_rng(i)
    return {"x": rng.standard_normal((8, 6)).astype(np.float32), "y": rng.integers(0, 6, 8)}


def assert_the_same_by_all_routes(forward, steps=3, inputs=INPUTS, batch=batch, exact=EXACT, **parts):
    """Train with and without each rewrite; give the program with all of them."""
    plain = train(model_of(forward, **parts), inputs, batch, steps=steps)
    for fuse in SETS:
        assert_alike(train(model_of(forward, **parts), inputs, batch, fuse, steps=steps), plain, fuse in exact)
    for fuse in (("residual", "update"), tuple(FUSIONS)):
        assert_sound(program := build(model_of(forward, **parts), inputs, fuse=fuse).program)
    return program


def earlier_writer(m, x, y):
    return ce((a := m.a(x)) + m.b(x) + gelu(a), y)


def writer_of_one_reads_the_other(m, x, y):
    a, b = m.a(x), m.b(x)
    c = gelu(a)  # its backward adds to d(a), and reads d(c), which is d(z) too
    return ce((a + b) + c, y)


def writer_of_one_before_a_reader_of_the_other(m, x, y):
    a, b = m.a(x), m.b(x)
    c = gelu(a)  # its backward adds to d(a) before that of b reads d(b)
    return ce((a + b) + gelu(c), y)


WRITERS = [earlier_writer, writer_of_one_reads_the_other, writer_of_one_before_a_reader_of_the_other]


@pytest.mark.parametrize("forward", WRITERS)
def test_a_gradient_that_cannot_be_shared_is_copied(forward):
    program = assert_the_same_by_all_routes(forward)
    assert count(program, "matmul_adapter_forward") == 0
    (kept,) = (c for c in program.calls if c.op.name == "residual_backward")
    assert kept.inverts is next(c for c in program.phase("forward") if c.op.name == "residual_forward")
    assert kept.adds == {"dinp1": forward is earlier_writer, "dinp2": False}


def bias_twice(m, x, y):
    return ce(linear(gelu(linear(x, m.a.weight, m.b.bias)), m.b.weight, m.b.bias), y)


@pytest.mark.parametrize(
    ("forward", "op", "left"),
    [
        # a gradient that is only added to last, and that of a sum within a branch, as in an adapter, are shared
        (lambda m, x, y: ce((h := (a := m.a(x)) + m.b(m.norm(a))) + gelu(gelu(h)), y), "residual_backward", []),
        (lambda m, x, y: ce((h := m.a(x)) + (m.b(inner := m.norm(h)) + gelu(inner)), y), "residual_backward", []),
        # the given gradient of the loss stays what it is
        (lambda m, x, y: (loss := ce(m.a(x), y)) + gelu(gelu(loss)), "matmul_update", ["a"]),
        # a layer used twice, a bias used elsewhere, a weight that is computed keep theirs
        (lambda m, x, y: ce(m.a(m.b(m.a(x))), y), "matmul_update", ["b"]),
        (bias_twice, "matmul_update", []),
        (lambda m, x, y: ce(linear(m.a(x), gelu(m.b.weight), m.b.bias), y), "matmul_update", ["a"]),
    ],
    ids=["added last", "in a branch", "of the loss", "layer twice", "bias twice", "computed weight"],
)
def test_which_gradients_are_shared_and_which_are_kept(forward, op, left):
    assert layers(assert_the_same_by_all_routes(forward), op) == left


@pytest.mark.parametrize(
    ("shape", "forward"),
    [
        ((6, 6), lambda m, x, y, w: ce(linear(m.a(x), w, m.b.bias), y)),
        ((6,), lambda m, x, y, w: ce(linear(m.a(x), m.b.weight, w), y)),
    ],
    ids=["weight", "bias"],
)
def test_a_weight_that_is_given_is_not_trained(shape, forward):
    def given(i):
        return {**batch(i), "w": np.random.default_rng(i).random(shape, np.float32)}

    program = assert_the_same_by_all_routes(forward, inputs={**INPUTS, "w": (shape, "float32")}, batch=given)
    assert "a" in layers(program, "matmul_update")


def test_a_bias_is_optional():
    program = assert_the_same_by_all_routes(lambda m, x, y: ce(linear(linear(x, m.a.weight), m.b.weight), y))
    assert [c.op.name for c in program.calls if c.op.name.endswith("_update")] == ["classifier_update", "matmul_update"]


def gelus_gradient_read_later(m, x, y):
    b = m.b(x)  # before a
    return ce(m.c(gelu(m.a(x)) + b), y)


def scaled_by_a_sum(m, x, y):
    return ce(F.layer_norm(m.a(x), F.residual(m.norm.weight, m.norm.bias), m.b.bias), y)


@pytest.mark.parametrize(
    ("forward", "kept"),
    [
        (lambda m, x, y: ce(gelu(total := m.a(x) + m.b(x)) + m.norm(total), y), "residual_forward"),
        (scaled_by_a_sum, "residual_forward"),
        (lambda m, x, y: ce(m.b(gelu(pre := m.a(x))) + pre, y), "residual_forward"),
        (lambda m, x, y: ce(m.b(h := gelu(m.a(x))) + h, y), "gelu_backward"),
        (gelus_gradient_read_later, "gelu_backward"),
    ],
    ids=["normalized later", "a scale", "gelu's operand", "gelu's result", "gelu's gradient"],
)
def test_what_is_needed_elsewhere_is_left(forward, kept):
    assert count(assert_the_same_by_all_routes(forward), kept)


@pytest.mark.parametrize(
    ("forward", "alone", "after_all"),
    [
        (lambda m, x, y: ce(linear(m.b(x), m.a.weight), y), 1, 1),
        (lambda m, x, y: (ce(logits := linear(m.b(x), m.a.weight), y), logits), 1, 1),
        (lambda m, x, y: ce(linear(gelu(m.b(x)), m.a.weight), y), 1, 0),
        (lambda m, x, y: ce(m.a(m.b(x)), y), 0, 0),
        (lambda m, x, y: ce(linear(x, m.a.weight), y), 1, 1),
        (lambda m, x, y: ce(logits := linear(m.b(x), m.a.weight), y) + ce(gelu(logits), y), 0, 0),
        (lambda m, x, y: (loss := ce(linear(m.b(x), m.a.weight), y)) + gelu(loss), 0, 0),
    ],
    ids=["bare", "returned", "of an activation", "with bias", "of the input", "logits used twice", "loss used again"],
)
def test_which_heads_the_classifier_takes(forward, alone, after_all):
    """One without a bias, whose logits and loss nothing else reads."""
    program = assert_the_same_by_all_routes(forward)
    assert count(program, "classifier_forward") == after_all
    assert after_all or count(program, "cross_entropy_forward")
    assert count(build(model_of(forward), INPUTS, fuse=("classifier",)).program, "classifier_backward") == alone


def reshaped(shape):
    """An adapter beside a product, added in another shape."""
    return lambda m, x, y: ce(reshape(reshape(m.a(x), shape) + reshape(linear(m.b(x), m.c.weight), shape), (8, 6)), y)


ADAPTERS = {
    "first": (lambda m, x, y: ce(m.a(x) + linear(m.b(x), m.c.weight), y), 1),
    "last": (lambda m, x, y: ce(linear(m.b(x), m.c.weight) + m.a(x), y), 1),
    "without bias": (lambda m, x, y: ce(linear(x, m.a.weight) + linear(m.b(x), m.c.weight), y), 1),
    "with bias": (lambda m, x, y: ce(m.a(x) + m.c(m.b(x)), y), 0),
    "read elsewhere": (lambda m, x, y: ce(gelu(m.a(x) + (up := linear(m.b(x), m.c.weight))) + up, y), 0),
    "returned": (lambda m, x, y: (ce(m.a(x) + (up := linear(m.b(x), m.c.weight)), y), up), 0),
    "in more axes": (reshaped((2, 4, 6)), 1),
    "in other rows": (reshaped((6, 8)), 0),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_which_sums_of_two_products_become_one_call(name):
    """Those of products that nothing else reads, if one has no bias."""
    forward, taken = ADAPTERS[name]
    calls = [c for c in assert_the_same_by_all_routes(forward).calls if c.op.name == "matmul_adapter_forward"]
    assert len(calls) == taken
    for call in calls:
        assert (call.args["weight"].name, call.args["up"].name) in (("a.weight", "c.weight"), ("c.weight", "a.weight"))
        assert (call.args["bias"] is None) == (name == "without bias")


@pytest.mark.parametrize("swap", ["residual_forward=optimized", "matmul_forward=blas"])
def test_a_swap_keeps_an_adapter_apart(swap):
    built = build(model_of(ADAPTERS["first"][0]), INPUTS, choice=Choice("vanilla", [swap]), fuse=("adapter",))
    assert count(built.program, "matmul_adapter_forward") == 0
    assert "from being rewritten" in "".join(built.notes)


GATES = {
    "s(a) * b": (lambda m, x: F.silu(m.a(x)) * m.b(x), 1),
    "b * s(a)": (lambda m, x: m.b(x) * F.silu(m.a(x)), 1),
    "used twice": (lambda m, x: (s := F.silu(m.a(x))) * m.b(x) + s, 0),
    "s(a) * a": (lambda m, x: F.silu(a := m.a(x)) * a, 0),
    "a * s(a)": (lambda m, x: (a := m.a(x)) * F.silu(a), 0),
}


@pytest.mark.parametrize("name", GATES)
def test_which_gates_are_taken(name):
    made, taken = GATES[name]
    model = model_of(lambda m, x, y: F.cross_entropy(made(m, x), y))
    for fuse, op in ((("gate",), "swiglu_forward"), (("gate", "gelu"), "matmul_swiglu_forward")):
        found = counts(build(model, INPUTS, fuse=fuse, choice=Choice("vanilla")).program)
        assert (found[op], found["silu_forward"], found["mul_forward"]) == (taken, 1 - taken, 1 - taken)
    assert build(model, INPUTS, fuse=tuple(FUSIONS), choice=Choice("optimized")).program.adjoint


def test_a_step_of_a_billion_parameters_needs_little_but_weights_and_moments():
    plan = build_only(Settings(model="llama3.2-1B", B=1, T=256, fuse="all")).plan()
    assert plan.total_bytes < 15.45e9
    assert plan.total_bytes - plan.pool_bytes < 12 * parse_model("llama3.2-1B").n_params + 40e6


STEPS = st.tuples(st.sampled_from(["add", "add", "gelu", "norm", *"abcd"]), st.integers(0, 9), st.integers(1, 9))


@given(st.lists(STEPS, min_size=1, max_size=9), st.integers(0, 4))
@settings(max_examples=25)
def test_random_models_train_alike(plan, head):
    def forward(self, x, y):
        values = [self.a(x)]
        for kind, i, j in plan:
            one, two = values[-1 - i % len(values)], values[(-1 - i - j) % len(values)]
            if kind != "add":
                values.append(gelu(one) if kind == "gelu" else getattr(self, kind)(one))
            elif one is not two:
                values.append(one + two)
        return ce(getattr(self, "abcd"[head])(values[-1]) if head < 4 else values[-1], y)

    assert_the_same_by_all_routes(forward, steps=2)

"""Rewrites of a Llama: what each takes, the same numbers with them and without, and swaps that keep a part."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from test_fuse import INPUTS, Model, assert_alike, assert_sound, layers
from test_fuse import train as train_model

from cpuopt import Choice
from cpuopt import functional as F
from cpuopt.building import build
from cpuopt.models import parse, specs
from cpuopt.program.fuse import FUSIONS
from cpuopt.train.job import Settings, build_only

TINY, GEMMA = parse("llama-tiny"), parse("gemma2-tiny")
B, T, LAYERS = 2, 16, TINY.num_hidden_layers
LINEARS = 7 * LAYERS
BLOCKS = [f"model.layers.{i}.mlp" for i in range(LAYERS)]
ALL = tuple(FUSIONS)
EXACT = {("residual",), ("layernorm",), ("adapter",), ("gelu",), ("recompute",)}
"""What the naive kernels compute to the last bit alike; a fused gate rounds otherwise."""
CLASSIFIER = {
    **dict.fromkeys(("matmul_forward", "matmul_backward_input", "matmul_backward_weight"), -1),
    **dict.fromkeys(("cross_entropy_forward", "cross_entropy_backward"), -1),
    **dict.fromkeys(("classifier_forward", "classifier_backward"), 1),
}
TAKEN = {
    "llama-tiny": {
        "gate": {
            **dict.fromkeys(("silu_forward", "mul_forward", "silu_backward", "mul_backward"), -LAYERS),
            **dict.fromkeys(("swiglu_forward", "swiglu_backward"), LAYERS),
        },
        "residual": {"residual_backward": -2 * LAYERS},
        "layernorm": {
            **dict.fromkeys(("residual_forward", "rmsnorm_forward"), -2 * LAYERS),
            "residual_rmsnorm_forward": 2 * LAYERS,
        },
        "classifier": CLASSIFIER,
        "update": {
            **dict.fromkeys(("matmul_backward_weight", "adamw", "sumsq"), -LINEARS),
            "matmul_update": LINEARS,
        },
        "recompute": {"rmsnorm_forward": 2 * LAYERS + 1, "silu_forward": LAYERS},
    },
    "gpt2-tiny": {
        "residual": {"residual_backward": -4},
        "layernorm": {
            **dict.fromkeys(("residual_forward", "layernorm_forward"), -4),
            "residual_layernorm_forward": 4,
        },
        "gelu": {
            **dict.fromkeys(("matmul_forward", "gelu_forward", "matmul_backward_input", "gelu_backward"), -2),
            **dict.fromkeys(("matmul_gelu_forward", "matmul_gelu_backward"), 2),
        },
        "classifier": CLASSIFIER,
        "update": {"matmul_backward_weight": -8, "sumsq": -16, "adamw": -16, "matmul_update": 8},
        "recompute": {"layernorm_forward": 5, "gelu_forward": 2},
    },
}
"""How many calls of each op a rewrite alone adds or removes."""


def llama(fuse=(), swaps=(), config=TINY):
    return build(config.module(), specs(B, T), choice=Choice("vanilla", swaps), fuse=fuse)


def counts(program):
    return Counter(c.op.name for c in program.calls)


def train(fuse=(), config=TINY, **kw):
    def batch(i):
        ids = np.random.default_rng(i).integers(0, config.vocab_size, (B, T + 1))
        return {"tokens": ids[:, :-1], "targets": ids[:, 1:]}

    return train_model(config.module(), specs(B, T), batch, fuse, **kw)


@pytest.fixture(scope="module")
def plain():
    return train()


@pytest.mark.parametrize("name", FUSIONS)
@pytest.mark.parametrize("model", TAKEN)
def test_what_each_rewrite_takes(model, name):
    before, after = (llama(fuse, config=parse(model)).program for fuse in ((), (name,)))
    found = counts(after)
    found.subtract(counts(before))
    assert {op: n for op, n in found.items() if n} == TAKEN[model].get(name, {})
    if name == "classifier":  # there are never whole logits
        assert not [v for v in after.values if v.name.startswith("lm_head")]
        assert after.flops == before.flops


@pytest.mark.parametrize("fuse", [*((name,) for name in FUSIONS), ("gate", "gelu"), ALL], ids="+".join)
def test_it_trains_alike(plain, fuse):
    assert_alike(train(fuse), plain, exact=fuse in EXACT)
    program = llama(fuse).program
    assert assert_sound(program) == set(program.parameters)


def test_all_rewrites_leave_no_pass_of_their_own():
    built = llama(ALL)
    found = counts(built.program)
    assert built.notes == []
    assert found["matmul_swiglu_forward"] == found["matmul_swiglu_backward"] == LAYERS
    assert found["residual_rmsnorm_forward"] == 2 * LAYERS
    assert found["matmul_update"] == LINEARS
    assert found["classifier_update"] == found["embedding_update"] == 1
    gone = ("silu", "mul", "swiglu_backward", "residual_forward", "residual_backward", "matmul_backward_weight")
    assert not [op for op in found if op.startswith(gone)]
    again = [c.op.name for c in built.program.phase("backward") if c.op.name.endswith("_forward")]
    assert Counter(again) == {"swiglu_forward": LAYERS, "rmsnorm_forward": 2 * LAYERS}
    assert layers(built.program, "matmul_swiglu_forward") == BLOCKS
    assert layers(built.program, "matmul_swiglu_backward") == [f"{block}.down_proj" for block in reversed(BLOCKS)]


@pytest.mark.parametrize("qk_norm", [False, True])
def test_an_untied_head_and_normalized_heads_are_rewritten_too(qk_norm):
    sizes = {name: getattr(TINY, name) for name in TINY.to_json() if name != "model"}
    config = replace(type(parse("qwen3-0.6B") if qk_norm else TINY)(**sizes), tie_word_embeddings=False)
    found = counts(llama(ALL, config=config).program)
    assert found["classifier_update"] == found["embedding_backward"] == 1
    assert found["residual_rmsnorm_forward"] == 2 * LAYERS
    assert found["rmsnorm_backward"] == 2 * LAYERS + 1 + 2 * LAYERS * qk_norm


def test_the_gate_of_a_gemma_is_rewritten_as_that_of_a_llama():
    found = counts(llama(ALL, config=GEMMA).program)
    assert found["matmul_geglu_forward"] == found["matmul_geglu_backward"] == found["geglu_forward"] == LAYERS
    assert not [op for op in found if op.startswith(("gelu", "mul", "matmul_gelu", "geglu_backward"))]
    assert llama(("gate", "gelu"), config=GEMMA).program.flops == llama(config=GEMMA).program.flops
    usual = train(config=GEMMA)
    for fuse in ("gate",), ("gate", "gelu"), ALL:
        assert_alike(train(fuse, config=GEMMA), usual, exact=False)


@pytest.mark.parametrize("part", ["silu_forward", "silu_backward", "mul_forward", "mul_backward"])
def test_a_swap_of_a_part_of_the_gate_keeps_it_apart(part):
    built = llama(ALL, [f"{part}@{BLOCKS[0]}=vanilla"])
    assert layers(built.program, part) == [BLOCKS[0]] * (1 + (part == "silu_forward"))  # it is computed again
    assert layers(built.program, "matmul_swiglu_forward") == BLOCKS[1:]
    assert built.notes == [
        f"--swap '{part}@{BLOCKS[0]}=vanilla' keeps {part} in layer '{BLOCKS[0]}' from being rewritten"
    ]


@pytest.mark.parametrize(
    ("part", "kept"),
    [("swiglu_forward", "swiglu_forward"), ("swiglu_backward", "swiglu_backward"), ("rmsnorm", "residual_forward")],
)
def test_a_swap_of_a_part_of_a_fused_op_keeps_that(part, kept):
    built = llama(ALL, [f"{part}=vanilla"])
    assert counts(built.program)[kept] >= LAYERS
    assert all(f"--swap '{part}=vanilla' keeps " in note for note in built.notes)
    assert built.notes


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
    model = Model(lambda m, x, y: F.cross_entropy(made(m, x), y))
    for fuse, op in ((("gate",), "swiglu_forward"), (("gate", "gelu"), "matmul_swiglu_forward")):
        found = counts(build(model, INPUTS, fuse=fuse, choice=Choice("vanilla")).program)
        assert (found[op], found["silu_forward"], found["mul_forward"]) == (taken, 1 - taken, 1 - taken)
    assert build(model, INPUTS, fuse=ALL, choice=Choice("optimized")).program.adjoint


def test_a_step_of_a_billion_parameters_needs_little_but_weights_and_moments():
    plan = build_only(Settings(model="llama3.2-1B", B=1, T=256, fuse="all")).plan()
    assert plan.total_bytes < 15.45e9
    assert plan.total_bytes - plan.pool_bytes < 12 * parse("llama3.2-1B").n_params + 40e6

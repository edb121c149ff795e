"""Rewrites of a Llama: what each takes, the same numbers with them and without, and swaps that keep a part."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from test_fuse import assert_alike, assert_sound, layers
from test_fuse import train as train_model

from cpuopt import Choice, nn
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
TAKEN = {
    "gate": {
        **dict.fromkeys(("silu_forward", "mul_forward", "silu_backward", "mul_backward"), -LAYERS),
        **dict.fromkeys(("swiglu_forward", "swiglu_backward"), LAYERS),
    },
    "residual": {"residual_backward": -2 * LAYERS},
    "layernorm": {
        **dict.fromkeys(("residual_forward", "rmsnorm_forward"), -2 * LAYERS),
        "residual_rmsnorm_forward": 2 * LAYERS,
    },
    "adapter": {},  # a model has none but by --lora
    "gelu": {},  # SiLU alone has no op that fuses it with a product
    "classifier": {
        **dict.fromkeys(("matmul_forward", "matmul_backward_input", "matmul_backward_weight"), -1),
        **dict.fromkeys(("cross_entropy_forward", "cross_entropy_backward"), -1),
        **dict.fromkeys(("classifier_forward", "classifier_backward"), 1),
    },
    "update": {
        **dict.fromkeys(("matmul_backward_weight", "adamw", "sumsq"), -LINEARS),
        "matmul_update": LINEARS,
    },
    "recompute": {"rmsnorm_forward": 2 * LAYERS + 1, "silu_forward": LAYERS},
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
def test_what_each_rewrite_takes(name):
    before, after = counts(llama().program), counts(llama((name,)).program)
    assert {op: after[op] - before[op] for op in before | after if after[op] != before[op]} == TAKEN[name]


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


def test_what_is_partly_fused_trains_alike(plain):
    assert_alike(train(ALL, swaps=[f"silu_backward@{BLOCKS[1]}=vanilla"]), plain, exact=False)


def test_the_gate_may_stand_on_either_side():
    class Gated(nn.Module):
        def __init__(self, swapped):
            self.a, self.b, self.swapped = nn.Linear(6, 6), nn.Linear(6, 6), swapped

        def forward(self, x, y):
            gate, up = F.silu(self.a(x)), self.b(x)
            return F.cross_entropy(up * gate if self.swapped else gate * up, y)

    inputs = {"x": ((8, 6), "float32"), "y": ((8,), "int32")}
    for fuse, op in (("gate",), "swiglu_forward"), (("gate", "gelu"), "matmul_swiglu_forward"):
        usual, swapped = (build(Gated(s), inputs, fuse=fuse, choice=Choice("vanilla")) for s in (False, True))
        assert str(swapped.program) == str(usual.program)
        assert counts(swapped.program)[op] == 1


def test_a_gate_whose_activation_is_used_twice_stays():
    class Twice(nn.Module):
        def __init__(self):
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x, y):
            s = F.silu(self.a(x))
            return F.cross_entropy(s * self.b(x) + s, y)

    inputs = {"x": ((8, 6), "float32"), "y": ((8,), "int32")}
    built = build(Twice(), inputs, fuse=("gate",), choice=Choice("vanilla"))
    assert counts(built.program)["silu_forward"] == counts(built.program)["mul_forward"] == 1


@pytest.mark.parametrize("expression", [lambda a: F.silu(a) * a, lambda a: a * F.silu(a)], ids=["s*a", "a*s"])
def test_an_activation_that_gates_its_own_operand_stays(expression):
    class Own(nn.Module):
        def __init__(self):
            self.a = nn.Linear(6, 6)

        def forward(self, x, y):
            return F.cross_entropy(expression(self.a(x)), y)

    inputs = {"x": ((8, 6), "float32"), "y": ((8,), "int32")}
    built = build(Own(), inputs, fuse=("gate",), choice=Choice("vanilla"))
    assert counts(built.program)["silu_forward"] == counts(built.program)["mul_forward"] == 1
    assert build(Own(), inputs, fuse=ALL, choice=Choice("optimized")).program.adjoint


@pytest.mark.parametrize("name", ["smollm2-135M", "qwen3-0.6B", "tinyllama-1.1B", "llama3.2-1B"])
def test_every_preset_is_planned_with_all_rewrites(name):
    built = build_only(Settings(model=name, B=1, T=64, fuse="all"))
    config, ops = parse(name), {call.op.name for call in built.program.calls}
    plan = built.plan()
    assert plan.groups["parameter"] == 4 * config.n_params
    assert plan.groups["moment"] == 8 * config.n_params
    assert {"matmul_swiglu_forward", "residual_rmsnorm_forward", "matmul_update", "classifier_update"} <= ops
    assert not {"silu_forward", "mul_forward", "cross_entropy_forward"} & ops


def test_a_step_of_a_billion_parameters_needs_little_but_weights_and_moments():
    plan = build_only(Settings(model="llama3.2-1B", B=1, T=256, fuse="all")).plan()
    assert plan.total_bytes < 15.45e9
    assert plan.total_bytes - plan.pool_bytes < 12 * parse("llama3.2-1B").n_params + 40e6

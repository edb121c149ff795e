"""Rewrites: the same numbers with them and without, on GPT-2 and random models; what they take, and what they leave."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpuopt import Choice, Engine, nn
from cpuopt import functional as F
from cpuopt.engine import build
from cpuopt.errors import UserError
from cpuopt.fuse import FUSIONS, parse
from cpuopt.job import Settings, fusions, specs
from cpuopt.models.gpt2 import GPT2, PRESETS

TINY = PRESETS["gpt2-tiny"]
B, T = 2, 16
PARTS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
LINEARS = {f"h.{i}.{part}" for i in range(2) for part in PARTS}
SETS = [("residual",), ("update",), ("residual", "update")]
ADAMW = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
"""An eps far above rounding: AdamW divides a gradient that should be zero, such as that of a key's bias, by itself."""


def gpt2(fuse=(), swaps=()):
    return build(GPT2(TINY), specs(B, T), choice=Choice("vanilla", swaps), fuse=fuse)


def layers(program, *ops):
    return [c.layer for c in program.calls if c.op.name in ops]


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
    """Each weight is updated once, after its last use, and its gradient is counted once."""
    program.verify()
    updated = {}
    for i, call in enumerate(program.calls):
        for v in call.reads:
            assert v not in updated, f"call {i} reads {v}, which call {updated.get(v)} has updated"
        for v in call.writes:
            if v in program.parameters:
                assert v not in updated, f"{v} is updated twice"
                updated[v] = i
    sums = [v for call in program.calls for v in call.writes if v.name.endswith(".sumsq")]
    assert len(sums) == len(set(sums))
    assert set(sums) == {v for v in program.outputs if v.name.endswith(".sumsq")}
    return set(updated)


# GPT-2


@pytest.fixture(scope="module")
def plain():
    return train_gpt2()


@pytest.mark.parametrize("fuse", SETS)
def test_gpt2_trains_alike(plain, fuse):
    assert_alike(train_gpt2(fuse), plain, exact=fuse == ("residual",))


@pytest.mark.parametrize("fuse", SETS)
def test_every_weight_is_updated_once_after_its_last_use(fuse):
    program = gpt2(fuse).program
    assert assert_sound(program) == set(program.parameters)


def test_residual_shares_every_gradient_of_gpt2s_stream():
    assert len(layers(gpt2().program, "residual_backward")) == 4
    for fuse in (("residual",), ("residual", "update")):
        assert layers(gpt2(fuse).program, "residual_backward") == []
    assert len(layers(gpt2(("residual",)).program, "matmul_backward_weight")) == 9


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
    assert set(built.notes) == {
        f"--swap '{swap}' keeps {part} in layer '{layer}' from being rewritten" for layer in kept
    }
    assert len(built.notes) == len(kept)
    ran = {(c.op.name, c.layer): k.variant for c, k in zip(built.program.calls, built.kernels, strict=True)}
    wanted = "blas" if "blas" in swap else "vanilla"
    assert {ran[part, layer] for layer in kept} == ({wanted} if kept else set())
    assert assert_sound(built.program) == set(built.program.parameters)


def test_what_is_partly_fused_trains_alike_and_says_so(plain):
    swaps = ["adamw@h.0.mlp.*=vanilla", "sumsq@h.1.attn.*=vanilla"]
    assert_alike(train_gpt2(("residual", "update"), swaps=swaps), plain, exact=False)
    engine = Engine(GPT2(TINY), specs(B, T), choice=Choice("vanilla", swaps), fuse=("update",))
    assert len(engine.notes) == 4
    assert engine.notes[-1] == (
        "--swap 'adamw@h.0.mlp.*=vanilla' keeps adamw in layer 'h.0.mlp.c_fc' from being rewritten"
    )
    assert gpt2((), swaps).notes == []


def test_a_swap_of_the_residuals_backward_keeps_it():
    built = gpt2(("residual",), ["residual_backward@h.0=vanilla"])
    assert layers(built.program, "residual_backward") == ["h.0", "h.0"]


# Names and clipping


def test_names():
    assert parse("all") == tuple(FUSIONS) == ("residual", "update")
    assert parse("none") == ()
    assert parse("update") == ("update",)
    with pytest.raises(UserError, match=r"^--fuse 'updat': no such rewrite; did you mean 'update'\?$"):
        gpt2(("residual", "updat"))
    assert fusions(Settings(variant="vanilla")) == ()
    assert fusions(Settings(variant="optimized")) == ("residual", "update")
    assert fusions(Settings(variant="optimized", clip=1.0)) == ("residual",)
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


def assert_the_same_by_all_routes(forward, steps=3, inputs=INPUTS, batch=batch, **parts):
    """Train with and without each rewrite; give the program with all of them."""
    plain = train(Model(forward, **parts), inputs, batch, steps=steps)
    for fuse in SETS:
        assert_alike(train(Model(forward, **parts), inputs, batch, fuse, steps=steps), plain, fuse == ("residual",))
    program = build(Model(forward, **parts), inputs, fuse=("residual", "update")).program
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


def test_a_gradient_that_is_only_added_to_last_is_shared():
    def stream(self, x, y):
        h = self.a(x)
        h = h + self.b(self.norm(h))
        return F.cross_entropy(h + F.gelu(F.gelu(h)), y)

    assert layers(assert_the_same_by_all_routes(stream), "residual_backward") == []


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

    assert len(layers(assert_the_same_by_all_routes(bare), "matmul_update")) == 2


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

"""Ops that the package does not have, with a role and fused ops: the rewrites take them as they are declared.

An activation whose backward needs its result alone (ReLU), and an op that makes a weight's gradient. The kernels of the
first are its references. Gates and normalizations of the package are in test_fuse.py.
"""

import numpy as np
import pytest
from references import by_reference
from test_fuse import INPUTS, assert_the_same_by_all_routes, count, layers, model_of
from test_fuse import batch as class_batch

from cpuopt import Choice, nn, ops
from cpuopt import functional as F
from cpuopt.building import build
from cpuopt.engine import Engine
from cpuopt.kernels import registry
from cpuopt.kernels.compile import jit
from cpuopt.kernels.toolkit.rules import stepped
from cpuopt.nn.trace import current
from cpuopt.ops.declaration import BT, OC, C, N, Op, Updates, acc, inp, out
from cpuopt.program.fuse.edit import Draft, Match


def declare(name, *args, reference, **kw):
    return Op(name, *args, label=name, flops=1 * args[0].shape[0], reference=reference, source="test", **kw)


BIAS = inp("bias", OC, optional=True)


def linear(inp, weight, bias=None):
    return inp @ weight.T + (0 if bias is None else bias)


product = ops.matmul_forward
relu_forward = declare(
    "relu_forward", out("out", N), inp("inp", N), role="activation", reference=lambda inp: {"out": np.maximum(inp, 0)}
)
relu_backward = declare(
    "relu_backward",
    *(acc("dinp", N), inp("dout", N), inp("out", N)),
    inverts=relu_forward,
    reference=lambda dout, out: {"dinp": dout * (out > 0)},
)
matmul_relu_forward = declare(
    "matmul_relu_forward",
    *(out("out", BT, OC), inp("inp", BT, C), inp("weight", OC, C), BIAS),
    fuses=(product, relu_forward),
    reference=lambda inp, weight, bias: {"out": np.maximum(linear(inp, weight, bias), 0)},
)
matmul_relu_backward = declare(
    "matmul_relu_backward",
    *(out("dpre", BT, C), inp("dout", BT, OC), inp("weight", OC, C), inp("act", BT, C)),
    fuses=(ops.matmul_backward_input, relu_backward),
    renames={"dinp": "dpre", "out": "act"},
    reference=lambda dout, weight, act: {"dpre": (dout @ weight) * (act > 0)},
)
PLANTED = [op for op in list(vars().values()) if isinstance(op, Op) and op.source == "test"]


@pytest.fixture(autouse=True)
def planted(monkeypatch):
    for op in PLANTED:
        monkeypatch.setitem(ops.ALL, op.name, op)
        kernel = registry.Kernel(op, "vanilla", by_reference(op), where=__file__)
        monkeypatch.setitem(registry.KERNELS, (op.name, "vanilla"), kernel)


def emit(op, **args):
    return current().emit(op, args)


def everything(forward):
    return assert_the_same_by_all_routes(forward, exact=())


def test_a_product_that_is_not_kept_goes_away():
    relu = lambda x: emit(relu_forward, inp=x)  # noqa: E731
    program = everything(lambda m, x, y: F.cross_entropy(m.c(relu(m.b(relu(m.a(x))))), y))
    assert layers(program, "matmul_relu_forward") == ["a", "b"]
    assert layers(program, "matmul_relu_backward") == ["c", "b"]
    assert not [v for v in program.values if v.name in ("a.matmul.out", "b.matmul.out")]
    assert not layers(program, "relu_forward")  # it cannot be made again from what is kept


def test_a_product_that_the_model_returns_is_kept():
    program = everything(lambda m, x, y: (F.cross_entropy(m.b(emit(relu_forward, inp=(pre := m.a(x)))), y), pre))
    assert "relu_forward" in [c.op.name for c in program.phase("forward")]
    assert [v.name for v in program.outputs] == ["model.cross_entropy.loss", "a.matmul.out"]


@pytest.mark.parametrize(
    ("renames", "fits"),
    [
        ({"inp": "pre", "weight": "slope"}, True),
        ({"inp": "pre"}, False),  # one name for the weights of both
        ({"inp": "pre", "weight": "angle"}, False),
    ],
)
def test_each_argument_has_a_place_of_its_own(renames, fits):
    prelu = declare(
        "prelu_forward", out("out", BT, C), inp("inp", BT, C), inp("weight", C), role="activation", reference=None
    )
    fused = declare(
        "matmul_prelu_forward",
        *(out("out", BT, OC), out("pre", BT, OC), inp("inp", BT, C), inp("weight", OC, C), inp("bias", OC)),
        inp("slope", OC),
        fuses=(product, prelu),
        renames=renames,
        reference=None,
    )
    model = model_of(lambda self, x, y: F.cross_entropy(emit(prelu, inp=self.a(x), weight=self.norm.weight), y))
    program = nn.trace_model(model, INPUTS)
    match = Match.of(*program.calls[:2], at=0)
    assert match.op is fused
    assert match.holds(Draft(program)) is fits


twice_forward = declare(
    "twice_forward",
    *(out("out", BT, OC), inp("inp", BT, C), inp("weight", OC, C)),
    reference=lambda inp, weight: {"out": 2 * inp @ weight.T},
)
twice_backward = declare(
    "twice_backward",
    *(acc("dinp", BT, C), acc("dweight", OC, C, reduces=BT), inp("dout", BT, OC), inp("inp", BT, C)),
    inp("weight", OC, C),
    inverts=twice_forward,
    reference=lambda dout, inp, weight: {"dinp": 2 * dout @ weight, "dweight": 2 * dout.T @ inp},
    updates=Updates("twice_update", ("dweight",)),
)


@pytest.fixture
def twice(monkeypatch):
    """Kernels of an op that makes a weight's gradient; nothing here knows an optimizer."""

    @jit.kernel(twice_forward, "vanilla", parallel=False)
    def forward(out, inp, weight):
        for o in range(weight.shape[0]):
            for bt in range(inp.shape[0]):
                out[bt, o] = 0
                for i in range(inp.shape[1]):
                    out[bt, o] += np.float32(2) * inp[bt, i] * weight[o, i]

    @stepped
    @jit.kernel(twice_backward, "vanilla", parallel=False)
    def backward(dinp, dinp_add, dweight, dweight_add, dout, inp, weight):
        for bt in range(inp.shape[0]):
            for i in range(inp.shape[1]):
                dinp[bt, i] = dinp[bt, i] if dinp_add else 0
                for o in range(weight.shape[0]):
                    dinp[bt, i] += np.float32(2) * dout[bt, o] * weight[o, i]
        for o in range(weight.shape[0]):
            for i in range(inp.shape[1]):
                dweight[o, i] = dweight[o, i] if dweight_add else 0
                for bt in range(inp.shape[0]):
                    dweight[o, i] += np.float32(2) * dout[bt, o] * inp[bt, i]

    for name, op in {op.name: op for op in (twice_forward, twice_backward, *twice_backward.fusions)}.items():
        monkeypatch.setitem(ops.ALL, name, op)


def twice_of(x, weight):
    return emit(twice_forward, inp=x, weight=weight)


EVERY = [pytest.param(name, marks=[pytest.mark.slow] * (name != ops.USUAL)) for name in ops.OPTIMIZERS]


@pytest.mark.parametrize("optimizer", EVERY)
def test_an_op_that_makes_a_weights_gradient_takes_every_optimizers_step(twice, optimizer):
    def trained(fuse):
        model = model_of(lambda m, x, y: F.cross_entropy(twice_of(twice_of(m.a(x), m.b.weight), m.c.weight), y))
        engine = Engine.from_options(model, INPUTS, choice=Choice("vanilla"), fuse=fuse, optimizer=optimizer, threads=1)
        return engine, [engine.step(lr=0.01, **class_batch(i)).loss for i in range(4)]

    (fused, losses), (plain, want) = trained(("update",)), trained(())
    name = "twice_update" if optimizer == ops.USUAL else f"twice_update_{optimizer}"
    assert layers(fused.program, name) == ["model", "model"]
    np.testing.assert_allclose(losses, want, rtol=1e-6)
    for n, p in plain.parameters().items():
        np.testing.assert_allclose(fused.parameters()[n], p, rtol=1e-5, atol=1e-7)


def test_a_gradient_that_something_else_reads_is_stored(twice):
    shared = model_of(lambda m, x, y: F.cross_entropy(twice_of(twice_of(m.a(x), m.b.weight), m.b.weight), y))
    program = build(shared, INPUTS, fuse=("update",)).program
    assert not layers(program, "twice_update")
    assert count(program, "twice_backward") == 2

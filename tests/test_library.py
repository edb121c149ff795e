"""What `import cpuopt` offers: an engine with the command line's defaults, whose results show what the verbs print."""

import numpy as np
import pytest
from verbs import fails

import cpuopt
from cpuopt import Choice, Engine, models, nn
from cpuopt import functional as F
from cpuopt.report import rendered, tables
from cpuopt.weights.tensors import TensorFile

B = 6
INPUTS, RNG = {"x": ((B, 4), "float32"), "y": ((B,), "int32")}, np.random.default_rng(0)
BATCH = {"x": RNG.normal(size=(B, 4)), "y": RNG.integers(0, 3, B)}


class Net(nn.Module):
    def __init__(self, out=3):
        self.fc, self.out, self.loss = nn.Linear(4, 8), nn.Linear(8, out), nn.CrossEntropyLoss()

    def forward(self, x, y):
        return self.loss(self.out(F.gelu(self.fc(x))), y)


def made(out=3, **how):
    return Engine(Net(out), INPUTS, threads=1, **how)


@pytest.fixture(scope="module")
def engine():
    found = made()
    found.step(**BATCH)
    return found


def called(engine):
    return {c.op.name for c in engine.program.calls}


def test_the_defaults_are_those_of_the_command_line(engine):
    assert {k.variant for k in engine.kernels} == {"optimized"}
    assert {"matmul_gelu_forward", "matmul_update"} <= called(engine)
    assert called(cpuopt.build(Net(), INPUTS)) == called(engine)
    losses = [[e.step(**BATCH, lr=0.05).loss for _ in range(5)] for e in (made(), made(variant="vanilla"))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.parametrize(
    ("how", "variants", "fused"),
    [
        *(({"variant": variant}, {"vanilla"}, False) for variant in ("vanilla", Choice("vanilla"))),
        ({"variant": "vanilla", "fuse": "all"}, {"vanilla"}, True),
        ({"fuse": "none"}, {"optimized"}, False),
        ({"fuse": ["update"], "swap": ["gelu_forward=vanilla"]}, {"optimized", "vanilla"}, True),
    ],
)
def test_kernels_and_rewrites_are_chosen_by_name(how, variants, fused):
    built = cpuopt.build(Net(), INPUTS, **how)
    assert ({k.variant for k in built.kernels}, "matmul_update" in called(built)) == (variants, fused)


def test_gradients_are_kept_where_they_are_asked_for(engine):
    fails("gradients=True", engine.gradients)
    fails("gradients=True", engine.step, **BATCH, clip=1.0)
    kept = made(gradients=True)
    kept.step(**BATCH, clip=1.0)
    assert kept.gradients().keys() == kept.parameters().keys()
    assert "matmul_gelu_forward" in called(kept)


def test_weights_are_saved_and_loaded(engine, tmp_path):
    file = tmp_path / "net.safetensors"
    engine.save_weights(file)
    other = made(seed=1)
    assert other.forward(**BATCH) != engine.forward(**BATCH)
    other.load_weights(str(file))
    assert other.forward(**BATCH) == engine.forward(**BATCH)
    assert TensorFile(file).tensors.keys() == engine.parameters().keys()
    fails("it is there already; overwrite=True replaces it", other.save_weights, file)
    other.save_weights(file, overwrite=True)
    wide = made(out=2, seed=2)
    before = wide.parameters()["fc.weight"].copy()
    fails(r"'out.weight' has the shape \(3, 8\); expected \(2, 8\)", wide.load_weights, file)
    assert (wide.parameters()["fc.weight"] == before).all()
    fails(r"ends in \.safetensors", engine.save_weights, tmp_path / "net.bin")
    for model, why in ((Spare(), "'spare' is missing"), (Less(), "'out.bias' is no parameter")):
        fails(why, Engine(model, INPUTS, threads=1, train=False).load_weights, file)


class Spare(Net):
    def __init__(self):
        super().__init__()
        self.spare = nn.Parameter((3,), nn.modules.constant(0))


class Less(Net):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(8, 3, bias=False)


def test_a_profile_shows_what_the_verb_prints_and_changes_nothing(engine, tmp_path):
    before = {name: x.copy() for name, x in engine.parameters().items()}
    loss, number = engine.forward(**BATCH), engine.step_number
    report = engine.profile(steps=3, roofs=False)
    assert all((x == before[name]).all() for name, x in engine.parameters().items())
    assert (engine.forward(**BATCH), engine.step_number) == (loss, number)
    profile = report.profile
    assert (profile.model, profile.B, profile.steps, profile.variant) == ("Net", B, 3, "optimized")
    assert {c["status"] for c in profile.checked} <= {"right", "marginal"}
    text = str(report)
    assert text == rendered.as_text(tables.profile_tables(profile)) == repr(report)
    assert text.startswith("Net · B 6 · T 1 · 1 thread")
    assert max(map(len, text.splitlines())) <= 80
    html = report._repr_html_()
    assert (html[:4], "matmul_gelu_forward" in html) == ("<pre", True)
    profile.model = "<script>"
    assert "<script>" not in report._repr_html_()
    report.write_html(tmp_path / "page.html")
    assert "&lt;script&gt;" in (tmp_path / "page.html").read_text()
    fails("built with train=False", Engine(Net(), INPUTS, threads=1, train=False).profile)


def test_kernels_are_compared_alone_and_in_the_step(engine):
    before = {name: x.copy() for name, x in engine.parameters().items()}
    alone = engine.ab("gelu_forward", "vanilla", "vanilla", rounds=6)  # which only the program without rewrites calls
    assert alone.record["results"][0]["cases"][0]["sizes"] == {"N": 8 * B}
    assert str(alone).startswith("gelu_forward: vanilla against vanilla, alone · Net · layers *")
    step = engine.ab("gelu_forward", "vanilla", "optimized", in_step=True, rounds=6, lr=0.1)
    (result,) = step.record["results"]
    assert result["losses"]["A"] == pytest.approx(result["losses"]["B"], rel=1e-4)
    assert result["losses"]["A"][-1] < result["losses"]["A"][0]
    assert result["step"]["ratio"]["median"] > 0
    assert step.verdict in str(step)
    assert all((x == before[name]).all() for name, x in engine.parameters().items())
    for asked, why in (
        (("gelu_forwards", "vanilla", "optimized"), "no such op; did you mean 'gelu_forward'"),
        (("gelu_forward", "vanilla", "optimised"), "no variant 'optimised'"),
        (("attention_forward", "vanilla", "optimized"), "Net does not call it"),
    ):
        fails(why, engine.ab, *asked, rounds=6)


def test_two_functions_are_compared():
    now, rng = [0.0], np.random.default_rng(0)

    def quick(ms):
        now[0] += ms / 1e3 * rng.uniform(0.99, 1.01)

    def slow(ms):
        quick(1.5 * ms)

    def compared(a, b, **more):
        return cpuopt.compare(a, b, 2, clock=lambda: now[0], **more)

    found = compared(quick, slow)
    assert (found.verdict, found.ratio["median"]) == ("slower", pytest.approx(1.5, rel=0.02))
    assert found.record["results"][0]["a_ms"] == pytest.approx(2, rel=0.02)
    assert "verdict: slower, by 50." in str(found) or "verdict: slower, by 49." in str(found)
    assert {"quick", "slow"} <= set(str(found).split())
    assert found._repr_html_().startswith("<pre")
    assert (compared(slow, quick).verdict, compared(quick, quick).verdict) == ("faster", "no difference shown")
    fails("expected 6 or more", compared, quick, slow, rounds=3)
    fails("compare: 'slow' is no function", compared, quick, "slow")


def built(**how):
    return cpuopt.build(Net(), INPUTS, **how)


def of(inputs):
    return Engine(Net(), inputs)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Engine(Net(), INPUTS, thread=2), r"Engine\(thread=...\): no such keyword; did you mean 'threads'\?$"),
        (lambda: built(optimiser="sgd"), r"build\(optimiser=...\): no such keyword; did you mean 'optimizer'\?$"),
        (lambda: built(variant=Choice("vanilla"), swap=["gelu=vanilla"]), ".*give the rules to the Choice"),
        (lambda: built(variant="optimised"), ".*did you mean 'optimized'"),
        (lambda: Engine(Net, INPUTS), r".*the model is the class Net; expected a module: Net\(...\)"),
        (lambda: Engine(None, INPUTS), "Engine: the model is a NoneType; expected an nn.Module"),
        (lambda: of({"x": (4, 2)}), r".*input 'x' is \(4, 2\); expected shape and dtype"),
        (lambda: of([1]), r"inputs \[1\]: expected them by name, as in "),
        (lambda: of({"x": ((0, 4), "float32")}), r"input 'x' has shape \(0, 4\); expected whole numbers of 1"),
        *((lambda n=n: made(micro_batches=n), f"micro_batches {n!r}: expected 1 or more") for n in (0, "2")),
        (lambda: made(fuse=True), "fuse True: expected 'auto', 'all', 'none', or names"),
        (lambda: made(fuse="geluu"), "fuse 'geluu': no such rewrite; did you mean 'gelu'"),
        (lambda: Engine(Net(), INPUTS, threads="2"), "threads = '2': expected 1 to "),
        (lambda: Choice("optimized", "gelu=blas"), ".*swaps 'gelu=blas': expected a list of rules"),
        (lambda: Choice(None), ".*variant None: expected the name of one; known: "),
        (lambda: Choice("fast"), "variant 'fast': no kernel is registered under it; known: "),
        (lambda: nn.Linear(4, 4, biass=True), r"Linear\(biass=...\): no such keyword; did you mean 'bias'\?; expected"),
        (lambda: nn.Linear(4), r"Linear: missing a required argument: 'out_features'; expected Linear\(in_features"),
        (lambda: nn.GELU(True), r"GELU: too many positional arguments; expected GELU\(\)$"),
        (lambda: Net(width=3), r"Net\(width=...\): no such keyword; expected Net\(out=3\)$"),
        (lambda: nn.Linear(0, 3), "Linear: size 0; expected a whole number of 1 or more"),
        (lambda: nn.Embedding(10, 2.5), "Parameter: size 2.5; expected a whole number of 1 or more"),
        (lambda: models.load("gpt3"), "models.load: 'gpt3': no such preset; did you mean 'gpt2-355M'"),
        (lambda: models.load('{"n_layr": 3}'), "models.load: unknown size 'n_layr'; known: n_layer"),
        (lambda: models.load(3), "models.load: 3: expected text, such as 'gpt2-124M'$"),
        (lambda: made().profile(steps="5"), "profile: steps '5', warmup 1; expected 1 or more"),
        (lambda: cpuopt.check_gradient("gelu"), "check_gradient: 'gelu' is no op"),
    ],
)
def test_a_mistake_is_one_line(wrong, message):
    fails(f"^{message}", wrong)
